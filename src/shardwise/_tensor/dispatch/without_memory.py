"""Runs of ops without memory, for shapes, errors and saved tensors; modes do not see them.

Torch's meta device ignores autocast: `F.linear` of float32 gives float32, and saves its operands, not casts of them.
Fake tensors respect it, and cost more, so they are used only under autocast. The user's `TorchDispatchMode`s, such as
counters of FLOPs, see the ops that this rank runs, and no others.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from shardwise._layout import Layout
from shardwise._rules.row import Args, Kwargs
from shardwise._tensor.dtensor import DTensor
from shardwise._trace.capture_hooks import is_capturing, tracing_paused

# ---- tensors without memory -------------------------------------------------------------------------------------


def global_on_meta(layout: Layout, dtype: torch.dtype) -> Tensor:
    """The global tensor on torch's meta device, which has no memory."""
    if layout.strides is None:
        return torch.empty(layout.shape, dtype=dtype, device="meta")
    return torch.empty_strided(layout.shape, layout.strides, dtype=dtype, device="meta")


def with_meta_device(kwargs: Kwargs) -> Kwargs:
    """Keyword arguments of a call on the meta device: another device would allocate, and draw random numbers."""
    return {**kwargs, "device": "meta"} if "device" in kwargs else kwargs


def on_meta(args: Args, kwargs: Kwargs, device: str) -> tuple[Args, Kwargs, list[Tensor]]:
    """The arguments with global tensors without memory for DTensors, and these tensors."""
    metas: list[Tensor] = []

    def meta(x: object) -> object:
        if type(x) is DTensor:
            metas.append(_new_meta(x._layout.shape, x._layout.strides, x.dtype, x.requires_grad, device))
            return metas[-1]
        # Calls with fake tensors take a plain tensor as it is.
        return x.to("meta") if isinstance(x, Tensor) and device == "meta" else x

    args, kwargs = pytree.tree_map(meta, (args, with_meta_device(kwargs)))
    return args, kwargs, metas


def _new_meta(
    shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: torch.dtype, requires_grad: bool, device: str
) -> Tensor:
    """A tensor for calls without memory; not a leaf, which no op may change in place."""
    with torch.enable_grad():
        if strides is None:
            leaf = torch.empty(shape, dtype=dtype, device=device, requires_grad=requires_grad)
            return leaf.view_as(leaf).clone()
        length = 1 + sum(max(n - 1, 0) * stride for n, stride in zip(shape, strides, strict=True))
        memory = torch.empty(length, dtype=dtype, device=device, requires_grad=requires_grad)
        return memory.clone().as_strided(shape, strides)


class Autocast(NamedTuple):
    """Whether autocast is on for a device type, and to which dtype."""

    device_type: str
    dtype: torch.dtype | None

    @classmethod
    def of(cls, device_type: str) -> "Autocast":
        """The autocast of this thread."""
        on = torch.is_autocast_enabled(device_type)
        return cls(device_type, torch.get_autocast_dtype(device_type) if on else None)

    @contextmanager
    def without_memory(self) -> Iterator[str]:
        """Yield the device for tensors without memory; calls inside return what calls with memory return."""
        if self.dtype is None:
            yield "meta"
            return
        from torch._subclasses.fake_tensor import FakeTensorMode  # takes a second to import

        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode, torch.autocast(self.device_type, self.dtype):
            yield self.device_type


# ---- the user's modes -------------------------------------------------------------------------------------------


def unobserved() -> AbstractContextManager[None]:
    """Hide the ops inside from modes and captured graphs: they only find shapes, or saved tensors."""
    return _unobserved() if torch._C._len_torch_dispatch_stack() or is_capturing() else _NOTHING_OBSERVES


_NOTHING_OBSERVES = nullcontext()


@contextmanager
def _unobserved() -> Iterator[None]:
    with tracing_paused(), without_modes():
        yield


@contextmanager
def without_modes() -> Iterator[None]:
    """Hide the ops inside from modes: they only find shapes, or saved tensors."""
    modes = [_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


@contextmanager
def hidden_from_modes(wrapper: type) -> Iterator[None]:
    """Hide ops on wrappers of this class from modes; `__torch_dispatch__` runs them."""
    if not torch._C._len_torch_dispatch_stack():
        yield
        return
    with _PassingOn(wrapper):
        yield


class _PassingOn(TorchDispatchMode):
    """Passes ops on to outer modes, except ops on wrappers."""

    def __init__(self, wrapper: type) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.wrapper = wrapper

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise the first op imports the compiler, which takes seconds

    def __torch_dispatch__(
        self, func: Callable[..., object], types: Iterable[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        return NotImplemented if self.wrapper in types else func(*args, **(kwargs or {}))
