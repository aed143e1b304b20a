"""Ops without a rule: torch decomposes a function into aten ops, and an aten op without a rule runs replicated.

A decomposed function runs once on wrappers that have the global shape. Its aten ops arrive at
`Wrapper.__torch_dispatch__`, and run by their rules on the local tensors. Autograd records only those, because wrappers
never require grad.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Self

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.overrides import enable_reentrant_dispatch
from torch.utils import _pytree as pytree

from shardwise._layout import REPLICATE, Layout, Partial
from shardwise._redistribute.packing import identity
from shardwise._redistribute.run_plan import redistribute_local
from shardwise._rules.pointwise import register_if_tagged
from shardwise._rules.registry import OpRule, rule_of
from shardwise._rules.row import Args, Kwargs, Op
from shardwise._tensor.dispatch import outside_mesh, seeds
from shardwise._tensor.dispatch.consistent_errors import (
    Version,
    check_versions,
    raise_dtype_error,
    saved_by,
    versions_of,
)
from shardwise._tensor.dispatch.operands import (
    checked_sizes,
    into_plain,
    is_outside,
    on_one_mesh,
    promoted,
)
from shardwise._tensor.dispatch.resolve import Output
from shardwise._tensor.dispatch.view_copies import before_change, copies_of, invalidate, track
from shardwise._tensor.dispatch.without_memory import Autocast, hidden_from_modes, on_meta
from shardwise._tensor.dtensor import DTensor, dtensors_in, plain, tag, to_layout
from shardwise._trace.comm_trace import Cause
from shardwise.errors import RuleError


class Wrapper(torch.Tensor):
    """A DTensor inside one call of a function that torch decomposes: it has the global shape, and no memory."""

    dtensor: DTensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, dtensor: DTensor) -> Self:
        layout = dtensor._layout
        self: Self = torch.Tensor._make_wrapper_subclass(
            cls, layout.shape, strides=layout.stride(), dtype=dtensor.dtype, device=dtensor.device
        )
        self.dtensor = dtensor
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        args, kwargs = pytree.tree_map(lambda x: x.dtensor if isinstance(x, Wrapper) else x, (args, kwargs or {}))
        if func._schema.is_mutable:
            _refuse_to_fill(func, args, kwargs)
        with enable_reentrant_dispatch():
            out = _run_aten(func, args, kwargs)
        if func._schema.is_mutable:
            return out
        return pytree.tree_map(lambda x: Wrapper(x) if type(x) is DTensor else x, out)


def _refuse_to_fill(func: torch._ops.OpOverload, args: Args, kwargs: Kwargs) -> None:
    """Raise where a plain tensor inside a decomposed function would get gradients.

    Autograd would record the op twice: here, with the local tensors, and for the caller, which sees wrappers that do
    not require grad.
    """
    if not torch.is_grad_enabled() or all(type(x) is DTensor for x in _written_operands(func, args, kwargs)):
        return
    if any(isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves((args, kwargs))):
        raise RuleError(
            f"{func}: a function that torch decomposes writes a DTensor into a plain tensor of its own; the gradient "
            f"would be lost. Fix: run it on detached or full tensors, or make the result with torch.stack or torch.cat."
        )


def _run_aten(func: Any, args: Args, kwargs: Kwargs) -> object:
    if rule_of(func) is not None or register_if_tagged(func):
        return DTensor._dispatch(func, args, kwargs)
    in_aten = getattr(func, "impl_aten", None)
    if in_aten is not None:
        return _run_prim(func, in_aten, args, kwargs)
    if func.name() == "aten::is_same_size":
        return args[0]._layout.shape == args[1]._layout.shape
    return run_replicated(func, args, kwargs, "it has no rule")


def _run_prim(func: Op, in_aten: Op, args: Args, kwargs: Kwargs) -> object:
    """Run a prim, which is aten ops after checks of its arguments; the meta device makes these checks too."""
    with torch.no_grad():
        metas, named, _ = on_meta(args, kwargs, "meta")
        func(*metas, **named)
    return in_aten(*args, **kwargs)


def run_without_row(func: Op, rule: OpRule, args: Args, kwargs: Kwargs, error: RuleError) -> Any:
    """Run a call for which the rule has no row: decomposed by its rule or torch, or, an aten op, replicated."""
    if rule.decomposition is not None:
        return rule.decomposition(*args, **kwargs)
    if rule.handler_without_row is not None:
        return rule.handler_without_row(func, args, kwargs)
    if isinstance(func, torch._ops.OpOverload):
        return run_replicated(func, args, kwargs, str(error))
    return run_decomposed(func, args, kwargs)


def run_decomposed(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run `func` on wrappers, which torch decomposes, and unwrap the results."""
    wrapped: dict[int, tuple[DTensor, Wrapper]] = {}
    mesh = next((x._layout.mesh for x in pytree.tree_leaves((args, kwargs)) if type(x) is DTensor), None)

    def wrap(x: object) -> Any:
        if mesh is not None and isinstance(x, Tensor) and type(x) is not DTensor and not x.is_sparse:
            x = promoted(x, mesh, str(getattr(func, "__name__", func)))
        if type(x) is DTensor:
            if id(x) not in wrapped:
                wrapped[id(x)] = (x, Wrapper(x))
            return wrapped[id(x)][1]
        return x

    given, (args, kwargs) = (args, kwargs), pytree.tree_map(wrap, (args, kwargs))
    with hidden_from_modes(Wrapper), checked_sizes(func, *given):
        out = func(*args, **kwargs)
    assert mesh is not None or not wrapped
    operands = {id(wrapper): dtensor for dtensor, wrapper in wrapped.values()}

    def unwrapped(x: object) -> object:
        if not isinstance(x, Wrapper):
            return x
        if x.requires_grad and id(x) not in operands:  # by `requires_grad=True`, which no aten op takes
            x.dtensor.requires_grad_()
        return operands.get(id(x), x.dtensor)

    return track(pytree.tree_map(unwrapped, out))


