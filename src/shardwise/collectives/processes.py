"""The transport of ranks that are processes: the process groups of `torch.distributed`."""

import atexit
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from time import monotonic, sleep
from typing import TypeVar
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist

# Its functions have the world at the time of this import as a default argument. If one exists by then (torch.optim
# imports it through torch._dynamo), it is never freed, and gloo's threads sometimes abort the process at its end.
import torch.distributed.nn.functional
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.collectives.call_log import CallLog, Difference
from shardwise.collectives.collective_call import (
    ALL_GATHER,
    REDUCE_SCATTER,
    DescribedCall,
    PendingCollective,
    Ranks,
    call_of,
    describing,
    exchange_call,
)
from shardwise.collectives.failures.hooks import ExitHooks, report_end
from shardwise.collectives.failures.monitor import FailureMonitor, launcher_of_this_process
from shardwise.collectives.failures.reports import (
    POLL_SECONDS,
    WaitAbortedError,
    explain,
    explain_difference,
    explain_values,
    is_invalid_call,
    is_of_transport,
    join_threads,
    store_of_world,
)
from shardwise.collectives.failures.store import DifferentCalls, FailureReport
from shardwise.collectives.open_works import OpenWorks
from shardwise.collectives.pairwise import start_pairwise, wait_limit, wait_pairwise
from shardwise.collectives.recv_check import RecvCheck
from shardwise.collectives.remote_records import RemoteRecords, are_due
from shardwise.collectives.shared_records import SharedRecords, add_peers
from shardwise.collectives.supported_dtypes import as_supported
from shardwise.collectives.threads import ThreadGuard
from shardwise.collectives.transport import Finish, draw_from_torch, exchange_of, reduce_stack
from shardwise.collectives.value_notes import Note, ValueNotes, different_values_text, fix_of
from shardwise.errors import MismatchError
from shardwise.layout import Mesh, Owner
from shardwise.trace.user_stack import format_call_sites

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "product": dist.ReduceOp.PRODUCT}

T = TypeVar("T")

SLICE_SECONDS = 0.5  # of waiting, between checks whether another rank has failed
ABSURD_BYTES = 1 << 44
JOIN_SECONDS = 60.0  # that ranks of a group may have between their first calls
SHORT_SLICE_SECONDS = 0.1  # the same, when one has


