"""Numbers, ranks and placements as short text."""

from collections.abc import Iterator, Sequence

from shardwise._layout import Boxes, Layout, Mesh, Placement, Shard, placements_text, rows_of
from shardwise._pictures.holders import Holders

UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
LONG_LIST = 16  # boxes, sizes or ranks beyond which a title shows their number


def bytes_text(number: float) -> str:
    """`1.5 MiB`: in the largest unit that gives 1 or more, with one decimal below 100."""
    unit, size = next(((u, s) for u, s in UNITS if number >= s), ("B", 1))
    digits = 1 if size > 1 and number < 99.95 * size else 0
    return f"{number / size:.{digits}f} {unit}"


def more_bytes_text(number: float) -> str:
    """`+1.5 MiB`, `-1.5 MiB`: a difference."""
    return f"{'-' if number < 0 else '+'}{bytes_text(abs(number))}"


def milliseconds_text(seconds: float) -> str:
    """`2.41 ms`, `1,234 ms`: with three digits or more."""
    number = 1e3 * seconds
    return f"{number:,.0f} ms" if number >= 100 else f"{number:.3g} ms"


def count_text(number: int, noun: str) -> str:
    """`1 rank`, `1,000 ranks`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def shape_text(shape: Sequence[int]) -> str:
    """`10 x 4`; `0-d` without dims."""
    return " x ".join(map(str, shape)) or "0-d"


def ranks_text(ranks: Sequence[int]) -> str:
    """Ascending ranks: 0, 1, 2, 5 as `0-2, 5`, and 0, 8, 16, 24 as `0, 8 … 24`."""
    return ", ".join(_runs(ranks))


def named_ranks(ranks: Sequence[int], most: int | None) -> str:
    """`rank 0-2, 5`, or `4 ranks from 0 to 5` if the former has more than `most` characters."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    text = "rank "
    for run in _runs(ranks):
        text += f"{run}, "
        if most is not None and len(text) - 2 > most:
            return f"{len(ranks):,} ranks from {ranks[0]} to {ranks[-1]}"
    return text[:-2]


def _runs(ranks: Sequence[int]) -> Iterator[str]:
    at, count = 0, len(ranks)
    while at < count:
        step = ranks[at + 1] - ranks[at] if at + 1 < count else 1
        ends_alike = step == 1 and ranks[-1] - ranks[at] == count - 1 - at  # then all between do
        stop = count if ends_alike else at + 1
        while stop < count and ranks[stop] - ranks[stop - 1] == step:
            stop += 1
        if step == 1 and stop - at > 1:
            yield f"{ranks[at]}-{ranks[stop - 1]}"
        elif stop - at > 3:
            yield f"{ranks[at]}, {ranks[at + 1]} … {ranks[stop - 1]}"
        else:
            stop = at + 1
            yield str(ranks[at])
        at = stop


def placement_text(placement: Placement) -> str:
    """The placement as in Python, but long lists of boxes or sizes as their number."""
    if isinstance(placement, Boxes) and (count := sum(map(len, placement.boxes))) > LONG_LIST // 4:
        return f"Boxes({count} of them)"
    if isinstance(placement, Shard) and (count := sum(map(len, rows_of(placement.sizes or (), 1)))) > LONG_LIST:
        return f"Shard({placement.dim}, {count} sizes)"
    return str(placement)


def mesh_text(mesh: Mesh) -> str:
    """`Mesh(dp=2, tp=2)`, with its ranks if they are not in order and few."""
    if len(mesh.ranks) <= LONG_LIST or mesh.is_range:
        return str(mesh)
    plain = str(Mesh(mesh.shape, (), mesh.names))
    return f"{plain[:-1]}, {len(mesh.ranks)} ranks from {min(mesh.ranks)} to {max(mesh.ranks)})"


def is_dark(mesh: Mesh, rank: int) -> bool:
    """Whether a rank has the darker of two shades, which alternate along each axis of the mesh."""
    return sum(mesh.coordinate(rank) or ()) % 2 == 1


def title(layout: Layout) -> str:
    """Shape, placements and mesh of `layout` in one line."""
    placements = placements_text(layout.mesh, layout.placements, placement_text)
    order = layout.shard_order
    order_text = "" if order == tuple(range(layout.mesh.ndim)) else f", shard order {', '.join(map(str, order))}"
    return f"{shape_text(layout.shape)} as {placements} on {mesh_text(layout.mesh)}{order_text}"


def holding_text(layout: Layout, rank: int, itemsize: int | None) -> str:
    """The local shard of `rank`: its shape, or the number of shards and elements; then its bytes."""
    shards = [box for box in layout.boxes(rank) if box.numel]
    elements = sum(box.numel for box in shards)
    held = shape_text(shards[0].sizes) if len(layout.shape) > 1 else count_text(elements, "element")
    if len(shards) > 1:
        held = f"{len(shards)} shards of {elements:,} elements"
    return held if itemsize is None else f"{held}, {bytes_text(elements * itemsize)}"


MAX_GROUPS = 8  # of ranks with equal local shapes; of more groups, the largest and the smallest shard are shown
MAX_NAMES = 72  # characters of ranks in one line; beyond that their number


def holdings(holders: Holders, itemsize: int | None) -> list[str]:
    """The holdings of ranks, one line for each group of equal ranks; ranks that hold nothing come last."""
    layout, shards, lines = holders.layout, list(holders.shards()), []
    groups = [(numel, ranks) for numel, ranks in shards if numel]
    if len(groups) <= MAX_GROUPS:
        for found in sorted(ranks() for _, ranks in groups):
            each = " each" if len(found) > 1 else ""
            lines.append(f"{named_ranks(found, MAX_NAMES)}: {holding_text(layout, found[0], itemsize)}{each}")
    else:
        most, least = max(numel for numel, _ in groups), min(numel for numel, _ in groups)
        first = min(ranks()[0] for numel, ranks in groups if numel == most)
        last = max(ranks()[-1] for numel, ranks in groups if numel == least)
        for word, rank in (("most", first), ("least", last)):
            lines.append(f"{word} on rank {rank}: {holding_text(layout, rank, itemsize)}")
    return [*lines, *(f"{named_ranks(ranks(), MAX_NAMES)}: nothing" for numel, ranks in shards if not numel)]
