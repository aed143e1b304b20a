"""Several shards of one rank as one local tensor, which knows where in the whole each of them stands."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from operator import index
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from shardwise import collectives
from shardwise.errors import LayoutError, RuleError
from shardwise.layout import Box, check_cover
from shardwise.rules import pointwise
from shardwise.rules.row import rule_of
from shardwise.tensor.dispatch.names import name_of
from shardwise.tensor.dtensor import DTensor

_as_subclass: Any = torch._C.TensorBase.as_subclass

# Rules of functions that leave every element where it is.
ELEMENTWISE = frozenset(
    (pointwise.nonlinear, pointwise.selected, pointwise.homogeneous, pointwise.additive, pointwise.bilinear,
     pointwise.numerator, pointwise.copies, pointwise.conversion, pointwise.filled_like)
)  # fmt: skip
# Others that do, as long as the shape stays.
IN_ORDER = frozenset("view view_as reshape reshape_as rand_like randn_like dropout".split())
# In place they would leave the shards behind.
REFUSED = frozenset("resize_ resize_as_ t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ as_strided_".split())


@dataclass(frozen=True)
class Tiling:
    """Boxes of a whole tensor that together are one box, `bounds`; empty ones may stand anywhere."""

    boxes: tuple[Box, ...]
    bounds: Box

    def places(self) -> list[tuple[slice, ...] | None]:
        """Where each box is in a tensor that holds the bounds; None for an empty one."""
        return [box.relative_to(self.bounds) if box.numel else None for box in self.boxes]

    def shards(self, joined: Tensor) -> list[Tensor]:
        """The boxes of `joined`, as views."""
        return [
            joined.new_empty(box.sizes) if place is None else joined[place]
            for box, place in zip(self.boxes, self.places(), strict=True)
        ]

    def wrap(self, joined: Tensor) -> "LocalShardsWrapper":
        """A tensor that holds the bounds, as a wrapper that shares its memory and its autograd history."""
        with DisableTorchFunctionSubclass():
            wrapper: LocalShardsWrapper = _as_subclass(joined, LocalShardsWrapper)
        wrapper._tiling = self
        return wrapper


def tiling_of(boxes: Sequence[Box]) -> Tiling:
    """The tiling by `boxes`.

    Raises:
        LayoutError: two overlap, or together they are no box.
    """
    full = [box for box in boxes if box.numel]
    if not boxes:
        return Tiling((), Box((0, 0), (0, 0)))
    bounds = _around(full or boxes)
    if not full:
        return Tiling(tuple(boxes), boxes[0] if bounds.numel else bounds)
    start = bounds.offsets
    labelled = []
    for number, box in enumerate(boxes):
        moved = Box(tuple(a - b for a, b in zip(box.offsets, start, strict=True)), box.sizes)
        if box.numel:
            labelled.append((f"shard {number}, which stands at {box}" if any(start) else f"shard {number}", moved))
    try:
        check_cover(labelled, bounds.sizes)
    except LayoutError as error:
        raise LayoutError(
            f"LocalShardsWrapper: the shards must be one box together, here {bounds}."
            f"{' Seen from its first element:' if any(start) else ''} {error} "
            f"Fix: correct the offsets; shards that stand apart are for sharded_tensor.init_from_local_shards."
        ) from None
    return Tiling(tuple(boxes), bounds)


def _around(boxes: Sequence[Box]) -> Box:
    """The smallest box that holds all of them."""
    start = tuple(map(min, zip(*(box.offsets for box in boxes), strict=True)))
    stop = map(max, zip(*([a + n for a, n in zip(*box, strict=True)] for box in boxes), strict=True))
    return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))


class LocalShardsWrapper(torch.Tensor):
    """The shards of one tensor that this rank holds, as one local tensor, for `DTensor.from_local`.

    Shards that lie above or beside each other, or form a grid, make one tensor with memory of its own: an ordinary
    tensor for every op, optimiser and hook. What works element by element (copies, conversions, arithmetic,
    `zeros_like`, a `view` of the same shape) gives a wrapper again; anything else (a sum, a row) a plain tensor.

    Memory is shared with the shards that were given, so that a change of one side is seen on the other. One shard,
    and shards that are parts of one tensor as they stand here, are taken as they are. Other shards are laid into new
    memory, and **the given tensors are pointed to it** (`shard.data = view`), Parameters too; what else shared their
    old memory stays behind, and autograd does not notice that a write on one side changes the other. Gradients reach
    shards that require them. Shards that autograd has computed are copied.

    Args:
        local_shards: tensors of one dtype, device and number of dims; none on a rank without shards, where the
            wrapper has shape (0, 0).
        local_offsets: where each of them begins in the whole tensor, one integer a dim.
        offsets: another name for `local_offsets`.

    Raises:
        LayoutError: shards that are no plain tensors, differ in dtype, device or number of dims, or occur twice;
            offsets that are too few, too many or negative; boxes that overlap or are not one box together.
    """

    _tiling: Tiling
    _given: list[Tensor] | None = None  # None: views

    @staticmethod
    def __new__(
        cls,
        local_shards: Sequence[Tensor],
        local_offsets: Sequence[Sequence[int]] | None = None,
        *,
        offsets: Sequence[Sequence[int]] | None = None,
    ) -> Self:
        given = local_offsets if offsets is None else offsets
        if given is None or (local_offsets is not None and offsets is not None):
            raise LayoutError("LocalShardsWrapper: give local_offsets, or offsets, which is the same; one of the two.")
        shards = list(local_shards)
        begins = _checked_offsets(shards, given)
        boxes = [Box(at, tuple(shard.shape)) for at, shard in zip(begins, shards, strict=True)]
        tiling = tiling_of(boxes)
        wrapper = tiling.wrap(_joined(shards, tiling))
        wrapper._given = shards
        return wrapper  # type: ignore[return-value]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented
        kwargs = kwargs or {}
        special = _SPECIAL.get(func)
        if special is not None:
            return special(*args, **kwargs)
        if getattr(func, "__name__", "") in REFUSED:
            raise RuleError(_left_behind(name_of(func)))
        with DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
            if type(out) is not Tensor or not _stays_in_place(func):
                return out
            operands = torch.utils._pytree.tree_leaves((args, kwargs))
            if any(out is x for x in operands):  # a plain tensor that was changed in place
                return out
            tilings = {x._tiling for x in operands if isinstance(x, LocalShardsWrapper)}
            if len(tilings) > 1 or out.shape != next(iter(tilings)).bounds.sizes:
                return out
        return tilings.pop().wrap(out)

    # ---- its shards -------------------------------------------------------------------------------------------------

    def local_shards(self) -> list[Tensor]:
        """The shards, in the order given: the tensors it was made of, or views that share its memory."""
        fresh = self.requires_grad and self.is_leaf  # gradients of what is done with the shards are to arrive here
        if self._given is not None and not fresh:
            return list(self._given)
        with DisableTorchFunctionSubclass():
            return self._tiling.shards(_as_subclass(self, Tensor))

    def local_sizes(self) -> list[torch.Size]:
        """The shapes of the shards."""
        return [torch.Size(box.sizes) for box in self._tiling.boxes]

    def local_offsets(self) -> list[torch.Size]:
        """Where the shards begin in the whole tensor."""
        return [torch.Size(box.offsets) for box in self._tiling.boxes]

    @property
    def shards(self) -> list[Tensor]:
        """The same as `local_shards()`."""
        return self.local_shards()

    @property
    def shard_sizes(self) -> list[torch.Size]:
        """The same as `local_sizes()`."""
        return self.local_sizes()

    @property
    def shard_offsets(self) -> list[torch.Size]:
        """The same as `local_offsets()`."""
        return self.local_offsets()

    @property
    def tiling(self) -> Tiling:
        """Where the shards stand, as boxes."""
        return self._tiling

    def is_empty_shard(self) -> bool:
        """Whether it has no element."""
        return not prod(self._tiling.bounds.sizes)

    # ---- for torch.distributed.checkpoint ---------------------------------------------------------------------------

    @property
    def local_chunks(self) -> list[Any]:
        """A `ChunkStorageMetadata` of torch for each shard."""
        return collectives.chunks(self._tiling.boxes)

    def storage_metadata(self) -> Any:
        """The `TensorStorageMetadata` of torch: properties, the shape of this local tensor, and a chunk a shard."""
        return collectives.storage_metadata(self, self._tiling.bounds.sizes, self._tiling.boxes)

    @property
    def storage_meta(self) -> Any:
        """The same as `storage_metadata()`."""
        return self.storage_metadata()

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        """What torch's checkpoints write; `object` is what has the shape of the whole tensor.

        Raises:
            LayoutError: that is the wrapper itself, and its shards are but a part of the whole.
        """
        whole, bounds = tuple(object.shape), self._tiling.bounds
        if any(a + n > size for a, n, size in zip(*bounds, whole, strict=True)):
            raise LayoutError(
                f"{fqn}: the shards of this LocalShardsWrapper stand at {bounds} of a tensor whose shape it does not "
                f"know, so it cannot be saved by itself. Fix: save DTensor.from_local(wrapper, mesh, placements)."
            )
        return collectives.write_items(fqn, self, whole, self._tiling.boxes)

    def __create_chunk_list__(self) -> list[Any]:
        return self.local_chunks

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return shard_at(index, self._tiling.boxes, self.local_shards())

    # ---- as a Python object -----------------------------------------------------------------------------------------

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch.no_grad():
            shards = zip(self._tiling.boxes, self.local_shards(), strict=True)
            return f"LocalShardsWrapper(shape={tuple(self.shape)}" + "".join(f", {b}: {s}" for b, s in shards) + ")"

    def __deepcopy__(self, memo: dict[int, Any]) -> "LocalShardsWrapper":
        if id(self) not in memo:
            if not self.is_leaf:
                raise RuntimeError("Only leaf tensors can be deep-copied; copy a detached one.")
            copy = _rebuilt(self.detach().clone(), self._tiling, self.requires_grad, hasattr(self, "_is_param"))
            if self.grad is not None and not isinstance(self, torch.nn.Parameter):  # as in torch
                copy.grad = self.grad.clone()
            memo[id(self)] = copy
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, proto: Any) -> Any:
        with DisableTorchFunctionSubclass():
            joined = _as_subclass(self.detach(), Tensor)
        return _rebuilt, (joined, self._tiling, self.requires_grad, hasattr(self, "_is_param"))

    def set_(self, *args: Any, **kwargs: Any) -> NoReturn:  # which torch asks no subclass about
        raise RuleError(_left_behind("set_"))

    __hash__ = torch.Tensor.__hash__


def shard_at(index: Any, boxes: Sequence[Box], shards: Sequence[Tensor]) -> Tensor:
    """The shard that torch's checkpoint means by a `MetadataIndex`, outside of autograd.

    Raises:
        LayoutError: none begins there.
    """
    for box, shard in zip(boxes, shards, strict=True):
        if tuple(index.offset) == box.offsets and box.numel:
            return shard.detach()
    raise LayoutError(
        f"{index.fqn}: no shard of this rank begins at {index.offset}, only {', '.join(map(str, boxes))}."
    )


def _rebuilt(joined: Tensor, tiling: Tiling, requires_grad: bool, is_param: bool) -> LocalShardsWrapper:
    wrapper = tiling.wrap(joined).requires_grad_(requires_grad)
    if is_param:
        wrapper._is_param = True
    return wrapper  # type: ignore[return-value]


def _checked_offsets(shards: Sequence[Any], offsets: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """The offsets as integers."""
    where = "LocalShardsWrapper"
    for number, shard in enumerate(shards):
        if not isinstance(shard, Tensor) or isinstance(shard, DTensor | LocalShardsWrapper) or shard.is_sparse:
            raise LayoutError(f"{where}: shard {number} must be a plain dense tensor, got {type(shard).__name__}.")
        if any(shard is other for other in shards[:number]):
            raise LayoutError(f"{where}: shard {number} is a tensor that was given before. Fix: clone() it.")
    if len(offsets) != len(shards):
        raise LayoutError(f"{where}: every shard has offsets, got {len(shards)} shards and {len(offsets)} offsets.")
    for what in ("dtype", "device", "ndim"):
        found = [str(getattr(shard, what)) for shard in shards]
        if len(set(found)) > 1:
            raise LayoutError(f"{where}: the shards of a tensor have one {what}, got {', '.join(found)}.")
    frozen = []
    for number, (given, shard) in enumerate(zip(offsets, shards, strict=True)):
        at = tuple(map(index, given))
        if len(at) != shard.ndim or min(at, default=0) < 0:
            raise LayoutError(
                f"{where}: shard {number} of shape {tuple(shard.shape)} needs {shard.ndim} offsets, none negative, "
                f"got {at}."
            )
        frozen.append(at)
    return frozen


# ---- memory ---------------------------------------------------------------------------------------------------------


def _joined(shards: list[Tensor], tiling: Tiling) -> Tensor:
    """One tensor of all shards, which see what becomes of it."""
    if not shards:
        return torch.empty(tiling.bounds.sizes)
    if len(shards) == 1:
        return shards[0]
    found = _lying_together(shards, tiling)
    if found is not None:
        return found
    joined = shards[0].new_empty(tiling.bounds.sizes)
    for place, shard in zip(tiling.places(), shards, strict=True):
        if place is not None:
            joined[place] = shard
    _point_to(shards, joined.detach(), tiling)
    return joined


def _point_to(shards: Sequence[Tensor], joined: Tensor, tiling: Tiling) -> None:
    """Let the shards have their memory in `joined`, save what autograd computed."""
    for place, shard in zip(tiling.places(), shards, strict=True):
        if place is not None and shard.is_leaf:
            shard.data = joined[place]


def _lying_together(shards: Sequence[Tensor], tiling: Tiling) -> Tensor | None:
    """The part of their common memory that the shards are, if they lie there as they stand in the whole."""
    pairs = [(shard, place) for shard, place in zip(shards, tiling.places(), strict=True) if place is not None]
    if not pairs or any(shard.requires_grad or 0 in shard.stride() for shard, _ in pairs):
        return None
    first, strides = pairs[0][0], pairs[0][0].stride()
    begins = {
        shard.storage_offset() - sum(part.start * stride for part, stride in zip(place, strides, strict=True))
        for shard, place in pairs
    }
    storages = {(shard.untyped_storage().data_ptr(), shard.untyped_storage()._cdata) for shard, _ in pairs}
    if len(begins) > 1 or len(storages) > 1 or any(shard.stride() != strides for shard, _ in pairs):
        return None
    begin = begins.pop()
    reach = begin + sum((n - 1) * stride for n, stride in zip(tiling.bounds.sizes, strides, strict=True))
    if begin < 0 or (reach + 1) * first.element_size() > first.untyped_storage().nbytes():
        return None
    return first.as_strided(tiling.bounds.sizes, strides, begin)


# ---- functions ------------------------------------------------------------------------------------------------------


def _stays_in_place(func: Any) -> bool:
    rule = rule_of(func)
    return (rule is not None and rule.rows in ELEMENTWISE) or getattr(func, "__name__", "") in IN_ORDER


def _left_behind(name: str) -> str:
    return (
        f"{name}() would leave the shards of a LocalShardsWrapper behind. Fix: use a function that gives a new tensor."
    )


def _equal(a: Tensor, b: Tensor) -> bool:
    """Of two wrappers the shards must also stand at the same places."""
    alike = not (isinstance(a, LocalShardsWrapper) and isinstance(b, LocalShardsWrapper)) or a._tiling == b._tiling
    with DisableTorchFunctionSubclass():
        return alike and torch.equal(a, b)


def _read_data(x: LocalShardsWrapper) -> LocalShardsWrapper:
    with DisableTorchFunctionSubclass():
        return x._tiling.wrap(x.data)


def _write_data(x: LocalShardsWrapper, value: Tensor) -> None:
    """Other memory: the shards that were given go along."""
    if value.shape != x._tiling.bounds.sizes:
        raise LayoutError(f".data = needs a tensor of shape {x._tiling.bounds.sizes}, got {tuple(value.shape)}.")
    with DisableTorchFunctionSubclass():
        joined = _as_subclass(value.detach(), Tensor)
        x.data = joined
        _point_to(x._given or (), joined, x._tiling) if x._given else None


_SPECIAL: dict[Any, Any] = {
    torch.equal: _equal,
    Tensor.equal: _equal,
    Tensor.data.__get__: _read_data,  # type: ignore[attr-defined]
    Tensor.data.__set__: _write_data,  # type: ignore[attr-defined]
}
