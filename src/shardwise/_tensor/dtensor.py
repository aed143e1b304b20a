"""The distributed tensor.

A `DTensor` is a `torch.Tensor` subclass whose storage is the local shard: there is no wrapped inner tensor. In Python,
`shape`, `size()` and `numel()` are global, read from its layout; the C++ shape and the autograd history are local.
Every torch function called with a DTensor arrives at `__torch_function__`; see docs/dispatch.md.
"""

from collections.abc import Callable, Iterable, Sequence
from html import escape
from operator import index
from threading import current_thread
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np
import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch._ops import OpOverload

from shardwise import _collectives as collectives
from shardwise._collectives import DeviceMesh
from shardwise._layout import Box, Layout, Mesh, Placement, Placements, checked, placements_text
from shardwise._layout.owner import before_first, complete
from shardwise._redistribute.run_plan import redistribution, with_placements
from shardwise._rules.row import Args, Handler, Kwargs, Op
from shardwise._tensor.transforms import check_no_transform
from shardwise._trace.comm_trace import EXPLICIT, ITEM, Cause
from shardwise._trace.user_stack import is_called_by
from shardwise.errors import MeshError, RuleError, printable

_local_shape: Any = torch._C.TensorBase.shape
_local_dim: Callable[..., int] = torch._C.TensorBase.dim
_local_stride: Callable[..., Any] = torch._C.TensorBase.stride
_is_excluded: Callable[..., bool] = torch._C._dispatch_tls_is_dispatch_key_excluded
_as_subclass: Any = torch._C.TensorBase.as_subclass
_detach: Any = torch._C.TensorBase.detach
_AUTOGRAD, _PYTHON = torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.Python


def _is_below_autograd() -> bool:
    """Whether a `TorchDispatchMode` sees an op of backward, which autograd runs on local tensors."""
    # `torch.tensor([x])` reads values with both keys excluded.
    return _is_excluded(_AUTOGRAD) and not (_is_excluded(_PYTHON) or torch.is_inference_mode_enabled())


# ---- attributes that raise or wait ------------------------------------------------------------------------------


class NotOffered:
    """An attribute of `torch.Tensor` that `DTensor` does not have."""

    def __init__(self, why: str) -> None:
        self.why = why

    def __get__(self, x: object, owner: type | None = None) -> NoReturn:
        raise AttributeError(self.why)


class PendingLayout:
    """The layout of a `DTensor` whose redistribution is running; a read waits. Other instances have their own."""

    def __get__(self, x: object, owner: type | None = None) -> object:
        own: dict[str, Any] = {} if x is None else vars(x)
        if (settle := own.get("_settle")) is not None:
            return settle(x)
        if "_layout" in own:  # another thread has waited meanwhile
            return own["_layout"]
        raise AttributeError("_layout")


# ---- the class --------------------------------------------------------------------------------------------------


class Tiling(Protocol):
    """The shards of one local tensor; see `shardwise.sharded_tensor.LocalShardsWrapper`."""

    @property
    def boxes(self) -> tuple[Box, ...]: ...
    @property
    def bounds(self) -> Box: ...
    def shards(self, local: Tensor, /) -> list[Tensor]: ...
    def wrap(self, local: Tensor, /) -> Tensor: ...


