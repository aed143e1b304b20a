"""Does an op on distributed tensors give what it gives in one process? Values, dtypes, gradients, for many layouts.

A sample is an op and its arguments. For each mesh its tensor arguments are laid out in many ways: as every row of
the op's rule wants them, and as a seeded choice (or all) of the combinations of whole, cut, unevenly cut, empty,
on one rank, in boxes, and as summands, averages or maxima. Each is run on simulated ranks, forward and backward.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, pairwise, product
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

from shardwise import collectives
from shardwise.errors import LayoutError, RuleError
from shardwise.layout import Boxes, Layout, Mesh, OnRanks, Partial, Placement, Replicate, Shard
from shardwise.rules import RULES, Meta, Row
from shardwise.rules.row import rule_of
from shardwise.tensor import DTensor, tag
from shardwise.tensor.dispatch.resolve import NoRowError, Operand, Slot, choose
from shardwise.testing.pieces import contribution, contributions, local_of
from shardwise.testing.worlds import world

MESHES = (Mesh((1,)), Mesh((2,)), Mesh((3,)), Mesh((5,)), Mesh((2, 2)))
R = Replicate()
SEED = 1234
UNSIGNED = (torch.bool, torch.uint8)
Parts = dict[tuple[int, ...], Tensor]


def as_dtensor(x: object) -> DTensor:
    """Torch's functions are typed to return plain tensors; here they return distributed ones."""
    assert isinstance(x, DTensor), type(x)
    return x


@dataclass(frozen=True)
class Sample:
    """One call of an op. In-place ops are told by their rule; their first tensor is what they change."""

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    gradients: bool = True
    constant: tuple[int, ...] = ()  # tensors that take no gradient, by number
    tolerance: float | None = None  # None is that of doubles; summands of short dtypes are rounded one by one
    valued: bool = True  # False where the result is memory that nobody wrote

    def __str__(self) -> str:
        name = getattr(self.op, "__name__", str(self.op))
        shown = [_shown(a) for a in self.args] + [f"{k}={_shown(a)}" for k, a in self.kwargs.items()]
        return f"{name}({', '.join(shown)})"

    @property
    def in_place(self) -> bool:
        rule = rule_of(self.op)
        return rule is not None and rule.in_place

    def tensors(self) -> list[Tensor]:
        """The tensor arguments in their order."""
        everything = [*self.args, *self.kwargs.values()]
        flat = [x for a in everything for x in (a if isinstance(a, list | tuple) else (a,))]
        return [x for x in flat if isinstance(x, Tensor)]

    def call(self, tensors: Sequence[Any]) -> Any:
        """The op with other tensors (or anything) in place of its own."""
        return self.op(*self._filled(self.args, rest := iter(tensors)), **self._named(rest))

    def on(self, tensors: Sequence[Any]) -> "Sample":
        """The sample with other tensors in place of its own."""
        args = self._filled(self.args, rest := iter(tensors))
        return replace(self, args=tuple(args), kwargs=self._named(rest))

    def rows(self, choices: Sequence[Sequence[Placement]]) -> list[Row]:
        """All rows of the op's rule, whatever the operands' placements are, that some operands can be laid out for."""
        rule = rule_of(self.op)
        tensors = self.tensors()
        found: dict[Row, None] = {}
        if rule is None:
            return []
        for index, options in enumerate(choices):
            for placement in options:
                metas = [Meta(tuple(x.shape), x.dtype, placement if i == index else R) for i, x in enumerate(tensors)]
                args = self._filled(self.args, rest := iter(metas))
                with suppress(NotImplementedError, RuleError):  # the op is taken apart instead, or refused
                    found |= dict.fromkeys(rule.rows(*args, **self._named(rest)))
        return [row for row in found if all(map(_possible, tensors, row.inputs))]

    def _filled(self, args: Sequence[Any], rest: Iterator[Any]) -> list[Any]:
        def fill(a: Any) -> Any:
            if isinstance(a, Tensor):
                return next(rest)
            return type(a)(map(fill, a)) if type(a) in (list, tuple) else a

        return [fill(a) for a in args]

    def _named(self, rest: Iterator[Any]) -> dict[str, Any]:
        return dict(zip(self.kwargs, self._filled(list(self.kwargs.values()), rest), strict=True))


