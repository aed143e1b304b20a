"""`LocalShardsWrapper`: several shards of one rank as one local tensor that knows their offsets."""

from collections.abc import Sequence
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
# Other functions that keep indices if the shape is unchanged.
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
        pairs = zip(self.boxes, self.slices(), strict=True)
        return [joined.new_empty(box.sizes) if slices is None else joined[slices] for box, slices in pairs]

    def wrap(self, joined: Tensor) -> "LocalShardsWrapper":
        """A tensor of the shape of the bounds, as a wrapper that shares its memory and autograd history."""
        with DisableTorchFunctionSubclass():
            wrapper: LocalShardsWrapper = _as_subclass(joined, LocalShardsWrapper)
        wrapper.tiling = self
        return wrapper


def tiling_of(boxes: Sequence[Box]) -> ShardTiling:
    """The tiling by `boxes`."""
    full = [box for box in boxes if box.numel]
    if not boxes:
        return ShardTiling((), Box((0, 0), (0, 0)))
    start = tuple(map(min, zip(*(box.offsets for box in full or boxes), strict=True)))
    ends = map(max, zip(*(map(sum, zip(*box, strict=True)) for box in full or boxes), strict=True))
    bounds = Box(start, tuple(b - a for a, b in zip(start, ends, strict=True)))
    if not full:
        return ShardTiling(tuple(boxes), boxes[0] if bounds.numel else bounds)
    labelled = []
    for number, box in enumerate(boxes):
        offsets = tuple(a - b for a, b in zip(box.offsets, start, strict=True))
        if box.numel:
            labelled.append((f"shard {number} at {box}" if any(start) else f"shard {number}", Box(offsets, box.sizes)))
    try:
        check_cover(labelled, bounds.sizes)
    except LayoutError as error:
        raise LayoutError(
            f"LocalShardsWrapper: the shards must fill one box, here {bounds}."
            f"{' Relative to its offset:' if any(start) else ''} {without_fix(error)}. "
            f"Fix: correct the offsets, or pass separate shards to sharded_tensor.init_from_local_shards."
        ) from None
    return ShardTiling(tuple(boxes), bounds)


