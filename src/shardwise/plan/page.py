"""The pages of plans: memory and time of ranks, messages between them, and the reasons."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from shardwise._layout import Mesh
from shardwise._pictures.labels import bytes_text, count_text, milliseconds_text, more_bytes_text, named_ranks
from shardwise._pictures.page import COLOURS, Column, Text, bars, heat_map, page, shown_ranks, sortable
from shardwise.plan.assignment import MEMORY, Floats, Problem, assignment_of
from shardwise.plan.module_search import Reason, Tried
from shardwise.plan.table_costs import PHASES
from shardwise.plan.table_plan_file import held_by
from shardwise.plan.table_problem import Planned
from shardwise.simulation.result import RankClass

MOST_REASONS = 100  # tables with a runner-up: one of 1,000 tables takes 26 ms on 4,096 ranks
MOST_CELLS = 64  # rows of the traffic matrix
LABEL = 24  # characters of the ranks of a table

Change = tuple[str, float, int, int]  # a PlanChange
Section = tuple[str, str, str]

_more_ms: Text = "{:+.3f} ms".format


# ---- tables ---------------------------------------------------------------------------------------------------------


def tables_page(
    heading: Sequence[str], planned: Planned, seconds: float, runner_up: Callable[[str], Change | None]
) -> str:
    """The page of a plan of tables, whose step takes `seconds`."""
    tables, ranks = len(planned.request.tables), planned.request.topology.ranks
    return page(
        f"Plan of {count_text(tables, 'table')} on {count_text(ranks, 'rank')}",
        heading,
        [_memory(planned), _timeline(planned, seconds), _traffic(planned), _tables(planned, runner_up)],
    )


def _memory(planned: Planned) -> Section:
    """Memory of ranks, with colours for the largest tables."""
    chosen = zip(planned.in_time.options, planned.assignment.choice, planned.assignment.places, strict=True)
    alone = [
        assignment_of(Problem([options], planned.in_time.ranks), [choice], [places])
        for options, choice, places in chosen
    ]
    held = np.column_stack([one.loads[:, MEMORY] for one in alone])
    order = np.argsort(-held.sum(0), kind="stable").tolist()
    names = [" + ".join(planned.request.names[table] for table in planned.units[unit]) for unit in order[:COLOURS]]
    amounts = held[:, order[:COLOURS]]
    if others := order[COLOURS:]:
        names.append(count_text(sum(len(planned.units[unit]) for unit in others), "other table"))
        amounts = np.column_stack([amounts, held[:, others].sum(1)])
    note, shown = shown_ranks(amounts)
    totals = [bytes_text(total) for total in amounts.sum(0)]
    text = f"Tables, optimizer states or gradients, and messages. The legend has the sums of all ranks.{note}"
    return "Memory of each rank", text, bars(names, totals, shown, amounts[shown], bytes_text)


def _timeline(planned: Planned, seconds: float) -> Section:
    """Phases of ranks. A phase takes at least as long as on the host's link."""
    ranks, loads = planned.in_time.ranks, planned.assignment.loads[:, 1:]
    of_hosts = loads.reshape(ranks.hosts, ranks.per_host, -1).sum(1).repeat(ranks.per_host, 0)
    times = np.maximum(loads * ranks.inside, of_hosts * ranks.between)
    most, slowest = times.max(0), times.argmax(0).tolist()
    note, shown = shown_ranks(times, slowest)
    notes = [f"{milliseconds_text(time)} on rank {rank}" for time, rank in zip(most, slowest, strict=True)]
    text = (
        f"A phase begins when all ranks have ended the one before; where a bar is empty, the rank waits. The legend "
        f"has the slowest ranks. Latencies, {milliseconds_text(seconds - most.sum())} of the step, are not drawn.{note}"
    )
    drawn = bars(PHASES, notes, shown, times[shown], milliseconds_text, most.cumsum() - most)
    return "A step of each rank", text, drawn


