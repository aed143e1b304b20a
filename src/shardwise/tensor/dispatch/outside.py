"""Ops on a rank outside their mesh: results without elements, with the autograd graph that the other ranks have.

    x = distribute_tensor(torch.ones(2), Mesh((1,), (1,)), [Replicate()]).requires_grad_()
    y = x.exp()    # on rank 0: no elements, a view of nothing, requires grad, is saved for backward

An op runs on torch's meta device. So it raises what torch raises, and says which shapes its results have, which of them
require grad, and what it saves. In a double backward the gradient of an op is such an op itself. Views are views of the
empty tensor, and changes in place change it, so autograd raises what it raises on the other ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch._C._autograd import _top_saved_tensors_default_hooks as top_hooks
from torch.utils import _pytree as pytree

from shardwise import collectives
from shardwise.errors import RuleError
from shardwise.layout import REPLICATE, Layout, Mesh
from shardwise.rules.row import Args, Kwargs, Op
from shardwise.tensor.dispatch.autocasting import Autocast
from shardwise.tensor.dispatch.modes import without_modes
from shardwise.tensor.dispatch.names import name_of
from shardwise.tensor.dispatch.resolve import with_meta_device
from shardwise.tensor.dispatch.version_checks import (
    Version,
    check_versions,
    counter_of,
    new_meta,
    on_device,
    recording_saved,
    tensors_in,
    versions_of,
)
from shardwise.tensor.dtensor import DTensor, plain, tag
from shardwise.tensor.handlers.copies import copies_of, storage_of
from shardwise.trace.autograd_function import TensorFunction

# Of the global tensor: shape, strides unless they are row-major, dtype, and whether it requires grad.
_Meta = tuple[tuple[int, ...], tuple[int, ...] | None, torch.dtype, bool]


@dataclass(frozen=True)
class _Call:
    """An op as a function of its tensors, without memory."""

    op: Op
    function: Callable[..., Any]
    metas: tuple[_Meta, ...]  # of its tensors
    autocast: Autocast
    in_place: bool = False

    def run(self) -> tuple[list[Tensor], Any, frozenset[int]] | None:
        """The tensors, the results, and what of both is saved for backward (see `recording_saved`).

        None if the results depend on data.
        """
        with without_modes(), self.autocast.without_memory() as device:
            metas = [new_meta(*meta, device) for meta in self.metas]
            try:
                with recording_saved(metas) as saved_by:
                    out = self.function(*metas)
            except RuntimeError as error:  # among them NotImplementedError
                if isinstance(error, NotImplementedError) or "on meta tensors" in str(error):
                    return None
                raise
            return metas, out, saved_by(out) if torch.is_grad_enabled() else frozenset()


@dataclass(frozen=True)
class _Result:
    """A result of an op."""

    call: _Call
    index: int  # among the results
    meta: _Meta
    saves: bool  # whether the op saves tensors
    counters: tuple[Tensor, ...]  # of the versions of the operands

    def gradients(self, cotangent_requires_grad: bool) -> _Call:
        """The gradients of the tensors as a function of them and of the cotangent."""

        def gradients(*tensors: Tensor) -> list[Tensor | None]:
            operands = [x.clone() if self.call.in_place and i == 0 else x for i, x in enumerate(tensors[:-1])]
            out = pytree.tree_leaves(self.call.function(*operands))[self.index]
            wanted = [x for x in tensors[:-1] if x.requires_grad]
            found = iter(torch.autograd.grad(out, wanted, tensors[-1], create_graph=True, allow_unused=True))
            return [next(found) if x.requires_grad else None for x in tensors[:-1]]

        shape, _, dtype, _ = self.meta
        cotangent = (shape, None, dtype, cotangent_requires_grad)
        return replace(self.call, function=gradients, metas=(*self.call.metas, cotangent), in_place=False)


class _EmptyResult(TensorFunction):
    """Keeps a rank outside the mesh in the graph, so that backward can be called there too.

    If the op saves tensors, so does this: an activation checkpoint recomputes when the first is read, on all ranks.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, result: _Result, *sources: Tensor) -> Tensor:
        ctx.sources, ctx.result = sources, result
        if result.saves:
            ctx.save_for_backward(local)
        return torch.empty_like(local)  # not a view, which could not be changed in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.result.saves:
            assert ctx.saved_tensors
        zeros = [x.new_zeros(()) for x in ctx.sources]
        if torch.is_grad_enabled():
            zeros = _double_backward(ctx.result, ctx.sources, grads[0], zeros)
        return None, None, *zeros


