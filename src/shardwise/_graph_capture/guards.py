"""Guards of captured graphs: what a graph depends on besides the values of its tensor inputs.

`cache_key` covers the arguments and the modes around the call, `StateGuards` the objects that the function reaches:
closures, globals, attributes, and what is in those. Of an object only those attributes are guarded whose names some
reachable function uses, as a name or as a text (`getattr(x, "scale")`): a training loop may change anything else beside
its model. A function that computes names has all attributes guarded. Code of torch, numpy and the standard library is
not looked into; what of them a replay could not repeat is refused by its name.
"""

import gc
import os
import random
import sys
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import _lru_cache_wrapper, partial
from itertools import chain
from operator import attrgetter, call, is_, itemgetter, methodcaller
from types import (
    BuiltinMethodType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple
from weakref import ReferenceType

import numpy as np
import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass, _functorch
from torch.amp import GradScaler
from torch.nn.modules import module as all_modules
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from shardwise import _collectives as collectives
from shardwise._graph_capture.structure import CONSTANTS
from shardwise._graph_capture.tracer import autocast_state, refusal, strides
from shardwise._tensor.dispatch.hooks import are_installed
from shardwise._tensor.dtensor import DTensor
from shardwise._trace import capture_hooks, comm_trace

KNOWN = frozenset({*sys.stdlib_module_names, "torch", "numpy", "shardwise"})  # whose code is not looked into
OPAQUE = KNOWN - {"types", "argparse", "collections", "_thread"}  # whose objects are not looked into
SEEDING = frozenset({
    "manual_seed", "manual_seed_all", "seed_all", "fork_rng", "get_rng_state", "set_rng_state", "get_rng_state_all",
    "set_rng_state_all", "set_state",
})  # fmt: skip
READ_ALL = frozenset({"__dict__", "vars", "asdict", "astuple", "attrgetter"})  # they read attributes without names
ARRAYS = (np.ndarray, array, bytearray, memoryview)
CONTAINERS = (list, tuple, set, frozenset, deque, dict, MappingProxyType, *ARRAYS)
CALLED_NAMES = frozenset({"forward", "training"})  # that calling a module uses
MAX_ELEMENTS = 10_000  # of a longer list or dict only the length is guarded
MAX_BYTES = 1 << 20  # of a numpy array, which is compared at each call

SEED = "seed generators, and save and restore their states, outside of the captured function"

_function_modes, _dispatch_modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
_saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_tensor_facts = attrgetter("requires_grad", "dtype", "shape")
_data_ptr: Callable[[Tensor], int] = torch._C.TensorBase.data_ptr  # of the local tensor that a DTensor is


# ---- the call -------------------------------------------------------------------------------------------------------


def must_run_eagerly() -> bool:
    """Whether a tool or mode around the call observes or changes what the function does."""
    return (
        capture_hooks.current.tracer is not None
        or comm_trace.listening()
        or are_installed()
        or _dispatch_modes() > 0
        or _saved_tensor_hooks(False) is not None
        or torch._C._current_graph_task_id() != -1
        or _functorch.peek_interpreter_stack() is not None
        or (_function_modes() > 0 and any(type(m) is not DeviceContext for m in _get_current_function_mode_stack()))
    )


def cache_key(leaves: Sequence[Any], jagged: Collection[int] = ()) -> tuple[Any, ...]:
    """Modes around the call, layout and metadata of each tensor argument, aliasing among them, and other values.

    Args:
        jagged: leaves whose first size is no part of the key; the graph compares it, if it depends on it.

    Raises:
        CaptureError: an argument whose value cannot be compared.
    """
    key: list[Any] = [
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
        autocast_state(), collectives.owner(),
        torch._C._get_deterministic_algorithms(), torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(), torch._C._get_math_sdp_enabled(),
        torch.get_default_device() if _function_modes() else None,
    ]  # fmt: skip
    memory = []
    with DisableTorchFunctionSubclass():
        for i, x in enumerate(leaves):
            kind = type(x)
            if kind is DTensor:
                key.append((x._layout, x.dtype, x.requires_grad, strides(x)))
            elif isinstance(x, Tensor):
                size = tuple(x.size()[1:]) if i in jagged else tuple(x.size())
                key.append((x.layout, size, x.dtype, x.requires_grad, x.stride(), x.device, kind))
            elif kind in CONSTANTS:
                key.append((kind, _comparable(x)))
                continue
            else:
                raise refusal(
                    f"an argument is a {kind.__name__}",
                    "pass only tensors, numbers and strings (in lists, tuples, dicts, dataclasses); use anything else "
                    "through a closure, a global or an attribute",
                )
            memory.append((x.layout is torch.strided and x.device.type != "meta" and _data_ptr(x)) or id(x))
    if len(set(memory)) < len(memory):  # arguments that alias each other
        key.append(tuple(map(memory.index, memory)))
    return tuple(key)


def _comparable(x: object) -> object:
    """A constant that is equal only if it is the same, unlike 0.0 and -0.0."""
    return repr(x) if isinstance(x, float | complex) else x


# ---- the state that a function reaches ------------------------------------------------------------------------------


Calls = dict[CodeType, dict[str, Any]]
"""The code of functions, with their globals."""


class Guard(NamedTuple):
    """Guards the values in one container.

    Attributes:
        name: of the container, for messages.
        container: whose length is guarded.
        read: gives the present values.
        values: the expected ones.
    """

    name: str
    container: Collection[Any]
    length: int
    read: Callable[[], Iterable[Any]]
    values: list[Any]

    def holds(self) -> bool:
        """Whether the values are as they were, perhaps as other objects, which are remembered then."""
        if len(self.container) != self.length:
            return False
        found = list(self.read())
        for x, before in zip(found, self.values, strict=True):
            if x is not before and not (
                type(x) is type(before) and type(x) in CONSTANTS and _comparable(x) == _comparable(before)
            ):
                return False
        self.values[:] = found
        return True


class StateGuards:
    """Guards of everything that a function reaches by itself, in its present state.

    Attributes:
        tensors: the reachable tensors, parameters and buffers too.
        generators: those of torch.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        found = ReachableState(function, {})
        self._guards = found.guards
        self._called: Calls = {}
        global_hooks = (
            all_modules._global_forward_hooks, all_modules._global_forward_pre_hooks,
            all_modules._global_backward_hooks, all_modules._global_backward_pre_hooks,
        )  # fmt: skip
        for hooks in global_hooks:
            self._guards.append(Guard("hooks of all modules", hooks, len(hooks), hooks.values, list(hooks.values())))
        owned = chain.from_iterable((m._parameters, m._buffers, m._modules, *_hooks_of(m)) for m in found.modules)
        self._empty = [x for x in owned if not x]
        self._modules, self._classes = found.modules, [type(m) for m in found.modules]
        self.tensors, self.generators = found.tensors, found.generators
        self._facts = self._tensor_facts()
        self._flatten()

    def add(self, called: Calls) -> None:
        """Guard what functions of installed libraries read that a trace called."""
        if new := {code: called[code] for code in called.keys() - self._called.keys()}:
            self._called |= new
            self._guards += ReachableState(None, new).guards
            self._flatten()

    def _tensor_facts(self) -> list[Any]:
        with DisableTorchFunctionSubclass():
            facts: list[Any] = list(map(_tensor_facts, self.tensors))
            return facts + [x._layout for x in self.tensors if isinstance(x, DTensor)]

    def _flatten(self) -> None:
        """Containers, lengths, readers and values of all guards in lists, which are checked without Python loops."""
        self._containers = [guard.container for guard in self._guards]
        self._lengths = [guard.length for guard in self._guards]
        self._readers = [guard.read for guard in self._guards]
        self._values = list(chain.from_iterable(guard.values for guard in self._guards))

    def violated(self) -> str | None:
        """The name of a guard that does not hold; None if all hold."""
        try:
            if list(map(len, self._containers)) != self._lengths:
                return self._find_violated()
            if not all(map(is_, chain.from_iterable(map(call, self._readers)), self._values)):
                if (name := self._find_violated()) is not None:
                    return name
                self._flatten()
        except (KeyError, AttributeError):
            return self._find_violated()
        if list(map(type, self._modules)) != self._classes:
            return "the class of a module"
        if any(self._empty):
            return "a parameter, buffer, submodule or hook was added to a module that had none"
        if self._tensor_facts() != self._facts:
            return "requires_grad, dtype, shape or layout of a tensor that the function uses"
        return None

    def _find_violated(self) -> str | None:
        for guard in self._guards:
            try:
                if not guard.holds():
                    return guard.name
            except (KeyError, AttributeError):
                return guard.name
        return None


class ReachableState:
    """Walks everything that `function` reaches.

    Attributes:
        guards: of the values in it.
        modules: the reachable modules.
        tensors: the reachable tensors, parameters and buffers too.
        generators: the reachable ones of torch.
    """

    def __init__(self, function: object, called: Calls) -> None:
        self._names = set(CALLED_NAMES).union(*map(_names_in, called))
        before = -1
        while before < len(self._names):  # a name found late may be an attribute of an object visited early
            before = len(self._names)
            self.guards: list[Guard] = []
            self.modules: list[nn.Module] = []
            self.tensors: list[Tensor] = []
            self.generators: list[torch.Generator] = []
            self._seen: dict[int, Any] = {}
            self._in_libraries = False
            self._visit(function)
            self._in_libraries = True  # where an iterator may be anything, also of a callback of the interpreter
            for code, globals_ in called.items():
                self._visit_code(code, globals_)
        del self._seen

    def _visit(self, x: object) -> None:
        if isinstance(x, CONSTANTS) or id(x) in self._seen:
            return
        if isinstance(x, type):
            self._visit_class(type(x), type)
            self._visit_class(x, object)
            return
        self._seen[id(x)] = x
        match x:
            case Tensor():
                self.tensors.append(x)
                self._guard_names("a tensor", vars(x), self._names.intersection(vars(x)))
            case nn.Module():
                self._visit_module(x)
            case FunctionType():
                self._visit_function(x)
            case MethodType():
                self._visit_each((x.__self__, x.__func__))
            case partial():
                self._visit_each((x.func, x.args, x.keywords))
            case property() | staticmethod() | classmethod():
                self._visit(x.fget if isinstance(x, property) else x.__func__)
            case Collection() if isinstance(x, CONTAINERS):
                self._visit_container(x)
            case ModuleType():
                if _package(x) not in KNOWN:
                    self._guard_names(x.__name__, vars(x), self._names.intersection(vars(x)))
                elif x is os and not self._names.isdisjoint(("environ", "getenv")):
                    self._visit(os.environ)
            case _ if _package(type(x)) in KNOWN:
                self._visit_of_library(x)
            case _:
                self._visit_object(x)

    def _visit_container(self, x: Collection[Any]) -> None:
        if isinstance(x, dict | MappingProxyType):
            self._guard_elements("a dict", x, x.values)
            self._guard_elements("a key of a dict", x, x.keys)
        elif isinstance(x, ARRAYS):
            array = np.asarray(x)
            if array.nbytes <= MAX_BYTES and not array.dtype.hasobject:
                self._guard(f"a {type(x).__name__}", (), _contents_of(x))
            elif not self._in_libraries:
                what = f"the function reads a {type(x).__name__} of {array.nbytes:,} bytes and {array.dtype}"
                raise refusal(f"{what}: up to {MAX_BYTES:,} bytes of numbers are compared", "make it a tensor before")
        else:
            self._guard_elements(f"a {type(x).__name__}", x, x.__iter__)
        if hasattr(x, "__dict__"):  # of a class of its own
            self._visit_object(x)

    def _visit_of_library(self, x: object) -> None:
        """Objects that have their values elsewhere than in attributes."""
        kind = type(x)
        match x:
            case BuiltinMethodType():
                self._visit(x.__self__)
            case os._Environ():
                self._visit(vars(x)["_data"])  # decoded values are new at each read
            case attrgetter() | methodcaller():
                self._names.update(chain.from_iterable(name.split(".") for name in x.__reduce__()[1]))
            case ContextVar() | ReferenceType():
                self._guard(f"a {kind.__name__}", (), lambda: [x.get(None) if isinstance(x, ContextVar) else x()])
            case torch.Generator():
                self.generators.append(x)
            case random.Random() | np.random.Generator() | np.random.RandomState() if not self._in_libraries:
                raise refusal(f"the function reads a {kind.__name__}", "draw by torch, or pass what was drawn")
            case Iterator() if kind.__module__ in ("builtins", "itertools") and not self._in_libraries:
                raise refusal(f"the function reads a {kind.__name__}", "take what it gives outside, and pass that")
            case _:
                self._visit_object(x)

    def _visit_each(self, values: Iterable[Any]) -> None:
        for x in values:
            self._visit(x)

    def _guard(self, name: str, container: Collection[Any], read: Callable[[], Iterable[Any]]) -> None:
        self.guards.append(Guard(name, container, len(container), read, list(read())))
        self._visit_each(self.guards[-1].values)

    def _guard_elements(self, name: str, container: Collection[Any], read: Callable[[], Iterable[Any]]) -> None:
        self._guard(name, container, tuple if len(container) > MAX_ELEMENTS else read)

    def _guard_names(self, name: str, own: Any, names: Iterable[str], grows: bool = True) -> None:
        """Some values of a dict. Unless it `grows` without harm, its length as well."""
        names = sorted(names)
        if not names and not grows:
            self._guard(name, own, tuple)
        elif names:
            read = partial(itemgetter(*names, names[0]), own)  # the first twice: of one name it gives no tuple
            self._guard(f"{name}.{'/'.join(names)}", () if grows else own, read)

    def _visit_function(self, function: FunctionType) -> None:
        name, globals_ = function.__qualname__, function.__globals__
        if function is os.getenv:
            self._visit(os.environ)
        if function.__name__ in SEEDING:
            raise refusal(f"the function calls {function.__name__}", SEED)
        if _package(function) in KNOWN:
            return
        if function.__closure__:
            self._guard(f"the closure of {name}", (), partial(_contents, function.__closure__))
        parts = attrgetter("__defaults__", "__kwdefaults__", "__code__")
        self._guard(f"the defaults or the code of {name}", (), partial(parts, function))
        self._guard_names(name, vars(function), self._names.intersection(vars(function)), grows=False)
        used = _names_in(function.__code__)
        if seeding := SEEDING & used:
            raise refusal(f"{name} calls {min(seeding)}", SEED)
        self._names |= used
        found = used.intersection(globals_)
        if is_installed(function.__code__):  # what it reads is known when it has run
            found = {x for x in found if isinstance(globals_[x], CONSTANTS)}
        else:
            self._visit_each(sys.modules[x] for x in used & sys.modules.keys())  # which it may import
        self._guard_names(f"globals of {name}: ", globals_, found)

    def _visit_code(self, code: CodeType, globals_: dict[str, Any]) -> None:
        """What a function of an installed library reads that has run; those that it called have run as well."""
        if seeding := SEEDING.intersection(code.co_names):
            raise refusal(f"{code.co_qualname} calls {min(seeding)}", SEED)
        found = {x for x in _names_in(code) & globals_.keys() if not isinstance(globals_[x], FunctionType | ModuleType)}
        self._guard_names(f"globals of {code.co_qualname}: ", globals_, found)

    def _visit_module(self, module: nn.Module) -> None:
        self.modules.append(module)
        own, name = module.__dict__, type(module).__name__
        if not isinstance(module, capture_hooks.RunsInReplays):
            self._visit_class(type(module), nn.Module)
            constants = {key for key, x in own.items() if key[0] != "_" and isinstance(x, CONSTANTS)}
            self._guard_names(name, own, constants | self._names.intersection(own), grows=False)
        for owned in (module._parameters, module._buffers, module._modules):
            if owned:
                self._guard_elements(f"what {name} owns", owned, owned.values)
        for hooks in _hooks_of(module):
            if hooks:
                self._guard_elements(f"hooks of {name}", hooks, hooks.values)

    def _visit_object(self, x: Any) -> None:
        kind = type(x)
        if kind.__module__ == "shardwise._graph_capture.api":
            self._visit(x.function)
        if isinstance(x, _lru_cache_wrapper):
            self._visit(x.__wrapped__)
        if _package(kind) in OPAQUE and not isinstance(x, Optimizer | LRScheduler | GradScaler):
            return
        own, name = getattr(x, "__dict__", {}), kind.__name__
        if not isinstance(own, dict):  # some classes have what they like there
            return
        self._guard(f"the class of a {name}", (), lambda: [type(x)])
        names = {*own} if _package(kind) == "collections" else self._read_of(own)  # UserDict and such
        self._guard_names(name, own, names, grows=False)
        slots = [n for c in kind.__mro__ for n in getattr(c, "__slots__", ()) if n in self._names and hasattr(x, n)]
        if slots:
            self._guard(f"{name}.{'/'.join(slots)}", (), partial(attrgetter(*slots, slots[0]), x))

    def _visit_class(self, kind: type, end: type) -> None:
        """Methods and values of a class and its bases up to `end`, by the names that are used."""
        for c in kind.__mro__[: kind.__mro__.index(end)]:
            own = vars(c)
            if id(c) in self._seen:
                continue
            self._seen[id(c)] = c
            found = self._names.intersection(own)
            if _package(c) in KNOWN:
                for name in found:
                    if isinstance(own[name], FunctionType):
                        self._names |= _names_in(own[name].__code__)
                continue
            special = {n for n, x in own.items() if n[:2] == "__" == n[-2:] and isinstance(x, FunctionType)}
            self._guard_names(c.__name__, own, self._read_of(own) | special - {"__init__"})

    def _read_of(self, own: Mapping[str, Any]) -> set[str]:
        """The attributes that are read, all of them if code reads some without their names."""
        if self._in_libraries or self._names.isdisjoint(READ_ALL):
            return self._names.intersection(own)
        return {name for name in own if name[:2] != "__"}


def is_installed(code: CodeType) -> bool:
    """Whether it is of a library; there are too many functions in some to follow all that one may call."""
    return "site-packages" in code.co_filename


@contextmanager
def calls_of_libraries() -> Iterator[Calls]:
    """The functions of installed libraries that this thread calls inside, while it is traced."""
    found: Calls = {}
    collecting = {getattr(callback, "__code__", None) for callback in gc.callbacks}  # run at any time

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if event == "call" and is_installed(code) and package not in KNOWN and code not in collecting:
            tracer = capture_hooks.current.tracer
            if tracer is not None and not tracer.paused:  # not kernels that custom ops call, nor a compiler
                found[code] = frame.f_globals

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(before)


def _hooks_of(module: nn.Module) -> tuple[dict[Any, Any], ...]:
    return (
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks,
    )  # fmt: skip


def _names_in(code: CodeType) -> set[str]:
    """The names that a function uses, and functions inside it; and its texts, which may be names for `getattr`."""
    found = set(code.co_names)
    for x in code.co_consts:
        if isinstance(x, CodeType):
            found |= _names_in(x)
        elif isinstance(x, str | tuple | frozenset):
            texts = [x] if isinstance(x, str) else x
            found.update(text for text in texts if isinstance(text, str) and text.isidentifier())
    return found


def _contents_of(x: object) -> Callable[[], list[object]]:
    """Reads the elements of an array: the same object as long as they are the same."""
    last = b""

    def read() -> list[object]:
        nonlocal last
        array = np.asarray(x)
        now = f"{array.dtype} {array.shape} ".encode() + array.tobytes()
        last = last if now == last else now
        return [last]

    return read


def _package(x: Any) -> str:
    name = x.__name__ if isinstance(x, ModuleType) else getattr(x, "__module__", None) or ""
    return str(name).partition(".")[0]


def _contents(cells: Sequence[CellType]) -> list[Any]:
    return [_content(cell) for cell in cells]


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
