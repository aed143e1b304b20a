"""Which memory the tensors of one rank take, and tensors that take none.

    with Memory(allocate=False) as memory:
        x = torch.zeros(1 << 20, 1 << 20)   # 4 TiB, of which nothing is allocated
        y = x @ x                            # has a shape, no values
    memory.log                               # [(0, 1 << 42), (1, 1 << 42)]

A tensor without values is an ordinary tensor on the CPU, so everything that depends on devices, dtypes and shapes is
as in a run. Its storage is address space that is never touched: ops that would read or write it run on the meta device.
"""

import mmap
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, Self
from unittest.mock import patch
from weakref import ref

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.errors import ShardwiseError
from shardwise.rules.row import Args, Kwargs
from shardwise.tensor.dispatch.fallback import Wrapper
from shardwise.trace import comm_trace

aten = torch.ops.aten
# Of the local tensor, also of a DTensor.
_size = torch._C.TensorBase.size
_stride = torch._C.TensorBase.stride
LARGE = 1 << 22  # elements: a tensor of integers with more has no values
_RESERVED = 1 << 44  # bytes of address space
_NORESERVE = 0x4000  # of Linux: count nothing of it as used

Result = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, dtype


@dataclass
class Block:
    """One storage.

    Attributes:
        number: in order of creation.
        size: in bytes, now.
        has_values: False if its memory is not allocated, or depends on memory that is not.
        redistributed: allocated by a redistribution or another exchange.
    """

    number: int
    size: int
    has_values: bool
    redistributed: bool
    storage: "ref[torch.UntypedStorage]"


class Memory(TorchDispatchMode):
    """While it is entered, all storages that the ops of this thread make or use, and what was allocated and freed.

    Args:
        allocate: whether ops run. If not, tensors of floating dtype with dims have no values, nor have large ones of
            other dtypes, nor what is computed from such tensors.

    Attributes:
        log: (block, bytes) in order; what was freed is negative.
    """

    def __init__(self, allocate: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allocate = allocate
        self.blocks: dict[int, Block] = {}  # by storage
        self.log: list[tuple[int, int]] = []
        self.redistributed: set[int] = set()
        self._count = 0
        self._results: dict[object, object] = {}
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        _entered.memory = self
        self._patches.enter_context(patch.object(torch.UntypedStorage, "resize_", _resize))
        for name in ("tolist", "numpy"):
            self._patches.enter_context(patch.object(Tensor, name, _reading(name)))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._patches.close()
        _entered.memory = None

    # ---- storages ---------------------------------------------------------------------------------------------

    def block_of(self, x: Tensor) -> Block | None:
        """The block of a tensor; one that is new here is added to the log. None for a sparse tensor."""
        if x.layout is not torch.strided or x.device.type == "meta":
            return None
        storage = x.untyped_storage()
        found = self.blocks.get(storage._cdata)
        return found if found is not None else self._add(storage, storage.nbytes(), True)

    def _add(self, storage: torch.UntypedStorage, size: int, has_values: bool) -> Block:
        key, number = storage._cdata, self._count
        self._count += 1

        def freed(_: object) -> None:
            block = self.blocks.pop(key)
            self.log.append((number, -block.size))

        redistributed = comm_trace.current_purpose() is not None or comm_trace.current_event() is not None
        block = self.blocks[key] = Block(number, size, has_values, redistributed, ref(storage, freed))
        if redistributed:
            self.redistributed.add(number)
        self.log.append((number, size))
        return block

    def resize(self, storage: torch.UntypedStorage, size: int) -> bool:
        """Note that a storage is resized; whether it has no memory, so that there is no more to do."""
        block = self.blocks.get(storage._cdata)
        if block is None:
            return False
        self.log.append((block.number, size - block.size))
        self.redistributed.add(block.number)
        block.size = size
        return not block.has_values and not self.allocate

    # ---- ops --------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: OpOverload, types: Iterable[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if any(issubclass(kind, Wrapper) for kind in types):
            return NotImplemented  # decomposed first; its local ops come here
        kwargs = kwargs or {}
        with DisableTorchFunctionSubclass():
            if func.is_view and args and isinstance(args[0], Tensor):
                self.block_of(args[0])
                return func(*args, **kwargs)
            operands = [
                block for x in _tensors((args, tuple(kwargs.values()))) if (block := self.block_of(x)) is not None
            ]
            if self.allocate or func in _METADATA:
                out = func(*args, **kwargs)
            elif func in _FACTORIES or (not operands and any(a.name == "device" for a in func._schema.arguments)):
                out = self._made(func, args, kwargs)
            elif all(block.has_values for block in operands):
                out = func(*args, **kwargs)
            else:
                out = self._without_values(func, args, kwargs)
            for x in _tensors((out,)):
                self.block_of(x)
        return out

    def _made(self, func: OpOverload, args: Args, kwargs: Kwargs) -> object:
        """The result of an op that reads nothing: with values if it is small or has integers."""
        device = kwargs.get("device") or next((x.device for x in _tensors(args)), "cpu")
        if torch.device(device).type == "meta":
            return func(*args, **kwargs)
        results = self._results_of(func, args, kwargs)
        if isinstance(results, Described):
            shape, _, dtype = results.meta
            if shape and (dtype.is_floating_point or dtype.is_complex or prod(shape) > LARGE):
                return self._new(results.meta)
        return func(*args, **kwargs)

    def _without_values(self, func: OpOverload, args: Args, kwargs: Kwargs) -> object:
        schema = func._schema
        if func is aten._local_scalar_dense.default:
            if args[0].dtype == torch.bool:  # as of a check that all values are finite
                return False
            raise no_values("a number is read")
        if schema.is_mutable:
            written = _written(schema, args, kwargs)
            for x in _tensors(list(written.values())):
                block = self.block_of(x)
                if block is not None:
                    block.has_values = False
            if all(r.alias_info is not None and r.alias_info.is_write for r in schema.returns):
                found = list(written.values())[: len(schema.returns)]
                return None if not found or not schema.returns else found[0] if len(found) == 1 else tuple(found)
        return _filled(self._results_of(func, args, kwargs), self._new)

    def _new(self, result: Result) -> Tensor:
        """A tensor without values."""
        shape, strides, dtype = result
        extent = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        if not extent:
            return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
        size = extent * dtype.itemsize
        storage = torch.frombuffer(_region(), dtype=torch.uint8, count=size).untyped_storage()
        self._add(storage, size, has_values=False)
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape, strides)

    def _results_of(self, func: OpOverload, args: Args, kwargs: Kwargs) -> object:
        """Shapes, strides and dtypes of the results, found on the meta device."""
        key = func, _key(args), _key(kwargs)
        if key not in self._results:
            metas, named = map(_as_meta, args), {k: _as_meta(v) for k, v in kwargs.items()}
            if any(a.name == "device" for a in func._schema.arguments):
                named["device"] = torch.device("meta")
            try:
                self._results[key] = _described(func(*metas, **named))
            except NotImplementedError as error:
                raise no_values(f"the result of {func} depends on values") from error
        return self._results[key]


