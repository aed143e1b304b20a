"""Runs an op in many layouts and compares it with one process.

For each mesh the tensor arguments are laid out as every row of the op's rule has them, and as a seeded choice (or
all) of the combinations of replicated, evenly and unevenly sharded, empty shards, one rank, boxes, and Partial.
"""

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice, pairwise, product
from math import prod

import torch
from torch import Tensor

from shardwise._layout import REPLICATE, Boxes, Layout, Mesh, OnRanks, Partial, Placement, Shard
from shardwise._rules import Meta, Row
from shardwise._rules.registry import rule_of
from shardwise._tensor.dispatch.resolve import NoRowError, Operand, Slot, choose
from shardwise.errors import LayoutError, RuleError
from shardwise.testing.worlds import world
from tools.op_judge import Judge, Observed, Sample, assert_close_bounds, last_saved, observe_rank

MESHES = (Mesh((1,)), Mesh((2,)), Mesh((3,)), Mesh((4,)), Mesh((2, 2)))
UNSIGNED = (torch.bool, torch.uint8)


# ---- layouts -------------------------------------------------------------------------------------------------

Combination = tuple[tuple[Placement, ...], ...]  # for each operand a placement for each axis


def possible_rows(sample: Sample, choices: Sequence[Sequence[Placement]]) -> list[Row]:
    """All rows of the op's rule, for operands placed as any of `choices`, that some operands can be laid out for."""
    rule = rule_of(sample.op)
    tensors = sample.tensors()
    found: dict[Row, None] = {}
    if rule is None:
        return []
    for index, options in enumerate(choices):
        for placement in options:
            call = sample.on(_metas(tensors, {index: placement}))
            with suppress(NotImplementedError, RuleError):  # the op is decomposed instead, or refused
                found |= dict.fromkeys(rule.rows(*call.args, **call.kwargs))
    return [row for row in found if all(map(_possible, tensors, row.inputs))]


def _metas(tensors: Sequence[Tensor], placements: Mapping[int, Placement]) -> list[Meta]:
    return [Meta(tuple(x.shape), x.dtype, placements.get(i, REPLICATE)) for i, x in enumerate(tensors)]


def _possible(x: Tensor, placement: Placement) -> bool:
    """Booleans and bytes are not Partial here, integers not averaged, and complex numbers have no maximum."""
    if isinstance(placement, Partial):
        if x.is_complex():
            return placement.reduce_op not in ("max", "min")
        return x.is_floating_point() or (x.dtype not in UNSIGNED and placement.reduce_op != "avg")
    return True


def placements_of(x: Tensor, positions: int, rng: random.Random) -> list[Placement]:
    """Placements of `x` on one axis."""
    found: list[Placement] = [REPLICATE, OnRanks(positions - 1), _boxes(tuple(x.shape), positions)]
    for dim in range(x.ndim):
        found += [Shard(dim), Shard(dim, _uneven(x.shape[dim], positions, rng))]
    if x.dtype not in UNSIGNED:
        extreme = rng.choice(["max", "min", "product"])
        found += [Partial(), Partial("product" if x.is_complex() else extreme)]  # complex numbers have no order
    if x.is_floating_point():
        found.append(Partial("avg"))
    return found


def _uneven(length: int, positions: int, rng: random.Random) -> tuple[int, ...]:
    offsets = sorted(rng.randint(0, length) for _ in range(positions - 1))
    return tuple(b - a for a, b in pairwise([0, *offsets, length]))


