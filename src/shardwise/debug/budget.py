"""A limit on implicit communication."""

from collections.abc import Iterator
from contextlib import contextmanager

from shardwise._layout import checked
from shardwise._trace.comm_trace import CommEvent, Listener, listening_with
from shardwise.errors import RuleError


class Budget(Listener):
    """The limit of `no_implicit_comm`, and the bytes spent so far.

    Every rank must come to one decision. So an event costs the bytes that all ranks of its mesh send, and each mesh has
    its own budget: a rank does not know of events on meshes that it is not part of.
    """

    wants_call_sites = wants_totals = True

    def __init__(self, max_bytes: int, gradients: bool) -> None:
        self.max_bytes = max_bytes
        self.gradients = gradients
        self._spent: dict[tuple[int, ...], int] = {}

    @property
    def spent_bytes(self) -> int:
        """The implicit bytes of all ranks of a mesh; the largest number of any mesh."""
        return max(self._spent.values(), default=0)

    def check(self, event: CommEvent) -> None:
        if not self._counts(event):
            return
        if event.total_bytes is None:
            raise RuleError(
                f"no_implicit_comm cannot count {event}: no rank knows in advance how many rows the others send. "
                f"Fix: no_implicit_comm(gradients=False), or dense gradients (sparse=False)."
            )
        spent, cause = self._spent.get(event.ranks, 0), event.cause
        if spent + event.total_bytes <= self.max_bytes:
            return
        allowed = f"{self.max_bytes:,} bytes" + (f", of which {spent:,} are spent" if spent else "")
        fix = f"give {cause.operand} the layout that the op needs, or redistribute it explicitly; or allow it: "
        raise RuleError(  # one text on every rank, so without the bytes of one rank
            f"Implicit communication exceeds the budget: {event}\n"
            f"  Where: {cause.call_site or 'unknown'}\n"
            f"  Sends: {event.total_bytes:,} bytes over all ranks; allowed: {allowed}.\n"
            f"  Why: {cause.why}.\n"
            f"  Fix: {fix if cause.kind != 'gradient' else ''}no_implicit_comm(max_bytes={spent + event.total_bytes})."
        )

    def record(self, event: CommEvent) -> None:
        if self._counts(event) and event.total_bytes is not None:
            self._spent[event.ranks] = self._spent.get(event.ranks, 0) + event.total_bytes

    def _counts(self, event: CommEvent) -> bool:
        return event.cause.implicit and (self.gradients or event.cause.kind != "gradient")


@checked
@contextmanager
def no_implicit_comm(max_bytes: int = 0, *, gradients: bool = False) -> Iterator[Budget]:
    """Inside, ops and their backward may send at most `max_bytes` implicitly.

    Implicit are redistributions of operands for a rule, the gathers of ops without a rule, and both for gradients in
    backward. Not implicit are `redistribute`, `full_tensor`, `item` and the like, their backward, and exchanges inside
    an op, such as an embedding lookup. Budgets nest: communication must fit all of them.

    Args:
        max_bytes: bytes that all ranks of a mesh together may send inside the block.
        gradients: also count the reductions of gradients by `.grad`, and of gradients of plain tensors.

    Raises:
        RuleError: before anything is sent, the same text on every rank.
    """
    if max_bytes < 0:
        raise RuleError(
            f"no_implicit_comm: max_bytes is an int of 0 or more, got {max_bytes!r}. Fix: 0, if nothing may be sent."
        )
    budget = Budget(max_bytes, gradients)
    with listening_with(budget):
        yield budget
