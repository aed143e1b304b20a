"""`CommDebugMode`: collectives by module, with the interface of torch's."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise._collectives import Collective, rank_and_size
from shardwise._layout import Layout, Placement
from shardwise._rules.row import Args, Kwargs
from shardwise._tensor import DTensor
from shardwise._tensor.dispatch.dispatcher import is_op
from shardwise._tensor.dispatch.fallback import Wrapper
from shardwise._tensor.dispatch.hooks import Proceed, hook_calls
from shardwise._tensor.dtensor import dtensors_in, name_of
from shardwise._tensor.torch_objects import is_torch_dtensor_class
from shardwise._trace.comm_trace import CommEvent, Listener, listening_with
from shardwise.debug.module_tracker import GLOBAL, ModuleTracker, in_backward

FORWARD, BACKWARD, RECOMPUTED = "forward", "backward", "checkpointing"
TITLES = {FORWARD: "FORWARD PASS", BACKWARD: "BACKWARD PASS", RECOMPUTED: "ACTIVATION CHECKPOINTING"}
YELLOW, RED, END = "\033[1;33m", "\033[1;31m", "\033[0m"  # torch's colours
Counts = Counter[Any]  # by op of `torch.ops.c10d_functional`

# As torch has them, under aten's names and under those of functions.
_TRIVIAL = {"detach", "t", "view", "_to_copy", "to", "as_strided", "transpose"}


class Operation(NamedTuple):
    """One op that ran."""

    name: str
    phase: str  # one of TITLES
    operands: tuple[Layout, ...] = ()  # layouts of the DTensors among its arguments; none for plain or local tensors

    def is_shown(self, noise_level: int) -> bool:
        is_trivial = self.name.removeprefix("aten.").partition(".")[0] in _TRIVIAL
        return noise_level > 2 or (not is_trivial and noise_level > (0 if self.operands else 1))

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "input_shape": [str(x.shape) for x in self.operands],
            "input_sharding": [str(x.placements) for x in self.operands],
            "device_mesh": str(self.operands[0].mesh) if self.operands else "",
            "is_bw": self.phase != FORWARD,
            "is_activation_checkpointing": self.phase == RECOMPUTED,
        }


@dataclass
class _Record:
    """The ops and parameters of one module; collectives and bytes also of all modules inside it."""

    counts: dict[str, Counts] = field(default_factory=lambda: {FORWARD: Counter(), BACKWARD: Counter()})
    sent_bytes: dict[str, Counts] = field(default_factory=lambda: {FORWARD: Counter(), BACKWARD: Counter()})
    operations: list[Operation] = field(default_factory=list)


class CommDebugMode(Listener):
    """Counts the collectives of this rank and the bytes it sends, by module, forward and backward.

    A context manager with the methods of `torch.distributed.tensor.debug.CommDebugMode`. Collectives have the same
    keys, ops of `torch.ops.c10d_functional`. A redistribution counts as the collective that was planned, which may
    differ from that of torch's DTensor. Checks between ranks count too. Gradients that `.grad` reduces count as
    backward of no module ("Global"). Functional collectives of `torch.distributed` in other code count as well, also
    those of torch's DTensor.

    `c10d_functional` has its ops after `torch.distributed._functional_collectives` is imported.
    """

    def __init__(self) -> None:
        self._tracker = ModuleTracker()
        self._entered = ExitStack()
        self._records: dict[str, _Record] = {GLOBAL: _Record()}

    def __enter__(self) -> Self:
        self._records = {GLOBAL: _Record()}
        for part in (self._tracker, listening_with(self), hook_calls(self._see_op), _LocalOps(self._see_local_op)):
            self._entered.enter_context(part)
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.close()

    def __repr__(self) -> str:
        return f"CommDebugMode(get_total_counts()={self.get_total_counts()})"

    # ---- recording ------------------------------------------------------------------------------------------

    def collective(self, kind: str, sent_bytes: int, event: CommEvent | None) -> None:
        self._count(_torch_op(kind), sent_bytes, event is not None and event.cause.kind == "gradient")

    def _count(self, key: object, sent_bytes: int, of_gradients: bool = False) -> None:
        phase, name = BACKWARD if in_backward() or of_gradients else FORWARD, self._tracker.current
        for each in (name, *self._tracker.modules[name].parents):
            record = self._records.setdefault(each, _Record())
            record.counts[phase][key] += 1
            record.sent_bytes[phase][key] += sent_bytes

    def _see_op(self, proceed: Proceed, func: Callable[..., object], args: Args, kwargs: Kwargs) -> object:
        if is_op(func):
            self._note(name_of(func), tuple(x._layout for x in dtensors_in((*args, *kwargs.values()))))
        return proceed()

    def _see_local_op(self, func: object, args: Args) -> None:
        self._note(str(func))
        if (found := _functional_collective(func, args)) is not None:
            self._count(*found)

    def _note(self, name: str, operands: tuple[Layout, ...] = ()) -> None:
        phase = RECOMPUTED if self._tracker.recomputes else BACKWARD if in_backward() else FORWARD
        record = self._records.setdefault(self._tracker.current, _Record())
        record.operations.append(Operation(name, phase, operands))

    # ---- results --------------------------------------------------------------------------------------------

    def get_total_counts(self) -> int:
        """The number of collectives."""
        return sum(self.comm_counts.values())

    def get_comm_counts(self) -> dict[Any, int]:
        """The number of collectives, by op; 0 for others."""
        return _both_phases(self._records[GLOBAL].counts)

    comm_counts = property(get_comm_counts)

    def get_comm_bytes(self) -> dict[Any, int]:
        """The bytes that this rank sent to others, by op; 0 for others."""
        return _both_phases(self._records[GLOBAL].sent_bytes)

    def get_module_counts(self) -> dict[str, dict[str, dict[Any, int]]]:
        """The number of collectives by module (with those inside it), "forward" or "backward", and op."""
        return {name: dict(x.counts) for name, x in self._with_collectives()}

    comm_module_counts = property(get_module_counts)

    def get_module_bytes(self) -> dict[str, dict[str, int]]:
        """The bytes that this rank sent, by module (with those inside it), and "forward" or "backward"."""
        return {name: _totals(record) for name, record in self._with_collectives()}

    def _with_collectives(self) -> list[tuple[str, _Record]]:
        return [(k, record) for k, record in self._records.items() if k == GLOBAL or any(record.counts.values())]

    def get_parameter_info(self) -> dict[str, dict[str, Tensor]]:
        """The parameters of each module that ran, detached, by module and name."""
        found = {name: module.parameters for name, module in self._tracker.modules.items()}
        return {name: {key: p.detach() for key, p in own.items()} for name, own in found.items() if own}

    def get_sharding_info(self) -> dict[str, tuple[Placement, ...]]:
        """The placements of the parameters that are DTensors, by module and name with a dot between."""
        found = [(f"{name}.{key}", p) for name, m in self._tracker.modules.items() for key, p in m.parameters.items()]
        return {name: p.placements for name, p in found if isinstance(p, DTensor)}

    def generate_json_dump(self, file_name: str = "comm_mode_log.json", noise_level: int = 3) -> None:
        """Write the content of `generate_comm_debug_tracing_table` as nested JSON, one object a module."""
        Path(file_name).write_text(json.dumps(self._as_json(GLOBAL, noise_level), indent=4), encoding="utf-8")

    def _as_json(self, name: str, noise_level: int) -> dict[str, Any]:
        module, record = self._tracker.modules[name], self._records.get(name, _Record())
        sharded = [(key, str(p.placements)) for key, p in module.parameters.items() if isinstance(p, DTensor)]
        shown = [x for x in record.operations if x.is_shown(noise_level)]
        return {
            "fqn": name,
            "module_type": module.type if noise_level else "",
            "parameters": sharded if noise_level else [],
            "children": [self._as_json(child, noise_level) for child in module.children],
            **{f"collectives_{phase}": [(str(k), n) for k, n in own.items()] for phase, own in record.counts.items()},
            **{f"sent_bytes_{phase}": sent for phase, sent in _totals(record).items()},
            **{f"operations_{phase}": [x.as_json() for x in shown if x.phase == phase] for phase in TITLES},
        }

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """A table of the modules, each with its collectives, bytes and ops, with colours for a terminal.

        Args:
            noise_level: 0 collectives only; 1 also classes, parameters and ops on DTensors; 2 also ops on plain
                or local tensors; 3 also trivial ones such as views.
        """
        return "".join(f"{line}\n" for line in _module_lines(self._as_json(GLOBAL, noise_level), ""))

    def log_comm_debug_tracing_table_to_file(self, file_name: str = "comm_mode_log.txt", noise_level: int = 3) -> None:
        """Write the table to a file, without colours."""
        table = re.sub(r"\x1B\[[0-?]*[ -/]*[@-~]", "", self.generate_comm_debug_tracing_table(noise_level))
        Path(file_name).write_text(table, encoding="utf-8")


def _both_phases(found: dict[str, Counts]) -> Counts:
    return Counter({key: found[FORWARD][key] + found[BACKWARD][key] for key in {**found[FORWARD], **found[BACKWARD]}})


def _totals(record: _Record) -> dict[str, int]:
    return {phase: sum(sent.values()) for phase, sent in record.sent_bytes.items()}


def _module_lines(module: dict[str, Any], indent: str) -> Iterator[str]:
    """The lines of a module as JSON, and of those inside it."""
    yield f"{indent}{module['fqn']}"
    if module["module_type"]:
        yield f"{indent}*module type: {module['module_type']}"
    if module["parameters"]:
        yield f"{indent}*Parameter List"
    yield from (f"{indent} *{key}: {placements}" for key, placements in module["parameters"])
    for phase, title in TITLES.items():
        counts, operations = module.get(f"collectives_{phase}"), module[f"operations_{phase}"]
        if counts or operations:
            yield f"{indent}  {title}"
        if counts:
            yield from (f"{YELLOW}{indent}    *{key}: {count}{END}" for key, count in counts)
            yield f"{YELLOW}{indent}    *sent bytes: {module[f'sent_bytes_{phase}']:,}{END}"
        for operation in operations:
            yield f"{YELLOW}{indent}    **{operation['name']}{END}"
            if operation["input_shape"]:
                yield f"{RED}{indent}      shape: [{', '.join(operation['input_shape'])}]{END}"
                yield f"{RED}{indent}      sharding: [{', '.join(operation['input_sharding'])}]{END}"
                yield f"{RED}{indent}      device mesh: {operation['device_mesh']}{END}"
    for child in module["children"]:
        yield from _module_lines(child, indent + "    ")


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
        if not any(kind.__name__ == "FakeTensor" for kind in types):  # torch's DTensor finds shapes by these
            self.on_op(func, args)
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


# ---- collectives by the names of torch --------------------------------------------------------------------------

_NAMES: dict[str, Any] = {
    "all_to_all_single": "all_to_all",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "broadcast": "broadcast",
}  # torch's ops of the same collectives


@cache
def _torch_op(kind: str) -> object:
    """The op of `torch.ops.c10d_functional` as which torch's tools count this collective."""
    import_module("torch.distributed._functional_collectives")  # registers the ops
    names = {ours: theirs for theirs, ours in _NAMES.items()}
    return getattr(torch.ops.c10d_functional, names.get(kind, kind))


