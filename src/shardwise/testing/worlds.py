"""Worlds of ranks to run a function or a test on. Imports no torch, so that the pytest plugin stays cheap."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from shardwise._layout import NumRanks, checked, checked_init

P = ParamSpec("P")
R = TypeVar("R")


@checked_init
@dataclass(frozen=True)
class World:
    """Ranks 0 to `size - 1`, ready to run functions; see `world`."""

    size: NumRanks
    real: bool = False
    timeout: float = 60.0

    def run(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Run `fn(*args, **kwargs)` once on each rank; return the results in rank order.

        Raises:
            Exception: the error of the lowest rank that failed by itself, with notes about other ranks.
            RemoteRankError: a real process died; `.rank` says which.
            DeadlockError: the ranks wait for each other, or did not finish within `timeout` seconds.
            SendError: `fn`, an argument or a result cannot be sent to or from a real process.
        """
        __tracebackhide__ = True
        if self.real:
            from shardwise.testing.pool import run_on_processes

            return run_on_processes(self.size, self.timeout, fn, args, kwargs)
        from shardwise.testing.simulated import run_on_threads

        return run_on_threads(self.size, self.timeout, fn, args, kwargs)

    def __call__(self, test: Callable[P, object]) -> Callable[P, None]:
        """Decorate a test: its body runs on each rank, with the same fixtures and parameters."""

        @functools.wraps(test)
        def run_on_each_rank(*args: P.args, **kwargs: P.kwargs) -> None:
            __tracebackhide__ = True
            self.run(test, *args, **kwargs)

        return run_on_each_rank


@checked
def world(size: NumRanks, *, real: bool = False, timeout: float = 60.0) -> World:
    """A world of `size` ranks, for `world(4).run(fn)` or as a decorator of a test, `@world(4)`.

    Simulated ranks (the default) are threads that take turns: one runs until it waits in a collective or ends, then the
    next. So runs are repeatable and deadlocks are seen at once. As with processes, each rank has its own torch CPU
    generator, default dtype, `use_deterministic_algorithms` and `sdpa_kernel`. They start from the caller's values,
    which stay unchanged. Other globals (modules, the generators of Python and NumPy) are shared.

    Real ranks are gloo processes of this machine. They start when a world of that size is first used, and are kept.
    After an error they join a new world; if a rank died or hangs, all are replaced. Functions are sent by name and must
    be defined at module level; arguments and results are pickled. Modules keep their state from run to run.

    Args:
        size: number of ranks.
        real: run on processes.
        timeout: seconds a run may take; a rank that has not returned by then is reported as a deadlock.

    Raises:
        MeshError: `size` is not positive.
    """
    return World(size, real, timeout)
