"""Door 2: a function that has no rule under its own name is taken apart by C++ into aten ops that have.

The function runs once on wrappers that carry the global shape. Autograd records what the rules do on the
locals, because the wrappers themselves never require grad.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.overrides import enable_reentrant_dispatch
from torch.utils import _pytree as pytree

from shardwise import collectives
from shardwise.errors import RuleError
from shardwise.layout import Layout, contiguous_strides
from shardwise.mesh import Mesh
from shardwise.placement import REPLICATE
from shardwise.rules import RULES
from shardwise.tensor.dtensor import DTensor, moved, passing, tag

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
    if func in RULES:
        return DTensor._enter(func, args, kwargs)
    if func.name() == "aten::is_same_size":
        return args[0]._layout.shape == args[1]._layout.shape
    if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
        what = "works in place" if func._schema.is_mutable else "is random"
        raise RuleError(
            f"{func} has no rule for distributed tensors and {what}, so it cannot run on gathered copies. "
            f"Fix: use an op that has a rule, or run it on to_local() or full_tensor()."
        )
    return _run_replicated(func, args, kwargs)


def _run_replicated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An op without a rule runs on whole copies: right for every layout, and noted as an implicit move."""
    mesh = next(x._layout.mesh for x in pytree.tree_leaves((args, kwargs)) if type(x) is DTensor)

    def gathered(x: Any) -> Any:
        if type(x) is not DTensor:
            return x
        target = x._layout.replicated()
        if x._layout != target:
            collectives.note_implicit(lambda: f"{func} has no rule: {x._layout} -> {target}")
        whole = moved(x, target)
        with DisableTorchFunctionSubclass():
            local = whole.as_subclass(torch.Tensor)
            return local if whole is x else passing(local)

    args, kwargs = pytree.tree_map(gathered, (args, kwargs))
    with DisableTorchFunctionSubclass():
        out = func(*args, **kwargs)
    return pytree.tree_map(
        lambda x: tag(x, Layout(mesh, [REPLICATE] * mesh.ndim, x.shape)) if isinstance(x, Tensor) else x, out
    )


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
