"""Ops without a row: torch decomposes a function into aten ops, and an aten op without a row runs replicated.

A decomposed function runs once on wrappers with the global shape. Its aten ops call `Wrapper.__torch_dispatch__`, and
run by their rules on the local tensors. Autograd records only these, because wrappers never require grad.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Self

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.overrides import enable_reentrant_dispatch
from torch.utils import _pytree as pytree

from shardwise._layout import REPLICATE, Layout, Owner, Partial
from shardwise._redistribute.packing import identity
from shardwise._redistribute.run_plan import redistribute_local
from shardwise._rules import RULES, seeds
from shardwise._rules.pointwise import register_if_tagged
from shardwise._rules.registry import OpRule, handler, rule_of
from shardwise._rules.row import Args, Handler, Kwargs, Op
from shardwise._tensor.dispatch.local_calls import LocalCall
from shardwise._tensor.dispatch.operands import arguments_by_write, checked_sizes, into_plain, promoted, written_by
from shardwise._tensor.dispatch.resolve import Output, Recipe
from shardwise._tensor.dispatch.view_copies import before_change, invalidate, track
from shardwise._tensor.dispatch.without_memory import hidden_from_modes, on_meta
from shardwise._tensor.dtensor import DTensor, dtensors_in, plain, tag
from shardwise._trace.comm_trace import Cause
from shardwise.errors import RuleError

# ---- decomposed -------------------------------------------------------------------------------------------------


def _mapped(function: Callable[[Any], Any], values: Any) -> Any:
    """`values` with `function` applied to each: pytree would take most of a call."""
    kind = type(values)
    if kind is tuple or kind is list:
        return kind([_mapped(function, x) for x in values])
    if kind is dict:
        return {key: _mapped(function, x) for key, x in values.items()}
    is_node = kind in pytree.SUPPORTED_NODES or isinstance(values, tuple)
    return pytree.tree_map(function, values) if is_node else function(values)


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
        args, kwargs = _mapped(lambda x: x.dtensor if isinstance(x, Wrapper) else x, (args, kwargs or {}))
        if func._schema.is_mutable:
            _refuse_to_fill(func, args, kwargs)
        run: Handler = DTensor._dispatch_unseen
        if rule_of(func) is not None or register_if_tagged(func):
            run = DTensor._dispatch
        elif (written := written_by(func, args, kwargs)) and not dtensors_in(written):  # tensors of the function's own
            run = into_plain
        with enable_reentrant_dispatch():
            out = run(func, args, kwargs)
        if func._schema.is_mutable:
            return out
        return _mapped(lambda x: Wrapper(x) if type(x) is DTensor else x, out)


def _refuse_to_fill(func: OpOverload, args: Args, kwargs: Kwargs) -> None:
    """Raise if a plain tensor inside a decomposed function would get gradients.

    Autograd would record the op twice: here, with the local tensors, and for the caller, which sees wrappers that do
    not require grad.
    """
    if not torch.is_grad_enabled() or all(type(x) is DTensor for x in written_by(func, args, kwargs)):
        return
    if any(isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves((args, kwargs))):
        raise RuleError(
            f"{func}: a function that torch decomposes writes a DTensor into a plain tensor of its own; the gradient "
            f"would be lost. Fix: run it on detached or full tensors, or make the result with torch.stack or torch.cat."
        )


def rule_of_others(func: Op) -> OpRule:
    """The rule of a function without an entry.

    An aten op that torch does not decompose runs replicated, unless it has rows as an elementwise op. Torch decomposes
    any other function, and aten ops without their own kernels.
    """
    if not isinstance(func, OpOverload) or not torch._C._dispatch_has_kernel(func.name()):  # or only in TorchScript
        return DECOMPOSED
    if func.has_kernel_for_dispatch_key(_COMPOSITE) and not any(map(func.has_kernel_for_dispatch_key, _KERNELS)):
        return DECOMPOSED
    if register_if_tagged(func):
        return RULES[func]
    return PRIM if getattr(func, "impl_aten", None) is not None else REPLICATED


def _run_prim(func: Any, args: Args, kwargs: Kwargs) -> object:
    """Run a prim: aten ops after checks of its arguments, which the meta device makes too."""
    with torch.no_grad():
        metas, named, _ = on_meta(args, kwargs, "meta")
        func(*metas, **named)
    return func.impl_aten(*args, **kwargs)


@handler(torch.is_same_size, Tensor.is_same_size, torch.ops.aten.is_same_size.default)
def _is_same_size(func: Op, args: Args, kwargs: Kwargs) -> bool:
    x, y = (*args, *kwargs.values())
    return bool(x.shape == y.shape)


def handler_without_row(rule: OpRule) -> Handler:
    """The function for a call without a row: its decomposition, its handler, or torch's decomposition."""
    decomposition = rule.decomposition
    if decomposition is not None:
        return lambda func, args, kwargs: decomposition(*args, **kwargs)
    return rule.handler_without_row or run_decomposed


