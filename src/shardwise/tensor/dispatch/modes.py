"""The user's `TorchDispatchMode`s, such as counters of FLOPs, see the ops that this rank runs, and no others."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from shardwise.rules.row import Args, Kwargs


@contextmanager
def without_modes() -> Iterator[None]:
    """No mode sees the ops inside: they only find shapes, or what torch would save."""
    modes = [_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


@contextmanager
def hidden_from_modes(wrapper: type) -> Iterator[None]:
    """No mode sees ops on wrappers of this class, whose `__torch_dispatch__` runs them."""
    if not torch._C._len_torch_dispatch_stack():
        yield
        return
    with _PassingOn(wrapper):
        yield


class DispatchMode(TorchDispatchMode):
    """A mode whose first op does not import the compiler, which takes seconds."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _PassingOn(DispatchMode):
    """Passes ops on to the modes that were entered before, except those on wrappers."""

    def __init__(self, wrapper: type) -> None:
        super().__init__()
        self.wrapper = wrapper

    def __torch_dispatch__(
        self, func: Callable[..., object], types: Iterable[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        return NotImplemented if self.wrapper in types else func(*args, **(kwargs or {}))
