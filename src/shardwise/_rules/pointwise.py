"""Elementwise ops, by their effect on Partial operands."""

from cmath import isfinite
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise._layout import (
    REPLICATE,
    Boxes,
    OnRanks,
    Partial,
    Placement,
    Shard,
    contiguous_strides,
    dims_by_stride,
    without_sizes,
)
from shardwise._rules.local_context import LocalContext
from shardwise._rules.registry import (
    RULES,
    OpRule,
    RowsFunction,
    Shapes,
    forms_of,
    functions_named,
    register,
    returns_tensors,
    update,
)
from shardwise._rules.row import Align, Args, Kwargs, Meta, Row

SUMS = (Partial("sum"), Partial("avg"))
PARTIALS = (*SUMS, Partial("max"), Partial("min"), Partial("product"))

# Elementwise ops that torch does not tag as pointwise; `tagged_names` finds the tagged ones.
NONLINEAR = """
_prelu_kernel absolute addcdiv addcmul fill floor_divide greater greater_equal hardswish isclose isreal less less_equal
logsigmoid masked_fill not_equal polar softsign tanhshrink
""".split()  # fmt: skip
# Of one operand; f(a + b) = f(a) + f(b).
HOMOGENEOUS = ("neg", "negative")
CONJUGATES = "positive conj conj_physical _conj_physical".split()  # homogeneous; real numbers themselves
ADDITIVE = ("add", "sub", "subtract", "rsub", "complex")  # f(a + b, c + d) = f(a, c) + f(b, d)
BILINEAR = ("mul", "multiply")  # linear in each operand alone
NUMERATOR = ("div", "divide", "true_divide")  # linear in the first operand
DIVISIONS = (*NUMERATOR, "floor_divide", "fmod", "remainder")  # an integer divided by 0 is an error
IDENTITIES = "clone detach alias".split()  # the value itself
CONVERSIONS = "to float double half bfloat16 type_as".split()  # the value itself, perhaps in another dtype
LIKE = ("zeros_like", "empty_like")
FILLED = ("ones_like", "full_like")


def broadcast(*operands: object, **named: object) -> tuple[int, ...]:
    """The broadcast shape of the operands."""
    shapes = [x.shape for x in tensors_of(operands, named)]
    if all(shape == shapes[0] for shape in shapes):
        return shapes[0]
    return tuple(torch.broadcast_shapes(*shapes))


def shard_rows(operands: list[Meta], why: str = "elementwise") -> Iterator[Row]:
    """Rows of any elementwise op: all operands sharded along one dim, or stored in the same boxes."""
    shape = broadcast(*operands)
    for dim in range(len(shape)):
        yield Row(tuple(shard_at(x, dim, shape) for x in operands), Shard(dim), why)
    for x in operands:
        if isinstance(x.placement, OnRanks | Boxes) and all(y.shape in {shape, ()} for y in operands):
            inputs = tuple(x.placement if y.shape == shape else REPLICATE for y in operands)
            yield Row(inputs, x.placement, "elementwise on the ranks that store the elements")


def shard_at(x: Meta, dim: int, shape: tuple[int, ...]) -> Placement:
    """Shard along `dim` of the result, as a placement of `x`; Replicate if `x` is broadcast along it."""
    own = dim - (len(shape) - x.ndim)
    return Shard(own) if own >= 0 and x.shape[own] == shape[dim] else REPLICATE


def tensors_of(args: Args, kwargs: Kwargs) -> list[Meta]:
    return [x for x in (*args, *kwargs.values()) if isinstance(x, Meta)]


def nonlinear(*args: object, **kwargs: object) -> list[Row]:
    """out[i] = f(a[i], b[i], …), any f."""
    return list(shard_rows(tensors_of(args, kwargs)))


def selected(condition: Meta, *args: object, **kwargs: object) -> list[Row]:
    """out[i] = a[i] if condition[i] else b[i]."""
    if not args and not kwargs:
        raise NotImplementedError("with a condition alone it returns indices; use nonzero()")
    return nonlinear(condition, *args, **kwargs)


