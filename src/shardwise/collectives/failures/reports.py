"""A thread in each rank that answers when another rank is in trouble, whatever this one is doing."""

import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from shardwise.collectives.calls import Stand
from shardwise.collectives.failures.store import Board, is_reachable
from shardwise.trace.user_stack import format_running, frames_of

TICK_SECONDS = 0.4


class Watch:
    """Looks at the board now and then; where it tells of trouble, says once what this rank is doing.

    So that those who investigate can tell a rank that waits like them from one that does not come, and name
    the line of the program where that one is. One look is one round trip to the store.

    Attributes:
        trouble: whether another rank is in trouble.
        waiting: where this rank waits, while it does.
    """

    def __init__(self) -> None:
        self.trouble = False
        self.waiting: Callable[[], Stand] | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, board_of_world: Callable[[], Board | None]) -> None:
        """Watch this world instead of an earlier one. The board is asked for anew: kept, it would keep the store."""
        self.stop()
        self.trouble, self._over = False, threading.Event()
        main = threading.main_thread().ident or 0
        self._thread = threading.Thread(
            target=self._run, args=(board_of_world, self._over, main), name="shardwise watch", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread: one that is in a store when the interpreter ends would abort the process."""
        self._over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)
        self._thread = None

    def _run(self, board_of_world: Callable[[], Board | None], over: threading.Event, main: int) -> None:
        with suppress(Exception):  # a world that cannot be asked is not watched
            while not over.wait(TICK_SECONDS):
                board = board_of_world()
                if board is None or not is_reachable(board.store):
                    return
                if board.is_in_trouble():
                    self._answer(board, main)
                    self.trouble = True
                    return

    def _answer(self, board: Board, main: int) -> None:
        waiting = self.waiting
        if waiting is not None:
            board.wait_in(waiting())
        else:
            board.run_at(format_running(list(frames_of(sys._current_frames().get(main)))))
