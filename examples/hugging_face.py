"""A Llama and a GPT-2 of Hugging Face on several ranks, built from configs; nothing is downloaded.

Run with `python examples/hugging_face.py`: it compares four simulated ranks with one process. `pip install
transformers` first. Only the plans below depend on the names of parameters and modules; the models are unchanged, and a
Llama has its own styles.
"""

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    first_input,
    parallelize_module,
    plan_from_transformers,
)
from shardwise.testing import world

os.environ.setdefault("HF_HUB_OFFLINE", "1")
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

REPLICATED = sw.Replicate()


def shard_units(dim: int, units: int, size: int, ranks: int) -> sw.Shard:
    """Shards a dim of `units` heads of `size` features, without splitting a head; some ranks may get more heads."""
    return sw.Shard(dim, [size * len(part) for part in torch.arange(units).tensor_split(ranks)])


def head_groups(config: Any, ranks: int) -> tuple[int, int, bool]:
    """The number of groups of query heads of a Llama, the features of a group, and whether keys are sharded, too.

    Heads that share keys stay on one rank, so no key is sent. With fewer keys than ranks, keys are replicated.
    """
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    if shared >= ranks:
        return shared, heads // shared * config.head_dim, True
    return heads, config.head_dim, False


def full(x: Tensor) -> Tensor:
    """The full tensor of a DTensor; other tensors unchanged."""
    return x.full_tensor() if isinstance(x, sw.DTensor) else x


# ---- by layouts of parameters -----------------------------------------------------------------------------------


def llama_layouts(config: Any, ranks: int) -> dict[str, sw.Placement]:
    """For `shard_module`. Heads, hidden features and the vocabulary are sharded; norms are replicated."""
    groups, size, keys_too = head_groups(config, ranks)
    keys = shard_units(0, config.num_key_value_heads, config.head_dim, ranks) if keys_too else REPLICATED
    return {
        "model.embed_tokens.weight": sw.Shard(0),
        "**.q_proj.*": shard_units(0, groups, size, ranks),
        "**.[kv]_proj.*": keys,
        "**.o_proj.weight": shard_units(1, groups, size, ranks),
        "**.gate_proj.weight": sw.Shard(0),
        "**.up_proj.weight": sw.Shard(0),
        "**.down_proj.weight": sw.Shard(1),
        "lm_head.weight": sw.Shard(0),
    }


def gpt2_layouts(config: Any, ranks: int) -> dict[str, sw.Placement]:
    """For `shard_module`, after `split_heads`. The weights of Conv1D have inputs first: dim 1 is what comes out."""
    size = config.n_embd // config.n_head
    return {
        "transformer.wte.weight": sw.Shard(0),
        "lm_head.weight": sw.Shard(0),  # the same parameter
        "**.c_attn.*.weight": shard_units(1, config.n_head, size, ranks),
        "**.c_attn.*.bias": shard_units(0, config.n_head, size, ranks),
        "**.attn.c_proj.weight": shard_units(0, config.n_head, size, ranks),
        "**.mlp.c_fc.weight": sw.Shard(1),
        "**.mlp.c_fc.bias": sw.Shard(0),
        "**.mlp.c_proj.weight": sw.Shard(0),
    }


# ---- GPT-2's queries, keys and values in one weight -----------------------------------------------------------------

PROJECTIONS = ("query", "key", "value")


class SplitOutput(tuple[Tensor, ...]):
    """Queries, keys and values, already split."""

    __slots__ = ()

    def split(self, size: int, dim: int = 0) -> "SplitOutput":
        """The model calls it on the output of `c_attn`."""
        return self