@cache
def _region() -> mmap.mmap:
    """The address space of all tensors without values."""
    return mmap.mmap(-1, _RESERVED, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)


class _Entered(threading.local):
    memory: Memory | None = None


_entered = _Entered()
_METADATA = {aten.set_.source_Storage_storage_offset, aten.set_.source_Tensor, aten.set_.source_Storage}
_FACTORIES = {
    op.default for op in (
        aten.new_empty, aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty_strided, aten.empty_like,
        aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like,
    )
}  # fmt: skip


@dataclass(frozen=True)
class Described:
    """A tensor among results."""

    meta: Result


def no_values(what: str) -> ShardwiseError:
    return ShardwiseError(
        f"A simulation has no values, but {what}. Fix: leave out of the step what reads values, such as logging; or "
        f"pass what depends on them as a plain number."
    )


_true_resize: Callable[[Any, int], Any] = torch.UntypedStorage.resize_


def _resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    memory = _entered.memory
    if memory is None or not memory.resize(storage, size):
        _true_resize(storage, size)
    return storage


def _reading(name: str) -> Callable[..., Any]:
    read = getattr(Tensor, name)

    def checked(x: Tensor, *args: object, **kwargs: object) -> object:
        memory = _entered.memory
        if memory is not None:
            with DisableTorchFunctionSubclass():
                block = memory.block_of(x)
            if block is not None and not block.has_values:
                raise no_values(f"{name}() reads them")
        return read(x, *args, **kwargs)

    return checked


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _written(schema: torch.FunctionSchema, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """The arguments that an op changes."""
    given = {a.name: x for a, x in zip(schema.arguments, args, strict=False)} | dict(kwargs)
    return {
        a.name: given[a.name] for a in schema.arguments
        if a.alias_info is not None and a.alias_info.is_write and a.name in given
    }  # fmt: skip


def _key(value: object) -> object:
    if isinstance(value, Tensor):
        return Tensor, _size(value), _stride(value), value.dtype
    if isinstance(value, list | tuple):
        return type(value), *map(_key, value)
    if isinstance(value, dict):
        return tuple((k, _key(v)) for k, v in value.items())
    return type(value), value


def _as_meta(value: object) -> object:
    if isinstance(value, Tensor):
        return torch.empty_strided(_size(value), _stride(value), dtype=value.dtype, device="meta")
    if isinstance(value, list | tuple):
        return [_as_meta(x) for x in value]
    return value


def _described(value: object) -> object:
    if isinstance(value, Tensor):
        return Described((tuple(value.shape), value.stride(), value.dtype))
    return type(value)(map(_described, value)) if isinstance(value, list | tuple) else value


def _filled(value: object, new: Callable[[Result], Tensor]) -> object:
    if isinstance(value, Described):
        return new(value.meta)
    return type(value)(_filled(x, new) for x in value) if isinstance(value, list | tuple) else value
