"""A small model in training, which goes on from its last checkpoint when a rank fails: what `tools.soak` disturbs.

    python -m tools.soak_job LOSSES --ranks 2 --tables row --layers fully

Rank 0 appends every loss to a file; a line is the step and the loss, as `float.hex` writes it.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from itertools import chain, count, cycle, repeat
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import shardwise as sw
from shardwise.checkpoint import latest, lock, restore, save, state_of
from shardwise.data import BatchLoader
from shardwise.embedding import (
    Adam,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    shard_embeddings,
)
from shardwise.errors import RankFailedError
from shardwise.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module

STEPS, SAVE_EVERY, SAMPLES, BATCH_SIZE = 150, 10, 700, 36
FOLDER = "runs"  # of the checkpoints, below the current one
ROWS = {"users": 300, "items": 500}
DIM, HIDDEN = 12, 24
TIMEOUT_SECONDS = 8.0  # of a collective: a rank that is stopped for longer hangs
TABLES = ("row", "column", "table", "replicate")
LAYERS = ("replicate", "fully", "tensor")


def placements(plan: str, ranks: int) -> dict[str, sw.Placement]:
    """Those of each table."""
    if plan == "table":
        return {"users": sw.OnRanks(0), "items": sw.OnRanks(ranks - 1)}
    placement = {"row": sw.Shard(0), "column": sw.Shard(1), "replicate": sw.Replicate()}[plan]
    return dict.fromkeys(ROWS, placement)


class Model(nn.Module):
    """Pooled rows of two tables, and a multi-layer perceptron of them; each sharded by a plan."""

    def __init__(self, mesh: sw.Mesh, tables: str, layers: str) -> None:
        super().__init__()
        configs = [EmbeddingBagConfig(rows, DIM, name, feature_names=[name]) for name, rows in ROWS.items()]
        collection, plan = EmbeddingBagCollection(configs), placements(tables, mesh.size())
        self.tables = shard_embeddings(collection, plan, mesh, Adam(lr=0.002))
        self.layers = nn.Sequential(nn.Linear(2 * DIM, HIDDEN), nn.ReLU(), nn.Dropout(0.1), nn.Linear(HIDDEN, 1))
        if layers == "tensor":
            styles = {
                "0": ColwiseParallel(input_layouts=sw.Shard(0), use_local_output=False),
                "3": RowwiseParallel(output_layouts=sw.Shard(0), use_local_output=False),
            }
            parallelize_module(self.layers, mesh, styles)
        else:
            sw.shard_module(self.layers, {}, mesh=mesh)
        if layers == "fully":
            fully_shard(self.layers, mesh=mesh)
        self.mesh = mesh

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """(batch of all ranks, 1), from the features of this rank."""
        pooled = sw.DTensor.from_local(self.tables(features).values(), self.mesh, [sw.Shard(0)])
        scores: Tensor = self.layers(pooled)
        return scores


def sample(number: int) -> tuple[list[int], list[int], float]:
    """Some users, some items and a label."""
    users = [(number * factor) % ROWS["users"] for factor in range(3, 3 + number % 3)]
    items = [(number * factor) % ROWS["items"] for factor in range(7, 8 + number % 4)]
    return users, items, (sum(users) + sum(items)) % 17 / 17


def collate(samples: Sequence[tuple[list[int], list[int], float]]) -> tuple[KeyedJaggedTensor, Tensor]:
    """The features and labels of some samples."""
    users, items, labels = zip(*samples, strict=True)
    bags = [*users, *items]
    ids = torch.tensor([each for bag in bags for each in bag], dtype=torch.int64)
    features = KeyedJaggedTensor([*ROWS], ids, lengths=torch.tensor([len(bag) for bag in bags]))
    return features, torch.tensor(labels)[:, None]


def train(losses: str, tables: str, layers: str, folder: str = FOLDER, last_step: int = STEPS) -> None:
    """Take the steps that are left, and save every `SAVE_EVERY` steps. Runs on every rank."""
    mesh = sw.Mesh((sw.world_size(),))
    torch.manual_seed(0)
    model = Model(mesh, tables, layers)
    optimizer = torch.optim.AdamW(model.layers.parameters(), lr=0.001)
    assert model.tables.fused_optimizer is not None
    optimizers = {"layers": optimizer, "tables": model.tables.fused_optimizer}
    schedule = LambdaLR(optimizer, lambda step: 1 - step / (2 * STEPS))
    samples = [sample(number) for number in range(SAMPLES)]  # an epoch has 20 steps
    loader = BatchLoader(samples, BATCH_SIZE, mesh, shuffle=True, collate_fn=collate)
    ranks = f"{sw.world_size()} ranks, {tables}, {layers}"
    with lock(folder):
        first = 1
        if latest(folder):
            position: dict[str, Any] = {"loader": dict.fromkeys(loader.state_dict())}
            saved = restore(folder, model, optimizers, [schedule], extra=position)
            loader.load_state_dict(position["loader"])
            first = saved.step + 1
            if sw.rank() == 0:
                print(f"Resumed from step {saved.step} of {saved.metadata['ranks']}; now {ranks}", flush=True)
        batches = chain.from_iterable(repeat(loader))
        for step, (features, labels) in zip(range(first, last_step + 1), batches):  # noqa: B905 - batches never end
            torch.manual_seed(step)  # of dropout
            loss = F.mse_loss(model(features), labels)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.layers.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            record(losses, step, loss.item())
            if step % SAVE_EVERY == 0:
                state = state_of(model, optimizers, [schedule]) | {"loader": loader.state_dict()}
                about = {"ranks": ranks}
                save(folder, state, step=step, metadata=about, keep=2, overwrite=True, require_finite=True)


def record(losses: str, step: int, loss: float) -> None:
    """On rank 0, append a line in one write, so that it is there as a whole or not."""
    if sw.rank() == 0:
        with Path(losses).open("ab", buffering=0) as file:
            file.write(f"{step} {loss.hex()}\n".encode())


def parser() -> argparse.ArgumentParser:
    """That of the job."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("losses")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--tables", choices=TABLES, default="row")
    parser.add_argument("--layers", choices=LAYERS, default="fully")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Train; start the ranks again where one was killed or hangs, in turn on each of the numbers of ranks."""
    args = parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    job = args.losses, args.tables, args.layers
    for number, ranks in zip(count(1), cycle(args.ranks)):
        try:
            sw.launch(train, *job, nproc=ranks, timeout_seconds=TIMEOUT_SECONDS)
            return 0
        except RankFailedError as error:
            if error.error_type not in ("", "RemoteRankError"):  # of the job, not of a rank that is gone
                raise
            print(f"Restart {number}: {str(error).splitlines()[0]}", flush=True)
    raise AssertionError


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
