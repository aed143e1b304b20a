"""The holdings of each rank of each parameter of a module, as a table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise._layout import Layout, Mesh, checked
from shardwise._pictures.labels import bytes_text, placement_text
from shardwise._pictures.report import Report, table_text

if TYPE_CHECKING:
    from torch import nn

SHOWN_RANKS = 4  # with more, only the largest and the smallest are shown


@dataclass(frozen=True)
class Placed:
    """One parameter and its placement.

    Args:
        shape: global.
        rank_bytes: on each rank; empty if unknown.
    """

    name: str
    shape: tuple[int, ...]
    placement: str
    rank_bytes: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class Table(Report):
    """Parameters, and the ranks of their bytes. `str()` is the text."""

    placed: tuple[Placed, ...]
    ranks: tuple[int, ...]

    def text(self, width: int | None = None, colour: bool = False) -> str:
        """A heading, one row per parameter, and the sums."""
        known = [one.rank_bytes for one in self.placed if one.rank_bytes]
        sums = [sum(column) for column in zip(*known, strict=True)] or [0] * len(self.ranks)
        few = len(self.ranks) <= SHOWN_RANKS
        heading = [f"rank {rank}" for rank in self.ranks] if few else ["fullest rank", "emptiest rank"]

        def shown(sizes: Sequence[int]) -> list[str]:
            if not sizes:
                return ["?"] * len(heading)
            return [bytes_text(n) for n in (sizes if few else (max(sizes), min(sizes)))]

        rows = [
            ["parameter", "shape", "placement", *heading],
            *([one.name, _grouped(one.shape), one.placement, *shown(one.rank_bytes)] for one in self.placed),
            ["all" if len(known) == len(self.placed) else "all that is known", "", "", *shown(sums)],
        ]
        return table_text(rows, "lll" + "r" * len(heading), width)


def _grouped(shape: Sequence[int]) -> str:
    return " x ".join(f"{n:,}" for n in shape) or "0-d"


def placed(name: str, layout: Layout, itemsize: int, ranks: Sequence[int]) -> Placed:
    """The row of a parameter laid out as `layout`, with the bytes of each of `ranks`."""
    words = ", ".join(map(placement_text, layout.placements))
    return Placed(name, layout.shape, words, tuple(layout.local_numel(rank) * itemsize for rank in ranks))


@checked
def sharding_table(module: "nn.Module", plan: object = None, mesh: object = None) -> Table:
    """The placement of the parameters of `module`, present or, with a plan, future. Sends and allocates nothing.

    Parameters on sub-meshes, such as `mesh["tp"]` and `mesh["dp"]`: the ranks that all these meshes have are shown.

    Args:
        module: any module; also on the meta device. A parameter that is not a DTensor is on every rank.
        plan: as for `shard_module`, or a `ShardingPlan`; parameters of its `Sharder`s have unknown bytes.
        mesh: of the plan; None is one axis of all ranks.

    Raises:
        PlanError: a plan that does not fit the module.
        LayoutError: a spec that does not fit its parameter.
    """
    from shardwise._tensor.dtensor import DTensor

    tensors = dict(module.named_parameters())
    tensors |= {name: buffer for name, buffer in module.named_buffers() if isinstance(buffer, DTensor)}  # type: ignore[misc]
    layouts: dict[str, Layout] = {name: x.layout_ for name, x in tensors.items() if isinstance(x, DTensor)}
    words: dict[str, str] = {}
    everybody: set[int] = set()
    if plan is not None:
        layouts, words, everybody = _planned(module, plan, mesh, layouts)
    held = [set(layout.mesh.ranks) for layout in layouts.values()]
    # A sub-mesh does not know what the ranks outside it hold, so ranks that all meshes have are shown.
    common = set.intersection(*held) if held and plan is None else set()
    ranks = tuple(sorted(common or everybody.union(*held))) or (0,)
    rows = []
    for name, x in tensors.items():
        if name in layouts:
            rows.append(placed(name, layouts[name], x.element_size(), ranks))
        else:
            known = () if name in words else (x.numel() * x.element_size(),) * len(ranks)
            rows.append(Placed(name, tuple(x.shape), words.get(name, "plain"), known))
    return Table(tuple(rows), ranks)


def _planned(
    module: "nn.Module", plan: Any, mesh: Any, now: Mapping[str, Layout]
) -> tuple[dict[str, Layout], dict[str, str], set[int]]:
    """Layouts under the plan, text for parameters of sharders, and the ranks of the mesh."""
    from shardwise import _collectives as collectives
    from shardwise._tensor.dtensor import default_mesh
    from shardwise.parallel.shard_module import layouts_of
    from shardwise.sharded_tensor import ShardingPlan, ShardingSpec

    where = default_mesh("cpu") if mesh is None else mesh
    if not isinstance(where, Mesh):  # a `Mesh` may have ranks that this world has not
        where = collectives.as_mesh(where)
    if not isinstance(plan, ShardingPlan):
        return layouts_of(module, plan, where), {}, set(where.ranks)
    layouts, words = dict(now), {}
    for name, x in (*module.named_parameters(), *module.named_buffers()):
        for path, entry in plan.plan.items():
            if name == path and isinstance(entry, ShardingSpec):
                layouts[name] = entry.layout(tuple(x.shape), where.sorted_ranks)
            elif name.startswith(f"{path}."):
                layouts.pop(name, None)
                words[name] = f"by {type(entry).__name__}"
    return layouts, words, set(where.ranks)
