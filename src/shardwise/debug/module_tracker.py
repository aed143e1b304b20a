"""Which module is running, in forward and in backward, and its parameters; ranges for `torch.profiler` by module."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import record_function
from torch.utils import _pytree as pytree

from shardwise import _collectives as collectives
from shardwise._layout import Placement
from shardwise._rules.row import Args, Kwargs, Op
from shardwise._tensor import DTensor
from shardwise._tensor.dispatch.dispatcher import is_op
from shardwise._tensor.dispatch.hooks import Proceed, hook_calls
from shardwise._tensor.dtensor import name_of
from shardwise._trace.comm_trace import CommEvent, Listener, listening_with

GLOBAL = "Global"  # what runs outside modules, as torch calls it


def in_backward() -> bool:
    """Whether autograd runs a backward in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


class ModuleTracker:
    """Tracks the modules of one rank between `start` and `stop`.

    `torch.utils.module_tracker.ModuleTracker` cannot replace it. With that, 5 of the 18 tests of `CommDebugMode` fail:
    it sees the modules of every simulated rank, keeps a module open after an error in its forward, leaves a module
    whose inputs are leaves before its parameters have gradients, and has no order among modules that share an output.

    In backward a module runs from the gradient of one of its outputs to the gradients of its inputs; if those are
    leaves or need none, until another one begins. Names are those of torch's tools: the class of the outermost module,
    then the path.

    Attributes:
        types: class of each module that ran, in the order in which they began.
        parents: the modules around each.
        children: the modules directly inside each, in order.
        parameters: of each module, its own only.
        placements: of the parameters that are DTensors, by full name.
    """

    def __init__(self) -> None:
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._clear()

    def _clear(self) -> None:
        self._rank: object = None  # the transport, one for each simulated rank; None while stopped
        self._handles: list[Any] = []
        self._forward = [GLOBAL]
        self._backward: list[str] = []
        self._task = -1
        self.types: dict[str, str] = {GLOBAL: ""}
        self.parents: dict[str, tuple[str, ...]] = {GLOBAL: ()}
        self.children: dict[str, list[str]] = {GLOBAL: []}
        self.parameters: dict[str, dict[str, Tensor]] = {}
        self.placements: dict[str, tuple[Placement, ...]] = {}

    def start(self) -> None:
        """Forget what ran before, and track."""
        self._clear()
        self._rank = collectives.transport()
        self._handles = [
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward, always_call=True),
        ]

    def stop(self) -> None:
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

    def around(self, name: str) -> tuple[str, ...]:
        """A module and its ancestors."""
        return (name, *self.parents[name])

    # ---- hooks ----------------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: Args) -> None:
        if collectives.transport() is not self._rank:
            return
        name = self._name(module)
        if name not in self.types:
            self.types[name] = str(type(module)).strip("<>")
            self.parents[name] = tuple(reversed(self._forward))
            self.children[name] = []
            self.children[self._forward[-1]].append(name)
            self._note_parameters(name, module)
        self._forward.append(name)
        # The gradient of a leaf is computed before those of the parameters, so it does not end the module.
        _on_gradients(args, lambda: self._leave(name), leaves=False)

    def _after_forward(self, module: nn.Module, args: Args, output: object) -> None:
        if collectives.transport() is not self._rank:
            return
        name = self._name(module)
        if name in self._forward[1:]:  # entered after start()
            while self._forward.pop() != name:
                pass
            _on_gradients(output, lambda: self._enter(name), leaves=True)

    def _enter(self, name: str) -> None:
        """Backward enters a module. Hooks of modules that share an output run for inner modules first."""
        if self._rank is None:
            return
        self._forget_other_backwards()
        at = len(self._backward)
        while at and name in self.parents[self._backward[at - 1]]:
            at -= 1
        self._backward.insert(at, name)

    def _leave(self, name: str) -> None:
        if self._rank is not None and name in self._backward:
            self._backward.remove(name)

    def _forget_other_backwards(self) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self._backward = task, []

    # ---- names and parameters -------------------------------------------------------------------------------

    def _name(self, module: nn.Module) -> str:
        if module not in self._names:
            for path, child in module.named_modules(prefix=type(module).__name__):
                self._names.setdefault(child, path)
        return self._names[module]

    def _note_parameters(self, name: str, module: nn.Module) -> None:
        for key, parameter in module.named_parameters(recurse=False):
            self.parameters.setdefault(name, {})[key] = parameter
            if isinstance(parameter, DTensor):
                self.placements[f"{name}.{key}"] = parameter.placements


def _on_gradients(tree: object, callback: Callable[[], None], leaves: bool) -> None:
    """Call `callback` when backward reaches one of the tensors in `tree`."""

    def hook(grad: Tensor) -> None:
        callback()

    with DisableTorchFunctionSubclass():
        for x in pytree.tree_leaves(tree):
            if isinstance(x, Tensor) and x.requires_grad and (leaves or not x.is_leaf):
                x.register_hook(hook)


# ---- ranges of a profile --------------------------------------------------------------------------------------------


@contextmanager
def profiler_ranges() -> Iterator[None]:
    """Inside, `torch.profiler` shows a range for each op on DTensors, and a mark for each collective.

    `matmul: [Shard(0)], [Replicate()] in Block.up` is an op with the placements of its operands and the innermost
    module; `all_reduce: 1,024 bytes sent for matmul in backward, operand 1, in Block.up` the start of a collective. The
    ops that torch decomposes an op into are inside its range. Backward has torch's ranges, and marks of collectives.

    Each op costs some microseconds more, optimizers run op by op, and captured graphs are not used.
    """
    tracker = ModuleTracker()

    def in_range(proceed: Proceed, func: Op, args: Args, kwargs: Kwargs) -> object:
        if not is_op(func):
            return proceed()
        operands = [x for x in pytree.tree_leaves((args, kwargs)) if type(x) is DTensor]
        placements = ", ".join(f"[{', '.join(map(str, x.placements))}]" for x in operands)
        with record_function(f"{name_of(func)}: {placements} in {tracker.current}"):
            return proceed()

    tracker.start()
    try:
        with hook_calls(in_range), listening_with(_Marks(tracker)):
            yield
    finally:
        tracker.stop()


class _Marks(Listener):
    def __init__(self, tracker: ModuleTracker) -> None:
        self.tracker = tracker

    def collective(self, kind: str, sent_bytes: int, event: CommEvent | None) -> None:
        cause = "a comparison of ranks" if event is None else f"{event.cause}"
        with record_function(f"{kind}: {sent_bytes:,} bytes sent for {cause}, in {self.tracker.current}"):
            pass
