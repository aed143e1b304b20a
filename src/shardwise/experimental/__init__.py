"""For authors of distributed code: rows for their own ops, functions of local tensors, and context parallelism.

The names and arguments are those of `torch.distributed.tensor.experimental`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise import _collectives as collectives
from shardwise._layout import (
    REPLICATE,
    Mesh,
    Placement,
    Placements,
    Shard,
    as_placements,
    checked,
    is_listing,
    placement_of,
    placements_text,
    shown,
)
from shardwise._rules import Meta, OpRule, Row
from shardwise._rules.registry import RULES, register
from shardwise._rules.row import Args, Kwargs, Op
from shardwise._tensor import DTensor, strict
from shardwise._tensor.dispatch.dispatcher import forget
from shardwise._torch_bridge.torch_dtensors import converted
from shardwise.errors import LayoutError, RuleError
from shardwise.experimental.context import context_parallel, context_parallel_unshard

PerArgument = Sequence[Placements | None] | None  # None: any for all
Acceptable = tuple[Sequence[Placement], Sequence[Placement | None]]


@checked
def register_sharding(
    op: Op,
    *,
    in_place: bool = False,
    shape: Callable[..., tuple[int, ...] | list[tuple[int, ...]]] | None = None,
    data_dependent_shape: bool = False,
) -> Callable[[Callable[..., Sequence[Row | Acceptable]]], Callable[..., Sequence[Row | Acceptable]]]:
    """Register rows of an op, or replace those it has.

    Args:
        op: the op that users call, or a list of ops: a function, a `torch.library` op, an overload of one.
        in_place: the op changes its first operand and returns it.
        shape: the result's global shape (a list of shapes for several results) from the op's arguments. None asks
            torch's meta device, which needs the op's fake implementation.
        data_dependent_shape: the sizes of a sharded result are known only after the op has run.

    The decorated function takes the op's arguments, tensors as `Meta(shape, dtype, placement)`. It returns how the op
    runs on one mesh axis without communication: a list of `Row`s, or of pairs `(placements of the results, placements
    of the arguments)` with None for arguments that are not tensors. The row of all Replicate is optional.

    Check the rows with `shardwise.testing.check_rows`.
    """
    ops = op if isinstance(op, list | tuple) else [op]

    def replace_rows(rule: Callable[..., Sequence[Row | Acceptable]]) -> Callable[..., Sequence[Row | Acceptable]]:
        def rows(*args: object, **kwargs: object) -> list[Row]:
            return [_as_row(found, args, kwargs) for found in rule(*args, **kwargs)]

        for name in chain(*map(_names_of, ops)):
            known = RULES.get(name, OpRule())
            new = OpRule(
                rows, in_place, shape, data_dependent_shape=data_dependent_shape, native=known.native,
                handler_without_row=known.handler_without_row or known.handler, index_form=known.index_form,
                value_errors=known.value_errors, takes_dtensors=known.takes_dtensors,
            )  # fmt: skip
            register(new, name, replace=True)
        forget()
        return rule

    return replace_rows


def _names_of(op: Op) -> list[Any]:
    """The names of an op. An op of a library may be called by its packet if that has one overload."""
    op = getattr(op, "_opoverload", op)
    if isinstance(op, torch._ops.OpOverloadPacket):
        return [op, *(getattr(op, name) for name in op.overloads())]
    if isinstance(op, torch._ops.OpOverload) and len(op.overloadpacket.overloads()) == 1:
        return [op, op.overloadpacket]
    return [op]


def _as_row(found: Row | Acceptable, args: Args, kwargs: Kwargs) -> Row:
    if isinstance(found, Row):
        return found
    outputs, inputs = found
    operands = [x for x in pytree.tree_leaves((args, kwargs), is_leaf=_is_meta) if _is_meta(x)]
    placed = tuple(p for p in inputs if p is not None)
    if len(placed) != len(operands):
        raise RuleError(
            f"register_sharding: {len(operands)} tensors need as many placements, got {list(inputs)}. "
            f"Fix: one placement for every tensor argument, None for every other argument."
        )
    for placement in (*outputs, *placed):
        if isinstance(placement, Shard) and (placement.dim < 0 or placement.sizes is not None):
            raise RuleError(
                f"register_sharding: rows say Shard(dim) with dim >= 0 and no sizes, got {placement}. "
                f"Fix: count the dim from the first; sizes follow from the operands."
            )
    return Row(placed, outputs[0] if len(outputs) == 1 else tuple(outputs), "as registered")


def _is_meta(x: object) -> bool:
    return isinstance(x, Meta)


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Inside, plain tensors beside DTensors count as replicated, even under `strict()`, as by default."""
    with strict(False):
        yield