def _source(x: Tensor) -> Tensor:
    """What connects a result with an operand: unlike the operand, nothing changes it later, and torch saves nothing."""
    return plain(x).sum() if x.requires_grad else x.new_zeros(())


def _double_backward(
    result: _Result, sources: Sequence[Tensor], cotangent: Tensor, zeros: Sequence[Tensor]
) -> list[Tensor]:
    """The gradients of an op, connected with the operands and the cotangent that they depend on."""
    call = result.gradients(cotangent.requires_grad)
    found = call.run()
    sources, counters = [*sources, _source(cotangent)], (*result.counters, counter_of(cotangent))

    def connected(index: int, zero: Tensor) -> Tensor:
        used, saved = sources, frozenset[int]()
        if found is not None:
            metas, gradients, saved = found
            if gradients[index] is None or not gradients[index].requires_grad:
                return zero
            used = _used(gradients[index], metas, sources)
        known = _Result(call, index, (*call.metas[index][:3], True), bool(saved), counters)
        out: Tensor = _EmptyResult.apply(zero, known, *used)
        _check(
            call.op,
            out,
            frozenset(),
            [Version(counters[i], counters[i]._version, call.metas[i][0]) for i in saved if i >= 0],
        )
        return out

    return [connected(i, zero) for i, zero in enumerate(zeros)]


def _used(out: Tensor, metas: Sequence[Tensor], sources: Sequence[Tensor]) -> list[Tensor]:
    """The sources, without history those on which `out` does not depend."""
    wanted = [x for x in metas if x.requires_grad]
    with without_modes():
        found = iter(torch.autograd.grad(out, wanted, torch.empty_like(out), retain_graph=True, allow_unused=True))
    used = [x.requires_grad and next(found) is not None for x in metas]
    return [source if is_used else source.detach() for source, is_used in zip(sources, used, strict=True)]


def _call(func: Op, args: Args, kwargs: Kwargs, in_place: bool = False) -> tuple[_Call, list[DTensor]]:
    """A call as a function of its DTensors, and these. One in place returns the first."""
    leaves, form = pytree.tree_flatten((args, with_meta_device(kwargs)))
    found = [(i, x) for i, x in enumerate(leaves) if type(x) is DTensor]
    autocast = Autocast.of(found[0][1]._layout.mesh.device_type)
    others = [x if type(x) is DTensor or autocast.dtype is not None else on_device(x, "meta") for x in leaves]
    if func is Tensor.to and len(others) > 1 and isinstance(others[1], str | int | torch.device):
        others[1] = "meta"

    def function(*tensors: Tensor) -> Any:
        for (i, _), x in zip(found, tensors, strict=True):
            others[i] = x
        args, kwargs = pytree.tree_unflatten(others, form)
        out = func(*args, **kwargs)
        return tensors[0] if in_place else out

    operands = [x for _, x in found]
    metas = tuple((x._layout.shape, x._layout.strides, x.dtype, x.requires_grad) for x in operands)
    return _Call(func, function, metas, autocast, in_place), operands


