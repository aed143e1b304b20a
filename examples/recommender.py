"""A recommender on real data: one identifier of a Python function is hidden, and predicted from the others.

Two embedding tables are sharded by rows over all ranks. Model, loss, optimizer and evaluation are written as for one
process; wrong answers are the hidden identifiers of all ranks' examples.

    python examples/recommender.py                                    two ranks of this machine
    python examples/recommender.py --nproc 3 --steps 1200             goes on from there, on three
    torchrun --nproc-per-node 4 --max-restarts 3 examples/recommender.py

The data are which identifiers each function of the CPython standard library uses (`data/make_pyident.py`). Functions of
one file in ten are held out; the result is how often their hidden identifier is among the first ten of 3,530.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from common import Run, on_ranks, parser, print_table, say
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint import latest

DATA = Path(__file__).parent / "data" / "pyident.parquet"
SHOWN = ("socket", "thread", "path", "encode")
Batch = tuple[Tensor, Tensor, Tensor]  # ids of visible identifiers, where each function begins in them, hidden ones


@dataclass(frozen=True)
class Functions:
    """The identifiers of some functions, one after the other: those of i are ids[offsets[i] : offsets[i + 1]]."""

    ids: Tensor
    offsets: Tensor

    def hide(self, positions: Tensor) -> Batch:
        """An example for each of some positions in `ids`: the identifier there is hidden, the rest is visible."""
        function = torch.searchsorted(self.offsets, positions, right=True) - 1
        lengths = self.offsets.diff()[function] - 1
        starts = lengths.cumsum(0) - lengths
        visible = torch.arange(int(lengths.sum())) + (self.offsets[function] - starts).repeat_interleave(lengths)
        visible += visible >= positions.repeat_interleave(lengths)
        return self.ids[visible], starts, self.ids[positions]


def read(path: Path) -> tuple[list[str], Functions, Batch]:
    """The identifiers by id, the functions to train with, and one example of each held-out function."""
    table = pq.read_table(path)
    words = table["identifiers"].combine_chunks().flatten().unique()

    def functions(rows: pa.Table) -> Functions:
        lists = rows["identifiers"].combine_chunks()
        lengths = torch.tensor(pc.list_value_length(lists).to_numpy())
        ids = torch.tensor(pc.index_in(lists.flatten(), words).to_numpy())
        return Functions(ids.long(), F.pad(lengths.cumsum(0), (1, 0)))

    test = table.filter(pc.is_valid(table["hidden"]))
    held_out = functions(test)
    hidden = torch.tensor(pc.index_in(test["hidden"], words).to_numpy())
    positions = (held_out.ids == hidden.repeat_interleave(held_out.offsets.diff())).nonzero().squeeze(1)
    return words.to_pylist(), functions(table.filter(pc.is_null(table["hidden"]))), held_out.hide(positions)


class Recommender(nn.Module):
    """A vector of the visible identifiers of a function, and one of each identifier that may be hidden.

    The score of an identifier is the product of both, and the logarithm of its popularity in training. So the model
    begins close to the baseline that it has to beat.
    """

    popularity: Tensor

    def __init__(self, counts: Tensor, dim: int) -> None:
        super().__init__()
        self.context = nn.EmbeddingBag(len(counts), dim, mode="mean")
        self.items = nn.Embedding(len(counts), dim)
        for table in (self.context, self.items):
            nn.init.normal_(table.weight, std=0.1)
        self.register_buffer("popularity", counts.clamp(min=1).log(), persistent=False)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """The score of every identifier, [examples, identifiers]."""
        return F.linear(self.context(ids, offsets), self.items.weight, self.popularity)

    def loss(self, ids: Tensor, offsets: Tensor, hidden: Tensor, others: Tensor) -> Tensor:
        """The cross-entropy of each hidden identifier among those of all examples that are not `others`.

        These are drawn by popularity, so it is not added to their scores here (Bengio and Senécal, 2008).
        """
        scores = self.context(ids, offsets) @ self.items(hidden).T
        return F.cross_entropy(scores.masked_fill(others, -torch.inf), torch.arange(len(hidden)))


def rows_of(ids: Tensor, offsets: Tensor) -> Tensor:
    """The example that each of `ids` belongs to."""
    return torch.searchsorted(offsets, torch.arange(len(ids)), right=True) - 1


def same_function(ids: Tensor, offsets: Tensor, hidden: Tensor, num_ids: int) -> Tensor:
    """Which of the hidden identifiers of other examples each example's function has too, so they are not wrong."""
    found = torch.zeros(len(hidden), num_ids, dtype=torch.bool)
    found[rows_of(ids, offsets), ids] = True
    found[torch.arange(len(hidden)), hidden] = True
    return found[:, hidden].fill_diagonal_(False)


