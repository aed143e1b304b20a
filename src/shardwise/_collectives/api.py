"""The functions that the rest of the library calls: the transport of this thread, and the collectives."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from multiprocessing.process import BaseProcess, current_process
from threading import get_ident

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from shardwise._collectives.checks.fingerprints import compare_in_full, switch_fingerprints
from shardwise._collectives.checks.values import FIX_NUMBERS, FIX_OPTIONS, FIX_VALUES, has_values
from shardwise._collectives.collective_call import Collective, Ranks, Wait
from shardwise._collectives.cost_tables import (
    SAME_COSTS,
    Costs,
    costs_of,
    path_of_environment,
    ranks_per_host_of,
)
from shardwise._collectives.failures.reports import report_failure
from shardwise._collectives.processes import TORCH_TRANSPORT
from shardwise._collectives.torchrun import check_joined
from shardwise._collectives.transport import (
    CANNOT_COMMUNICATE,
    RankAndSize,
    SingleRankTransport,
    Transport,
    inherited_rank,
    share_rank,
)
from shardwise._layout import Owner, checked
from shardwise._trace import comm_trace
from shardwise._trace.capture_hooks import current, is_capturing
from shardwise.errors import MeshError, ThreadError


class _ThreadState(threading.local):
    transport: Transport | None = None


_thread = _ThreadState()


def transport() -> Transport:
    """The transport of this thread: a simulated rank's, else the process group's, or a world of one rank.

    A process that a rank started has its rank and world size, and cannot communicate.

    The process group belongs to the process, so threads of autograd use it as well.

    Raises:
        MeshError: torchrun started this process as one of several ranks, and it has not joined them.
    """
    simulated = _thread.transport
    if simulated is not None:
        return simulated
    world = distributed_c10d._world.default_pg  # `dist.group.WORLD` takes longer
    if world is None:
        return _single_rank(current_process())
    if TORCH_TRANSPORT.world() is not world:
        TORCH_TRANSPORT.attach()
    return TORCH_TRANSPORT


@cache  # a process that multiprocessing starts is another one while it imports its modules
def _single_rank(process: BaseProcess) -> SingleRankTransport:
    inherited = inherited_rank()
    if inherited is None:
        check_joined()
    return SingleRankTransport(*(inherited or (0, 1)))


def _rank_and_size() -> RankAndSize | None:
    try:
        here = transport()
    except MeshError:  # the process that is being started may never ask
        return None
    return here.rank, here.world_size


share_rank(_rank_and_size)


def is_simulated() -> bool:
    """Whether this thread is a rank of a transport other than the process group's."""
    return _thread.transport is not None


@contextmanager
def _as_rank_of(transport: Transport | None, trace: AbstractContextManager[None]) -> Iterator[None]:
    before, _thread.transport = _thread.transport, transport
    try:
        with trace:
            yield
    finally:
        _thread.transport = before


def using(transport: Transport) -> AbstractContextManager[None]:
    """Make this thread a rank of another transport."""
    return _as_rank_of(transport, comm_trace.separate_rank())


def outside_ranks() -> AbstractContextManager[None]:
    """Make this thread no simulated rank."""
    return _as_rank_of(None, nullcontext())


def rank_of_thread() -> Callable[[], AbstractContextManager[None]] | None:
    """The simulated rank of this thread, which another thread may enter; None outside simulated ranks."""
    here, trace = _thread.transport, comm_trace.rank_of_thread()
    return None if here is None else lambda: _as_rank_of(here, comm_trace.as_rank(trace))


def owner() -> Owner:
    """The rank of its world to which this thread belongs."""
    return transport().owner


def is_here(rank: Owner) -> bool:
    """Whether this thread belongs to that rank; False without ranks, as under torchrun without a process group."""
    try:
        return owner() is rank
    except MeshError:
        return False


def costs(device_type: str) -> Costs:
    """The costs of collectives on meshes of such devices: given, in the file of the environment, or of the backend.

    Raises:
        ConfigError: the file cannot be read.
    """
    here = transport()
    known: dict[str, Costs] = here.owner.costs
    found = known.get(device_type)
    if found is None:
        hosts = ranks_per_host_of(here.world_size) if here is TORCH_TRANSPORT else None
        found = known[device_type] = costs_of(device_type, path_of_environment(), hosts)
        if here.world_size > 1 and here.ledger.values:
            ranks, what = tuple(range(here.world_size)), "the costs of collectives"
            here.share_note(here.ledger.add(found.numbers(), ranks, what, 1, SAME_COSTS, in_code=False))
    return found


