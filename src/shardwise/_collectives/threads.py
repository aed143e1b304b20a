"""One thread of a rank communicates at a time; another takes over while that one waits, or after it has ended.

Ranks would pair the collectives of two concurrent threads differently. A thread waits if it sleeps and uses no
processor time: in Python, in a lock or in C++. A thread that reads a file does so too; calls that it makes in another
order than other ranks are found as any other order (`checks/calls.py`).
"""

import sys
import threading
import time
from pathlib import Path
from types import FrameType

from shardwise._collectives.checks.ledger import Ledger
from shardwise._trace.user_stack import format_call_sites, frames_of
from shardwise.errors import ThreadError

GRACE_SECONDS = 1.0  # to begin to wait, as in `thread.start(); thread.join()`, on a busy machine
TICK_SECONDS = 0.001  # without processor time
_COMMUNICATING = f"{Path(__file__).parent}/"


class ThreadGuard:
    """The thread of a rank that made its last collective.

    Attributes:
        ident: of the thread; 0 if there is none yet.
        failed: why this rank cannot communicate any more, or "".
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ident = 0
        self._ledger = ledger
        self.failed = ""
        self._lock = threading.Lock()  # of several threads that could take over, one does
        self._clock = self._native = 0  # the clock of the thread's processor time, and its native id

    def take_over(self) -> None:
        """Make the collectives of the rank from this thread on.

        Raises:
            ThreadError: the thread that made the last one neither waits nor has ended, now or before.
        """
        self.check()
        made, until = self._ledger.num_calls, time.monotonic() + GRACE_SECONDS
        while True:
            ident, waits = self.ident, not self.ident or self._waits()
            with self._lock:
                self.check()
                frame = sys._current_frames().get(self.ident)
                if frame is None or (waits and ident == self.ident and not _communicates(frame)):
                    self.ident, self._native = threading.get_ident(), threading.get_native_id()
                    self._clock = time.pthread_getcpuclockid(self.ident)
                    return
            if self._ledger.num_calls != made or _communicates(frame) or time.monotonic() > until:
                self.fail(
                    f"Two threads of rank {self._ledger.rank} communicate, and neither waits for the other:"
                    f"\n  {_name(threading.get_ident())}{format_call_sites(list(frames_of(sys._getframe())))}"
                    f"\n  {_name(self.ident)}{format_call_sites(list(frames_of(frame)))}"
                    f"\n  Ranks would pair their collectives differently. Fix: communicate in one thread, such as "
                    f"by redistributing after the queue; or let one thread wait for the other with join() or result()."
                )

    def check(self) -> None:
        if self.failed:
            raise ThreadError(self.failed)

    def fail(self, why: str) -> None:
        """Raise a ThreadError now and at every later collective of this rank."""
        self.failed, self.ident = why, -1
        self.check()

    def _waits(self) -> bool:
        """Whether the thread of the last collective sleeps, or has ended. Takes a tick, without the GIL."""
        try:
            before = time.clock_gettime_ns(self._clock)
            time.sleep(TICK_SECONDS)
            state = Path(f"/proc/self/task/{self._native}/stat").read_text().rpartition(")")[2].split()[0]
            return state == "S" and time.clock_gettime_ns(self._clock) == before
        except OSError:
            return True


def _communicates(frame: FrameType | None) -> bool:
    """Whether a thread is in a collective, where it may wait for something other than this thread."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_COMMUNICATING):
            return True
        frame = frame.f_back
    return False


def _name(ident: int) -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return f"thread {names.get(ident, 'of torch')!r}"