class LocalShardsWrapper(torch.Tensor):
    """The shards of one tensor that this rank holds, as one local tensor, for `DTensor.from_local`.

    Shards that form a column, a row or a grid become one tensor, an ordinary one for every op, optimizer and hook.
    Elementwise functions (copies, conversions, arithmetic, `zeros_like`, a `view` of the same shape) return a wrapper;
    other functions (a sum, a row) return a plain tensor.

    The wrapper shares its memory with the given shards. A single shard, and shards that are adjacent views of one
    tensor, are not copied. Other shards are copied into new memory, and **the given tensors then refer to it**
    (`shard.data = view`), Parameters too. Other tensors that shared their old memory do not, and autograd does not see
    that a write to one side changes the other. Gradients reach shards that require them. Shards that autograd has
    computed are copied.

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
                "LocalShardsWrapper: pass either local_offsets or offsets, which are the same. "
                "Fix: the offsets of each shard, once."
            )
        shards = list(local_shards)
        tiling = tiling_of(_checked_boxes(shards, given))
        wrapper = tiling.wrap(_joined(shards, tiling))
        wrapper._given = shards
        return wrapper  # type: ignore[return-value]

    @classmethod
    def __torch_function__(cls, func: Op, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        if DTensor in types:
            return NotImplemented
        kwargs, name, rule = kwargs or {}, getattr(func, "__name__", ""), rule_of(func)
        if getattr(getattr(func, "__self__", None), "__name__", "") == "data":  # `Tensor.data`, which may be replaced
            return _read_data(*args) if name == "__get__" else _write_data(*args)
        if func in (torch.equal, Tensor.equal):
            return _equal(*args, **kwargs)
        if name in REFUSED:
            raise RuleError(_detaches(name_of(func)))
        with DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
            keeps_indices = name in IN_ORDER or (rule is not None and rule.rows in ELEMENTWISE)
            operands = torch.utils._pytree.tree_leaves((args, kwargs))
            if type(out) is not Tensor or not keeps_indices or any(out is x for x in operands):  # the last: in place
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
        return shard_at(index, [*zip(self.tiling.boxes, self.local_shards(), strict=True)])

    # ---- as a Python object -----------------------------------------------------------------------------------------

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        with torch.no_grad():
            shards = zip(self.tiling.boxes, self.local_shards(), strict=True)
            return f"LocalShardsWrapper(shape={tuple(self.shape)}" + "".join(f", {b}: {s}" for b, s in shards) + ")"

    def __deepcopy__(self, memo: dict[int, "LocalShardsWrapper"]) -> "LocalShardsWrapper":
        if not self.is_leaf:
            raise RuntimeError("Only leaf tensors can be deep-copied. Fix: copy.deepcopy(x.detach()).")
        copy = _rebuilt(self.detach().clone(), self.tiling, self.requires_grad, hasattr(self, "_is_param"))
        if self.grad is not None and not isinstance(self, torch.nn.Parameter):  # as in torch
            copy.grad = self.grad.clone()
        return copy

    def __reduce_ex__(self, proto: object) -> Any:
        with DisableTorchFunctionSubclass():
            joined = _as_subclass(self.detach(), Tensor)
        return _rebuilt, (joined, self.tiling, self.requires_grad, hasattr(self, "_is_param"))

    def set_(self, *args: Any, **kwargs: Any) -> NoReturn:  # torch does not dispatch it to subclasses
        raise RuleError(_detaches("set_"))

    __hash__ = torch.Tensor.__hash__


def _rebuilt(joined: Tensor, tiling: ShardTiling, requires_grad: bool, is_param: bool) -> LocalShardsWrapper:
    wrapper = tiling.wrap(joined).requires_grad_(requires_grad)
    if is_param:
        wrapper._is_param = True
    return wrapper  # type: ignore[return-value]


def _checked_boxes(shards: Sequence[Any], offsets: Sequence[Sequence[int]]) -> list[Box]:
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
    boxes = [Box(tuple(map(index, at)), tuple(shard.shape)) for at, shard in zip(offsets, shards, strict=True)]
    for number, (at, shape) in enumerate(boxes):
        if len(at) != len(shape) or min(at, default=0) < 0:
            raise LayoutError(
                f"{what}: shard {number} of shape {shape} needs {len(shape)} offsets, none negative, "
                f"got {at}. Fix: where the shard begins in the global tensor, along each dim."
            )
    return boxes


# ---- memory ---------------------------------------------------------------------------------------------------------


def _joined(shards: list[Tensor], tiling: ShardTiling) -> Tensor:
    """One tensor of all shards that shares its memory with them."""
    if len(shards) < 2:
        return shards[0] if shards else torch.empty(tiling.bounds.sizes)
    pairs = [(shard, slices) for shard, slices in zip(shards, tiling.slices(), strict=True) if slices is not None]
    joined = _common_view(pairs, tiling.bounds.sizes)
    if joined is None:
        joined = shards[0].new_empty(tiling.bounds.sizes)
        for shard, slices in pairs:
            joined[slices] = shard
        _point_to(shards, joined.detach(), tiling)
    return joined


def _point_to(shards: Sequence[Tensor], joined: Tensor, tiling: ShardTiling) -> None:
    """Turn the shards that autograd did not compute into views of `joined`."""
    for slices, shard in zip(tiling.slices(), shards, strict=True):
        if slices is not None and shard.is_leaf:
            shard.data = joined[slices]


def _common_view(pairs: Sequence[tuple[Tensor, tuple[slice, ...]]], sizes: tuple[int, ...]) -> Tensor | None:
    """The view of their common storage that the shards tile as in the global tensor, if there is one."""
    if not pairs or any(shard.requires_grad or 0 in shard.stride() for shard, _ in pairs):
        return None
    (first, slices), strides = pairs[0], pairs[0][0].stride()
    offset = first.storage_offset() - sum(s.start * stride for s, stride in zip(slices, strides, strict=True))
    last = offset + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
    if offset < 0 or (last + 1) * first.element_size() > first.untyped_storage().nbytes():
        return None
    view = first.as_strided(sizes, strides, offset)
    return view if all(_place(shard) == _place(view[slices]) for shard, slices in pairs) else None


def _place(x: Tensor) -> tuple[object, ...]:
    return x.untyped_storage()._cdata, x.storage_offset(), x.stride()


# ---- functions ------------------------------------------------------------------------------------------------------


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
    if x._given:
        _point_to(x._given, joined, x.tiling)


register_wrapper(
    "torch.distributed.tensor._shards_wrapper", lambda x: LocalShardsWrapper(x.local_shards(), x.local_offsets())
)
