"""Every sharding with every optimizer and pooling beside one process: ten steps, results, tables and states."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product

import pytest
import torch

from shardwise._layout import Boxes, Mesh, OnRanks, Placement, Placements, Replicate, Shard
from shardwise.embedding import (
    SGD,
    Adagrad,
    Adam,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    RowWiseAdagrad,
    RowWiseAdam,
)
from shardwise.embedding.kernels import Kernels
from shardwise.embedding.optimizers import RowOptimizer
from tests.embedding.cases import Case, check
from tests.embedding.kernel_cases import KERNELS
from tests.embedding.one_process import Bags, RankBatch

STEPS = 10
ROWS, DIMS = (7, 10, 5, 12), (4, 9, 4, 6)
FEATURES = ("g1", "f3", "f0", "f1", "f2")  # not in the order of the tables
NAMES = ("t0", "t1", "t2", "t3")


def table(number: int, pooling: str) -> EmbeddingConfig:
    features = ["f1", "g1"] if number == 1 else [f"f{number}"]
    rows, dim = ROWS[number], DIMS[number]
    if pooling == "rows":
        return EmbeddingConfig(rows, dim, f"t{number}", feature_names=features)
    kind = PoolingType.MEAN if pooling == "mean" else PoolingType.SUM
    return EmbeddingBagConfig(rows, dim, f"t{number}", feature_names=features, pooling=kind)


def batch_of(rank: int, step: int) -> RankBatch:
    """A ragged batch, which differs from rank to rank; some ranks and steps have no bag, or no id."""
    generator = torch.Generator().manual_seed(1000 * step + rank)

    def draw(high: int, count: int) -> torch.Tensor:
        return torch.randint(0, high, (count,), generator=generator)

    bags = 0 if step == 3 or (step == 6 and rank == 1) else int(draw(6, 1))
    most = 1 if step == 4 and rank == 0 else 6
    lengths = [draw(most, bags) for _ in FEATURES]
    found = {}
    for name, of_bags in zip(FEATURES, lengths, strict=True):
        count = int(of_bags.sum())
        found[name] = Bags(of_bags, draw(ROWS[int(name[1])], count), draw(9, count) / 4 - 0.25)
    return found


# ---- shardings ------------------------------------------------------------------------------------------------


def divided(length: int, size: int) -> list[int]:
    """Two for the first position, nothing for those in the middle, the rest for the last."""
    return [2, *[0] * (size - 2), length - 2]


def bands(size: int, rows: int, cols: int) -> Boxes:
    """The first rank has the first rows and, in another box, the last; ranks between have nothing."""
    hands: list[list[tuple[tuple[int, int], tuple[int, int]]]] = [[] for _ in range(size)]
    hands[0] = [((0, 0), (2, cols)), ((rows - 1, 0), (1, cols))]
    hands[-1] = [((2, 0), (rows - 3, cols))]
    return Boxes(hands)


def rectangles(size: int, rows: int, cols: int) -> Boxes:
    """The last two columns in two boxes of the last rank, the others in one of the first."""
    hands: list[list[tuple[tuple[int, int], tuple[int, int]]]] = [[] for _ in range(size)]
    hands[0] = [((0, 0), (rows, cols - 2))]
    hands[-1] = [((0, cols - 2), (3, 2)), ((3, cols - 2), (rows - 3, 2))]
    return Boxes(hands)


Make = Callable[[int, int], Placements]  # of a number of ranks, and of a table


def mixed(size: int, t: int) -> Placements:
    kinds: Sequence[Placement] = (Shard(0), Shard(1, divided(DIMS[1], size)), OnRanks(size - 1), Replicate())
    return bands(size, ROWS[t], DIMS[t]) if size == 3 and t == 3 else kinds[t]


LINES: Mapping[str, Make] = {
    "row": lambda size, t: Shard(0),
    "uneven row": lambda size, t: Shard(0, divided(ROWS[t], size)),
    "column": lambda size, t: Shard(1),
    "uneven column": lambda size, t: Shard(1, divided(DIMS[t], size)),
    "table": lambda size, t: OnRanks(t % size),
    "data-parallel": lambda size, t: Replicate(),
    "boxes of rows": lambda size, t: bands(size, ROWS[t], DIMS[t]),
    "boxes of columns": lambda size, t: rectangles(size, ROWS[t], DIMS[t]),
    "mixed": mixed,
}
GRIDS: Mapping[str, Sequence[Placement]] = {
    "table-row": [OnRanks(1), Shard(0)],
    "table-column": [OnRanks(0), Shard(1)],
    "grid": [Shard(1), Shard(0)],
    "uneven grid": [Shard(1, (1, 3)), Shard(0, (5, 2))],
    "replicas of rows": [Replicate(), Shard(0)],
    "rows of replicas": [Shard(0), Replicate()],
    "replicas of columns": [Replicate(), Shard(1)],
    "replicas of tables": [Replicate(), OnRanks(1)],
    "rows over both": [Shard(0), Shard(0)],
    "data-parallel": [Replicate(), Replicate()],
}
MIXED_GRIDS = [
    {"t0": GRIDS["uneven grid"], "t1": GRIDS["table-row"], "t2": GRIDS["replicas of rows"], "t3": GRIDS["grid"]},
    {"t0": GRIDS["table-column"], "t1": GRIDS["data-parallel"], "t2": GRIDS["rows over both"],
     "t3": [Replicate(), bands(2, 12, 6)]},
]  # fmt: skip


def shardings() -> dict[str, tuple[Mesh, Mapping[str, Placements]]]:
    found: dict[str, tuple[Mesh, Mapping[str, Placements]]] = {}
    for size, (name, make) in product((2, 3, 4), LINES.items()):
        found[f"{name}, {size} ranks"] = Mesh((size,)), {NAMES[t]: make(size, t) for t in range(4)}
    mesh = Mesh((2, 2), names=("host", "rank"))
    for name, placements in GRIDS.items():
        only = NAMES[:1] if name == "uneven grid" else NAMES
        found[f"{name}, (2, 2)"] = mesh, dict.fromkeys(only, placements)
    return found | {f"mixed {i}, (2, 2)": (mesh, plan) for i, plan in enumerate(MIXED_GRIDS)}


SHARDINGS = shardings()
OPTIMIZERS: Sequence[RowOptimizer] = (SGD(0.1), Adagrad(0.1), RowWiseAdagrad(0.1), Adam(0.1), RowWiseAdam(0.1))
POOLINGS = ("sum", "mean", "weighted", "rows")


def equals_one_process(
    sharding: str, pooling: str, optimizers: Sequence[RowOptimizer], kernels: Kernels = KERNELS[0]
) -> None:
    mesh, plan = SHARDINGS[sharding]
    configs = [table(t, pooling) for t in range(4)]
    batches = [[batch_of(rank, step) for rank in range(mesh.size())] for step in range(STEPS)]
    of_tables = dict(zip(NAMES, optimizers, strict=True))
    signed = pooling != "mean"  # else sums of gradients that cancel out are not exactly zero, and Adagrad scales them
    check(Case(configs, pooling != "rows", pooling == "weighted", mesh, plan, of_tables, batches, signed, kernels))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_every_sharding_pooling_and_optimizer(sharding: str, pooling: str, optimizer: RowOptimizer) -> None:
    equals_one_process(sharding, pooling, [optimizer] * 4)


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("sharding", ["mixed, 3 ranks", "mixed 0, (2, 2)", "mixed 1, (2, 2)"])
def test_mixed_shardings_with_an_optimizer_for_each_table(sharding: str, pooling: str, kernels: Kernels) -> None:
    equals_one_process(sharding, pooling, OPTIMIZERS[1:], kernels)
