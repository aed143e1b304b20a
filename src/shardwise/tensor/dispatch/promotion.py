"""Plain tensors beside distributed ones."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise import collectives
from shardwise.errors import RuleError
from shardwise.layout import REPLICATE, Layout, Mesh, checked
from shardwise.rules.row import Args, Kwargs, Op
from shardwise.tensor.arguments import not_dense
from shardwise.tensor.conversion import wrap
from shardwise.tensor.dispatch.names import name_of
from shardwise.tensor.dtensor import DTensor, tag, to_layout
from shardwise.tensor.torch_dtensors import from_torch_dtensor
from shardwise.tensor.torch_objects import arrived, is_torch_dtensor
from shardwise.tensor.transforms import check_untransformed
from shardwise.trace.comm_trace import Cause

_strict: ContextVar[bool] = ContextVar("shardwise_strict", default=False)


@checked
@contextmanager
def strict(enabled: bool = True) -> Iterator[None]:
    """Inside, a plain tensor beside DTensors is an error, not a replicated operand; `strict(False)` allows it again."""
    token = _strict.set(enabled)
    try:
        yield
    finally:
        _strict.reset(token)


def all_promoted(func: Op, args: Args, kwargs: Kwargs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with plain tensors as replicated DTensors, which get the full gradient."""
    everything = [*args, *kwargs.values()]
    first = next(x for a in everything for x in (a if isinstance(a, list | tuple) else (a,)) if type(x) is DTensor)
    mesh = first._layout.mesh

    def promote(x: object) -> Any:
        if isinstance(x, list | tuple) and type(x) is not torch.Size:
            return type(x)(promote(y) for y in x)
        if not isinstance(x, Tensor) or type(x) is DTensor:
            return x
        if x.is_sparse and tuple(x.shape) == first._layout.local_shape(collectives.rank()):
            return tag(x.detach(), first._layout)  # made by an optimiser from the local rows
        return promoted(x, mesh, name_of(func))

    return tuple(promote(a) for a in args), {k: promote(a) for k, a in kwargs.items()}


def has_plain_tensors(args: Sequence[Any]) -> bool:
    """Whether there are plain tensors among arguments, or in lists and tuples among them."""
    return any(
        has_plain_tensors(a) if isinstance(a, list | tuple) else isinstance(a, Tensor) and type(a) is not DTensor
        for a in args
    )


WITHOUT_VALUES = frozenset(
    (Tensor.to, Tensor.type_as, torch.ops.aten.to.other, torch.ops.aten.type_as.default)
)  # ops that take only the dtype and the device of another tensor


def run_without_values(func: Op, args: Args, kwargs: Kwargs) -> object:
    """Run one of `WITHOUT_VALUES` on a plain tensor: the result is plain, and may be the tensor itself."""

    def empty_like(x: object) -> object:
        return torch.empty(0, dtype=x.dtype, device=x.device) if type(x) is DTensor else x

    return func(*map(empty_like, args), **{name: empty_like(x) for name, x in kwargs.items()})


def into_plain(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Run an op that writes to a plain tensor or a DTensor of torch, on every rank, with gathered DTensor operands.

    Raises:
        RuleError: this rank is outside the mesh of an operand.
    """

    into = next((x for x in (*args[:1], *kwargs.values()) if is_torch_dtensor(x)), None)

    def gathered(x: object) -> Any:
        if type(x) is not DTensor:
            return x
        if x._layout.mesh.coordinate(collectives.rank()) is None:
            raise RuleError(
                f"{name_of(func)} works in place on a plain tensor: rank {collectives.rank()} is outside "
                f"{x._layout.mesh} and holds no value of {x._name or 'the operand'}. Fix: redistribute it to a mesh of "
                f"all ranks first."
            )
        target = x._layout.replicated()
        why = "an op in place on a plain tensor needs full tensors"
        cause = Cause("operand", name_of(func), x._name or "the operand", why)
        full = to_layout(x, target, cause).to_local()
        if into is None:
            return full
        mesh, ndim = into.device_mesh, into.device_mesh.ndim
        return collectives.torch_dtensor(full, mesh, [REPLICATE] * ndim, [1] * ndim, full.shape, full.stride())

    args, kwargs = pytree.tree_map(gathered, (args, kwargs))
    return func(*args, **kwargs)


def is_strict() -> bool:
    """Whether implicit conversions are errors here."""
    return _strict.get()


def promoted(x: Tensor, mesh: Mesh, name: str) -> DTensor:
    """A plain tensor as a replicated DTensor."""
    if is_torch_dtensor(x):
        return from_torch_dtensor(x)
    x = arrived(x)
    if _strict.get() and x.ndim:
        raise RuleError(
            f"{name}: a plain tensor of shape {tuple(x.shape)} beside DTensors is refused in strict mode. "
            f"Fix: DTensor.from_local(x, mesh, [Replicate()]) if every rank has the same, or the placements it has."
        )
    if not_dense(x) is not None:
        raise RuleError(
            f"{name}: a {not_dense(x)} tensor beside DTensors is not supported. "
            f"Fix: to_dense() it, or work on local tensors inside shardwise.experimental.local_map."
        )
    check_untransformed(x, f"{name}: a plain tensor beside DTensors")
    collectives.expect_equal(x, tuple(sorted(mesh.ranks)), f"{name}: the plain tensor beside DTensors")
    return wrap(x, Layout(mesh, [REPLICATE] * mesh.ndim, x.shape, strides=x.stride()))