def rank() -> int:
    """The rank of this process or simulated rank: 0 to `world_size() - 1`."""
    return transport().rank


def world_size() -> int:
    """The number of ranks; 1 if this process has joined no world."""
    return transport().world_size


def start(collective: Collective) -> Wait:
    """Start a collective; the returned function waits for it and returns its result.

    Raises:
        MeshError: this world lacks some ranks: a tensor is used after its world ended, or outside it.
        ThreadError: another thread communicates for this rank.
    """
    ranks, tracer = collective.ranks, current.tracer
    if len(ranks) == 1:
        return partial(_same, collective.tensor) if collective.in_place else collective.tensor.clone
    if tracer is not None and not tracer.paused:
        in_graph = collective._replace(allocate=None, in_place=False)
        return partial(_same, tracer.call_opaque(collective.kind, _run, (in_graph,), {}))
    here = transport()
    if ranks[-1] >= here.world_size:
        raise _of_another_world(ranks, here.world_size)
    if here.threads.ident != get_ident():
        _take_over(here)
    ledger = here.ledger
    log = ledger.logs.get(ranks) or ledger.log(ranks)
    if ledger.fingerprints is not None and collective.kind != "comparison":
        compare_in_full(here, log, collective, _compare)
    here.compare_calls(log, log.add(collective))
    if comm_trace.current.rank.listeners:
        comm_trace.record_collective(collective.kind, collective.sent_bytes(here.rank))
    return here.start(collective)


def _compare(send: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], ranks: Ranks) -> Tensor:
    message = send.to(message_device(ranks))
    return _run(Collective("comparison", message, ranks, (), send_counts, recv_counts)).cpu()


def _run(collective: Collective) -> Tensor:
    return start(collective)()


def _same(result: Tensor) -> Tensor:
    return result


def all_to_all(send: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], ranks: Ranks) -> Tensor:
    """Exchange slices of a 1-D tensor; a rank's slice for itself is copied and not counted."""
    return start(Collective("all_to_all", send, ranks, (), send_counts, recv_counts))()


def all_reduce(local: Tensor, reduce_op: str, ranks: Ranks) -> Tensor:
    """Reduce over `ranks` into a new tensor. Counted as a ring: each rank sends 2 (n - 1) / n of it."""
    return start(Collective("all_reduce", local, ranks, local.shape, reduce_op=reduce_op))()


def all_gather(local: Tensor, counts: Sequence[int], ranks: Ranks) -> Tensor:
    """The 1-D tensors of all ranks, one after the other, of `counts` elements, in rank order."""
    return start(Collective("all_gather", local, ranks, counts))()


def reduce_scatter(local: Tensor, counts: Sequence[int], ranks: Ranks) -> Tensor:
    """This rank's elements of the sum of the ranks' 1-D tensors, which have `counts` for each rank, in order."""
    return start(Collective("reduce_scatter", local, ranks, counts))()


def broadcast(local: Tensor, count: int, root: int, ranks: Ranks) -> Tensor:
    """The 1-D tensor of rank `root`, of `count` elements; other ranks pass any tensor of its dtype.

    Counted as a chain: each rank but the last sends all of it to the next.
    """
    return start(Collective("broadcast", local, ranks, (count,), root=root))()


def exchange_messages(send: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], ranks: Ranks) -> Tensor:
    """`all_to_all` of a CPU tensor, whatever the transport can send."""
    return all_to_all(send.to(message_device(ranks)), send_counts, recv_counts, ranks).cpu()


def message_device(ranks: Ranks) -> torch.device:
    """The device of the library's own messages, such as lengths: the CPU if its tensors can be sent."""
    return transport().message_device(ranks)


def expect_equal(x: Tensor, ranks: Ranks, what: str, explicit: bool = False, fix: str = FIX_VALUES) -> None:
    """Record the values of `x`, which must be equal on all `ranks`; else a later collective raises a MismatchError.

    Sends nothing. Only some calls of a call site are recorded (`checks/ledger.py`), and only a sample of a large
    tensor. Tensors of one element, and values that user code does not combine in backward, are recorded only if they
    are `explicit`: the result of a hook, or a state that is loaded.
    """
    here = transport()
    if here.ledger.values and _concerns(here, ranks):
        number = here.ledger.count(what, ranks)
        if number and has_values(x, explicit):
            here.share_note(here.ledger.add(x, ranks, what, number, fix))


