"""`CommDebugMode`: collectives by module, with the interface of torch's."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise._layout import Placement
from shardwise._rules.row import Args, Kwargs
from shardwise._tensor import DTensor
from shardwise._tensor.dispatch.dispatcher import is_op
from shardwise._tensor.dispatch.fallback import Wrapper
from shardwise._tensor.dispatch.hooks import Proceed, hook_calls
from shardwise._tensor.dtensor import name_of
from shardwise._tensor.torch_objects import is_torch_dtensor_class
from shardwise._trace.comm_trace import CommEvent, Listener, listening_with
from shardwise.debug.functional_collectives import functional_collective, torch_op
from shardwise.debug.module_tracker import GLOBAL, ModuleTracker, in_backward

FORWARD, BACKWARD, RECOMPUTED = "forward", "backward", "checkpointing"
Counts = dict[Any, int]

# As torch has them, under aten's names and under those of functions.
_TRIVIAL = {"detach", "t", "view", "_to_copy", "to", "as_strided", "transpose"}


@dataclass(frozen=True)
class Operation:
    """One op that ran.

    Args:
        shapes, placements: of the DTensors among its arguments; none for an op on plain or local tensors.
        phase: forward, backward, or checkpointing: forward once more, in backward.
    """

    name: str
    phase: str
    shapes: tuple[tuple[int, ...], ...] = ()
    placements: tuple[tuple[Placement, ...], ...] = ()
    mesh: str = ""

    @property
    def is_trivial(self) -> bool:
        return self.name.removeprefix("aten.").partition(".")[0] in _TRIVIAL

    def is_shown(self, noise_level: int) -> bool:
        return noise_level > 2 or (not self.is_trivial and (noise_level > 1 or (noise_level > 0 and bool(self.shapes))))

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "input_shape": [str(shape) for shape in self.shapes],
            "input_sharding": [str(placements) for placements in self.placements],
            "device_mesh": self.mesh,
            "is_bw": self.phase != FORWARD,
            "is_activation_checkpointing": self.phase == RECOMPUTED,
        }


@dataclass
class _Traffic:
    """Of one module and all modules inside it, by phase."""

    counts: dict[str, Counts] = field(default_factory=lambda: {FORWARD: defaultdict(int), BACKWARD: defaultdict(int)})
    sent_bytes: dict[str, int] = field(default_factory=lambda: {FORWARD: 0, BACKWARD: 0})


class CommDebugMode(Listener):
    """Counts the collectives of this rank and the bytes it sends, by module, forward and backward.

    A context manager with the methods of `torch.distributed.tensor.debug.CommDebugMode`. Collectives are counted under
    the same keys, ops of `torch.ops.c10d_functional`; a redistribution is the collective that was planned, which may be
    another one than that of torch's DTensor. Checks that ranks agree count too. Gradients that `.grad` reduces count as
    backward of no module ("Global"). Functional collectives of `torch.distributed` that other code calls count as well,
    among them those of torch's DTensor.

    `c10d_functional` has its ops once `torch.distributed._functional_collectives` is imported.
    """

    def __init__(self) -> None:
        self._tracker = ModuleTracker()
        self._entered = ExitStack()
        self._clear()

    def _clear(self) -> None:
        self._counts: Counts = defaultdict(int)
        self._bytes: Counts = defaultdict(int)
        self._traffic: dict[str, _Traffic] = {GLOBAL: _Traffic()}
        self._operations: dict[str, list[Operation]] = {}

    def __enter__(self) -> Self:
        self._clear()
        self._tracker.start()
        self._entered.callback(self._tracker.stop)
        self._entered.enter_context(listening_with(self))
        self._entered.enter_context(hook_calls(self._see_op))
        self._entered.enter_context(_LocalOps(self._note_local_op))
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.close()

    def __repr__(self) -> str:
        return f"CommDebugMode(get_total_counts()={self.get_total_counts()})"

    # ---- recording ------------------------------------------------------------------------------------------

    def collective(self, kind: str, sent_bytes: int, event: CommEvent | None) -> None:
        self._count(torch_op(kind), sent_bytes, event is not None and event.cause.kind == "gradient")

    def _count(self, key: object, sent_bytes: int, of_gradients: bool = False) -> None:
        self._counts[key] += 1
        self._bytes[key] += sent_bytes
        phase = BACKWARD if in_backward() or of_gradients else FORWARD
        for name in self._tracker.around(self._tracker.current):
            traffic = self._traffic.setdefault(name, _Traffic())
            traffic.counts[phase][key] += 1
            traffic.sent_bytes[phase] += sent_bytes

    def _see_op(self, proceed: Proceed, func: Callable[..., object], args: Args, kwargs: Kwargs) -> object:
        if is_op(func):
            operands = [x for x in pytree.tree_leaves((args, kwargs)) if type(x) is DTensor]
            shapes = tuple(x._layout.shape for x in operands)
            mesh = str(operands[0]._layout.mesh) if operands else ""
            self._note(Operation(name_of(func), self._phase(), shapes, tuple(x.placements for x in operands), mesh))
        return proceed()

    def _note_local_op(self, func: object, args: Args) -> None:
        self._note(Operation(str(func), self._phase()))
        found = functional_collective(func, args)
        if found is not None:
            self._count(*found)

    def _note(self, operation: Operation) -> None:
        self._operations.setdefault(self._tracker.current, []).append(operation)

    def _phase(self) -> str:
        return RECOMPUTED if self._tracker.recomputes else BACKWARD if in_backward() else FORWARD

    # ---- results --------------------------------------------------------------------------------------------

    def get_total_counts(self) -> int:
        """How many collectives there were."""
        return sum(self._counts.values())

    @property
    def comm_counts(self) -> Counts:
        """How many collectives there were, by op; 0 for others."""
        return self._counts

    def get_comm_counts(self) -> Counts:
        """The same as `comm_counts`."""
        return self._counts

    def get_comm_bytes(self) -> Counts:
        """What this rank sent to others, in bytes, by op; 0 for others."""
        return self._bytes

    @property
    def comm_module_counts(self) -> dict[str, dict[str, Counts]]:
        """The same as `get_module_counts()`."""
        return self.get_module_counts()

    def get_module_counts(self) -> dict[str, dict[str, Counts]]:
        """How many collectives there were by module (and those inside it), "forward" or "backward", and op."""
        return {name: traffic.counts for name, traffic in self._traffic.items()}

    def get_module_bytes(self) -> dict[str, dict[str, int]]:
        """What this rank sent, in bytes, by module (and those inside it), and "forward" or "backward"."""
        return {name: traffic.sent_bytes for name, traffic in self._traffic.items()}

    def get_parameter_info(self) -> dict[str, dict[str, Tensor]]:
        """The parameters of each module that ran, detached, by module and name."""
        found = self._tracker.parameters
        return {name: {key: p.detach() for key, p in own.items()} for name, own in found.items()}

    def get_sharding_info(self) -> dict[str, tuple[Placement, ...]]:
        """The placements of the parameters that are DTensors, by module and name with a dot between."""
        return self._tracker.placements

    def generate_json_dump(self, file_name: str = "comm_mode_log.json", noise_level: int = 3) -> None:
        """Write the content of `generate_comm_debug_tracing_table` as nested JSON, one object a module."""
        Path(file_name).write_text(json.dumps(self._as_json(GLOBAL, noise_level), indent=4), encoding="utf-8")

    def _as_json(self, name: str, noise_level: int) -> dict[str, Any]:
        traffic = self._traffic.get(name, _Traffic())
        found: dict[str, Any] = {
            "fqn": name,
            "module_type": self._tracker.types[name] if noise_level else "",
            "parameters": self._sharded_parameters(name) if noise_level else [],
            "children": [self._as_json(child, noise_level) for child in self._tracker.children[name]],
        }
        for phase in (FORWARD, BACKWARD):
            found[f"collectives_{phase}"] = [(str(key), count) for key, count in traffic.counts[phase].items()]
            found[f"sent_bytes_{phase}"] = traffic.sent_bytes[phase]
        for phase in (FORWARD, BACKWARD, RECOMPUTED):
            shown = self._shown_operations(name, phase, noise_level)
            found[f"operations_{phase}"] = [operation.as_json() for operation in shown]
        return found

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """A table of the modules, each with its collectives, bytes and ops, with colours for a terminal.

        Args:
            noise_level: 0 collectives only; 1 also classes, parameters and ops on DTensors; 2 also ops on plain
                or local tensors; 3 also trivial ones such as views.
        """
        return "".join(line for name in self._tracker.types for line in self._module_lines(name, noise_level))

    def log_comm_debug_tracing_table_to_file(self, file_name: str = "comm_mode_log.txt", noise_level: int = 3) -> None:
        """Write the table to a file, without colours."""
        table = re.sub(r"\x1B\[[0-?]*[ -/]*[@-~]", "", self.generate_comm_debug_tracing_table(noise_level))
        Path(file_name).write_text(table, encoding="utf-8")

    def _sharded_parameters(self, name: str) -> list[tuple[str, str]]:
        keys = self._tracker.parameters.get(name, {})
        found = ((key, self._tracker.placements.get(f"{name}.{key}")) for key in keys)
        return [(key, str(placements)) for key, placements in found if placements is not None]

    def _shown_operations(self, name: str, phase: str, noise_level: int) -> list[Operation]:
        operations = self._operations.get(name, [])
        return [operation for operation in operations if operation.phase == phase and operation.is_shown(noise_level)]

    def _module_lines(self, name: str, noise_level: int) -> Iterator[str]:
        indent = "    " * len(self._tracker.parents[name])
        yield f"{indent}{name}\n"
        if noise_level and name != GLOBAL:
            yield f"{indent}*module type: {self._tracker.types[name]}\n"
            parameters = self._sharded_parameters(name)
            yield from [f"{indent}*Parameter List\n"] if parameters else []
            yield from (f"{indent} *{key}: {placements}\n" for key, placements in parameters)
        traffic = self._traffic.get(name, _Traffic())
        titles = {FORWARD: "FORWARD PASS", BACKWARD: "BACKWARD PASS", RECOMPUTED: "ACTIVATION CHECKPOINTING"}
        for phase, title in titles.items():
            counts, operations = traffic.counts.get(phase, {}), self._shown_operations(name, phase, noise_level)
            if counts or operations:
                yield f"{indent}  {title}\n"
            if counts:
                yield from (f"\033[1;33m{indent}    *{key}: {count}\033[0m\n" for key, count in counts.items())
                yield f"\033[1;33m{indent}    *sent bytes: {traffic.sent_bytes[phase]:,}\033[0m\n"
            for operation in operations:
                yield from _operation_lines(operation, indent)


def _operation_lines(operation: Operation, indent: str) -> Iterator[str]:
    yield f"\033[1;33m{indent}    **{operation.name}\033[0m\n"
    if operation.shapes:
        yield f"\033[1;31m{indent}      shape: {list(operation.shapes)}\033[0m\n"
        yield f"\033[1;31m{indent}      sharding: {list(operation.placements)}\033[0m\n"
        yield f"\033[1;31m{indent}      device mesh: {operation.mesh}\033[0m\n"


class _LocalOps(TorchDispatchMode):
    """Sees ops on plain tensors and on local tensors."""

    def __init__(self, on_op: Callable[[object, Args], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.on_op = on_op

    def __torch_dispatch__(
        self, func: Callable[..., object], types: Iterable[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if any(issubclass(kind, Wrapper) or is_torch_dtensor_class(kind) for kind in types):
            return NotImplemented  # decomposed first; its local ops come here
        if not any(kind.__name__ == "FakeTensor" for kind in types):  # by which torch's DTensor finds shapes
            self.on_op(func, args)
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