@checked
def local_map(
    func: Op | None = None,
    out_placements: Any = None,
    in_placements: PerArgument = None,
    in_grad_placements: PerArgument = None,
    device_mesh: Any = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """Make a function of local tensors one of distributed tensors.

    Args:
        func: takes and returns plain tensors; None makes `local_map` a decorator.
        out_placements: of the result, in a sequence or by axis name; for several flattened results, a tuple of these,
            with None for each result that is not a tensor.
        in_placements: the placements that each flattened argument must have; None (for one or for all) takes any.
        in_grad_placements: of the gradient of each local argument, see `DTensor.to_local`; None: as the argument.
        device_mesh: of the results; None is the mesh of the first DTensor among the arguments.
        redistribute_inputs: redistribute arguments that have other placements than `in_placements`.

    Returns:
        A function that calls `func` on local tensors; DTensors of torch count as DTensors. Without a DTensor among its
        arguments it is `func`. The ranks exchange the sizes of sharded results (one small exchange per result).

    Raises:
        LayoutError: an argument has other placements, or results and `out_placements` differ in number or kind.
    """
    if func is None:
        return lambda f: local_map(
            f, out_placements, in_placements, in_grad_placements, device_mesh, redistribute_inputs=redistribute_inputs
        )

    @wraps(func)
    def on_locals(*args: object, **kwargs: object) -> Any:
        flat, spec = pytree.tree_flatten((args, kwargs))
        flat = [converted(x) if isinstance(x, Tensor) else x for x in flat]
        first = next((x for x in flat if isinstance(x, DTensor)), None)
        if first is None:
            return func(*args, **kwargs)
        mesh = first._layout.mesh if device_mesh is None else collectives.as_mesh(device_mesh)
        required, grads = (
            _for_each(name, given, len(pytree.tree_leaves(args)), len(flat))
            for name, given in (("in_placements", in_placements), ("in_grad_placements", in_grad_placements))
        )
        local_args, local_kwargs = pytree.tree_unflatten(
            [
                _local(i, x, required[i], grads[i], redistribute_inputs) if isinstance(x, DTensor) else x
                for i, x in enumerate(flat)
            ],
            spec,
        )
        out, out_spec = pytree.tree_flatten(func(*local_args, **local_kwargs))
        wanted = _wanted_outputs(out_placements, len(out))
        return pytree.tree_unflatten([_output(x, p, mesh) for x, p in zip(out, wanted, strict=True)], out_spec)

    return on_locals


def _for_each(name: str, given: PerArgument, unnamed: int, count: int) -> list[Placements | None]:
    """One entry per argument; those of keyword arguments may be omitted."""
    found: list[Placements | None] = [None] * count if given is None else list(given)
    if len(found) not in (unnamed, count):
        raise LayoutError(
            f"local_map: {name} has {len(found)} entries, expected {unnamed}. "
            f"Fix: one entry for each argument, None for one that is not a tensor or has any placements."
        )
    return found + [None] * (count - len(found))


def _local(
    index: int, x: DTensor, required: Placements | None, grad_placements: Placements | None, redistribute: bool
) -> Tensor:
    """The local tensor of argument number `index`."""
    layout = x._layout if required is None else x._layout.replace(required)
    if layout != x._layout:
        if not redistribute:
            raise LayoutError(
                f"local_map: argument {index} is {x._layout}, but "
                f"{placements_text(layout.mesh, layout.placements)} is required. "
                f"Fix: redistribute it, or pass redistribute_inputs=True."
            )
        x = x.redistribute(placements=required)
    return x.to_local(grad_placements=grad_placements)


def _wanted_outputs(out_placements: Any, count: int) -> list[Placements | None]:
    one = out_placements is None or isinstance(out_placements, Mapping) or placement_of(out_placements) is not None
    if not one and not is_listing(out_placements):
        raise LayoutError(
            f"local_map: out_placements must be placements, or a tuple of those of several results, got "
            f"{shown(out_placements)}. Fix: such as [Shard(0)]."
        )
    one = one or all(placement_of(p) is not None for p in out_placements)
    wanted = [out_placements] if one else list(out_placements)
    if len(wanted) != count:
        raise LayoutError(
            f"local_map: out_placements has {len(wanted)} entries, expected {count}, one for each result. "
            f"Fix: a tuple of the placements of each, None for one that is not a tensor."
        )
    return wanted


def _output(x: object, placements: Placements | None, mesh: Mesh) -> object:
    if not isinstance(x, Tensor):
        if placements is not None:
            raise LayoutError(
                f"local_map: out_placements has {placements} for a result that is not a tensor: {x!r}. "
                f"Fix: None for it."
            )
        return x
    if placements is None:
        raise LayoutError(
            "local_map: a result that is a tensor needs out_placements, got None. "
            "Fix: those of its local tensors, such as [Shard(0)]."
        )
    if isinstance(x, DTensor):
        raise LayoutError(
            "local_map: the function must return local tensors, got a DTensor. Fix: return its to_local()."
        )
    if all(p == REPLICATE or p.is_partial() for p in as_placements(mesh, placements)):
        return DTensor.from_local(x, mesh, placements, run_check=False, shape=x.shape)
    return DTensor.from_local(x, mesh, placements)


__all__ = [
    "Meta", "Row", "context_parallel", "context_parallel_unshard", "implicit_replication", "local_map",
    "register_sharding",
]  # fmt: skip
