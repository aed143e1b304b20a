"""`check_rows`: every row of an op's rule against one process, for authors of rules."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise import _collectives as collectives
from shardwise._layout import REPLICATE, Layout, Mesh, Partial, Placement, Shard, checked
from shardwise._rules import Meta, Row
from shardwise._rules.registry import OpRule, rule_of
from shardwise._rules.row import Args, Kwargs
from shardwise._tensor import DTensor
from shardwise._tensor.dispatch.resolve import NoRowError, Operand, Slot, choose
from shardwise.errors import LayoutError, RuleError
from shardwise.testing.converter import DTensorConverter
from shardwise.testing.local_shards import dtensor_from_full
from shardwise.testing.worlds import world

MESHES = (Mesh((1,)), Mesh((2,)), Mesh((3,)), Mesh((4,)), Mesh((2, 2)))
OTHERS = ("max", "min", "product")  # reductions whose gradients depend on which rank has the value


@dataclass
class Tally:
    """Numbers of combinations that ran, of refused ones (by an in-place op or a rule), and of uses of each row."""

    cases: int = 0
    refused: int = 0
    rows: Counter[str] = field(default_factory=Counter)  # by the row's `why`


@checked
def check_rows(
    op: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Kwargs | None = None,
    *,
    gradients: bool = True,
    constant: Sequence[int] = (),
    tolerance: float | None = None,
    meshes: Sequence[Mesh] = MESHES,
    limit: int = 12,
) -> Tally:
    """Run every row of an op's rule and compare it with one process: values, shapes, dtypes and gradients.

    On simulated ranks (by default 1, 2, 3, 4 and a 2 x 2 mesh), the tensor arguments are laid out as in each row, and
    in combinations: replicated, evenly and unevenly sharded, with empty shards, and as Partial sums.

    Args:
        op: the function that users call; it draws no random numbers. Pass small arguments: dims of 5 and 3 are sharded
            unevenly; try dims of 0 as well.
        args, kwargs: of the op, with full tensors.
        gradients: whether to compare gradients of floating point arguments as well.
        constant: indices of the tensor arguments without gradients.
        tolerance: relative and absolute; None: the dtype's.
        meshes: the meshes to try.
        limit: combinations of layouts for each mesh, with those of rows.

    Returns:
        The number of combinations that ran, and of calls that took each row.

    Raises:
        AssertionError: a difference, or a row that was never taken; names the layouts, the rank and the rows.
    """
    rule = rule_of(getattr(op, "_opoverload", op))  # the rule of a custom op is that of its overload
    assert rule is not None, f"{op}: the op has no rule. Fix: register one with register_sharding."
    call = _Call(op, rule, tuple(args), kwargs or {}, gradients, tuple(constant), tolerance)
    expected, tally = call.run(call.tensors), Tally()
    for mesh in meshes:
        ran, *_ = world(mesh.size()).run(call.check_all, mesh, limit, expected)
        tally.cases += len(ran)
        tally.refused += ran.count(None)
        tally.rows.update(row.why for rows in ran for row in rows or ())
    if any(mesh.ndim == 1 and mesh.size() > 1 for mesh in meshes):
        for row in call.rows({}):
            assert tally.rows[row.why] or not all(map(_is_possible, call.tensors, row.inputs)), (
                f"{op}: the row {row.why!r} with inputs {row.inputs} was never taken; "
                f"an earlier row may have the same inputs."
            )
    return tally


Seen = tuple[list[Any], list[Tensor | None]]  # results and gradients, full


@dataclass(frozen=True)
class _Call:
    """A call of an op, and its values to compare."""

    op: Callable[..., Any]
    rule: OpRule
    args: Args
    kwargs: Kwargs
    gradients: bool
    constant: tuple[int, ...]
    tolerance: float | None

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(x, Tensor)]

    def on(self, tensors: Sequence[object]) -> tuple[Args, Kwargs]:
        """The arguments with `tensors` in place of their tensors."""
        rest = iter(tensors)
        found: tuple[Args, Kwargs] = pytree.tree_map_only(Tensor, lambda _: next(rest), (self.args, self.kwargs))
        return found

    def rows(self, placements: dict[int, Placement]) -> list[Row]:
        """The rows for operands of these placements, by position; others are replicated. Empty if refused."""
        metas = [Meta(tuple(x.shape), x.dtype, placements.get(i, REPLICATE)) for i, x in enumerate(self.tensors)]
        args, kwargs = self.on(metas)
        try:
            return list(self.rule.rows(*args, **kwargs))
        except (NotImplementedError, RuleError):  # the op is decomposed instead, or refused
            return []

    def chosen(self, layouts: Sequence[Layout]) -> tuple[Row, ...] | None:
        """The row of each axis; empty if the op runs on other layouts, None if the rule refuses these."""
        operands = [Operand(layout, x.dtype) for layout, x in zip(layouts, self.tensors, strict=True)]
        args, kwargs = self.on([Slot(i) for i in range(len(operands))])
        try:
            return choose(str(self.op), self.rule, operands, args, kwargs)
        except NoRowError:
            return ()
        except RuleError:
            return None

    def run(self, tensors: Sequence[Tensor]) -> Seen:
        """The results as full tensors, and the gradients of the operands."""
        leaves = []
        for i, x in enumerate(tensors):
            x = x if isinstance(x, DTensor) else x.detach().clone()
            takes_gradient = self.gradients and i not in self.constant and (x.is_floating_point() or x.is_complex())
            leaves.append(x.requires_grad_(takes_gradient))
        args, kwargs = self.on([leaves[0].clone(), *leaves[1:]] if self.rule.in_place else leaves)
        results = pytree.tree_leaves(self.op(*args, **kwargs))
        outs = [x for x in results if isinstance(x, Tensor) and x.requires_grad]
        if outs:
            torch.autograd.backward(outs, [_cotangent(x) for x in outs])
        return [_full(x) for x in results], [None if x.grad is None else _full(x.grad) for x in leaves]

    def check(self, layouts: Sequence[Layout], expected: Seen) -> tuple[Row, ...] | None:
        """Compare the call in these layouts on this rank with one process.

        Returns:
            The rows that the call takes; None if it is refused.
        """
        rows = self.chosen(layouts)
        if rows is None:
            return None
        where = f"rank {collectives.rank()}, {'; '.join(map(str, layouts))}, rows: {', '.join(r.why for r in rows)}"
        try:
            results, grads = self.run(list(map(dtensor_from_full, self.tensors, layouts)))
        except Exception as error:
            if self.rule.in_place and isinstance(error, RuleError):
                return None
            error.add_note(where)
            raise
        assert len(results) == len(expected[0]), f"{len(results)} results, not {len(expected[0])} ({where})"
        for number, (got, want) in enumerate(zip(results, expected[0], strict=True)):
            self._assert_close(got, want, f"result {number} differs ({where})")
        for number, (got, want, layout) in enumerate(zip(grads, expected[1], layouts, strict=True)):
            # Among equal maxima on several ranks, the choice differs from one process.
            if want is not None and not any(
                isinstance(p, Partial) and p.reduce_op in OTHERS for p in layout.placements
            ):
                self._assert_close(got, want, f"the gradient of operand {number} differs ({where})")
        return rows

    def check_all(self, mesh: Mesh, limit: int, expected: Seen) -> list[tuple[Row, ...] | None]:
        return [self.check(layouts, expected) for layouts in _layouts(self, mesh, limit)]

    def _assert_close(self, got: object, want: object, what: str) -> None:
        try:
            torch.testing.assert_close(got, want, rtol=self.tolerance, atol=self.tolerance, equal_nan=True)
        except (AssertionError, TypeError, ValueError) as error:  # the latter of objects that are not numbers
            raise AssertionError(f"{what}: {error}") from None


def _full(x: Any) -> Any:
    """The full tensor of a result; checks that its local tensor has the shape of its layout."""
    if not isinstance(x, Tensor):
        return x
    if isinstance(x, DTensor):
        held, local = x.layout_.local_shape(collectives.rank()), tuple(x.to_local().shape)
        assert local == held, f"{x.layout_} means a local shape of {held}, but the local tensor has {local}"
        x = x.full_tensor()
    return x.detach().clone()


def _cotangent(out: Tensor) -> Tensor:
    """An irregular plain gradient for `out`."""
    return torch.arange(1, out.numel() + 1, dtype=torch.float64).sin().view(out.shape).to(out.dtype)


def _is_possible(x: Tensor, placement: Placement) -> bool:
    """Whether `x` has local tensors for this reduction."""
    if not isinstance(placement, Partial) or x.is_floating_point():
        return True
    return placement.reduce_op not in ("max", "min") if x.is_complex() else x.dtype not in (torch.bool, torch.uint8)


# ---- layouts -----------------------------------------------------------------------------------------------------


def _layouts(call: _Call, mesh: Mesh, limit: int) -> list[tuple[Layout, ...]]:
    """The layouts of all rows, then a seeded choice of combinations up to `limit`."""
    rng, tensors = random.Random(0), call.tensors
    converter = DTensorConverter(mesh, call.args, call.kwargs, uneven=True, empty=True, partial=True, bools=True)
    choices = [converter.layouts_for_arg(x) for x in tensors]
    operands = [(i, p) for i, options in enumerate(choices) for p in dict.fromkeys(chosen[0] for chosen in options)]
    inputs = dict.fromkeys(row.inputs for index, placement in operands for row in call.rows({index: placement}))
    wanted = [p for row in inputs if all(map(_is_possible, tensors, row)) for p in _of_row(row, tensors, mesh)]
    others = ([*map(rng.choice, choices)] for _ in range(8 * max(0, min(limit, prod(map(len, choices))))))
    found: dict[tuple[Layout, ...], None] = {}
    for number, placements in enumerate(chain(wanted, others)):
        if number >= len(wanted) and len(found) >= limit:
            break
        with suppress(LayoutError):
            found[tuple(Layout(mesh, p, x.shape) for p, x in zip(placements, tensors, strict=True))] = None
    return list(found)


def _of_row(row: Sequence[Placement], tensors: Sequence[Tensor], mesh: Mesh) -> Iterator[list[tuple[Placement, ...]]]:
    """The operands in a row's placements: on every axis, on the first one, and on one axis with uneven shards."""
    yield [(p,) * mesh.ndim for p in row]
    if mesh.ndim > 1:
        yield [(p, *(REPLICATE,) * (mesh.ndim - 1)) for p in row]
        return
    rng = random.Random(mesh.size())
    sizes: dict[int, tuple[int, ...]] = {}  # by length: dims that must be sharded alike have one length
    uneven: list[tuple[Placement, ...]] = []
    for placement, x in zip(row, tensors, strict=True):
        if isinstance(placement, Shard):
            length = x.shape[placement.dim]
            offsets = sorted(rng.randint(0, length) for _ in range(mesh.size() - 1))
            steps = tuple(b - a for a, b in pairwise([0, *offsets, length]))
            placement = Shard(placement.dim, sizes.setdefault(length, steps))
        uneven.append((placement,))
    yield uneven
