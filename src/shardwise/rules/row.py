"""What a rule is: rows of placements, in one table keyed by the functions users call and by aten ops."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from inspect import signature
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shardwise.layout import Box, Layout, Placement

LocalFunction = Callable[..., Any]
IndexMap = Callable[[int], int]
NO_OPERAND = -1  # as `follow`: the result is cut as torch.chunk cuts


class Meta(NamedTuple):
    """What a rule may know of a tensor operand: its global shape, dtype, and placement on the axis in question."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    placement: Placement

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class Row:
    """One way to run an op on one mesh axis.

    Args:
        inputs: a placement for every tensor operand, in the order of the arguments.
        output: the placement of the result; a tuple for several results.
        why: the reason in one line; also the name of the row in tests, errors and reports.
        local: what each rank computes, called as `local(ctx, *args, **kwargs)` with local tensors; None is
            the op itself. It must build the same autograd graph on every rank, empty shards included.
        aligned: all Shards of the row cut the same index range, so they must be cut alike. A tuple of operands says
            it of those only; the others stay cut as they are. Where no row speaks of any, each operand keeps also the
            order in which axes cut it, and a result has the order of the operands that it follows.
        follow: the operand whose cut a cut result has; None is the first one that is cut, NOBODY none.
        boundary: where a cut of that operand falls in the result, if not at the same index; rises from 0 to
            the length of the result's dim. A tuple of them for several results.
        granule: the operands may be cut at multiples of this only; other cuts move to the nearest one.
        copies: elements travel inside a view, which so is a copy on every rank.
    """

    inputs: tuple[Placement, ...]
    output: Placement | tuple[Placement, ...]
    why: str
    local_impl: LocalFunction | None = None
    aligned: bool | tuple[int, ...] = True
    layout_from: int | None = None
    map_index: IndexMap | tuple[IndexMap, ...] | None = None
    alignment: int = 1
    copies: bool = False


class LocalContext(Protocol):
    """Where a row's local function runs, and the exchanges it may make itself (all differentiable)."""

    layouts: tuple[Layout, ...]  # of the tensor operands, as the row wants them
    outputs: tuple[Layout, ...]  # of all results
    axes: tuple[int, ...]  # the mesh axes for which this local function was chosen

    @property
    def output(self) -> Layout:
        """Of the (first) result; of the first operand where the rule is ragged."""
        ...

    @property
    def rank(self) -> int: ...

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The op itself."""
        ...

    def ranks(self, axes: Sequence[int] | None = None) -> tuple[int, ...]:
        """The ranks that differ from this one on `axes` (None: the row's own) only, in rising order."""
        ...

    def exchange(
        self, send: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], ranks: tuple[int, ...] | None = None
    ) -> Tensor:
        """All-to-all among `ranks` (None: `ranks()`) of a 1-D tensor; gradients travel the way back."""
        ...

    def stack(self, x: Tensor, ranks: tuple[int, ...] | None = None) -> Tensor:
        """The `x` of each of `ranks` (None: `ranks()`), all of one shape, along a new first dim; differentiable."""
        ...

    def boxes(self, operand: int) -> list[Box]:
        """The one box of `operand` that each of `ranks()` holds; an empty one for none."""
        ...

    def fetch(self, x: Tensor, operand: int, wanted: Callable[[int], Box]) -> Tensor:
        """Box `wanted(rank)` of the global `operand`, of which `x` is this rank's part.

        Every piece travels once, from a rank of `ranks()` that holds it; where no rank wants what another one
        holds, nothing is sent. Differentiable. A box must lie in what `ranks()` hold together.
        """
        ...

    def fetch_parts(
        self, xs: Sequence[Tensor], held: Sequence[Sequence[Box]], wanted: Callable[[int], Sequence[tuple[int, Box]]]
    ) -> list[Tensor]:
        """The same for several boxes, of several tensors of one dtype, in one exchange.

        Args:
            held: for every tensor the boxes that each of `ranks()` holds.
            wanted: from a rank to numbers of tensors, and boxes of them.
        """
        ...

    def seed(self, generator: torch.Generator | None = None) -> int:
        """What the random numbers of this op come from: the same on all ranks of the mesh. Ask once an op."""
        ...

    def copied(self, x: Tensor) -> Tensor:
        """`x`, marked as a copy where users expect a view: changing it in place is refused."""
        ...

    def recut(self, operand: int, like: int, lengths: dict[int, int]) -> "LocalContext":
        """This ctx with `operand` cut along dim 0 by the axes of operand `like`, into pieces as long as given."""
        ...

    def name_of(self, operand: int) -> str:
        """What to call an operand in an error: its parameter name where it has one."""
        ...


