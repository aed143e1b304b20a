"""Random collections, shardings and batches beside one process, several steps in a row."""

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise._layout import Boxes, Mesh, OnRanks, Placement, Replicate, Shard
from shardwise._lookups import pooling
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
from shardwise.embedding.optimizers import RowOptimizer
from tests.embedding.cases import Case, check
from tests.embedding.kernel_cases import KERNELS
from tests.embedding.one_process import Bags, RankBatch
from tests.strategies import divisions

FEATURES = ("f0", "f1", "f2", "f3", "f4")
MESHES = ((1,), (2,), (3,), (4,), (2, 2), (1, 3), (2, 1))
OPTIMIZERS: Sequence[RowOptimizer] = (SGD(1 / 64), Adagrad(0.5), RowWiseAdagrad(0.5), Adam(0.25), RowWiseAdam(0.25))
FAR = (-(2**63), -(2**31) - 1, -1, 2**31, 2**63 - 1)
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16)


@st.composite
def configs(draw: st.DrawFn, pooled: bool) -> list[EmbeddingConfig]:
    found: list[EmbeddingConfig] = []
    for number in range(draw(st.integers(1, 5))):
        rows = draw(st.integers(1, 40))
        config = EmbeddingConfig(
            num_embeddings=rows,
            embedding_dim=draw(st.integers(1, 9)),
            name=f"t{number}",
            data_type=draw(st.sampled_from(DTYPES)),
            feature_names=draw(st.lists(st.sampled_from(FEATURES), min_size=1, max_size=3, unique=True)),
            padding_idx=draw(st.one_of(st.none(), st.integers(0, rows - 1))),
            bad_ids=draw(st.sampled_from(["error", "clip", "hash", "zero"])),
        )
        if pooled:
            config = EmbeddingBagConfig(**vars(config), pooling=draw(st.sampled_from(PoolingType)))
        found.append(config)
    return found


