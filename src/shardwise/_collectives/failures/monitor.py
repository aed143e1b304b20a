"""A thread in each rank that publishes its state on request of another rank, whatever the rank is doing.

It does not look at other ranks: `reports.py` does, once a collective fails.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial

from shardwise._collectives.collective_call import DescribedCall, PendingCollective, Ranks
from shardwise._collectives.failures.store import (
    Connection,
    FailureReport,
    FailureStore,
    ProcessIdentity,
    address,
    identity_of,
    is_on_this_host,
)
from shardwise._collectives.torchrun import has_agent_store
from shardwise._trace.user_stack import format_call_sites, format_running, frames_of

TICK_SECONDS = 0.4
END_SECONDS = 5.0  # at the end of the process, for threads that use a store; one that is stopped may never answer
SAVE_SECONDS = 30.0  # from the SIGTERM to the SIGKILL of a rank whose launcher is gone


class FailureMonitor:
    """Polls the failure store until another rank asks for states or has failed.

    It publishes the state of this rank once, so ranks that diagnose a failure can distinguish a waiting rank from a
    hanging one, and name its line. Then it waits for the report of the failure, keeps it and acknowledges it. So this
    rank can name the cause though the store may end with its server's rank. One poll is one round trip to the store.

    Attributes:
        failed: whether a rank of the world has failed, or waits in vain.
        root: the report of the first failure; this rank sends nothing from then on.
        keeper: the process with the server of the store, if known.
        pending: the collective in which this rank waits, if any.
    """

    def __init__(self, describe: Callable[[Ranks, int], DescribedCall | None] = lambda _ranks, _number: None) -> None:
        """`describe` returns this rank's call of a collective, by group and number."""
        self.describe = describe
        self.failed = False
        self.root: FailureReport | None = None
        self.keeper: ProcessIdentity | None = None
        self.pending: Callable[[], PendingCollective] | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, store_of_world: Callable[[], FailureStore | None], launcher: int | None = None) -> None:
        """Monitor this world instead of an earlier one. A reference to the store would keep its port open.

        Args:
            launcher: the process whose end also ends this one, if any.
        """
        self.stop()
        self.failed, self.root, self.keeper, self._stopped = False, None, None, threading.Event()
        run = partial(self._run, store_of_world, self._stopped, launcher)
        self._thread = threading.Thread(target=run, name="shardwise monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread: a thread in a store at the interpreter's end would abort the process."""
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(END_SECONDS)
        self._thread = None

    def _run(
        self, store_of_world: Callable[[], FailureStore | None], stopped: threading.Event, launcher: int | None
    ) -> None:
        polls = True
        with closing(Connection()) as connection:
            while (polls or launcher is not None) and not stopped.wait(TICK_SECONDS):
                if launcher is not None and os.getppid() != launcher:
                    _end_without(launcher, stopped)
                polls = polls and self._poll(store_of_world, connection, launcher)

    def _poll(
        self, store_of_world: Callable[[], FailureStore | None], connection: Connection, launcher: int | None
    ) -> bool:
        """Poll the store. Returns whether to do so again."""
        with suppress(Exception):  # an unreachable world is not monitored
            store = store_of_world()
            if store is not None:
                # A network may recover.
                return connection.error(store.store) is not None or self._look(store, launcher)
        return False

    def _look(self, store: FailureStore, launcher: int | None) -> bool:
        """Answer other ranks, and keep what this rank needs if the store ends. Returns whether to do so again."""
        server = address(store.store)
        if self.keeper is None and server is not None:
            if not has_agent_store():
                self.keeper = store.process(0)
            elif launcher is not None and is_on_this_host(server):  # else the agent of another host has it
                self.keeper = identity_of(launcher)
        if not self.failed and store.are_states_requested():
            self._publish(store)
            self.failed = True
        if not self.failed:
            return True
        self.root = store.root() or self.root
        if self.root is None:
            return True
        store.publish("acknowledged", True)
        return False

    def _publish(self, store: FailureStore) -> None:
        different = store.difference()
        if different is not None:
            store.publish("call", self.describe(different.ranks, different.number))
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        pending, stack = self.pending, list(frames_of(main))
        if pending is not None:
            store.publish_pending(replace(pending(), where=format_call_sites(stack, limit=1)))
        else:
            store.publish("running", format_running(stack))


def _end_without(launcher: int, stopped: threading.Event) -> None:
    """End this process, which nobody would end or wait for; a handler of SIGTERM has time to save."""
    text = f"shardwise: process {os.getpid()} ends, because its launcher, process {launcher}, has ended."
    with suppress(OSError):
        sys.stderr.write(f"{text}\n")
    os.kill(os.getpid(), signal.SIGTERM)
    if not stopped.wait(SAVE_SECONDS):
        os.kill(os.getpid(), signal.SIGKILL)