class DTensor(torch.Tensor):
    """A tensor on the ranks of a mesh. Make one with `distribute_tensor` or `DTensor.from_local`."""

    _layout: Layout = PendingLayout()  # type: ignore[assignment]
    _reduced_grad: "DTensor | None" = None  # the all-reduced part of a leaf's gradient
    _pending_gradients: Any = None  # for a leaf: gradients in its bucketed all-reduce
    _bucket_plan: Any = None  # for a leaf: the plan of its last bucketed all-reduce
    _leaf_number: int = 0  # for a leaf with bucketed gradients: creation order on the ranks of its mesh; 0: none
    _name: str | None = None  # a parameter's name in errors
    _spec: Any = None  # the sharding spec that it was made by
    _tiling: Tiling | None = None  # of a local tensor that is made of several shards

    # Set by _tensor/__init__.py, to avoid an import cycle.
    _dispatch: Handler
    _dispatch_unseen: Handler  # by hooks of tools
    _from_local: Callable[..., "DTensor"]
    _to_local: Callable[["DTensor", Placements | None], Tensor]
    _backward: Callable[..., None]
    _read_grad: Callable[["DTensor"], "DTensor | None"]
    _write_grad: Callable[["DTensor", Tensor | None], None]
    _set: Callable[..., "DTensor"]
    _across: Callable[["DTensor", Mesh, Cause], "DTensor"]
    _redistributed: Callable[["DTensor", Layout, torch.dtype, bool], "DTensor"]

    # Registered by `shardwise.sharded_tensor` and `shardwise._torch_bridge`, which `shardwise/__init__.py` imports.
    local_shards: Any
    local_tensor: Any
    metadata: Any
    sharding_spec: Any
    reshard: Any
    from_torch_dtensor: Callable[[Any], "DTensor"]
    to_torch_dtensor: Callable[..., Tensor]

    @classmethod
    def __torch_function__(cls, func: Op, types: object, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        if type(func) is OpOverload and _is_below_autograd():
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return cls._dispatch(func, args, kwargs or {})

    if TYPE_CHECKING:  # torch declares that these return a Tensor

        def requires_grad_(self, requires_grad: bool = True) -> "DTensor": ...
        def clone(self, *, memory_format: torch.memory_format | None = None) -> "DTensor": ...

    # ---- made from and returned to local tensors ---------------------------------------------------------

    @staticmethod
    @checked
    def from_local(
        local_tensor: Tensor,
        device_mesh: Mesh | DeviceMesh | None = None,
        placements: Placements | None = None,
        *,
        run_check: bool = True,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Placements | None = None,
    ) -> "DTensor":
        """The distributed tensor of the ranks' local tensors.

        Args:
            local_tensor: its storage is shared, not copied. On ranks outside the mesh, any tensor of that dtype. A
                `LocalShardsWrapper` is compared with the boxes of this rank.
            device_mesh: a `Mesh` or torch's `DeviceMesh`; None is one axis of all ranks.
            placements: one per mesh axis, in a sequence or by axis name; None replicates. A `Shard` without sizes gets
                those of the local tensors, not those of torch.chunk.
            run_check: compare shapes, dtypes and placements over the ranks (one small exchange) and find the
                sizes of uneven shards. False skips it and needs `shape` unless all shards have equal sizes.
            shape: the global shape, if known; checked against the local tensors.
            stride: the global strides, in elements, of a tensor without gaps; needs `shape`. None: dims have the order
                of the local tensors in memory.
            grad_placements: placements of the gradient of `local_tensor`; None is those of the tensor, with Partial
                read as Replicate.

        Raises:
            MismatchError: local tensors that do not fit together; the same error on every rank.
            LayoutError: local tensors that do not fit `placements` or `shape`.
        """
        return DTensor._from_local(local_tensor, device_mesh, placements, run_check, shape, stride, grad_placements)

    def to_local(self, *, grad_placements: Placements | None = None) -> Tensor:
        """The local tensor as a plain one that shares its storage; a `LocalShardsWrapper` if it was made from one.

        Args:
            grad_placements: placements of the gradient of the result. None is right if every rank computes the same
                loss from it: Shard stays Shard, and Replicate and Partial get a Replicate gradient.
        """
        local = DTensor._to_local(self, grad_placements)
        return local if self._tiling is None else self._tiling.wrap(local)

    def full_tensor(self, *, grad_placements: Placements | None = None) -> Tensor:
        """The full tensor, on every rank of the mesh."""
        cause = Cause("explicit", "full_tensor", self._name or "")
        return DTensor._to_local(to_layout(self, self._layout.replicated(), cause), grad_placements)

    @checked
    def redistribute(
        self,
        device_mesh: Mesh | DeviceMesh | None = None,
        placements: Placements | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
        shard_order: Sequence[int] | None = None,
    ) -> "DTensor":
        """The global tensor in another layout, on this mesh or another one.

        Args:
            device_mesh: the new mesh; None keeps the mesh. All ranks of both meshes must call.
            placements: one per axis of the new mesh, in a sequence or by axis name; axes that a mapping omits are
                replicated. None keeps the placements.
            async_op: return before the communication is done; the first use of the result waits for it.
            forward_dtype: convert to it before communication; the dtype of the result.
            backward_dtype: convert the gradient to it before communication, and then to the dtype of this tensor.
            shard_order: which axis shards first if several shard one dim.

        Sends: every element at most once to every rank that lacks it.
        Gradient: redistributed back, to the dual layout.
        """
        layout, wanted = self._layout, self._layout.placements if placements is None else placements
        mesh = layout.mesh if device_mesh is None else collectives.as_mesh(device_mesh)
        same_mesh = device_mesh is None or mesh == layout.mesh
        if shard_order is None and same_mesh:
            target = with_placements(layout, wanted)
        else:
            target = Layout(mesh, wanted, layout.shape, shard_order)
        x: DTensor = self if forward_dtype is None else self.to(forward_dtype)  # type: ignore[assignment]
        x = x if same_mesh else self._across(x, mesh, EXPLICIT)
        if backward_dtype is None and not async_op:
            return to_layout(x, target)
        return self._redistributed(x, target, self.dtype if backward_dtype is None else backward_dtype, async_op)

    # ---- what it is -----------------------------------------------------------------------------------------

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement for each axis of the mesh."""
        return self._layout.placements

    @property
    def device_mesh(self) -> Mesh | DeviceMesh:
        """The mesh it was made with: torch's DeviceMesh or a plain `Mesh`."""
        return collectives.device_mesh(self._layout.mesh)

    @property
    def layout_(self) -> Layout:
        """Mesh, placements and global shape; `layout` is torch's, such as `torch.strided`."""
        return self._layout

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The global shape."""
        if not torch._C._is_torch_function_enabled() or _is_below_autograd():
            with DisableTorchFunctionSubclass():  # inside torch, such as where autograd saves tensors
                return _local_shape.__get__(self)  # type: ignore[no-any-return]
        return torch.Size(self._layout.shape)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self.numel() * self.element_size()

    def size(self, dim: int | None = None) -> Any:
        """The global size; of a sparse tensor in `torch.optim`, the local one (`handlers/attributes.py`)."""
        with DisableTorchFunctionSubclass():
            sparse = self.is_sparse
        is_local = _is_below_autograd() or (sparse and is_called_by("torch.optim"))
        shape = torch.Size(self._layout.local_shape(collectives.rank()) if is_local else self._layout.shape)
        return shape if dim is None else shape[dim]

    def dim(self) -> int:
        return len(self._layout.shape) if torch._C._is_torch_function_enabled() else _local_dim(self)

    ndimension = dim
    ndim = property(dim)

    def numel(self) -> int:
        return (self.shape if _is_below_autograd() else torch.Size(self._layout.shape)).numel()

    nelement = numel

    def stride(self, dim: int | None = None) -> Any:
        """The strides of the global tensor, in elements; local strides have the same order."""
        strides = self._layout.stride()
        if not torch._C._is_torch_function_enabled() or _is_below_autograd():
            with DisableTorchFunctionSubclass():
                strides = _local_stride(self)
        return strides if dim is None else strides[dim]

    def __len__(self) -> int:
        if not self._layout.shape:
            raise TypeError("len() of a 0-d tensor. Fix: item(), which is its number.")
        return self._layout.shape[0]

    # ---- values ---------------------------------------------------------------------------------------------

    def item(self) -> Any:
        """The value of a tensor of one element, on every rank of the mesh; all-reduced or broadcast if necessary."""
        if self.numel() != 1:
            raise RuntimeError(f"A tensor of shape {tuple(self.shape)} has no single value. Fix: index it, or sum().")
        if self._layout.mesh.coordinate(collectives.rank()) is None:
            raise RuleError(
                f"item(): rank {collectives.rank()} is outside {self._layout.mesh} and holds no value. "
                f"Fix: redistribute the tensor to a mesh of all ranks, or call item() on the ranks of its mesh only."
            )
        with torch.no_grad():
            return plain(to_layout(self, self._layout.replicated(), ITEM)).item()

    def tolist(self) -> Any:
        with torch.no_grad():
            return plain(to_layout(self, self._layout.replicated(), ITEM)).tolist()

    def __bool__(self) -> bool:
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        return index(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.numel() == 1 and not self._layout.shape else repr(self)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        layout = self._layout
        if layout.owner is None or collectives.is_here(layout.owner):
            rank = collectives.rank()
            where = f"rank {rank} holds {' '.join(map(str, layout.boxes(rank))) or 'nothing'}"
        else:
            where = "outside its world, one rank held"
        return (
            f"DTensor(shape={layout.shape}, placements={placements_text(layout.mesh, layout.placements)}, "
            f"mesh={layout.mesh}, {where}: {plain(self).detach()!r})"
        )

    def _repr_html_(self) -> str:
        """The text with the elements of this rank, and a drawing of which rank holds which shard."""
        dtype = str(self.dtype).removeprefix("torch.")
        header = f"{self._name}: {dtype}" if self._name else dtype
        drawing = self._layout._repr_html_(header, self.element_size())
        return f"<div><pre>{escape(printable(repr(self)))}</pre>{drawing}</div>"

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """A copy of a replicated tensor of one element, for example for TensorBoard; sends nothing.

        Raises:
            RuleError: another tensor, of which this rank may hold a part only, or a rank outside its mesh.
        """
        if self.numel() != 1 or not self._layout.is_replicated or not self.to_local().numel():
            raise RuleError(local_only("numpy()"))
        return self.to_local().clone().numpy(force=force)

    def __deepcopy__(self, memo: dict[int, "DTensor"]) -> "DTensor":
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("Only leaf tensors can be deep-copied. Fix: copy.deepcopy(x.detach()).")
        copy = tag(plain(self.detach()).clone(), self._layout)
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, self.requires_grad)  # type: ignore[assignment]
        else:
            copy.requires_grad_(self.requires_grad)
            if (grad := self.grad) is not None:  # that of a parameter is not copied, as in torch
                copy.grad = grad.detach().clone()
        copy._name, copy._spec, copy._tiling = self._name, self._spec, self._tiling
        memo[id(self)] = copy
        return copy

    # ---- autograd -------------------------------------------------------------------------------------------

    def detach(self) -> "DTensor":
        """The tensor without history; it keeps its sharding spec and shards, because `nn.Parameter` detaches."""
        return remembering(self, _detach(self))

    @property  # `implement` puts `read_grad` and `write_grad` themselves in its place: one frame fewer
    def grad(self) -> "DTensor | None":
        """The gradient in the layout of the tensor.

        Gradients stay Partial on Replicate axes until one is read; then all are all-reduced in buckets.
        """
        return self._read_grad(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._write_grad(self, value)

    @grad.deleter
    def grad(self) -> None:
        self._write_grad(self, None)

    def backward(
        self,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Add the gradients of this tensor, a scalar unless `gradient` is given, to the leaves of its graph."""
        self._backward(self, gradient, retain_graph, create_graph, inputs)

    # ---- refused: would return the local shard ---------------------------------------------------------------------

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        raise RuleError(local_only("numpy.asarray()"))

    def __dlpack__(self, *args: object, **kwargs: object) -> NoReturn:
        raise RuleError(local_only("DLPack"))

    @property
    def __cuda_array_interface__(self) -> NoReturn:
        raise RuleError(local_only("__cuda_array_interface__")) if self.is_cuda else AttributeError("it is on a CPU")

    __dlpack_c_exchange_api__ = NotOffered("DLPack's exchange of tensors in C would show only the local shard")

    def data_ptr(self) -> NoReturn:
        raise RuleError(local_only("data_ptr()"))

    def set_(self, *args: Any, **kwargs: Any) -> "DTensor":
        """Take over the storage of another DTensor of the same shape; other forms of `Tensor.set_` are refused."""
        return self._set(self, *args, **kwargs)

    def as_subclass(self, cls: object) -> NoReturn:
        raise RuleError(local_only("as_subclass()"))

    def __reduce_ex__(self, proto: object) -> tuple[Callable[[str], NoReturn], tuple[str]]:
        if current_thread().name == "QueueFeederThread":  # of a multiprocessing.Queue; its errors reach nobody
            return _raise_rule_error, (_NO_PICKLE,)
        raise RuleError(_NO_PICKLE)


def implement(dispatch: Handler, **methods: Callable[..., Any]) -> None:
    """Complete the class: method `_name` is the function `name`. Called once, by `shardwise._tensor`."""
    set_dispatcher(dispatch)
    for name, function in methods.items():
        setattr(DTensor, f"_{name}", staticmethod(function))
    own: Any = vars(DTensor)["grad"]
    DTensor.grad = property(methods["read_grad"], methods["write_grad"], own.fdel, own.__doc__)  # type: ignore[assignment, method-assign]


def set_dispatcher(dispatch: Handler) -> None:
    """Set `dispatch` to run every torch function called with a DTensor."""
    DTensor._dispatch = staticmethod(dispatch)


def register_method(name: str, function: Callable[..., Any]) -> None:
    """Give `DTensor` a method, or another implementation of a method of `torch.Tensor`.

    Raises:
        RuleError: the class has a method of this name already.
    """
    if name in vars(DTensor):
        raise RuleError(f"DTensor.{name} is registered already. Fix: another name.")
    setattr(DTensor, name, function)


def call(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `func`, a torch function, an aten op or any other entry of `RULES`, with a DTensor among the arguments."""
    return DTensor._dispatch(func, args, kwargs)


_NO_PICKLE = (
    "A DTensor cannot be pickled: a rank holds only its local shard. "
    "Fix: save it with shardwise.checkpoint, or pickle full_tensor() or to_local()."
)


def _raise_rule_error(text: str) -> NoReturn:
    raise RuleError(text)


def name_of(func: Any) -> str:
    """The name of a function in an error."""
    if getattr(func, "__name__", "") == "__get__":
        return f".{func.__self__.__name__}"
    return str(getattr(func, "__name__", func))


def local_only(what: str) -> str:
    return (
        f"{what} would show only the local shard of a DTensor. "
        f"Fix: call full_tensor() or to_local() first, or work inside shardwise.experimental.local_map."
    )


def tag(local: Tensor, layout: Layout) -> DTensor:
    """Turn a fresh local result into a DTensor, in place: no alias, no autograd node."""
    if before_first:
        complete()
    local.__class__ = DTensor
    local._layout = layout if layout.owner is not None else collectives.owner().layout(layout)  # type: ignore[attr-defined]
    return local  # type: ignore[return-value]


def as_parameter(value: Tensor, before: torch.nn.Parameter) -> torch.nn.Parameter:
    """`value` as the parameter that replaces `before`, with its `grad_dtype` and users' attributes."""
    made = torch.nn.Parameter(value, before.requires_grad)
    vars(made).update({key: x for key, x in vars(before).items() if not key.startswith("_") or key == "_name"})
    with DisableTorchFunctionSubclass():
        if before.grad_dtype != before.dtype:
            made.grad_dtype = before.grad_dtype
    return made


def dtensors_in(values: Iterable[object]) -> list[DTensor]:
    """The DTensors among arguments, and in lists and tuples of them."""
    found: list[DTensor] = []
    for x in values:  # pytree would take a third of a call of a known shape
        if type(x) is DTensor:
            found.append(x)
        elif isinstance(x, list | tuple):
            found += dtensors_in(x)
    return found


def check_owners(what: str, layouts: Iterable[Layout]) -> None:
    """Check that DTensors of these layouts have local tensors of this rank.

    Raises:
        MeshError: one has the local tensor of another rank, or of another world.
    """
    here = collectives.owner()
    for layout in layouts:
        owner = layout.owner
        if owner is not here and owner is not None:
            raise MeshError(
                f"{what}: the DTensor of shape {layout.shape} has the local tensor of {owner.described(here)}. "
                "Fix: make it on each rank of this world; take values along with full_tensor()."
            )


def remembering(x: DTensor, alias: DTensor) -> DTensor:
    """An alias of `x`, with its sharding spec and shards."""
    if type(alias) is DTensor and (x._spec is not None or x._tiling is not None):
        alias._spec, alias._tiling = x._spec, x._tiling
    return alias


def plain(x: Tensor) -> Tensor:
    """The local tensor as a plain one that shares storage and, unless it is sparse, autograd history."""
    if type(x) is DTensor:
        _ = x._layout  # waits for a redistribution that is running
    with DisableTorchFunctionSubclass():
        return x.detach() if x.is_sparse else _as_subclass(x, torch.Tensor)


def to_layout(x: DTensor, layout: Layout, cause: Cause = EXPLICIT) -> DTensor:
    """`x` in another layout; itself if it already is."""
    src, out = x._layout, x
    if src is not layout:
        found = collectives.owner().redistributions.get((src.key, layout.key))
        if found is None and src != layout and src.row_major != layout.row_major:
            check_owners(cause.op or "redistribute", (src,))
            found = redistribution(src, layout)
        if found is not None:
            check_no_transform(cause.op or "redistribute")
            with DisableTorchFunctionSubclass():
                if x.is_sparse:
                    raise RuleError("A sparse DTensor cannot be redistributed. Fix: to_dense() it first.")
                out = tag(found.run(_as_subclass(x, torch.Tensor), cause), found.target)
    return out


def default_mesh(device_type: str = "cpu") -> Mesh:
    """The mesh of `with mesh:`; outside, one axis of all ranks."""
    return collectives.current_mesh() or Mesh((collectives.world_size(),), (), None, device_type)
