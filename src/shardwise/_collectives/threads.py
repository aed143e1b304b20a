"""One thread of a rank communicates at a time; another takes over while that one waits, or after it has ended.

Ranks would pair the collectives of two threads that run side by side differently.
"""

import concurrent.futures
import dis
import multiprocessing
import queue
import re
import selectors
import subprocess
import sys
import threading
from pathlib import Path
from time import monotonic, sleep
from types import FrameType

import torch

from shardwise._collectives.checks.ledger import Ledger
from shardwise._trace.user_stack import expression_of, format_call_sites, frames_of
from shardwise.errors import ThreadError

GRACE_SECONDS = 1.0  # to begin to wait, as in `thread.start(); thread.join()`, on a busy machine
TICK_SECONDS = 0.001
LOOKS = 20  # at a thread that has called a lock: it waits if it is there at each tick
# A thread waits if the innermost frame of its stack is one of these functions in one of these modules.
_WAITING_FUNCTIONS = frozenset(
    """
    wait join _wait_for_tstate_lock select poll _recv _send _try_wait _wait
    _worker run set_result set_exception
    _engine_run_backward
    """.split()  # for a lock, thread or process; for the next task of an executor; for the engine of autograd
)
_WAITING_MODULES = tuple(
    str(module.__file__).removesuffix("__init__.py")
    for module in (threading, queue, selectors, subprocess, concurrent.futures, multiprocessing, torch.autograd.graph)
)
_LOCK_CALL = re.compile(r"\.acquire\([^()]*\)$")
_COMMUNICATING = tuple(str(Path(__file__).with_name(name)) for name in ("api.py", "processes.py", "started.py"))


class ThreadGuard:
    """Which thread of a rank made its last collective.

    Attributes:
        ident: of that thread; 0 if there is none yet.
        failed: why this rank cannot communicate any more, or "".
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ident = 0
        self._ledger = ledger
        self.failed = ""
        self._lock = threading.Lock()  # of several threads that take over, one does

    def take_over(self) -> None:
        """Let this thread make the collectives of its rank from here on.

        Raises:
            ThreadError: the thread that made the last one neither waits nor has ended; or this rank raised that before.
        """
        self.check()
        made, until, looks = self._ledger.num_calls, monotonic() + GRACE_SECONDS, 0
        while True:
            with self._lock:
                self.check()
                frame = sys._current_frames().get(self.ident)
                looks = looks + 1 if frame is not None and _calls_lock(frame) else 0
                if frame is None or ((_waits(frame) or looks == LOOKS) and not _communicates(frame)):
                    self.ident = threading.get_ident()
                    return
            if self._ledger.num_calls != made or _communicates(frame) or monotonic() > until:
                self.fail(
                    f"Two threads of rank {self._ledger.rank} communicate in no order:"
                    f"\n  {_name(threading.get_ident())}{format_call_sites(list(frames_of(sys._getframe())))}"
                    f"\n  {_name(self.ident)}{format_call_sites(list(frames_of(frame)))}"
                    f"\n  Ranks would pair their collectives differently. Fix: communicate in one thread, such as "
                    f"by redistributing after the queue; or let it wait for the other one with join() or result()."
                )
            sleep(TICK_SECONDS)

    def check(self) -> None:
        if self.failed:
            raise ThreadError(self.failed)

    def fail(self, why: str) -> None:
        """Raise a ThreadError now and at every later collective of this rank."""
        self.failed, self.ident = why, -1
        self.check()


def _waits(frame: FrameType) -> bool:
    code, caller = frame.f_code, frame.f_back
    asks_only = caller is not None and caller.f_code.co_name == "is_alive"
    return code.co_name in _WAITING_FUNCTIONS and code.co_filename.startswith(_WAITING_MODULES) and not asks_only


def _calls_lock(frame: FrameType) -> bool:
    """Whether a thread is in `lock.acquire()`, or where a `with lock:` begins: C functions, which have no frame."""
    opcode = frame.f_code.co_code[frame.f_lasti]
    return dis.opname[opcode] == "BEFORE_WITH" or _LOCK_CALL.search(expression_of(frame)) is not None


def _communicates(frame: FrameType | None) -> bool:
    """Whether a thread is in a collective, where it may wait for something else than the other thread."""
    while frame is not None:
        if frame.f_code.co_filename in _COMMUNICATING:
            return True
        frame = frame.f_back
    return False


def _name(ident: int) -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return f"thread {names.get(ident, 'of torch')!r}"
