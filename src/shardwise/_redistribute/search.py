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
from dataclasses import dataclass, field
from itertools import product
from math import inf, prod

from shardwise._collectives.cost_tables import Costs
from shardwise._layout import Boxes, Layout, OnRanks, Placement, Shard
from shardwise._redistribute.steps import CommStep, cost_of, group_axes
from shardwise._redistribute.volume import largest
from shardwise.errors import LayoutError

State = tuple[int, ...]  # for each axis that moves: how far it is on its way
MOST_AXES = 3
GAIN = 0.9  # several steps may cost at most this part of one step: measured costs vary by a tenth


def cheapest_sequence(src: Layout, dst: Layout, costs: Costs) -> tuple[CommStep, ...]:
    """The steps from `src` to `dst` with the lowest cost."""
    if src == dst:
        return ()
    exchange = CommStep(src, dst)
    direct = _cheapest(exchange, costs)
    if src.mesh != dst.mesh:
        steps = _reduced_first(src, dst, costs)
        return steps if steps and cost(steps, costs) < cost_of(direct, costs) else (direct,)
    axes = _axes(src, dst)
    if not 1 < len(axes) <= MOST_AXES or GAIN * cost_of(direct, costs) <= _least(exchange, costs):
        return (direct,)
    found = (paths.cheapest(direct) for paths in _all_paths(src, dst, axes, costs))
    return min(found, key=lambda steps: cost(steps, costs))


def sequences(src: Layout, dst: Layout, costs: Costs) -> list[tuple[CommStep, ...]]:
    """All that `cheapest_sequence` may choose from, the cheapest first."""
    if src == dst:
        return []
    found: list[tuple[CommStep, ...]] = [(step,) for step in _forms(CommStep(src, dst))]
    axes = _axes(src, dst) if src.mesh == dst.mesh else []
    if 1 < len(axes) <= MOST_AXES:
        found += [steps for paths in _all_paths(src, dst, axes, costs) for steps in paths.sequences() if len(steps) > 1]
    elif src.mesh != dst.mesh:
        found += [steps] if (steps := _reduced_first(src, dst, costs)) else []
    return sorted(dict.fromkeys(found), key=lambda steps: cost(steps, costs))


def cost(steps: tuple[CommStep, ...], costs: Costs) -> float:
    """The sum of the costs of steps."""
    return sum(cost_of(step, costs) for step in steps)


def _reduced_first(src: Layout, dst: Layout, costs: Costs) -> tuple[CommStep, ...]:
    """All-reduces, then an exchange with another mesh; () where there is nothing to reduce."""
    reduced = src.reduced()
    return () if reduced == src else (*cheapest_sequence(src, reduced, costs), CommStep(reduced, dst))


# ---- one step ------------------------------------------------------------------------------------------------


def _cheapest(exchange: CommStep, costs: Costs) -> CommStep:
    return min(_forms(exchange), key=lambda step: cost_of(step, costs))


def _forms(exchange: CommStep) -> list[CommStep]:
    """The collectives that make this step."""
    others = native_step(exchange), _all_reduce(exchange.src, exchange.dst)
    return [exchange, *(step for step in others if step is not None)]


def native_step(step: CommStep) -> CommStep | None:
    """The step as an all-gather, a reduce-scatter or a broadcast, if it is one."""
    axes = () if step.is_local else group_axes(step.src, step.dst)
    if not axes:
        return None
    before, after = ([layout.placements[axis] for axis in axes] for layout in (step.src, step.dst))
    if all(p.is_partial() for p in before) and isinstance(after[0], Shard):
        alike = all(p.is_shard(after[0].dim) for p in after)
        return CommStep(step.src, step.dst, "reduce_scatter") if alike else None
    if not all(p.is_replicate() for p in after):
        return None
    if all(p.is_shard() for p in before):
        return CommStep(step.src, step.dst, "all_gather")
    alone = len(axes) == 1 and isinstance(before[0], OnRanks)
    return CommStep(step.src, step.dst, "broadcast") if alone else None


def _all_reduce(src: Layout, dst: Layout) -> CommStep | None:
    """The step as an all-reduce along one axis, or along all of them."""
    if src.mesh != dst.mesh or src.shard_order != dst.shard_order:
        return None
    axes = _axes(src, dst)
    sums = all(src.placements[axis].is_partial() and dst.placements[axis].is_replicate() for axis in axes)
    one_group = len(axes) == 1 or prod(src.mesh.shape[axis] for axis in axes) == src.mesh.size()
    return CommStep(src, dst, "all_reduce") if axes and sums and one_group else None