def _functional_collective(func: object, args: Sequence[Any]) -> tuple[object, int] | None:
    """The `_torch_op` of a call of a functional collective, and the bytes that this rank sends; None for other ops.

    An all-reduce counts as a ring.
    """
    if not isinstance(func, OpOverload) or not func.namespace.startswith("_c10d_functional"):
        return None
    name = func._schema.name.partition("::")[2].removesuffix("_").removesuffix("_out")
    kind = name.removesuffix("_coalesced")
    if kind not in _NAMES:
        return None
    group = next(arg for schema, arg in zip(func._schema.arguments, args, strict=False) if schema.name == "group_name")
    sent = sum(_sent(kind, x, args, group) for x in (args[0] if isinstance(args[0], list) else [args[0]]))
    return _torch_op(name), sent


def _sent(kind: str, x: Tensor, args: Sequence[Any], group_name: str) -> int:
    (here, size), total, root = rank_and_size(group_name), x.numel(), 0
    shape, counts = [total // size if kind == "reduce_scatter_tensor" else total] * size, []
    if kind == "all_to_all_single":
        counts = [rows * (total // max(x.shape[0], 1)) for rows in args[2] or [x.shape[0] // size] * size]
    elif kind == "broadcast":
        root = args[1]
    return Collective(_NAMES[kind], x, tuple(range(size)), shape, counts, root=root).sent_bytes(here)
