"""Every sharding with every kind of lookup and optimizer beside one process: four steps, results, tables, states."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import pytest
import torch

from shardwise._layout import Boxes, Mesh, OnRanks, Placement, Placements, Replicate, Shard
from shardwise._lookups import pooling
from shardwise.embedding import (
    SGD,
    Adagrad,
    Adam,
    EmbeddingBagConfig,
    EmbeddingConfig,
    Lamb,
    PoolingType,
    RowWiseAdagrad,
    RowWiseAdam,
    RowWiseLamb,
)
from shardwise.embedding.kernels import Kernels
from shardwise.embedding.optimizers import RowOptimizer
from shardwise.errors import PlanError
from tests.embedding.cases import Case, check
from tests.embedding.kernel_cases import KERNELS
from tests.embedding.one_process import Bags, RankBatch

STEPS = 4
ROWS, DIMS = (7, 10, 5, 12), (4, 9, 4, 6)
FEATURES = ("g1", "f3", "f0", "f1", "f2")  # not in the order of the tables
NAMES = ("t0", "t1", "t2", "t3")


@dataclass(frozen=True)
class Kind:
    """What is looked up, and how.

    Attributes:
        pooling: "sum", "mean" or "rows".
        variable: whether features have different numbers of bags.
        dense: whether tables are trained by gradients, not by optimizers of rows.
        by_rows: whether ranks request rows and add them up themselves, also where it costs more.
    """

    pooling: str
    weighted: bool = False
    variable: bool = False
    padding: bool = False
    dense: bool = False
    by_rows: bool = False
    max_norm: bool = False

    def table(self, number: int) -> EmbeddingConfig:
        features = ["f1", "g1"] if number == 1 else [f"f{number}"]
        config = EmbeddingConfig(
            ROWS[number],
            DIMS[number],
            f"t{number}",
            feature_names=features,
            padding_idx=2 if self.padding and number != 3 else None,
            max_norm=1.5 + number if self.max_norm else None,
        )
        if self.pooling == "rows":
            return config
        mean = self.pooling == "mean" and number != 2  # one of them has sums
        return EmbeddingBagConfig(**vars(config), pooling=PoolingType.MEAN if mean else PoolingType.SUM)


KINDS = {
    "sums": Kind("sum"),
    "means": Kind("mean"),
    "weighted sums": Kind("sum", weighted=True),
    "rows": Kind("rows"),
    "dense sums": Kind("sum", dense=True),
    "means of any numbers of bags, padded": Kind("mean", variable=True, padding=True),
    "dense rows of any numbers of bags, padded": Kind("rows", variable=True, padding=True, dense=True),
    "rows of any numbers of bags, padded": Kind("rows", variable=True, padding=True),
    "sums of requested rows, padded": Kind("sum", variable=True, padding=True, by_rows=True),
    "sums of limited norm": Kind("sum", max_norm=True),
}


def batch_of(rank: int, step: int, variable: bool = False) -> RankBatch:
    """A ragged batch, which differs from rank to rank; some ranks and steps have no bag, or no id."""
    generator = torch.Generator().manual_seed(1000 * step + rank)

    def draw(high: int, count: int) -> torch.Tensor:
        return torch.randint(0, high, (count,), generator=generator)

    bags = draw(6, len(FEATURES) if variable else 1).expand(len(FEATURES)).tolist()
    if step == 1 or (step == 3 and rank == 1):
        bags = [0] * len(FEATURES)
    most = 1 if step == 2 and rank == 0 else 6
    lengths = [draw(most, n) for n in bags]
    found = {}
    for name, of_bags in zip(FEATURES, lengths, strict=True):
        count = int(of_bags.sum())
        found[name] = Bags(of_bags, draw(ROWS[int(name[1])], count), draw(9, count) / 4 - 0.25)
    return found


# ---- shardings ------------------------------------------------------------------------------------------------


def divided(length: int, size: int) -> list[int]:
    """Two for the first position, nothing for those in the middle, the rest for the last."""
    return [2, *[0] * (size - 2), length - 2] if size > 1 else [length]


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
    for size, name in [*product((1, 12), ("row", "column", "data-parallel")), (5, "mixed")]:  # 12: some hold nothing
        found[f"{name}, {size} ranks"] = Mesh((size,)), {NAMES[t]: LINES[name](size, t) for t in range(4)}
    mesh = Mesh((2, 2), names=("host", "rank"))
    for name, placements in GRIDS.items():
        only = NAMES[:1] if name == "uneven grid" else NAMES
        found[f"{name}, (2, 2)"] = mesh, dict.fromkeys(only, placements)
    return found | {f"mixed {i}, (2, 2)": (mesh, plan) for i, plan in enumerate(MIXED_GRIDS)}


SHARDINGS = shardings()
CLIPPED = RowWiseAdagrad(0.1, max_gradient_norm=0.5, weight_decay=0.1, decoupled_weight_decay=True)
OPTIMIZERS: Sequence[RowOptimizer] = (
    SGD(1 / 64), Adagrad(0.1), RowWiseAdagrad(0.1), Adam(0.1), RowWiseAdam(0.1), Lamb(0.1), CLIPPED,
    RowWiseLamb(0.1, weight_decay=0.1),
)  # fmt: skip


def equals_one_process(
    sharding: str, name: str, optimizers: Sequence[RowOptimizer], kernels: Kernels = KERNELS[0], real: bool = False
) -> None:
    """Train with an optimizer for each table."""
    (mesh, plan), kind = SHARDINGS[sharding], KINDS[name]
    case = Case(
        [kind.table(t) for t in range(4)],
        kind.pooling != "rows",
        kind.weighted,
        mesh,
        plan,
        None if kind.dense else dict(zip(NAMES, optimizers, strict=True)),
        [[batch_of(rank, step, kind.variable) for rank in range(mesh.size())] for step in range(STEPS)],
        signed=kind.pooling != "mean",  # else sums of gradients that cancel out are not exactly 0, and Adam scales them
        kernels=kernels,
        exact=kind.pooling != "mean" and not kind.max_norm and (kind.dense or set(optimizers) == {SGD(1 / 64)}),
        halving=not kind.dense,
        calls=0 if mesh.size() == 1 else 3,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pooling, "INDEXED_ID", -1000 if kind.by_rows else pooling.INDEXED_ID)
        by_columns = any(b.sizes[1] < DIMS[int(t[1])] for t, boxes in case.blocks().items() for b in boxes)
        if kind.max_norm and by_columns:
            with pytest.raises(PlanError, match=r"has a max_norm, which needs full rows"):
                check(case)
            return
        check(case, f"{sharding}, {name}, {optimizers}, {kernels.name}", real)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_each_sharding_with_a_kind_of_lookup_and_optimizers(sharding: str) -> None:
    number = list(SHARDINGS).index(sharding)
    name, first = list(KINDS)[number % len(KINDS)], number // len(KINDS) + number
    apart = number % 2  # the same one lets tables share stacks
    chosen = [OPTIMIZERS[(first + apart * t) % len(OPTIMIZERS)] for t in range(4)]
    equals_one_process(sharding, name, chosen, KERNELS[number % len(KERNELS)])


@pytest.mark.parametrize(
    ("kind", "sharding"),
    [
        (kind, sharding)
        for number, kind in enumerate(KINDS)
        for sharding in ("mixed, 3 ranks", f"mixed {number % 2}, (2, 2)")
    ],
)
def test_mixed_shardings_with_an_optimizer_for_each_table(kind: str, sharding: str) -> None:
    for kernels in KERNELS[list(SHARDINGS).index(sharding) % 2 :: 2] if kind in ("sums", "rows") else KERNELS[:1]:
        equals_one_process(sharding, kind, OPTIMIZERS[1:5], kernels)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_every_sharding_with_every_kind_of_lookup_and_optimizer(sharding: str) -> None:
    for name, kind in KINDS.items():
        varies = kind.variable or kind.max_norm or kind.dense
        for number, optimizer in enumerate(OPTIMIZERS[:2] if varies else OPTIMIZERS):
            if number == 0 or not kind.dense:
                equals_one_process(sharding, name, [optimizer] * 4)
