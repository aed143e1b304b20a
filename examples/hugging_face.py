"""Somebody else's models on several ranks: a Llama and a GPT-2 of Hugging Face, built from configs, nothing downloaded.

Run with `python examples/hugging_face.py`: four simulated ranks, then what they gave beside one process. `pip install
transformers` first. The functions below know the names of parameters and modules; all else is the models' own code.
"""

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.layout import chunk
from shardwise.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, first_input, parallelize_module
from shardwise.testing import world

os.environ.setdefault("HF_HUB_OFFLINE", "1")
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

WHOLE = sw.Replicate()


def cut(dim: int, units: int, size: int, ranks: int) -> sw.Shard:
    """A dim of `units` heads of `size` features: every rank gets whole heads, some maybe more than others."""
    return sw.Shard(dim, [size * n for n in chunk(units, ranks)])


def groups_of(config: Any, ranks: int) -> tuple[int, int, bool]:
    """How the query heads of a Llama are cut: in so many groups, of so many features, and whether keys are cut too.

    Heads that share keys stay together, so that no key travels. With fewer keys than ranks, every rank has all of them.
    """
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    if shared >= ranks:
        return shared, heads // shared * config.head_dim, True
    return heads, config.head_dim, False


def whole(x: Tensor) -> Tensor:
    """The whole of a tensor that may be spread over the ranks."""
    return x.full_tensor() if isinstance(x, sw.DTensor) else x


# ---- by layouts of parameters -----------------------------------------------------------------------------------


def llama_layouts(config: Any, ranks: int) -> dict[str, sw.Placement]:
    """For `shard_module`. Heads and hidden features are cut, and the vocabulary; norms are on all ranks."""
    groups, size, keys_too = groups_of(config, ranks)
    keys = cut(0, config.num_key_value_heads, config.head_dim, ranks) if keys_too else WHOLE
    return {
        "model.embed_tokens.weight": sw.Shard(0),
        "*.q_proj.*": cut(0, groups, size, ranks),
        "*.[kv]_proj.*": keys,
        "*.o_proj.weight": cut(1, groups, size, ranks),
        "*.gate_proj.weight": sw.Shard(0),
        "*.up_proj.weight": sw.Shard(0),
        "*.down_proj.weight": sw.Shard(1),
        "lm_head.weight": sw.Shard(0),
    }


def gpt2_layouts(config: Any, ranks: int) -> dict[str, sw.Placement]:
    """For `shard_module`, after `heads_apart`. The weights of Conv1D have inputs first: dim 1 is what comes out."""
    size = config.n_embd // config.n_head
    return {
        "transformer.wte.weight": sw.Shard(0),
        "lm_head.weight": sw.Shard(0),  # the same parameter
        "*.c_attn.*.weight": cut(1, config.n_head, size, ranks),
        "*.c_attn.*.bias": cut(0, config.n_head, size, ranks),
        "*.attn.c_proj.weight": cut(0, config.n_head, size, ranks),
        "*.mlp.c_fc.weight": sw.Shard(1),
        "*.mlp.c_fc.bias": sw.Shard(0),
        "*.mlp.c_proj.weight": sw.Shard(0),
    }


# ---- GPT-2's queries, keys and values in one weight -----------------------------------------------------------------

PARTS = ("query", "key", "value")


class Parts(tuple[Tensor, ...]):
    """Queries, keys and values, apart already."""

    __slots__ = ()

    def split(self, size: int, dim: int = 0) -> "Parts":
        """What the model asks of the output of `c_attn`."""
        return self


class HeadsApart(nn.Module):
    """`c_attn` as three layers: its one weight holds queries, keys and values side by side, and no cut is at heads."""

    def __init__(self, fused: Any) -> None:
        super().__init__()
        for name, weight, bias in zip(PARTS, fused.weight.chunk(3, 1), fused.bias.chunk(3), strict=True):
            part = type(fused)(weight.shape[1], weight.shape[0])  # a Conv1D
            part.weight, part.bias = (nn.Parameter(x.detach().clone()) for x in (weight, bias))
            self.add_module(name, part)
        self.register_load_state_dict_pre_hook(_take_apart)

    def forward(self, x: Tensor) -> Parts:
        return Parts(self.get_submodule(name)(x) for name in PARTS)


