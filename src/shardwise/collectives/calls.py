"""What a rank brings to a collective, in words and numbers, and whether the parts of several ranks fit together."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Ranks = tuple[int, ...]

SAME_CALLS = "make all ranks of a group call the same collectives in the same order"

_purpose: ContextVar[Callable[[], str] | None] = ContextVar("purpose", default=None)


@contextmanager
def describing(describe: Callable[[], str]) -> Iterator[None]:
    """Say what the collectives inside are for, such as the op and the layouts of its operands.

    The text stands in errors about them, and `fingerprint` compares it among the ranks. It is made only
    then. Autograd threads of other devices do not see it.
    """
    token = _purpose.set(describe)
    try:
        yield
    finally:
        _purpose.reset(token)


def purpose() -> str:
    """What the caller says the current collectives are for, or ""."""
    describe = _purpose.get()
    return "" if describe is None else describe()


@dataclass(frozen=True)
class Call:
    """One rank's part in a collective: an all-reduce if there is a `reduce_op`, else an all-to-all."""

    dtype: str
    shape: tuple[int, ...]
    reduce_op: str = ""
    send_counts: tuple[int, ...] = ()
    recv_counts: tuple[int, ...] = ()
    purpose: str = ""

    def __str__(self) -> str:
        return f"{self._what()} ({self.purpose})" if self.purpose else self._what()

    def _what(self) -> str:
        if self.reduce_op:
            return f"all_reduce {self.reduce_op} of {self.dtype} {self.shape}"
        return f"all_to_all of {self.dtype}, send counts {self.send_counts}, receive counts {self.recv_counts}"

    def check(self, ranks: Ranks) -> None:
        """Assert what one rank alone can see to be wrong."""
        if self.reduce_op:
            return
        assert len(self.send_counts) == len(self.recv_counts) == len(ranks), f"{self} among ranks {ranks}"
        assert self.shape == (sum(self.send_counts),), f"{self}: the tensor is {self.shape}"


def call_from(facts: Mapping[str, Any]) -> Call:
    """A call that travelled as JSON, which knows no tuples."""
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()}
    return Call(**values)


def exchange_call(send: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Call:
    """This rank's part in an all-to-all."""
    return Call(_dtype(send), tuple(send.shape), "", tuple(send_counts), tuple(recv_counts), purpose())


def reduce_call(local: Tensor, reduce_op: str) -> Call:
    """This rank's part in an all-reduce."""
    return Call(_dtype(local), tuple(local.shape), reduce_op, purpose=purpose())


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Stand:
    """Where a rank waits: its call, the group, and how many collectives it has made with that group."""

    call: Call
    number: int
    ranks: Ranks

    def __str__(self) -> str:
        return f"collective #{self.number} of ranks {self.ranks}: {self.call}"


def disagreement(ranks: Ranks, calls: Mapping[int, Call], purposes: bool = False) -> str | None:
    """What keeps the calls of `ranks` from being one collective; None if nothing does.

    Args:
        ranks: of the group, in rising order.
        calls: of each of them.
        purposes: whether what they are for must be the same as well.
    """
    if len({(call.reduce_op, call.dtype, call.shape if call.reduce_op else ()) for call in calls.values()}) > 1:
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


def disagreement_text(ranks: Ranks, number: int, why: str, said: Mapping[int, str]) -> str:
    """The text of a MismatchError about one collective; `said` has a line or more for each rank."""
    table = "".join(f"\n  rank {rank}: {said[rank]}" for rank in ranks)
    return f"Ranks {ranks} disagree on their collective #{number}: {why}.{table}"
