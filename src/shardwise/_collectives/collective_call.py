"""Collectives as values, a rank's call of one, and whether the calls of several ranks match."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypedDict

from torch import Tensor

from shardwise._layout import ring_elements
from shardwise.errors import MismatchError

Ranks = tuple[int, ...]
Allocate = Callable[[int], Tensor]  # a 1-D tensor of so many elements
Wait = Callable[[], Tensor]  # waits for a collective that was started, and returns its result

Kind = Literal["all_to_all", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "comparison"]
SAME_CALLS = "make all ranks of a group call the same collectives in the same order"

_purpose: ContextVar[Callable[[], str] | None] = ContextVar("purpose", default=None)


@contextmanager
def describing(describe: Callable[[], str]) -> Iterator[None]:
    """Describe the purpose of the collectives inside, such as the op and the layouts of its operands.

    Errors quote the text, and `fingerprint` compares it among the ranks; it is computed only then. Autograd threads of
    other devices do not see it.
    """
    token = _purpose.set(describe)
    try:
        yield
    finally:
        _purpose.reset(token)


def _described() -> str:
    describe = _purpose.get()
    return "" if describe is None else describe()


class Collective(NamedTuple):
    """A collective of one rank. The result is a new tensor.

        all_to_all      the slices of all 1-D tensors for this rank, in rank order
        all_reduce      the reduction of the tensors
        all_gather      the 1-D tensors, one after the other, in rank order
        reduce_scatter  the elements of this rank, of the sum of the 1-D tensors
        broadcast       the 1-D tensor of the root; other ranks pass any tensor of its dtype
        comparison      an all-to-all by which ranks compare their calls

    Attributes:
        tensor: of this rank. It must not change until the collective is finished.
        ranks: global ranks in rising order. All of them make the same call.
        shape: of an all-reduce, that of the tensor; of an all-gather or reduce-scatter, the elements of each rank; of a
            broadcast, those of the root.
        send_counts, recv_counts: of an all-to-all, elements to and from each rank.
        reduce_op: of an all-reduce: "sum", "max", "min" or "product".
        root: of a broadcast.
        allocate: may be called for the memory of the result of an all-to-all or all-gather, which the caller may reuse.
        in_place: nobody else uses the tensor of an all-reduce or a broadcast, which is contiguous: the result may take
            its memory.
    """

    kind: Kind
    tensor: Tensor
    ranks: Ranks
    shape: Sequence[int] = ()
    send_counts: Sequence[int] = ()
    recv_counts: Sequence[int] = ()
    reduce_op: str = "sum"
    root: int = 0
    allocate: Allocate | None = None
    in_place: bool = False

    @property
    def name(self) -> str:
        """The kind as in errors, with the reduction or the root."""
        names = {"all_reduce": f"all_reduce {self.reduce_op}", "broadcast": f"broadcast from {self.root}"}
        return {**names, "comparison": "comparison by check_ranks() or fingerprint()"}.get(self.kind, self.kind)

    def described(self) -> "CollectiveCall":
        """This rank's call, without its tensor."""
        shape = tuple(self.shape or self.tensor.shape)
        counts = tuple(self.send_counts), tuple(self.recv_counts)
        return CollectiveCall(str(self.tensor.dtype).removeprefix("torch."), shape, self.name, *counts, _described())

    def sent_bytes(self, rank: int) -> int:
        """The bytes that `rank` sends to others. An all-reduce is counted as a ring, a broadcast as a chain."""
        count, own = len(self.ranks), self.ranks.index(rank)
        match self.kind:
            case "all_reduce":
                elements = ring_elements(self.tensor.numel(), count, own)
            case "all_gather" | "reduce_scatter":
                elements = (count - 1) * max(self.shape)
            case "broadcast":
                elements = 0 if rank == self.ranks[self.ranks.index(self.root) - 1] else self.shape[0]
            case _:
                elements = sum(self.send_counts) - self.send_counts[own]
        return elements * self.tensor.element_size()


