"""`capture`: traces a function or module once for each kind of call, and replays its graphs."""

import warnings
from collections.abc import Callable
from functools import update_wrapper
from typing import Any

from shardwise._graph_capture.graphs import Backend, Graphs
from shardwise._graph_capture.guards import Guards, cache_key, must_run_eagerly
from shardwise._graph_capture.replay import CapturedCall
from shardwise._graph_capture.structure import LEAVES, flatten, jagged_leaves
from shardwise._graph_capture.tracer import OtherValueError, refusal
from shardwise._layout import checked
from shardwise._trace.user_stack import traced_inside
from shardwise.errors import CaptureError

LIMIT = 32
RETRACES = 16  # in a row before a warning


class Captured:
    """The result of `capture`: called like the function, it traces or replays.

    Attributes:
        function: the captured function.
    """

    def __init__(self, function: Callable[..., Any], backend: Backend | None = None, limit: int = LIMIT) -> None:
        self.function = function
        self.backend = backend
        self.limit = limit
        self._calls: dict[Any, list[CapturedCall]] = {}  # calls of one key have read different values
        self._guards: Guards | None = None
        self._retraces = 0
        if hasattr(function, "__name__"):
            update_wrapper(self, function, updated=())

    @traced_inside
    def __call__(self, *args: object, **kwargs: object) -> Any:
        if must_run_eagerly():
            return self.function(*args, **kwargs)
        is_flat = not kwargs and all(isinstance(x, LEAVES) for x in args)
        leaves, spec = (list(args), None) if is_flat else flatten((args, kwargs))
        guards = self._checked_guards()
        key = (spec, *cache_key(leaves, () if spec is None else jagged_leaves(spec)))
        calls = self._calls.setdefault(key, [])
        other: OtherValueError | None = None
        for call in calls:
            if call.graphs is not None:
                try:
                    result = call.replay(leaves)
                except OtherValueError as error:
                    other = error
                else:
                    self._retraces = 0
                    return result
        if sum(map(len, self._calls.values())) - sum(x.graphs is None for x in calls) >= self.limit:
            raise _too_many_kinds(self.limit, key, other)
        call = CapturedCall(self.backend, guards)
        result = call.trace(self.function, leaves, spec)
        calls[:] = [
            x for x in calls if x.graphs is not None or x.reads != call.reads
        ]  # the last call of these reads had no backward
        calls.append(call)
        return result

    def _checked_guards(self) -> Guards:
        """The guards of the values that the function reaches. If one fails, all graphs are dropped."""
        violated = "" if self._guards is None else self._guards.violated()
        if self._guards is None or violated is not None:
            self._retraces += bool(self._calls)
            self._calls.clear()
            self._guards = Guards(self.function)
            if self._retraces == RETRACES:
                warnings.warn(
                    f"capture: {RETRACES} calls in a row were traced anew, because what the function reaches changes "
                    f"between them: {violated}. Fix: pass it as an argument, or keep it where the function does not "
                    f"use it.",
                    stacklevel=3,
                )
        return self._guards

    def graphs(self) -> list[Graphs]:
        """The graphs of every kind of call whose backward has been traced, too, in order."""
        return [call.graphs for calls in self._calls.values() for call in calls if call.graphs is not None]


def _too_many_kinds(limit: int, key: tuple[Any, ...], other: OtherValueError | None) -> CaptureError:
    if other is None:
        return refusal(
            f"traced for {limit} kinds of calls already, and this call is another one: {key[1:]}",
            "pad or slice batches to a few shapes, pass numbers that change as tensors, or raise limit=",
        )
    return refusal(
        f"traced for {limit} kinds of calls already; this call reads another value by {other}",
        "read it outside of the captured function, use torch.where instead of an `if`, or raise limit=",
    )


@checked
def capture(function: Callable[..., Any], *, backend: Backend | None = None, limit: int = LIMIT) -> Captured:
    """Trace what `function` does on this rank the first time, and replay it from then on.

    The trace is an FX graph of local aten ops and collectives, forward and backward. A replay calls only these: no
    rules, no plans, no modules. Values are bitwise equal to those of the function.

        step = sw.capture(lambda x, y: F.cross_entropy(model(x), y))
        loss = step(x, y)   # traced, later replayed
        loss.backward()     # as well
        optimizer.step()    # as usual

    Guards decide when a graph is reused. A new kind of call is traced if layouts, shapes, strides, dtypes or other
    values among the arguments, grad mode or autocast differ. All graphs are dropped after a change of anything that
    `function`, or a function that it calls, reads in its closure, globals or defaults: constants, containers, modules
    and other objects with all their contents. Parameters and buffers are used in place: optimizer steps and loaded
    checkpoints are seen.

    A replay does no other Python work of the function: no printing, counting, or choice by other values.

    Args:
        function: a function or module of tensors, DTensors or plain; returns tensors and constants, in lists, tuples,
            dicts and dataclasses. Inside debugging tools, a shadow or `count_comms`, it runs without capture.
        backend: of `torch.compile`, such as "inductor", for the local ops between collectives. None calls
            torch's ops one by one; only that is bitwise equal.
        limit: number of kinds of calls whose graphs are kept.

    Raises:
        CaptureError: while tracing, for what a replay could not repeat or guards could not compare, with its name; or
            for more kinds of calls than `limit`.
    """
    return Captured(function, backend, limit)
