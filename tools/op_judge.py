"""The outcome of one call of an op on simulated ranks, errors and hangs included."""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.errors import ShardwiseError
from shardwise.testing.failures import DeadlockError
from shardwise.testing.judge import Judge, Layouts, Observed, Outcome, Sample, observe_rank, relative_bounds
from shardwise.testing.worlds import world

REFUSED = "torch raises too"


@dataclass(frozen=True)
class Verdict:
    """An outcome, why it is not better, how many operands the call redistributed by itself, and which aten ops fell
    back to replicated."""

    outcome: Outcome
    message: str = ""
    implicit: int = 0
    fallbacks: frozenset[str] = frozenset()
    late: bool = False  # a rank may still be running: the process should not be used for other calls


class OpJudge(Judge):
    """Judges one call under any layouts.

    Args:
        sample: see `Judge`.
        timeout: seconds after which ranks that still run are given up.
    """

    exact_structure = True

    def __init__(self, sample: Sample, timeout: float = 20.0) -> None:
        self.timeout = timeout
        super().__init__(sample)
        if self.plain.stage == "backward":  # torch itself cannot differentiate this: compare forward only
            self.plain.error, self.plain.grads = None, None

    def verdict(self, layouts: Layouts, size: int = 4) -> Verdict:
        """Make the call on `size` ranks with its tensors laid out as `layouts`."""
        try:
            ranks = self.on_ranks(layouts, size)
        except DeadlockError as error:
            return Verdict(Outcome.HANG, str(error), late=True)
        outcome, message = self._judged(ranks, layouts)
        return Verdict(outcome, message, ranks[0].implicit, ranks[0].fallbacks)

    def on_ranks(self, layouts: Layouts, size: int) -> Sequence[Observed]:
        """What each of `size` ranks sees; a subclass may run another library."""
        backward = self.plain.grads is not None
        return world(size, timeout=self.timeout).run(observe_rank, self.sample, layouts, backward)

    def _judged(self, ranks: Sequence[Observed], layouts: Layouts) -> tuple[Outcome, str]:
        failed = {rank: seen for rank, seen in enumerate(ranks) if seen.error is not None}
        if failed:
            outcome, message = _of_failures(failed, len(ranks))
            on_all = outcome in (Outcome.CLEAR_ERROR, Outcome.OTHER_ERROR)
            return (Outcome.RIGHT, REFUSED) if on_all and self.plain.error is not None else (outcome, message)
        if self.plain.error is not None:
            return Outcome.WRONG_VALUE, f"gives a result where torch raises {self.plain.failure}"
        if self.expected.error is not None:
            return Outcome.OTHER_ERROR, f"a world of one rank raises {self.expected.failure}"
        found = [self.difference(seen, layouts, rank, relative_bounds) for rank, seen in enumerate(ranks)]
        return max(filter(None, found), key=lambda x: x[0].badness, default=(Outcome.RIGHT, ""))


def _of_failures(failed: dict[int, Observed], size: int) -> tuple[Outcome, str]:
    """Errors are clear if all ranks raise the same one, and it is one of this library."""
    own = {rank: seen for rank, seen in failed.items() if not isinstance(seen.error, DeadlockError)}
    message = next(iter((own or failed).values())).failure
    if not own or "disagree on their collective" in message:
        return Outcome.HANG, message
    if len(own) < size:
        return Outcome.SOME_RANKS, f"ranks {', '.join(map(str, own))}: {message}"
    if not all(isinstance(seen.error, ShardwiseError) for seen in own.values()):
        return Outcome.OTHER_ERROR, message
    if len({seen.failure for seen in own.values()}) > 1:
        return Outcome.OTHER_ERROR, f"a text that differs by rank: {message}"
    return Outcome.CLEAR_ERROR, message
