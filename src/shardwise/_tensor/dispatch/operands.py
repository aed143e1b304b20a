"""Operands of one op that are not DTensors, or DTensors on several meshes.

x * torch.ones(3)    # a plain tensor is a full one: it counts as replicated
x * y                # y is on another mesh: redistributed to the mesh of x
"""

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import combinations
from typing import Any, cast

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.utils import _pytree as pytree

from shardwise import _collectives as collectives
from shardwise._layout import REPLICATE, Layout, Mesh, Placement, checked
from shardwise._redistribute.plan import plan_redistribute
from shardwise._rules.registry import rule_of
from shardwise._rules.row import Args, Handler, Kwargs, Op
from shardwise._tensor.arguments import not_dense
from shardwise._tensor.conversion import to_local, wrap
from shardwise._tensor.dispatch.without_memory import on_meta, unobserved
from shardwise._tensor.dtensor import DTensor, dtensors_in, name_of, plain, tag, to_layout
from shardwise._tensor.torch_objects import arrived, is_torch_dtensor
from shardwise._tensor.transforms import check_untransformed
from shardwise._trace.comm_trace import Cause
from shardwise.errors import MeshError, RuleError, ShapeError, ShardwiseError

# ---- plain tensors ----------------------------------------------------------------------------------------------

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


def is_strict() -> bool:
    """Whether implicit conversions are errors here."""
    return _strict.get()