@st.composite
def placements(draw: st.DrawFn, mesh: Mesh, shape: tuple[int, ...]) -> list[Placement]:
    """Of a table: each mesh axis shards rows or columns, evenly or not, replicates, or has one position hold it all."""
    if mesh.ndim == 1 and draw(st.integers(0, 5)) == 0:
        return [draw(boxes(mesh.size(), shape))]
    found: list[Placement] = []
    sizes = {dim: [size] for dim, size in enumerate(shape)}  # of the shards of the axes before
    for positions in mesh.shape:
        kind = draw(st.sampled_from(["shard", "shard", "uneven", "uneven", "on ranks", "replicate"]))
        dim = draw(st.integers(0, 1))
        if kind == "uneven":
            rows = [draw(divisions(size, positions)) for size in sizes[dim]]
            found.append(Shard(dim, rows if len(rows) > 1 else rows[0]))
            sizes[dim] = [size for row in rows for size in row]
        elif kind == "shard" and len(sizes[dim]) == 1:
            found.append(Shard(dim))
            step = -(-sizes[dim][0] // positions)
            sizes[dim] = [max(0, min(step, sizes[dim][0] - step * i)) for i in range(positions)]
        else:
            on = OnRanks(draw(st.integers(0, positions - 1)))
            found.append(on if kind == "on ranks" else Replicate())
    return found


@st.composite
def boxes(draw: st.DrawFn, ranks: int, shape: tuple[int, ...]) -> Boxes:
    """Rows in bands, each divided into as many equal columns, dealt to the ranks."""
    rows, cols = shape
    widths = [n for n in range(1, cols + 1) if cols % n == 0]
    hands: list[list[Any]] = [[] for _ in range(ranks)]
    width_of = [draw(st.sampled_from(widths)) for _ in range(ranks)]
    ends = sorted({0, rows, *draw(st.lists(st.integers(0, rows), max_size=3))})
    for first, stop in pairwise(ends):
        width = draw(st.sampled_from(width_of))
        owners = [rank for rank in range(ranks) if width_of[rank] == width]
        for left in range(0, cols, width):
            hands[draw(st.sampled_from(owners))].append(((first, left), (stop - first, width)))
    return Boxes(hands)


SIZES = {"usual": (5, 4), "no bags": (0, 1), "empty bags": (5, 0), "many": (40, 60), "one each": (40, None)}


@st.composite
def batches(draw: st.DrawFn, tables: Sequence[EmbeddingConfig], rank: int) -> RankBatch:
    """The bags of each feature of a rank, in any order."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)) * 10 + rank)
    used = sorted({name for config in tables for name in config.feature_names})
    found: dict[str, Bags] = {}
    variable, of_all = draw(st.booleans()), draw(st.sampled_from(list(SIZES)))
    id_dtype, length_dtype = (draw(st.sampled_from([torch.int32, torch.int64])) for _ in range(2))
    others = draw(st.sampled_from([(), (), ("other",)]))
    bags = int(torch.randint(0, SIZES[of_all][0] + 1, (), generator=generator))
    for name in draw(st.permutations([*used, *others])):
        kind = draw(st.sampled_from(list(SIZES))) if variable else of_all
        most = SIZES[kind][1]
        if variable:
            bags = int(torch.randint(0, SIZES[kind][0] + 1, (), generator=generator))
        lengths = torch.randint(0, most + 1, (bags,), generator=generator) if most is not None else torch.ones(bags)
        count = int(lengths.sum())
        ids = draw_ids(draw, [c for c in tables if name in c.feature_names], count, id_dtype, generator)
        weights = torch.randint(1, 9, (count,), generator=generator) / 4
        found[name] = Bags(lengths.to(length_dtype), ids, weights)
    return found


def draw_ids(
    draw: st.DrawFn, tables: Sequence[EmbeddingConfig], count: int, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """Ids that are valid in all tables, uniform, skewed or all the same; sometimes some that are not."""
    rows = min((config.num_embeddings for config in tables), default=7)
    kind = draw(st.sampled_from(["uniform", "skewed", "same"]))
    uniform = torch.rand(count, generator=generator)
    ids = (rows * uniform ** (8 if kind == "skewed" else 1)).long().clamp(max=rows - 1)
    if kind == "same" and count:
        ids = ids[:1].expand(count).clone()
    if count and draw(st.integers(0, 3)) == 0:
        often = draw(st.sampled_from([0.1, 1.0]))
        bad = torch.rand(count, generator=generator) < often
        near = torch.tensor(
            [i for i in (rows, rows + 3, *FAR) if torch.iinfo(dtype).min <= i <= torch.iinfo(dtype).max]
        )
        ids[bad] = near[torch.randint(len(near), (int(bad.sum()),), generator=generator)]
    return ids.to(dtype)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    pooled = draw(st.booleans())
    weighted = pooled and draw(st.booleans())
    tables = draw(configs(pooled))
    shape = draw(st.sampled_from(MESHES))
    mesh = Mesh(shape)
    plan = {c.name: draw(placements(mesh, (c.num_embeddings, c.embedding_dim))) for c in tables}
    optimizers = {c.name: draw(st.sampled_from(OPTIMIZERS)) for c in tables} if draw(st.integers(0, 3)) else None
    if optimizers is not None:
        same = draw(st.booleans())
        optimizers = dict.fromkeys(optimizers, next(iter(optimizers.values()))) if same else optimizers
    steps = draw(st.integers(1, 5))
    drawn = [[draw(batches(tables, rank)) for rank in range(prod(shape))] for _ in range(steps)]
    kernels = draw(st.sampled_from(KERNELS))
    return Case(tables, pooled, weighted, mesh, plan, optimizers, drawn, signed=False, kernels=kernels)


few = settings(max_examples=40, deadline=None, derandomize=True, database=None)


@(settings() if settings.get_current_profile_name() == "many" else few)
@given(cases(), st.booleans())
def test_random_collections_equal_one_process(case: Case, rows_are_requested: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if rows_are_requested:
            patch.setattr(pooling, "INDEXED_ID", -(10**6))
        check(case)
