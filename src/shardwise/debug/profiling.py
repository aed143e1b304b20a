"""Ranges for `torch.profiler`: ops with their layouts and modules, and collectives with their bytes."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.profiler import record_function
from torch.utils import _pytree as pytree

from shardwise.debug.module_tracker import ModuleTracker
from shardwise.rules.row import Args, Kwargs, Op
from shardwise.tensor import DTensor
from shardwise.tensor.dispatch.dispatcher import is_op
from shardwise.tensor.dispatch.hooks import Proceed, hook_calls
from shardwise.tensor.dtensor import name_of
from shardwise.trace.comm_trace import CommEvent, Listener, listening_with


@contextmanager
def profiler_ranges() -> Iterator[None]:
    """Inside, `torch.profiler` shows a range for each op on DTensors, and a mark for each collective.

    `matmul: [Shard(0)], [Replicate()] in Block.up` is an op with the placements of its operands and the innermost
    module; `all_reduce: 1,024 bytes sent for matmul in backward, operand 1, in Block.up` the start of a collective. The
    ops that torch decomposes an op into are inside its range. Backward has torch's ranges, and marks of collectives.

    Each op costs some microseconds more, optimizers run op by op, and captured graphs are not used.
    """
    tracker = ModuleTracker()

    def in_range(proceed: Proceed, func: Op, args: Args, kwargs: Kwargs) -> object:
        if not is_op(func):
            return proceed()
        operands = [x for x in pytree.tree_leaves((args, kwargs)) if type(x) is DTensor]
        placements = ", ".join(f"[{', '.join(map(str, x.placements))}]" for x in operands)
        with record_function(f"{name_of(func)}: {placements} in {tracker.current}"):
            return proceed()

    tracker.start()
    try:
        with hook_calls(in_range), listening_with(_Marks(tracker)):
            yield
    finally:
        tracker.stop()


class _Marks(Listener):
    def __init__(self, tracker: ModuleTracker) -> None:
        self.tracker = tracker

    def collective(self, kind: str, sent_bytes: int, event: CommEvent | None) -> None:
        cause = "a comparison of ranks" if event is None else f"{event.cause}"
        with record_function(f"{kind}: {sent_bytes:,} bytes sent for {cause}, in {self.tracker.current}"):
            pass