def traffic(planned: Planned, most: int = MOST_CELLS) -> tuple[list[str], Floats]:
    """Expected bytes from ranks to ranks in a step; or, if these are too many, from hosts to hosts.

    An owner of rows receives equal ids and gradients from each other rank, and sends equal results to each.
    """
    topology, loads = planned.request.topology, planned.assignment.loads
    ranks = topology.ranks
    ids, results, gradients = (loads[:, 1 + PHASES.index(name)] for name in ("ids", "results", "gradients"))
    unit = topology.ranks_per_host if ranks > most and topology.hosts > 1 else 1
    size = unit * -(-ranks // (unit * most))
    starts = np.arange(0, ranks, size)
    counts = np.diff([*starts, ranks])
    sent, received = (np.add.reduceat(x, starts) / max(ranks - 1, 1) for x in (results, ids + gradients))
    amounts: Floats = sent[:, None] * counts + counts[:, None] * received
    np.fill_diagonal(amounts, (sent + received) * (counts - 1))
    names = [named_ranks(range(a, a + n), LABEL) for a, n in zip(starts.tolist(), counts.tolist(), strict=True)]
    return names, amounts


def _traffic(planned: Planned) -> Section:
    names, amounts = traffic(planned)
    src, dst = np.unravel_index(amounts.argmax(), amounts.shape)
    text = (
        f"Expected bytes of ids, results and gradients in a step, {bytes_text(amounts.sum())} in all. Most: "
        f"{bytes_text(amounts[src, dst])} from {names[src]} to {names[dst]}."
    )
    return "Traffic", text, heat_map(names, amounts, bytes_text, "Row: from. Column: to.")


def _tables(planned: Planned, runner_up: Callable[[str], Change | None]) -> Section:
    """Tables from the slowest to the fastest."""
    choice, configs = planned.assignment.choice, planned.request.tables
    cost = planned.in_time.largest[planned.in_time.starts[:-1] + choice].sum(1)
    order = [
        (table, float(cost[unit]), planned.divisions[unit][choice[unit]][number].label)
        for unit in np.argsort(-cost, kind="stable").tolist()
        for number, table in enumerate(planned.units[unit])
    ]
    tables, placements = [configs[table] for table, *_ in order], planned.placements()
    held = [held_by(placements[one.name]) or range(planned.request.topology.ranks) for one in tables]
    others = [runner_up(one.name) if number < MOST_REASONS else None for number, one in enumerate(tables)]
    text = (
        "The time is that of the rank that works longest for the table. The runner-up is the next best sharding if all "
        "other tables stay; it adds as much to the step, to the bytes of the busiest rank, and to the fullest rank."
    )
    if len(tables) > MOST_REASONS:
        text += f" It was computed for the {MOST_REASONS} tables that take longest on a rank."
    return "Tables", text, sortable(
        Column("table", [one.name for one in tables]),
        Column("rows", [one.num_embeddings for one in tables], "{:,.0f}".format),
        Column("columns", [one.embedding_dim for one in tables], "{:.0f}".format),
        Column("bytes", [x.num_embeddings * x.embedding_dim * x.data_type.itemsize for x in tables], bytes_text),
        Column("sharding", [label for *_, label in order]),
        Column("ranks", [named_ranks(ranks, LABEL) for ranks in held]),
        Column("time", [time for _, time, _ in order], milliseconds_text),
        Column("runner-up", [one[0] if one else "" for one in others]),
        Column("more time", [one[1] if one else None for one in others], _more_ms),
        Column("more sent", [one[2] if one else None for one in others], more_bytes_text),
        Column("more memory", [one[3] if one else None for one in others], more_bytes_text),
    )  # fmt: skip


# ---- modules --------------------------------------------------------------------------------------------------------


def module_page(
    heading: Sequence[str], mesh: Mesh, step: RankClass, styles: Sequence[tuple[str, str]], units: str,
    reasons: Sequence[Reason], tried: Sequence[Tried],
) -> str:  # fmt: skip
    """The page of a plan of a module; its arguments are attributes of the plan, styles and units as text."""
    first, sent, ms = mesh.ranks[0], bytes_text(step.sent_bytes), milliseconds_text
    times = {"compute": step.compute, "communication": step.communication}
    parts = f"The plan for parallelize_module along the tensor axis. {units}"
    table = sortable(Column("path", [path for path, _ in styles]), Column("plan", [text for _, text in styles]))
    return page(
        f"Plan of a module on {count_text(mesh.size(), 'rank')}",
        heading,
        [
            ("Memory", f"Of rank {first} at the peak of a step with AdamW.", _bar(first, step.memory, bytes_text)),
            ("A step", f"Of rank {first}, which sends {sent}. Nothing overlaps.", _bar(first, times, ms)),
            ("Modules", parts, table), _parameters(reasons), _meshes(tried),
        ],
    )  # fmt: skip


def _bar(rank: int, amounts: Mapping[str, float], text: Text) -> str:
    numbers = [*amounts.values()]
    return bars([*amounts], [text(number) for number in numbers], [rank], np.array([numbers], np.float64), text)


def _parameters(reasons: Sequence[Reason]) -> Section:
    text = (
        "A placement is along the tensor axis. Parameters of equal blocks share a choice. The runner-up is the next "
        "best placement, which the choices of other parameters follow; it adds as much to the step, and to memory."
    )
    return "Parameters", text, sortable(
        Column("parameter", [one.names[0] for one in reasons]),
        Column("shared by", [len(one.names) for one in reasons], "{:,.0f}".format),
        Column("bytes on a rank", [one.bytes for one in reasons], bytes_text),
        Column("placement", [str(one.placement) for one in reasons]),
        Column("runner-up", [str(one.next_best or "") for one in reasons]),
        Column("more time", [1e3 * one.more_seconds if one.next_best else None for one in reasons], _more_ms),
        Column("more memory", [one.more_bytes if one.next_best else None for one in reasons], more_bytes_text),
        Column("why", [one.why for one in reasons]),
    )  # fmt: skip


def _meshes(tried: Sequence[Tried]) -> Section:
    return "Meshes", "Modelled steps, by the ranks of the data axis and of the tensor axis.", sortable(
        Column("data x tensor", [one.text for one in tried]),
        Column("step", [one.seconds for one in tried], milliseconds_text),
        Column("note", ["does not fit" if x.seconds is None else "at least" if x.is_bound else "" for x in tried]),
    )  # fmt: skip