def all_promoted(func: Op, args: Args, kwargs: Kwargs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with plain tensors as replicated DTensors, which get the full gradient."""
    first = dtensors_in((*args, *kwargs.values()))[0]
    return tuple(_promoted(a, first, func) for a in args), {k: _promoted(a, first, func) for k, a in kwargs.items()}


# No function inside the other: one that calls itself keeps the operands until the garbage collector runs.
def _promoted(x: object, first: DTensor, func: Op) -> Any:
    if isinstance(x, list | tuple) and type(x) is not torch.Size:
        return type(x)(_promoted(y, first, func) for y in x)
    if not isinstance(x, Tensor) or type(x) is DTensor:
        return x
    if x.is_sparse and isinstance(func, torch._ops.OpOverload) and rule_of(func) is None:
        return x  # such as the matrix of `torch.sparse.mm`
    if x.is_sparse and tuple(x.shape) == first._layout.local_shape(collectives.rank()):
        return tag(x.detach(), first._layout)  # made by an optimizer from the local rows
    return promoted(x, first._layout.mesh, name_of(func))


def promoted(x: Tensor, mesh: Mesh, name: str) -> DTensor:
    """A plain tensor as a replicated DTensor."""
    if is_torch_dtensor(x):
        return DTensor.from_torch_dtensor(x)
    x = arrived(x)
    if type(x).__name__ == "CausalBias":  # torch.nn.attention.bias: its memory is not the mask
        x = cast(Any, x)._materialize(mesh.device_type)
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


def has_plain_tensors(args: Sequence[Any]) -> bool:
    """Whether there are plain tensors among arguments, or in lists and tuples among them."""
    return any(
        has_plain_tensors(a) if isinstance(a, list | tuple) else isinstance(a, Tensor) and type(a) is not DTensor
        for a in args
    )


def arguments_by_write(func: Any, args: Args, kwargs: Kwargs) -> list[tuple[bool, object]]:
    """The arguments of an aten op in order, and whether it writes to them, by its schema."""
    arguments = func._schema.arguments
    written = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    named = *zip((a.name for a in arguments), args, strict=False), *kwargs.items()
    return [(name in written, value) for name, value in named]


def written_by(func: Any, args: Args, kwargs: Kwargs) -> list[Tensor]:
    """The operands that an aten op writes to; none for another function."""
    if not isinstance(func, torch._ops.OpOverload) or not func._schema.is_mutable:
        return []
    values = [value for written, value in arguments_by_write(func, args, kwargs) if written]
    return [x for x in pytree.tree_leaves(values) if isinstance(x, Tensor)]


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


_OF_SIZES = re.compile("size|shape|reduction dim", re.IGNORECASE)  # in torch's errors


@contextmanager
def checked_sizes(func: Op, args: Args, kwargs: Kwargs) -> Iterator[None]:
    """Run a call with plain tensors inside.

    Raises:
        ShapeError: instead of torch's error for global sizes that do not fit.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        ours = isinstance(error, ShardwiseError) and not isinstance(error, RuleError)
        if ours or not _OF_SIZES.search(str(error)) or _fits(func, args, kwargs):
            raise
        leaves = pytree.tree_leaves((args, kwargs))
        distributed = [x._layout.shape for x in leaves if type(x) is DTensor]
        plain = [tuple(x.shape) for x in leaves if isinstance(x, Tensor) and type(x) is not DTensor and x.ndim]
        raise ShapeError(
            f"{name_of(func)}: a plain tensor beside DTensors must have the global shape. Here are DTensors of global "
            f"shapes {_listed(distributed)} and plain tensors of shapes {_listed(plain)}: {error} Fix: if each rank "
            f"has its own part, DTensor.from_local(x, mesh, placements); else pass the full tensor, the same on every "
            f"rank."
        ) from error


def run_with_checked_sizes(
    handler: Handler, given: Args, named: Kwargs, func: Op, args: Args, kwargs: Kwargs
) -> object:
    """Run a call whose arguments were `given` and `named` by a handler."""
    with checked_sizes(func, given, named):
        return handler(func, args, kwargs)


def _fits(func: Op, args: Args, kwargs: Kwargs) -> bool:
    """Whether `func` takes operands of these global sizes."""
    with DisableTorchFunctionSubclass(), unobserved(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            args, kwargs, _ = on_meta(args, kwargs, "meta")
            with torch.no_grad():
                func(*args, **kwargs)
        except Exception:  # noqa: BLE001 - whatever torch raises for operands that it refuses
            return False
    return True


def _listed(shapes: list[tuple[int, ...]]) -> str:
    return ", ".join(map(str, dict.fromkeys(shapes)))


# ---- several meshes ---------------------------------------------------------------------------------------------


def is_outside(mesh: Mesh) -> bool:
    """Whether this rank is not one of the mesh's."""
    return mesh.size() < collectives.world_size() and mesh.coordinate(collectives.rank()) is None


def on_one_mesh(
    func: Op, args: Args, kwargs: Kwargs, kept_operand: int | None, written: Sequence[Tensor] = ()
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with every DTensor redistributed to the mesh of operand `kept_operand`; None: the largest mesh.

    If the op writes to operands, the mesh is the first one's.

    All ranks of all the meshes must call. An operand becomes replicated, keeps its placements, or gets those of the
    kept operand, whichever costs least. If each rank has a tensor on its own slice of that mesh, such as mesh["dp"],
    the tensor counts as replicated along the other axes, as a plain tensor does: only ranks of a slice communicate. A
    tensor on a slice along other axes, such as mesh["tp"], is first gathered on its slice.

    Raises:
        RuleError: in strict mode; or an operand that the op writes to is on another mesh.
    """
    operands = dtensors_in((*args, *kwargs.values()))
    own_slice = cache(_own_slice)
    kept_operand = 0 if written else kept_operand
    lead = max(operands, key=lambda x: x.numel() * x.element_size()) if kept_operand is None else operands[kept_operand]
    others = next(x._layout.mesh for x in operands if x._layout.mesh != lead._layout.mesh)
    if is_strict():
        raise RuleError(
            f"{name_of(func)}: operands live on different meshes, {lead._layout.mesh} and {others}, which strict mode "
            f"refuses. Fix: redistribute one of them to the other's device_mesh."
        )

    if kept_operand is None:
        for x in operands:
            lead = x if own_slice(lead._layout.mesh, x._layout.mesh) else lead

    def on_mesh(x: object) -> Any:
        if type(x) is not DTensor or x._layout.mesh == lead._layout.mesh:
            return x
        if any(x is y for y in written):
            raise RuleError(f"{func} changes an operand that is on another mesh than its first. Fix: redistribute it.")
        if axes := own_slice(x._layout.mesh, lead._layout.mesh):
            return _beside_other_slices(x, lead._layout.mesh, axes, name_of(func))
        why = "operands of one op must be on one mesh"
        cause = Cause("operand", name_of(func), x._name or "an operand", why)
        x = across(x, lead._layout.mesh, cause)
        return to_layout(x, _cheapest(x._layout, lead._layout), cause)

    args, kwargs = pytree.tree_map(on_mesh, (args, kwargs))
    return tuple(args), dict(kwargs)


def _own_slice(mesh: Mesh, of: Mesh) -> tuple[int, ...] | None:
    """The axes of `of` along which `mesh` is a slice of it, if each rank passes its own slice.

    All ranks of `of` call. A tensor on one slice only has one mesh on all of them, also outside.
    """
    if not mesh.size() < of.size() or of.coordinate(mesh.ranks[0]) is None:
        return None
    for axes in combinations(range(of.ndim), mesh.ndim):
        own = of.submesh(axes, mesh.ranks[0])
        if (own.shape, own.ranks) == (mesh.shape, mesh.ranks):
            return axes if _each_is_inside(mesh, of.sorted_ranks) else None
    return None


class _Slices(set[tuple[object, ...]]):
    """Forms of meshes for which every rank has passed a mesh that contains it."""


def _each_is_inside(mesh: Mesh, ranks: tuple[int, ...]) -> bool:
    """Whether each of `ranks`, which all call, passes a mesh of the form of `mesh` that contains it.

    If so, they compare no more: a later call with such a mesh on some of them only is an error.

    Raises:
        MeshError: such a call.
    """
    slices = collectives.owner().state(_Slices)
    form = ranks, mesh.shape, tuple([rank - mesh.ranks[0] for rank in mesh.ranks])
    if form not in slices:
        if not all(collectives.gather_json(not is_outside(mesh), ranks)):
            return False
        slices.add(form)
    elif is_outside(mesh):
        raise MeshError(
            f"Earlier each rank passed a tensor on a mesh of its own, and now rank {collectives.rank()} is outside "
            f"{mesh}, where the tensor is. Fix: redistribute a tensor that only some ranks hold to a mesh of all."
        )
    return True


def across(x: DTensor, mesh: Mesh, cause: Cause) -> DTensor:
    """`x`; if it and `mesh` are on slices of a larger mesh along different axes, gathered, and replicated on `mesh`.

    Each rank is then in both, and no rank may wait for one outside its slices.
    """
    own, other = {*x._layout.mesh.ranks}, {*mesh.ranks}
    if own.isdisjoint(other) or own <= other or other <= own or is_outside(mesh):
        return x
    if not _each_is_inside(x._layout.mesh, mesh.sorted_ranks):
        return x
    full = to_local(to_layout(x, x._layout.replicated(), cause), None)
    collectives.expect_equal(full, mesh.sorted_ranks, f"{cause.op or 'redistribute'}: the tensor on another slice")
    return wrap(full, Layout(mesh, [REPLICATE] * mesh.ndim, full.shape, strides=full.stride()))


def _beside_other_slices(x: DTensor, mesh: Mesh, axes: Sequence[int], name: str) -> DTensor:
    """The ranks' tensors on their slices of `mesh` along `axes`, as a tensor on `mesh`, replicated along other axes."""
    layout, others = x._layout, [axis for axis in range(mesh.ndim) if axis not in axes]
    along_others = mesh.submesh(others, collectives.rank()).sorted_ranks
    collectives.expect_equal(
        plain(x), along_others, f"{name}: the tensor on {_names_of(mesh, axes)} beside one on {mesh}"
    )

    def on_all(placements: Sequence[Placement]) -> list[Placement]:
        found = dict(zip(axes, placements, strict=True))
        return [found.get(axis, REPLICATE) for axis in range(mesh.ndim)]

    order = [axes[axis] for axis in layout.shard_order]
    target = Layout(mesh, on_all(layout.placements), layout.shape, [*order, *others], strides=layout.strides)
    gradient = layout.dual().placements
    return wrap(to_local(x, gradient), target, on_all(gradient))


def _names_of(mesh: Mesh, axes: Sequence[int]) -> str:
    return "its axes " + ", ".join(repr(mesh.names[axis]) if mesh.names else str(axis) for axis in axes)


def _cheapest(src: Layout, lead: Layout) -> Layout:
    mesh = lead.mesh
    candidates = [Layout(mesh, [REPLICATE] * mesh.ndim, src.shape)]
    if src.shape == lead.shape:
        candidates.append(lead.reduced())
    if src.mesh.shape == mesh.shape:
        candidates.append(Layout(mesh, src.placements, src.shape, src.shard_order).reduced())
    return min(candidates, key=lambda dst: plan_redistribute(src, dst).cost)
