"""A run that goes on when a rank dies: it is started again from its last complete checkpoint.

rank 1 was killed, hangs or raised        start again, on as many ranks
it failed again, with no new checkpoint   on fewer ranks, if that is allowed; else stop
it raised the same again                  stop: that is not of the machine
bad input, divergence, SIGTERM, Ctrl-C    stop at once
"""

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from shardwise.checkpoint import latest, read_manifest
from shardwise.checkpoint.manifest import Manifest
from shardwise.demos.data import errors as of_data
from shardwise.demos.errors import DivergedError
from shardwise.errors import RankFailedError, RemoteRankError, ShardwiseError

T = TypeVar("T")

WHERE_ERRORS_ARE = (DivergedError.__module__, of_data.__name__)  # imported, so that `_final_errors` has them
STOPPED = {-signal.SIGTERM, -signal.SIGINT, -signal.SIGPIPE}  # how a rank ends that was to end


class Restarts:
    """Decides what follows a failure. It counts all restarts of a run, whether checkpoints were saved between or not.

    Args:
        limit: restarts that there may be.
        num_ranks: of the first start.
        fewer: the smaller numbers of ranks that may take over, from the largest.
    """

    def __init__(self, limit: int, num_ranks: int, fewer: Sequence[int] = ()) -> None:
        self.limit, self.num_ranks, self.count = limit, num_ranks, 0
        self._fewer = list(fewer)
        self._previous: tuple[RankFailedError, Manifest | None] | None = None

    def after(self, error: RankFailedError, saved: Manifest | None) -> str:
        """Restart: count it, set `num_ranks`, and say in one line what happened and what follows.

        Args:
            saved: the last complete checkpoint of the run.

        Raises:
            RankFailedError: do not restart; `error`, with the reason where there was a choice.
        """
        if self.limit == 0 or is_final(error):
            raise error
        before, previous = self.num_ranks, self._previous
        is_stuck = previous is not None and _identity(previous[1]) == _identity(saved)
        start = f"step {saved.step:,}" if saved else "the beginning"
        if previous is not None and is_stuck:
            same = f"it has failed twice from {start}, with no new checkpoint"
            if error.error_type and error.error_type == previous[0].error_type != RemoteRankError.__name__:
                raise _with_reason(error, f"Not restarted: {same}. Fix: remove the cause of that error, then --resume")
            if not self._fewer:
                raise _with_reason(
                    error, f"Not restarted: {same}. Fix: save more often (save_every), or allow fewer ranks (min_nproc)"
                )
        if self.count == self.limit:
            gave_up = f"Gave up after {self.limit} {_plural(self.limit, 'restart')}"
            raise _with_reason(error, f"{gave_up}. Fix: remove the cause of that error, then --resume")
        if is_stuck:
            self.num_ranks = self._fewer.pop(0)
        self.count += 1
        self._previous = error, saved
        instead = f" instead of {before}, as no checkpoint was saved since the last restart" if is_stuck else ""
        return (
            f"Restart {self.count} of {self.limit}: {_first_line(error)}. "
            f"Starting again from {start} on {self.num_ranks} {_plural(self.num_ranks, 'rank')}{instead}."
        )


def run_with_restarts(
    start: Callable[[int, bool], T], restarts: Restarts, saves: "SavesOfRun", resume: bool, say: Callable[[str], object]
) -> T:
    """What `start(num_ranks, resume)` returns in the end; where ranks fail, it is called again as `restarts` decides.

    Args:
        saves: of the run.
        resume: whether the first start goes on from a checkpoint.
        say: called with a line before each restart.

    Raises:
        RankFailedError: the last failure.
    """
    while True:
        try:
            return start(restarts.num_ranks, resume)
        except RankFailedError as error:
            saved = saves.last()
            say(restarts.after(error, saved))
            resume = saved is not None


def is_final(error: RankFailedError) -> bool:
    """Whether another start would be wrong: the run was stopped, or an error of ours says what to change.

    An error that says that another rank failed or hangs is not.
    """
    return error.exitcode in STOPPED or error.error_type == "SystemExit" or error.error_type in _final_errors()


def _final_errors() -> set[str]:
    found, left = set[str](), [ShardwiseError]
    while left:
        kind = left.pop()
        if kind is not RemoteRankError:
            found.add(kind.__name__)
            left += kind.__subclasses__()
    return found


class SavesOfRun:
    """The checkpoints that a run saves in its folder.

    Args:
        resumes: whether those that are there now are of this run; if not, of an earlier one that it replaces.
    """

    def __init__(self, folder: Path | str, resumes: bool) -> None:
        self.folder = folder
        self._earlier = None if resumes else _identity(_last_saved(folder))

    def last(self) -> Manifest | None:
        """What the last complete one says of itself; None if there is none of this run."""
        saved = _last_saved(self.folder)
        return None if _identity(saved) == self._earlier else saved


def _last_saved(folder: Path | str) -> Manifest | None:
    path = latest(folder)
    return None if path is None else read_manifest(path)


def _identity(saved: Manifest | None) -> str | None:
    return None if saved is None else saved.sha256


def _with_reason(error: RankFailedError, reason: str) -> RankFailedError:
    found = RankFailedError(f"{error}\n{reason}.", error.rank, error.exitcode, error.error_type, error.rank_traceback)
    for note in getattr(error, "__notes__", ()):
        found.add_note(note)
    return found


def _first_line(error: RankFailedError) -> str:
    return str(error).splitlines()[0].rstrip(".:")


def _plural(count: int, word: str) -> str:
    return word if count == 1 else f"{word}s"