def _possible(x: Tensor, placement: Placement) -> bool:
    """Truth values and bytes have no summands here, integers no averages, and complex numbers no maximum."""
    if isinstance(placement, Partial):
        if x.is_complex():
            return placement.reduce_op not in ("max", "min")
        return x.is_floating_point() or (x.dtype not in UNSIGNED and placement.reduce_op != "avg")
    return True


def _shown(a: Any) -> str:
    if isinstance(a, Tensor):
        return f"{str(a.dtype).removeprefix('torch.')}{list(a.shape)}"
    return f"[{', '.join(map(_shown, a))}]" if isinstance(a, list | tuple) else str(a)


# ---- operands ------------------------------------------------------------------------------------------------


def placements_of(x: Tensor, positions: int, rng: random.Random) -> list[Placement]:
    """What one axis can do with `x`."""
    found: list[Placement] = [R, OnRanks(positions - 1), _boxes(tuple(x.shape), positions)]
    for dim in range(x.ndim):
        found += [Shard(dim), Shard(dim, _uneven(x.shape[dim], positions, rng))]
    if x.dtype not in UNSIGNED:
        extreme = rng.choice(["max", "min", "product"])
        found += [Partial(), Partial("product" if x.is_complex() else extreme)]  # complex numbers have no order
    if x.is_floating_point():
        found.append(Partial("avg"))
    return found


def _uneven(length: int, positions: int, rng: random.Random) -> tuple[int, ...]:
    cuts = sorted(rng.randint(0, length) for _ in range(positions - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True))