def notes_numbers() -> bool:
    """Whether this rank records the numbers among the arguments of ops."""
    return transport().ledger.numbers


def expect_equal_numbers(numbers: Mapping[str, complex], ranks: Ranks, what: str) -> None:
    """Record numbers, by name, which must be equal on all `ranks`, if this rank records numbers; see `expect_equal`."""
    here = transport()
    if here.ledger.numbers and _concerns(here, ranks) and (number := here.ledger.count_recent(what, ranks)):
        here.share_note(here.ledger.add(numbers, ranks, what, number, FIX_NUMBERS))


def expect_equal_options(options: Callable[[], Mapping[str, complex]], group: int, ranks: Ranks, what: str) -> None:
    """Record the options of a step of group `group`, which must be equal on all `ranks`; see `expect_equal`."""
    here, name = transport(), f"group {group}"
    if here.ledger.values and _concerns(here, ranks) and (number := here.ledger.count(name, ranks)):
        here.share_note(here.ledger.add(options(), ranks, what, number, FIX_OPTIONS, name))


def _concerns(here: Transport, ranks: Ranks) -> bool:
    """Whether values of these ranks concern this rank; not inside a captured graph."""
    return len(ranks) > 1 and here.rank in ranks and not is_capturing()


def _take_over(here: Transport) -> None:
    """Let this thread communicate for its rank; if it must not, raise on all ranks."""
    share_rank(_rank_and_size)  # again, because multiprocessing configures a process after it imported its modules
    if here is not TORCH_TRANSPORT:
        return here.threads.take_over()
    known = here.threads.failed
    try:
        here.threads.take_over()
    except ThreadError as error:
        if not known:
            report_failure(error.with_traceback(None))  # its text has the call sites
        raise


def _forbid_after_fork() -> None:
    for here in (TORCH_TRANSPORT, _thread.transport):
        if here is not None:
            here.threads.ident = -1
            here.threads.failed = CANNOT_COMMUNICATE


os.register_at_fork(after_in_child=_forbid_after_fork)


def _of_another_world(ranks: Ranks, world_size: int) -> MeshError:
    world = f"a world of {world_size} ranks" if world_size > 1 else "no world of several ranks"
    return MeshError(
        f"A collective of ranks {ranks} was called in {world}. Its tensor or mesh belongs to another world, "
        "which has ended (with its function, or by destroy_process_group), or which this thread is not part of. "
        "Fix: call it inside that world; use full_tensor() there for values that are needed later."
    )


def barrier(ranks: Ranks) -> None:
    """Return when every rank of `ranks` has called this."""
    ones = [1] * len(ranks)
    exchange_messages(torch.zeros(len(ranks), dtype=torch.uint8, device="cpu"), ones, ones, ranks)


# ---- checks -----------------------------------------------------------------------------------------------


@checked
def check_ranks(on: bool = True) -> None:
    """Switch `fingerprint` on, or off, until this rank leaves its world.

    All ranks have to call this at the same point of the program.

    Raises:
        MismatchError: in the next collective of some ranks, on all ranks, if not all of them have called it.
    """
    switch_fingerprints(transport().ledger, on)


def check_values(on: bool = True, *, numbers: bool = False) -> None:
    """Set whether values that must be equal on all ranks are compared, from now on in this process.

    docs/guarantees.md says what is compared, and when. On simulated ranks it is set for this rank.

    Args:
        on: compare tensors; the default of a process.
        numbers: also compare the numbers among the arguments of ops, for debugging. They may differ in a correct
            program, for example if one rank takes another path to a collective.
    """
    ledger = transport().ledger
    ledger.values = on
    ledger.switch_numbers(on and numbers)


@contextmanager
def fingerprint() -> Iterator[None]:
    """Before each collective inside, forward and backward, compare the calls of all ranks. For debugging.

    Compared are kind, dtype, shape or counts, reduction, the number of the group's collectives so far, the line of user
    code, and the purpose: the op, the operand and the layouts of its redistribution, or the text of `describing`. All
    ranks have to enter and leave at the same point of the program.

    Costs one small all-to-all per collective, 8 (2 n + 1) bytes to each of n ranks, which `count_comms` does not count,
    and its latency: with small collectives a step takes about twice as long.

    Raises:
        MismatchError: inside, on every rank of the group, before anything else is sent; the text has the call and the
            call site of every rank.
    """
    ledger = transport().ledger
    before = ledger.fingerprints is not None
    switch_fingerprints(ledger, True)
    try:
        yield
    finally:
        switch_fingerprints(ledger, before)
