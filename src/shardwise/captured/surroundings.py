"""What a recording took for granted: everything but the tensors that it is given."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass

from shardwise import collectives
from shardwise.captured.tape import strides
from shardwise.errors import CaptureError
from shardwise.tensor.dtensor import DTensor

PLAIN = (int, float, bool, str, complex, type(None), torch.dtype, torch.device)


def key_of(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """What a recording depends on at a call: how tensors are laid out, and other values themselves.

    Raises:
        CaptureError: an argument whose value cannot be compared.
    """
    key: list[Any] = [
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"), id(collectives.transport()),
    ]  # fmt: skip
    tensors = []
    with DisableTorchFunctionSubclass():
        for x in leaves:
            kind = type(x)
            if kind is DTensor:
                key.append((x._layout, x.dtype, x.requires_grad, strides(x)))
            elif isinstance(x, Tensor):
                key.append((x.layout, tuple(x.size()), x.dtype, x.requires_grad, x.stride(), x.device, kind))
            elif kind in PLAIN:
                key.append((kind, x))
                continue
            else:
                raise CaptureError(
                    f"capture: an argument is a {kind.__name__}. Fix: pass tensors, numbers and strings, in lists, "
                    f"tuples and dicts; let the function reach anything else by itself."
                )
            tensors.append(id(x))
    if len(set(tensors)) < len(tensors):  # one tensor in two places
        key.append(tuple(map(tensors.index, tensors)))
    return tuple(key)


class Surroundings:
    """The modules and plain values that a function reaches by itself, as they are now."""

    def __init__(self, function: Callable[..., Any]) -> None:
        modules: dict[int, nn.Module] = {}
        self._cells: list[tuple[Callable[[], Any], Any]] = []
        for value, look in _reached(function, set()):
            if isinstance(value, nn.Module):
                modules |= {id(m): m for m in value.modules()}
                self._cells.append((look, value))
            elif type(value) in PLAIN or isinstance(value, Tensor):
                self._cells.append((look, value))
        self._modules = [_state(m) for m in modules.values()]
        self._parameters = list({id(p): p for m in modules.values() for p in m._parameters.values() if p is not None}.values())
        self._facts = self._of_parameters()

    def _of_parameters(self) -> list[Any]:
        with DisableTorchFunctionSubclass():
            return [(p.requires_grad, p._layout if type(p) is DTensor or isinstance(p, DTensor) else None) for p in self._parameters]

    def hold(self) -> bool:
        """Whether nothing has changed since."""
        for look, value in self._cells:
            now = look()
            if now is not value and (isinstance(now, Tensor | nn.Module) or now != value):
                return False
        for attributes, names, values, owned in self._modules:
            if [attributes.get(name) for name in names] != values:
                return False
            for held, ids, _ in owned:
                if tuple(map(id, held.values())) != ids:
                    return False
        return self._of_parameters() == self._facts


def _state(module: nn.Module) -> Any:
    attributes = module.__dict__
    names = [name for name, value in attributes.items() if type(value) in PLAIN]
    owned = []
    for held in (module._parameters, module._buffers, module._modules, module._forward_hooks, module._forward_pre_hooks):
        owned.append((held, tuple(map(id, held.values())), list(held.values())))  # kept, so that ids stay theirs
    return attributes, names, [attributes[name] for name in names], owned


def _reached(function: Any, seen: set[int]) -> Iterator[tuple[Any, Callable[[], Any]]]:
    """Values that a function has in its closure, among the globals that it names, or is bound to, and how to look again."""
    if id(function) in seen:
        return
    seen.add(id(function))
    match function:
        case nn.Module():
            yield function, lambda: function
        case MethodType():
            owner = function.__self__
            yield owner, lambda: owner
            yield from _reached(function.__func__, seen)
        case partial():
            for value in (*function.args, *function.keywords.values()):
                yield value, lambda value=value: value  # type: ignore[misc]
            yield from _reached(function.func, seen)
        case FunctionType():
            for cell in function.__closure__ or ():
                yield from _each(lambda cell=cell: _content(cell), seen)  # type: ignore[misc]
            names = function.__globals__
            for name in function.__code__.co_names:
                if name in names:
                    yield from _each(lambda name=name: names.get(name), seen)  # type: ignore[misc]
        case _:
            return


def _each(look: Callable[[], Any], seen: set[int]) -> Iterator[tuple[Any, Callable[[], Any]]]:
    value = look()
    yield value, look
    if isinstance(value, FunctionType | MethodType | partial) and not str(getattr(value, "__module__", "")).startswith("torch"):
        yield from _reached(value, seen)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