@lru_cache(maxsize=4096)
def local_with(function: Callable[..., Any], *fixed: Any) -> LocalFunction:
    """`function` with its first arguments given; the same object for the same ones, so that axes can share it."""
    return partial(function, *fixed)


# By local function: what works out beforehand what it comes to, and whether that is Python code.
PREPARED: dict[Callable[..., Any], tuple[Callable[..., LocalFunction | None], bool]] = {}


def prepared(
    prepare: Callable[..., LocalFunction | None], python: bool = False
) -> Callable[[LocalFunction], LocalFunction]:
    """For a local function of which most can be known before it runs.

    Args:
        prepare: called once for a rank and the layouts, with the first arguments that `local_with` gave and the ctx;
            what it returns is called with the op's arguments instead of the local function. It may answer
            NotImplemented, and None may be returned in its place: then the local function runs.
        python: it looks at shapes, or calls Python code that does.
    """

    def add(local: LocalFunction) -> LocalFunction:
        PREPARED[local] = prepare, python
        return local

    return add


def preparation(local: LocalFunction | None, ctx: LocalContext) -> tuple[LocalFunction | None, bool]:
    """What a local function comes to on the rank of `ctx`, and whether that is Python code; None for itself."""
    function, fixed = (local.func, local.args) if isinstance(local, partial) else (local, ())
    prepare, python = PREPARED.get(function, (None, False))  # type: ignore[arg-type]
    return (None if prepare is None else prepare(*fixed, ctx)), python


@lru_cache
def _defaults(function: Callable[..., Any]) -> dict[str, Any]:
    return {name: parameter.default for name, parameter in signature(function).parameters.items()}


def arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of a Python function by name, with the defaults, in the order of its signature."""
    defaults = _defaults(function)
    return {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}


Rule = Callable[..., list[Row]]
Shapes = tuple[int, ...] | list[tuple[int, ...]]  # of the result; of all results


@dataclass(frozen=True)
class OpRule:
    """A registered rule and how to run its op.

    Args:
        rows: from the op's arguments, tensors given as `Meta`, to rows.
        in_place: the op changes its first operand, whose layout therefore must not change.
        shape: the result's global shape from the same arguments as `rows`, a list of shapes for several results;
            None asks torch's meta device.
        sizeless: the rows depend on the numbers of dims and on which dims are 1 long, on no other size and on no
            float argument, so a choice made for one shape and number serves them all.
        everywhere: what each rank computes when all operands are whole on all ranks; None is the op itself.
        ragged: only running the op tells how long its results are; the ranks tell each other the lengths of the
            pieces of a cut one.
        random: the op draws. Ranks outside the mesh, which hold nothing, run it too, so that their generators keep
            in step.
        typed: which rows there are depends on dtypes, so a recipe serves one of those; so it does where ops draw.
        view: torch gives a view of the first operand.
        home: the tensor operand to whose mesh the others come; None is the largest, or the one that changes.
        composed: the op in terms of others, which find their own rules, for arguments that have no row; None lets
            torch take it apart.
    """

    rows: Rule
    in_place: bool = False
    shape: Callable[..., Shapes] | None = None
    shape_independent: bool = False
    replicated_impl: LocalFunction | None = None
    data_dependent_shape: bool = False
    random: bool = False
    typed: bool = False
    view: bool = False
    decomposition: Callable[..., Any] | None = None
    mesh_operand: int | None = None


RULES: dict[Any, OpRule] = {}


def register(rule: OpRule, *ops: Any) -> None:
    """Give ops a rule. Two rules for one op are an error."""
    for op in ops:
        assert op not in RULES, f"two rules for {op}"
        RULES[op] = rule


def decomposed(decomposition: Callable[..., Any]) -> OpRule:
    """The rule of an op that is always run as `composed` says."""
    return OpRule(no_rows, decomposition=decomposition)


def no_rows(*_: Any, **__: Any) -> list[Row]:
    """The rows of an op that is put together from other ops."""
    raise NotImplementedError("it is put together from other ops")


def op_rule(
    *ops: Any,
    in_place: bool = False,
    shape: Callable[..., Shapes] | None = None,
    shape_independent: bool = False,
    replicated_impl: LocalFunction | None = None,
    data_dependent_shape: bool = False,
    mesh_operand: int | None = None,
) -> Callable[[Rule], Rule]:
    """Register the function below as the rule of ops; the options are those of `OpRule`."""

    def add(rule: Rule) -> Rule:
        register(
            OpRule(
                rule,
                in_place,
                shape,
                shape_independent,
                replicated_impl,
                data_dependent_shape,
                mesh_operand=mesh_operand,
            ),
            *ops,
        )
        return rule

    return add