def hit_rate(scores: Tensor, ids: Tensor, offsets: Tensor, hidden: Tensor) -> float:
    """The part of the examples whose hidden identifier is among the first ten that are not visible."""
    unseen = scores.index_put((rows_of(ids, offsets), ids), torch.tensor(-torch.inf))
    return (unseen.topk(10).indices == hidden[:, None]).any(1).float().mean().item()


def positions(step: int, count: int, batch: int) -> Tensor:
    """Which of `count` examples a step takes: each once in a pass, in an order of its own in each pass."""
    number, place = divmod(step, count // batch)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(number))
    return order[place * batch : (place + 1) * batch]


def shard(x: Tensor) -> Tensor:
    """Each rank keeps its part of a tensor that is the same on all ranks. Sends nothing."""
    return sw.distribute_tensor(x, placements=[sw.Shard(0)], src_data_rank=None)


@dataclass(frozen=True)
class Result:
    """What a run found."""

    popularity: float
    """Hit rate of the most popular identifiers."""
    model: float
    expected: dict[str, list[str]]
    """For some visible identifiers, what the model expects beside them."""


def train(args: argparse.Namespace) -> Result:
    """Trains from the latest checkpoint on. Runs on every rank."""
    words, functions, test = read(DATA)
    torch.manual_seed(0)
    model = Recommender(functions.ids.bincount(minlength=len(words)).float(), args.dim)
    sw.shard_module(model, {"*.weight": sw.Shard(0)})
    optimizer = torch.optim.Adagrad(model.parameters(), lr=args.lr)
    say(f"{sw.sharding_table(model)}")
    run = Run(args, model, optimizer)
    for step in run.steps():
        ids, offsets, hidden = functions.hide(positions(step, len(functions.ids), args.batch))
        run.loss = model.loss(shard(ids), shard(offsets), hidden, same_function(ids, offsets, hidden, len(words)))
        optimizer.zero_grad()
        run.loss.backward()
        optimizer.step()
    with torch.no_grad():
        ids, offsets, hidden = test
        baseline = hit_rate(model.popularity.expand(len(hidden), -1), *test)
        reached = hit_rate(model(shard(ids), shard(offsets)), *test)
        beside = torch.tensor([words.index(word) for word in SHOWN])
        best = (model(beside, torch.arange(len(beside))) - model.popularity).full_tensor().topk(6).indices
    expected = {
        word: [words[i] for i in row if words[i] != word][:5] for word, row in zip(SHOWN, best.tolist(), strict=True)
    }
    return Result(baseline, reached, expected)


def main() -> None:
    options = parser("Train a recommender on several ranks.", folder="runs/recommender", steps=800, save_every=200)
    options.add_argument("--batch", type=int, default=512, help="examples of a step, of all ranks")
    options.add_argument("--dim", type=int, default=128, help="columns of the tables")
    options.add_argument("--lr", type=float, default=0.1)
    args = options.parse_args()
    result = on_ranks(train, args)
    if result is None:
        return
    print("\nHidden identifiers of functions in files that it did not train on:")
    print_table(["", "HR@10"], [("most popular", f"{result.popularity:.3f}"), ("this model", f"{result.model:.3f}")])
    for word, others in result.expected.items():
        print(f"Beside {word}: {', '.join(others)}")
    print(f"\nCheckpoint: {latest(args.folder)}")
    print(f"Go on from it on three ranks: make train ARGS='--nproc 3 --steps {args.steps + 200}'")


if __name__ == "__main__":
    main()