@dataclass(frozen=True)
class CollectiveCall:
    """One rank's call of a collective, without its tensor; the attributes are those of a `Collective`.

    Attributes:
        shape: of an all-to-all, that of the tensor.
        kind: the name of a `Collective`, such as "all_to_all", "all_reduce sum" and "broadcast from 2".
        purpose: such as the op and the layouts of its operands.
    """

    dtype: str
    shape: tuple[int, ...]
    kind: str = "all_to_all"
    send_counts: tuple[int, ...] = ()
    recv_counts: tuple[int, ...] = ()
    purpose: str = ""

    def __str__(self) -> str:
        text = f"{self.kind} of {self.dtype}"
        if self.kind == "all_to_all":
            text += f", send counts {self.send_counts}, receive counts {self.recv_counts}"
        else:
            text += f" {self.shape}"
        return f"{text} ({self.purpose})" if self.purpose else text

    @property
    def must_match(self) -> tuple[object, ...]:
        """The values that must be equal on all ranks, without the purpose."""
        return self.kind, self.dtype, () if self.kind == "all_to_all" else self.shape

    def check(self, ranks: Ranks) -> None:
        """Assert the conditions that one rank alone can check."""
        if self.kind != "all_to_all":
            return
        assert len(self.send_counts) == len(self.recv_counts) == len(ranks), f"{self} among ranks {ranks}"
        assert self.shape == (sum(self.send_counts),), f"{self}: the tensor is {self.shape}"


class DescribedCall(TypedDict):
    """A call and its call site, for the failure store."""

    call: dict[str, Any]  # the fields of a `CollectiveCall`
    where: str


def call_from(facts: Mapping[str, Any]) -> CollectiveCall:
    """A call from JSON, in which tuples are lists."""
    values: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in facts.items()}
    return CollectiveCall(**values)


@dataclass(frozen=True)
class PendingCollective:
    """The collective in which a rank waits: its call, the group, and its number in the group.

    Attributes:
        where: the line of user code, as in `format_call_sites`.
    """

    call: CollectiveCall
    number: int
    ranks: Ranks
    where: str = ""

    def __str__(self) -> str:
        return f"collective #{self.number} of ranks {self.ranks}: {self.call}{self.where}"


def mismatch(ranks: Ranks, calls: Mapping[int, CollectiveCall], purposes: bool = False) -> str | None:
    """Why the calls of `ranks` do not match; None if they do.

    Args:
        ranks: of the group, in rising order.
        calls: of each of them.
        purposes: whether their purposes must match as well.
    """
    if len({call.must_match for call in calls.values()}) > 1:
        return "all ranks must make the same call"
    if calls[ranks[0]].kind == "all_to_all":
        for i, source in enumerate(ranks):
            for j, target in enumerate(ranks):
                sent, expected = calls[source].send_counts[j], calls[target].recv_counts[i]
                if sent != expected:
                    return f"rank {source} sends {sent} elements to rank {target}, which expects {expected}"
    if purposes and len({call.purpose for call in calls.values()}) > 1:
        return "all ranks must make it for the same purpose"
    return None


def mismatch_text(ranks: Ranks, number: int, why: str, states: Mapping[int, str]) -> str:
    """The text of a MismatchError about one collective; `states` has lines for each rank."""
    table = "".join(f"\n  rank {rank}: {states[rank]}" for rank in ranks)
    return f"Ranks {ranks} disagree on their collective #{number}: {why}.{table}"


def unequal(source: int, target: int, sent: int | str, expected: int, pending: PendingCollective) -> MismatchError:
    """The error about a rank that sends another number of elements than a receiver expects."""
    return MismatchError(
        f"Rank {source} sends {sent} elements to rank {target}, which expects {expected}.\n"
        f"  Rank {target} was in {pending}\n"
        "  Fix: correct one of the two; shardwise.collectives.check_ranks() compares the calls of all ranks."
    )
