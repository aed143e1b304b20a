"""What a function reaches by itself: closures, globals, attributes, and what is in those; and how to look again.

Of an object only those attributes count that some function on the way names: whatever a loop around the step keeps
beside its model may change. Functions of torch, numpy and the standard library are taken for what they are.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import _lru_cache_wrapper, partial
from operator import attrgetter, itemgetter
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

PLAIN = (int, float, bool, str, complex, bytes, type(None), torch.dtype, torch.device, torch.Size)
KNOWN = frozenset({*sys.stdlib_module_names, "torch", "numpy", "shardwise"})  # whose code is not looked into
OPAQUE = KNOWN - {"types", "argparse"}  # whose objects are not: namespaces are
ALWAYS = frozenset({"forward", "training"})  # what calling a module names
MANY = 10_000  # of a longer list or dict only the length is looked at


class Held(NamedTuple):
    """Some values that something holds.

    Attributes:
        where: what an explanation calls it.
        holder: whose length stays the same.
        look: gives the values of now.
        values: those of before.
    """

    where: str
    holder: Collection[Any]
    length: int
    look: Callable[[], Iterable[Any]]
    values: list[Any]


class Reached:
    """All that `function` reaches.

    Attributes:
        held: values, by what holds them.
        modules: every module among them.
        tensors: every tensor among them, parameters and buffers too.
    """

    def __init__(self, function: Any) -> None:
        self._names = set(ALWAYS)
        before = -1
        while before < len(self._names):  # a name found late may be an attribute of what was met early
            before = len(self._names)
            self.held: list[Held] = []
            self.modules: list[nn.Module] = []
            self.tensors: list[Tensor] = []
            self._seen: dict[int, Any] = {}
            self._reach(function)
        del self._seen

    def _reach(self, x: Any) -> None:
        if isinstance(x, PLAIN) or id(x) in self._seen:
            return
        self._seen[id(x)] = x
        match x:
            case Tensor():
                self.tensors.append(x)
            case nn.Module():
                self._module(x)
            case FunctionType():
                self._function(x)
            case MethodType():
                self._each((x.__self__, x.__func__))
            case partial():
                self._each((x.func, x.args, x.keywords))
            case property() | staticmethod() | classmethod():
                self._reach(x.fget if isinstance(x, property) else x.__func__)
            case list() | tuple() | set() | frozenset():
                self._hold(f"a {type(x).__name__}", x, x.__iter__)
            case dict():
                self._hold("a dict", x, x.values)
                self._hold("a key of a dict", x, x.keys)
            case type() | ModuleType():
                if _root(x) not in KNOWN:
                    self._named(x.__name__, vars(x), self._names.intersection(vars(x)))
            case _:
                self._object(x)

    def _each(self, values: Iterable[Any]) -> None:
        for x in values:
            self._reach(x)

    def _hold(self, where: str, holder: Collection[Any], look: Callable[[], Iterable[Any]]) -> None:
        values = [] if len(holder) > MANY else list(look())
        self.held.append(Held(where, holder, len(holder), look if values else tuple, values))
        self._each(values)

    def _named(self, where: str, own: Any, names: Iterable[str], grows: bool = True) -> None:
        """Some values of a dict, which may `grow` without harm."""
        names = sorted(names)
        if names:
            look = partial(itemgetter(*names, names[0]), own)  # twice: of one name alone it gives no tuple
            self._hold_of(f"{where}.{'/'.join(names)}", () if grows else own, look)

    def _hold_of(self, where: str, holder: Collection[Any], look: Callable[[], Iterable[Any]]) -> None:
        self.held.append(Held(where, holder, len(holder), look, list(look())))
        self._each(self.held[-1].values)

    def _function(self, function: FunctionType) -> None:
        if _root(function) in KNOWN:
            return
        where, known = function.__qualname__, function.__globals__
        if function.__closure__:
            self._hold_of(f"the closure of {where}", (), partial(_contents, function.__closure__))
        self._hold_of(f"the defaults of {where}", (), partial(attrgetter("__defaults__", "__kwdefaults__"), function))
        named = _names_in(function.__code__)
        self._names |= named
        found = {name for name in named if name in known}
        if "site-packages" in function.__code__.co_filename:  # a library: of its own state only what is plain
            found = {name for name in found if isinstance(known[name], PLAIN)}
        self._named(f"globals of {where}: ", known, found)

    def _module(self, module: nn.Module) -> None:
        self.modules.append(module)
        own, where = module.__dict__, type(module).__name__
        self._class(type(module), nn.Module)
        plain = {name for name, x in own.items() if name[0] != "_" and isinstance(x, PLAIN)}
        self._named(where, own, plain | self._names.intersection(own), grows=False)
        for owned in (module._parameters, module._buffers, module._modules):
            if owned:
                self._hold(f"what {where} owns", owned, owned.values)
        for hooks in hooks_of(module):
            if hooks:
                self._hold(f"hooks of {where}", hooks, hooks.values)

    def _object(self, x: Any) -> None:
        kind = type(x)
        if kind.__module__ == "shardwise.graph_capture.api":
            self._reach(x.function)
        if isinstance(x, _lru_cache_wrapper):
            self._reach(x.__wrapped__)
        if _root(kind) in OPAQUE:
            return
        own, where = getattr(x, "__dict__", {}), kind.__name__
        self._class(kind, object)
        self._named(where, own, self._names.intersection(own), grows=False)
        slots = [n for c in kind.__mro__ for n in getattr(c, "__slots__", ()) if n in self._names and hasattr(x, n)]
        if slots:
            self._hold_of(f"{where}.{'/'.join(slots)}", (), partial(attrgetter(*slots, slots[0]), x))

    def _class(self, kind: type, end: type) -> None:
        """What is named of a class, up to a base of it: methods, and values."""
        for c in kind.__mro__[: kind.__mro__.index(end)]:
            own = vars(c)
            if id(c) in self._seen:
                continue
            self._seen[id(c)] = c
            found = self._names.intersection(own)
            if _root(c) in KNOWN:
                for name in found:
                    if isinstance(own[name], FunctionType):
                        self._names |= _names_in(own[name].__code__)
                continue
            implied = {n for n, x in own.items() if n[:2] == "__" == n[-2:] and isinstance(x, FunctionType)}
            self._named(c.__name__, own, found | implied - {"__init__"})


def hooks_of(module: nn.Module) -> tuple[dict[Any, Any], ...]:
    """By kind, whatever a module calls beside its `forward`."""
    return (
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks,
    )  # fmt: skip


def _names_in(code: CodeType) -> set[str]:
    """What a function names, in functions inside it as well."""
    found = set(code.co_names)
    for x in code.co_consts:
        if isinstance(x, CodeType):
            found |= _names_in(x)
    return found


def _root(x: Any) -> str:
    name = x.__name__ if isinstance(x, ModuleType) else getattr(x, "__module__", None) or ""
    return str(name).partition(".")[0]


def _contents(cells: Sequence[CellType]) -> list[Any]:
    return [_content(cell) for cell in cells]


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
