"""A thread in each rank that publishes its state when another rank asks for it, whatever the rank is doing."""

import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from shardwise.collectives.collective_call import DescribedCall, PendingCollective, Ranks
from shardwise.collectives.failures.store import FailureStore, is_reachable
from shardwise.trace.user_stack import format_running, frames_of

TICK_SECONDS = 0.4


class FailureMonitor:
    """Polls the failure store until states are requested, then publishes that of this rank once.

    So ranks that diagnose a failure can distinguish a waiting rank from one that hangs, and name the line where
    that one is. One poll is one round trip to the store.

    Attributes:
        failed: whether a rank of the world has failed.
        pending: the collective this rank waits in, while it does.
        describe: what this rank called in a collective, by group and number.
    """

    def __init__(self) -> None:
        self.failed = False
        self.pending: Callable[[], PendingCollective] | None = None
        self.describe: Callable[[Ranks, int], DescribedCall | None] = lambda _ranks, _number: None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, store_of_world: Callable[[], FailureStore | None]) -> None:
        """Monitor this world instead of an earlier one. A reference to the store would keep its port open."""
        self.stop()
        self.failed, self._stopped = False, threading.Event()
        main = threading.main_thread().ident or 0
        self._thread = threading.Thread(
            target=self._run, args=(store_of_world, self._stopped, main), name="shardwise monitor", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread: one that is in a store when the interpreter ends would abort the process."""
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)
        self._thread = None

    def _run(self, store_of_world: Callable[[], FailureStore | None], stopped: threading.Event, main: int) -> None:
        with suppress(Exception):  # an unreachable world is not monitored
            while not stopped.wait(TICK_SECONDS):
                store = store_of_world()
                if store is None or not is_reachable(store.store):
                    return
                if store.are_states_requested():
                    self._publish(store, main)
                    self.failed = True
                    return

    def _publish(self, store: FailureStore, main: int) -> None:
        different = store.difference()
        if different is not None:
            store.publish_call(self.describe(different.ranks, different.number))
        pending = self.pending
        if pending is not None:
            store.publish_pending(pending())
        else:
            store.publish_running(format_running(list(frames_of(sys._current_frames().get(main)))))