# ---- replicated -------------------------------------------------------------------------------------------------


def run_replicated(func: Any, args: Args, kwargs: Kwargs, why: str) -> Any:
    """Gather the operands of an aten op and run it replicated: right for every layout, an implicit redistribution.

    An operand that the op writes to keeps its layout: the gathered tensor is written, and resharded into it. Random
    numbers are the same on every rank, whatever the layout.
    """
    written = _written_operands(func, args, kwargs)
    if any(type(x) is not DTensor for x in written):
        return into_plain(func, args, kwargs)
    args, kwargs = _on_one_mesh(func, args, kwargs, written)
    leaves = pytree.tree_leaves((args, kwargs))
    first = next(x for x in leaves if type(x) is DTensor)
    mesh = first._layout.mesh
    generator = next((x for x in leaves if isinstance(x, torch.Generator)), None)
    seeded = torch.Tag.nondeterministic_seeded in func.tags
    copies = [copy for x in written for copy in before_change(str(func), x)]
    view = not written and any(a.alias_info is not None for a in func._schema.arguments)
    copies_view = view and not first._layout.is_replicated
    if is_outside(mesh):
        if seeded:
            seeds.draw_seed(mesh, generator)
        raise_dtype_error(func, args, kwargs)
        invalidate(copies)
        if written:
            return outside_mesh.changed_empty(func, args, kwargs)
        return outside_mesh.empty_results(func, Output.OF_DATA, mesh, args, kwargs, copies_view)
    full = _gathered(func, leaves, written, why)

    def operand(x: Any) -> Any:
        return full[id(x)] if type(x) is DTensor else None if isinstance(x, torch.Generator) else x

    saved, versions = _saved_of_gathered(func, args, kwargs)
    args, kwargs = pytree.tree_map(operand, (args, kwargs))
    seed = seeds.same_on_all_ranks(mesh, generator, first.device) if seeded else nullcontext()
    before = {id(x): full[id(x)]._version for x in written}
    extremes = {id(x): full[id(x)].detach().clone() for x in written if _is_extreme(x._layout)}
    with DisableTorchFunctionSubclass(), seed:
        out = func(*args, **kwargs)
        for x in {id(x): x for x in written}.values():
            # Batch norm changes running statistics under the same version.
            with _unsafe_preserve_version_counter(() if full[id(x)]._version > before[id(x)] else (plain(x),)):
                _reshard_written(func, x, full[id(x)], extremes.get(id(x)))
    invalidate(copies)
    originals = {id(full[id(x)]): x for x in written}

    def as_dtensor(x: object) -> Any:
        if not isinstance(x, Tensor) or type(x) is DTensor:
            return x
        original = originals.get(id(x))
        if original is not None:
            return original
        return tag(x, Layout(mesh, [REPLICATE] * mesh.ndim, x.shape, strides=x.stride()))

    out = pytree.tree_map(as_dtensor, copies_of(first, out) if copies_view else out)
    with DisableTorchFunctionSubclass():
        check_versions(func, out, saved, versions)
    return out


