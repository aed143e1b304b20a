"""What one rank calls in a collective, and whether the calls of several ranks match."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypedDict

from torch import Tensor

Ranks = tuple[int, ...]

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
    """One rank's call of a collective: an all-reduce if there is a `reduce_op`, else an all-to-all."""

    dtype: str
    shape: tuple[int, ...]
    reduce_op: str = ""
    send_counts: tuple[int, ...] = ()
    recv_counts: tuple[int, ...] = ()
    purpose: str = ""

    def __str__(self) -> str:
        if self.reduce_op:
            text = f"all_reduce {self.reduce_op} of {self.dtype} {self.shape}"
        else:
            text = f"all_to_all of {self.dtype}, send counts {self.send_counts}, receive counts {self.recv_counts}"
        return f"{text} ({self.purpose})" if self.purpose else text

    @property
    def must_match(self) -> tuple[object, ...]:
        """What has to be equal on all ranks, apart from the purpose."""
        return self.reduce_op, self.dtype, self.shape if self.reduce_op else ()

    def check(self, ranks: Ranks) -> None:
        """Assert what one rank alone can check."""
        if self.reduce_op:
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
    return CollectiveCall(_dtype(send), tuple(send.shape), "", tuple(send_counts), tuple(recv_counts), _described())


def reduce_call(local: Tensor, reduce_op: str) -> CollectiveCall:
    """This rank's call of an all-reduce."""
    return CollectiveCall(_dtype(local), tuple(local.shape), reduce_op, purpose=_described())


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class PendingCollective:
    """The collective that a rank waits in: its call, the group, and its number among those of the group."""

    call: CollectiveCall
    number: int
    ranks: Ranks

    def __str__(self) -> str:
        return f"collective #{self.number} of ranks {self.ranks}: {self.call}"


def mismatch(ranks: Ranks, calls: Mapping[int, CollectiveCall], purposes: bool = False) -> str | None:
    """Why the calls of `ranks` are not one collective; None if they are.

    Args:
        ranks: of the group, in rising order.
        calls: of each of them.
        purposes: whether what they are for must be the same as well.
    """
    if len({call.must_match for call in calls.values()}) > 1:
        return "all ranks must make the same call"
    if not calls[ranks[0]].reduce_op:
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
