"""Hooks on the ends of a Python process, which report to the failure store of its world.

Installed when a process joins a world, and uninstalled when it leaves with `shutdown`. Earlier hooks still run.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.util import Finalize
from types import TracebackType

import torch.distributed as dist

from shardwise._collectives.failures.reports import (
    bounded,
    poll,
    report_exit,
    report_failure,
    store_of_world,
    with_store,
)
from shardwise._collectives.failures.store import FailureStore, address
from shardwise._collectives.torchrun import has_agent_store
from shardwise._trace.user_stack import user_call_site
from shardwise.errors import summary

READERS_SECONDS = 3.0


class ExitHooks:
    """`sys.excepthook`, `threading.excepthook` and an exit handler, from the constructor until `uninstall`.

    A child that this process forks inherits them, but they do not report there.
    """

    def __init__(self, at_exit: Callable[[], None]) -> None:
        """`at_exit` is called at the end of the process, after the report."""
        self._pid = os.getpid()
        self._at_exit = at_exit
        self._finalizer = Finalize(None, self._finish, exitpriority=0)
        self._before, self._before_in_threads = sys.excepthook, threading.excepthook
        sys.excepthook, threading.excepthook = self._excepthook, self._excepthook_of_threads

    def uninstall(self) -> None:
        """Restore the earlier hooks. Hooks that others installed on top of these stay, and may still call these."""
        self._finalizer.cancel()
        self._pid = 0
        if sys.excepthook == self._excepthook:
            sys.excepthook = self._before
        if threading.excepthook == self._excepthook_of_threads:
            threading.excepthook = self._before_in_threads

    def _excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == self._pid:
            report_failure(error.with_traceback(trace))
        self._before(kind, error, trace)
        if os.getpid() == self._pid:
            _wait_for_readers()

    def _excepthook_of_threads(self, args: threading.ExceptHookArgs) -> None:
        error = args.exc_value
        if error is not None and not isinstance(error, SystemExit) and os.getpid() == self._pid:
            thread = args.thread.name if args.thread else ""
            text = f"its thread {thread!r} failed: {summary(error)}, at {user_call_site(args.exc_traceback)}"
            with_store(lambda store: store.publish("thread_error", text))
        self._before_in_threads(args)

    def _finish(self) -> None:
        """Runs at the end of a program, and in the `finally` of a child process, which still sees its exception."""
        error = sys.exception()
        if isinstance(error, SystemExit) and error.code and error.__context__ is not None:
            error = error.__context__  # a wrapper's way to end after an exception
        if error is None:
            report_exit("reached the end of its program")
        elif isinstance(error, SystemExit):
            report_exit(f"called sys.exit({error.code!r})")
        else:
            report_failure(error)
            _wait_for_readers()
        self._at_exit()


def report_end() -> None:
    """Report the end of a process that is in a world and has no hooks, because it has not used the world here."""
    error = getattr(sys, "last_value", None)  # the exception that ended the program
    with_store(lambda store: store.register())
    if error is None:
        report_exit("reached the end of its program")
    else:
        report_failure(error)
        _wait_for_readers()


def _wait_for_readers() -> None:
    """Wait until the monitors of other ranks have read the report, if this process has the store's server."""
    store = store_of_world()
    if store is None or store.rank or not address(store.store) or has_agent_store():
        return
    others = range(1, dist.get_world_size())
    with suppress(Exception):
        bounded(lambda: poll(lambda: _have_read(store, others) or None, READERS_SECONDS), READERS_SECONDS)


def _have_read(store: FailureStore, ranks: Iterable[int]) -> bool:
    """Whether each live rank has read the report of the first failure; a rank that failed has made it."""
    return all(
        store.have_all("acknowledged", [rank]) or ((process := store.process(rank)) and process.state() == "gone")
        for rank in ranks
    )
