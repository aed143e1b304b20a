"""The sequences of collectives that a redistribution may take, and what each costs."""

from shardwise.errors import ArgumentError
from shardwise.layout import Layout, checked
from shardwise.layout.by_axis import placements_text
from shardwise.redistribute.plan import RedistributePlan, alternatives
from shardwise.redistribute.steps import CommStep

MOST_LINES = 12


@checked
def explain_redistribute(src: Layout, dst: Layout, itemsize: int = 4) -> str:
    """The plan from `src` to `dst`, then its alternatives, the cheapest first: what each step sends and costs.

    An alternative of several steps that costs less than a tenth less is not taken: measured costs vary by as much.

    Args:
        src: the layout of a tensor.
        dst: the layout wanted, of the same shape.
        itemsize: bytes of an element.

    Returns:
        A line for each sequence: its cost beside that of the plan, the bytes that the busiest rank receives, those of
        all ranks, and the collectives.

    Raises:
        ArgumentError: the shapes differ.
    """
    if src.shape != dst.shape:
        raise ArgumentError(
            f"A redistribution keeps the global shape, got {src.shape} and {dst.shape}. Fix: two layouts of one shape."
        )
    found = alternatives(src, dst)
    lines = [
        f"{src.shape} on {src.mesh}: {_placements(src)} -> {_placements(dst)}"
        + ("" if src.mesh == dst.mesh else f" on {dst.mesh}"),
        "    cost  busiest rank     all ranks",
    ]
    lines += [_line(plan, found[0].cost, itemsize) for plan in found[:MOST_LINES]]
    more = len(found) - MOST_LINES
    return "\n".join(lines + ([f"and {more} that cost more"] if more > 0 else []))


def _line(plan: RedistributePlan, least: float, itemsize: int) -> str:
    received = itemsize * sum(step.received.busiest for step in plan.comm_steps)
    steps = ", ".join(_step(step) for step in plan.comm_steps if not step.is_local) or "nothing is sent"
    ratio = plan.cost / least if least else 1.0
    return f"{ratio:>7.2f}x {received:>13,} {itemsize * plan.total_elements:>13,}  {steps}"


def _step(step: CommStep) -> str:
    return f"{step.collective} to {_placements(step.dst)}"


def _placements(layout: Layout) -> str:
    return placements_text(layout.mesh, layout.placements)
