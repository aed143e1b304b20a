"""The transport of ranks that are processes: the process groups of `torch.distributed`."""

import atexit
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from time import monotonic, sleep
from typing import TypeVar
from weakref import ref

import torch
import torch.distributed as dist

# Its functions have the world at the time of this import as a default argument. If one exists by then (torch.optim
# imports it through torch._dynamo), it is never freed, and gloo's threads sometimes abort the process at its end.
import torch.distributed.nn.functional
import torch.nn.functional as F
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from shardwise._collectives.checks.calls import MOST_ELEMENTS, NUM_COUNTS, SEND_COUNTS, CallLog
from shardwise._collectives.checks.fingerprints import switch_fingerprints
from shardwise._collectives.checks.ledger import Ledger
from shardwise._collectives.checks.other_hosts import StoredNotes, are_due, exchange_ledgers
from shardwise._collectives.checks.shared_memory import SharedMemory
from shardwise._collectives.checks.values import Note, different_values_text
from shardwise._collectives.collective_call import (
    Collective,
    DescribedCall,
    Ranks,
    Wait,
    describing,
)
from shardwise._collectives.failures.hooks import ExitHooks, report_end
from shardwise._collectives.failures.monitor import FailureMonitor
from shardwise._collectives.failures.reports import (
    POLL_SECONDS,
    explain,
    explain_difference,
    explain_values,
    join_threads,
    store_of_world,
)
from shardwise._collectives.failures.store import DifferentCalls, FailureReport, remote_error
from shardwise._collectives.started import OpenWorks, StartedCollective, start_pairwise
from shardwise._collectives.threads import ThreadGuard
from shardwise._collectives.torchrun import launcher_of_this_process, warn_of_failing_restarts
from shardwise._collectives.transport import exchange_of, reduce_stack
from shardwise._layout import Mesh, Owner

T = TypeVar("T")

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "product": dist.ReduceOp.PRODUCT}

_METHODS: dict[str, str] = {  # methods of a process group
    "all_reduce": "allreduce",
    "all_gather": "all_gather_single",
    "reduce_scatter": "reduce_scatter_single",
    "broadcast": "broadcast",
}

# Dtypes that every backend sends, and one of them by bytes.
_SUPPORTED = (torch.float32, torch.float64, torch.int32, torch.int64, torch.float16, torch.uint8, torch.int8)
_OF_SIZE = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}

JOIN_SECONDS = 60.0  # ranks of a group may make their first calls so many seconds apart


def _no_world() -> None:
    """The target of a reference to a world that has ended."""


