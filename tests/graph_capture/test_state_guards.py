"""What a recording looks at before it is used again: whatever the function reaches by itself."""

import copy
import functools
import importlib
import os
import random
import sys
import warnings
import weakref
from collections import UserDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from operator import attrgetter
from pathlib import Path
from types import FunctionType, MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise._graph_capture.api import RETRACES
from shardwise._graph_capture.guards import MAX_ELEMENTS
from shardwise.errors import CaptureError
from shardwise.testing import world

NAMESPACE = SimpleNamespace(scale=2.0)
SCALE = 2.0


@dataclass
class Config:
    scale: float = 2.0
    parts: list[float] = field(default_factory=lambda: [2.0])


class Derived(Config):
    pass


class Attributes(dict[str, float]):
    scale = 2.0


class Slotless:
    kind = 1.0

    def __init__(self) -> None:
        self.first, self.other = 1.0, 1.0


class OtherSlotless(Slotless):
    kind = 2.0


@dataclass(slots=True)
class Slots:
    scale: float = 2.0


class Model(nn.Module):
    """Everything that a forward may depend on, where people keep it."""

    kind: ClassVar[float] = 2.0
    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.listed = [nn.Dropout(0.5), nn.Identity()]
        self.table = {"a": 2.0}
        self.config = Config()
        self.slots = Slots()
        self.factor = torch.tensor(2.0)
        self.act: Callable[[Tensor], Tensor] = torch.relu
        self.pair = (2.0, 3.0)
        self._private = 2.0
        self.linear = nn.Linear(3, 3)
        self.register_buffer("offset", torch.zeros(3))

    @property
    def halved(self) -> float:
        return self.slots.scale / 2

    def helper(self, x: Tensor) -> Tensor:
        parts: Any = (x * s * SCALE for s in self.config.parts)  # the global is named in a function inside
        return torch.stack(list(parts)).sum(0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.listed[0](self.listed[1](self.linear(x)))
        y = self.helper(self.act(x)) * self.table["a"] + self.pair[0] * self._private * self.halved
        out: Tensor = y * self.config.scale * self.factor * NAMESPACE.scale * self.kind
        return out + self.offset


def replaced(module: Model) -> None:
    module.listed[1] = nn.Tanh()


def new_parameter(module: Model) -> None:
    module.linear.weight = nn.Parameter(torch.randn(3, 3))


def forward_hook(module: Model) -> None:
    module.linear.register_forward_hook(lambda module, inputs, output: output + 1)


def patched(module: Model) -> None:
    module.forward = lambda x: module.linear(x) * 7  # type: ignore[method-assign]


class Other(Model):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def another_class(module: Model) -> None:
    module.__class__ = Other


def backward_hook(module: Model) -> None:
    def doubled(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        return tuple(g if g is None else g * 2 for g in inputs)

    module.linear.register_full_backward_hook(doubled)


CHANGES: dict[str, Callable[[Model], Any]] = {
    "the mode of a module in a list": lambda m: m.listed[0].eval(),
    "a module in a list": replaced,
    "a number in a dict": lambda m: m.table.update(a=3.0),
    "an attribute of a dataclass": lambda m: setattr(m.config, "scale", 3.0),
    "a list in a dataclass": lambda m: m.config.parts.append(1.0),
    "a slot": lambda m: setattr(m.slots, "scale", 3.0),
    "a tensor that is not a buffer": lambda m: setattr(m, "factor", torch.tensor(3.0)),
    "a function": lambda m: setattr(m, "act", torch.tanh),
    "a tuple": lambda m: setattr(m, "pair", (3.0, 3.0)),
    "a private number": lambda m: setattr(m, "_private", 3.0),
    "its forward": patched,
    "its class": another_class,
    "an attribute that hides one of the class": lambda m: setattr(m, "kind", 3.0),
    "a hook of the backward": backward_hook,
    "a dtype": lambda m: m.double(),
    "a number by its type": lambda m: setattr(m, "pair", (2, 3.0)),
    "a parameter": new_parameter,
    "a buffer": lambda m: setattr(m, "offset", torch.ones(3)),
    "a submodule": lambda m: setattr(m, "linear", nn.Sequential(nn.Linear(3, 3))),
    "a hook": forward_hook,
    "requires_grad": lambda m: m.linear.weight.requires_grad_(False),
}


def gradients(module: nn.Module, function: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor | None]:
    torch.manual_seed(0)
    x = x.detach().clone().to(next(module.parameters()).dtype).requires_grad_()
    out = function(x)
    out.sum().backward()
    found = [out.detach(), x.grad, *(None if p.grad is None else p.grad.clone() for p in module.parameters())]
    module.zero_grad()
    return found


def check(module: nn.Module, step: Any, x: Tensor) -> None:
    expected, found = gradients(module, step.function, x), gradients(module, step, x)
    assert all(a is b is None or (a is not None and b is not None and torch.equal(a, b))
               for a, b in zip(expected, found, strict=True))  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_a_module_names_is_guarded(name: str) -> None:
    torch.manual_seed(1)
    module, x = Model(), torch.randn(4, 3)
    step = sw.capture(module)
    for _ in range(2):
        check(module, step, x)
    CHANGES[name](module)
    for _ in range(2):
        check(module, step, x)


def test_values_written_into_parameters_and_buffers_count_at_once() -> None:
    module, x = Model(), torch.randn(4, 3)
    step = sw.capture(module)
    check(module, step, x)
    with torch.no_grad():
        module.linear.weight.mul_(2)
        module.offset.add_(1)
    check(module, step, x)
    module.load_state_dict(Model().state_dict())
    check(module, step, x)
    module.linear.weight.data = torch.randn(3, 3)
    check(module, step, x)
    assert len(step.graphs()) == 1


def test_a_value_may_become_an_equal_object_and_what_is_not_read_may_change() -> None:
    module, x, unread = Model().eval(), torch.randn(4, 3), [1.0]
    module.listed[0].eval()
    step = sw.capture(module)
    check(module, step, x)
    (graphs,) = step.graphs()
    unread.append(2.0)
    module.config.parts[0] = float("2")
    check(module, step, x)
    assert step.graphs() == [graphs]


@pytest.mark.parametrize("where", ["the class", "a global", "a namespace"])
def test_values_outside_of_a_module_are_guarded(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = Model(), torch.randn(4, 3)
    step = sw.capture(module)
    for _ in range(2):
        check(module, step, x)
    if where == "the class":
        monkeypatch.setattr(Model, "kind", 3.0)
    elif where == "a global":
        monkeypatch.setattr(sys.modules[__name__], "SCALE", 3.0)
    else:
        monkeypatch.setattr(NAMESPACE, "scale", 3.0)
    for _ in range(2):
        check(module, step, x)


class Trainer:
    def __init__(self) -> None:
        self.model: nn.Module = nn.Dropout(0.5)
        self.scale = 2.0

    def step(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x) * self.scale
        return out

    def __call__(self, x: Tensor) -> Tensor:
        return self.step(x)


HALF = nn.Tanh()
TABLE = {"a": 2.0}


def twice(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(function(x))


FORMS: dict[str, Callable[[Trainer], Callable[[Tensor], Tensor]]] = {
    "method": lambda t: t.step,
    "object": lambda t: t,
    "closure": lambda t: lambda x: t.step(x) * 1,
    "list": lambda t: functools.partial(lambda held, x: held[0].step(x), [t]),
    "default": lambda t: lambda x, held=t: held.step(x),  # type: ignore[misc]
    "captured": lambda t: twice(sw.capture(t.step)),
}


@pytest.mark.parametrize("name", FORMS)
def test_an_object_is_guarded_however_it_is_reached(name: str) -> None:
    trainer, x = Trainer(), torch.randn(50)
    function = FORMS[name](trainer)
    step = sw.capture(function)

    def agrees() -> bool:
        torch.manual_seed(0)
        expected = function(x)
        torch.manual_seed(0)
        return torch.equal(step(x), expected)

    assert agrees()
    changes: list[Callable[[], Any]] = [
        lambda: setattr(trainer, "scale", 3.0), trainer.model.eval, lambda: setattr(trainer, "model", HALF),
    ]  # fmt: skip
    for change in changes:
        assert agrees()
        (graphs,) = step.graphs()
        assert agrees()
        assert step.graphs() == [graphs]
        change()
        assert agrees()


@pytest.mark.parametrize("maxsize", [None, 2])
def test_what_a_cached_function_gives_and_reaches_is_guarded(maxsize: int | None) -> None:
    held = [2.0]

    @functools.lru_cache(maxsize)
    def config(number: int) -> SimpleNamespace:
        return SimpleNamespace(scale=held[0])

    step = sw.capture(lambda x: x * config(0).scale)

    def refilled() -> None:
        config.cache_clear()
        config(0)

    changes: list[Callable[[], Any]] = [
        lambda: None, lambda: held.__setitem__(0, 3.0), config.cache_clear, lambda: setattr(config(0), "scale", 4.0),
        refilled, lambda: held.__setitem__(0, 5.0), refilled,
    ]  # fmt: skip
    for change, scale in zip(changes, (2, 2, 3, 4, 3, 3, 5), strict=True):
        change()
        for _ in range(2):
            assert step(torch.ones(1)).item() == scale
    config(1)
    step(torch.ones(1))
    (graphs,) = step.graphs()
    config(1), config(0)
    step(torch.ones(1))
    assert step.graphs() == [graphs]  # calls that find a result are no change


CONTEXT = ContextVar("CONTEXT", default=1.0)


class Key:
    def __init__(self) -> None:
        self.scale = 2.0


class Unset:
    __slots__ = ("scale",)
    scale: float


class Mangled:
    __slots__ = ("__scale",)

    def __init__(self) -> None:
        self.set(2.0)

    def get(self) -> float:
        return self.__scale

    def set(self, scale: float) -> None:
        self.__scale = scale


class OneSlot:
    __slots__ = "scale"  # noqa: PLC0205 - one name is a text
    scale: float


class Text(str):  # noqa: SLOT000 - it has attributes
    scale = 2.0


class Level(IntEnum):
    LOW = 2


def scaled(holder: Any, scale: float | None = 2.0) -> Any:
    holder.scale = scale
    return holder


def on_one_rank() -> Tensor:
    return sw.distribute_tensor(torch.ones(1), sw.Mesh((1,)), [sw.Shard(0)])


def of_name(holder: Any, name: str) -> float:
    return float(getattr(holder, name))


# What a function reads, how, and what changes it.
READS: dict[str, tuple[Callable[[], Any], Callable[[Any], float], Callable[[Any], object]]] = {
    "getattr": (Config, lambda s: getattr(s, "scale", 0.0), lambda s: setattr(s, "scale", 3.0)),
    "an absent name": (SimpleNamespace, lambda s: getattr(s, "scale", 1.0), lambda s: setattr(s, "scale", 3.0)),
    "a name of another function": (Config, lambda s: of_name(s, "scale"), lambda s: setattr(s, "scale", 3.0)),
    "vars": (Config, lambda s: vars(s)["scale"], lambda s: setattr(s, "scale", 3.0)),
    "__dict__, no name": (Slotless, lambda s: sum(s.__dict__.values()), lambda s: setattr(s, "other", 3.0)),
    "asdict": (Config, lambda s: sum(asdict(s)["parts"]), lambda s: s.parts.append(3.0)),
    "a deque": (lambda: deque([2.0]), lambda s: s[0], lambda s: s.appendleft(3.0)),
    "a mapping": (lambda: MappingProxyType(TABLE), lambda s: s["a"], lambda s: TABLE.update(a=3.0)),
    "numpy": (lambda: np.ones(2), lambda s: float(s[1]), lambda s: s.__setitem__(1, 3.0)),
    "bytes": (lambda: bytearray(2), lambda s: s[1], lambda s: s.__setitem__(1, 3)),
    "a base class": (lambda: Derived, lambda s: s.scale, lambda s: setattr(Config, "scale", 3.0)),
    "a class of dicts": (Attributes, lambda s: s.scale, lambda s: setattr(s, "scale", 3.0)),
    "a mapping of Python": (lambda: UserDict(a=2.0), lambda s: s["a"], lambda s: s.update(a=3.0)),
    "an attrgetter": (
        lambda: (attrgetter("scale"), Config()),
        lambda s: cast(float, s[0](s[1])),
        lambda s: setattr(s[1], "scale", 3.0),
    ),
    "a method": (lambda: {"a": 2.0}.get, lambda s: s("a"), lambda s: s.__self__.update(a=3.0)),
    "the environment": (lambda: None, lambda s: len(os.environ["USED"]), lambda s: os.environ.update(USED="longer")),
    "getenv": (lambda: os.getenv, lambda s: len(s("USED")), lambda s: os.environ.update(USED="longer")),
    "an optimizer": (
        lambda: torch.optim.SGD([torch.ones(1)], lr=2.0),
        lambda s: s.param_groups[0]["lr"],
        lambda s: s.param_groups[0].update(lr=3.0),
    ),
    "a scaler of gradients": (
        lambda: torch.amp.GradScaler("cpu", init_scale=2.0),
        lambda s: cast(float, s.scale(torch.ones(()))),
        lambda s: s.update(4.0),
    ),
    "an attribute of a DTensor": (lambda: scaled(on_one_rank()), lambda s: s.scale, lambda s: scaled(s, 3.0)),
    "an attribute of a tensor": (lambda: scaled(torch.ones(1)), lambda s: s.scale, lambda s: scaled(s, 3.0)),
    "an attribute of a function": (lambda: scaled(twice), lambda s: s.scale, lambda s: scaled(s, 3.0)),
    "the code of a function": (
        lambda: FunctionType((lambda: 2.0).__code__, {}),
        lambda s: s(),
        lambda s: setattr(s, "__code__", (lambda: 3.0).__code__),
    ),
    "the class of an object": (Slotless, lambda s: s.kind, lambda s: setattr(s, "__class__", OtherSlotless)),
    "a late attribute of a function": (
        lambda: FunctionType((lambda: 2.0).__code__, {}),
        lambda s: getattr(s, "scale", 2.0),
        lambda s: scaled(s, 3.0),
    ),
    "a key of a dict": (lambda: {Key(): 1}, lambda s: next(iter(s)).scale, lambda s: scaled(next(iter(s)), 3.0)),
    "a slot that is set late": (Unset, lambda s: getattr(s, "scale", 1.0), lambda s: scaled(s, 3.0)),
    "a slot that is None late": (Unset, lambda s: 3.0 if hasattr(s, "scale") else 2.0, lambda s: scaled(s, None)),
    "a private slot": (Mangled, lambda s: cast(float, s.get()), lambda s: s.set(3.0)),
    "one slot": (lambda: scaled(OneSlot()), lambda s: s.scale, lambda s: scaled(s, 3.0)),
    "an attribute of a text": (lambda: Text("a"), lambda s: s.scale, lambda s: scaled(s, 3.0)),
    "an attribute of a number": (lambda: scaled(Level.LOW), lambda s: s.scale, lambda s: scaled(s, 3.0)),
    "a context variable": (lambda: CONTEXT, lambda s: s.get(), lambda s: s.set(3.0)),
    "a weak reference": (lambda: weakref.ref(HALF), lambda s: s().factor, lambda s: setattr(HALF, "factor", 3.0)),
}


@pytest.mark.parametrize("name", READS)
def test_what_a_function_reads_is_guarded_however_it_reads_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USED", "short")
    monkeypatch.setattr(HALF, "factor", 2.0, raising=False)
    monkeypatch.setattr(Config, "scale", 2.0)
    monkeypatch.setitem(TABLE, "a", 2.0)
    make, read, change = READS[name]
    state, x = make(), torch.ones(2)
    step = sw.capture(lambda x: x * read(state))
    for _ in range(2):
        assert torch.equal(step(x), x * read(state))
    before = read(state)
    change(state)
    assert read(state) != before
    assert torch.equal(step(x), x * read(state))


LIBRARY = """
class Settings:
    scale = 2.0

settings = Settings()
table = {"a": 1.0}
factor = 1.0

def scale():
    return inner() * table["a"] * factor * Settings.scale / 2

def inner():
    return settings.scale
"""


def test_what_installed_libraries_read_is_guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a function imports them."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages/of_settings.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))

    def function(x: Tensor) -> Tensor:
        import of_settings  # type: ignore[import-not-found] # the test writes it

        return x * cast(float, of_settings.scale())

    step = sw.capture(function)
    library = importlib.import_module("of_settings")
    changes: list[Callable[[], Any]] = [
        lambda: None, lambda: None, lambda: setattr(library.settings, "scale", 3.0),
        lambda: library.table.update(a=5.0), lambda: setattr(library, "factor", 7.0),
        lambda: setattr(library.Settings, "scale", 9.0),
    ]  # fmt: skip
    for change, scale in zip(changes, (2.0, 2.0, 3.0, 15.0, 105.0, 472.5), strict=True):
        change()
        assert step(torch.ones(1)).item() == scale
    del sys.modules["of_settings"]


def of_settings(module: Any, x: Tensor) -> Tensor:
    return x * cast(float, module.scale)


class Configured(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        return x * cast(float, self.config.scale)


def alias(module: Any) -> Callable[[Tensor], Tensor]:
    held = [module]

    def function(x: Tensor) -> Tensor:
        settings = held[0]
        return x * cast(float, settings.scale)

    return function


def imported(x: Tensor) -> Tensor:
    from of_package import settings  # type: ignore[import-not-found] # the test writes it

    return x * cast(float, settings.scale)


def imported_as(x: Tensor) -> Tensor:
    import of_package.settings as s  # type: ignore[import-not-found] # the test writes it

    return x * cast(float, getattr(s, "scale", 0.0))


def of_package(package: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: x * cast(float, package.settings.scale)


def by_name(name: str) -> Callable[[Tensor], Tensor]:
    return lambda x: x * cast(float, importlib.import_module(name).scale)


# How a function may have a module of Python.
HOLDERS: dict[str, Callable[[Any], Callable[[Tensor], Tensor]]] = {
    "a closure": lambda m: lambda x: x * m.scale,
    "an attribute": Configured,
    "an alias": alias,
    "an argument": lambda m: lambda x: of_settings(m, x),
    "a default": lambda m: lambda x, config=m: x * config.scale,  # type: ignore[misc]
    "an import": lambda m: imported,
    "an import by another name": lambda m: imported_as,
    "a partial": lambda m: functools.partial(of_settings, m),
    "an attribute of a module": lambda m: of_package(sys.modules[m.__package__]),
    "an import by a name that is computed": lambda m: by_name(m.__name__),
    "a getter": lambda m: lambda x: x * attrgetter("scale")(m),
    "a cached function": lambda m: functools.partial(of_settings, functools.cache(lambda: m)()),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_globals_of_a_module_are_guarded_however_it_is_reached(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "of_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "settings.py").write_text("scale = 2.0\nunused = 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    settings: Any = importlib.import_module("of_package.settings")
    try:
        step = sw.capture(HOLDERS[name](settings))
        for _ in range(2):
            assert step(torch.ones(1)).item() == 2
        (graphs,) = step.graphs()
        settings.unused = 3.0
        step(torch.ones(1))
        assert step.graphs() == [graphs]
        settings.scale = 3.0
        assert step(torch.ones(1)).item() == 3
    finally:
        del sys.modules["of_package"], sys.modules["of_package.settings"]


def test_of_a_big_module_only_what_is_named_is_visited() -> None:
    """The guards of a module do not depend on how much else it holds."""
    big = ModuleType("of_many")
    vars(big).update({f"value_{i}": SimpleNamespace(scale=2.0) for i in range(MAX_ELEMENTS + 1)}, scale=2.0)
    small = ModuleType("of_one")
    small.scale = 2.0  # type: ignore[attr-defined]
    counts = []
    for module in (big, small):
        step = sw.capture(Configured(module))
        step(torch.ones(1))
        assert step._guards is not None
        counts.append((len(step._guards._all), len(step._guards._objects)))
    assert counts[0] == counts[1]


def test_a_call_without_grad_has_another_graph() -> None:
    step, x = sw.capture(lambda x: x * WEIGHT), torch.ones(3)
    for grad in (False, True, False, True):
        for _ in range(2):
            with torch.set_grad_enabled(grad):
                out = step(x)
            assert out.requires_grad is grad
            if grad:
                out.sum().backward()
    assert len(step.graphs()) == 2
    WEIGHT.grad = None


def test_a_function_that_changes_what_it_reaches_warns_once() -> None:
    counter = [0]

    def function(x: Tensor) -> Tensor:
        counter[0] += 1
        return x * counter[0]

    step = sw.capture(function)
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        for i in range(RETRACES * 2):
            assert step(torch.ones(1)).item() == i + 1
    assert [str(w.message).startswith(f"capture: {RETRACES} calls in a row") for w in reported] == [True]
    assert "function.counter" in str(reported[0].message)


# ---- what is set around the call ---------------------------------------------------------------------------------


class Tanh(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (torch.tanh if func is torch.relu else func)(*args, **(kwargs or {}))


@contextmanager
def switched(begin: Callable[[], object], end: Callable[[], object]) -> Iterator[None]:
    begin()
    try:
        yield
    finally:
        end()


def global_hook() -> Any:
    return nn.modules.module.register_module_forward_hook(lambda module, inputs, out: out * 2)


IDENTITY = nn.Identity()
AROUND: dict[str, tuple[Callable[[], Any], Callable[[Tensor], Tensor]]] = {
    "a mode": (Tanh, torch.relu),
    "a default device": (
        lambda: switched(lambda: torch.set_default_device("meta"), lambda: torch.set_default_device(None)),
        lambda x: torch.ones(4),
    ),
    "a hook of all modules": (global_hook, IDENTITY),  # a handle, which removes it at the end of a block
    "deterministic": (
        lambda: switched(
            lambda: torch.use_deterministic_algorithms(True), lambda: torch.use_deterministic_algorithms(False)
        ),
        lambda x: x * (2 if torch.are_deterministic_algorithms_enabled() else 3),
    ),
    "a kernel of attention": (
        lambda: sdpa_kernel(SDPBackend.MATH),
        lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AROUND)
def test_modes_around_a_call_are_guarded(name: str) -> None:
    around, function = AROUND[name]
    step, x = sw.capture(function), torch.randn(16, 8)
    for _ in range(2):
        assert torch.equal(step(x), function(x))
    for _ in range(2):
        with around():
            found, expected = step(x), function(x)
        assert found.device == expected.device
        assert found.is_meta or torch.equal(found, expected)
        assert torch.equal(step(x), function(x))


def test_a_captured_block_may_be_checkpointed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.3))
    other, x = copy.deepcopy(model), torch.randn(2, 4, requires_grad=True)
    step = sw.capture(model)
    for reentrant in (False, True):
        for i in range(3):
            for function in (step, other):
                torch.manual_seed(i)
                checkpoint(function, x, use_reentrant=reentrant).sum().backward()
            assert torch.equal(model[0].weight.grad, other[0].weight.grad)  # type: ignore[arg-type]


def test_casts_that_autocast_remembers_belong_to_one_call() -> None:
    model = nn.Linear(4, 4)
    other = copy.deepcopy(model)
    step = sw.capture(model)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, other)]
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            for rows in (2, 3, 2):
                x = torch.randn(rows, 4)
                a, b = step(x), other(x)
                assert torch.equal(a, b)
                a.sum().backward()
                b.sum().backward()
        assert torch.equal(model.weight.grad, other.weight.grad)  # type: ignore[arg-type]
        for optimizer in optimizers:
            optimizer.step()


# ---- tensors that share memory -----------------------------------------------------------------------------------


def test_minus_zero_is_another_number_and_what_needs_gradients_later_gets_them() -> None:
    step = sw.capture(lambda x, k: x / k)
    assert [step(torch.ones(1), k).item() for k in (0.0, 0.0, -0.0, -0.0)] == [float("inf")] * 2 + [-float("inf")] * 2
    late = torch.randn(3)
    step = sw.capture(lambda x: (x * late * WEIGHT).sum())
    for _ in range(2):
        step(torch.ones(3)).backward()
    late.requires_grad_()
    step(torch.ones(3)).backward()
    assert torch.equal(late.grad, WEIGHT)  # type: ignore[arg-type]


@pytest.mark.parametrize("sharded", [False, True])
@world(1)
def test_an_argument_may_alias_another_or_a_reachable_tensor(sharded: bool) -> None:
    def made() -> Tensor:
        x = torch.randn(4)
        return sw.distribute_tensor(x, placements=[sw.Shard(0)]) if sharded else x

    weight = nn.Parameter(made())
    step = sw.capture(lambda a, b: a * 2 + b * 3 + weight * 5)
    first, second = made(), made()
    for a, b in [(first, first.detach()), (weight.detach(), weight.detach()), (first, second), (second, first)]:
        for _ in range(2):
            step(a, b).sum().backward()
            assert torch.equal(step(a, b), step.function(a, b))
            assert weight.grad is not None
            assert weight.grad.sum() == 20
            weight.grad = None


@pytest.mark.parametrize("sharded", [False, True])
@world(1)
def test_results_are_tensors_of_their_own(sharded: bool) -> None:
    start = torch.randn(4)
    if sharded:
        start = sw.distribute_tensor(start, placements=[sw.Shard(0)])
    weight = nn.Parameter(start)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = x * weight
        return weight, weight.detach(), x.detach(), y, y.detach(), y

    step = sw.capture(function)
    for grad in (True, False):
        for _ in range(3):
            x = start.detach().clone()
            with torch.set_grad_enabled(grad):
                found, expected = step(x), function(x)
            assert [t.requires_grad for t in found] == [True, False, False, grad, False, grad] or not grad
            assert not any(t is weight or t is x for t in found)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
            if grad:
                (found[0].sum() + found[3].sum()).backward()
                assert torch.equal(weight.grad, x + 1)  # type: ignore[arg-type]
                weight.grad = None


def _through_a_view(x: Tensor) -> Tensor:
    a = torch.zeros(2)
    a[0] = x.sum()
    return x.mul(2 if bool(a[0] > 0) else 3)


def _through_the_base(x: Tensor) -> Tensor:
    a = torch.zeros(2)
    a[:1].copy_(x.sum())
    return x.mul(a.tolist()[0])


def _seeds(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    torch.manual_seed(7)
    return x + torch.rand(3)


def _tries_to_seed(x: Tensor) -> Tensor:
    with suppress(CaptureError):
        TORCH.seed()
    return x * torch.rand(3, generator=TORCH)


def _on_a_fork(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        return F.dropout(x)


def _draws_by_an_alias(x: Tensor) -> Tensor:
    r = random
    return x * r.random()


def _draws_by_an_import(x: Tensor) -> Tensor:
    import numpy as n  # noqa: ICN001 - another name than that of this file

    return x * n.random.rand()  # noqa: NPY002 - what is refused


HISTORY = torch.ones(3)
COUNT, LONG = iter(range(9)), np.ones(10**6)
PYTHON, NUMPY, TORCH = random.Random(0), np.random.default_rng(0), torch.Generator()
WEIGHT = nn.Parameter(torch.ones(3))
OUTSIDE = WEIGHT * 2

REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a value written through a view": (_through_a_view, r"item\(\), or an `if`"),
    "a value written into a part": (_through_the_base, r"tolist\(\)"),
    "a deep copy": (lambda x: copy.deepcopy(x * 1) * 2, "copy.deepcopy"),
    "history of a tensor from outside": (lambda x: HISTORY.mul_(WEIGHT), "requires grad into a tensor from outside"),
    "the state of a generator": (lambda x: F.dropout(x, float(torch.get_rng_state()[0] > 300)), "get_rng_state"),
    "a fork": (_on_a_fork, "fork_rng"),
    "the seed of a generator": (lambda x: x * torch.rand(3, generator=TORCH.manual_seed(3)), "manual_seed"),
    "a refusal that is caught": (_tries_to_seed, "catches an error about what cannot be captured"),
    "a generator of Python": (lambda x: x * random.Random(0).random(), "calls Random"),
    "a generator of numpy": (lambda x: x * np.random.default_rng().random(), "calls default_rng"),
    "the seed that was set": (lambda x: x * torch.initial_seed(), "calls initial_seed"),
    "a new seed": (lambda x: x * torch.seed(), "calls seed"),
    "a function that seeds": (lambda x, seed=torch.manual_seed: x * seed(0), "calls manual_seed"),  # type: ignore[misc]
    "a new generator": (lambda x: x * torch.rand(3, generator=torch.Generator()), "makes the generator"),
    "an iterator": (lambda x: x * next(COUNT), r"reads tests.graph_capture.test_state_guards.COUNT, a range_iterator"),
    "numbers of Python": (lambda x: x * random.random(), "calls Random.random"),
    "numbers of an alias": (_draws_by_an_alias, "calls Random.random"),
    "numbers of numpy by an import": (_draws_by_an_import, "calls RandomState.rand"),
    "numbers of a Random": (
        lambda x: x * PYTHON.random(),
        r"reads tests.graph_capture.test_state_guards.PYTHON, a Random",
    ),
    "numbers of numpy": (
        lambda x: x * NUMPY.random(),
        r"reads tests.graph_capture.test_state_guards.NUMPY, a Generator",
    ),
    "a long array": (
        lambda x: x * LONG[0],
        r"reads tests.graph_capture.test_state_guards.LONG, a ndarray of 8,000,000 bytes",
    ),
    "history of an argument": (lambda x: x.mul_(WEIGHT), "requires grad into a tensor from outside"),
    "backward": (lambda x: (x * torch.ones(3, requires_grad=True)).sum().backward(), r"backward\(\) runs inside"),
    "a tensor from outside": (lambda x: x * OUTSIDE, "computed outside of it and requires grad"),
    "a gradient": (lambda x: x * (2 if WEIGHT.grad is None else 3), "reading .grad"),
    "a seed": (_seeds, "calls manual_seed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_another_value_at_a_replay_is_refused(name: str) -> None:
    function, said = REFUSED[name]
    with pytest.raises(CaptureError, match=said):
        sw.capture(function)(torch.ones(3))


def test_a_generator_from_outside_is_drawn_from_at_each_replay() -> None:
    step = sw.capture(lambda x: x * torch.rand(3, generator=TORCH))
    for seed in (1, 2, 1):
        TORCH.manual_seed(seed)
        expected = torch.rand(6, generator=TORCH)
        TORCH.manual_seed(seed)
        assert torch.equal(torch.cat([step(torch.ones(3)) for _ in range(2)]), expected)


def test_the_onednn_recurrent_layer_is_refused_and_the_other_kernel_works() -> None:
    model = nn.LSTM(4, 4)
    other, step = copy.deepcopy(model), sw.capture(lambda x: model(x)[0])
    with pytest.raises(CaptureError, match="mkldnn_rnn_layer"):
        step(torch.randn(3, 2, 4))
    with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
        for _ in range(3):
            x = torch.randn(3, 2, 4)
            step(x).sum().backward()
            other(x)[0].sum().backward()
            for a, b in zip(model.parameters(), other.parameters(), strict=True):
                assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]
