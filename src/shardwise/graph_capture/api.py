"""`capture`: a function or module whose work is recorded once for each kind of operands, and replayed."""

import warnings
from collections.abc import Callable
from functools import update_wrapper
from typing import Any

from torch.utils import _pytree as pytree

from shardwise.errors import CaptureError
from shardwise.graph_capture.compiled import Backend
from shardwise.graph_capture.context_guards import Surroundings, key_of, looked_on
from shardwise.graph_capture.graphs import Graphs
from shardwise.graph_capture.replay import Recording

LIMIT = 32
OFTEN = 16  # recordings in a row that nothing was replayed of


class Captured:
    """What `capture` returns: called like the function, it records or replays.

    Attributes:
        function: what was captured.
    """

    def __init__(self, function: Callable[..., Any], backend: Backend | None = None, limit: int = LIMIT) -> None:
        self.function = function
        self.backend = backend
        self.limit = limit
        self._recordings: dict[Any, Recording] = {}
        self._surroundings: Surroundings | None = None
        self._dropped = 0
        if hasattr(function, "__name__"):
            update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if looked_on():
            return self.function(*args, **kwargs)  # who looks on shall see everything
        if kwargs or any(isinstance(x, list | tuple | dict) for x in args):
            leaves, spec = pytree.tree_flatten((args, kwargs))
        else:
            leaves, spec = list(args), None
        surroundings = self._seen()
        key = (spec, *key_of(leaves))
        known = self._recordings.get(key)
        if known is not None and known.graphs is not None:
            self._dropped = 0
            return known.replayed(leaves)
        if known is None and len(self._recordings) >= self.limit:
            raise CaptureError(
                f"capture: called with {self.limit} kinds of operands already, and now with another one: {key[1:]}. "
                f"Fix: pad or cut batches to a few shapes, pass numbers that change as tensors, or raise limit=."
            )
        made = self._recordings[key] = Recording(self.backend, surroundings.tensors)
        return made.made(self.function, leaves, spec)

    def _seen(self) -> Surroundings:
        """What the function reaches, as the recordings took it; those are dropped where that has changed."""
        changed = "" if self._surroundings is None else self._surroundings.changed()
        if self._surroundings is None or changed is not None:
            self._dropped += bool(self._recordings)
            self._recordings.clear()
            self._surroundings = Surroundings(self.function)
            if self._dropped == OFTEN:
                warnings.warn(
                    f"capture: {OFTEN} calls in a row recorded anew, since what the function reaches changes between "
                    f"them: {changed}. Fix: pass it as an argument, or keep it where the function does not look.",
                    stacklevel=3,
                )
        return self._surroundings

    def graphs(self) -> list[Graphs]:
        """The graphs of every recording that is complete, in the order in which they were made."""
        return [known.graphs for known in self._recordings.values() if known.graphs is not None]


def capture(function: Callable[..., Any], *, backend: Backend | None = None, limit: int = LIMIT) -> Captured:
    """Record what `function` does on this rank the first time, and replay it from then on.

    A recording is an FX graph of local aten ops and collectives, forward and backward. A replay calls them, and
    nothing else: no rules, no plans, no modules. Values are those of the function itself, bit for bit.

        step = sw.capture(lambda x, y: F.cross_entropy(model(x), y))
        loss = step(x, y)   # recorded, later replayed
        loss.backward()     # as well
        optimizer.step()    # as ever

    Recorded anew when layouts, shapes, strides, dtypes or other values among the arguments differ from those met
    before, with or without grad, under another autocast; and when something has changed that the function reaches by
    itself: by its closure, globals or defaults, as an attribute that it names, inside a list, a dict, or a module.
    Parameters and buffers are used where they are: optimizer steps and loaded checkpoints count.

    What a replay does not do is Python's own work: printing, counting, choosing by anything else than the above.

    Args:
        function: a function or module of tensors, DTensors or plain; returns those, in lists, tuples and dicts.
            While a debugging tool, a shadow or a counter of communication looks on, it runs as it is.
        backend: of `torch.compile`, such as "inductor", for the stretches of local ops between collectives. None calls
            torch's ops one by one, which alone is the same bit for bit.
        limit: recordings that are kept.

    Raises:
        CaptureError: while recording, for what a replay could not repeat, such as looking at values; with more
            kinds of operands than `limit`.
    """
    return Captured(function, backend, limit)
