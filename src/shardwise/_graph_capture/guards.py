"""Guards of captured graphs: the dependencies of a graph other than the values of its tensor inputs.

    step = sw.capture(lambda x: model(x) * config.scale)

`cache_key` covers `x` and the modes around the call. `Guards` covers `model`, `config`, and all else that functions
read in the trace, whatever their file: closures, defaults, globals. Their contents are compared at each call: constants
by value, tensors, functions and classes by identity, containers and objects by their contents. Of a Python module those
globals are compared whose names any function uses that ran. Values that cannot be compared, such as an iterator, are
refused by name. Most objects and code of torch, numpy, the standard library and this library are not guarded.
"""

import dis
import gc
import os
import random
import sys
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import _lru_cache_wrapper, cached_property, partial
from itertools import chain
from operator import attrgetter, call, is_, itemgetter
from types import (
    BuiltinMethodType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple
from weakref import ReferenceType

import numpy as np
import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass, _functorch
from torch.nn.modules import module as all_modules
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from shardwise import _collectives as collectives
from shardwise._graph_capture.structure import CONSTANTS
from shardwise._graph_capture.tracer import autocast_state, identity, refusal, strides
from shardwise._tensor.dispatch.hooks import are_installed
from shardwise._tensor.dtensor import DTensor
from shardwise._trace import capture_hooks, comm_trace
from shardwise.errors import CaptureError

LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy", "shardwise"})
LOOKED_INTO = ("types", "argparse", "collections", "_thread", "os", "torch.optim", "torch.amp")  # guarded objects
RANDOM = (random.Random, np.random.Generator, np.random.RandomState)
ITERATORS = ("builtins", "itertools")  # their iterators have a hidden position
SEEDING = frozenset({
    "manual_seed", "manual_seed_all", "fork_rng", "get_rng_state", "set_rng_state", "get_rng_state_all",
    "set_rng_state_all", "default_rng", "Random", "RandomState",
})  # fmt: skip
ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")  # instructions that read them
UNSET = object()  # an empty cell or slot
MAX_ELEMENTS = 100_000  # elements of a container, compared at each call
MAX_BYTES = 1 << 20  # bytes of an array
WRAPPERS = (MethodType, BuiltinMethodType, staticmethod, classmethod, property, cached_property, partial)
OF_MODULES = vars(nn.Module()).keys()
TRAINING = ("training", "training")  # twice: of one name `itemgetter` gives no tuple
CALLED = (  # dicts of a module that a call of it uses
    "_parameters", "_buffers", "_modules",
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip

_function_modes, _dispatch_modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
_saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_facts = attrgetter("requires_grad", "dtype", "shape")
_layout = attrgetter("_layout", "_layout")  # twice: of one name it gives no tuple
_cell_contents = vars(CellType)["cell_contents"].__get__
_data_ptr: Callable[[Tensor], int] = torch._C.TensorBase.data_ptr  # reads the local tensor that a DTensor is


# ---- the call -------------------------------------------------------------------------------------------------------


def must_run_eagerly() -> bool:
    """Whether a tool or mode around the call observes or changes the function's ops."""
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
        jagged: leaves whose first size is not part of the key; the graph compares it, if it depends on it.

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
    """A constant that equals only itself, unlike 0.0 and -0.0."""
    return repr(x) if isinstance(x, float | complex) else x


# ---- the state that functions read ----------------------------------------------------------------------------------


class Guard(NamedTuple):
    """The values that `read` returned, of the object called `name`."""

    name: str
    read: Callable[[], Collection[Any]]
    values: list[Any]

    def holds(self) -> bool:
        """Whether the values are unchanged, perhaps as other objects, which are then remembered."""
        try:
            found = list(self.read())
        except (KeyError, AttributeError):
            return False
        if len(found) != len(self.values) or not all(map(_is_same, found, self.values)):
            return False
        self.values[:] = found
        return True


class Guards:
    """Guards of the values that a function reads, from before they were read.

    Attributes:
        reached: `id` of tensors, with parameters and buffers, and of the C++ objects of torch's generators.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.reached: set[int] = {identity(torch.default_generator)}
        self._guards: list[Guard] = []
        # By the id of a module's dict that dict, and the globals in it that are read.
        self._globals: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._modules: list[dict[str, Any]] = []  # modules reached as objects
        self._names: set[str] = set()  # names of attributes that functions read
        self._texts: set[str] = set()  # texts in functions, perhaps names for `getattr`
        self._seen: dict[int, Any] = {}
        self._empty: list[Collection[Any]] = []  # guarded to stay so
        self._sized: list[Collection[Any]] = []  # collections with guarded lengths
        self._sizes: list[int] = []
        self._objects: list[Any] = []
        self._kinds: list[type] = []
        self._tensors: list[Tensor] = []
        self._facts: list[tuple[Any, ...]] = []
        self._imports = 0  # running imports
        self._functions: dict[CodeType, list[FunctionType]] = {}
        self._ran = {getattr(callback, "__code__", None) for callback in gc.callbacks}  # these run at any time
        for hooks in ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks"):
            self._visit(getattr(all_modules, f"_global_{hooks}"), "hooks of all modules")
        self._visit(function, getattr(function, "__qualname__", type(function).__name__))
        self._flatten()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Guard the values of functions that this thread calls inside, before they run."""
        before = sys.getprofile()
        sys.setprofile(self._note)
        try:
            yield
            if sys.getprofile() != self._note:  # an error removes it
                raise refusal(
                    "the function sets a profiler, or catches an error about what cannot be captured",
                    "do neither inside of the captured function",
                )
        finally:
            sys.setprofile(before)
            self._flatten()

    def _flatten(self) -> None:
        """Readers, lengths and values of all guards in lists, for comparison without Python loops."""
        self._all = [*self._guards]
        for own, values in self._globals.values():
            names = [*values, next(iter(values))]  # one twice: of one name `itemgetter` gives no tuple
            found = [values[name] for name in names]
            self._all.append(Guard(f"a global ({', '.join(values)})", partial(itemgetter(*names), own), found))
        self._readers = [guard.read for guard in self._all]
        self._lengths = [len(guard.values) for guard in self._all]
        self._values = list(chain.from_iterable(guard.values for guard in self._all))

    def violated(self) -> str | None:
        """The name of the changed value; None if none has changed."""
        try:
            found = list(map(call, self._readers))
        except (KeyError, AttributeError):
            found = []
        if list(map(len, found)) != self._lengths or not all(map(is_, chain.from_iterable(found), self._values)):
            for guard in self._all:
                if not guard.holds():
                    return guard.name
            self._values = list(chain.from_iterable(found))  # equal objects
        if any(self._empty) or list(map(len, self._sized)) != self._sizes:
            return "an empty dict or attributes of an object"
        if list(map(type, self._objects)) != self._kinds:
            return "the class of an object"
        with DisableTorchFunctionSubclass():
            if list(map(_facts, self._tensors)) != self._facts:
                return "requires_grad, dtype or shape of a tensor that the function uses"
        return None

    # ---- functions that run -----------------------------------------------------------------------------------------

    def _note(self, frame: FrameType, event: str, called: object) -> None:
        tracer, code = capture_hooks.current.tracer, frame.f_code
        if tracer is None or tracer.paused:  # kernels that custom ops call, and compilers, are not checked
            return
        if code.co_name == "_find_and_load":  # an import runs its code once
            self._imports += {"call": 1, "return": -1}.get(event, 0)
        if self._imports:
            return
        if event == "return" and isinstance(called, ModuleType):  # importlib.import_module returns one
            self._visit(called, called.__name__)
        if event == "c_call" and isinstance(read := getattr(called, "__self__", None), Tensor):
            tracer.check_method(str(getattr(called, "__name__", "")), read)
        in_library = _is_of_library(frame)
        if event == "c_call" and isinstance(getattr(called, "__self__", None), torch.Generator):
            if not in_library:
                raise _seeding(called)
            if frame.f_globals is vars(torch.random) and frame.f_back and not _is_of_library(frame.f_back):
                raise _seeding(code)  # torch.initial_seed and the like
        if event == "call" and code not in self._ran:
            self._ran.add(code)
            for function in self._functions.get(code, ()):
                self._visit_function(function)
            if not in_library or code is os.getenv.__code__:
                self._visit_code(code, frame.f_globals)

    def _visit_function(self, function: FunctionType) -> None:
        """Guard the values that a function holds, when it runs."""
        name, parts = function.__qualname__, ("__defaults__", "__kwdefaults__", "__code__")
        self._guard(f"the defaults or the code of {name}", partial(attrgetter(*parts), function), parts)
        if function.__closure__:
            cells = [partial(_cell_contents, cell) for cell in function.__closure__]
            self._guard(name, partial(_values_of, cells), function.__code__.co_freevars)

    def _visit_code(self, code: CodeType, globals_: dict[str, Any]) -> None:
        """Guard the globals that a function names, also in all reached modules."""
        found = [x for x in dis.get_instructions(code) if x.opname != "EXTENDED_ARG"]
        names = {x.argval for x in found if x.opname in ATTRIBUTES} - self._names
        texts = {x.argval for x in found if x.opname == "LOAD_CONST" and isinstance(x.argval, str)} - self._texts
        self._names |= names
        self._texts |= texts
        for own in [*self._modules]:
            self._visit_globals(own, names, texts)
        self._visit_globals(globals_, {x.argval for x in found if x.opname in ("LOAD_GLOBAL", "LOAD_NAME")})
        for i, x in enumerate(found):
            if x.opname == "IMPORT_NAME":
                with suppress(ImportError):
                    module = __import__(x.argval, globals_, None, found[i - 1].argval, found[i - 2].argval)
                    self._visit(module, x.argval)

    def _visit_globals(self, own: dict[str, Any], names: set[str], texts: Collection[str] = ()) -> None:
        """Guard some globals of a module; of a library only sources of random numbers, and the environment."""
        in_library = _package(own.get("__name__")) in LIBRARIES
        for name in sorted((names if in_library else names.union(texts)) & own.keys()):
            x = own[name]
            if not in_library:
                self._globals.setdefault(id(own), (own, {}))[1].setdefault(name, x)
            elif not (isinstance(x, ModuleType) or _seeds(x) or x is os.environ):
                continue
            self._visit(x, f"{own.get('__name__')}.{name}")

    # ---- values -----------------------------------------------------------------------------------------------------

    def _guard(self, name: str, read: Callable[[], Collection[Any]], parts: Iterable[object] = ()) -> None:
        """Guard the values that `read` returns, and the contents of those named in `parts`."""
        values = read()
        if len(values) > MAX_ELEMENTS:
            raise _incomparable(name, f"container of {len(values):,} elements")
        if not values and not isinstance(values, tuple):  # a view of a dict
            self._empty.append(values)
            return
        self._guards.append(Guard(name, read, list(values)))
        for part, x in zip(parts, list(values), strict=False):
            self._visit(x, f"{name}.{part}")

    def _visit(self, x: Any, name: str) -> None:
        """Guard the contents of `x`."""
        if type(x) in CONSTANTS or id(x) in self._seen:
            return
        self._seen[id(x)] = x
        if _seeds(x):
            raise _seeding(x)
        module = str(type(x).__module__)
        if isinstance(x, Tensor):
            with DisableTorchFunctionSubclass():
                self._facts.append(_facts(x))
            self._tensors.append(x)
            if isinstance(x, DTensor):
                self._guard(f"the layout of {name}", partial(_layout, x))
            self.reached.add(id(x))
            self._visit_attributes(x, name)
        elif isinstance(x, torch.Generator):
            self.reached.add(identity(x))
        elif isinstance(x, type):
            self._visit_class(x)
        elif isinstance(x, ModuleType):
            self._modules.append(vars(x))
            self._visit_globals(vars(x), self._names, self._texts)
        else:
            self._visit_contents(x, name)
            if isinstance(x, nn.Module) or module.startswith(LOOKED_INTO) or _package(module) not in LIBRARIES:
                self._visit_attributes(x, name)

    def _visit_contents(self, x: Any, name: str) -> None:
        """Guard an object's contents other than attributes."""
        match x:
            case dict() | MappingProxyType():
                self._guard(name, x.values, x)
                if x:
                    self._guard(f"the keys of {name}", x.keys, x)
            case list() | tuple() | set() | frozenset() | deque():
                self._guard(name, partial(tuple, x), range(len(x)))
            case np.ndarray() | array() | bytearray() | memoryview():
                if np.asarray(x).nbytes > MAX_BYTES or np.asarray(x).dtype.hasobject:
                    raise _incomparable(name, f"{type(x).__name__} of {np.asarray(x).nbytes:,} bytes")
                self._guard(name, partial(_bytes_of, x))
            case ContextVar() | ReferenceType():
                self._guard(name, lambda: (x.get(None) if isinstance(x, ContextVar) else x(),), ("value",))
            case _ if isinstance(x, RANDOM) or (isinstance(x, Iterator) and type(x).__module__ in ITERATORS):
                raise _incomparable(name, type(x).__name__)
            case FunctionType():
                self._guard(name, vars(x).values, vars(x))
                self._functions.setdefault(x.__code__, []).append(x)
                if x.__code__ in self._ran:
                    self._visit_function(x)
            case _lru_cache_wrapper():  # its results, and the function that makes others; a hit changes their order
                self._guard(name, lambda: sorted(gc.get_referents(x), key=id), range(MAX_ELEMENTS))
            case _ if isinstance(x, WRAPPERS) or type(x).__module__ == "shardwise._graph_capture.api":
                for part in ("__self__", "__func__", "fget", "func", "args", "keywords", "function"):
                    self._visit(getattr(x, part, None), name)

    def _visit_attributes(self, x: Any, name: str) -> None:
        """Guard the attributes and the class of an object."""
        own: Any = getattr(x, "__dict__", None)
        kind = type(x)
        if isinstance(x, nn.Module):
            for key in CALLED:
                self._visit_contents(own[key], name)
            if isinstance(x, capture_hooks.RunsInReplays):  # it replays as a call, which reads what else it has
                return
            names = [*TRAINING, *(key for key in own if key not in OF_MODULES)]
            self._guard(name, partial(itemgetter(*names), own), names)
            self._sized.append(own)
            self._sizes.append(len(own))
        elif kind is DTensor:
            self._guard(name, partial(_users_values, own), [key for key in own if key[0] != "_"])
        elif isinstance(own, dict):  # some classes have what they like there
            self._guard(name, own.values, own)
        members = [d for c in kind.__mro__ if _package(c) not in LIBRARIES for d in vars(c).values()]
        if slots := [d for d in members if isinstance(d, MemberDescriptorType)]:
            self._guard(name, partial(_values_of, [partial(d.__get__, x) for d in slots]), [d.__name__ for d in slots])
        self._objects.append(x)
        self._kinds.append(kind)
        self._visit(kind, kind.__name__)

    def _visit_class(self, kind: type) -> None:
        if _package(kind) not in LIBRARIES:
            self._guard(kind.__name__, vars(kind).values)
            for key, value in vars(kind).items():
                if isinstance(value, FunctionType) or key[:2] != "__":
                    self._visit(value, f"{kind.__name__}.{key}")
        for base in (type(kind), *kind.__bases__):
            self._visit(base, base.__name__)


def _is_same(x: object, before: object) -> bool:
    return x is before or (type(x) is type(before) and type(x) in CONSTANTS and _comparable(x) == _comparable(before))


def _users_values(own: dict[str, Any]) -> tuple[Any, ...]:
    """The attributes of a DTensor that this library did not set."""
    return tuple([x for key, x in own.items() if key[0] != "_"])


def _bytes_of(x: Any) -> tuple[bytes]:
    values = np.asarray(x)
    return (f"{values.dtype} {values.shape} ".encode() + values.tobytes(),)


def _values_of(reads: Sequence[Callable[[], object]]) -> tuple[object, ...]:
    """The contents of cells or slots."""
    try:
        return tuple(map(call, reads))
    except (ValueError, AttributeError):  # one is not filled
        return tuple(map(_value_of, reads))


def _value_of(read: Callable[[], object]) -> object:
    try:
        return read()
    except (ValueError, AttributeError):
        return UNSET


def _seeds(x: object) -> bool:
    """Whether a library uses it to draw random numbers of Python or numpy, or to seed and make generators."""
    if not callable(x) or hasattr(type(x), "__getattr__"):  # its code would run here
        return False
    if isinstance(getattr(x, "__self__", None), RANDOM):
        return True
    return getattr(x, "__name__", "") in SEEDING and _package(x) in LIBRARIES


def _is_of_library(frame: FrameType) -> bool:
    return _package(frame.f_globals.get("__name__")) in LIBRARIES


def _package(x: object) -> str:
    """The package of a module's name, or of an object's module."""
    return str(x if isinstance(x, str) else getattr(x, "__module__", None)).partition(".")[0]


def _incomparable(name: str, what: str) -> CaptureError:
    return refusal(
        f"the function reads {name}, a {what}, which cannot be compared at each call",
        "pass what it needs of it as arguments, or bind that to names outside of the function",
    )


def _seeding(called: object) -> CaptureError:
    return refusal(
        f"the function calls {getattr(called, '__qualname__', None) or getattr(called, 'co_name', called)}",
        "seed generators, and read and set their states, outside of the captured function",
    )