def _axes(src: Layout, dst: Layout) -> list[int]:
    """The mesh axes with another placement."""
    return [
        axis
        for axis, (p, q) in enumerate(zip(src.placements, dst.placements, strict=True))
        if p != q and (src.mesh.shape[axis] > 1 or isinstance(p, Boxes) or isinstance(q, Boxes))
    ]


# ---- one axis after the other --------------------------------------------------------------------------------


def _least(exchange: CommStep, costs: Costs) -> float:
    """What two steps or more cost at least: every rank receives what it lacks, in whatever order axes move."""
    on_ranks = any(isinstance(p, OnRanks) for p in exchange.src.placements)
    kinds = [cost for name, cost in costs.inside.items() if name != "broadcast" or on_ranks]
    received = 0 if exchange.src.partial_axes else exchange.received.busiest
    return 2 * min(kind.latency for kind in kinds) + 4 * received * min(kind.per_byte for kind in kinds)


def _all_paths(src: Layout, dst: Layout, axes: list[int], costs: Costs) -> "list[_Paths]":
    """With each of the orders in which axes may shard one dim meanwhile."""
    stops = tuple(_stops(src, dst, axis) for axis in axes)
    orders = dict.fromkeys([dst.shard_order, src.shard_order])
    return [_Paths(src, dst, tuple(axes), stops, order, costs) for order in orders]


def _stops(src: Layout, dst: Layout, axis: int) -> tuple[Placement, ...]:
    """The placements of an axis on its way."""
    before, after = src.placements[axis], dst.placements[axis]
    dims = [dim for dim, size in enumerate(src.shape) if size >= src.mesh.shape[axis]]
    free = [dim for dim in dims if not any(p.is_shard(dim) for p in (*src.placements, *dst.placements))]
    if before.is_partial() and after.is_replicate() and dims:
        return before, Shard((free or dims)[0]), after
    return before, after


@dataclass(frozen=True)
class _Paths:
    """The ways from `src` to `dst` that need no more memory than these, with the axes at one stop after the other."""

    src: Layout
    dst: Layout
    axes: tuple[int, ...]
    stops: tuple[tuple[Placement, ...], ...]  # the placements at each stop, for each axis
    order: tuple[int, ...]  # in which axes shard a dim
    costs: Costs
    _layouts: dict[State, Layout | None] = field(init=False, repr=False, default_factory=dict)

    @property
    def start(self) -> State:
        return (0,) * len(self.axes)

    @property
    def end(self) -> State:
        return tuple(len(stops) - 1 for stops in self.stops)

    def cheapest(self, direct: CommStep) -> tuple[CommStep, ...]:
        """The cheapest steps; `direct` if others gain nothing."""
        start, end = self.start, self.end
        best: dict[State, tuple[float, tuple[CommStep, ...]]] = {start: (0.0, ())}
        best[end] = GAIN * cost_of(direct, self.costs), (direct,)
        for state in product(*(range(len(stops)) for stops in self.stops)):
            if state not in best or state == end:
                continue
            before, steps = best[state]
            for target, step in self._moves(state):
                total = before + cost_of(step, self.costs)
                if total < min(best[end][0], best.get(target, (inf,))[0]):
                    best[target] = total, (*steps, step)
        return best[end][1]

    def sequences(self, state: State | None = None) -> Iterator[tuple[CommStep, ...]]:
        """All of them, from a state on; None is from `src` on."""
        state = self.start if state is None else state
        if state == self.end:
            yield ()
            return
        for target, step in self._moves(state):
            yield from ((step, *steps) for steps in self.sequences(target))

    def _moves(self, state: State) -> Iterator[tuple[State, CommStep]]:
        """All axes to the end, or one to a later stop."""
        ends = [self.end]
        for i, stop in enumerate(state):
            ends += [(*state[:i], later, *state[i + 1 :]) for later in range(stop + 1, self.end[i] + 1)]
        here = self._layout(state)
        for target in dict.fromkeys(ends):
            layout = self._layout(target)
            if here is not None and layout is not None:
                yield target, _cheapest(CommStep(here, layout), self.costs)

    def _layout(self, state: State) -> Layout | None:
        """The layout in a state; None if there is no such layout, or it is too large."""
        if state in (self.start, self.end):
            return self.dst if state == self.end else self.src
        if state not in self._layouts:
            self._layouts[state] = self._made(state)
        return self._layouts[state]

    def _made(self, state: State) -> Layout | None:
        placements = list(self.dst.placements)
        for axis, stops, stop in zip(self.axes, self.stops, state, strict=True):
            placements[axis] = stops[stop]
        try:
            layout = Layout(self.src.mesh, placements, self.src.shape, self.order)
        except LayoutError:
            return None
        return layout if largest(layout) <= max(largest(self.src), largest(self.dst)) else None
