"""The registry: one `OpRule` per op, keyed by the functions that users call and by aten ops.

How to write an entry:

    register(OpRule(…), op, …)      any entry; with `replace=True` in place of the one there is
    update(op, …, **fields)         sets fields of an entry
    @handler(op, …)                 the function below answers calls, as (func, args, kwargs)
    @handler(op, …, no_row=True)    the same, but only calls for which no row fits
    @handler_of_family(serves)      the same for all functions without an entry for which `serves(func)` is true
    @replacement(op, …)             the function below is called instead, with the same arguments
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise._rules.row import Handler, LocalFunction, Op, Row
from shardwise.errors import RuleError

Function = TypeVar("Function", bound=Callable[..., Any])
RowsFunction = Callable[..., list[Row]]
Shapes = tuple[int, ...] | list[tuple[int, ...]]  # the shape of the result, or the shapes of all results


def no_rows(*_: object, **__: object) -> list[Row]:
    """The rows of an op without rows: it is decomposed, or has a handler."""
    raise NotImplementedError("it is decomposed into other ops")


@dataclass(frozen=True)
class OpRule:
    """The dispatcher's knowledge of one op: an entry of `RULES`.

    How it runs:
        rows: (op's arguments, tensors given as `Meta`) -> rows.
        handler: called as `handler(func, args, kwargs)` instead of everything else.
        decomposition: the op in terms of other ops, called with its arguments if no row fits.
        handler_without_row: a handler for calls without a fitting row or decomposition. Without it, torch decomposes
            the op; an aten op gathers its operands and runs replicated.
        native: substitute for a function whose Python code reads shapes. A DTensor reports its global shape there, so
            such code needs plain local tensors; a substitute takes the DTensors directly.
        replicated_impl: the local implementation if all operands are Replicate on all axes; None is the op itself.
        empty_shards_impl: the local implementation if a rank has an empty shard, for ops that save other tensors for
            backward if an operand is empty; None is the op itself.
        kept_operand: the operand that keeps its layout if a row allows it, and its mesh, such as a table. None: the
            cheapest row; the mesh of the largest operand, or of the one written to.

    What it returns:
        in_place: the op writes to its first operand, whose layout therefore must not change.
        shape: the global shape of the result from the arguments of `rows`, a list of shapes for several results;
            None runs the op on torch's meta device.
        checks_sizes: `shape` raises if sizes do not fit; otherwise the op is tried on the meta device.
        data_dependent_shape: the result's size is known only after the op ran; the ranks exchange the sizes of shards.
        memory_order: the dims of the first result from the largest stride to the smallest; from the arguments of
            `rows`. None: as on the meta device, or row-major if `data_dependent_shape`.
        view: torch returns a view of the first operand.

    How calls are cached:
        shape_independent: the rows depend on numbers of dims and on which dims have size 1, on no other size and no
            float argument, so one choice serves all shapes and numbers.
        typed: the rows depend on dtypes.
        random: the op draws random numbers. Ranks outside the mesh run it too, so that generators stay equal.

    How a rank with an empty shard raises the errors of the other ranks:
        index_form: how the arguments name indices, as a `shapes.index.IndexForm`, checked on every rank that has them.
        value_errors: the op raises for some values, such as a division by 0: the rank tries the op on one element.

    For tools:
        is_op: a handler that computes a result itself, so that tools count it as an op, not only its inner ops.
        takes_dtensors: a Python function that only compares sizes, so it may get DTensors for local tensors.
    """

    rows: RowsFunction = no_rows
    in_place: bool = False
    shape: Callable[..., Shapes] | None = None
    checks_sizes: bool = False
    shape_independent: bool = False
    replicated_impl: LocalFunction | None = None
    empty_shards_impl: LocalFunction | None = None
    data_dependent_shape: bool = False
    memory_order: Callable[..., Sequence[int]] | None = None
    random: bool = False
    typed: bool = False
    view: bool = False
    decomposition: Op | None = None
    kept_operand: int | None = None
    handler: Handler | None = None
    handler_without_row: Handler | None = None
    native: Op | None = None
    index_form: Any = None
    value_errors: bool = False
    is_op: bool = False
    takes_dtensors: bool = False

    @property
    def has_rule(self) -> bool:
        """Whether there are rows or a decomposition, not only a handler."""
        return self.rows is not no_rows or self.decomposition is not None


# Methods that have the name of an op and return no tensor, or name dims.
NO_OPS = {
    object.__eq__, object.__ne__, Tensor.__float__, Tensor.__complex__, Tensor.__nonzero__, Tensor.__index__,
    getattr(Tensor, "index", None),
}  # fmt: skip


def functions_named(*names: str) -> list[Op]:
    """Every function, method and overload of ops, without in-place forms."""
    return list(dict.fromkeys(op for name in names for op, in_place in forms_of(name) if not in_place))


def forms_of(name: str) -> list[tuple[Op, bool]]:
    """Every function, method and overload of the op `name`, and whether it is in-place."""
    found: list[tuple[Op, bool]] = []
    both = (name, name.startswith("__i")), (name + "_", True)
    for module in (torch, Tensor, F, torch._C._nn, torch.special):
        prefix = "special_" if module is torch.special else ""
        functions = [(getattr(module, spelling.removeprefix(prefix), None), in_place) for spelling, in_place in both]
        found += [(function, in_place) for function, in_place in functions if callable(function)]
    dunders = (f"__{name}__", f"__i{name}__", f"__r{name}__")
    found += [(getattr(Tensor, dunder), dunder.startswith("__i")) for dunder in dunders if hasattr(Tensor, dunder)]
    found = [(function, in_place) for function, in_place in found if function not in NO_OPS]
    for spelling, in_place in both:
        packet = getattr(torch.ops.aten, spelling, None)
        overloads = packet.overloads() if packet is not None else ()
        found += [(op, in_place) for op in (getattr(packet, o) for o in overloads) if returns_tensors(op)]
    return found


def returns_tensors(overload: torch._ops.OpOverload) -> bool:
    """Whether an overload takes and returns tensors; torch lists arithmetic on numbers, out= variants and twins too."""
    schema = overload._schema
    sides = (schema.arguments, schema.returns)
    others = "twin" in overload._overloadname or any(a.is_out for a in schema.arguments)
    return not others and all(any("Tensor" in str(a.type) for a in side) for side in sides)


RULES: dict[Op, OpRule] = {}
"""The one table of ops: the rule of each function, method and aten overload that has one."""
# Functions without an entry that one entry serves, as (whether it serves a function, its entry).
FAMILIES: list[tuple[Callable[[Op], bool], OpRule]] = []


def register(rule: OpRule, *ops: Op, replace: bool = False) -> None:
    """Register an entry for ops.

    Args:
        replace: replace an existing entry.

    Raises:
        RuleError: an op has an entry already.
    """
    for op in dict.fromkeys(ops):  # some functions of torch have several names
        if op in RULES and not replace:
            raise RuleError(f"{op} is registered already. Fix: update() its entry.")
        RULES[op] = rule


def update(*ops: Op, **values: Any) -> None:
    """Set fields of entries, such as a `native` function that the module of the rule cannot import.

    Raises:
        RuleError: an op has no entry, or its entry has a value for one of these fields already.
    """
    defaults = {f.name: f.default for f in fields(OpRule)}
    for op in ops:
        rule = RULES.get(op)
        if rule is None:
            raise RuleError(f"{op} has no entry to update. Fix: register it.")
        for name in values:
            if getattr(rule, name) is not defaults[name]:
                raise RuleError(f"{op} is registered with {name}={getattr(rule, name)} already. Fix: give it once.")
        RULES[op] = dataclasses.replace(rule, **values)


def handler(*ops: Op, is_op: bool = False, no_row: bool = False) -> Callable[[Handler], Handler]:
    """Register the function below as handler of ops: `handler(func, args, kwargs)`.

    Args:
        is_op: tools count the call as an op; otherwise they only see the ops that the handler calls.
        no_row: the ops have a rule, and the handler runs for calls without a fitting row.
    """

    def add(function: Handler) -> Handler:
        if no_row:
            update(*ops, handler_without_row=function)
        else:
            register(OpRule(handler=function, is_op=is_op), *ops)
        return function

    return add


def handler_of_family(serves: Callable[[Op], bool], is_op: bool = False) -> Callable[[Handler], Handler]:
    """Register the function below as handler of all functions without an entry for which `serves(func)` is true."""

    def add(function: Handler) -> Handler:
        FAMILIES.append((serves, OpRule(handler=function, is_op=is_op)))
        return function

    return add


def replacement(*ops: Op) -> Callable[[Function], Function]:
    """Register the function below, which has the parameters of ops, as their replacement."""

    def add(function: Function) -> Function:
        handler(*ops)(lambda func, args, kwargs: function(*args, **kwargs))
        return function

    return add


def rule_of(op: Op) -> OpRule | None:
    """The entry of an op with rows or a decomposition; None for others."""
    rule = RULES.get(op)
    return rule if rule is not None and rule.has_rule else None


def ops_with_rules() -> dict[Op, OpRule]:
    """The entries with rows or a decomposition."""
    return {op: rule for op, rule in RULES.items() if rule.has_rule}
