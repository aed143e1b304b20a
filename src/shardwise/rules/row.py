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
Handler = Callable[[Any, Args, Kwargs], Any]  # (func, args, kwargs) of a call with a DTensor -> its result
LocalFunction = Callable[..., Any]
IndexMap = Callable[[int], int]
NO_OPERAND = -1  # as `layout_from`: the result is sharded evenly, as by torch.chunk


class Meta(NamedTuple):
    """What a rule knows of a tensor operand: its global shape, dtype, and placement on the axis in question."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    placement: Placement

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class Row:
    """One way to run an op on one mesh axis without communication, or with that of its local implementation.

        Row((Shard(0), Replicate()), Shard(0), "each rank has some rows of the first matrix")  # of torch.mm

    Args:
        inputs: a placement for every tensor operand, in the order of the arguments.
        output: the placement of the result; a tuple for several results.
        why: the reason in one line; also the name of the row in tests, errors and reports.
        local_impl: what each rank runs, as `local_impl(ctx, *args, **kwargs)` with local tensors; None is the op
            itself. It must build the same autograd graph on every rank, also on one with an empty shard.
        aligned: whether the sharded operands must have the same shard sizes; a tuple names the operands that must. If
            () the operands also keep their shard orders, and a result has that of the operand of `layout_from`.
        layout_from: the operand whose shard sizes a sharded result has; None is the first sharded one.
        map_index: from a shard offset of that operand to the shard offset of the result, if they differ; rises from 0
            to the size of the result's dim. A tuple for several results.
        alignment: shard offsets of the operands must be multiples of it; others are moved to the nearest multiple.
        copies: the local implementation communicates, so what torch returns as a view is a copy on every rank.
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
    """What a local implementation knows of the call, and its collectives, which are all differentiable."""

    layouts: tuple[Layout, ...]  # of the tensor operands, redistributed as the row wants
    outputs: tuple[Layout, ...]  # of all results
    axes: tuple[int, ...]  # the mesh axes for which this local implementation was chosen

    @property
    def output(self) -> Layout:
        """The layout of the (first) result; of the first operand if the op has a data-dependent shape."""
        ...

    @property
    def rank(self) -> int: ...

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the op itself."""
        ...

    def ranks(self, axes: Sequence[int] | None = None) -> tuple[int, ...]:
        """The ranks, in rising order, whose coordinates equal this rank's except along `axes` (None: `self.axes`)."""
        ...

    def all_to_all(
        self, send: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], ranks: tuple[int, ...] | None = None
    ) -> Tensor:
        """All-to-all of a 1-D tensor among `ranks` (None: `ranks()`)."""
        ...

    def all_gather(self, x: Tensor, ranks: tuple[int, ...] | None = None) -> Tensor:
        """The `x` of each of `ranks` (None: `ranks()`), all of one shape, stacked along a new first dim."""
        ...

    def boxes(self, operand: int) -> list[Box]:
        """The box of `operand` on each of `ranks()`; an empty one for none."""
        ...

    def fetch(self, x: Tensor, operand: int, wanted: Callable[[int], Box]) -> Tensor:
        """Box `wanted(rank)` of the global `operand`, of which `x` is the local shard.

        Each element is sent once, by one of `ranks()` that has it; if no rank wants anything of another one, nothing is
        sent. A box must lie in the union of the shards of `ranks()`.
        """
        ...

    def fetch_boxes(
        self, xs: Sequence[Tensor], held: Sequence[Sequence[Box]], wanted: Callable[[int], Sequence[tuple[int, Box]]]
    ) -> list[Tensor]:
        """Several boxes, of several tensors of one dtype, in one all-to-all.

        Args:
            held: for each tensor, its box on each of `ranks()`.
            wanted: from a rank to (index of a tensor, box of it).
        """
        ...

    def draw_seed(self, generator: torch.Generator | None = None) -> int:
        """A seed for the random numbers of this op, the same on all ranks of the mesh. Draw one per op."""
        ...

    def mark_copy(self, x: Tensor) -> Tensor:
        """`x`, marked as a copy where users expect a view: in-place ops on it are refused."""
        ...

    def reshard_like(self, operand: int, like: int, lengths: dict[int, int]) -> "LocalContext":
        """This context with dim 0 of `operand` sharded by the axes of operand `like`, with these sizes by rank."""
        ...

    def name_of(self, operand: int) -> str:
        """What errors call an operand: its parameter name if it has one."""
        ...


@lru_cache(maxsize=4096)
def local_with(function: Callable[..., Any], *fixed: Any) -> LocalFunction:
    """`function` with its first arguments given; the same object for the same arguments, so that axes can share it."""
    return partial(function, *fixed)


# By local implementation: (what makes a version of it for one rank and its layouts, whether that is Python code).
SPECIALIZED: dict[Callable[..., Any], tuple[Callable[..., LocalFunction | None], bool]] = {}


def specialized(
    specialize: Callable[..., LocalFunction | None], python: bool = False
) -> Callable[[LocalFunction], LocalFunction]:
    """Decorate a local implementation most of which can be computed once for a rank and its layouts.

    Args:
        specialize: called as `specialize(*first_arguments_of_local_with, ctx)`. Returns a function that is called with
            the op's arguments in place of the local implementation, and may return NotImplemented for it to run after
            all; or None if there is no such function.
        python: the function reads shapes, so it must get plain local tensors.
    """

    def add(local: LocalFunction) -> LocalFunction:
        SPECIALIZED[local] = specialize, python
        return local

    return add


def specialization(local: LocalFunction | None, ctx: LocalContext) -> tuple[LocalFunction | None, bool]:
    """The version of a local implementation for the rank of `ctx`, or None, and whether it is Python code."""
    function, fixed = (local.func, local.args) if isinstance(local, partial) else (local, ())
    specialize, python = SPECIALIZED.get(function, (None, False))  # type: ignore[arg-type]
    return (None if specialize is None else specialize(*fixed, ctx)), python


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
        index_form: how the arguments name indices, as a `shapes.index.IndexForm`, checked on every rank that has them.
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


def replacement(*ops: Any) -> Callable[[LocalFunction], LocalFunction]:
    """Register the function below, which has the parameters of ops, to be called in their place."""

    def add(function: LocalFunction) -> LocalFunction:
        handler(*ops)(lambda func, args, kwargs: function(*args, **kwargs))
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
