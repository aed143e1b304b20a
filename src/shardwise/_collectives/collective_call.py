"""What one rank calls in a collective, and whether the calls of several ranks match."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypedDict

from torch import Tensor

Ranks = tuple[int, ...]

ALL_TO_ALL, ALL_GATHER, REDUCE_SCATTER = "all_to_all", "all_gather", "reduce_scatter"
SAME_CALLS = "make all ranks of a group call the same collectives in the same order"

_purpose: ContextVar[Callable[[], str] | None] = ContextVar("purpose", default=None)


@contextmanager
def describing(describe: Callable[[], str]) -> Iterator[None]:
    """Describe what the collectives inside are for, such as the op and the layouts of its operands.

    Errors about them quote the text, and `fingerprint` compares it among the ranks; it is made only then. Autograd
    threads of other devices do not see it.
    """
    token = _purpose.set(describe)
    try:
        yield
    finally:
        _purpose.reset(token)


def _described() -> str:
    describe = _purpose.get()
    return "" if describe is None else describe()


@dataclass(frozen=True)
class CollectiveCall:
    """One rank's call of a collective.

    Attributes:
        shape: of the local tensor; for all-gathers and reduce-scatters the elements of each rank, for broadcasts those
            of the root.
        kind: `ALL_TO_ALL`, `ALL_GATHER`, `REDUCE_SCATTER`, or such as "all_reduce sum" and "broadcast from 2".
        send_counts, recv_counts: of an all-to-all, elements to and from each rank.
        purpose: such as the op and the layouts of its operands.
    """

    dtype: str
    shape: tuple[int, ...]
    kind: str = ALL_TO_ALL
    send_counts: tuple[int, ...] = ()
    recv_counts: tuple[int, ...] = ()
    purpose: str = ""

    def __str__(self) -> str:
        text = f"{self.kind} of {self.dtype}"
        if self.kind == ALL_TO_ALL:
            text += f", send counts {self.send_counts}, receive counts {self.recv_counts}"
        else:
            text += f" {self.shape}"
        return f"{text} ({self.purpose})" if self.purpose else text

    @property
    def must_match(self) -> tuple[object, ...]:
        """What has to be equal on all ranks, apart from the purpose."""
        return self.kind, self.dtype, () if self.kind == ALL_TO_ALL else self.shape

    def check(self, ranks: Ranks) -> None:
        """Assert what one rank alone can check."""
        if self.kind != ALL_TO_ALL:
            return
        assert len(self.send_counts) == len(self.recv_counts) == len(ranks), f"{self} among ranks {ranks}"
        assert self.shape == (sum(self.send_counts),), f"{self}: the tensor is {self.shape}"


class DescribedCall(TypedDict):
    """A call and where it was called, for the failure store."""

    call: dict[str, Any]  # of a `CollectiveCall`
    where: str


def call_from(facts: Mapping[str, Any]) -> CollectiveCall:
    """A call from JSON, which has lists for tuples."""
    values: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in facts.items()}
    return CollectiveCall(**values)


def exchange_call(send: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> CollectiveCall:
    """This rank's call of an all-to-all."""
    counts = tuple(send_counts), tuple(recv_counts)
    return CollectiveCall(_dtype(send), tuple(send.shape), ALL_TO_ALL, *counts, _described())


def call_of(kind: str, local: Tensor, shape: Sequence[int]) -> CollectiveCall:
    """This rank's call of a collective other than an all-to-all."""
    return CollectiveCall(_dtype(local), tuple(shape), kind, purpose=_described())


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class PendingCollective:
    """The collective that a rank waits in: its call, the group, and its number among those of the group.

    Attributes:
        where: the line of the user's code, as `format_call_sites` has it.
    """

    call: CollectiveCall
    number: int
    ranks: Ranks
    where: str = ""

    def __str__(self) -> str:
        return f"collective #{self.number} of ranks {self.ranks}: {self.call}{self.where}"


def mismatch(ranks: Ranks, calls: Mapping[int, CollectiveCall], purposes: bool = False) -> str | None:
    """Why the calls of `ranks` are not one collective; None if they are.

    Args:
        ranks: of the group, in rising order.
        calls: of each of them.
        purposes: whether what they are for must be the same as well.
    """
    if len({call.must_match for call in calls.values()}) > 1:
        return "all ranks must make the same call"
    if calls[ranks[0]].kind == ALL_TO_ALL:
        for i, source in enumerate(ranks):
            for j, target in enumerate(ranks):
                sent, expected = calls[source].send_counts[j], calls[target].recv_counts[i]
                if sent != expected:
                    return f"rank {source} sends {sent} elements to rank {target}, which expects {expected}"
    if purposes and len({call.purpose for call in calls.values()}) > 1:
        return "all ranks must make it for the same purpose"
    return None


def mismatch_text(ranks: Ranks, number: int, why: str, states: Mapping[int, str]) -> str:
    """The text of a MismatchError about one collective; `states` has a line or more for each rank."""
    table = "".join(f"\n  rank {rank}: {states[rank]}" for rank in ranks)
    return f"Ranks {ranks} disagree on their collective #{number}: {why}.{table}"
