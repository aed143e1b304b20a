"""Attributes and methods of DTensors that are read from the local tensor, or refused.

Shapes and `.grad` are properties in `_tensor/dtensor.py`.
"""

from collections.abc import Callable
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from shardwise._layout import REPLICATE, Partial
from shardwise._rules.pointwise import is_contiguous
from shardwise._rules.registry import handler, handler_of_family, replacement
from shardwise._rules.row import Args, Handler, Kwargs, Meta, Op
from shardwise._tensor.autograd import gradients
from shardwise._tensor.autograd.buckets import enable_bucketing, local_gradient
from shardwise._tensor.dispatch.fallback import run_decomposed
from shardwise._tensor.dispatch.view_copies import LIVING, copies_of_memory, invalidate, track
from shardwise._tensor.dtensor import DTensor, name_of, plain, remembering, tag, to_layout
from shardwise._tensor.torch_objects import is_torch_dtensor
from shardwise._tensor.transforms import refuse_compilation
from shardwise._trace.comm_trace import Cause
from shardwise._trace.user_stack import is_called_by
from shardwise.errors import RuleError

_set_data: Callable[[Tensor, Tensor], None] = vars(torch._C.TensorBase)["data"].__set__
# Attributes and methods whose result for the local tensor is right for the global one.
SAME = frozenset(
    """
    requires_grad requires_grad_ is_floating_point is_complex is_signed element_size retain_grad retains_grad
    device dtype is_leaf layout is_sparse is_sparse_csr is_quantized is_mkldnn is_meta is_cpu is_cuda is_mps
    is_xpu is_xla is_ipu is_hpu is_vulkan is_maia is_mtia grad_dtype
    is_nested is_inference is_conj is_neg get_device _version itemsize names _is_view is_shared
    is_pinned is_coalesced sparse_dim dense_dim register_hook register_post_accumulate_grad_hook _backward_hooks
    _post_accumulate_grad_hooks __hash__ _is_zerotensor
    """.split()
)


def _attribute(func: Any) -> str:
    """The attribute that `func` reads or sets; else the name of `func`."""
    name = getattr(func, "__name__", "")
    return str(func.__self__.__name__ if name in ("__get__", "__set__") else name)


@handler_of_family(lambda func: _attribute(func) in SAME)
def same(func: Any, args: Args, kwargs: Kwargs) -> object:
    """Call `func` on the local tensor."""
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


@handler(Tensor.is_contiguous)
def _is_contiguous(func: Op, args: Args, kwargs: Kwargs) -> object:
    layout, formats = args[0]._layout, (*args[1:], *kwargs.values())
    return is_contiguous(Meta(layout.shape, torch.float32, REPLICATE, layout.strides), *formats)


@handler(Tensor.storage_offset)
def _storage_offset(func: Op, args: Args, kwargs: Kwargs) -> object:
    """The offset of the global tensor in its memory: 0 unless it is a view of some elements of another."""
    x = args[0]
    with DisableTorchFunctionSubclass():
        if not _is_part(x):
            return 0
        if x._layout.is_replicated:
            return x.storage_offset()
    raise RuleError(
        f"storage_offset() of a view as {x._layout}: a sharded tensor has no memory of its own. "
        f"Fix: call it on to_local(), or on full_tensor()."
    )


@handler(torch.as_strided, Tensor.as_strided)
def _as_strided(func: Op, args: Args, kwargs: Kwargs) -> object:
    """Elements by their offsets in memory, known if the global tensor is row-major and not part of another."""
    x = next(a for a in (*args, *kwargs.values()) if type(a) is DTensor)
    if x._layout.strides is not None or _is_part(x):
        raise RuleError(
            f"{name_of(func)}() reads memory by position, which is not known for a view as {x._layout}. "
            f"Fix: clone(memory_format=torch.contiguous_format) first, or index it."
        )
    return run_decomposed(func, args, kwargs)


def _is_part(x: DTensor) -> bool:
    """Whether `x` may be a view of some elements of another tensor."""
    with DisableTorchFunctionSubclass():
        base = x._base
    return base is not None and not (type(base) is DTensor and prod(base._layout.shape) <= prod(x._layout.shape))