def run_decomposed(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run `func` on wrappers, which torch decomposes, and unwrap the results."""
    wrapped: dict[int, tuple[DTensor, Wrapper]] = {}
    operands = dtensors_in((*args, *kwargs.values())) or pytree.tree_leaves((args, kwargs))  # such as in dicts
    mesh = next((x._layout.mesh for x in operands if type(x) is DTensor), None)

    def wrap(x: object) -> Any:
        if mesh is not None and isinstance(x, Tensor) and type(x) is not DTensor and not x.is_sparse:
            x = promoted(x, mesh, str(getattr(func, "__name__", func)))
        if type(x) is DTensor:
            if id(x) not in wrapped:
                wrapped[id(x)] = (x, Wrapper(x))
            return wrapped[id(x)][1]
        return x

    given, (args, kwargs) = (args, kwargs), _mapped(wrap, (args, kwargs))
    with hidden_from_modes(Wrapper), checked_sizes(func, *given):
        out = func(*args, **kwargs)
    assert mesh is not None or not wrapped
    given_as = {id(wrapper): dtensor for dtensor, wrapper in wrapped.values()}

    def unwrapped(x: object) -> object:
        if not isinstance(x, Wrapper):
            return x
        if x.requires_grad and id(x) not in given_as:  # by `requires_grad=True`, which no aten op takes
            x.dtensor.requires_grad_()
        return given_as.get(id(x), x.dtensor)

    return track(_mapped(unwrapped, out))


DECOMPOSED = OpRule(handler=run_decomposed, is_op=True)
PRIM = OpRule(handler=_run_prim, is_op=True)
REPLICATED = OpRule(is_op=True, shape_independent=True)  # a key of its calls has no floats, which change no recipe
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_KERNELS = [getattr(torch._C.DispatchKey, key) for key in ("CPU", "CUDA", "CompositeExplicitAutograd")]

# ---- replicated -------------------------------------------------------------------------------------------------


def replicated_recipe(func: OpOverload, args: Args, kwargs: Kwargs, why: str) -> Recipe:
    """The recipe of an aten op on gathered operands: right for every layout, an implicit redistribution."""
    values = arguments_by_write(func, args, kwargs)
    is_written = [written for written, value in values for _ in dtensors_in((value,))]
    layouts = [x._layout.unowned for _, value in values for x in dtensors_in((value,))]
    full = tuple([x if x.is_replicated else x.replicated() for x in layouts])
    redistributed = tuple([(i, x) for i, x in enumerate(full) if x is not layouts[i]])
    view = not any(is_written) and any(a.alias_info is not None for a in func._schema.arguments)
    cause = Cause("no rule", str(func), "", why)
    return Recipe(
        func, True, redistributed, full, None, (), Output.OF_DATA, (), cause, view,
        copied=view and not layouts[0].is_replicated,
        written=tuple([i for i, written in enumerate(is_written) if written]),
    )  # fmt: skip


class ReplicatedCall(LocalCall):
    """A call of an aten op without a row, on full tensors.

    An operand that the op writes to keeps its layout: the full tensor is written, and resharded into it. Random numbers
    are equal on every rank, for any layout.
    """

    def __init__(self, func: Any, recipe: Recipe, owner: Owner) -> None:
        super().__init__(REPLICATED, func, recipe, owner)
        self._written = recipe.written or ()
        self._is_random = torch.Tag.nondeterministic_seeded in func.tags
        self.watches_versions = bool(self._targets)
        self._watched = frozenset(self._targets)  # torch checks what it saves of the others, and of the results

    def __call__(self, *args: object, **kwargs: object) -> Any:
        operands = dtensors_in((*args, *kwargs.values()))
        written = {id(operands[i]): operands[i] for i in self._written}.values()
        copies = [copy for x in written for copy in before_change(str(self.func), x)]
        if self.is_outside and self._is_random:
            seeds.draw_seed(operands[0]._layout.mesh, _generator_in(args, kwargs))
        out = super().__call__(*args, **kwargs)
        invalidate(copies)
        return out

    def _run(self, args: Args, kwargs: Kwargs, hooked: bool) -> Any:
        operands = dtensors_in((*args, *kwargs.values()))
        mesh = operands[0]._layout.mesh
        full: dict[int, Tensor] = {}  # by the id of an operand
        for index, x in enumerate(operands):
            if id(x) not in full:
                full[id(x)] = self._move(x, index) if index in self._targets else plain(x)
        written = {id(operands[i]): operands[i] for i in self._written}
        for i, x in written.items():
            if not x._layout.is_replicated:
                full[i] = full[i].clone()  # autograd may have saved the gathered tensor
        before = {i: full[i]._version for i in written}
        extremes = {i: full[i].detach().clone() for i, x in written.items() if _is_extreme(x._layout)}
        generator = _generator_in(args, kwargs)

        def operand(x: Any) -> Any:
            return full[id(x)] if type(x) is DTensor else None if x is generator else x

        args, kwargs = _mapped(operand, (args, kwargs))
        with seeds.same_on_all_ranks(mesh, generator, operands[0].device) if self._is_random else nullcontext():
            out = self.func(*args, **kwargs)
            for i, x in written.items():
                # Batch norm changes running statistics under the same version.
                with _unsafe_preserve_version_counter(() if full[i]._version > before[i] else (plain(x),)):
                    _reshard_written(self.func, x, full[i], extremes.get(i))
        originals = {id(full[i]): x for i, x in written.items()}

        def as_dtensor(x: object) -> object:
            if not isinstance(x, Tensor):
                return x
            if id(x) in originals:
                return originals[id(x)]
            return tag(x, Layout(mesh, [REPLICATE] * mesh.ndim, x.shape, strides=x.stride()))

        return _mapped(as_dtensor, out)


def _generator_in(args: Args, kwargs: Kwargs) -> torch.Generator | None:
    return next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Generator)), None)


def _reshard_written(func: Op, x: DTensor, full: Tensor, before: Tensor | None) -> None:
    """Give `x` the value of the full tensor that was written, in the layout of `x`.

    Args:
        before: the full tensor before the write, for a Partial maximum or minimum.
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
