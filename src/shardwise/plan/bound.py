"""A lower bound on the time of all assignments, by a linear program; and the optimum of small problems.

The program takes a share of each option of a table. It includes that the busiest rank has at least the average load,
and at least the cost of the largest block of a table plus that of every rank. It does not include which blocks fit
together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from shardwise.errors import ConfigError
from shardwise.plan.assignment import MEMORY, Assignment, Floats, Ints, Option, Problem, assignment_of

MOST_BLOCKS = 300  # tables whose largest block is in the program, for each phase
MATTERS = 0.1  # if it takes more than this share of what all tables need on average
PRECISION = 1e-6  # the solver keeps its limits to 1e-7
INFEASIBLE, GAVE_UP = 2, 4  # statuses of `linprog` and `milp`
MOST_BINARIES = 200  # binary variables of a problem that is solved exactly
# How much slower each limit of time is than the one before. Where ranks are equal in the program, HiGHS (of scipy 1.17)
# calls some assignments the best that are up to 4 % above it.
ASYMMETRY = 1e-7
MOST_NODES = 20_000  # nodes of the exact search; then its best result is used


@dataclass(frozen=True, eq=False)
class Bound:
    """No assignment takes less than `value` seconds.

    Attributes:
        times: of each phase, [phases].
        shares: of each option, of all tables in one list.
        reduced: least increase of the bound if an option is taken, [options].
    """

    value: float
    times: Floats
    shares: Floats
    reduced: Floats


def solver() -> ModuleType:
    """`scipy.optimize`.

    Raises:
        ConfigError: scipy is not installed.
    """
    try:
        return import_module("scipy.optimize")
    except ImportError:
        raise ConfigError("Plans need scipy, which is not installed. Fix: pip install 'shardwise[plan]'.") from None


def lower_bound(problem: Problem) -> Bound | None:
    """The bound; None if no choice of options fits in memory."""
    optimize = solver()
    from scipy import sparse

    ranks, total = problem.ranks, problem.total
    count, phases, tables = len(total), len(ranks.inside), len(problem.options)
    of_option = np.repeat(np.arange(tables), np.diff(problem.starts))
    if not np.logical_or.reduceat(problem.fits, problem.starts[:-1]).all():
        return None
    average = np.maximum(ranks.inside / ranks.count, ranks.between / ranks.hosts)
    at_least = average * np.minimum.reduceat(total, problem.starts[:-1])[:, 1:].sum(0)
    # The columns: the shares of all options, the times of phases, and the cost on all ranks.
    blank, one = sparse.csr_array((phases, phases)), sparse.eye_array(phases)
    rows = [
        sparse.hstack([sparse.csr_array((total[:, 1:] * average).T), -one, blank]),
        sparse.hstack([sparse.csr_array(problem.least.T), blank, -one]),
        sparse.hstack([sparse.csr_array(total[:, MEMORY][None]), sparse.csr_array((1, 2 * phases))]),
    ]
    # Times in units of `scale`, and memory in that of all ranks: the solver has absolute tolerances.
    scale = max(float(at_least.sum()), 1e-30)
    blocks = [(problem.largest - problem.least, True), *([(problem.fastest, False)] if ranks.between.any() else [])]
    for phase in range(phases):
        for seconds, on_top in blocks:
            rows.append(_largest_blocks(problem, of_option, seconds, phase, at_least[phase], on_top))
    if problem.limits is not None:
        rows.append(
            sparse.hstack(
                [sparse.csr_array(_scaled(problem.limits) * scale), sparse.csr_array((len(problem.limits), 2 * phases))]
            )
        )
    limits = sparse.vstack(rows, format="csr")
    right = np.zeros(limits.shape[0])
    right[2 * phases] = ranks.count * ranks.memory
    once = sparse.csr_array((np.ones(count), (of_option, np.arange(count))), shape=(tables, count + 2 * phases))
    factors = np.full(len(right), 1 / scale)
    factors[2 * phases] = 1 / max(right[2 * phases], 1.0)
    units = np.concatenate([np.ones(count), np.full(2 * phases, scale)])
    most = np.concatenate([np.where(problem.fits, np.inf, 0), np.full(2 * phases, np.inf)])
    found = _solution(
        optimize,
        c=np.concatenate([np.zeros(count), np.ones(phases), np.zeros(phases)]),
        A_ub=sparse.diags_array(factors) @ limits @ sparse.diags_array(units),
        b_ub=right * factors,
        A_eq=once,
        b_eq=np.ones(tables),
        bounds=np.column_stack([np.zeros(len(most)), most]),
    )
    if found.status == INFEASIBLE:
        return None
    assert found.status == 0, found.message
    return Bound(
        float(found.fun) * scale * (1 - PRECISION),
        np.maximum(found.x[count : count + phases] * scale, at_least),
        found.x[:count],
        np.maximum(found.lower.marginals[:count], 0) * scale,
    )


def _solution(optimize: ModuleType, **program: object) -> Any:
    """Solve a linear program; by interior points if the simplex method gives up, as for some without a solution."""
    found = optimize.linprog(**program, method="highs")
    return found if found.status != GAVE_UP else optimize.linprog(**program, method="highs-ipm")


def _scaled(limits: Floats) -> Floats:
    """Limits scaled to numbers of at most 1."""
    found: Floats = limits / np.maximum(np.abs(limits).max(1, keepdims=True), 1e-30)
    return found


def _largest_blocks(
    problem: Problem, of_option: Ints, seconds: Floats, phase: int, at_least: float, on_top: bool
) -> object:
    """Rows: a phase takes at least as long as the largest block of a table, perhaps plus the cost of every rank."""
    from scipy import sparse

    slowest = np.maximum.reduceat(seconds[:, phase], problem.starts[:-1])
    matter = np.argsort(-slowest, kind="stable")[:MOST_BLOCKS]
    matter = np.sort(matter[slowest[matter] > MATTERS * at_least])
    chosen = np.flatnonzero(np.isin(of_option, matter))
    at = np.searchsorted(matter, of_option[chosen])
    blocks = sparse.csr_array((seconds[chosen, phase], (at, chosen)), shape=(len(matter), len(of_option)))
    of_phase = np.outer(np.ones(len(matter)), np.eye(seconds.shape[1])[phase])
    return sparse.hstack([blocks, sparse.csr_array(-of_phase), sparse.csr_array(of_phase * on_top)])


# ---- small problems ------------------------------------------------------------------------------------------


def num_binaries(problem: Problem) -> int:
    """The number of binary variables of `solve_exactly`; of large problems, a part of them."""
    ranks = problem.ranks.count
    if len(problem.total) > MOST_BINARIES:
        return len(problem.total)
    return sum(
        1 + len(np.unique(option.cost, axis=0)) * (ranks // option.span) if option.span < ranks else 1
        for of_table in problem.options
        for option in of_table
    )


def solve_exactly(problem: Problem, bound: Bound) -> tuple[Assignment | None, float]:
    """The best assignment, and a lower bound of all: infinity if there is none.

    The assignment is None also if it was not found in time.
    """
    optimize = solver()
    ranks, phases = problem.ranks, len(problem.ranks.inside)
    every = [(t, option) for t, of_table in enumerate(problem.options) for option in of_table]
    equal = _equal_blocks([option for _, option in every])
    variables = [(n, block, place) for n, block in equal for place in range(ranks.count // every[n][1].span)]
    first, at_time = len(every), len(every) + len(variables)
    # The solver stops at an absolute difference of 1e-6 to the best value, so that is about 1 here.
    width, scale = at_time + phases, max(bound.value, PRECISION * float(problem.fastest.max()), 1e-30)
    rows, low, high = [], [], []

    def limit(row: Floats, at_least: float, at_most: float) -> None:
        rows.append(row)
        low.append(at_least)
        high.append(at_most)

    loads = np.zeros((ranks.count, 1 + phases, width))
    loads[:, :, :first] = np.array([np.zeros(1 + phases) + option.everywhere for _, option in every]).T
    placed = {key: np.zeros(width) for key in equal}
    used: dict[tuple[int, int], Floats] = {}
    for column, (number, block, place) in enumerate(variables, first):
        option = every[number][1]
        loads[place * option.span : (place + 1) * option.span, :, column] = option.cost[block]
        placed[number, block][column] = 1
        used.setdefault((number, place), np.zeros(width))[column] = 1
    for table in range(len(problem.options)):
        limit(np.array([1.0 * (t == table) for t, _ in every] + [0.0] * (width - first)), 1, 1)
    for key, row in placed.items():
        row[key[0]] = -len(equal[key])
        limit(row, 0, 0)
    for (number, _), row in used.items():
        row[number] = -1
        limit(row, -np.inf, 0)
    for row in [] if problem.limits is None else _scaled(problem.limits):
        limit(np.append(row, np.zeros(width - first)), -np.inf, 0)
    times = np.eye(phases, width, at_time)
    of_hosts = loads.reshape(ranks.hosts, ranks.per_host, 1 + phases, width).sum(1)
    for of_rank in loads:
        limit(of_rank[MEMORY] / max(ranks.memory, 1.0), -np.inf, ranks.memory / max(ranks.memory, 1.0))
    for of_place, seconds in [*((x, ranks.inside) for x in loads), *((x, ranks.between) for x in of_hosts)]:
        for phase in np.flatnonzero(seconds):
            slower = 1 + ASYMMETRY * len(rows)
            limit(of_place[1 + phase] * seconds[phase] * slower / scale - times[phase], -np.inf, 0)
    found = optimize.milp(
        np.append(np.zeros(at_time), np.ones(phases)),
        integrality=np.append(np.ones(at_time), np.zeros(phases)),
        bounds=optimize.Bounds(0, np.append(np.ones(at_time), np.full(phases, np.inf))),
        constraints=optimize.LinearConstraint(np.array(rows), low, high),
        options={"node_limit": MOST_NODES, "mip_rel_gap": 0, "presolve": False},  # it prints, and saves no time
    )
    if found.status == INFEASIBLE:
        return None, np.inf
    proved = float(found.mip_dual_bound or 0.0) * scale * (1 - PRECISION) / slower if found.status in (0, 1) else 0.0
    if found.x is None:
        return None, proved
    return _read(problem, found.x, variables, equal, first), proved


def _equal_blocks(options: Sequence[Option]) -> dict[tuple[int, int], list[int]]:
    """Blocks of each option with equal costs, by the index of the option and the first of the blocks."""
    found = {}
    for number, option in enumerate(options):
        _, group = np.unique(option.cost, axis=0, return_inverse=True)
        for one in np.unique(group):
            members = np.flatnonzero(group.reshape(-1) == one).tolist()
            found[number, members[0]] = members
    return found


def _read(
    problem: Problem,
    x: Floats,
    variables: list[tuple[int, int, int]],
    equal: dict[tuple[int, int], list[int]],
    first: int,
) -> Assignment:
    """The assignment of a solution of the program."""
    where: dict[tuple[int, int], list[int]] = {key: [] for key in equal}
    for column, (number, block, place) in enumerate(variables, first):
        if x[column] > 0.5:
            where[number, block].append(place)
    choice, places = [], []
    for start, stop in zip(problem.starts[:-1], problem.starts[1:], strict=True):
        number = int(start + x[start:stop].argmax())
        at = {
            block: place
            for (option, one), members in equal.items()
            if option == number
            for block, place in zip(members, where[option, one], strict=True)
        }
        choice.append(number - int(start))
        places.append([at[block] for block in range(len(at))])
    return assignment_of(problem, choice, places)