class TorchTransport:  # a Transport by structure: `rank` and `world_size` are properties
    """The default process group of this process, and the groups of the device meshes that it has seen."""

    def __init__(self) -> None:
        self.calls: dict[Ranks, int] = {}
        self.logs: dict[Ranks, CallLog] = {}
        self.notes = ValueNotes()
        self.threads = ThreadGuard()
        self.groups: dict[Ranks, dist.ProcessGroup] = {}
        self.device_meshes: dict[Mesh, DeviceMesh] = {}
        self.mesh_values: dict[int, Mesh] = {}
        self.monitor = FailureMonitor()
        self.monitor.describe = self._describe_call
        self._records: SharedRecords | None = None
        self.open_works = OpenWorks()
        self._hooks: ExitHooks | None = None
        self._world: ReferenceType[dist.ProcessGroup] | None = None
        self._rank = -1
        self._owner = Owner(-1, 0)
        self._everyone: Ranks = ()
        self._timeouts: dict[tuple[Ranks, str], float | None] = {}

    @property
    def rank(self) -> int:
        if self._world is None or self._world() is not dist.group.WORLD:
            return dist.get_rank()
        return self._rank  # cheaper than torch.distributed

    @property
    def owner(self) -> Owner:
        if self._world is None or self._world() is not dist.group.WORLD:
            self.attach()
        return self._owner

    @property
    def world_size(self) -> int:
        self.attach()  # every mesh is checked against the size, so a rank that fails soon after can already report it
        return len(self._everyone)

    @property
    def is_attached(self) -> bool:
        """Whether this process has used its world here."""
        return self._world is not None and self._world() is dist.group.WORLD

    def attach(self) -> None:
        """Register this rank in the world, which others may have made, and monitor failures; cheap if that is done."""
        world = dist.group.WORLD
        if self._world is not None and self._world() is world:
            return
        assert world is not None
        self.detach()
        self._world = ref(world)
        self._rank = dist.get_rank()
        self._everyone = tuple(range(dist.get_world_size()))
        self._owner = Owner(self._rank, len(self._everyone))
        self._hooks = ExitHooks(self._release_at_exit)
        if len(self._everyone) > 1:
            self.notes.watch_after(0)
        store, launcher = store_of_world(), launcher_of_this_process()
        if store is not None and len(self._everyone) > 1:
            self._records = SharedRecords(self._rank, len(self._everyone))
            with suppress(Exception):  # without a store that works, errors only have less detail
                store.register(self._records.path)
        if store is not None and (len(self._everyone) > 1 or launcher is not None):
            self.monitor.start(store_of_world, launcher)

    def _release_at_exit(self) -> None:
        """Leave no thread that may need the interpreter while it ends: such a thread aborts the process."""
        self.monitor.stop()
        join_threads()
        if dist.is_initialized():
            self.open_works.release_world()

    def register_mesh(self, device_mesh: DeviceMesh, mesh: Mesh) -> None:
        """Keep torch's mesh and the `Mesh` of it, so that each is found by the other."""
        self.mesh_values[id(device_mesh)] = mesh
        self.device_meshes[mesh] = device_mesh

    def detach(self) -> None:
        """Release the world, its groups and its meshes."""
        self.monitor.stop()
        if self._hooks is not None:
            self._hooks.uninstall()
        self._hooks = None
        self._world = None
        self._owner.calls.clear()  # tensors of this world are refused from now on
        self.threads = ThreadGuard()
        if self._records is not None:
            self._records.close()
        self._records = None
        for kept in (self.calls, self.logs, self.groups, self.device_meshes, self.mesh_values, self._timeouts):
            kept.clear()
        self.notes.stop()
        self.notes = ValueNotes(self.notes.on, self.notes.numbers)

    def compare_calls(self, log: CallLog, record: "array[int]") -> None:
        self.attach()
        if self._records is None:
            return
        self._records.write(log, record)
        if log not in self._records.complete:
            self._find_peers(log, self._records)
        if not self._records.agree(log):
            self._raise_difference(log, self._records)
        if self._records.elsewhere and are_due(log) and not self._records.elsewhere.isdisjoint(log.ranks):
            self._raise_difference(log, RemoteRecords(log, self._exchange_records))

    def _exchange_records(self, send: Tensor, sent: Sequence[int], expected: Sequence[int], ranks: Ranks) -> Tensor:
        call = self.logs[ranks].latest_call().described()
        with describing(lambda: f"comparing the ranks before {call}"):
            return exchange_of(self)(send, sent, expected, ranks)

    def _raise_difference(self, log: CallLog, records: SharedRecords | RemoteRecords) -> None:
        values = records.different_values(log)  # which may be why the calls are different
        difference = (records.first_difference(log) or _absurd_length(log)) if values is None else None
        if difference is None and values is None:
            return
        pending = PendingCollective(log.latest_call().described(), log.latest, log.ranks)
        if difference is not None:
            different = DifferentCalls(log.ranks, difference.number, difference.why)
            raise explain_difference(different, pending, self._describe_call)
        assert values is not None
        text = different_values_text(values[0], {self._rank: values[0].words, **values[1]})
        raise explain_values(FailureReport(None, text, fix=fix_of(values[0]), mismatch=True), pending)

    def share_note(self, log: CallLog, note: Note) -> None:
        if self._records is not None:
            self._records.write_note(log, note)

    def _find_peers(self, log: CallLog, records: SharedRecords) -> None:
        """Let `records` know those of all ranks of a group on this host, and remember whether there are others.

        A rank waits for that before its second call, or it might not compare its calls where others do.
        """
        if (store := store_of_world()) is None:
            return
        began, timeout = monotonic(), self._timeout(log.ranks, "cpu")
        # After one call all ranks of a group have joined the world, or soon will.
        until = began + (0 if log.latest == 1 else timeout or JOIN_SECONDS)
        while add_peers(store, log.ranks, records) and not self.monitor.failed:
            if all(map(records.knows, log.ranks)):
                records.complete.add(log)
                return
            if monotonic() >= until:
                if log.latest == 1 or timeout is None:
                    return
                pending = PendingCollective(log.latest_call().described(), log.latest, log.ranks)
                error = TimeoutError("Some ranks have not joined, or the store does not answer.")
                raise explain(error, pending, monotonic() - began, self.monitor)
            sleep(POLL_SECONDS)

    def _describe_call(self, ranks: Ranks, number: int) -> DescribedCall | None:
        log = self.logs.get(ranks)
        call = None if log is None else log.call(number)
        if call is None:
            return None
        where = format_call_sites([site.frame for site in call.sites], 1) if call.sites else ""
        return {"call": asdict(call.described()), "where": where}

    def start_all_to_all(
        self, send: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], ranks: Ranks
    ) -> Finish:
        return self._start_all_to_all(send, send_counts, recv_counts, ranks)

    def _start_to_each(self, send: Tensor, recv_counts: Sequence[int], ranks: Ranks) -> Finish:
        """An all-to-all in which each rank is sent all of `send`; copied for each only if torch needs that."""
        counts = [send.numel()] * len(ranks)
        if self._group(ranks) is None:
            return self._start_all_to_all(send, counts, recv_counts, ranks, to_each=True)
        return self._start_all_to_all(send.repeat(len(ranks)), counts, recv_counts, ranks)

    def _start_all_to_all(
        self,
        send: Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        ranks: Ranks,
        to_each: bool = False,
    ) -> Finish:
        self.attach()
        here, group = self.rank, self._group(ranks)
        own = ranks.index(here)
        number = self.calls.get(ranks, 0)

        def pending() -> PendingCollective:
            return PendingCollective(exchange_call(send, send_counts, recv_counts), number, ranks)

        if send_counts[own] != recv_counts[own]:
            raise MismatchError(_unequal(here, here, send_counts[own], recv_counts[own], pending()))
        out = send.new_empty(sum(recv_counts))
        wire_out, wire_send = as_supported(out), as_supported(send.contiguous())
        check = RecvCheck(out, recv_counts, own)

        def start() -> Sequence[dist.Work]:
            if group is None:
                parts = [wire_send] * len(ranks) if to_each else wire_send.split(list(send_counts))
                return start_pairwise(wire_out, parts, recv_counts, ranks, here, number)
            counts = list(recv_counts), list(send_counts)
            return [dist.all_to_all_single(wire_out, wire_send, *counts, group=group, async_op=True)]

        wait = self._started(start, pending, self._timeout(ranks, send.device.type))

        def finish() -> Tensor:
            wait()
            self._check_received(check, recv_counts, ranks, pending)
            return out

        return finish

    def start_all_reduce(self, local: Tensor, reduce_op: str, ranks: Ranks) -> Finish:
        self.attach()
        group = self._group(ranks)
        if group is not None and local.dtype not in _NOT_REDUCED_BY_GLOO:
            out, number = local.clone(memory_format=torch.contiguous_format), self.calls.get(ranks, 0)
            wait = self._started(
                lambda: [dist.all_reduce(out, _OPS[reduce_op], group=group, async_op=True)],
                partial(self._pending, f"all_reduce {reduce_op}", local, local.shape, number, ranks),
                self._timeout(ranks, local.device.type),
            )
            return lambda: (wait(), out)[1]
        count = len(ranks)
        flat = local.reshape(-1)
        receive = self._start_to_each(flat, [flat.numel()] * count, ranks)
        return lambda: reduce_stack(receive().view(count, *local.shape), reduce_op)

    def start_all_gather(self, local: Tensor, counts: Sequence[int], ranks: Ranks) -> Finish:
        self.attach()
        group, own, number = self._group(ranks), ranks.index(self.rank), self.calls.get(ranks, 0)
        if group is None:
            return self._start_to_each(local, counts, ranks)
        width = max(counts)
        padded = local.contiguous() if local.numel() == width else F.pad(local, (0, width - local.numel()))
        out = local.new_empty(width * len(ranks))
        check = RecvCheck(out, [width] * len(ranks), own)
        pending = partial(self._pending, ALL_GATHER, local, counts, number, ranks)
        wait = self._started(
            lambda: [dist.all_gather_single(as_supported(out), as_supported(padded), group, async_op=True)],
            pending,
            self._timeout(ranks, local.device.type),
        )

        def finish() -> Tensor:
            wait()
            self._check_received(check, [width] * len(ranks), ranks, pending)
            if min(counts) == width:
                return out
            return torch.cat([part[:count] for part, count in zip(out.split(width), counts, strict=True)])

        return finish

    def start_reduce_scatter(self, local: Tensor, counts: Sequence[int], ranks: Ranks) -> Finish:
        self.attach()
        group, own, number = self._group(ranks), ranks.index(self.rank), self.calls.get(ranks, 0)
        local = local.resolve_conj()
        if group is None or local.dtype in _NOT_REDUCED_BY_GLOO:
            receive = self.start_all_to_all(local, counts, [counts[own]] * len(ranks), ranks)
            return lambda: reduce_stack(receive().view(len(ranks), counts[own]), "sum")
        width = max(counts)
        padded = local.contiguous()
        if min(counts) != width:
            parts = padded.split(list(counts))
            padded = torch.cat([F.pad(part, (0, width - part.numel())) for part in parts])
        out = local.new_empty(width)
        wait = self._started(
            lambda: [dist.reduce_scatter_single(_as_real(out), _as_real(padded), group=group, async_op=True)],
            partial(self._pending, REDUCE_SCATTER, local, counts, number, ranks),
            self._timeout(ranks, local.device.type),
        )
        return lambda: (wait(), out if counts[own] == width else out[: counts[own]].clone())[1]

    def start_broadcast(self, local: Tensor, count: int, root: int, ranks: Ranks) -> Finish:
        self.attach()
        group, number, is_root = self._group(ranks), self.calls.get(ranks, 0), self.rank == root
        sent = [count * (rank == root) for rank in ranks]
        if group is None:
            return self._start_to_each(local if is_root else local.new_empty(0), sent, ranks)
        out = local.clone() if is_root else local.new_empty(count)
        check = RecvCheck(out, sent, ranks.index(self.rank))
        pending = partial(self._pending, f"broadcast from {root}", local, (count,), number, ranks)
        wait = self._started(
            lambda: [dist.broadcast(as_supported(out), root, group, async_op=True)],
            pending,
            self._timeout(ranks, local.device.type),
        )

        def finish() -> Tensor:
            wait()
            self._check_received(check, sent, ranks, pending)
            return out

        return finish

    def _pending(self, kind: str, local: Tensor, shape: Sequence[int], number: int, ranks: Ranks) -> PendingCollective:
        return PendingCollective(call_of(kind, local, shape), number, ranks)

    def _check_received(
        self, check: RecvCheck, counts: Sequence[int], ranks: Ranks, pending: Callable[[], PendingCollective]
    ) -> None:
        """Raise if a rank sent fewer elements than this one expects."""
        short = check.short_position()
        if short is not None:
            raise MismatchError(_unequal(ranks[short], self.rank, "fewer", counts[short], pending()))

    def draw_seed(self) -> int:
        return draw_from_torch()

    def _group(self, ranks: Ranks) -> dist.ProcessGroup | None:
        return dist.group.WORLD if ranks == self._everyone else self.groups.get(ranks)

    def message_device(self, ranks: Ranks) -> torch.device:
        self.attach()
        group = self._group(ranks) or dist.group.WORLD
        assert group is not None
        types = [device.type for device in group._device_types]
        return torch.device("cpu" if not types or "cpu" in types else types[0])

    def _timeout(self, ranks: Ranks, device: str) -> float | None:
        """How many seconds a collective waits; None where that is unknown, or the wait is not in this thread.

        NCCL would wait in this thread for every collective that has a timeout; its own watchdog has one.
        """
        if (ranks, device) not in self._timeouts:
            found = timeout_of(self._group(ranks), device) if device == "cpu" else None
            self._timeouts[ranks, device] = None if found is None else found.total_seconds()
        return self._timeouts[ranks, device]

    def _started(
        self,
        start: Callable[[], Sequence[dist.Work]],
        pending: Callable[[], PendingCollective],
        timeout_seconds: float | None,
    ) -> Callable[[], None]:
        """Start a collective; the returned function waits for it. Errors of both name the rank that caused them."""
        works = self._explained(pending, start)
        key = self.open_works.add(works)

        def wait() -> None:
            if timeout_seconds is None:
                for work in works:
                    work.wait()
            elif len(works) == 1:
                self._wait(works[0], monotonic() + timeout_seconds)
            else:
                wait_pairwise(works, monotonic() + timeout_seconds)
            self.open_works.remove(key)

        return lambda: self._explained(pending, wait, started=bool(works))

    def _explained(self, pending: Callable[[], PendingCollective], act: Callable[[], T], started: bool = False) -> T:
        began = monotonic()
        self.monitor.pending = pending
        try:
            return act()
        except RuntimeError as error:
            if is_invalid_call(error) or not (started or is_of_transport(error)):
                raise
            raise explain(error, pending(), monotonic() - began, self.monitor) from None
        finally:
            self.monitor.pending = None

    def _wait(self, work: dist.Work, deadline: float) -> None:
        """Wait in slices, to notice failures that break no connection, and to end in time.

        Gloo alone waits for one peer after the other, each for the full timeout.
        """
        while True:
            seconds = SHORT_SLICE_SECONDS if self.monitor.failed else SLICE_SECONDS
            try:
                work.wait(wait_limit(min(seconds, deadline - monotonic())))
                return
            except RuntimeError as error:
                if work.is_completed():
                    work.wait()  # raises why it failed, or it was done just after the slice
                    return
                if monotonic() >= deadline:
                    raise
                if self.monitor.root is not None:
                    raise WaitAbortedError from error