def homogeneous(*args: object, **kwargs: object) -> list[Row]:
    """out[i] = f(a[i]) with f(a + b) = f(a) + f(b)."""
    rows = list(shard_rows(tensors_of(args, kwargs)))
    return rows + [Row((p,), p, "linear in the Partial values") for p in SUMS]


def conjugate(x: Meta, *args: object, **kwargs: object) -> list[Row]:
    """out = x with conjugated elements; x itself if they are real."""
    rows = homogeneous(x, *args, **kwargs)
    others = () if x.dtype.is_complex else PARTIALS[len(SUMS) :]
    return rows + [Row((p,), p, "real numbers are their own conjugates") for p in others]


def additive(*args: object, **kwargs: object) -> list[Row]:
    """out[i] = a[i] ± alpha b[i]: linear in all operands together, but not in a number."""
    operands = tensors_of(args, kwargs)
    rows = list(shard_rows(operands))
    if len(tensors_of(args[:2], {})) == 2 and all(map(isfinite, numbers_of(args, kwargs))):
        rows += [Row((p,) * len(operands), p, "Partial + Partial stays Partial") for p in SUMS]
    return rows


def bilinear(*args: object, **kwargs: object) -> list[Row]:
    """out[i] = a[i] b[i]: linear in a for a fixed b, and the other way round."""
    operands = tensors_of(args, kwargs)
    finite = all(map(isfinite, numbers_of(args, kwargs)))
    why = "Partial × Replicate stays Partial"
    return [*shard_rows(operands), *_linear_rows(operands, range(len(operands)) if finite else (), why)]


def numerator(*args: object, **kwargs: object) -> list[Row]:
    """out[i] = a[i] / b[i]: linear in a unless the quotient is rounded."""
    operands = tensors_of(args, kwargs)
    exact = kwargs.get("rounding_mode") is None and all(numbers_of(args, kwargs))  # 0 / 0 is nan
    linear = (0,) if exact and isinstance(args[0], Meta) else ()
    return [*shard_rows(operands), *_linear_rows(operands, linear, "Partial / Replicate stays Partial")]


def _linear_rows(operands: list[Meta], linear: Sequence[int], why: str) -> Iterator[Row]:
    """Rows for one Partial operand; a Replicate one is not made Partial with zeros: 0 * inf is nan."""
    for index, p in product(linear, SUMS):
        if operands[index].placement == p:
            yield Row(tuple(p if i == index else REPLICATE for i in range(len(operands))), p, why)


def same_shape(x: Meta, *args: object, **kwargs: object) -> list[Row]:
    """Rows of a copy. Boxes are stored flat, so they have no channels_last strides."""
    formats = memory_formats(args, kwargs)
    ordered = torch.channels_last in formats or torch.channels_last_3d in formats
    return [row for row in shard_rows([x]) if not (ordered and isinstance(row.output, Boxes))]


def identity_rows(x: Meta, *args: object, **kwargs: object) -> list[Row]:
    """out = x, Partial values included."""
    rows = same_shape(x, *args, **kwargs)
    return rows + [Row((p,), p, "copy of the local tensor") for p in PARTIALS]


def contiguous(x: Meta, *args: object, **kwargs: object) -> list[Row]:
    """out = x, or a copy if the elements of the global tensor have another order, whatever the order of local ones."""
    rows = identity_rows(x, *args, **kwargs)
    if is_contiguous(x, *memory_formats(args, kwargs)):
        return rows
    rows.append(Row((REPLICATE,), REPLICATE, "every rank has everything"))
    return [replace(row, local_impl=_copied) for row in rows]


