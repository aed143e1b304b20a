"""Information on layouts without a run: where shards are, and which collectives a redistribution may take."""

import sys
from dataclasses import dataclass
from typing import NamedTuple

from shardwise import _collectives as collectives
from shardwise._layout import Layout, checked, placements_text
from shardwise._pictures import picture
from shardwise._pictures.report import Report, table_text
from shardwise._redistribute.plan import alternatives
from shardwise._tensor import DTensor
from shardwise._tensor.torch_objects import TorchDTensor, is_torch_dtensor
from shardwise.errors import ArgumentError

MOST_LINES = 12


class CollectiveSequence(NamedTuple):
    """One way to redistribute."""

    cost: float  # relative to that of the plan
    busiest_bytes: int  # bytes that the busiest rank receives
    total_bytes: int  # bytes that all ranks receive, or send
    steps: tuple[str, ...]  # its collectives in order, each with the layout after it; empty if nothing is sent


@dataclass(frozen=True, repr=False)
class RedistributeComparison(Report):
    """The result of `explain_redistribute`; its text has a line for each sequence."""

    src: Layout
    dst: Layout
    sequences: tuple[CollectiveSequence, ...]  # the plan, then its alternatives, the cheapest first

    def text(self, width: int | None = None, colour: bool = False) -> str:
        """The layouts, and a table of the sequences that cost least."""
        elsewhere = "" if self.src.mesh == self.dst.mesh else f" on {self.dst.mesh}"
        title = f"{self.src.shape} on {self.src.mesh}: {_placements(self.src)} -> {_placements(self.dst)}{elsewhere}"
        rows = [
            (f"{s.cost:.2f}x", f"{s.busiest_bytes:,}", f"{s.total_bytes:,}", ", ".join(s.steps) or "nothing is sent")
            for s in self.sequences[:MOST_LINES]
        ]
        table = table_text([("    cost", "busiest rank", "   all ranks", ""), *rows], "rrrl", width)
        more = len(self.sequences) - MOST_LINES
        return "\n".join([title, table, *([f"and {more} that cost more"] if more > 0 else [])])


@checked
def explain_redistribute(src: Layout, dst: Layout, itemsize: int = 4) -> RedistributeComparison:
    """The plan from `src` to `dst`, then its alternatives, the cheapest first, with the bytes and cost of each step.

    The planner takes several steps only if they cost at least a tenth less: measured costs vary by as much.

    Args:
        src: the layout of a tensor.
        dst: the desired layout, of equal shape.
        itemsize: bytes of an element.

    Returns:
        For each sequence its cost relative to the plan, the bytes that the busiest rank and all ranks receive, and the
        collectives; `print` it.

    Raises:
        ArgumentError: the shapes differ.
    """
    if src.shape != dst.shape:
        raise ArgumentError(
            f"A redistribution keeps the global shape, got {src.shape} and {dst.shape}. Fix: two layouts of one shape."
        )
    plans, sequences = alternatives(src, dst), []
    for plan in plans:
        cost = plan.cost / plans[0].cost if plans[0].cost else 1.0
        received = itemsize * sum(step.received.busiest for step in plan.comm_steps)
        steps = tuple(f"{s.collective} to {_placements(s.dst)}" for s in plan.comm_steps if not s.is_local)
        sequences.append(CollectiveSequence(cost, received, itemsize * plan.total_elements, steps))
    return RedistributeComparison(src, dst, tuple(sequences))


def _placements(layout: Layout) -> str:
    return placements_text(layout.mesh, layout.placements)


@checked
def visualize_sharding(dtensor: DTensor | TorchDTensor, header: str = "", use_rich: bool = False) -> None:
    """Print which rank holds which shard of `dtensor`, on the first rank of its mesh.

    Prints nothing for a tensor without elements. `shardwise.picture` returns the picture, also as SVG.

    Args:
        header: a line above the picture.
        use_rich: let `rich` choose colours, which knows notebooks and FORCE_COLOR. Otherwise a terminal gets
            colours unless NO_COLOR is set.
    """
    if is_torch_dtensor(dtensor):
        dtensor = DTensor.from_torch_dtensor(dtensor.detach())
    assert isinstance(dtensor, DTensor)
    if not dtensor.numel() or collectives.rank() != dtensor.layout_.mesh.ranks[0]:
        return
    drawn = picture(dtensor, header)
    if not use_rich:
        drawn.show()
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(file=sys.stdout, soft_wrap=True, highlight=False)
    console.print(Text.from_ansi(drawn.text(console.width, colour=True)))