def _take_apart(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let checkpoints of the plain model be loaded."""
    for name in ("weight", "bias"):
        if (fused := state.pop(prefix + name, None)) is not None:
            state |= {f"{prefix}{part}.{name}": x for part, x in zip(PARTS, fused.chunk(3, -1), strict=True)}


def put_together(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors under the names of the plain model: what `save_pretrained(folder, state_dict=...)` takes."""
    found = {name: whole(x) for name, x in named.items()}
    for name in [name for name in found if ".query." in name]:
        parts = [found.pop(name.replace(".query.", f".{part}.")) for part in PARTS]
        found[name.replace(".query.", ".")] = torch.cat(parts, -1)
    return found


def heads_apart(model: Any) -> Any:
    """A GPT-2 whose heads can be cut, in place. Compute and results stay those of the plain model."""
    for block in model.transformer.h:
        block.attn.c_attn = HeadsApart(block.attn.c_attn)
    return model


FUSED: dict[str, dict[str, sw.Placement]] = {
    "whole": {},
    "by columns": {"*.c_attn.weight": sw.Shard(1), "*.c_attn.bias": sw.Shard(0)},
    "by rows": {"*.c_attn.weight": sw.Shard(0)},
}


def with_fused_weight(model: Any, layout: str, ranks: int) -> Any:
    """A GPT-2 with `c_attn` "whole", "by columns" or "by rows" as it is, or "apart", to see what each costs."""
    plan = gpt2_layouts(model.config, ranks)
    if layout == "apart":
        return sw.shard_module(heads_apart(model), plan)
    others = {name: placement for name, placement in plan.items() if "c_attn" not in name}
    return sw.shard_module(model, others | FUSED[layout])


# ---- by styles: each layer also says where its result goes ---------------------------------------------------------


@dataclass(frozen=True)
class Everywhere(ParallelStyle):
    """A layer that every rank computes whole."""

    def parameters(self, module: nn.Module, context: Any) -> dict[str, Any]:
        return {"weight": WHOLE}

    def input_fn(self, module: nn.Module, context: Any) -> Any:
        return first_input(module, context.redistribution(WHOLE, WHOLE))


@dataclass(frozen=True)
class ByConv1D(ParallelStyle):
    """GPT-2's layers, cut by what comes out (dim 1 of the weight) or by what is summed over (dim 0)."""

    dim: int
    unit: int = 1

    def parameters(self, module: nn.Module, context: Any) -> dict[str, Any]:
        weight = module.get_parameter("weight")
        sizes = cut(self.dim, weight.shape[self.dim] // self.unit, self.unit, context.axis_size).sizes
        return {"weight": sw.Shard(self.dim, sizes), "bias": sw.Shard(0, sizes) if self.dim else WHOLE}

    def input_fn(self, module: nn.Module, context: Any) -> Any:
        sizes = self.parameters(module, context)["weight"].sizes
        wanted = WHOLE if self.dim else sw.Shard(-1, sizes)
        return first_input(module, context.redistribution(wanted, wanted))

    def output_fn(self, module: nn.Module, context: Any) -> Any:
        return None if self.dim else context.redistribution(None, WHOLE, use_local_output=True, what="the output")


def llama_styles(config: Any, ranks: int) -> dict[str, ParallelStyle]:
    """For `parallelize_module`. Sums are added once, where a layer ends; between layers tensors are plain and whole."""
    _, size, keys_too = groups_of(config, ranks)
    keys: ParallelStyle = ColwiseParallel(unit=config.head_dim, use_local_output=False) if keys_too else Everywhere()
    return {
        "model.embed_tokens": RowwiseParallel(),
        "model.layers.*.self_attn.q_proj": ColwiseParallel(unit=size, use_local_output=False),
        "model.layers.*.self_attn.[kv]_proj": keys,
        "model.layers.*.self_attn.o_proj": RowwiseParallel(unit=size),
        "model.layers.*.mlp.gate_proj": ColwiseParallel(use_local_output=False),
        "model.layers.*.mlp.up_proj": ColwiseParallel(use_local_output=False),
        "model.layers.*.mlp.down_proj": RowwiseParallel(),
        "lm_head": ColwiseParallel(output_layouts=WHOLE),
    }


def gpt2_styles(config: Any, ranks: int) -> dict[str, ParallelStyle]:
    """For `parallelize_module`, after `heads_apart`."""
    size = config.n_embd // config.n_head
    return {
        "transformer.wte": RowwiseParallel(),
        "transformer.h.*.attn.c_attn.*": ByConv1D(1, size),
        "transformer.h.*.attn.c_proj": ByConv1D(0, size),
        "transformer.h.*.mlp.c_fc": ByConv1D(1),
        "transformer.h.*.mlp.c_proj": ByConv1D(0),
        "lm_head": ColwiseParallel(output_layouts=WHOLE),
    }


# ---- beside one process ---------------------------------------------------------------------------------------------


def llama() -> Any:
    """6 heads that share 2 keys, 37 tokens: nothing that 4 ranks divide."""
    config = LlamaConfig(
        vocab_size=37, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=4, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def gpt2() -> Any:
    """6 heads, one table for input and output."""
    config = GPT2Config(
        vocab_size=37, n_embd=24, n_layer=2, n_head=6, n_positions=64, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    return GPT2LMHeadModel(config).eval()


def by_layouts(model: Any, ranks: int) -> Any:
    """The model with its parameters cut; all that happens in between follows from where they are."""
    if isinstance(model, GPT2LMHeadModel):
        return sw.shard_module(heads_apart(model), gpt2_layouts(model.config, ranks))
    return sw.shard_module(model, llama_layouts(model.config, ranks))


def by_styles(model: Any, ranks: int, mesh: Any = None) -> Any:
    """The model with its layers cut, and sums added where they end."""
    if isinstance(model, GPT2LMHeadModel):
        return parallelize_module(heads_apart(model), mesh, gpt2_styles(model.config, ranks))
    return parallelize_module(model, mesh, llama_styles(model.config, ranks))


def compared(plain: Any, make: Callable[[Any, int], Any], ids: Tensor, ranks: int) -> str:
    """One line: what a sharded copy of the model gives beside the model."""
    with torch.no_grad():
        expected = plain(ids).logits
        tokens = plain.generate(ids, max_new_tokens=8, do_sample=False)

    def body() -> tuple[float, bool, int, int]:
        model = make(copy.deepcopy(plain), ranks)
        with torch.no_grad(), sw.count_comms() as comms:
            logits = model(ids).logits
        difference = (whole(logits) - expected).abs().max().item()
        got = whole(model.generate(ids, max_new_tokens=8, do_sample=False))
        own = sum(p.to_local().numel() if isinstance(p, sw.DTensor) else p.numel() for p in model.parameters())
        return difference, torch.equal(got, tokens), comms.total_calls, own

    results = world(ranks).run(body)
    close = all(difference < 1e-5 for difference, *_ in results)
    same, calls = all(same for _, same, _, _ in results), results[0][2]
    held, all_of = max(own for *_, own in results), sum(p.numel() for p in plain.parameters())
    return f"same logits: {close}, same tokens: {same}, {calls:>2} collectives, {held / all_of:.0%} of the parameters"


def cost_of_fused(layout: str, ranks: int) -> str:
    """One line: what an attention layer of a GPT-2 sends before its result is added up, in activations."""
    plain, x = gpt2(), torch.randn(2, 7, 24)

    def body() -> tuple[int, int, int]:
        layer = with_fused_weight(copy.deepcopy(plain), layout, ranks).transformer.h[0].attn
        inputs = sw.distribute_tensor(x, placements=[WHOLE])
        with torch.no_grad(), sw.count_comms() as comms:
            layer(inputs)
        return comms.total_calls, comms.total_bytes, sum(p.to_local().numel() for p in layer.c_attn.parameters())

    results = world(ranks).run(body)
    sent, held = (max(numbers) for numbers in list(zip(*results, strict=True))[1:])
    share = held / sum(p.numel() for p in plain.transformer.h[0].attn.c_attn.parameters())
    return f"{results[0][0]} collectives, a rank sends up to {sent / x.nbytes:.1f} and holds {share:.0%}"


def main(ranks: int = 4) -> None:
    """Both models, both ways."""
    torch.manual_seed(0)
    ids = torch.randint(3, 37, (2, 7))
    for name, plain in (("Llama", llama()), ("GPT-2", gpt2())):
        print(f"{name}, shard_module:       {compared(plain, by_layouts, ids, ranks)}")
        print(f"{name}, parallelize_module: {compared(plain, by_styles, ids, ranks)}")
    for layout in (*FUSED, "apart"):
        print(f"c_attn {layout + ':':<11} {cost_of_fused(layout, ranks)}")


if __name__ == "__main__":
    main()