def is_contiguous(x: Meta, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
    """Whether the elements of the global tensor are in this order."""
    if x.strides is None and memory_format is torch.contiguous_format:
        return True
    strides = x.strides or contiguous_strides(x.shape)
    return torch.empty_strided(x.shape, strides, device="meta").is_contiguous(memory_format=memory_format)


def memory_formats(args: Args, kwargs: Kwargs) -> list[torch.memory_format]:
    return [a for a in (*args, *kwargs.values()) if isinstance(a, torch.memory_format)]


def _copied(ctx: LocalContext, x: Tensor, /, *args: object, **kwargs: object) -> Tensor:
    return x.clone(memory_format=next(iter(memory_formats(args, kwargs)), torch.contiguous_format))


def conversion(x: Meta, *args: object, **kwargs: object) -> list[Row]:
    """out = x in another dtype, x itself if it has that; Partial stays Partial unless it is converted to integers."""
    like = tensors_of(args, kwargs)  # only their dtype is used, so any placement will do
    dtypes = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)] + [y.dtype for y in like]
    rows = same_shape(x, *args, **kwargs)
    if all(dtype.is_floating_point or dtype.is_complex or (like and dtype == x.dtype) for dtype in dtypes):
        rows += [Row((p,), p, "copy of the local tensor") for p in PARTIALS]
    if like:
        unused = tuple(without_sizes(y.placement) for y in like)
        rows.append(Row((REPLICATE,), REPLICATE, "copy of the local tensor"))
        return [Row((*row.inputs, *unused), row.output, row.why, align=Align.ORDER) for row in rows]
    return rows


def conversion_to(x: Meta, *args: object, **kwargs: object) -> list[Row]:
    """Tensor.to a dtype or device; to those of another tensor, `_to_another`."""
    if tensors_of(args, kwargs):
        raise NotImplementedError("the rows of a conversion depend on the dtype of the other tensor")
    return conversion(x, *args, **kwargs)


def _to_another(
    x: Tensor,
    tensor: Tensor,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
) -> Tensor:
    return x.to(tensor.device, tensor.dtype, non_blocking, copy, memory_format=memory_format)


def numbers_of(args: Args, kwargs: Kwargs) -> list[complex]:
    return [a for a in (*args, *kwargs.values()) if isinstance(a, int | float | complex)]


def shape_of_first(x: Meta, *args: object, **kwargs: object) -> tuple[int, ...]:
    return x.shape


def order_of_first(x: Meta, *args: object, **kwargs: object) -> list[int]:
    """The `memory_order` of `torch.empty_like`, also of an expanded tensor."""
    strides = x.strides or contiguous_strides(x.shape)
    return dims_by_stride(torch.empty_like(torch.empty_strided(x.shape, strides, device="meta")).stride())


def filled_like(x: Meta, *args: object, **kwargs: object) -> list[Row]:
    """out has the shape of x and one value."""
    rows = same_shape(x, *args, **kwargs)
    return rows + [Row((p,), REPLICATE, "the Partial values are not read") for p in PARTIALS]


def new_like(x: Meta, size: Sequence[int], *args: object, **kwargs: object) -> list[Row]:
    """out has `size` and no value of x; it is sharded as x if it has the same size, else replicated."""
    why, p = "the values are not read", x.placement
    if tuple(size) == x.shape and not isinstance(p, Partial):
        return [Row((without_sizes(p),), without_sizes(p), why, _new_shard)]
    return [Row((without_sizes(p),), REPLICATE, why)]


def _new_shard(ctx: LocalContext, x: Tensor, size: Sequence[int], *args: object, **kwargs: object) -> Tensor:
    out: Tensor = ctx.call(x, ctx.output.local_shape(ctx.rank), *args, **kwargs)
    return out


def glu(x: Meta, dim: int = -1) -> list[Row]:
    """out = a * sigmoid(b), where a and b are the halves of x along dim."""
    return [Row((Shard(d),), Shard(d), "both halves are on the same rank") for d in range(x.ndim) if d != dim % x.ndim]