def _saved_of_gathered(func: Op, args: Args, kwargs: Kwargs) -> tuple[frozenset[int], list[Version]]:
    """Which operands an op saves that are gathered for it, by their number, and the versions they have."""
    operands = dtensors_in((*args, *kwargs.values()))
    gathered = {i for i, x in enumerate(operands) if not x._layout.is_replicated}
    if not gathered or not torch.is_grad_enabled() or not any(x.requires_grad for x in operands):
        return frozenset(), []
    with DisableTorchFunctionSubclass():
        saved = saved_by(func, args, kwargs, Autocast.of(operands[0]._layout.mesh.device_type)) & gathered
        return saved, versions_of(saved, operands)


def _written_operands(func: Any, args: Args, kwargs: Kwargs) -> list[Any]:
    """The operands that the op writes to, by its schema."""
    if not func._schema.is_mutable:
        return []
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    names = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [x for x in pytree.tree_leaves([named.get(name) for name in names]) if isinstance(x, Tensor)]


def _on_one_mesh(func: Any, args: Args, kwargs: Kwargs, written: Sequence[DTensor]) -> tuple[Args, Kwargs]:
    if len({x._layout.mesh for x in dtensors_in((*args, *kwargs.values()))}) == 1:
        return args, kwargs
    args, kwargs = on_one_mesh(func, args, kwargs, 0 if written else None)
    kept = {id(x) for x in pytree.tree_leaves((args, kwargs))}
    if not all(id(x) in kept for x in written):
        raise RuleError(f"{func} changes an operand that is on another mesh than its first. Fix: redistribute it.")
    return args, kwargs


def _gathered(func: Op, leaves: Sequence[Any], written: Sequence[DTensor], why: str) -> dict[int, Tensor]:
    """The full tensor of each DTensor, by its id; one that the op writes to is nobody else's memory."""
    full: dict[int, Tensor] = {}
    for x in leaves:
        if type(x) is not DTensor or id(x) in full:
            continue
        target = x._layout.replicated()
        replicated = to_layout(x, target, Cause("no rule", str(func), x._name or "an operand", why))
        with DisableTorchFunctionSubclass():
            full[id(x)] = plain(replicated)
        if any(x is y for y in written) and not x._layout.is_replicated:
            full[id(x)] = full[id(x)].clone()  # autograd may have saved the gathered tensor
    return full


def _reshard_written(func: Op, x: DTensor, full: Tensor, before: Tensor | None) -> None:
    """Give `x` the value of the full tensor that was written, in the layout it has.

    Args:
        before: the full tensor before, of a Partial maximum or minimum.
    """
    if tuple(full.shape) != x._layout.shape:
        raise RuleError(
            f"{func} would change the shape of a distributed tensor from {x._layout.shape} to {tuple(full.shape)} "
            f"in place. Fix: use the op that returns a new tensor."
        )
    if x._layout.is_replicated:
        return
    cause = Cause("no rule", str(func), x._name or "the result", "the full tensor that was written is resharded")
    if before is None:
        plain(x).copy_(redistribute_local(full, x._layout.replicated(), x._layout, cause))
        return
    # The ranks that have the extreme keep it: gradients that were recorded before go to them.
    held = x._layout.reduced()
    new, old = (redistribute_local(y, x._layout.replicated(), held, cause) for y in (full, before))
    own = plain(x)
    is_holder = (own == old) | own.isnan()
    reduce_op = next(p.reduce_op for p in x._layout.placements if isinstance(p, Partial))
    own.copy_(torch.where(is_holder, new, identity(reduce_op, own.dtype)))


def _is_extreme(layout: Layout) -> bool:
    return any(p.is_partial("max") or p.is_partial("min") for p in layout.placements)
