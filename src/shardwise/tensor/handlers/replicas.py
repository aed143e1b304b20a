"""Wrappers of data parallelism take the parameters of all ranks for copies of one tensor; shards are none.

`DistributedDataParallel`, which `accelerate` and the Trainer of transformers apply by themselves, verifies and
broadcasts parameters and averages gradients in C++, which sees local tensors. That is right over ranks that hold the
same boxes, such as those along a data axis. Over others it would overwrite their shards by those of one rank.
"""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import TypeVar, cast

from torch import Tensor

from shardwise import collectives
from shardwise.errors import RuleError
from shardwise.tensor.dtensor import DTensor

T = TypeVar("T")
LISTED = 3  # parameters in the error
_FIX = (
    "do not wrap a sharded module: gradients of DTensors are reduced without a wrapper, see docs/data-parallel.md. "
    "Over ranks that hold the same shards pass that group, such as process_group=mesh['dp'].get_group()."
)


def check_replicas(tensors: Iterable[Tensor], process_group: object) -> None:
    """Raise the same error on all ranks of the group unless they hold the same boxes of each DTensor.

    Raises:
        RuleError: ranks of one mesh hold different boxes of a tensor, or partial sums.
        MismatchError: so do ranks of different meshes.
    """
    named = [(x._name or f"number {i}", x) for i, x in enumerate(tensors) if type(x) is DTensor]
    if not named:
        return
    ranks = tuple(sorted(collectives.group_ranks(process_group)))
    differing = [f"{name} as {x._layout}" for name, x in named if _differs(x, ranks)]
    if differing:
        listed = "; ".join(differing[:LISTED]) + ("; …" if len(differing) > LISTED else "")
        raise RuleError(
            f"A wrapper such as DistributedDataParallel takes parameters for copies of one tensor, but ranks "
            f"{', '.join(map(str, ranks))} hold different shards of {len(differing)} of them: {listed}. Fix: {_FIX}"
        )
    held = {name: f"{x._layout.boxes(collectives.rank())} of {x._layout.shape}" for name, x in named}
    collectives.agree("parameters that a wrapper such as DistributedDataParallel takes for copies", held, ranks, _FIX)


def _differs(x: DTensor, ranks: tuple[int, ...]) -> bool:
    layout = x._layout
    members = [rank for rank in ranks if rank in layout.mesh.ranks]
    return len({layout.boxes(rank) for rank in members}) > 1 or bool(layout.partial_axes and len(members) > 1)


def checking(tensors: int, process_group: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """From a function of torch to one that checks first; the arguments are the positions of its own."""

    def replacement(original: Callable[..., T]) -> Callable[..., T]:
        @wraps(original, assigned=("__module__", "__name__", "__doc__"), updated=())
        def check_first(*args: object, **kwargs: object) -> T:
            check_replicas(cast(Iterable[Tensor], args[tensors]), args[process_group])
            return original(*args, **kwargs)

        return check_first

    return replacement
