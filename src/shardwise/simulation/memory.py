"""The memory of one rank's tensors and its roles, and tensors without memory.

    with Memory(allocate=False) as memory:
        x = torch.zeros(1 << 20, 1 << 20)   # 4 TiB, of which nothing is allocated
    memory.log                               # [(0, 1 << 42)]

A tensor without values is an ordinary CPU tensor, also where the program asks for another device. So everything that
depends on dtypes and shapes is as in a run. Its storage is address space that is never touched: ops that would read or
write it run on the meta device.
"""

import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self
from unittest.mock import patch
from weakref import ref

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch._ops import OpOverload
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise._rules.row import Args, Kwargs
from shardwise._tensor.autograd.buckets import raw_grad
from shardwise._tensor.dispatch.fallback import Wrapper
from shardwise._tensor.dtensor import DTensor
from shardwise._trace import comm_trace
from shardwise._trace.user_stack import StackFrame, frames_of
from shardwise.errors import ShardwiseError

aten = torch.ops.aten
# Of the local tensor, also of a DTensor.
_size = torch._C.TensorBase.size
_stride = torch._C.TensorBase.stride
CPU = torch.device("cpu")
LIBRARY = str(Path(__file__).parents[1]) + os.sep
LARGE = 1 << 22  # elements: a tensor of integers with more has no values
_RESERVED = 1 << 44  # bytes of address space
_NORESERVE = 0x4000  # of Linux: count nothing of it as used

PARAMETERS, GRADIENTS, OPTIMIZER, BUFFERS = "parameters", "gradients", "optimizer states", "buffers of modules"
REDISTRIBUTION, ACTIVATIONS = "redistribution", "activations"
ROLES = (PARAMETERS, GRADIENTS, OPTIMIZER, BUFFERS, REDISTRIBUTION, ACTIVATIONS)


@dataclass(slots=True)
class Block:
    """One storage."""

    number: int  # in order of creation
    size: int  # in bytes, now
    has_values: bool  # False if its memory is not allocated, or depends on memory that is not
    storage: "ref[torch.UntypedStorage]"


