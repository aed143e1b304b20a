"""The `Transport` protocol, its implementation for one rank, and helpers for the others.

A process that a rank starts with `multiprocessing`, such as a worker of a DataLoader, has the rank's `rank()` and
`world_size()`: a forked one by its memory, a spawned one by the configuration that multiprocessing sends to it. Without
them it would take itself for the only rank and, for example, read the examples of all ranks.
"""

import json
from array import array
from collections.abc import Callable, Sequence
from multiprocessing.process import current_process
from typing import NoReturn, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from shardwise._collectives.checks.calls import CallLog
from shardwise._collectives.checks.ledger import Ledger
from shardwise._collectives.checks.values import Note
from shardwise._collectives.collective_call import Collective, Ranks, Wait
from shardwise._collectives.threads import ThreadGuard
from shardwise._layout import Owner

T = TypeVar("T")
Exchange = Callable[[Tensor, Sequence[int], Sequence[int], Ranks], Tensor]  # an all-to-all of tensors on the CPU
RankAndSize = tuple[int, int]

CANNOT_COMMUNICATE = (
    "A process that a rank started, such as a worker of a DataLoader, cannot communicate for the rank. "
    "Fix: use plain tensors there, and distribute them in the process of the rank."
)
LENGTH_BYTES, FIRST_BYTES = 8, 248  # a JSON value: bytes of its length, and bytes that are sent with the length
_KEY = "shardwise: rank and world size of the parent"


class Transport(Protocol):
    """The communication of ranks.

    Attributes:
        ledger: calls and notes of the rank; the caller of the transport adds to it.
        threads: the thread of the rank that made the last collective.
        owner: the identity of this rank in this world, for the layouts of its tensors.

    Raises:
        RemoteRankError: another rank raised, died or hangs; the text names it and how it failed.
        MismatchError: the ranks make different calls, as far as the transport can detect.
    """

    ledger: Ledger
    threads: ThreadGuard

    @property
    def owner(self) -> Owner: ...

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def message_device(self, ranks: Ranks) -> torch.device:
        """The device of the library's own messages, such as lengths: the CPU if its tensors can be sent."""
        ...

    def compare_calls(self, log: CallLog, record: "array[int]") -> None:
        """Raise a MismatchError if ranks are known to disagree with the next call of this rank."""
        ...

    def share_note(self, note: Note) -> None:
        """Let the other ranks compare the latest note with their own in their next collective."""
        ...

    def start(self, collective: Collective) -> Wait:
        """Start a collective of several ranks, of which this is one."""
        ...


class SingleRankTransport:
    """One rank, for scripts without a launcher; or, for the process that a rank started, of several."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.ledger = Ledger(rank, values=world_size == 1)
        self.threads = ThreadGuard(self.ledger)
        self.owner = Owner(rank, world_size)
        if world_size > 1:
            self.threads.ident, self.threads.failed = -1, CANNOT_COMMUNICATE

    def message_device(self, ranks: Ranks) -> torch.device:
        return torch.device("cpu")

    def _refuse(self, *_args: object, **_options: object) -> NoReturn:
        raise AssertionError("one rank has nobody to communicate with")

    compare_calls = share_note = start = _refuse


class _OfStartingThread:
    """Is pickled as the rank and world size of the thread that starts a process: a simulated rank is a thread."""

    def __init__(self, rank_and_size: Callable[[], RankAndSize | None]) -> None:
        self._rank_and_size = rank_and_size

    def __reduce__(self) -> tuple[type, tuple[RankAndSize | tuple[()]]]:
        return tuple, (self._rank_and_size() or (),)  # plain numbers, so unpickling imports no shardwise


def share_rank(rank_and_size: Callable[[], RankAndSize | None]) -> None:
    """Send rank and world size to the processes that this one starts from now on.

    Args:
        rank_and_size: returns both for the calling thread; None if it is not a rank.
    """
    _config()[_KEY] = _OfStartingThread(rank_and_size)


def inherited_rank() -> RankAndSize | None:
    """The rank and world size of the process that started this one; None if it was no rank."""
    match _config().get(_KEY):
        case (int(rank), int(size)):
            return rank, size
    return None


def _config() -> dict[str, object]:
    """The data that multiprocessing copies to each process that this one starts."""
    found: dict[str, object] = vars(current_process())["_config"]
    return found


# ---- for implementations ----------------------------------------------------------------------------------


def draw_from_torch(generator: torch.Generator | None = None) -> int:
    """A seed from `generator`; None is torch's default CPU generator."""
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(2**62, (), dtype=torch.int64, generator=generator, device=device).item())