class TorchTransport:
    """The default process group of this process, and the groups of the device meshes that it has seen.

    Attributes:
        world: returns the process group, once this process is attached to it; holds no reference to it.
    """

    def __init__(self) -> None:
        self.monitor = FailureMonitor(self._describe_call)
        self.open_works = OpenWorks()
        self._reset(Ledger(-1))

    def _reset(self, ledger: Ledger) -> None:
        """Belong to no world. A rank's state in its world is here."""
        self.ledger, self.threads = ledger, ThreadGuard(ledger)
        self.rank, self.world_size, self.owner = -1, 0, Owner(-1, 0)
        self.world: Callable[[], dist.ProcessGroup | None] = _no_world
        self.groups: dict[Ranks, dist.ProcessGroup] = {}
        self.device_meshes: dict[Mesh, DeviceMesh] = {}
        self.mesh_values: dict[int, Mesh] = {}
        self.timeouts: dict[Ranks, float | None] = {}
        self._everyone: Ranks = ()
        self._memory: SharedMemory | None = None
        self._stored: StoredNotes | None = None
        self._num_notes = 0  # notes of this rank when it last compared those of all groups
        self._hooks: ExitHooks | None = None

    def attach(self) -> None:
        """Register this rank in the world, and monitor failures; cheap if that is done."""
        world = dist.group.WORLD
        if self.world() is world:
            return
        assert world is not None
        self.detach()
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._everyone = tuple(range(self.world_size))
        self.owner = Owner(self.rank, self.world_size)
        self.world = ref(world)  # last: other threads may look
        self._hooks = ExitHooks(self._release_at_exit)
        self.ledger.rank = self.rank
        self.ledger.switch_numbers(self.ledger.numbers)
        store, launcher = store_of_world(), launcher_of_this_process()
        if store is not None and self.world_size > 1:
            self._memory = SharedMemory(self.rank, self.world_size)
            with suppress(Exception):  # without a store that works, errors only have less detail
                if store.process(self.rank) is None:  # else it may have notes of an earlier world
                    self._stored = StoredNotes()
                store.register(self._memory.file.path)
        if store is not None and (self.world_size > 1 or launcher is not None):
            self.monitor.start(store_of_world, launcher)
        warn_of_failing_restarts()

    def _release_at_exit(self) -> None:
        """Leave no thread that may need the interpreter at its end: such a thread aborts the process."""
        self.monitor.stop()
        join_threads()
        if dist.is_initialized():
            self.open_works.release_world()

    def register_mesh(self, device_mesh: DeviceMesh, mesh: Mesh) -> None:
        """Keep torch's mesh and its `Mesh`, so that each is found by the other."""
        self.mesh_values[id(device_mesh)] = mesh
        self.device_meshes[mesh] = device_mesh

    def detach(self) -> None:
        """Release the world, its groups and its meshes."""
        self.monitor.stop()
        if self._hooks is not None:
            self._hooks.uninstall()
        if self._memory is not None:
            self._memory.file.close()
        self.owner.forget()  # tensors of this world are refused from now on
        switch_fingerprints(self.ledger, False)
        numbers = self.ledger.numbers
        self.ledger.switch_numbers(False)
        self._reset(Ledger(-1, self.ledger.values, numbers))

    def compare_calls(self, log: CallLog, record: "array[int]") -> None:
        if self.monitor.root is not None:  # ranks have made different numbers of collectives, which would be mixed up
            raise remote_error(self.monitor.root, self.rank, log.pending())
        memory, ledger = self._memory, self.ledger
        if memory is None:
            return
        if log not in memory.complete:
            self._find_peers(log, memory)
        difference = memory.compare(log, record)
        if record[NUM_COUNTS] and not 0 <= min(record[SEND_COUNTS:]) <= max(record[SEND_COUNTS:]) < MOST_ELEMENTS:
            difference = difference or log.absurd_length()
        if difference is not None or memory.has_new_notes or ledger.num_notes != self._num_notes:
            # After calls: the notes before a call that was seen are there, and may be why it differs.
            memory.read_notes(ledger)
            self._num_notes = ledger.num_notes
            self._raise_difference(log, difference)
        if memory.elsewhere and are_due(log) and not memory.elsewhere.isdisjoint(log.ranks):
            self._raise_difference(log, exchange_ledgers(ledger, log, self._exchange_records))
        if memory.elsewhere and self._stored is not None and not self.monitor.failed:
            self._stored.exchange(ledger, log, memory.elsewhere)
            self._raise_difference(log, None)

    def _exchange_records(self, send: Tensor, sent: Sequence[int], expected: Sequence[int], ranks: Ranks) -> Tensor:
        call = self.ledger.log(ranks).pending().call
        with describing(lambda: f"comparing the ranks before {call}"):
            return exchange_of(self)(send, sent, expected, ranks)

    def _raise_difference(self, log: CallLog, difference: DifferentCalls | None) -> None:
        values = self.ledger.different
        if values is not None:
            report = FailureReport(None, different_values_text(values), fix=values.note.fix, mismatch=True)
            raise explain_values(report, log.pending(), self.monitor)
        if difference is not None:
            raise explain_difference(difference, log.pending(), self.monitor)

    def share_note(self, note: Note) -> None:
        if self._memory is not None:
            self._memory.write_note(self.ledger.num_notes, note)
            log = self.ledger.log(note.ranks)
            if note.after <= 1 and log not in self._memory.complete:  # they may never call a collective
                self._find_peers(log, self._memory)

    def _find_peers(self, log: CallLog, memory: SharedMemory) -> None:
        """Add the memory of all ranks of a group on this host to `memory`; record whether there are others.

        A rank must do this before its second call: else it might not compare its calls where others do.
        """
        store, timeout, began = store_of_world(), self.timeout(log.ranks), monotonic()
        while store is not None and memory.add_peers(store, log) and log not in memory.complete:
            # After one call all ranks of a group have joined the world, or soon will.
            if log.latest <= 1 or self.monitor.failed:
                return
            if monotonic() >= began + (timeout or JOIN_SECONDS):
                if timeout is None:
                    return
                error = TimeoutError("Some ranks have not joined, or the store does not answer.")
                raise explain(error, log.pending(), monotonic() - began, self.monitor)
            sleep(POLL_SECONDS)

    def _describe_call(self, ranks: Ranks, number: int) -> DescribedCall | None:
        return self.ledger.log(ranks).described(number) if ranks in self.ledger.logs else None

    def start(self, collective: Collective) -> Wait:
        kind, x, ranks, shape, sent, received, reduce_op, root, allocate, _ = collective
        count, own = len(ranks), ranks.index(self.rank)
        group = self.world() if ranks == self._everyone else self.group(ranks)
        match kind:
            case "all_to_all" | "comparison":
                pass
            case _ if group is not None and _is_of_torch(collective):
                return self._start_native(collective, group)
            case "all_reduce":
                x, received = x.reshape(-1), [x.numel()] * count
            case "all_gather":
                received = shape
            case "reduce_scatter":
                sent, received, shape = shape, [shape[own]] * count, (shape[own],)
            case "broadcast":
                received = [shape[0] * (rank == root) for rank in ranks]
                x = x if root == self.rank else x.new_empty(0)
        out, x = (allocate or x.new_empty)(sum(received)), x.contiguous()
        wire_out, wire = (out, x) if x.dtype in _SUPPORTED else (_as_supported(out), _as_supported(x.resolve_conj()))
        begin: Callable[[], dist.Work | Sequence[dist.Work]]
        if group is None:
            parts = wire.split(list(sent)) if sent else [wire] * count  # without counts every rank is sent all
            number = self.ledger.logs[ranks].latest
            begin = partial(start_pairwise, wire_out, parts, received, ranks, self.rank, number)
        else:
            if not sent:
                wire, sent = torch.cat([wire] * count), [len(wire)] * count
            begin = partial(group.all_to_all_single, wire_out, wire, list(received), list(sent), _EXCHANGE)
        wait = StartedCollective(self, collective, begin, out, received, group is None)
        return (lambda: reduce_stack(wait().view(count, *shape), reduce_op)) if kind in _REDUCTIONS else wait

    def _start_native(self, collective: Collective, group: dist.ProcessGroup) -> Wait:
        """Start a collective other than an all-to-all by torch's method for it."""
        kind, x, ranks, shape, _, _, reduce_op, root, allocate, in_place = collective
        x, own, width, empty = x.resolve_conj(), ranks.index(self.rank), max(shape, default=0), allocate or x.new_empty
        counts: Sequence[int] = ()
        args: tuple[object, ...]
        match kind:
            case "all_reduce":
                out = x if in_place else x.clone(memory_format=torch.contiguous_format)
                args = [_as_real(out)], _options(AllreduceOptions(), reduceOp=_OPS[reduce_op])
            case "all_gather":
                counts = [width] * len(ranks)
                out, x = empty(sum(counts)), x.contiguous() if len(x) == width else F.pad(x, (0, width - len(x)))
                args = _as_supported(out), _as_supported(x), _options(AllgatherOptions())
            case "reduce_scatter":
                out, x = x.new_empty(width), x.contiguous()
                if min(shape) != width:
                    x = torch.cat([F.pad(part, (0, width - len(part))) for part in x.split(list(shape))])
                args = _as_real(out), _as_real(x), _options(ReduceScatterOptions(), reduceOp=_OPS["sum"])
            case _:
                counts = [width * (rank == root) for rank in ranks]
                out = x.contiguous() if root == self.rank else x.new_empty(width)
                args = [_as_supported(out)], _options(BroadcastOptions(), rootRank=ranks.index(root), rootTensor=0)
        begin = partial(getattr(group, _METHODS[kind]), *args)
        wait = StartedCollective(self, collective, begin, out, counts)
        if kind == "broadcast" and root == self.rank and not in_place:
            wait.out = x.clone()  # while it is sent
        if kind == "all_gather" and min(shape) != width:

            def finish() -> Tensor:
                parts = [part[:n] for part, n in zip(wait().split(width), shape, strict=True)]
                return torch.cat(parts, out=empty(sum(shape)))

            return finish
        if kind == "reduce_scatter" and shape[own] != width:
            return lambda: torch.narrow_copy(wait(), 0, 0, shape[own])
        return wait

    def register_group(self, group: dist.ProcessGroup) -> None:
        """Use a process group of torch for the collectives of its ranks, unless one is known."""
        ranks = tuple(dist.get_process_group_ranks(group))
        if self.group(ranks) is None:
            self.groups[ranks] = group

    def group(self, ranks: Ranks) -> dist.ProcessGroup | None:
        """A known process group of these ranks in this order that was not destroyed; else None."""
        if ranks == self._everyone:
            return self.world()
        found = self.groups.get(ranks)
        return found if found in distributed_c10d._world.pg_map else None

    def message_device(self, ranks: Ranks) -> torch.device:
        group = self.group(ranks) or dist.group.WORLD
        assert group is not None
        types = [device.type for device in group._device_types]
        return torch.device("cpu" if not types or "cpu" in types else types[0])

    def timeout(self, ranks: Ranks) -> float | None:
        """The seconds that a collective of CPU tensors waits; None if unknown.

        NCCL would wait in this thread for every collective with a timeout; its own watchdog has one.
        """
        found = timeout_of(self.group(ranks), "cpu")
        return None if found is None else found.total_seconds()