@handler(Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
def _requires_grad(func: Op, args: Args, kwargs: Kwargs) -> object:
    x = args[0]
    needed_grad = x.requires_grad
    out = same(func, args, kwargs)
    if type(x) is DTensor:
        enable_bucketing(x)
        if LIVING and x.requires_grad and not needed_grad:  # views require grad from now on, copies cannot
            invalidate(copies_of_memory(x))
    return out


@handler(Tensor.register_post_accumulate_grad_hook)
def _register_post_accumulate_grad_hook(func: Op, args: Args, kwargs: Kwargs) -> object:
    return same(func, (args[0], _as_user_code(*args[1:], **kwargs)), {})


def _as_user_code(hook: Callable[..., Any]) -> Callable[..., Any]:
    """`hook`, which the autograd engine may call with `__torch_function__` disabled, with it enabled."""

    def run_hook(*args: object) -> Any:
        with torch._C._EnableTorchFunction():
            return hook(*args)

    return run_hook


@replacement(Tensor.register_hook)
def _register_hook(x: DTensor, hook: Callable[[Any], Any]) -> object:
    """`x.register_hook(hook)`: `hook` gets the gradient as a DTensor, and may return one in any placements."""
    layout = x._layout

    def on_local(grad: Tensor) -> Tensor | None:
        returned = _as_user_code(hook)(
            tag(grad.detach() if not torch.is_grad_enabled() else grad.view_as(grad), local_gradient(layout))
        )
        if returned is None:
            return None
        ends = Partial("max"), Partial("min")
        chosen = any(n > 1 and p in ends for n, p in zip(layout.mesh.shape, layout.placements, strict=True))
        if chosen and not (
            type(returned) is DTensor and returned._layout.placements == local_gradient(layout).placements
        ):
            raise RuleError(
                f"A hook of {x._name or 'a tensor'} as {layout} returned another layout than it got. Only ranks whose "
                f"values were chosen have a gradient, and the others would lose their part. Fix: redistribute the "
                f"tensor to Replicate() before you register the hook."
            )
        what = f"the plain gradient that a hook of {x._name or 'a tensor'} returned"
        return gradients.given_cotangent(layout, returned, what, explicit=True)

    with DisableTorchFunctionSubclass():
        _ = x.grad_fn  # torch 2.13 crashes in a view that was changed without gradients if this was not read before
        return x.register_hook(on_local)  # type: ignore[no-untyped-call]


@handler_of_family(lambda func: getattr(func, "__name__", "") in ("__get__", "__set__"))
def attribute_of(func: Any, args: Args, kwargs: Kwargs) -> object:
    """Read or set an attribute that may differ between the local and the global tensor; refuse most."""
    x, attribute = args[0], func.__self__.__name__
    if attribute == "data":
        if func.__name__ == "__set__":
            return replace_value(x, _in_layout_of(x, args[1], ".data ="))
        with DisableTorchFunctionSubclass():
            return remembering(x, tag(func(*args), x._layout))
    refuse_compilation()
    if attribute == "_base" and same(func, args, kwargs) is None:
        return None
    if attribute in ("real", "imag", "H", "mH", "_base", "_grad"):
        raise RuleError(f"DTensor does not support .{attribute}. Fix: use to_local() or full_tensor().")
    raise RuleError(
        f"DTensor does not support .{attribute}: it could return the local shard as if it were the global tensor. "
        f"Fix: use to_local() or full_tensor()."
    )


def _in_layout_of(x: DTensor, value: Any, what: str) -> DTensor:
    """`value`, the new value of `x`, redistributed to the layout of `x`; a plain tensor is a full tensor."""
    if tuple(value.shape) != x._layout.shape:
        raise RuleError(
            f"{what} expects a tensor of the shape of the DTensor, {x._layout.shape}, got {tuple(value.shape)}. "
            f"Fix: make a new DTensor instead."
        )
    value = gradients.as_dtensor(value, x, what, "the plain tensor")
    return to_layout(value, x._layout, Cause("operand", what, "the new value", "a DTensor keeps its layout"))


def replace_value(x: DTensor, value: DTensor) -> DTensor:
    """Give `x`, a leaf or a view, the memory and the layout of `value`, which may have another shape.

    Holders of `x`, such as an optimizer, then have the new value.
    """
    with DisableTorchFunctionSubclass():
        _set_data(x, plain(value).detach())
        if x._layout.row_major != value._layout.row_major:
            x._spec = x._tiling = x._bucket_plan = None
        x._layout = value._layout
        return track(x)  # the value may be a copy where torch gives a view


def set_(x: DTensor, *args: Any, **kwargs: Any) -> DTensor:
    """`x.set_(y)` of two DTensors: x gets the storage of y. Modules do so when a parametrization is registered."""
    if len(args) != 1 or kwargs or not (type(args[0]) is DTensor or is_torch_dtensor(args[0])):
        refuse(Tensor.set_, (x, *args), kwargs)
    value = _in_layout_of(x, args[0], "set_()")
    with DisableTorchFunctionSubclass():
        x._layout = value._layout
        return track(Tensor.set_(x, value))  # type: ignore[call-overload, no-any-return]


@handler(Tensor.to_sparse, Tensor.to_sparse_coo, Tensor.to_sparse_csr, Tensor.to_sparse_csc, Tensor.to_mkldnn)
def _to_sparse(func: Op, args: Args, kwargs: Kwargs) -> NoReturn:
    raise RuleError(f"{name_of(func)}(): a DTensor has no sparse form. Fix: call it on full_tensor() or to_local().")


@replacement(Tensor.view_as, torch.ops.aten.view_as.default)
def _view_as(input: Tensor, other: Tensor) -> Tensor:
    """`x.view_as(x)` is an alias with its own autograd node; torch uses it to find the leaf of a gradient."""
    if input is not other or type(input) is not DTensor:
        return input.view(other.shape)
    with DisableTorchFunctionSubclass():
        return tag(input.view_as(input), input._layout)


# A plain tensor of the shape of a DTensor stays plain, so that changes of the view are changes of the tensor.
replacement(Tensor.expand_as, torch.ops.aten.expand_as.default)(lambda input, other: input.expand(other.shape))
replacement(Tensor.reshape_as, torch.ops.aten.reshape_as.default)(lambda input, other: input.reshape(other.shape))


# ---- t_, unsqueeze_ and the like: a tensor becomes a view of itself, and its layout that of the view ------------


def _root(x: Tensor) -> Tensor | None:
    return x._base if x._is_view() else x


def _becomes(view: Op) -> Handler:
    def run(func: Op, args: Args, kwargs: Kwargs) -> Any:
        x = args[0]
        out = view(*args, **kwargs)
        with DisableTorchFunctionSubclass():
            new = plain(out.detach())
            if _root(out) is _root(x):
                torch.Tensor.as_strided_(x, new.shape, new.stride(), new.storage_offset())
            elif x._is_view() or x.requires_grad:
                raise RuleError(
                    f"{name_of(func)} works in place, but {x._layout} needs a redistribution for this view, and "
                    f"neither its views nor its gradients would follow. Fix: use the op that returns a new tensor."
                )
            else:
                _set_data(x, new)
                track(x)  # a copy: `detach()` or `.data` may have made other tensors of the memory that it had
            x._layout = out._layout
            x._spec = x._tiling = None  # these describe the old shape
        return x

    return run


for _name in ("t", "transpose", "swapaxes", "swapdims", "squeeze", "unsqueeze"):
    handler(getattr(Tensor, f"{_name}_"))(_becomes(getattr(Tensor, _name)))


# ---- row-sparse gradients ---------------------------------------------------------------------------------------

# An optimizer reads `_indices()`, `_values()` and `size()` of a sparse gradient, computes with the values, makes sparse
# tensors of them with `torch.sparse_coo_tensor` (which no subclass can intercept) and adds those to dense state. For a
# sparse DTensor all three therefore return there what belongs to the local shard, and a plain sparse tensor of the
# local shape beside a DTensor counts as its local shard (`operands.all_promoted`). Other code gets the global size, and
# an error for the others: it would take a norm of the local values for that of the gradient.


@handler(Tensor._indices, Tensor._values, Tensor.indices, Tensor.values, Tensor._nnz)
def _of_local_shard(func: Op, args: Args, kwargs: Kwargs) -> Tensor:
    """`_indices()` and `_values()` of the local shard, as plain tensors, when `torch.optim` calls them."""
    name = func.__name__
    if name in ("_indices", "_values") and is_called_by("torch.optim"):
        with DisableTorchFunctionSubclass():
            return func(args[0]).detach()  # type: ignore[no-any-return]
    raise RuleError(
        f"{name}() of a sparse DTensor would show only local rows. Fix: to_dense(), or to_local().{name}()."
    )


@handler(Tensor.to_dense)
def to_dense(func: Op, args: Args, kwargs: Kwargs) -> Tensor:
    """A dense DTensor of the same layout."""
    x = args[0]
    with DisableTorchFunctionSubclass():
        return tag(func(plain(x), *args[1:], **kwargs), x._layout)


@handler(Tensor.coalesce)
def coalesce(func: Op, args: Args, kwargs: Kwargs) -> DTensor:
    """Duplicate rows are on one rank, which adds them: ranks hold different rows."""
    x = args[0]
    if x._layout.partial_axes:
        raise RuleError(f"coalesce: {x._layout} has rows on several ranks that add up. Fix: redistribute it first.")
    with DisableTorchFunctionSubclass():
        local = plain(x)
        rows = local._indices()
        if rows.shape[0] == 1 and bool(
            (rows.diff() > 0).all()
        ):  # lookups make rows in this order; the check is cheaper than a sort
            local._coalesced_(True)
        return tag(func(local), x._layout)


@handler(Tensor.sparse_mask)
def sparse_mask(func: Op, args: Args, kwargs: Kwargs) -> DTensor:
    """The rows of a dense DTensor whose indices a sparse one has."""
    dense, mask = args[:2]
    if type(dense) is not DTensor or type(mask) is not DTensor or dense._layout != mask._layout:
        raise RuleError("sparse_mask needs two DTensors of one layout. Fix: redistribute the dense one.")
    with DisableTorchFunctionSubclass():
        return tag(func(plain(dense), plain(mask)), dense._layout)


@handler(Tensor.new)
def new(func: Any, args: Args, kwargs: Kwargs) -> DTensor:
    """`grad.new(indices, values, size)`, by which `torch.optim.SparseAdam` makes a sparse tensor."""
    like, *parts = args
    with DisableTorchFunctionSubclass():
        is_sparse = like.is_sparse and len(parts) == 3
    if not is_sparse:
        refuse_local("new()")
    return tag(torch.sparse_coo_tensor(*parts, check_invariants=False), like._layout)


# ---- refused ----------------------------------------------------------------------------------------------------

_COMMUNICATES = ("torch.distributed.", "torch._ops._c10d_functional", "torch._ops.c10d")  # modules of functions


@handler_of_family(lambda func: (getattr(func, "__module__", None) or "").startswith(_COMMUNICATES), is_op=True)
@handler(Tensor.share_memory_, Tensor.storage, Tensor.untyped_storage, Tensor.resize_, Tensor.resize_as_)
@handler(Tensor.apply_, Tensor.map_, Tensor.map2_)
def refuse(func: Any, args: Args, kwargs: Kwargs) -> NoReturn:
    """Refuse functions that read or change the local storage as if it were the global one."""
    refuse_compilation()  # a compiler calls `untyped_storage` first
    refuse_local(f"{name_of(func)}()")


def refuse_local(call: str) -> NoReturn:
    raise RuleError(
        f"{call} would use the local tensor of a DTensor as if it were the global one. "
        f"Fix: call it on to_local() or full_tensor(), or inside shardwise.experimental.local_map."
    )