def _boxes(shape: tuple[int, ...], positions: int) -> Boxes:
    """Two boxes on one position, one on another where there is one, none on the rest."""
    hands: list[list[tuple[tuple[int, ...], tuple[int, ...]]]] = [[] for _ in range(positions)]
    if not shape:
        return Boxes([*hands[1:], [((), ())]])
    cuts = [0, shape[0] // 3, 2 * shape[0] // 3, shape[0]]
    rest = tuple(0 for _ in shape[1:])
    for number, (a, b) in enumerate(pairwise(cuts)):
        hands[(0, positions - 1, 0)[number]].append(((a, *rest), (b - a, *shape[1:])))
    return Boxes(hands)


def parts_of(x: Tensor, layout: Layout, generator: torch.Generator) -> Parts:
    """Contributions whose reduction is `x`, without rounding for few digits; without Partial axes `x` itself."""
    keys = contributions(layout)
    ops = {p.reduce_op for p in layout.placements if isinstance(p, Partial)}
    if not ops:
        return {keys[0]: x}
    if not ops <= {"sum", "avg"}:  # one holds the value, the others what does not matter beside it
        best = keys[len(keys) // 2]
        finite = x.nan_to_num()
        beside = {"max": finite - 1 - finite.abs(), "min": finite + 1 + finite.abs(), "product": torch.ones_like(x)}[
            ops.pop()
        ]
        return {key: x if key == best else beside for key in keys}
    scale = prod(n for n, p in zip(layout.mesh.shape, layout.placements, strict=True) if p == Partial("avg"))
    noise = {k: scale * torch.randint(-3, 4, x.shape, generator=generator).to(x.dtype) for k in keys[1:]}
    rest = x * scale
    for part in noise.values():
        rest = rest - part
    return {keys[0]: rest, **noise}


# ---- the check -----------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What a call gave, and what its backward gave to each operand."""

    values: list[Tensor]  # one a result; numbers as tensors
    grads: list[Tensor | None]


def results_of(out: Any) -> list[Tensor]:
    """The results of an op that are tensors, in order."""
    if isinstance(out, Tensor):
        return [out]
    return [x for part in out for x in results_of(part)] if isinstance(out, list | tuple) else []


def one_process(sample: Sample) -> Outcome:
    leaves = [_leaf(x.clone(), sample, i) for i, x in enumerate(sample.tensors())]
    inputs = [leaves[0].clone(), *leaves[1:]] if sample.in_place else leaves
    values = results_of(sample.call(inputs))
    _backward(values, sample)
    return Outcome([x.detach() for x in values], [leaf.grad for leaf in leaves])


def reference(sample: Sample) -> Outcome:
    """What the op should give: what one process gives; for random numbers, which are our own, what one rank gives."""
    state = torch.get_rng_state()
    alone = one_process(sample)
    if torch.equal(state, torch.get_rng_state()):
        return alone
    torch.set_rng_state(state)
    whole: Operands = [(Layout(Mesh((1,)), [R], x.shape), {(): x}) for x in sample.tensors()]
    outcome = world(1).run(sharded, sample, whole)[0]
    assert outcome is not None, f"{sample} is refused on one rank"
    for ours, plain in zip(outcome.values, alone.values, strict=True):
        assert (ours.shape, ours.dtype) == (plain.shape, plain.dtype), f"{sample} on one rank"
    return outcome


def _leaf(x: Tensor, sample: Sample, number: int) -> Tensor:
    differentiable = x.is_floating_point() or x.is_complex()
    return x.requires_grad_(sample.gradients and differentiable and number not in sample.constant)


def _backward(values: Sequence[Tensor], sample: Sample) -> None:
    graded = [x for x in values if x.requires_grad] if sample.gradients else []
    if graded:
        torch.autograd.backward(graded, [cotangent(torch.empty(x.shape, dtype=x.dtype)) for x in graded])


def cotangent(out: Tensor) -> Tensor:
    numbers = torch.arange(1, out.numel() + 1, dtype=torch.float64).view(out.shape)
    return (torch.complex(numbers.sin(), numbers.cos()) if out.is_complex() else numbers.sin()).to(out.dtype)


Operands = list[tuple[Layout, Parts]]


def layouts_for(sample: Sample, mesh: Mesh, limit: int, seed: int) -> list[tuple[Layout, ...]]:
    """Combinations of layouts of the operands: those that rows want first, then a seeded choice up to `limit`."""
    rng = random.Random(seed)
    choices = [placements_of(x, mesh.shape[0], rng) for x in sample.tensors()]
    rows = sorted({row.inputs for row in sample.rows(choices)}, key=str)
    found: dict[tuple[Layout, ...], None] = {}
    for number, row in enumerate(rows):
        wanted = (
            _laid_out(sample, mesh, combination, rng) for combination in _as_wanted(sample, row, mesh, number, rng)
        )
        found |= dict.fromkeys(islice((layouts for layouts in wanted if layouts is not None), 1))
    for combination in _shuffled(choices, mesh, limit, rng):
        if len(found) >= limit:
            break
        layouts = _laid_out(sample, mesh, combination, rng)
        if layouts is not None:
            found[layouts] = None
    return list(found)


Combination = tuple[tuple[Placement, ...], ...]  # an operand: an axis


def _laid_out(sample: Sample, mesh: Mesh, combination: Combination, rng: random.Random) -> tuple[Layout, ...] | None:
    order = rng.sample(range(mesh.ndim), mesh.ndim)
    pairs = zip(combination, sample.tensors(), strict=True)
    try:
        return tuple(Layout(mesh, placements, x.shape, order) for placements, x in pairs)
    except LayoutError:
        return None  # maxima of sums, or sizes for an uncut dim: not a tensor


def _as_wanted(
    sample: Sample, row: tuple[Placement, ...], mesh: Mesh, number: int, rng: random.Random
) -> Iterator[Combination]:
    """The operands as a row wants them: on every axis, or on one; every other row with cuts at any place."""
    if mesh.ndim > 1:
        yield tuple((p,) * mesh.ndim for p in row)
        yield tuple((p, *(R,) * (mesh.ndim - 1)) for p in row)
        return
    if (number + mesh.shape[0]) % 2:
        cuts: dict[int, tuple[int, ...]] = {}  # what must be cut alike has one length
        yield tuple((_recut(p, x, mesh.shape[0], cuts, rng),) for p, x in zip(row, sample.tensors(), strict=True))
    yield tuple((p,) for p in row)


def _recut(
    placement: Placement, x: Tensor, positions: int, cuts: dict[int, tuple[int, ...]], rng: random.Random
) -> Placement:
    if not isinstance(placement, Shard):
        return placement
    length = x.shape[placement.dim]
    if length not in cuts:
        cuts[length] = _uneven(length, positions, rng)
    return Shard(placement.dim, cuts[length])


def _shuffled(
    choices: Sequence[Sequence[Placement]], mesh: Mesh, limit: int, rng: random.Random
) -> Iterator[Combination]:
    """Different combinations on one axis, in any order, and all if they are few; some of those on several."""
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


def sharded(sample: Sample, operands: Operands) -> Outcome | None:
    """The outcome on this rank; None where an in-place op is refused, or where the rule itself refuses."""
    rank = collectives.rank()
    torch.default_generator.manual_seed(SEED)
    leaves: list[DTensor] = []
    for number, (layout, parts) in enumerate(operands):
        local = local_of(parts[contribution(layout, rank)], layout, rank)
        leaves.append(as_dtensor(_leaf(tag(local, layout), sample, number)))
    inputs = [as_dtensor(leaves[0].clone()), *leaves[1:]] if sample.in_place else leaves
    try:
        out = sample.call(inputs)
    except RuleError:
        if sample.in_place or _refuses(sample, [layout for layout, _ in operands]):
            return None
        raise
    values = results_of(out)
    for x in values:
        assert isinstance(x, DTensor) or x.dtype == torch.int64, f"a plain {x.dtype}"  # numbers that programs read
        assert not isinstance(x, DTensor) or tuple(x.to_local().shape) == x.layout_.local_shape(rank), (
            f"{x.layout_} on rank {rank}"
        )
    if sample.in_place:
        assert out is inputs[0]
    _backward(values, sample)
    grads = [None if leaf.grad is None else leaf.grad.full_tensor() for leaf in leaves]
    return Outcome([x.full_tensor() if isinstance(x, DTensor) else x for x in (y.detach() for y in values)], grads)


@dataclass
class Tally:
    """How many combinations were run, how many of those an in-place op refused, and how often each row was taken."""

    cases: int = 0
    refused: int = 0
    rows: Counter[str] = field(default_factory=Counter)  # by the row's `why`


def assert_equals_one_process(samples: Sequence[Sample], meshes: Sequence[Mesh] = MESHES, limit: int = 12) -> Tally:
    """Run all samples on all meshes, `limit` combinations of layouts (or all rows, if those are more) each."""
    tally = Tally()
    for mesh, (number, sample) in product(meshes, enumerate(samples)):
        expected = reference(sample)
        generator = torch.Generator().manual_seed(number)
        cases: list[Operands] = []
        for layouts in layouts_for(sample, mesh, limit, seed=number):
            pairs = zip(sample.tensors(), layouts, strict=True)
            cases.append([(layout, parts_of(x, layout, generator)) for x, layout in pairs])
        results = world(mesh.size()).run(_run_all, sample, cases)
        for index, operands in enumerate(cases):
            for rank, by_rank in enumerate(results):
                outcome = by_rank[index]
                tally.cases += rank == 0
                if outcome is None:
                    tally.refused += rank == 0
                    continue
                _compare(sample, operands, outcome, expected, rank)
                if rank == 0:
                    tally.rows.update(rows_taken(sample, [layout for layout, _ in operands]))
    return tally


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
    slots = sample.on([Slot(i) for i in range(len(operands))])
    return choose(str(sample), rule, operands, slots.args, slots.kwargs)


def _refuses(sample: Sample, layouts: Sequence[Layout]) -> bool:
    """Whether the rule says so: an op without a row for these layouts is to run on others."""
    try:
        _chosen(sample, layouts)
    except NoRowError:
        return False
    except RuleError:
        return True
    return False


def check_rows(
    op: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    gradients: bool = True,
    constant: Sequence[int] = (),
    tolerance: float | None = None,
    meshes: Sequence[Mesh] = MESHES,
    limit: int = 12,
) -> Tally:
    """Try every row of an op's rule: does it give what one process gives?

    On simulated ranks (by default 1, 2, 3, 5 and a grid of 2 x 2), the tensor arguments are laid out as each row wants
    them and in further ways: cut evenly and not, with empty pieces, on one rank, in boxes, as sums and maxima. Values,
    shapes, dtypes and gradients are compared.

    Args:
        op: what users call. Pass small arguments: dims of 5 and 3 are cut unevenly, dims of 0 are worth a call too.
        args, kwargs: of the op; tensors are whole.
        gradients: whether to compare those of floating point arguments as well.
        constant: numbers of the tensor arguments that take no gradient.
        tolerance: relative and absolute; None is that of the dtype.
        meshes: the ranks to try.
        limit: combinations of layouts a mesh, besides those that the rows name.

    Returns:
        How many combinations ran, and how often each row was taken.

    Raises:
        AssertionError: a difference, or a row that was never taken; names the layouts, the rank and the rows.
    """
    sample = Sample(op, tuple(args), kwargs or {}, gradients, tuple(constant), tolerance)
    assert rule_of(op) is not None, f"{sample}: the op has no rule. Fix: register one with register_sharding."
    tally = assert_equals_one_process([sample], meshes, limit)
    line = next((mesh for mesh in meshes if mesh.ndim == 1 and mesh.size() > 1), None)
    if line is not None:
        _check_that_all_are_taken(sample, line, tally)
    return tally


def _check_that_all_are_taken(sample: Sample, mesh: Mesh, tally: Tally) -> None:
    metas = [Meta(tuple(x.shape), x.dtype, R) for x in sample.tensors()]
    args = sample._filled(sample.args, rest := iter(metas))
    for row in RULES[sample.op].rows(*args, **sample._named(rest)):
        possible = all(map(_possible, sample.tensors(), row.inputs))
        assert not possible or tally.rows[row.why], (
            f"{sample}: the row {row.why!r} with inputs {row.inputs} was never taken; "
            f"another row with the same inputs may stand before it."
        )


def _run_all(sample: Sample, cases: list[Operands]) -> list[Outcome | None]:
    found = []
    for operands in cases:
        try:
            found.append(sharded(sample, operands))
        except Exception as error:
            error.add_note(_described(sample, operands))
            raise
    return found


def _described(sample: Sample, operands: Operands) -> str:
    rows = ", ".join(rows_taken(sample, [layout for layout, _ in operands]))
    return f"{sample} with " + "; ".join(str(layout) for layout, _ in operands) + (f" (rows: {rows})" if rows else "")


def _compare(sample: Sample, operands: Operands, outcome: Outcome, expected: Outcome, rank: int) -> None:
    limit = sample.tolerance
    try:
        assert len(outcome.values) == len(expected.values)
        for number, (value, wanted) in enumerate(zip(outcome.values, expected.values, strict=True)):
            kinds = [(x.dtype, tuple(x.shape)) for x in (value, wanted)]
            assert kinds[0] == kinds[1], f"result {number}: got {kinds[0]}, expected {kinds[1]}"
            if sample.valued:
                msg = partial(_beside, f"result {number}", value, wanted)
                assert_close(value, wanted, rtol=limit, atol=limit, equal_nan=True, msg=msg)
        for number, ((layout, _), got, want) in enumerate(zip(operands, outcome.grads, expected.grads, strict=True)):
            if any(isinstance(p, Partial) and p.reduce_op != "sum" for p in layout.placements):
                continue  # what a maximum or an average hands on to its contributions is not the gradient
            where = f"gradient of operand {number}"
            if want is None:
                assert got is None or not got.any(), f"{where}: {got} instead of None"
            else:
                if got is None and not want.numel():
                    continue
                assert got is not None, f"{where}: None instead of {want}"
                msg = partial(_beside, where, got, want)
                assert_close(got, want, rtol=limit, atol=limit, equal_nan=True, msg=msg)
    except AssertionError as error:
        error.add_note(f"{_described(sample, operands)}, rank {rank}")
        raise


def _beside(where: str, got: Tensor, expected: Tensor, difference: str) -> str:
    shown = [
        f"[{', '.join(f'{n:.4g}' for n in x.flatten()[:6].tolist())}{', …' * (x.numel() > 6)}]" for x in (got, expected)
    ]
    return f"{where}: got {shown[0]}, expected {shown[1]}. {difference}"