def _as_supported(x: Tensor) -> Tensor:
    """View the memory in a dtype that every backend supports."""
    if x.dtype in _SUPPORTED:
        return x
    if x.element_size() == 16:  # complex128: one row an element, so that split sizes still count elements
        return x.view(torch.int64).view(x.numel(), 2)
    return x.view(_OF_SIZE[x.element_size()])


def _as_real(x: Tensor) -> Tensor:
    """View the memory in a dtype that NCCL adds: a complex number becomes a row of two."""
    return torch.view_as_real(x) if x.is_complex() else x


_REDUCTIONS = ("all_reduce", "reduce_scatter")
_NOT_REDUCED_BY_GLOO = {torch.bool, torch.int16, torch.uint16, torch.uint32, torch.uint64}


def _is_of_torch(collective: Collective) -> bool:
    """Whether all backends support this collective, other than an all-to-all, for its dtype."""
    x, is_sum = collective.tensor, collective.reduce_op == "sum"
    return collective.kind not in _REDUCTIONS or (
        x.dtype not in _NOT_REDUCED_BY_GLOO and (is_sum or not x.is_complex())
    )


def _options(options: T, **values: object) -> T:
    """Options of torch for a collective that is waited for later."""
    for name, value in {"asyncOp": True, **values}.items():
        setattr(options, name, value)
    return options


_EXCHANGE = _options(dist.AllToAllOptions())


def timeout_of(group: dist.ProcessGroup | None, device_type: str) -> timedelta | None:
    """The timeout of a group's collectives (None: the world's) on such devices; None if unknown."""
    world = dist.group.WORLD
    assert world is not None
    try:
        backend = (group or world)._get_backend(torch.device(device_type))
    except RuntimeError:  # it has none for them
        return None
    found = getattr(getattr(backend, "options", None), "_timeout", None)
    return found if isinstance(found, timedelta) else None


TORCH_TRANSPORT = TorchTransport()


@atexit.register
def _report_without_hooks() -> None:
    if dist.is_initialized() and TORCH_TRANSPORT.world() is not dist.group.WORLD:
        report_end()
