"""What a rule is: rows of placements, in one table keyed by the functions users call and by aten ops."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from inspect import signature
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shardwise.errors import RuleError
from shardwise.layout import Box, Layout, Placement

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Handler = Callable[[Any, Args, Kwargs], Any]  # (func, args, kwargs) of a call with a DTensor to its result
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

    def all_to_all(
        self, send: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], ranks: tuple[int, ...] | None = None
    ) -> Tensor:
        """All-to-all among `ranks` (None: `ranks()`) of a 1-D tensor; gradients travel the way back."""
        ...

    def all_gather(self, x: Tensor, ranks: tuple[int, ...] | None = None) -> Tensor:
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

    def fetch_boxes(
        self, xs: Sequence[Tensor], held: Sequence[Sequence[Box]], wanted: Callable[[int], Sequence[tuple[int, Box]]]
    ) -> list[Tensor]:
        """The same for several boxes, of several tensors of one dtype, in one exchange.

        Args:
            held: for every tensor the boxes that each of `ranks()` holds.
            wanted: from a rank to numbers of tensors, and boxes of them.
        """
        ...

    def draw_seed(self, generator: torch.Generator | None = None) -> int:
        """What the random numbers of this op come from: the same on all ranks of the mesh. Ask once an op."""
        ...

    def mark_copy(self, x: Tensor) -> Tensor:
        """`x`, marked as a copy where users expect a view: changing it in place is refused."""
        ...

    def reshard_like(self, operand: int, like: int, lengths: dict[int, int]) -> "LocalContext":
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
def _defaults(function: Callable[..., Any]) -> Kwargs:
    return {name: parameter.default for name, parameter in signature(function).parameters.items()}


def arguments(function: Callable[..., Any], args: Args, kwargs: Kwargs) -> Kwargs:
    """The arguments of a call of a Python function by name, with the defaults, in the order of its signature."""
    defaults = _defaults(function)
    return {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}


Rule = Callable[..., list[Row]]
Shapes = tuple[int, ...] | list[tuple[int, ...]]  # of the result; of all results


def no_rows(*_: Any, **__: Any) -> list[Row]:
    """The rows of an op that has none: it is decomposed, or has a handler."""
    raise NotImplementedError("it is decomposed into other ops")


@dataclass(frozen=True)
class OpRule:
    """Everything the dispatcher knows of one op: an entry of `RULES`.

    How it runs:
        rows: (op's arguments, tensors given as `Meta`) -> rows.
        handler: called as `handler(func, args, kwargs)` instead of everything else.
        decomposition: the op in terms of other ops, called with its arguments where no row fits.
        fallback: a handler for calls where no row fits and there is no decomposition. Without either, torch
            decomposes the op; an aten op gathers its operands and runs replicated.
        native: a C function to run in place of a Python one, which would read shapes on its way.
        replicated_impl: the local implementation if all operands are Replicate on all axes; None is the op itself.
        mesh_operand: the operand to whose mesh the others are redistributed; None is the largest or the one written to.

    What it returns:
        in_place: the op writes to its first operand, whose layout therefore must not change.
        shape: the global shape of the result from the arguments of `rows`, a list of shapes for several results;
            None runs the op on torch's meta device.
        data_dependent_shape: the result's size is known only after the op ran; the ranks exchange the sizes of shards.
        view: torch returns a view of the first operand.

    How calls are cached:
        shape_independent: the rows depend on numbers of dims and on which dims have size 1, on no other size and on
            no float argument, so the choice made for one shape and number serves all.
        typed: the rows depend on dtypes.
        random: the op draws random numbers. Ranks outside the mesh run it too, so that their generators stay in step.

    How a rank with an empty shard raises the errors of the other ranks:
        index_form: how the arguments name indices, as a `shapes.index.Form`: checked on every rank that knows them.
        value_errors: the op raises for some values, such as a division by 0: the rank tries the op on one element.
        saves_operands: the op saves operands, and backward raises if they were changed in place: so does the rank.

    For tools:
        is_op: a handler that computes a result itself, so that tools count it as an op, not only the ops it calls.
        takes_dtensors: a Python function that only compares sizes, so it may get DTensors in place of local tensors.
    """

    rows: Rule = no_rows
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
    handler: Handler | None = None
    fallback: Handler | None = None
    native: Callable[..., Any] | None = None
    index_form: Any = None
    value_errors: bool = False
    saves_operands: bool = False
    is_op: bool = False
    takes_dtensors: bool = False

    @property
    def has_rule(self) -> bool:
        """Whether there are rows or a decomposition, not only a handler."""
        return self.rows is not no_rows or self.decomposition is not None


# The one table of ops, filled by `register`, `op_rule` and `handler`.
RULES: dict[Any, OpRule] = {}
# Functions without an entry that one entry serves, as (whether it serves a function, its entry).
FAMILIES: list[tuple[Callable[[Any], bool], OpRule]] = []


def register(rule: OpRule, *ops: Any) -> None:
    """Give ops an entry.

    Raises:
        RuleError: an op has one already.
    """
    for op in dict.fromkeys(ops):  # some functions of torch have several names
        if op in RULES:
            raise RuleError(f"{op} is registered already. Fix: unregister it first, or amend() its entry.")
        RULES[op] = rule


def amend(*ops: Any, **facts: Any) -> None:
    """Add facts to the entries of ops, such as a `native` function that the module of the rule cannot import.

    Raises:
        RuleError: an op has no entry, or its entry has one of these facts already.
    """
    defaults = {f.name: f.default for f in fields(OpRule)}
    for op in ops:
        rule = RULES.get(op)
        if rule is None:
            raise RuleError(f"{op} has no entry to amend. Fix: register it.")
        for name in facts:
            if getattr(rule, name) is not defaults[name]:
                raise RuleError(f"{op} is registered with {name}={getattr(rule, name)} already.")
        RULES[op] = replace(rule, **facts)


def override(rule: OpRule, *ops: Any) -> None:
    """Give ops these rows, whether they have an entry or not; what an entry says of the op itself stays."""
    for op in ops:
        known = RULES.get(op, OpRule())
        RULES[op] = replace(
            rule,
            fallback=known.fallback or known.handler,
            native=known.native,
            index_form=known.index_form,
            value_errors=known.value_errors,
            saves_operands=known.saves_operands,
            takes_dtensors=known.takes_dtensors,
        )


def reregister(rule: OpRule, *ops: Any) -> None:
    """Give ops this entry in place of the one they have."""
    RULES.update(dict.fromkeys(ops, rule))


def unregister(*ops: Any) -> None:
    for op in ops:
        del RULES[op]


def handler(*ops: Any, is_op: bool = False) -> Callable[[Handler], Handler]:
    """Register the function below to answer calls of ops, as `handler(func, args, kwargs)`.

    Args:
        is_op: tools count the call as an op; otherwise they only see the ops that the handler calls.
    """

    def add(function: Handler) -> Handler:
        register(OpRule(handler=function, is_op=is_op), *ops)
        return function

    return add


def handler_of_family(serves: Callable[[Any], bool], is_op: bool = False) -> Callable[[Handler], Handler]:
    """Register the function below to answer all functions without an entry for which `serves(func)` is true."""

    def add(function: Handler) -> Handler:
        FAMILIES.append((serves, OpRule(handler=function, is_op=is_op)))
        return function

    return add


def fallback(*ops: Any) -> Callable[[Handler], Handler]:
    """Register the function below for calls of ops that have a rule but no row that fits."""

    def add(function: Handler) -> Handler:
        amend(*ops, fallback=function)
        return function

    return add


def rule_of(op: Any) -> OpRule | None:
    """The entry of an op that has rows or a decomposition; None for others."""
    rule = RULES.get(op)
    return rule if rule is not None and rule.has_rule else None


def ops_with_rules() -> dict[Any, OpRule]:
    """The entries that have rows or a decomposition."""
    return {op: rule for op, rule in RULES.items() if rule.has_rule}


def decomposed(decomposition: Callable[..., Any]) -> OpRule:
    """The entry of an op that is always decomposed."""
    return OpRule(decomposition=decomposition)


def op_rule(*ops: Any, **facts: Any) -> Callable[[Rule], Rule]:
    """Register the function below as the rows of ops; `facts` are fields of `OpRule`."""

    def add(rule: Rule) -> Rule:
        register(OpRule(rule, **facts), *ops)
        return rule

    return add
