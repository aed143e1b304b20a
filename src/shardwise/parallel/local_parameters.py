"""Modules whose parameters others manage as plain tensors, and which compute with DTensors all the same."""

from typing import Any, TypeVar

from torch import Tensor, nn

from shardwise import collectives
from shardwise.layout import Layout
from shardwise.tensor import DTensor
from shardwise.tensor.conversion import wrap
from shardwise.tensor.dtensor import plain

M = TypeVar("M", bound=nn.Module)

_classes: dict[tuple[type, tuple[tuple[str, Layout], ...]], type] = {}


def local_parameters(module: M) -> M:
    """Make every DTensor parameter a plain one that holds this rank's part; what the module computes stays the same.

    For wrappers that cut, gather and reduce plain parameters on another axis of the mesh, such as torch's
    `fully_shard`. `module.weight` is remade from the part whenever the module asks for it; `module.parameters()` and
    `state_dict()` have the parts, as plain tensors. A tied parameter stays one parameter.

    Args:
        module: with parameters laid out on the axes that the wrapper leaves alone; in place. Make the optimizer
            afterwards.

    Returns:
        The module itself. The classes of the submodules that had DTensors are replaced by subclasses.

    Gradient: reduced within backward where a parameter is replicated, one collective a parameter.
    """
    parts: dict[int, nn.Parameter] = {}
    for child in module.modules():
        held: dict[str, Any] = {name: p for name, p in child._parameters.items() if isinstance(p, DTensor)}
        for name, whole in held.items():
            if id(whole) not in parts:
                parts[id(whole)] = nn.Parameter(plain(whole.detach()), whole.requires_grad)
            child._parameters[name] = parts[id(whole)]
        if held:
            layouts = tuple((name, p._layout) for name, p in held.items())
            child.__class__ = _with_wholes(type(child), layouts)
    return module


def _with_wholes(cls: type[nn.Module], layouts: tuple[tuple[str, Layout], ...]) -> type[nn.Module]:
    known = _classes.get((cls, layouts))
    if known is None:
        wholes = {name: property(_Whole(name, layout), _assigning(name)) for name, layout in layouts}
        known = _classes[cls, layouts] = type(f"Local{cls.__name__}", (cls,), {"__module__": cls.__module__, **wholes})
    return known


class _Whole:
    """The DTensor of which a module has this rank's part."""

    def __init__(self, name: str, layout: Layout) -> None:
        self.name = name
        self.layout = layout

    def __call__(self, module: nn.Module) -> Tensor | None:
        part = module._parameters[self.name]
        if type(part) not in (Tensor, nn.Parameter):  # None, or one that its wrapper has not gathered
            return part
        assert part is not None
        expected = self.layout.local_shape(collectives.rank())
        assert part.shape == expected, f"{self.name}: a part of shape {expected}, got {tuple(part.shape)}"
        whole = wrap(part, self.layout)
        whole._name = self.name
        return whole


def _assigning(name: str) -> Any:
    return lambda module, value: nn.Module.__setattr__(module, name, value)
