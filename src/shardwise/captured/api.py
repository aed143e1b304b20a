"""`capture`: a function or module whose work is recorded once for each kind of operands, and replayed."""

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

from torch.utils import _pytree as pytree

from shardwise import meter, recording
from shardwise.captured.compiled import Backend
from shardwise.captured.graphs import Graphs
from shardwise.captured.replay import Recording
from shardwise.captured.surroundings import Surroundings, key_of
from shardwise.errors import CaptureError
from shardwise.tensor import dispatch
from shardwise.tensor.dtensor import DTensor

LIMIT = 32


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
        if hasattr(function, "__name__"):
            update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if recording.here.recorder is not None or meter.listening() or DTensor._enter is not dispatch.enter:
            return self.function(*args, **kwargs)  # who looks on shall see everything
        if kwargs or any(isinstance(x, list | tuple | dict) for x in args):
            leaves, spec = pytree.tree_flatten((args, kwargs))
        else:
            leaves, spec = list(args), None
        if self._surroundings is None or not self._surroundings.hold():
            self._recordings.clear()
            self._surroundings = Surroundings(self.function)
        key = (spec, *key_of(leaves))
        known = self._recordings.get(key)
        if known is not None and known.graphs is not None:
            return known.replayed(leaves)
        if known is None and len(self._recordings) >= self.limit:
            raise CaptureError(
                f"capture: called with {self.limit} kinds of operands already, and now with another one: {key[1:]}. "
                f"Fix: pad or cut batches to a few shapes, pass numbers that change as tensors, or raise limit=."
            )
        made = self._recordings[key] = Recording(self.backend)
        return made.made(self.function, leaves, spec)

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
    before, with or without grad, under another autocast; and when a module that the function is, is bound to, has in
    its closure or names as a global has other parameters, buffers, submodules, flags, numbers or hooks than before.
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
