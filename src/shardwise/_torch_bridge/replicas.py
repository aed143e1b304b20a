"""Wrappers of data parallelism take the parameters of all ranks for copies of one tensor; shards are not copies.

`DistributedDataParallel`, which `accelerate` and the Trainer of transformers apply by themselves, works in C++, which
sees local tensors. `fully_shard` keeps one chunk of each parameter per rank. Over ranks with different boxes they would
mix the shards. This also holds for the plain parameters of `local_parameters`.
"""

import warnings
from collections.abc import Callable, Iterable
from functools import wraps
from typing import TypeVar

from torch import Tensor, nn

from shardwise import _collectives as collectives
from shardwise._layout import Layout
from shardwise._tensor.dtensor import DTensor
from shardwise._trace.user_stack import call_site
from shardwise.errors import RuleError

T = TypeVar("T")
LISTED = 3  # parameters in the error
_FIX = (
    "do not wrap a sharded module: gradients of DTensors are reduced without a wrapper (see 'Data parallelism' in the "
    "documentation). Wrap a part of plain parameters alone: model.dense = DistributedDataParallel(model.dense). "
    "Over ranks that hold the same shards pass that group, such as process_group=mesh['dp'].get_group() or "
    "mesh=mesh['dp']."
)
FULL = (
    "torch's fully_shard divides DTensors of shardwise as full tensors: values are right, but each rank of the other "
    "mesh axes, such as 'tp', stores as much as if they were not sharded there, and loss_parallel has no sharded "
    "logits. Fix: import fully_shard from shardwise.parallel; or, to keep torch's, call local_parameters(module) "
    "before it."
)
# The registry of `warnings`, for one warning of a line, such as that of a loop over blocks.
_shown: dict[str | tuple[str, type[Warning], int], int] = {}
_SHARD_OF = "_shardwise_shard_of"  # attribute of a plain parameter that is a local shard: its name and layout


def note_local_shard(parameter: nn.Parameter, name: str, layout: Layout) -> None:
    """Record that a plain parameter is a local shard, for `check_replicas`."""
    vars(parameter)[_SHARD_OF] = name, layout


def check_replicas(tensors: Iterable[Tensor], process_group: object) -> None:
    """Raise one error on all ranks of the group unless they hold equal boxes of each DTensor."""
    named: list[tuple[str, Layout]] = []  # tensors that are local shards
    for i, x in enumerate(tensors):
        if type(x) is DTensor:
            named.append((x._name or f"number {i}", x._layout))
        elif _SHARD_OF in getattr(x, "__dict__", ()):
            named.append(vars(x)[_SHARD_OF])
    if not named:
        return
    ranks = tuple(sorted(collectives.group_ranks(process_group)))
    differing = []
    for name, layout in named:
        members = [rank for rank in ranks if rank in layout.mesh.ranks]
        if len({layout.boxes(rank) for rank in members}) > 1 or (layout.partial_axes and len(members) > 1):
            differing.append(f"{name} as {layout}")
    if differing:
        listed = "; ".join(differing[:LISTED]) + ("; …" if len(differing) > LISTED else "")
        raise RuleError(
            f"A wrapper such as DistributedDataParallel or fully_shard takes parameters for copies of one tensor, but "
            f"ranks {', '.join(map(str, ranks))} hold different shards of {len(differing)} of them: {listed}. "
            f"Fix: {_FIX}"
        )
    held = {name: f"{layout.boxes(collectives.rank())} of {layout.shape}" for name, layout in named}
    collectives.agree("parameters that a wrapper such as DistributedDataParallel takes for copies", held, ranks, _FIX)


def reduced_by(wrapper: nn.parallel.DistributedDataParallel) -> tuple[list[Tensor], object]:
    """The parameters whose gradients `DistributedDataParallel` averages, and its group."""
    named, ignored = wrapper.module.named_parameters(), wrapper.parameters_to_ignore
    return [x for name, x in named if x.requires_grad and name not in ignored], wrapper.process_group


def check_fully_shard(parameters: Iterable[Tensor], mesh: object) -> None:
    """`check_replicas` for torch's `fully_shard`; warns if it undoes a sharding along other axes."""
    parameters = list(parameters)
    check_replicas(parameters, mesh)
    if any(type(x) is DTensor and x._layout.local_numel(collectives.rank()) < x.numel() for x in parameters):
        site = call_site()
        where = (site.file, site.line) if site else (__file__, 1)
        warnings.warn_explicit(FULL, UserWarning, *where, registry=_shown)


def checking(
    taken: Callable[..., tuple[Iterable[Tensor], object]],
    check: Callable[[Iterable[Tensor], object], None] = check_replicas,
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Wrap a function of torch so that it checks first; `taken` returns the tensors and the group of a call."""

    def replacement(original: Callable[..., T]) -> Callable[..., T]:
        @wraps(original, assigned=("__module__", "__name__", "__doc__"), updated=())
        def check_first(*args: object, **kwargs: object) -> T:
            check(*taken(*args, **kwargs))
            return original(*args, **kwargs)

        return check_first

    return replacement
