"""A GPT that reads bytes, on data × tensor parallelism: Python's help pages, measured on pages that are held out.

Heads and features are sharded over the axis `tp` of the mesh, the batch over `dp`. Each block is a unit of
`fully_shard` over `dp`, so a rank has its part of the parameters and of the optimizer's states. Beside the table of
single bytes are tables of the last two and three bytes, as in the Byte Latent Transformer (Pagnoni et al., 2024); their
rows are sharded over all ranks.

    python examples/language_model.py                                 two ranks of this machine: dp=2
    python examples/language_model.py --nproc 4 --tp 2 --steps 800    goes on from there, on dp=2 × tp=2
    torchrun --nproc-per-node 4 examples/language_model.py --tp 2
"""

import argparse
import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from common import Run, on_ranks, parser, print_table
from help_pages import bits_by_counts, bits_by_lzma, texts
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import shardwise as sw
from shardwise.checkpoint import latest
from shardwise.parallel import fully_shard

PAIRS, TRIPLES = 2039, 8191  # rows of the tables of two and of three bytes
# What `tp` shards: the outputs of the first layer of each pair, the inputs of the second one.
COLUMN, ROW = {"tp": sw.Shard(0)}, {"tp": sw.Shard(1)}
PLAN = {
    "blocks.*.qkv.weight": COLUMN,
    "blocks.*.out.weight": ROW,
    "blocks.*.up.weight": COLUMN,
    "blocks.*.down.weight": ROW,
    "head.weight": COLUMN,
    "pairs.weight": {"dp": sw.Shard(0), "tp": sw.Shard(0)},
    "triples.weight": {"dp": sw.Shard(0), "tp": sw.Shard(0)},
}


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to its input."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # One head after the other, each with its queries, keys and values: so a shard of the weight has entire heads.
        heads = self.qkv(self.norm1(x)).unflatten(2, (self.heads, -1)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(*heads.chunk(3, 3), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Scores of the next byte, [windows, bytes of each, 256]."""

    def __init__(self, context: int, dim: int, heads: int, layers: int) -> None:
        super().__init__()
        self.bytes, self.position = nn.Embedding(256, dim), nn.Embedding(context, dim)
        self.pairs, self.triples = nn.Embedding(PAIRS, dim), nn.Embedding(TRIPLES, dim)
        self.blocks = nn.ModuleList([Block(dim, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 256, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Embedding | nn.Linear):
                nn.init.normal_(module.weight, std=0.3 if isinstance(module, nn.Embedding) else dim**-0.5)
        for block in self.blocks:
            for layer in (block.out, block.down):
                nn.init.normal_(layer.weight, std=(2 * layers * dim) ** -0.5)
        nn.init.normal_(self.head.weight, std=0.02)  # all bytes start about equally likely

    def forward(self, tokens: Tensor) -> Tensor:
        before, earlier = (F.pad(tokens, (places, 0))[:, :-places] for places in (1, 2))
        pairs = tokens + 257 * before
        x = self.bytes(tokens) + self.position.weight[: tokens.shape[1]]
        x = x + self.pairs(pairs % PAIRS) + self.triples((pairs + 257**2 * earlier) % TRIPLES)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


def shard(model: GPT, mesh: sw.DeviceMesh) -> None:
    """By the plan; then each block, and the rest, over `dp`: tables, which the plan shards there, stay as they are."""
    sw.shard_module(model, PLAN, mesh=mesh)
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh["dp"])


def windows(text: Tensor, step: int, count: int, context: int) -> tuple[Tensor, Tensor]:
    """Some windows of a text, the same on all ranks, and the next byte of each of their bytes."""
    starts = torch.randint(len(text) - context, (count,), generator=torch.Generator().manual_seed(step))
    found = text[starts[:, None] + torch.arange(context + 1)]
    return found[:, :-1], found[:, 1:]


def loss_of(
    model: nn.Module, tokens: Tensor, following: Tensor, mesh: sw.DeviceMesh, reduction: str = "mean"
) -> Tensor:
    """The cross-entropy of windows that all ranks have; each rank of `dp` computes some of them."""
    tokens, following = (
        sw.distribute_tensor(x, mesh, {"dp": sw.Shard(0)}, src_data_rank=None) for x in (tokens, following)
    )
    return F.cross_entropy(model(tokens).flatten(0, 1), following.flatten(), reduction=reduction)


@torch.no_grad()
def bits_per_byte(model: nn.Module, text: Tensor, context: int, mesh: sw.DeviceMesh) -> float:
    """What a byte costs that has half a window or more before it."""
    found = text.unfold(0, context + 1, context // 2)
    following = found[:, 1:].clone()
    following[:, : context // 2] = -100  # which cross_entropy ignores
    parts = zip(found.split(256), following.split(256), strict=True)
    total = sum(loss_of(model, part[:, :-1], targets, mesh, "sum").item() for part, targets in parts)
    return total / int((following >= 0).sum()) / math.log(2)


@dataclass(frozen=True)
class Result:
    """What a run found."""

    bits: float
    """Of a byte of pages that it did not train on."""
    part: float
    """Of the parameters, that rank 0 has."""


def train(args: argparse.Namespace) -> Result:
    """Trains from the latest checkpoint on. Runs on every rank."""
    mesh = sw.init_device_mesh("cpu", (sw.world_size() // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
    text, held_out = (torch.tensor(list(part)) for part in texts())
    torch.manual_seed(0)
    model = GPT(args.context, args.dim, args.heads, args.layers)
    shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    scheduler = LambdaLR(optimizer, partial(rate, args.steps))
    run = Run(args, model, optimizer, scheduler)
    for step in run.steps():
        run.loss = loss_of(model, *windows(text, step, args.windows, args.context), mesh)
        optimizer.zero_grad()
        run.loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    local, total = (
        sum(x.numel() for x in xs) for xs in ((p.to_local() for p in model.parameters()), model.parameters())
    )
    return Result(bits_per_byte(model, held_out, args.context, mesh), local / total)


def rate(steps: int, step: int) -> float:
    """The learning rate of a step as a part of the highest: up along a line, down along a cosine."""
    return min(1.0, (step + 1) / 50) * (0.05 + 0.475 * (1 + math.cos(math.pi * min(1.0, step / steps))))


def options() -> argparse.ArgumentParser:
    found = parser("Train a language model on several ranks.", folder="runs/lm", steps=1000, save_every=250)
    found.add_argument("--tp", type=int, default=1, help="ranks of tensor parallelism; the others share the batch")
    found.add_argument("--windows", type=int, default=8, help="of a step, of all ranks")
    found.add_argument("--context", type=int, default=128, help="bytes of a window")
    found.add_argument("--dim", type=int, default=96, help="width of the model")
    found.add_argument("--heads", type=int, default=4, help="of attention, in each layer")
    found.add_argument("--layers", type=int, default=2)
    found.add_argument("--lr", type=float, default=4e-3, help="of AdamW, at its highest")
    return found


def main() -> None:
    args = options().parse_args()
    result = on_ranks(train, args)
    if result is None:
        return
    text, held_out = texts()
    print(f"\nRank 0 has {result.part:.0%} of the parameters. A byte of pages that it did not train on costs:")
    rows = [(f"counts of order {order}", bits_by_counts(text, held_out, order)) for order in range(4)]
    rows += [("lzma, of these pages", bits_by_lzma(held_out)), ("this model", result.bits)]
    print_table(["", "bits"], [(name, f"{bits:.2f}") for name, bits in rows])
    print(f"Checkpoint: {latest(args.folder)}")
    print(f"Go on from it on 2 x 2 ranks: make train ARGS='lm --nproc 4 --tp 2 --steps {args.steps + 500}'")


if __name__ == "__main__":
    main()
