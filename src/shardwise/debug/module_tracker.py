"""The running module in forward and backward, and its parameters; ranges for `torch.profiler` by module."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import record_function
from torch.utils import _pytree as pytree

from shardwise import _collectives as collectives
from shardwise._rules.row import Args, Kwargs, Op
from shardwise._tensor.dispatch.dispatcher import is_op
from shardwise._tensor.dispatch.hooks import Proceed, hook_calls
from shardwise._tensor.dtensor import dtensors_in, name_of
from shardwise._trace.comm_trace import CommEvent, Listener, listening_with

GLOBAL = "Global"  # torch's name for all outside modules


def in_backward() -> bool:
    """Whether autograd runs a backward in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


@dataclass
class TrackedModule:
    """A module that ran."""

    type: str
    parents: tuple[str, ...] = ()  # the names of the modules around it, the innermost first
    children: list[str] = field(default_factory=list)  # names of those directly inside it that ran, in order
    parameters: Mapping[str, Tensor] = field(default_factory=dict)  # its own only


class ModuleTracker:
    """Tracks the modules of one rank inside a `with` block.

    With `torch.utils.module_tracker.ModuleTracker` 5 of the 18 tests of `CommDebugMode` fail: it sees the modules of
    every simulated rank, keeps a module open after an error in its forward, leaves a module whose inputs are leaves
    before its parameters have gradients, and has no order among modules that share an output.

    In backward a module runs from the gradient of one of its outputs to the gradients of its inputs, or, if these are
    leaves or need none, until another one begins. Names are those of torch's tools: the class of the outermost module,
    then the path.

    Attributes:
        modules: modules that ran, by name, in the order of their start; the first is around all of them.
    """

    def __init__(self) -> None:
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._clear()

    def _clear(self) -> None:
        self._rank: object = None  # the transport, one for each simulated rank; None outside the block
        self._handles: list[Any] = []
        self._forward = [GLOBAL]
        self._backward: list[str] = []
        self._task = -1
        self.modules = {GLOBAL: TrackedModule("")}

    def __enter__(self) -> Self:
        self._clear()
        self._rank = collectives.transport()
        self._handles = [
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward, always_call=True),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._rank = None

    @property
    def current(self) -> str:
        """The innermost running module."""
        if not in_backward() or self.recomputes:
            return self._forward[-1]
        self._forget_other_backwards()
        return self._backward[-1] if self._backward else GLOBAL

    @property
    def recomputes(self) -> bool:
        """Whether backward recomputes a forward (activation checkpointing)."""
        return in_backward() and len(self._forward) > 1

    def _before_forward(self, module: nn.Module, args: Args) -> None:
        if collectives.transport() is not self._rank:
            return
        name = self._name(module)
        if name not in self.modules:
            parents, parameters = tuple(reversed(self._forward)), dict(module.named_parameters(recurse=False))
            self.modules[name] = TrackedModule(str(type(module)).strip("<>"), parents, [], parameters)
            self.modules[self._forward[-1]].children.append(name)
        self._forward.append(name)
        # The gradient of a leaf is computed before those of the parameters, so it does not end the module.
        _on_gradients(args, lambda: self._leave(name), leaves=False)

    def _after_forward(self, module: nn.Module, args: Args, output: object) -> None:
        if collectives.transport() is not self._rank:
            return
        name = self._name(module)
        if name in self._forward[1:]:  # entered inside the block
            while self._forward.pop() != name:
                pass
            _on_gradients(output, lambda: self._enter(name), leaves=True)

    def _enter(self, name: str) -> None:
        """Backward enters a module. Hooks of modules that share an output run for inner modules first."""
        if self._rank is None:
            return
        self._forget_other_backwards()
        at = len(self._backward)
        while at and name in self.modules[self._backward[at - 1]].parents:
            at -= 1
        self._backward.insert(at, name)

    def _leave(self, name: str) -> None:
        if self._rank is not None and name in self._backward:
            self._backward.remove(name)

    def _forget_other_backwards(self) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self._backward = task, []

    def _name(self, module: nn.Module) -> str:
        if module not in self._names:
            for path, child in module.named_modules(prefix=type(module).__name__):
                self._names.setdefault(child, path)
        return self._names[module]


def _on_gradients(tree: object, callback: Callable[[], None], leaves: bool) -> None:
    """Call `callback` when backward reaches one of the tensors in `tree`."""
    with DisableTorchFunctionSubclass():
        for x in pytree.tree_leaves(tree):
            if isinstance(x, Tensor) and x.requires_grad and (leaves or not x.is_leaf):
                x.register_hook(lambda grad: callback())


@contextmanager
def profiler_ranges() -> Iterator[None]:
    """Inside, `torch.profiler` shows a range for each op on DTensors, and a mark for each collective.

    `matmul: [Shard(0)], [Replicate()] in Block.up` is an op with the placements of its operands and the innermost
    module. `all_reduce: 1,024 bytes sent for matmul in backward, operand 1, in Block.up` is the start of a collective.
    Ops of a decomposition are inside the range of their op. Backward has torch's ranges, and marks of collectives.

    Each op costs some microseconds more, optimizers run op by op, and captured graphs are not used.
    """
    tracker = ModuleTracker()

    def in_range(proceed: Proceed, func: Op, args: Args, kwargs: Kwargs) -> object:
        if not is_op(func):
            return proceed()
        operands = dtensors_in((*args, *kwargs.values()))
        placements = ", ".join(f"[{', '.join(map(str, x.placements))}]" for x in operands)
        with record_function(f"{name_of(func)}: {placements} in {tracker.current}"):
            return proceed()

    with tracker, hook_calls(in_range), listening_with(_Marks(tracker)):
        yield


class _Marks(Listener):
    def __init__(self, tracker: ModuleTracker) -> None:
        self.tracker = tracker

    def collective(self, kind: str, sent_bytes: int, event: CommEvent | None) -> None:
        cause = "a comparison of ranks" if event is None else f"{event.cause}"
        with record_function(f"{kind}: {sent_bytes:,} bytes sent for {cause}, in {self.tracker.current}"):
            pass
