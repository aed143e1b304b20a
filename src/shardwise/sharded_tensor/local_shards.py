"""`LocalShardsWrapper`: several shards of one rank as one local tensor that knows their offsets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from operator import index
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from shardwise import _collectives as collectives
from shardwise._layout import Box, check_cover, checked
from shardwise._rules import pointwise
from shardwise._rules.registry import RowsFunction, rule_of
from shardwise._rules.row import Args, Kwargs, Op
from shardwise._tensor.conversion import register_wrapper
from shardwise._tensor.dtensor import DTensor, name_of
from shardwise._torch_bridge.state_dicts import shard_at
from shardwise.errors import LayoutError, RuleError, without_fix

_as_subclass: Any = torch._C.TensorBase.as_subclass

# Rules of functions that keep the index of every element.
ELEMENTWISE: frozenset[RowsFunction] = frozenset(
    (pointwise.nonlinear, pointwise.selected, pointwise.homogeneous, pointwise.additive, pointwise.bilinear,
     pointwise.numerator, pointwise.identity_rows, pointwise.conversion, pointwise.conversion_to, pointwise.filled_like)
)  # fmt: skip
# Other functions that do, if the shape is unchanged.
IN_ORDER = frozenset("view view_as reshape reshape_as rand_like randn_like dropout".split())
# In-place functions that would detach the tensor from its shards.
REFUSED = frozenset("resize_ resize_as_ t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ as_strided_".split())


@dataclass(frozen=True)
class ShardTiling:
    """Boxes of a global tensor that tile one box, `bounds`; empty boxes may be anywhere."""

    boxes: tuple[Box, ...]
    bounds: Box

    def slices(self) -> list[tuple[slice, ...] | None]:
        """The slices of each box in a tensor of the shape of the bounds; None for an empty box."""
        return [box.relative_to(self.bounds) if box.numel else None for box in self.boxes]

    def shards(self, joined: Tensor) -> list[Tensor]:
        """The boxes of `joined`, as views."""
        return [
            joined.new_empty(box.sizes) if slices is None else joined[slices]
            for box, slices in zip(self.boxes, self.slices(), strict=True)
        ]

    def wrap(self, joined: Tensor) -> "LocalShardsWrapper":
        """A tensor of the shape of the bounds, as a wrapper that shares its memory and autograd history."""
        with DisableTorchFunctionSubclass():
            wrapper: LocalShardsWrapper = _as_subclass(joined, LocalShardsWrapper)
        wrapper.tiling = self
        return wrapper


def tiling_of(boxes: Sequence[Box]) -> ShardTiling:
    """The tiling by `boxes`.

    Raises:
        LayoutError: two overlap, or they do not fill one box.
    """
    full = [box for box in boxes if box.numel]
    if not boxes:
        return ShardTiling((), Box((0, 0), (0, 0)))
    bounds = _bounding_box(full or boxes)
    if not full:
        return ShardTiling(tuple(boxes), boxes[0] if bounds.numel else bounds)
    start = bounds.offsets
    labelled = []
    for number, box in enumerate(boxes):
        relative = Box(tuple(a - b for a, b in zip(box.offsets, start, strict=True)), box.sizes)
        if box.numel:
            labelled.append((f"shard {number} at {box}" if any(start) else f"shard {number}", relative))
    try:
        check_cover(labelled, bounds.sizes)
    except LayoutError as error:
        raise LayoutError(
            f"LocalShardsWrapper: the shards must fill one box, here {bounds}."
            f"{' Relative to its offset:' if any(start) else ''} {without_fix(error)}. "
            f"Fix: correct the offsets, or pass separate shards to sharded_tensor.init_from_local_shards."
        ) from None
    return ShardTiling(tuple(boxes), bounds)


def _bounding_box(boxes: Sequence[Box]) -> Box:
    """The bounding box."""
    start = tuple(map(min, zip(*(box.offsets for box in boxes), strict=True)))
    stop = map(max, zip(*([a + n for a, n in zip(*box, strict=True)] for box in boxes), strict=True))
    return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))


class LocalShardsWrapper(torch.Tensor):
    """The shards of one tensor that this rank holds, as one local tensor, for `DTensor.from_local`.

    Shards that form a column, a row or a grid become one tensor, an ordinary one for every op, optimizer and hook.
    Elementwise functions (copies, conversions, arithmetic, `zeros_like`, a `view` of the same shape) return a wrapper;
    other functions (a sum, a row) return a plain tensor.

    The wrapper shares its memory with the given shards. A single shard, and shards that are adjacent views of one
    tensor, are used without a copy. Other shards are copied into new memory, and **the given tensors then refer to
    it** (`shard.data = view`), Parameters too; other tensors that shared their old memory do not, and autograd does
    not see that a write to one side changes the other. Gradients reach shards that require them. Shards that autograd
    has computed are copied.

    Args:
        local_shards: tensors of one dtype, device and number of dims; none on a rank without shards, where the
            wrapper has shape (0, 0).
        local_offsets: the shard offsets in the global tensor, one integer per dim.
        offsets: another name for `local_offsets`.

    Raises:
        LayoutError: shards that are not plain tensors, differ in dtype, device or number of dims, or occur twice;
            offsets that are too few, too many or negative; boxes that overlap or do not fill one box.
    """

    tiling: ShardTiling  # the boxes of the shards
    _given: list[Tensor] | None = None  # the tensors it was made of; None: its shards are views

    @staticmethod
    @checked
    def __new__(
        cls,
        local_shards: Sequence[Tensor],
        local_offsets: Sequence[Sequence[int]] | None = None,
        *,
        offsets: Sequence[Sequence[int]] | None = None,
    ) -> Self:
        given = local_offsets if offsets is None else offsets
        if given is None or (local_offsets is not None and offsets is not None):
            raise LayoutError(
                f"LocalShardsWrapper: pass either local_offsets or offsets, which are the same. "
                f"Fix: {'the offsets of each shard' if given is None else 'leave one out'}."
            )
        shards = list(local_shards)
        checked = _checked_offsets(shards, given)
        tiling = tiling_of([Box(at, tuple(shard.shape)) for at, shard in zip(checked, shards, strict=True)])
        wrapper = tiling.wrap(_joined(shards, tiling))
        wrapper._given = shards
        return wrapper  # type: ignore[return-value]

    @classmethod
    def __torch_function__(cls, func: Op, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        if DTensor in types:
            return NotImplemented
        kwargs = kwargs or {}
        special = _special(func)
        if special is not None:
            return special(*args, **kwargs)
        if getattr(func, "__name__", "") in REFUSED:
            raise RuleError(_detaches(name_of(func)))
        with DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
            if type(out) is not Tensor or not _keeps_indices(func):
                return out
            operands = torch.utils._pytree.tree_leaves((args, kwargs))
            if any(out is x for x in operands):  # a plain tensor that was modified in place
                return out
            tilings = {x.tiling for x in operands if isinstance(x, LocalShardsWrapper)}
            if len(tilings) > 1 or out.shape != next(iter(tilings)).bounds.sizes:
                return out
        return tilings.pop().wrap(out)

    # ---- shards -----------------------------------------------------------------------------------------------------

    def local_shards(self) -> list[Tensor]:
        """The shards, in the given order: the tensors it was made of, or views that share its memory."""
        fresh = self.requires_grad and self.is_leaf  # views, whose gradients arrive at this leaf
        if self._given is not None and not fresh:
            return list(self._given)
        with DisableTorchFunctionSubclass():
            return self.tiling.shards(_as_subclass(self, Tensor))

    def local_sizes(self) -> list[torch.Size]:
        """The shapes of the shards."""
        return [torch.Size(box.sizes) for box in self.tiling.boxes]

    def local_offsets(self) -> list[torch.Size]:
        """The offsets of the shards in the global tensor."""
        return [torch.Size(box.offsets) for box in self.tiling.boxes]

    shards = property(local_shards)
    shard_sizes = property(local_sizes)
    shard_offsets = property(local_offsets)

    def is_empty_shard(self) -> bool:
        """Whether it has no element."""
        return not prod(self.tiling.bounds.sizes)

    # ---- for torch.distributed.checkpoint ---------------------------------------------------------------------------

    @property
    def local_chunks(self) -> list[Any]:
        """A `ChunkStorageMetadata` of torch for each shard."""
        return collectives.chunks(self.tiling.boxes)

    def storage_metadata(self) -> Any:
        """A `TensorStorageMetadata` of torch: properties, the shape of this local tensor, and a chunk per shard."""
        return collectives.storage_metadata(self, self.tiling.bounds.sizes, self.tiling.boxes)

    storage_meta = property(storage_metadata)

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        """The write items of torch's checkpoints; `object` has the global shape.

        Raises:
            LayoutError: `object` is this wrapper, which does not know the global shape.
        """
        global_shape, bounds = tuple(object.shape), self.tiling.bounds
        if any(a + n > size for a, n, size in zip(*bounds, global_shape, strict=True)):
            raise LayoutError(
                f"{fqn}: the shards of this LocalShardsWrapper are at {bounds} of a tensor whose global shape it does "
                f"not know, so it cannot be saved by itself. Fix: save DTensor.from_local(wrapper, mesh, placements)."
            )
        return collectives.write_items(fqn, self, global_shape, self.tiling.boxes)

    def __create_chunk_list__(self) -> list[Any]:
        return self.local_chunks

    def __get_tensor_shard__(self, index: object) -> Tensor:
        return shard_at(index, self.tiling.boxes, self.local_shards())

    # ---- as a Python object -----------------------------------------------------------------------------------------

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        with torch.no_grad():
            shards = zip(self.tiling.boxes, self.local_shards(), strict=True)
            return f"LocalShardsWrapper(shape={tuple(self.shape)}" + "".join(f", {b}: {s}" for b, s in shards) + ")"

    def __deepcopy__(self, memo: dict[int, "LocalShardsWrapper"]) -> "LocalShardsWrapper":
        if id(self) not in memo:
            if not self.is_leaf:
                raise RuntimeError("Only leaf tensors can be deep-copied. Fix: copy.deepcopy(x.detach()).")
            copy = _rebuilt(self.detach().clone(), self.tiling, self.requires_grad, hasattr(self, "_is_param"))
            if self.grad is not None and not isinstance(self, torch.nn.Parameter):  # as in torch
                copy.grad = self.grad.clone()
            memo[id(self)] = copy
        return memo[id(self)]

    def __reduce_ex__(self, proto: object) -> Any:
        with DisableTorchFunctionSubclass():
            joined = _as_subclass(self.detach(), Tensor)
        return _rebuilt, (joined, self.tiling, self.requires_grad, hasattr(self, "_is_param"))

    def set_(self, *args: Any, **kwargs: Any) -> NoReturn:  # which torch does not dispatch to subclasses
        raise RuleError(_detaches("set_"))

    __hash__ = torch.Tensor.__hash__


def _rebuilt(joined: Tensor, tiling: ShardTiling, requires_grad: bool, is_param: bool) -> LocalShardsWrapper:
    wrapper = tiling.wrap(joined).requires_grad_(requires_grad)
    if is_param:
        wrapper._is_param = True
    return wrapper  # type: ignore[return-value]


def _checked_offsets(shards: Sequence[Any], offsets: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    what = "LocalShardsWrapper"
    for number, shard in enumerate(shards):
        if not isinstance(shard, Tensor) or isinstance(shard, DTensor | LocalShardsWrapper) or shard.is_sparse:
            fix = "to_dense() it" if isinstance(shard, Tensor) and shard.is_sparse else "a torch.Tensor of local values"
            raise LayoutError(
                f"{what}: shard {number} must be a plain dense tensor, got {type(shard).__name__}. Fix: {fix}."
            )
        if any(shard is other for other in shards[:number]):
            raise LayoutError(f"{what}: shard {number} is a tensor that was passed before. Fix: clone() it.")
    if len(offsets) != len(shards):
        raise LayoutError(
            f"{what}: every shard has offsets, got {len(shards)} shards and {len(offsets)} offsets. "
            f"Fix: one tuple of offsets for each shard."
        )
    for field in ("dtype", "device", "ndim"):
        found = [str(getattr(shard, field)) for shard in shards]
        if len(set(found)) > 1:
            fix = "reshape them to the dims of the tensor" if field == "ndim" else "convert them with to()"
            raise LayoutError(f"{what}: the shards of a tensor have one {field}, got {', '.join(found)}. Fix: {fix}.")
    checked = []
    for number, (given, shard) in enumerate(zip(offsets, shards, strict=True)):
        at = tuple(map(index, given))
        if len(at) != shard.ndim or min(at, default=0) < 0:
            raise LayoutError(
                f"{what}: shard {number} of shape {tuple(shard.shape)} needs {shard.ndim} offsets, none negative, "
                f"got {at}. Fix: where the shard begins in the global tensor, along each dim."
            )
        checked.append(at)
    return checked


# ---- memory ---------------------------------------------------------------------------------------------------------


def _joined(shards: list[Tensor], tiling: ShardTiling) -> Tensor:
    """One tensor of all shards that shares its memory with them."""
    if not shards:
        return torch.empty(tiling.bounds.sizes)
    if len(shards) == 1:
        return shards[0]
    view = _common_view(shards, tiling)
    if view is not None:
        return view
    joined = shards[0].new_empty(tiling.bounds.sizes)
    for slices, shard in zip(tiling.slices(), shards, strict=True):
        if slices is not None:
            joined[slices] = shard
    _point_to(shards, joined.detach(), tiling)
    return joined


def _point_to(shards: Sequence[Tensor], joined: Tensor, tiling: ShardTiling) -> None:
    """Turn the shards that autograd did not compute into views of `joined`."""
    for slices, shard in zip(tiling.slices(), shards, strict=True):
        if slices is not None and shard.is_leaf:
            shard.data = joined[slices]


def _common_view(shards: Sequence[Tensor], tiling: ShardTiling) -> Tensor | None:
    """The view of their common storage that the shards tile as in the global tensor, if there is one."""
    pairs = [(shard, slices) for shard, slices in zip(shards, tiling.slices(), strict=True) if slices is not None]
    if not pairs or any(shard.requires_grad or 0 in shard.stride() for shard, _ in pairs):
        return None
    first, strides = pairs[0][0], pairs[0][0].stride()
    offsets = {
        shard.storage_offset() - sum(s.start * stride for s, stride in zip(slices, strides, strict=True))
        for shard, slices in pairs
    }
    storages = {(shard.untyped_storage().data_ptr(), shard.untyped_storage()._cdata) for shard, _ in pairs}
    if len(offsets) > 1 or len(storages) > 1 or any(shard.stride() != strides for shard, _ in pairs):
        return None
    offset = offsets.pop()
    last = offset + sum((n - 1) * stride for n, stride in zip(tiling.bounds.sizes, strides, strict=True))
    if offset < 0 or (last + 1) * first.element_size() > first.untyped_storage().nbytes():
        return None
    return first.as_strided(tiling.bounds.sizes, strides, offset)


# ---- functions ------------------------------------------------------------------------------------------------------


def _keeps_indices(func: Op) -> bool:
    rule = rule_of(func)
    return (rule is not None and rule.rows in ELEMENTWISE) or getattr(func, "__name__", "") in IN_ORDER


def _detaches(name: str) -> str:
    return f"{name}() would detach a LocalShardsWrapper from its shards. Fix: use a function that returns a new tensor."


def _equal(a: Tensor, b: Tensor) -> bool:
    """Two wrappers must also have the same shard offsets."""
    if isinstance(a, LocalShardsWrapper) and isinstance(b, LocalShardsWrapper) and a.tiling != b.tiling:
        return False
    with DisableTorchFunctionSubclass():
        return torch.equal(a, b)


def _read_data(x: LocalShardsWrapper) -> LocalShardsWrapper:
    with DisableTorchFunctionSubclass():
        return x.tiling.wrap(x.data)


def _write_data(x: LocalShardsWrapper, value: Tensor) -> None:
    """Sets new memory, also of the given shards."""
    if value.shape != x.tiling.bounds.sizes:
        raise LayoutError(
            f".data = needs a tensor of shape {x.tiling.bounds.sizes}, got {tuple(value.shape)}. "
            f"Fix: that shape, or a new LocalShardsWrapper."
        )
    with DisableTorchFunctionSubclass():
        joined = _as_subclass(value.detach(), Tensor)
        x.data = joined
        _point_to(x._given or (), joined, x.tiling) if x._given else None


def _special(func: Op) -> Callable[..., Any] | None:
    """What runs in place of `func`, if something does. `Tensor.data`, which may be replaced, is found by its name."""
    if getattr(getattr(func, "__self__", None), "__name__", "") == "data":
        return _read_data if func.__name__ == "__get__" else _write_data
    return _equal if func in (torch.equal, Tensor.equal) else None


register_wrapper(
    "torch.distributed.tensor._shards_wrapper", lambda x: LocalShardsWrapper(x.local_shards(), x.local_offsets())
)
