"""A DLRM: will an ad be clicked? 26 tables as one sharded collection, two replicated MLPs, products of all pairs.

Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems", 2019. Each rank
reads its own rows of a Parquet file. Without `--data` the rows are invented, with probabilities that are known, so the
result can be compared with the best that there is.

    python examples/dlrm.py                                   two ranks of this machine
    python examples/dlrm.py --nproc 3 --steps 900             goes on from there, on three
    python examples/dlrm.py --data runs/criteo.parquet        Criteo's own clicks: see clicks.py

A step has four collectives: three for all tables, whose rows are updated in backward, and one that reduces the
gradients of the layers.
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from clicks import DENSE, KEYS, Clicks, Rows, invent, write
from common import Run, on_ranks, parser, print_table
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint import latest
from shardwise.embedding import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    shard_embeddings,
)

INVENTED = Path("runs/clicks.parquet")


class DLRM(nn.Module):
    """Log-odds of a click."""

    def __init__(self, num_ids: int, dim: int) -> None:
        super().__init__()
        self.dim, bound = dim, 1 / math.sqrt(num_ids)
        configs = [
            EmbeddingBagConfig(num_ids, dim, key, feature_names=[key], weight_init_min=-bound, weight_init_max=bound)
            for key in KEYS
        ]
        self.tables = EmbeddingBagCollection(configs)
        self.bottom = nn.Sequential(nn.Linear(len(DENSE), 64), nn.ReLU(), nn.Linear(64, dim), nn.ReLU())
        vectors = 1 + len(KEYS)
        self.top = nn.Sequential(nn.Linear(dim + vectors * (vectors - 1) // 2, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """[examples], from dense [examples, 13] and ids of 26 features."""
        pooled = self.tables(features).values()  # of the examples of this rank
        if isinstance(dense, sw.DTensor):
            shape = (len(dense), pooled.shape[1])  # known: ranks need not compare
            pooled = sw.DTensor.from_local(pooled, dense.device_mesh, dense.placements, run_check=False, shape=shape)
        x = self.bottom(dense)
        vectors = torch.cat([x, pooled], 1).unflatten(1, (-1, self.dim))
        first, second = torch.tril_indices(vectors.shape[1], vectors.shape[1], offset=-1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)[:, first * vectors.shape[1] + second]
        logits: Tensor = self.top(torch.cat([x, products], 1)).squeeze(1)
        return logits


def shard(model: DLRM, mesh: sw.Mesh, lr: float = 0.1) -> None:
    """Each table row-wise, updated in backward; the layers replicated."""
    tables, model.tables = model.tables, nn.Identity()
    sw.shard_module(model, {}, mesh=mesh)
    model.tables = shard_embeddings(tables, dict.fromkeys(KEYS, sw.Shard(0)), mesh, RowWiseAdagrad(lr=lr))


def features_of(rows: Rows) -> KeyedJaggedTensor:
    """One id of each of the 26 columns of categories."""
    ids = rows.ids.T.flatten()
    return KeyedJaggedTensor(list(KEYS), ids, lengths=torch.ones(len(ids), dtype=torch.int64))


def auc(scores: Tensor, labels: Tensor) -> float:
    """How often a click has a higher score than another row, of all such pairs; equal scores count half."""
    _, place, counts = scores.unique(return_inverse=True, return_counts=True)
    ranks = counts.cumsum(0) - (counts - 1) / 2  # from 1; equal scores have the mean of theirs
    clicks = labels.sum().item()
    pairs = clicks * (len(labels) - clicks)
    return (ranks[place][labels == 1].sum().item() - clicks * (clicks + 1) / 2) / pairs


def entropy(logits: Tensor, labels: Tensor) -> float:
    """The mean log loss, over that of predicting the share of clicks for all rows."""
    base = labels.double().mean().expand(len(labels))
    loss = F.binary_cross_entropy_with_logits(logits.double(), labels.double())
    return (loss / F.binary_cross_entropy(base, labels.double())).item()


def of_all_ranks(local: Tensor, mesh: sw.Mesh) -> sw.DTensor:
    """The rows of all ranks, of which each has its own."""
    return sw.DTensor.from_local(local, mesh, [sw.Shard(0)])


@dataclass(frozen=True)
class Result:
    """What a run found: quality on rows that it did not train on, and the collectives of a step."""

    quality: list[tuple[str, float, float]]
    """Of what, AUC, normalized entropy."""
    calls: dict[str, int]


def train(args: argparse.Namespace) -> Result:
    """Trains from the latest checkpoint on. Runs on every rank."""
    mesh = sw.Mesh((sw.world_size(),))
    rows, held_out = (Clicks(args.data, args.batch, args.num_ids, training=training) for training in (True, False))
    torch.manual_seed(0)
    model = DLRM(args.num_ids, args.dim)
    shard(model, mesh, args.table_lr)
    layers = [parameter for name, parameter in model.named_parameters() if not name.startswith("tables")]
    optimizer = torch.optim.Adagrad(layers, lr=args.lr)
    run = Run(args, model, {"layers": optimizer, "tables": model.tables.fused_optimizer})
    calls: dict[str, int] = {}
    for step in run.steps():
        mine = rows.at(step, sw.rank(), sw.world_size())
        dense, labels = of_all_ranks(mine.dense, mesh), of_all_ranks(mine.labels, mesh)
        with sw.count_comms() as comms:
            run.loss = F.binary_cross_entropy_with_logits(model(dense, features_of(mine)), labels)
            optimizer.zero_grad()
            run.loss.backward()
            optimizer.step()
        calls = dict(comms.calls)
    return Result(evaluate(model, held_out, mesh), calls)


@torch.no_grad()
def evaluate(model: DLRM, held_out: Clicks, mesh: sw.Mesh) -> list[tuple[str, float, float]]:
    """The quality of the share of clicks, of the model, and of the probabilities of the clicks if these are known."""
    found = []
    for step in range(len(held_out)):
        mine = held_out.at(step, sw.rank(), sw.world_size())
        logits = model(of_all_ranks(mine.dense, mesh), features_of(mine))
        others = (of_all_ranks(x, mesh) for x in (mine.labels, mine.probabilities))
        found.append([x.full_tensor() for x in (logits, *others)])
    logits, labels, known = (torch.cat(x) for x in zip(*found, strict=True))
    share = labels.mean().logit().expand(len(labels))
    of = [("share of clicks", share), ("this model", logits), ("true probabilities", known.logit())]
    return [(name, auc(x, labels), entropy(x, labels)) for name, x in of if not x.isnan().any()]


def options() -> argparse.ArgumentParser:
    found = parser("Train a DLRM on several ranks.", folder="runs/dlrm", steps=700, save_every=200)
    found.add_argument("--data", type=Path, help="a file of clicks.py; without it, one of invented rows")
    found.add_argument("--batch", type=int, default=512, help="rows of a step, of all ranks")
    found.add_argument("--num-ids", type=int, default=1024, help="rows of each table")
    found.add_argument("--dim", type=int, default=16, help="columns of the tables")
    found.add_argument("--lr", type=float, default=0.02, help="of Adagrad, for the layers")
    found.add_argument("--table-lr", type=float, default=0.1, help="of row-wise Adagrad, for the tables")
    return found


def main() -> None:
    args = options().parse_args()
    if args.data is None:
        args.data = INVENTED
        if not INVENTED.exists():
            write(INVENTED, [invent(200_000)])
    result = on_ranks(train, args)
    if result is None:
        return
    print("\nClicks that it did not train on:")
    print_table(["", "AUC", "entropy"], [(name, f"{a:.3f}", f"{e:.3f}") for name, a, e in result.quality])
    print("Collectives of a step:", ", ".join(f"{count} {name}" for name, count in result.calls.items()) or "none")
    print(f"Checkpoint: {latest(args.folder)}")
    print(f"Go on from it on three ranks: make train ARGS='dlrm --nproc 3 --steps {args.steps + 200}'")


if __name__ == "__main__":
    main()
