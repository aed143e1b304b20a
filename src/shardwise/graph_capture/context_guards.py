"""What a recording took for granted: everything but the tensors that it is given."""

from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter, call, is_
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass, _functorch
from torch.nn.modules import module as every_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from shardwise import collectives
from shardwise.errors import CaptureError
from shardwise.graph_capture.reachable_guards import PLAIN, Held, Reached, hooks_of
from shardwise.graph_capture.tracer import strides
from shardwise.tensor.dispatch.hooks import are_installed
from shardwise.tensor.dtensor import DTensor
from shardwise.trace import capture_hooks, comm_trace

_modes, _dispatch_modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
_saved_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_fact = attrgetter("requires_grad", "dtype", "shape")
_pointer: Any = torch._C.TensorBase.data_ptr  # of the local tensor that a DTensor is


def looked_on() -> bool:
    """Whether something around the call wants to see, or to change, what the function does."""
    return (
        capture_hooks.here.recorder is not None
        or comm_trace.listening()
        or are_installed()
        or _dispatch_modes() > 0
        or _saved_hooks(False) is not None
        or torch._C._current_graph_task_id() != -1
        or _functorch.peek_interpreter_stack() is not None
        or (_modes() > 0 and any(type(m) is not DeviceContext for m in _get_current_function_mode_stack()))
    )


def key_of(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """What a recording depends on at a call: how tensors are laid out, and other values themselves.

    Raises:
        CaptureError: an argument whose value cannot be compared.
    """
    key: list[Any] = [
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"), id(collectives.transport()),
        torch._C._get_deterministic_algorithms(), torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(), torch._C._get_math_sdp_enabled(),
        torch.get_default_device() if _modes() else None,
    ]  # fmt: skip
    places = []
    with DisableTorchFunctionSubclass():
        for x in leaves:
            kind = type(x)
            if kind is DTensor:
                key.append((x._layout, x.dtype, x.requires_grad, strides(x)))
            elif isinstance(x, Tensor):
                key.append((x.layout, tuple(x.size()), x.dtype, x.requires_grad, x.stride(), x.device, kind))
            elif kind in PLAIN:
                key.append((kind, _told(x)))
                continue
            else:
                raise CaptureError(
                    f"capture: an argument is a {kind.__name__}. Fix: pass tensors, numbers and strings, in lists, "
                    f"tuples and dicts; let the function reach anything else by itself."
                )
            places.append((x.layout is torch.strided and x.device.type != "meta" and _pointer(x)) or id(x))
    if len(set(places)) < len(places):  # the same memory in two places
        key.append(tuple(map(places.index, places)))
    return tuple(key)


def _told(x: Any) -> Any:
    """A plain value as what is equal if it is the same, unlike 0.0 and -0.0."""
    return repr(x) if isinstance(x, float | complex) else x


class Surroundings:
    """All that a function reaches by itself, as it is now.

    Attributes:
        tensors: those among it.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        found = Reached(function)
        self._held = found.held
        everywhere = (
            every_module._global_forward_hooks, every_module._global_forward_pre_hooks,
            every_module._global_backward_hooks, every_module._global_backward_pre_hooks,
        )  # fmt: skip
        for hooks in everywhere:
            self._held.append(Held("hooks of all modules", hooks, len(hooks), hooks.values, list(hooks.values())))
        owned = chain.from_iterable((m._parameters, m._buffers, m._modules, *hooks_of(m)) for m in found.modules)
        self._empty = [x for x in owned if not x]
        self._modules, self._kinds = found.modules, [type(m) for m in found.modules]
        self.tensors = found.tensors
        self._facts = self._of_tensors()
        self._line_up()

    def _of_tensors(self) -> list[Any]:
        with DisableTorchFunctionSubclass():
            facts: list[Any] = list(map(_fact, self.tensors))
            return facts + [x._layout for x in self.tensors if isinstance(x, DTensor)]

    def changed(self) -> str | None:
        """What is not as it was, if anything."""
        try:
            if list(map(len, self._holders)) != self._lengths:
                return self._slowly()
            if not all(map(is_, chain.from_iterable(map(call, self._looks)), self._values)):
                if (told := self._slowly()) is not None:
                    return told
                self._line_up()
        except (KeyError, AttributeError):
            return self._slowly()
        if list(map(type, self._modules)) != self._kinds:
            return "the class of a module"
        if any(self._empty):
            return "hooks of a module, or what it owns"
        return None if self._of_tensors() == self._facts else "what needs gradients, a dtype, a shape or a layout"

    def _line_up(self) -> None:
        """All that is held in one row, for which no Python code has to run."""
        self._holders = [held.holder for held in self._held]
        self._lengths = [held.length for held in self._held]
        self._looks = [held.look for held in self._held]
        self._values = list(chain.from_iterable(held.values for held in self._held))

    def _slowly(self) -> str | None:
        for held in self._held:
            try:
                if len(held.holder) != held.length or not _equal(held):
                    return held.where
            except (KeyError, AttributeError):
                return held.where
        return None


def _equal(held: Held) -> bool:
    """Whether values are as they were, though as other objects, which are remembered."""
    now = list(held.look())
    for x, before in zip(now, held.values, strict=True):
        if x is not before and not (type(x) is type(before) and type(x) in PLAIN and _told(x) == _told(before)):
            return False
    held.values[:] = now
    return True