class Memory(TorchDispatchMode):
    """While it is entered, records the storages that ops of this thread create or use, allocations and frees.

    Without `allocate`, tensors of floating dtype with dims have no values, nor have large ones of other dtypes, nor
    results computed from such tensors.
    """

    def __init__(self, allocate: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allocate = allocate
        self.blocks: dict[int, Block] = {}  # by storage
        self.log: list[tuple[int, int]] = []  # (block, bytes) in order; what was freed is negative
        self.redistributed: set[int] = set()  # the blocks of redistributions and other exchanges
        self.conditions: dict[StackFrame, None] = {}  # where conditions on missing values were False
        self._count = 0
        self._results: dict[object, object] = {}
        self._patches = ExitStack()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first op imports the compiler, which takes seconds

    def __enter__(self) -> Self:
        _entered.memory = self
        self._patches.enter_context(patch.object(torch.UntypedStorage, "resize_", _resize))
        if not self.allocate:  # so that a mesh of GPUs needs none
            self._patches.enter_context(patch.object(torch.cuda, "_lazy_init", lambda: None))
            self._patches.enter_context(patch.object(Tensor, "cuda", lambda x, *_, **__: x))
            for owner, name in ((Tensor, "to"), (torch, "tensor"), (torch, "as_tensor")):
                self._patches.enter_context(patch.object(owner, name, _on_cpu(getattr(owner, name))))
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
        """The block of a tensor; a new one is added to the log. None for a sparse tensor."""
        if x.layout is not torch.strided:
            return None
        storage = x.untyped_storage()
        found = self.blocks.get(storage._cdata)
        if found is None and not x.is_meta:
            found = self._add(storage, storage.nbytes(), True)
        return found

    def _add(self, storage: torch.UntypedStorage, size: int, has_values: bool) -> Block:
        key, number = storage._cdata, self._count
        self._count += 1

        def freed(_: object) -> None:
            block = self.blocks.pop(key)
            self.log.append((number, -block.size))

        if comm_trace.current.rank.purpose is not None or comm_trace.current_event() is not None:
            self.redistributed.add(number)
        block = self.blocks[key] = Block(number, size, has_values, ref(storage, freed))
        self.log.append((number, size))
        return block

    def resize(self, storage: torch.UntypedStorage, size: int) -> bool:
        """Record that a storage is resized; True if it has no memory, so that no more is to be done."""
        block = self.blocks.get(storage._cdata)
        if block is None:
            return False
        self.log.append((block.number, size - block.size))
        self.redistributed.add(block.number)
        block.size = size
        return not block.has_values and not self.allocate

    def has_values(self, x: Tensor) -> bool:
        """Whether a tensor has the values of a run; `_rules.local_tensors.has_values` calls this."""
        block = self.block_of(x)
        return self.allocate or block is None or block.has_values

    # ---- ops --------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: OpOverload, types: Iterable[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if types and any(issubclass(kind, Wrapper) for kind in types):
            return NotImplemented  # decomposed first; its local ops come here
        kwargs = kwargs or {}
        traits = _traits(func)
        if not self.allocate and traits.takes_device and (device := kwargs.get("device")) is not None:
            kwargs = {**kwargs, "device": _stand_in(device)}
        with DisableTorchFunctionSubclass():
            if traits.is_view and args and isinstance(args[0], Tensor):
                self.block_of(args[0])
                return func(*args, **kwargs)
            operands = [block for x in tensors_in([*args, *kwargs.values()]) if (block := self.block_of(x)) is not None]
            reads_nothing = func in _FACTORIES or (not operands and traits.takes_device)
            if self.allocate or func in _METADATA or not (operands or reads_nothing):  # the last of meta tensors
                out = func(*args, **kwargs)
            elif not reads_nothing and not all(block.has_values for block in operands):
                return self._without_values(func, traits, args, kwargs)
            elif reads_nothing or traits.may_broadcast:
                out = self._with_values_if_small(func, args, kwargs, reads_nothing)
            else:
                out = func(*args, **kwargs)
            for x in tensors_in([out]):
                self.block_of(x)
        return out

    def _with_values_if_small(self, func: OpOverload, args: Args, kwargs: Kwargs, reads_nothing: bool) -> object:
        """The result of an op on values, or without inputs; it has values if these are integers.

        A large result, such as a mask of queries and keys, has no values.
        """
        device = kwargs.get("device") or next(iter([x.device for x in tensors_in(args)]), "cpu")
        if not reads_nothing or torch.device(device).type != "meta":
            found = self._results_of(func, args, kwargs)
            if isinstance(found, Tensor):
                without = reads_nothing and found.ndim and (found.is_floating_point() or found.is_complex())
                if without or found.numel() > LARGE:
                    return self._new(found)
        return func(*args, **kwargs)

    def _without_values(self, func: OpOverload, traits: "Traits", args: Args, kwargs: Kwargs) -> object:
        if func is aten._local_scalar_dense.default:
            if args[0].dtype == torch.bool:  # as of a check that all values are finite
                if (where := _reader()) is not None:
                    self.conditions[where] = None
                return False
            raise no_values("a number is read")
        if traits.written:
            named = dict(enumerate(args)) | kwargs
            written = [named[key] for pair in traits.written for key in pair if key in named]
            for x in tensors_in(written):
                block = self.block_of(x)
                if block is not None:
                    block.has_values = False
            if traits.returns_written:
                found = written[: traits.num_returns]
                return None if not found else found[0] if len(found) == 1 else tuple(found)
        return _mapped(self._new, self._results_of(func, args, kwargs))

    def _new(self, meta: Tensor) -> Tensor:
        """A tensor without values, with the shape, strides and dtype of a meta tensor."""
        shape, strides, dtype = meta.shape, meta.stride(), meta.dtype
        extent = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        if not extent:
            return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
        x = torch.frombuffer(_region(), dtype=dtype, count=extent)
        self._add(x.untyped_storage(), extent * dtype.itemsize, has_values=False)
        return x.as_strided_(shape, strides)

    def _results_of(self, func: OpOverload, args: Args, kwargs: Kwargs) -> object:
        """The results as meta tensors."""
        key = func, _key(args), _key(kwargs)
        found = self._results.get(key)
        if found is None:
            metas, named = _mapped(_as_meta, args), {k: _mapped(_as_meta, v) for k, v in kwargs.items()}
            if _traits(func).takes_device:
                named["device"] = torch.device("meta")
            try:
                found = self._results[key] = func(*metas, **named)
            except NotImplementedError as error:
                raise no_values(f"the result of {func} depends on values") from error
        return found


class Roles:
    """The roles of blocks, by their number. Blocks without one are activations and temporary results."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.of: dict[int, str] = {}
        self._modules: dict[int, nn.Module] = {}
        self._optimizers: dict[int, torch.optim.Optimizer] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record modules and optimizers that run inside, and the gradients that optimizers see."""
        hooks = [
            register_module_forward_pre_hook(lambda module, _: self._modules.update({id(module): module})),
            register_optimizer_step_pre_hook(self._gradients),
            register_optimizer_step_post_hook(self._gradients),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _gradients(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._optimizers[id(optimizer)] = optimizer
        self._note_gradients(_parameters_of(optimizer))

    def _note_gradients(self, parameters: Iterable[Tensor]) -> None:
        with DisableTorchFunctionSubclass():
            for p in parameters:
                self._note(GRADIENTS, [raw_grad.__get__(p), getattr(p, "_reduced_grad", None)])

    def _note(self, role: str, tensors: Iterable[object]) -> None:
        with DisableTorchFunctionSubclass():
            for x in tensors:
                block = self.memory.block_of(x) if isinstance(x, Tensor) else None
                if block is not None:
                    self.of.setdefault(block.number, role)

    def find(self) -> None:
        """Record the blocks that modules and optimizers hold."""
        modules = {id(part): part for module in self._modules.values() for part in module.modules()}.values()
        parameters = [p for module in modules for p in module._parameters.values() if p is not None]
        self._note(PARAMETERS, parameters)
        self._note(BUFFERS, [x for module in modules for x in module._buffers.values()])
        fused = [x for module in modules if (x := getattr(module, "fused_optimizer", None)) is not None]
        self._optimizers.update({id(optimizer): optimizer for optimizer in fused})
        for optimizer in self._optimizers.values():
            self._note(PARAMETERS, _parameters_of(optimizer))
        self._note_gradients(parameters)
        for optimizer in self._optimizers.values():
            self._note(OPTIMIZER, pytree.tree_leaves(list(optimizer.state.values())))
        for number in self.memory.redistributed:
            self.of.setdefault(number, REDISTRIBUTION)

    def at_peak(self, first: int) -> dict[str, int]:
        """Bytes by role at the peak of memory, from entry `first` of the log on."""
        now = dict.fromkeys(ROLES, 0)
        found, total, most = dict(now), 0, 0
        for count, (number, size) in enumerate(self.memory.log, 1):
            now[self.of.get(number, ACTIVATIONS)] += size
            total += size
            if count >= first and total > most:
                found, most = dict(now), total
        return found


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@cache
def _region() -> mmap.mmap:
    """The address space of all tensors without values."""
    try:
        return mmap.mmap(-1, _RESERVED, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    except OSError as error:
        raise ShardwiseError(
            f"A simulation reserves {_RESERVED >> 40} TiB of addresses, no memory, which the system refuses: {error}. "
            f"Fix: lift the limit of this process: ulimit -v unlimited."
        ) from error


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


class Traits(NamedTuple):
    """The traits of an op, from its schema."""

    is_view: bool
    takes_device: bool
    may_broadcast: bool
    written: tuple[tuple[int, str], ...]  # positions and names of the arguments that it changes
    returns_written: bool  # those arguments, or nothing
    num_returns: int


@cache
def _traits(func: OpOverload) -> Traits:
    schema = func._schema
    written = tuple((i, x.name) for i, x in enumerate(schema.arguments) if x.alias_info and x.alias_info.is_write)
    return Traits(
        is_view=func.is_view or func is aten._unsafe_view.default,  # its result has the memory of its operand, too
        takes_device=any(x.name == "device" for x in schema.arguments),
        may_broadcast=torch.Tag.pointwise in func.tags and not written,
        written=written,
        returns_written=all(x.alias_info is not None and x.alias_info.is_write for x in schema.returns),
        num_returns=len(schema.returns),
    )


def no_values(what: str) -> ShardwiseError:
    return ShardwiseError(
        f"A simulation has no values, but {what}. Fix: leave out of the step what reads values, such as logging, a "
        f"GradScaler or a line search (L-BFGS: another optimizer); or pass what depends on them as a plain number; or "
        f"look up fewer ids: tensors of more than {LARGE >> 20} Mi integers have no values."
    )


_true_resize: Callable[[Any, int], Any] = torch.UntypedStorage.resize_


def _reader() -> StackFrame | None:
    """The frame where the program reads a value; None if the library does, for a check."""
    passing = {__file__, str(Path(__file__).with_name("clock.py")), DTensor.item.__code__.co_filename}
    for frame in frames_of(sys._getframe(1)):
        if frame.is_user_code:
            return frame
        if frame.file.startswith(LIBRARY) and frame.file not in passing:
            return None
    return None


def _resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    memory = _entered.memory
    if memory is None or not memory.resize(storage, size):
        _true_resize(storage, size)
    return storage


def _on_cpu(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function with the CPU as its device: torch without CUDA refuses others before any op."""

    def call(*args: object, **kwargs: object) -> Tensor:
        return function(*map(_stand_in, args), **{name: _stand_in(value) for name, value in kwargs.items()})

    return call


def _stand_in(value: object) -> object:
    """The CPU in place of another device; other values unchanged."""
    return CPU if isinstance(value, str | torch.device) and torch.device(value).type != "meta" else value


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


def tensors_in(values: Iterable[object]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
    return found


def _key(value: object) -> object:
    if isinstance(value, Tensor):
        return Tensor, _size(value), _stride(value), value.dtype
    if isinstance(value, list | tuple):
        return type(value), *map(_key, value)
    if isinstance(value, dict):
        return tuple((k, _key(v)) for k, v in value.items())
    return type(value), value


def _as_meta(x: Tensor) -> Tensor:
    return torch.empty_strided(_size(x), _stride(x), dtype=x.dtype, device="meta")


def _mapped(fn: Callable[[Tensor], Tensor], value: object) -> Any:
    """The value with `fn` applied to each tensor in it."""
    if isinstance(value, Tensor):
        return fn(value)
    return type(value)([_mapped(fn, x) for x in value]) if isinstance(value, list | tuple) else value
