"""How the work of ops is divided among ranks, and which tensors divide it unevenly."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from math import gcd, prod

from shardwise.debug.calls import parameters_text
from shardwise.layout import Boxes, Layout, OnRanks, Shard
from shardwise.pictures.labels import count_text
from shardwise.trace.user_stack import StackFrame, call_site

# Of the busiest rank and the mean. Below, an even division would save less than what else differs from step to step.
ALL = 1.05  # of all ops
BOUND = 1.25  # of those that are listed
LISTED = 8  # sizes by rank
ENTRIES = 3


@dataclass
class _Group:
    """Ops whose work is divided alike: among them all that follow from one batch.

    Attributes:
        shares: of the work of each op, by rank.
        elements: of the tensors of these ops.
        layout: of the first tensor that is divided so.
        what: the op that had it, and as which operand.
        is_input: it is no result of an op.
    """

    shares: dict[int, float]
    layout: Layout
    what: str
    is_input: bool
    site: StackFrame | None
    names: dict[str, None] = field(default_factory=dict)
    ops: int = 0
    elements: int = 0

    def excess(self, rank: int) -> float:
        """What a rank does beyond the mean."""
        return self.elements * (self.shares[rank] - sum(self.shares.values()) / len(self.shares))


class Balance:
    """Adds up the work of ops by rank.

    Of each op a rank has the smallest share that it has of an operand or a result: all of it where everything is
    replicated, its rows where a batch is sharded. An op counts as many times as its tensors have elements.
    """

    def __init__(self) -> None:
        self._groups: dict[object, _Group] = {}

    def note(self, op: str, tensors: Iterable[tuple[str, Layout, bool]]) -> None:
        """An op has run.

        Args:
            tensors: of operands and results a name such as `0.weight` or `operand 0`, the layout in which the op ran,
                and whether it is no result of an op.
        """
        found = [x for x in tensors if prod(x[1].shape)]
        found = [x for x in found if x[1].mesh == found[0][1].mesh]
        if not found:
            return
        of_each = [_shares(layout) for _, layout, _ in found]
        shares = tuple(map(min, zip(*of_each, strict=True)))
        group = self._groups.get((found[0][1].mesh, shares))
        if group is None:
            name, layout, is_input = found[of_each.index(shares) if shares in of_each else 0]
            site = call_site() if _ratio(shares) > BOUND else None
            by_rank = dict(zip(layout.mesh.ranks, shares, strict=True))
            group = self._groups[layout.mesh, shares] = _Group(by_rank, layout, f"{op}, {name}", is_input, site)
        group.ops += 1
        group.elements += sum(prod(layout.shape) for _, layout, _ in found)
        group.names |= {name: None for (name, *_), own in zip(found, of_each, strict=True) if own == shares}

    def rows(self) -> list[list[str]]:
        """The groups that keep the busiest rank busy: what, layout, parameters, what to do, ratio, number of ops."""
        work = self._work()
        if not work or self.ratio() <= ALL:
            return []
        busiest = max(work, key=work.__getitem__)
        groups = [group for group in self._groups.values() if busiest in group.shares]
        groups = [g for g in groups if _ratio(tuple(g.shares.values())) > BOUND and g.excess(busiest) > 0]
        return [_row(group) for group in sorted(groups, key=lambda group: -group.excess(busiest))[:ENTRIES]]

    def ratio(self) -> float:
        """The work of the busiest rank beside the mean."""
        return _ratio(tuple(self._work().values()))

    def _work(self) -> dict[int, float]:
        work: dict[int, float] = {}
        for group in self._groups.values():
            for rank, share in group.shares.items():
                work[rank] = work.get(rank, 0.0) + share * group.elements
        return work


def _row(group: _Group) -> list[str]:
    layout = group.layout
    placements = f"[{', '.join(map(str, layout.placements))}]"
    where = "" if group.site is None else f"{group.site}: "
    held = f"{layout.shape} on {layout.mesh}: {placements}, {_sizes(layout)}"
    ratio = f"{_ratio(tuple(group.shares.values())):.2f}x"
    return [
        f"{where}{group.what}",
        held,
        parameters_text(group.names),
        _avoid(layout, group.is_input),
        ratio,
        str(group.ops),
    ]


@lru_cache(maxsize=4096)
def _shares(layout: Layout) -> tuple[float, ...]:
    """The share of the elements that each rank of the mesh holds."""
    if layout.is_even:
        return (layout.local_numel(layout.mesh.ranks[0]) / prod(layout.shape),) * layout.mesh.size()
    return tuple(layout.local_numel(rank) / prod(layout.shape) for rank in layout.mesh.ranks)


def _ratio(shares: tuple[float, ...]) -> float:
    return max(shares) * len(shares) / sum(shares) if any(shares) else 1.0


def _sizes(layout: Layout) -> str:
    """What each rank holds: sizes of the dim that is sharded, or elements where several are."""
    dims = {p.dim for p in layout.placements if isinstance(p, Shard)}
    if len(dims) == 1:
        (dim,) = dims
        what, sizes = f"dim {dim}", [layout.local_shape(rank)[dim] for rank in layout.mesh.ranks]
    else:
        what, sizes = "elements", [layout.local_numel(rank) for rank in layout.mesh.ranks]
    if len(sizes) <= LISTED:
        return f"{what} by rank: {', '.join(map(str, sizes))}"
    runs = [(size, len(list(run))) for size, run in groupby(sorted(sizes, reverse=True))][:LISTED]
    listed = [f"{size:,} on {count_text(n, 'rank')}" for size, n in runs]
    return f"{what} by rank: {', '.join(listed)}"


def _avoid(layout: Layout, is_input: bool) -> str:
    """Sizes at which no rank waits, and the layout that gives the busiest rank less, if there is one."""
    choices = [_multiple(layout)]
    now = max(_shares(layout))
    others = [] if _unit(layout) > 1 else _others(layout, is_input)  # heads that stay on one rank
    best = min(others, key=lambda other: max(_shares(other)), default=layout)
    if max(_shares(best)) < 0.9 * now:
        share = f"{max(_shares(best)):.0%} of the elements in place of {now:.0%}"
        choices.append(f"[{', '.join(map(str, best.placements))}]: the busiest rank has {share}")
    return "; or ".join(filter(None, choices))


def _others(layout: Layout, any_dim: bool) -> list[Layout]:
    """The tensor sharded evenly on the axes that shard it, along the same dims or, if `any_dim`, along each."""
    of_dims = [
        [Shard(dim) if isinstance(p, Shard) else p for p in layout.placements] for dim in range(len(layout.shape))
    ]
    even = [Shard(p.dim) if isinstance(p, Shard) else p for p in layout.placements]
    return [layout.replace(placements) for placements in (even, *(of_dims if any_dim else ()))]


def _unit(layout: Layout) -> int:
    """The unit, such as a head, of sizes that no other division in such units makes smaller; 1 if there is none."""
    given = [n for p in layout.placements if isinstance(p, Shard) for n in p.sizes or () if isinstance(n, int) and n]
    unit = gcd(*given) if len(given) > 1 else 1
    ranks = prod(n for n, p in zip(layout.mesh.shape, layout.placements, strict=True) if isinstance(p, Shard))
    return unit if max(given, default=0) == -(-sum(given) // (ranks * unit)) * unit else 1


def _multiple(layout: Layout) -> str:
    """Sizes at which no rank waits; empty unless one dim is sharded, and the largest shard is as small as can be."""
    dims = {p.dim for p in layout.placements if isinstance(p, Shard)}
    if len(dims) != 1 or any(isinstance(p, OnRanks | Boxes) for p in layout.placements):
        return ""
    (dim,) = dims
    ranks = prod(n for n, p in zip(layout.mesh.shape, layout.placements, strict=True) if isinstance(p, Shard))
    size, most = layout.shape[dim], max(layout.local_shape(rank)[dim] for rank in layout.mesh.ranks)
    unit = _unit(layout)
    if most != -(-size // (ranks * unit)) * unit:
        return ""
    units = most // unit
    less = f", {ranks * (most - unit)} takes {units - 1}/{units} of that" if units > 1 else ""
    fewer = f"; {-(-size // most)} ranks take as long as {ranks}" if -(-size // most) < ranks else ""
    return f"a multiple of {ranks * unit} along dim {dim}: {most * ranks} takes as long as {size}{less}{fewer}"