def exchange_of(here: Transport) -> Exchange:
    """The all-to-all of CPU tensors of a transport, whatever the transport can send."""

    def exchange(send: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], ranks: Ranks) -> Tensor:
        sent = send.to(here.message_device(ranks))
        return here.start(Collective("all_to_all", sent, ranks, (), send_counts, recv_counts))().cpu()

    return exchange


def gather_json_with(exchange: Exchange, value: T, ranks: Ranks, is_first: bool | None = None) -> list[T]:
    """Every rank's JSON value, in rank order; nothing is pickled.

    One collective has lengths and the first `FIRST_BYTES` of values; a second one the rest, if a value of any rank is
    longer. A gather to the first rank has both: other ranks get nothing, so they do not know the lengths.

    Args:
        is_first: for a gather to the first of `ranks`, whether this rank is the first; the others get none.
    """
    data, size = json.dumps(value).encode(), LENGTH_BYTES + FIRST_BYTES
    copies = [1, *[int(is_first is None)] * (len(ranks) - 1)]  # for each rank
    first, rest = data[:FIRST_BYTES].ljust(FIRST_BYTES), data[FIRST_BYTES:]  # JSON may end with spaces
    message = _as_tensor((len(data).to_bytes(LENGTH_BYTES, "little") + first) * sum(copies))
    sizes = [0 if is_first is False else size] * len(ranks)
    found = exchange(message, [size * count for count in copies], sizes, ranks).numpy().tobytes()
    firsts = [found[at : at + size] for at in range(0, len(found), size)]
    missing = [max(0, int.from_bytes(part[:LENGTH_BYTES], "little") - FIRST_BYTES) for part in firsts]
    rests = [b""] * len(firsts)
    if is_first is not None or any(missing):
        counts, sent = missing or [0] * len(ranks), [len(rest) * count for count in copies]
        parts = exchange(_as_tensor(rest * sum(copies)), sent, counts, ranks).split(counts)
        rests = [part.numpy().tobytes() for part in parts][: len(firsts)]
    return [json.loads(a[LENGTH_BYTES:] + b) for a, b in zip(firsts, rests, strict=True)]


def _as_tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))


def gather_unless_equal(value: T, ranks: Ranks, exchange: Exchange, digest: int) -> list[T] | None:
    """Every rank's JSON value, in rank order; None if all ranks have equal digests.

    Costs one small collective of digests; values are sent only if the digests differ.
    """
    ones = [1] * len(ranks)
    digests = exchange(torch.tensor([digest] * len(ranks), device="cpu"), ones, ones, ranks)
    return None if bool((digests == digest).all()) else gather_json_with(exchange, value, ranks)


def reduce_stack(stack: Tensor, reduce_op: str, dim: int = 0) -> Tensor:
    """Reduce a dim of `stack` in order, so that every rank computes equal bits."""
    match reduce_op:
        case "sum":
            return stack.any(dim) if stack.dtype == torch.bool else stack.sum(dim, dtype=stack.dtype)
        case "max":
            return stack.amax(dim)
        case "min":
            return stack.amin(dim)
        case "product":
            return stack.prod(dim, dtype=stack.dtype)
    raise AssertionError(f"unknown reduction {reduce_op}")
