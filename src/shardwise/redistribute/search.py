"""The cheapest sequence of collectives between two layouts of sums and shards.

    [Shard(0), Partial()] -> [Replicate(), Shard(0)], for example:
    an exchange among all ranks
    an all-gather along axis 0, then a reduce-scatter along axis 1
    a reduce-scatter along axis 1, then an exchange along axis 0

Each mesh axis goes from its placement in the source to that in the target, alone or with all others that are left. A
sum on its way to Replicate may be a shard meanwhile, so that the other axes have less to send: this is the all-reduce
of several axes in "Horovod: fast and easy distributed deep learning in TensorFlow", 2018, and NCCL's.
"""

from collections.abc import Iterator
from itertools import product
from math import inf

from shardwise.errors import LayoutError
from shardwise.layout import Boxes, Layout, OnRanks, Placement, Shard
from shardwise.redistribute.costs import COSTS
from shardwise.redistribute.steps import (
    AllGather,
    AllReduce,
    Broadcast,
    CommStep,
    Exchange,
    ReduceScatter,
    cost_of,
    group_axes,
)
from shardwise.redistribute.volume import largest

State = tuple[int, ...]  # for each axis that moves: how far it is on its way
MOST_AXES = 3
GAIN = 0.9  # of the cost of one step, that several may have at most: measured costs vary by a tenth


def cheapest_sequence(src: Layout, dst: Layout) -> tuple[CommStep, ...]:
    """The steps from `src` to `dst` with the lowest cost."""
    if src == dst:
        return ()
    exchange = Exchange(src, dst)
    direct = _cheapest_form(exchange)
    if src.mesh != dst.mesh:
        reduced = src.reduced()
        steps = () if reduced == src else (*cheapest_sequence(src, reduced), Exchange(reduced, dst))
        return steps if steps and sum(map(cost_of, steps)) < cost_of(direct) else (direct,)
    axes = _axes(src, dst)
    if not 1 < len(axes) <= MOST_AXES or GAIN * cost_of(direct) <= _least(exchange):
        return (direct,)
    orders = dict.fromkeys([dst.shard_order, src.shard_order])
    found = [_search(src, dst, direct, axes, order) for order in orders]
    return min(found, key=lambda steps: sum(map(cost_of, steps)))


def cheapest_step(src: Layout, dst: Layout) -> CommStep:
    """The step from `src` to `dst` with the lowest cost."""
    return _cheapest_form(Exchange(src, dst))


def _cheapest_form(exchange: Exchange) -> CommStep:
    others = native_step(exchange), _all_reduce(exchange.src, exchange.dst)
    return min((exchange, *(step for step in others if step is not None)), key=cost_of)


def native_step(step: Exchange) -> Exchange | None:
    """The step as an all-gather, a reduce-scatter or a broadcast, if it is one."""
    axes = () if step.is_local else group_axes(step.src, step.dst)
    if not axes:
        return None
    before, after = ([layout.placements[axis] for axis in axes] for layout in (step.src, step.dst))
    if all(p.is_partial() for p in before) and isinstance(after[0], Shard):
        return ReduceScatter(step.src, step.dst) if all(p.is_shard(after[0].dim) for p in after) else None
    if not all(p.is_replicate() for p in after):
        return None
    if all(p.is_shard() for p in before):
        return AllGather(step.src, step.dst)
    return Broadcast(step.src, step.dst) if len(axes) == 1 and isinstance(before[0], OnRanks) else None


def _all_reduce(src: Layout, dst: Layout) -> AllReduce | None:
    """The step as an all-reduce along one axis, or along all of them."""
    if src.mesh != dst.mesh or src.shard_order != dst.shard_order:
        return None
    pairs = list(zip(src.placements, dst.placements, strict=True))
    axes = [axis for axis, (p, q) in enumerate(pairs) if p != q]
    if not all(pairs[axis][0].is_partial() and pairs[axis][1].is_replicate() for axis in axes):
        return None
    if len(axes) == src.mesh.ndim > 1:
        return AllReduce(src, dst, None)
    return AllReduce(src, dst, axes[0]) if len(axes) == 1 else None


# ---- one axis after the other --------------------------------------------------------------------------------


def _axes(src: Layout, dst: Layout) -> list[int]:
    """The mesh axes with another placement."""
    return [
        axis
        for axis, (p, q) in enumerate(zip(src.placements, dst.placements, strict=True))
        if p != q and (src.mesh.shape[axis] > 1 or isinstance(p, Boxes) or isinstance(q, Boxes))
    ]


def _least(exchange: Exchange) -> float:
    """What two steps or more cost at least: every rank receives what it lacks, in whatever order axes move."""
    kinds = [collective for collective in COSTS if collective != "broadcast" or _on_ranks(exchange.src)]
    received = 0 if exchange.src.partial_axes else exchange.received.busiest
    return 2 * min(COSTS[kind].latency for kind in kinds) + 4 * received * min(COSTS[kind].per_byte for kind in kinds)


def _on_ranks(layout: Layout) -> bool:
    return any(isinstance(p, OnRanks) for p in layout.placements)


def _search(
    src: Layout, dst: Layout, direct: CommStep, axes: list[int], order: tuple[int, ...]
) -> tuple[CommStep, ...]:
    """The cheapest steps of those that keep `order` meanwhile and need no more memory than `src` or `dst`."""
    stops = [_stops(src, dst, axis) for axis in axes]
    start, end = (0,) * len(axes), tuple(len(on_axis) - 1 for on_axis in stops)
    layouts: dict[State, Layout | None] = {start: src, end: dst}
    best: dict[State, tuple[float, tuple[CommStep, ...]]] = {start: (0.0, ()), end: (GAIN * cost_of(direct), (direct,))}
    most = max(largest(src), largest(dst))
    for state in product(*(range(len(on_axis)) for on_axis in stops)):
        if state not in best or state == end:
            continue
        cost, steps = best[state]
        for target in _moves(state, end):
            if target not in layouts:
                layouts[target] = _at(src, dst, {a: s[i] for a, s, i in zip(axes, stops, target, strict=True)}, order)
            layout = layouts[target]
            if layout is None or (target != end and largest(layout) > most):
                continue
            here = layouts[state]
            assert here is not None
            step = cheapest_step(here, layout)
            total = cost + cost_of(step)
            if total < min(best[end][0], best.get(target, (inf,))[0]):
                best[target] = total, (*steps, step)
    return best[end][1]


def _stops(src: Layout, dst: Layout, axis: int) -> tuple[Placement, ...]:
    """The placements of an axis on its way."""
    before, after = src.placements[axis], dst.placements[axis]
    dims = [dim for dim, size in enumerate(src.shape) if size >= src.mesh.shape[axis]]
    free = [dim for dim in dims if not any(p.is_shard(dim) for p in (*src.placements, *dst.placements))]
    if before.is_partial() and after.is_replicate() and dims:
        return before, Shard((free or dims)[0]), after
    return before, after


def _moves(state: State, end: State) -> Iterator[State]:
    yield end
    for i, stop in enumerate(state):
        yield from ((*state[:i], later, *state[i + 1 :]) for later in range(stop + 1, end[i] + 1))


def _at(src: Layout, dst: Layout, placements: dict[int, Placement], order: tuple[int, ...]) -> Layout | None:
    """The layout with these placements; None if there is no such layout."""
    alone = [p if n > 1 else q for n, p, q in zip(src.mesh.shape, src.placements, dst.placements, strict=True)]
    try:
        return Layout(src.mesh, [placements.get(axis, p) for axis, p in enumerate(alone)], src.shape, order)
    except LayoutError:
        return None