def _absurd_length(log: CallLog) -> Difference | None:
    """That this rank is about to receive more than any host has memory for, such as a length that is other data."""
    call = log.latest_call()
    for peer, count in zip(log.ranks, call.recv_counts, strict=False):
        if not 0 <= count * call.dtype.itemsize < ABSURD_BYTES:
            return Difference(
                log.latest, peer, f"no rank can receive {count} elements of {call.dtype} from rank {peer}"
            )
    return None


def _unequal(source: int, target: int, sent: int | str, expected: int, pending: PendingCollective) -> str:
    return (
        f"Rank {source} sends {sent} elements to rank {target}, which expects {expected}.\n"
        f"  Rank {target} was in {pending}\n"
        "  Fix: correct one of the two; shardwise.collectives.check_ranks() compares the calls of all ranks."
    )


def _as_real(x: Tensor) -> Tensor:
    """The same memory in a dtype that NCCL adds: a row of two numbers for a complex one."""
    return torch.view_as_real(x) if x.is_complex() else x


_NOT_REDUCED_BY_GLOO = {torch.bool, torch.int16, torch.uint16, torch.uint32, torch.uint64}


def timeout_of(group: dist.ProcessGroup | None, device_type: str) -> timedelta | None:
    """How long a collective of a group (None: of the world) on such devices waits; None where that is unknown."""
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
    if dist.is_initialized() and not TORCH_TRANSPORT.is_attached:
        report_end()
