"""A limit on what ops may send without being asked."""

from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.errors import RuleError
from shardwise.trace.comm_trace import CommEvent, Listener, listening_with


class Budget(Listener):
    """What `no_implicit_comm` allows, and what is spent of it.

    Ranks decide alike because they count alike: a move is charged with what all ranks of its mesh send, and every
    mesh has an account of its own, since a rank need not know what happens on meshes that it is not part of.
    """

    wants_call_sites = True

    def __init__(self, max_bytes: int, gradients: bool) -> None:
        self.max_bytes = max_bytes
        self.gradients = gradients
        self._spent: dict[tuple[int, ...], int] = {}

    @property
    def spent_bytes(self) -> int:
        """What all ranks of a mesh together have sent implicitly; of several meshes, the one that sent most."""
        return max(self._spent.values(), default=0)

    def check(self, move: CommEvent) -> None:
        if not self._counts(move):
            return
        if move.total_bytes is None:
            raise RuleError(
                f"no_implicit_comm cannot count {move}: no rank knows beforehand how many rows the others send. "
                f"Fix: no_implicit_comm(gradients=False), or dense gradients (sparse=False)."
            )
        spent = self._spent.get(move.ranks, 0)
        if spent + move.total_bytes > self.max_bytes:
            raise RuleError(_refusal(move, self.max_bytes, spent))

    def record(self, move: CommEvent) -> None:
        if self._counts(move) and move.total_bytes is not None:
            self._spent[move.ranks] = self._spent.get(move.ranks, 0) + move.total_bytes

    def _counts(self, move: CommEvent) -> bool:
        return move.cause.implicit and (self.gradients or move.cause.kind != "gradient")


def _refusal(move: CommEvent, max_bytes: int, spent: int) -> str:
    """The same text on every rank, so not what one of them would send."""
    cause = move.cause
    allowed = f"{max_bytes:,} bytes" + (f", of which {spent:,} are spent" if spent else "")
    fix = f"{move.avoid}; or allow it: " if move.avoid else ""
    return (
        f"An implicit move over the budget: {move}\n"
        f"  Where: {cause.call_site or 'unknown'}\n"
        f"  Sends: {move.total_bytes:,} bytes over all ranks; allowed: {allowed}.\n"
        f"  Why: {cause.why}.\n"
        f"  Fix: {fix}no_implicit_comm(max_bytes={spent + (move.total_bytes or 0)})."
    )


@contextmanager
def no_implicit_comm(max_bytes: int = 0, *, gradients: bool = False) -> Iterator[Budget]:
    """Inside, ops and their backward may send `max_bytes` without being asked; what would exceed it is an error.

    Implicit are moves of operands that a rule wants elsewhere, the gathers of ops that have no rule, and the moves of
    their gradients in backward. Not implicit are `redistribute`, `full_tensor`, `item` and other requests, their
    backward, and exchanges that an op consists of, such as ids that travel to the rows of an embedding table. Moves
    that send nothing cost nothing. Budgets nest: what an inner one allows must fit the outer one as well.

    Args:
        max_bytes: what all ranks of a mesh together may send inside the block.
        gradients: count what reading `.grad` reduces, and gradients that cross to plain tensors, as well.

    Raises:
        RuleError: before anything is sent, the same on every rank: where, what, why, how many bytes, and the fix.
    """
    if not isinstance(max_bytes, int) or isinstance(max_bytes, bool) or max_bytes < 0:
        raise RuleError(f"no_implicit_comm: max_bytes is a whole number of bytes, 0 or more, got {max_bytes!r}.")
    budget = Budget(max_bytes, gradients)
    with listening_with(budget):
        yield budget
