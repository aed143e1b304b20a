"""What a recording took for granted: everything but the tensors that it is given."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import is_, itemgetter
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
        self._looks: list[tuple[Callable[[], Any], Any]] = []
        for value, look in _reached(function, set()):
            if isinstance(value, nn.Module):
                modules |= {id(m): m for m in value.modules()}
            if isinstance(value, nn.Module | Tensor) or type(value) in PLAIN:
                self._looks.append((look, value))
        self._attributes = []  # of each module: where they are, how to take them, and what they were
        self._held: list[tuple[dict[Any, Any], list[Any]]] = []  # what modules own
        self._empty: list[Any] = []
        for module in modules.values():
            own = module.__dict__
            names = [name for name, x in own.items() if type(x) in PLAIN and (name[0] != "_" or name == "training")]
            take = itemgetter(*names, "training")
            self._attributes.append((own, take, take(own)))
            owns: tuple[dict[Any, Any], ...] = (
                module._parameters, module._buffers, module._modules, module._forward_hooks, module._forward_pre_hooks,
            )  # fmt: skip
            self._held += [(held, list(held.values())) for held in owns if held]
            self._empty += [held for held in owns if not held]
        owned = [p for m in modules.values() for p in m._parameters.values() if p is not None]
        self._parameters = list({id(p): p for p in owned}.values())
        self._facts = self._of_parameters()

    def _of_parameters(self) -> list[Any]:
        with DisableTorchFunctionSubclass():
            flags: list[Any] = [p.requires_grad for p in self._parameters]
            return flags + [p._layout for p in self._parameters if isinstance(p, DTensor)]

    def hold(self) -> bool:
        """Whether nothing has changed since."""
        for look, value in self._looks:
            now = look()
            if now is not value and (isinstance(now, Tensor | nn.Module) or now != value):
                return False
        try:
            for own, take, values in self._attributes:
                if take(own) != values:
                    return False
        except KeyError:
            return False
        for held, values in self._held:
            if len(held) != len(values) or not all(map(is_, held.values(), values)):
                return False
        return not any(self._empty) and self._of_parameters() == self._facts


def _reached(function: Any, seen: set[int]) -> Iterator[tuple[Any, Callable[[], Any]]]:
    """What a function has in its closure, among the globals that it names, or is bound to, and how to look again."""
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
    if isinstance(value, FunctionType | MethodType | partial) and not str(getattr(value, "__module__", "")).startswith(
        "torch"
    ):
        yield from _reached(value, seen)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
