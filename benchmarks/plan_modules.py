"""How long plans of full-size models take, how far above the bound they are, and the plans that people write.

Models are built from configs of transformers, with their published numbers, on the meta device in bfloat16; the machine
is hosts of 8 H100. Time is CPU time of the process. By hand are the plan that the model has
(`plan_from_transformers`), or Megatron's, and `fully_shard` alone: each on all shapes of the mesh whose tensor axis
stays in a host, the shortest step that fits the memory. All steps are simulated by `price_module`.

    python benchmarks/plan_modules.py [--models llama,gpt2,qwen,bert,t5,vit] [--ranks 8,64,512] [--quick]
"""

import argparse
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from time import process_time
from typing import Any

import torch
from measure import machine, print_table
from torch import Tensor, nn

from shardwise import Mesh, Placement, Shard
from shardwise.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, plan_from_transformers
from shardwise.plan import ModulePlan, Topology, plan_module, price_module

os.environ.setdefault("HF_HUB_OFFLINE", "1")

Entries = Mapping[str, ParallelStyle | Placement]
COLUMN, ROW = ColwiseParallel(use_local_output=False), RowwiseParallel()
HEAD_ROOM = 0.9  # of the memory, as `plan_module` leaves a tenth


@dataclass(frozen=True)
class Family:
    """A model class of transformers, and arguments of its config class.

    Args:
        name: of the published model.
        length: tokens of an example; 0 of images.
        examples: of each rank.
        by_hand: Megatron's plan; empty: the one that the model has.
    """

    name: str
    model: str
    config: Mapping[str, Any]
    length: int
    examples: int
    by_hand: Entries = field(default_factory=dict)

    def build(self) -> nn.Module:
        import transformers

        cls: Any = getattr(transformers, self.model)
        with torch.device("meta"):
            model: nn.Module = cls(cls.config_class(**self.config))
        return model.bfloat16()

    def batch(self, ranks: int) -> dict[str, Tensor]:
        with torch.device("meta"):
            count = ranks * self.examples
            if self.length:
                ids = torch.empty(count, self.length, dtype=torch.long)
                return {"input_ids": ids, "labels": ids}
            pixels = torch.empty(count, 3, 224, 224, dtype=torch.bfloat16)
            return {"pixel_values": pixels, "labels": torch.empty(count, dtype=torch.long)}


