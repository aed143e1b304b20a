"""What a process that a rank starts with `multiprocessing` knows of that rank, such as a worker of a DataLoader.

A forked process has the memory of its rank, and so `rank()` and `world_size()`. A spawned one gets both numbers with
the configuration that multiprocessing sends to each process. Without them it would take itself for the only rank and,
for example, read the examples of all ranks.
"""

from collections.abc import Callable
from multiprocessing.process import current_process

RankAndSize = tuple[int, int]

CANNOT_COMMUNICATE = (
    "A process that a rank started, such as a worker of a DataLoader, cannot communicate for the rank. "
    "Fix: use plain tensors there, and distribute them in the process of the rank."
)
_KEY = "shardwise: rank and world size of the parent"


class _OfStartingThread:
    """Is pickled as the rank and world size of the thread that starts a process: a simulated rank is a thread."""

    def __init__(self, rank_and_size: Callable[[], RankAndSize | None]) -> None:
        self._rank_and_size = rank_and_size

    def __reduce__(self) -> tuple[type, tuple[RankAndSize | tuple[()]]]:
        return tuple, (self._rank_and_size() or (),)  # of plain numbers: a process that needs no shardwise imports none


def share_rank(rank_and_size: Callable[[], RankAndSize | None]) -> None:
    """Send rank and world size to the processes that this one starts from here on.

    Args:
        rank_and_size: gives those of the calling thread; None if it is no rank.
    """
    _config()[_KEY] = _OfStartingThread(rank_and_size)


def inherited_rank() -> RankAndSize | None:
    """The rank and world size of the process that started this one; None if that was no rank."""
    match _config().get(_KEY):
        case (int(rank), int(size)):
            return rank, size
    return None


def _config() -> dict[str, object]:
    """What multiprocessing copies to each process that this one starts."""
    found: dict[str, object] = vars(current_process())["_config"]
    return found