def empty_results(func: Op, layouts: Any, mesh: Mesh, args: Args, kwargs: Kwargs, copies: bool = False) -> Any:
    """The results of an op on a rank outside the mesh: DTensors without elements.

    Args:
        layouts: of the results, see `Recipe.output`; None is replicated.
        copies: the results are copies where torch gives views.
    """
    with DisableTorchFunctionSubclass():
        call, operands = _call(func, args, kwargs)
        found = call.run()
        if found is None:
            raise RuleError(
                f"{name_of(func)}: rank {collectives.rank()} is outside {mesh}; the result has a data-dependent shape. "
                f"Fix: call it on the ranks of the mesh only."
            )
        metas, results, saved = found
        versions = versions_of(saved, operands)
        leaves, form = pytree.tree_flatten(results)
        sources: list[Tensor] = []
        device = _device(func, args, kwargs) or operands[0].device
        together = len({x.grad_fn for x in tensors_in(results)}) == 1 and not isinstance(results, Tensor)

        def empty(index: int, x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            viewed = next(
                (y for y, meta in zip(operands, metas, strict=True) if storage_of(x) is storage_of(meta)), None
            )
            if viewed is not None and any(x is meta for meta in metas) and not copies:
                return viewed
            given = layouts if isinstance(layouts, Layout | None) else layouts[index]
            layout = given or Layout(mesh, [REPLICATE] * mesh.ndim, x.shape, strides=x.stride())
            shape = layout.local_shape(collectives.rank())
            if viewed is not None and x.dtype == viewed.dtype and not copies:
                return tag(_empty_view(viewed, shape, x, together), layout)
            local = torch.empty(shape, dtype=x.dtype, device=device)
            if x.requires_grad:
                sources.extend(map(_source, operands[len(sources) :]))
                meta = tuple(x.shape), x.stride(), x.dtype, True
                result = _Result(call, index, meta, bool(saved), tuple(map(counter_of, operands)))
                local = _EmptyResult.apply(local, result, *sources)
            return tag(local, layout)

        out = pytree.tree_unflatten([empty(i, x) for i, x in enumerate(leaves)], form)
        _check(func, out, saved, versions)
        return copies_of(operands[0], out) if copies else out


def _device(func: Op, args: Args, kwargs: Kwargs) -> torch.device | str | int | None:
    """The device that a call names; the meta device does not say where its results are."""
    given = args[1] if func is Tensor.to and len(args) > 1 else kwargs.get("device")
    named = given if isinstance(given, torch.device | str | int) else None
    return "cpu" if func is Tensor.cpu else named


def _empty_view(x: DTensor, shape: tuple[int, ...], view: Tensor, together: bool) -> Tensor:
    """A view of `x` without elements, to autograd as `view` is.

    It refuses to change one in place that an op makes together with others.
    """
    flat = plain(x).reshape(-1)[:0]
    out = (flat.split([0])[0] if together else flat).view(shape)
    return out.detach() if not view._is_view() or (out.requires_grad and not view.requires_grad) else out


def changed_empty(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """The first operand of an op that works in place, on a rank outside the mesh: it has no elements to change.

    Its version and its history change as on the other ranks.
    """
    x = args[0]
    with DisableTorchFunctionSubclass():
        if func in (Tensor.detach_, torch.detach_):
            return func(x)
        call, operands = _call(func, args, kwargs, in_place=True)
        found = call.run()
        saved = frozenset() if found is None else found[2]
        connected = any(y.requires_grad for y in operands) if found is None else found[0][0].requires_grad
        versions = versions_of(saved, operands)
        changed = torch.empty_like(plain(x))
        if torch.is_grad_enabled() and connected:
            result = _Result(call, 0, call.metas[0], bool(saved), tuple(map(counter_of, operands)))
            changed = _EmptyResult.apply(changed, result, *map(_source, operands))
        Tensor.copy_(x, changed)
        _check(func, x, saved, versions)
    return x if _returns_something(func) else None


def _returns_something(func: Op) -> bool:
    """Whether an op that works in place returns what it changed; custom ops may return nothing."""
    schema = getattr(func, "_schema", None)
    return schema is None or bool(schema.returns)


def _check(func: Op, out: Any, saved: frozenset[int], versions: Sequence[Any]) -> None:
    if torch.is_grad_enabled() and top_hooks(True) is None:  # torch checks no versions of what hooks keep
        check_versions(func, out, saved, versions)