FAMILIES = {
    "llama": Family(
        "Llama 3 8B", "LlamaForCausalLM",
        {"vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "use_cache": False},
        2048, 1,
    ),
    "gpt2": Family(
        "GPT-2 XL", "GPT2LMHeadModel",
        {"n_embd": 1600, "n_layer": 48, "n_head": 25, "use_cache": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
         "attn_pdrop": 0.0},
        1024, 1,
        # The attention is replicated: no shard of its fused weight follows the heads.
        {"transformer.wte": ROW, "lm_head": COLUMN, "transformer.h.*.mlp.c_fc.weight": Shard(1),
         "transformer.h.*.mlp.c_fc.bias": Shard(0), "transformer.h.*.mlp.c_proj.weight": Shard(0)},
    ),
    "qwen": Family(
        "Qwen3 30B-A3B", "Qwen3MoeForCausalLM",
        {"vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
         "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768,
         "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "use_cache": False},
        2048, 1,
    ),
    "bert": Family(
        "BERT large", "BertForMaskedLM",
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
         "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        512, 8,
        {"bert.embeddings.word_embeddings": ROW, "cls.predictions.decoder": COLUMN,
         **{f"bert.encoder.layer.*.attention.self.{name}": COLUMN for name in ("query", "key", "value")},
         "bert.encoder.layer.*.attention.output.dense": ROW, "bert.encoder.layer.*.intermediate.dense": COLUMN,
         "bert.encoder.layer.*.output.dense": ROW},
    ),
    "t5": Family(
        "T5 large", "T5ForConditionalGeneration",
        {"d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16, "d_kv": 64, "dropout_rate": 0.0,
         "decoder_start_token_id": 0, "pad_token_id": 0, "use_cache": False},
        512, 8,
        {"shared": ROW, "lm_head": COLUMN, "**.relative_attention_bias.weight": Shard(1),
         **{f"**.{name}": COLUMN for name in ("q", "k", "v", "wi")}, "**.o": ROW, "**.wo": ROW},
    ),
    "vit": Family(
        "ViT huge", "ViTForImageClassification",
        {"hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 16, "intermediate_size": 5120,
         "patch_size": 14, "num_labels": 1000, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        0, 8,
        {**{f"vit.layers.*.attention.{name}_proj": COLUMN for name in "qkv"}, "vit.layers.*.attention.o_proj": ROW,
         "vit.layers.*.mlp.fc1": COLUMN, "vit.layers.*.mlp.fc2": ROW},
    ),
}  # fmt: skip


def loss_of(model: Callable[..., Any], **inputs: Tensor) -> Tensor:
    loss: Tensor = model(**inputs).loss
    return loss


def by_hand(family: Family, model: nn.Module, topology: Topology) -> Iterator[tuple[float, Mesh]]:
    """Seconds of the steps that fit, of the plan by hand on meshes with a tensor axis, and of `fully_shard` alone."""
    blocks = [path for path, part in model.named_modules() if re.search(r"\.\d+$", path) and list(part.children())]
    outermost = [path for path in blocks if not any(path.startswith(f"{other}.") for other in blocks)]
    entries = family.by_hand or plan_from_transformers(model)
    batch = family.batch(topology.ranks)
    for tensor in (8, 4, 2, 1):
        mesh = Mesh((topology.ranks // tensor, tensor))
        for reshard in (False, True)[: 1 + (mesh.shape[0] > 1)]:
            units = (*outermost, "") if mesh.shape[0] > 1 else ()
            plan = ModulePlan(mesh, entries if tensor > 1 else {}, units, reshard)
            step = price_module(model, plan, topology, batch, forward=loss_of)
            if step.peak_bytes <= HEAD_ROOM * topology.memory:
                yield step.seconds, mesh
                break


def row(family: Family, ranks: int) -> list[object]:
    model, topology = family.build(), Topology.preset("H100", hosts=ranks // 8)
    begun = process_time()
    plan = plan_module(model, topology, family.batch(ranks), forward=loss_of)
    seconds = process_time() - begun
    assert plan.step is not None
    found: list[object] = [f"{family.name} x {ranks}", f"{seconds:.1f}", _shape(plan.mesh), f"{100 * plan.gap:.1f} %"]
    found += [f"{1e3 * plan.seconds:.1f}", f"{1e3 * plan.step.seconds:.1f}"]
    steps = list(by_hand(family, model, topology))
    hand = min((step for step in steps if step[1].shape[1] > 1), key=lambda step: step[0], default=None)
    found += ["-", "-"] if hand is None else [f"{1e3 * hand[0]:.1f}", _shape(hand[1])]
    data = [seconds for seconds, mesh in steps if mesh.shape[1] == 1]
    found.append(f"{1e3 * data[0]:.1f}" if data else "-")
    return found


def _shape(mesh: Mesh) -> str:
    if mesh.names == ("edp", "ep"):
        return f"{mesh.size()} x 1, experts on {mesh.shape[1]}"
    data, tensor = mesh.shape if mesh.ndim > 1 else (1, *mesh.shape)
    return f"{data} x {tensor}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(FAMILIES))
    parser.add_argument("--ranks", default="8,64,512")
    parser.add_argument("--quick", action="store_true", help="two layers of one model, to show that it runs")
    chosen = parser.parse_args()
    print(machine())
    rows = []
    for name in ["bert"] if chosen.quick else chosen.models.split(","):
        family = FAMILIES[name]
        if chosen.quick:
            family = Family(**{**vars(family), "config": {**family.config, "num_hidden_layers": 2}})
        rows += [row(family, int(ranks)) for ranks in (["8"] if chosen.quick else chosen.ranks.split(","))]
    columns = ["model x ranks", "CPU s", "dp x tp", "above bound, at most", "ms, planned", "ms, simulated",
               "by hand", "dp x tp", "fully_shard"]  # fmt: skip
    print_table("Plans", columns, rows)


if __name__ == "__main__":
    main()