class SplitHeads(nn.Module):
    """`c_attn` as three layers: no sharding of its fused weight of queries, keys and values follows the heads."""

    def __init__(self, fused: Any) -> None:
        super().__init__()
        for name, weight, bias in zip(PROJECTIONS, fused.weight.chunk(3, 1), fused.bias.chunk(3), strict=True):
            projection = type(fused)(weight.shape[1], weight.shape[0])  # a Conv1D
            projection.weight, projection.bias = (nn.Parameter(x.detach().clone()) for x in (weight, bias))
            self.add_module(name, projection)
        self.register_load_state_dict_pre_hook(_split_fused)

    def forward(self, x: Tensor) -> SplitOutput:
        return SplitOutput(self.get_submodule(name)(x) for name in PROJECTIONS)


def _split_fused(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Splits fused weights, so that checkpoints of the plain model load."""
    for name in ("weight", "bias"):
        if (fused := state.pop(prefix + name, None)) is not None:
            split = zip(PROJECTIONS, fused.chunk(3, -1), strict=True)
            state |= {f"{prefix}{projection}.{name}": x for projection, x in split}


def plain_state_dict(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Full tensors under the names of the plain model, for `save_pretrained(folder, state_dict=...)`."""
    found = {name: full(x) for name, x in named.items()}
    for name in [name for name in found if ".query." in name]:
        projections = [found.pop(name.replace(".query.", f".{projection}.")) for projection in PROJECTIONS]
        found[name.replace(".query.", ".")] = torch.cat(projections, -1)
    return found


def split_heads(model: Any) -> Any:
    """A GPT-2 whose heads can be sharded, in place. Compute and results stay those of the plain model."""
    for block in model.transformer.h:
        block.attn.c_attn = SplitHeads(block.attn.c_attn)
    return model


FUSED: dict[str, dict[str, sw.Placement]] = {
    "replicated": {},
    "column-wise": {"**.c_attn.weight": sw.Shard(1), "**.c_attn.bias": sw.Shard(0)},
    "row-wise": {"**.c_attn.weight": sw.Shard(0)},
}


def with_fused_weight(model: Any, layout: str, ranks: int) -> Any:
    """A GPT-2 with a fused `c_attn` "replicated", "column-wise" or "row-wise", or with a "split" one."""
    plan = gpt2_layouts(model.config, ranks)
    if layout == "split":
        return sw.shard_module(split_heads(model), plan)
    others = {name: placement for name, placement in plan.items() if "c_attn" not in name}
    return sw.shard_module(model, others | FUSED[layout])


# ---- by styles, which also give the layout of outputs ---------------------------------------------------------------


@dataclass(frozen=True)
class Conv1DParallel(ParallelStyle):
    """GPT-2's layers, column-parallel (dim 1 of the weight) or row-parallel (dim 0)."""

    dim: int
    unit: int = 1

    def parameters(self, module: nn.Module, context: Any) -> dict[str, Any]:
        weight = module.get_parameter("weight")
        sizes = shard_units(self.dim, weight.shape[self.dim] // self.unit, self.unit, context.axis_size).sizes
        return {"weight": sw.Shard(self.dim, sizes), "bias": sw.Shard(0, sizes) if self.dim else REPLICATED}

    def input_fn(self, module: nn.Module, context: Any) -> Any:
        sizes = self.parameters(module, context)["weight"].sizes
        layout = REPLICATED if self.dim else sw.Shard(-1, sizes)
        return first_input(module, context.redistribution(layout, layout))

    def output_fn(self, module: nn.Module, context: Any) -> Any:
        return None if self.dim else context.redistribution(None, REPLICATED, use_local_output=True, what="the output")


def gpt2_styles(config: Any, ranks: int) -> dict[str, ParallelStyle]:
    """For `parallelize_module`, after `split_heads`."""
    size = config.n_embd // config.n_head
    return {
        "transformer.wte": RowwiseParallel(),
        "transformer.h.*.attn.c_attn.*": Conv1DParallel(1, size),
        "transformer.h.*.attn.c_proj": Conv1DParallel(0, size),
        "transformer.h.*.mlp.c_fc": Conv1DParallel(1),
        "transformer.h.*.mlp.c_proj": Conv1DParallel(0),
        "lm_head": ColwiseParallel(output_layouts=REPLICATED),
    }


# ---- comparison with one process ------------------------------------------------------------------------------------


def llama() -> Any:
    """6 query heads, 2 key heads, 37 tokens: 4 ranks divide none of them."""
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


def shard_by_layouts(model: Any, ranks: int) -> Any:
    """Sharded parameters; the layouts of activations follow."""
    if isinstance(model, GPT2LMHeadModel):
        return sw.shard_module(split_heads(model), gpt2_layouts(model.config, ranks))
    return sw.shard_module(model, llama_layouts(model.config, ranks))


def shard_by_styles(model: Any, ranks: int, mesh: Any = None) -> Any:
    """Parallel layers, with one all-reduce at the end of each row-parallel one."""
    if isinstance(model, GPT2LMHeadModel):
        return parallelize_module(split_heads(model), mesh, gpt2_styles(model.config, ranks))
    return parallelize_module(model, mesh, plan_from_transformers(model))


def compared(plain: Any, make: Callable[[Any, int], Any], ids: Tensor, ranks: int) -> str:
    """One line that compares a sharded copy of the model with the model."""
    with torch.no_grad():
        expected = plain(ids).logits
        tokens = plain.generate(ids, max_new_tokens=8, do_sample=False)

    def body() -> tuple[float, bool, int, int]:
        model = make(copy.deepcopy(plain), ranks)
        with torch.no_grad(), sw.count_comms() as comms:
            logits = model(ids).logits
        difference = (full(logits) - expected).abs().max().item()
        got = full(model.generate(ids, max_new_tokens=8, do_sample=False))
        local = sum(p.to_local().numel() if isinstance(p, sw.DTensor) else p.numel() for p in model.parameters())
        return difference, torch.equal(got, tokens), comms.total_calls, local

    results = world(ranks).run(body)
    close = all(difference < 1e-5 for difference, *_ in results)
    same, calls = all(same for _, same, _, _ in results), results[0][2]
    largest, total = max(local for *_, local in results), sum(p.numel() for p in plain.parameters())
    return f"same logits: {close}, same tokens: {same}, {calls:>2} collectives, {largest / total:.0%} of the parameters"


def cost_of_fused(layout: str, ranks: int) -> str:
    """One line: what an attention layer of a GPT-2 sends, without the all-reduce of its output, in activations."""
    plain, x = gpt2(), torch.randn(2, 7, 24)

    def body() -> tuple[int, int, int]:
        layer = with_fused_weight(copy.deepcopy(plain), layout, ranks).transformer.h[0].attn
        inputs = sw.distribute_tensor(x, placements=[REPLICATED])
        with torch.no_grad(), sw.count_comms() as comms:
            layer(inputs)
        return comms.total_calls, comms.total_bytes, sum(p.to_local().numel() for p in layer.c_attn.parameters())

    results = world(ranks).run(body)
    sent, largest = (max(numbers) for numbers in list(zip(*results, strict=True))[1:])
    share = largest / sum(p.numel() for p in plain.transformer.h[0].attn.c_attn.parameters())
    return f"{results[0][0]} collectives, a rank sends up to {sent / x.nbytes:.1f} and holds {share:.0%}"


def main(ranks: int = 4) -> None:
    """Both models, both ways."""
    torch.manual_seed(0)
    ids = torch.randint(3, 37, (2, 7))
    for name, plain in (("Llama", llama()), ("GPT-2", gpt2())):
        print(f"{name}, shard_module:       {compared(plain, shard_by_layouts, ids, ranks)}")
        print(f"{name}, parallelize_module: {compared(plain, shard_by_styles, ids, ranks)}")
    for layout in (*FUSED, "split"):
        print(f"c_attn {layout + ':':<12} {cost_of_fused(layout, ranks)}")


if __name__ == "__main__":
    main()
