"""Door 2: a function that has no rule under its own name is taken apart by C++ into aten ops that have.

The function runs once on wrappers that carry the global shape. Autograd records what the rules do on the
locals, because the wrappers themselves never require grad.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Self

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.overrides import enable_reentrant_dispatch
from torch.utils import _pytree as pytree

from shardwise.errors import RuleError
from shardwise.layout import REPLICATE, Layout, Mesh, contiguous_strides
from shardwise.redistribute.run import move
from shardwise.rules.row import rule_of
from shardwise.tensor.dispatch import meshes, seeds
from shardwise.tensor.dtensor import DTensor, moved, plain, tag
from shardwise.tensor.handlers.copies import before_change, copied, outdate
from shardwise.trace.comm_trace import Cause

Promote = Callable[[Tensor, Mesh, str], DTensor]


class Wrapper(torch.Tensor):
    """Lives for one call: the global shape for C++ to take ops apart with, and the DTensor it stands for."""

    stands_for: DTensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: DTensor) -> Self:
        self: Self = torch.Tensor._make_wrapper_subclass(
            cls,
            inner._layout.shape,
            strides=contiguous_strides(inner._layout.shape),
            dtype=inner.dtype,
            device=inner.device,
        )
        self.stands_for = inner
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = pytree.tree_map(_inner, (args, kwargs or {}))
        with enable_reentrant_dispatch():
            out = _run_aten(func, args, kwargs)
        if func._schema.is_mutable:
            return out
        return pytree.tree_map(lambda x: Wrapper(x) if type(x) is DTensor else x, out)


def _inner(x: Any) -> Any:
    return x.stands_for if isinstance(x, Wrapper) else x


def _run_aten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if rule_of(func) is not None:
        return DTensor._dispatch(func, args, kwargs)
    if func.name() == "aten::is_same_size":
        return args[0]._layout.shape == args[1]._layout.shape
    return run_on_whole(func, args, kwargs, "it has no rule")


def run_on_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], why: str) -> Any:
    """An aten op without a row runs on whole copies: right for every layout, and noted as an implicit move.

    What it changes in place is changed in the copy and brought back into the layout it has. Random numbers are
    the same on every rank, and depend on no layout.
    """
    changed = _changed_operands(func, args, kwargs)
    if meshes.are_several(args, kwargs):
        args, kwargs = meshes.on_one_mesh(func, args, kwargs, 0 if changed else None)
        if not all(any(x is y for y in pytree.tree_leaves((args, kwargs))) for x in changed):
            raise RuleError(f"{func} changes an operand that is on another mesh than its first. Fix: redistribute it.")
    first = next(x for x in pytree.tree_leaves((args, kwargs)) if type(x) is DTensor)
    mesh, device = first._layout.mesh, first.device
    generator = next((x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Generator)), None)
    seeded = torch.Tag.nondeterministic_seeded in func.tags
    outdated = [copy for x in changed for copy in before_change(str(func), x)]
    view = not changed and any(a.alias_info is not None for a in func._schema.arguments)
    moves = view and not first._layout.is_replicated
    if meshes.outside(mesh):
        if seeded:
            seeds.draw_seed(mesh, generator)
        outdate(outdated)
        return args[0] if changed else meshes.nothing(func, None, mesh, args, kwargs, view, moves)
    operands = {id(x): x for x in pytree.tree_leaves((args, kwargs)) if type(x) is DTensor}
    copies = {}  # one of an operand that is read as well as changed
    for key, x in operands.items():
        copies[key] = _whole(x, Cause("no rule", str(func), x._name or "an operand", why))
        if any(x is y for y in changed) and not x._layout.is_replicated:
            copies[key] = copies[key].clone()  # autograd may have kept what the move gave
    back = [(operands[key], copies[key]) for key in dict.fromkeys(map(id, changed))]
    args, kwargs = pytree.tree_map(lambda x: copies.get(id(x), x), (args, kwargs))
    numbers = seeds.seeded_alike(mesh, generator, device) if seeded else nullcontext()
    if generator is not None:
        args, kwargs = pytree.tree_map(lambda x: None if x is generator else x, (args, kwargs))
    with DisableTorchFunctionSubclass(), numbers:
        out = func(*args, **kwargs)
        for x, copy in back:
            _bring_back(func, x, copy)
    outdate(outdated)
    originals = {id(copy): x for x, copy in back}

    def labelled(x: Any) -> Any:
        if not isinstance(x, Tensor) or type(x) is DTensor:
            return x
        original = originals.get(id(x))
        return original if original is not None else tag(x, Layout(mesh, [REPLICATE] * mesh.ndim, x.shape))

    return pytree.tree_map(labelled, copied(out, first) if moves else out)


def _changed_operands(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[DTensor]:
    """The operands that the op's schema says it writes to."""
    if not func._schema.is_mutable:
        return []
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    leaves = pytree.tree_leaves([named.get(name) for name in written])
    return [x for x in leaves if type(x) is DTensor]


def _whole(x: DTensor, cause: Cause) -> Tensor:
    target = x._layout.replicated()
    copy = moved(x, target, cause._replace(wanted=target))
    with DisableTorchFunctionSubclass():
        return plain(copy)


def _bring_back(func: Any, x: DTensor, copy: Tensor) -> None:
    """Give `x` the value of the whole copy, in the layout it has."""
    if tuple(copy.shape) != x._layout.shape:
        raise RuleError(
            f"{func} would change the shape of a distributed tensor from {x._layout.shape} to {tuple(copy.shape)} "
            f"in place. Fix: use the op that returns a new tensor."
        )
    if not x._layout.is_replicated:
        cause = Cause("no rule", str(func), x._name or "the result", "what was changed in a whole copy goes back")
        plain(x).copy_(move(copy, x._layout.replicated(), x._layout, cause))


def through_the_dispatcher(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], promote: Promote) -> Any:
    """Run `func` on wrappers and unwrap what comes back; `promote` makes DTensors of plain tensors on a mesh."""
    entered: dict[int, tuple[DTensor, Wrapper]] = {}
    mesh = next((x._layout.mesh for x in pytree.tree_leaves((args, kwargs)) if type(x) is DTensor), None)

    def enter(x: Any) -> Any:
        if mesh is not None and isinstance(x, Tensor) and type(x) is not DTensor and not x.is_sparse:
            x = promote(x, mesh, str(getattr(func, "__name__", func)))
        if type(x) is DTensor:
            if id(x) not in entered:
                entered[id(x)] = (x, Wrapper(x))
            return entered[id(x)][1]
        return x

    args, kwargs = pytree.tree_map(enter, (args, kwargs))
    out = func(*args, **kwargs)
    assert mesh is not None or not entered
    back = {id(wrapper): inner for inner, wrapper in entered.values()}
    return pytree.tree_map(lambda x: back.get(id(x), x.stands_for) if isinstance(x, Wrapper) else x, out)