def tagged_names() -> dict[str, int]:
    """The aten ops whose every form torch tags as pointwise, and the number of their results.

    Without `max`, of which one form is elementwise and others reduce; without ops that draw random numbers, return a
    view, or return no tensor, such as `equal`.
    """
    aten = [name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    forms: dict[str, list[str]] = {}
    for name, _, form in sorted(name.partition(".") for name in aten):
        if name.endswith("__") or not name.endswith("_"):  # in-place ops are found by the name without it
            forms.setdefault(name, []).append(form)
    found = {}
    for name, of_name in forms.items():
        if any(torch.Tag.pointwise in torch._C._get_operation_overload(f"aten::{name}", form)[2] for form in of_name):
            ops = [getattr(getattr(torch.ops.aten, name), form or "default") for form in of_name]
            ops = [op for op in ops if not any(a.is_out for a in op._schema.arguments)]
            if ops and all(map(is_elementwise, ops)):
                found[name] = len(ops[0]._schema.returns)
    return found


def is_elementwise(op: torch._ops.OpOverload) -> bool:
    """Whether torch says that each element of new tensors depends only on those at its place in the operands."""
    schema = op._schema
    reads = any(a.alias_info is not None and not a.alias_info.is_write for a in schema.arguments)
    random = torch.Tag.nondeterministic_seeded in op.tags
    return torch.Tag.pointwise in op.tags and not reads and not random and returns_tensors(op)


def register_if_tagged(op: torch._ops.OpOverload) -> bool:
    """Register rows of an op that was defined later, such as a user's, if it is tagged as pointwise."""
    if op._schema.is_mutable or not is_elementwise(op):
        return False
    shape = broadcast if len(op._schema.returns) == 1 else None
    RULES.setdefault(op, OpRule(nonlinear, shape=shape, checks_sizes=True, shape_independent=True))
    return True


def register_tagged() -> None:
    """Register rows of the ops that torch tags as pointwise and that have no entry yet."""
    for name, results in tagged_names().items():
        _register([name], nonlinear, broadcast if results == 1 else None)
    update(F.silu, takes_dtensors=True)


def _register(names: Sequence[str], rows: RowsFunction, shape: Callable[..., Shapes] | None = broadcast) -> None:
    for name in names:
        for function, in_place in forms_of(name):
            if function not in RULES:
                rule = OpRule(rows, in_place, shape, checks_sizes=shape is broadcast, shape_independent=True)
                register(replace(rule, value_errors=name in DIVISIONS), function)


register(
    OpRule(nonlinear, shape=broadcast, checks_sizes=True, value_errors=True), Tensor.__rdiv__
)  # the operand is the denominator
_register(NONLINEAR, nonlinear)
_register(["where"], selected)
_register(HOMOGENEOUS, homogeneous)
_register(CONJUGATES, conjugate)
update(*dict.fromkeys(op for name in CONJUGATES for op, _ in forms_of(name) if RULES[op].rows is conjugate), typed=True)
_register(ADDITIVE, additive)
_register(BILINEAR, bilinear)
_register(NUMERATOR, numerator)
_register(IDENTITIES, identity_rows)
register(OpRule(contiguous, view=True), *functions_named("contiguous"))
register(OpRule(conversion_to, shape=shape_of_first, shape_independent=True, decomposition=_to_another), Tensor.to)
_register(CONVERSIONS, conversion, shape_of_first)
update(Tensor.type_as, torch.ops.aten.type_as.default, torch.ops.aten.to.other, typed=True)
_register(LIKE, identity_rows)
_register(FILLED, filled_like)
register(OpRule(conversion, shape=shape_of_first), torch.ops.aten._to_copy.default)
aten = torch.ops.aten
register(OpRule(nonlinear, True, broadcast), Tensor.copy_, Tensor.zero_, aten.copy_.default, aten.zero_.default)
for _op in (aten.new_empty, aten.new_full, aten.new_ones, aten.new_zeros):
    register(OpRule(new_like, shape=lambda x, size, *args, **kwargs: tuple(size)), _op.default)
register(OpRule(glu), *functions_named("glu"))