def _boxes(shape: tuple[int, ...], positions: int) -> Boxes:
    """Two boxes on one position, one on another where there is one, none on the rest."""
    boxes: list[list[tuple[tuple[int, ...], tuple[int, ...]]]] = [[] for _ in range(positions)]
    if not shape:
        return Boxes([*boxes[1:], [((), ())]])
    rest = tuple(0 for _ in shape[1:])
    offsets = [0, shape[0] // 3, 2 * shape[0] // 3, shape[0]]
    for position, (a, b) in zip((0, positions - 1, 0), pairwise(offsets), strict=True):
        boxes[position].append(((a, *rest), (b - a, *shape[1:])))
    return Boxes(boxes)


def layouts_for(sample: Sample, mesh: Mesh, limit: int, seed: int) -> list[tuple[Layout, ...]]:
    """Combinations of layouts of the operands: those of rows first, then a seeded choice up to `limit`."""
    rng = random.Random(seed)
    choices = [placements_of(x, mesh.shape[0], rng) for x in sample.tensors()]
    rows = sorted({row.inputs for row in possible_rows(sample, choices)}, key=str)
    found: dict[tuple[Layout, ...], None] = {}
    for number, row in enumerate(rows):
        of_row = (_layouts(sample, mesh, combination, rng) for combination in _of_row(sample, row, mesh, number, rng))
        found |= dict.fromkeys(islice((layouts for layouts in of_row if layouts is not None), 1))
    for combination in _shuffled(choices, mesh, limit, rng):
        if len(found) >= limit:
            break
        layouts = _layouts(sample, mesh, combination, rng)
        if layouts is not None:
            found[layouts] = None
    return list(found)


def _layouts(sample: Sample, mesh: Mesh, combination: Combination, rng: random.Random) -> tuple[Layout, ...] | None:
    order = rng.sample(range(mesh.ndim), mesh.ndim)
    pairs = zip(combination, sample.tensors(), strict=True)
    try:
        return tuple(Layout(mesh, placements, x.shape, order) for placements, x in pairs)
    except LayoutError:
        return None  # such as maxima of sums, which no tensor has


def _of_row(
    sample: Sample, row: tuple[Placement, ...], mesh: Mesh, number: int, rng: random.Random
) -> Iterator[Combination]:
    """The operands as in a row: on every axis, or on one; every other row with uneven shards."""
    if mesh.ndim > 1:
        yield tuple((p,) * mesh.ndim for p in row)
        yield tuple((p, *(REPLICATE,) * (mesh.ndim - 1)) for p in row)
        return
    if (number + mesh.shape[0]) % 2:
        sizes: dict[int, tuple[int, ...]] = {}  # by length: dims that must be sharded alike have one length
        yield tuple((_resized(p, x, mesh.shape[0], sizes, rng),) for p, x in zip(row, sample.tensors(), strict=True))
    yield tuple((p,) for p in row)


def _resized(
    placement: Placement, x: Tensor, positions: int, sizes: dict[int, tuple[int, ...]], rng: random.Random
) -> Placement:
    if not isinstance(placement, Shard):
        return placement
    length = x.shape[placement.dim]
    if length not in sizes:
        sizes[length] = _uneven(length, positions, rng)
    return Shard(placement.dim, sizes[length])


def _shuffled(
    choices: Sequence[Sequence[Placement]], mesh: Mesh, limit: int, rng: random.Random
) -> Iterator[Combination]:
    """Distinct combinations on one axis in random order, all of them if there are few; random ones on several axes."""
    if mesh.ndim == 1:
        count = prod(map(len, choices))
        for number in rng.sample(range(count), min(count, 64 * max(limit, 1))):
            chosen = []
            for options in reversed(choices):
                number, index = divmod(number, len(options))
                chosen.append((options[index],))
            yield tuple(chosen[::-1])
    for _ in range(4 * limit):
        yield tuple(tuple(rng.choice(options) for _ in mesh.shape) for options in choices)


# ---- the check -----------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """How many combinations were run, how many an in-place op or its rule refused, and how often each row was taken."""

    cases: int = 0
    refused: int = 0
    rows: Counter[str] = field(default_factory=Counter)  # by the row's `why`


def assert_equals_one_process(samples: Sequence[Sample], meshes: Sequence[Mesh] = MESHES, limit: int = 12) -> Tally:
    """Run all samples on all meshes, `limit` combinations of layouts (or all rows, if those are more) each."""
    tally = Tally()
    judges = [_judge(sample) for sample in samples]
    line = _line(meshes)
    for mesh, (number, judge) in product(meshes, enumerate(judges)):
        cases = layouts_for(judge.sample, mesh, limit, seed=number)
        results = world(mesh.size()).run(_observe_all, judge.sample, cases)
        for index, layouts in enumerate(cases):
            tally.cases += 1
            if results[0][index] is None:
                tally.refused += 1
            else:
                tally.rows.update(rows_taken(judge.sample, layouts))
            for rank, by_rank in enumerate(results):
                if (seen := by_rank[index]) is not None:
                    _check(judge, seen, layouts, rank)
        if mesh is line and judge.sample.gradients:
            ran = [layouts for index, layouts in enumerate(cases) if results[0][index] is not None]
            _check_saved(judge.sample, mesh, ran)
    return tally


def _line(meshes: Sequence[Mesh]) -> Mesh | None:
    """The first mesh with one axis of several ranks."""
    return next((mesh for mesh in meshes if mesh.ndim == 1 and mesh.size() > 1), None)


def _check_saved(sample: Sample, mesh: Mesh, cases: Sequence[Sequence[Layout]]) -> None:
    """All ranks save the last tensor for backward after the same collective of the call, or none saves any.

    There a checkpoint stops to recompute. A rank that went on would call collectives that others do not call.
    """
    by_rank = world(mesh.size()).run(lambda: [last_saved(sample, layouts) for layouts in cases])
    for index, layouts in enumerate(cases):
        found = [of_rank[index] for of_rank in by_rank]
        if len(set(found)) > 1:
            error = AssertionError(f"ranks save the last tensor for backward after other collectives: {found}")
            error.add_note(_described(sample, layouts))
            raise error


def _judge(sample: Sample) -> Judge:
    judge = Judge(sample)
    for seen in (judge.plain, judge.expected):
        if seen.error is not None:
            raise seen.error
    return judge


def _check(judge: Judge, seen: Observed, layouts: Sequence[Layout], rank: int) -> None:
    found = judge.difference(seen, layouts, rank, assert_close_bounds(judge.sample.tolerance))
    if found is not None:
        error = AssertionError(found[1])
        error.add_note(_described(judge.sample, layouts))
        raise error


def rows_taken(sample: Sample, layouts: Sequence[Layout]) -> list[str]:
    """Why each axis runs the op the way it does; nothing for an op without a rule, or without a row that fits."""
    try:
        return [row.why for row in _chosen(sample, layouts)]
    except RuleError:
        return []


def _chosen(sample: Sample, layouts: Sequence[Layout]) -> tuple[Row, ...]:
    rule = rule_of(sample.op)
    if rule is None:
        return ()
    operands = [Operand(layout, x.dtype) for layout, x in zip(layouts, sample.tensors(), strict=True)]
    call = sample.on([Slot(i) for i in range(len(operands))])
    return choose(str(sample), rule, operands, call.args, call.kwargs)


def _refuses(sample: Sample, layouts: Sequence[Layout]) -> bool:
    """Whether the rule says so: an op without a row for these layouts is to run on others."""
    try:
        _chosen(sample, layouts)
    except NoRowError:
        return False
    except RuleError:
        return True
    return False


def _observe_all(sample: Sample, cases: Sequence[Sequence[Layout]]) -> list[Observed | None]:
    """What this rank sees in each case; None where an in-place op or the rule itself refuses the layouts."""
    found: list[Observed | None] = []
    for layouts in cases:
        seen = observe_rank(sample, layouts)
        if seen.error is None:
            found.append(seen)
        elif not seen.stage and isinstance(seen.error, RuleError) and (sample.in_place or _refuses(sample, layouts)):
            found.append(None)
        else:
            seen.error.add_note(_described(sample, layouts))
            raise seen.error
    return found


def _described(sample: Sample, layouts: Sequence[Layout]) -> str:
    rows = ", ".join(rows_taken(sample, layouts))
    return f"{sample} with " + "; ".join(map(str, layouts)) + (f" (rows: {rows})" if rows else "")
