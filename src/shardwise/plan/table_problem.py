"""The search for a plan of tables: a problem for each form of messages, and the result (`Planned`)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import numpy as np

from shardwise._layout import Mesh, as_placements
from shardwise.embedding.batch import features_of
from shardwise.embedding.configs import EmbeddingBagConfig
from shardwise.errors import PlanError, ShardwiseError
from shardwise.plan.assignment import MEMORY, Assignment, Floats, Option, Problem, Ranks, assignment_of
from shardwise.plan.bound import MOST_BINARIES, lower_bound, num_binaries
from shardwise.plan.fit import refusal
from shardwise.plan.search import solve
from shardwise.plan.table_costs import (
    COMPUTED,
    PHASES,
    Form,
    TableCosts,
    speeds,
)
from shardwise.plan.table_options import SHARDINGS, Division, choices_of_form, divisions, options_of, pinned
from shardwise.plan.table_request import Request

SECOND = 1e-3  # the weight of time beside an objective that comes first
WORTH = 0.99  # other forms of messages are tried if their bound is below this part of the best plan
TIE = 1e-4  # of the largest number of any option: sums up to it are not above 0, so that a tie is in one case only


@dataclass(frozen=True, eq=False)
class Planned:
    """The result of a search, in terms of tables.

    Attributes:
        units: the tables of each unit, which are placed together: a group, or one table.
        divisions: for each option of each unit, one division of each of its tables.
        in_time: the problem whose values are seconds.
        assignment: of this problem.
        bound, value: of the minimized objective.
    """

    request: Request
    units: Sequence[Sequence[int]]
    divisions: Sequence[Sequence[tuple[Division, ...]]]
    in_time: Problem
    assignment: Assignment
    bound: float
    value: float

    def placements(self) -> dict[str, Any]:
        """The placement of each table, on a mesh of one axis."""
        found, ranks = {}, self.request.topology.ranks
        chosen = zip(self.units, self.divisions, self.assignment.choice, self.assignment.places, strict=True)
        for tables, of_unit, choice, places in chosen:
            for table, division in zip(tables, of_unit[choice], strict=True):
                found[self.request.names[table]] = division.placement(places, ranks)
        return {name: found[name] for name in self.request.names}


def make_plan_of_tables(request: Request) -> Planned:
    """Search for the best plan.

    Raises:
        ConfigError, PlanError: arguments that do not fit; TooLargeError: tables that do not fit in memory.
    """
    request.check()
    planned = _search(request)
    if planned is None:
        raise refusal(request, least_memory, lambda change: _search(change) is not None)
    return planned


def _search(request: Request) -> Planned | None:
    """The best plan found; None if none fits."""
    costs = _costs(request)
    units, options = _units(request, costs)
    cases = _cases(request)
    forms = dict.fromkeys(form for form, _ in cases)
    decisive = np.concatenate([
        np.sum([choices_of_form([one[n] for one in of_unit], costs[t]) for n, t in enumerate(tables)], axis=0)
        for tables, of_unit in zip(units, options, strict=True)
    ])  # fmt: skip
    decisive = decisive - TIE * np.abs(decisive).max(0) / len(units)  # a solver does not distinguish 0 from above 0
    problems = {form: _problem(request, costs, units, options, form, request.objective) for form in forms}
    bounded = []
    for form, signs in cases:
        problem = replace(problems[form], limits=_limits(decisive, signs))
        if (bound := lower_bound(problem)) is not None:
            bounded.append((bound.value, form, problem, bound))
    best: tuple[float, Form, Assignment] | None = None
    bounds: list[float] = []
    for value, form, problem, bound in sorted(bounded, key=lambda one: one[0]):
        worth = 1.0 if num_binaries(problem) <= MOST_BINARIES else WORTH
        if best is not None and value >= worth * best[0]:
            bounds.append(value)
            continue
        found = solve(problem, bound)
        bounds.append(found.value)
        if found.assignment is None:
            continue
        one = found.assignment
        sums = decisive[problem.starts[:-1] + one.choice].sum(0)
        real = next((other for other, kept in cases if (np.multiply(kept, sums) <= 0).all()), form)
        if real is not form:
            one = assignment_of(problems[real], one.choice, one.places)
        if problem.ranks.fit(one.loads) and (best is None or one.value < best[0]):
            best = one.value, real, one
    if best is None:
        return None
    value, form, one = best
    in_time = problems[form]
    if request.objective != "time":
        in_time = _problem(request, costs, units, options, form, "time")
    return Planned(request, units, options, in_time, assignment_of(in_time, one.choice, one.places), min(bounds), value)


def least_memory(request: Request) -> tuple[Floats, Floats]:
    """The bytes of the smallest sharding of each table on all ranks together, and on its fullest rank."""
    costs = _costs(request)
    units, options = _units(request, costs)
    total, fullest = np.zeros(len(costs)), np.zeros(len(costs))
    form = _cases(request)[-1][0]
    for tables, of_unit in zip(units, options, strict=True):
        for number, table in enumerate(tables):
            found = options_of([one[number] for one in of_unit], costs[table], form)
            total[table] = min(option.total(request.topology.ranks)[MEMORY] for option in found)
            fullest[table] = min(option.largest[MEMORY] for option in found)
    return total, fullest


def _costs(request: Request) -> list[TableCosts]:
    sizes = request.dtypes.forward.itemsize, request.dtypes.backward.itemsize
    unit = gcd(*(config.embedding_dim for config in request.tables))
    return [
        TableCosts(
            config, request.topology, request.batch, request.optimizer, request.weighted, sizes, unit,
            request.counts.get(config.name),
        )
        for config in request.tables
    ]  # fmt: skip


def _units(request: Request, costs: Sequence[TableCosts]) -> tuple[list[list[int]], list[list[tuple[Division, ...]]]]:
    """Units of placement and their options: by name, the options that all tables of a group have."""
    names = request.names
    group_of = {name: number for number, group in enumerate(request.groups) for name in group}
    units: dict[object, list[int]] = {}
    for table, name in enumerate(names):
        units.setdefault(group_of.get(name, name), []).append(table)
    options: list[list[tuple[Division, ...]]] = []
    for tables in units.values():
        of_tables = [_divisions(request, costs[table]) for table in tables]
        if len(of_tables) == 1:
            options.append([(division,) for division in of_tables[0]])
            continue
        by_label = [{division.label: division for division in found} for found in of_tables]
        common = [label for label in by_label[0] if all(label in others for others in by_label)]
        of_group = ", ".join(names[table] for table in tables)
        given = [request.pinned.get(names[table]) for table in tables]
        if given.count(given[0]) < len(given):
            raise PlanError(
                f"The tables of a group ({of_group}) are not pinned to one placement. Fix: pin all of them to it, or "
                f"none."
            )
        if not common:
            raise PlanError(
                f"The tables of a group ({of_group}) have no sharding in common. Fix: tables of equal columns, or "
                f"allow 'table'."
            )
        options.append([tuple(of_table[label] for of_table in by_label) for label in common])
    return list(units.values()), options


def _divisions(request: Request, costs: TableCosts) -> list[Division]:
    """The ways to shard one table."""
    name, ranks = costs.config.name, request.topology.ranks
    if name in request.pinned:
        try:
            (placement,) = as_placements(Mesh((ranks,)), request.pinned[name])
            return [pinned(placement, costs)]
        except ShardwiseError as error:
            raise PlanError(f"Table {name}: it is pinned where it cannot be: {error}") from None
    found = list(divisions(costs, request.allowed_for(name)))
    if not found:
        raise PlanError(
            f"Table {name}: none of the shardings {list(request.allowed_for(name))} is possible on {ranks} ranks. "
            f"Fix: allow another one of {', '.join(SHARDINGS)}."
        )
    return found


def _problem(
    request: Request,
    costs: Sequence[TableCosts],
    units: Sequence[Sequence[int]],
    options: Sequence[Sequence[tuple[Division, ...]]],
    form: Form,
    objective: str,
) -> Problem:
    inside, between, _ = speeds(request.topology)
    found = []
    for tables, of_unit in zip(units, options, strict=True):
        of_tables = [options_of([one[n] for one in of_unit], costs[t], form) for n, t in enumerate(tables)]
        found.append([_sum(together) for together in zip(*of_tables, strict=True)])
    topology = request.topology
    if objective != "time":
        totals = [[option.total(topology.ranks)[1:] for option in of_unit] for of_unit in found]
        scale = SECOND / max(sum(min(float(x @ inside) for x in of_unit) for of_unit in totals), 1e-30)
        inside, between = inside * scale, between * scale
        sent = np.array([0.0 if phase in COMPUTED else 1.0 for phase in range(len(PHASES))])
        if objective == "bytes":
            most = max(sum(min(float(x @ sent) for x in of_unit) for of_unit in totals), 1.0)
            inside = inside + sent / most
        else:
            found = [[_with_memory_first(option) for option in of_unit] for of_unit in found]
            inside, between = np.append(1 / request.memory, inside), np.append(0.0, between)
    return Problem(found, Ranks(topology.hosts, topology.ranks_per_host, request.memory, inside, between))


def _with_memory_first(option: Option) -> Option:
    """The option with an additional phase, whose amount is memory."""
    cost, everywhere = (np.concatenate([x[..., :1], x], axis=-1) for x in (option.cost, np.asarray(option.everywhere)))
    return replace(option, cost=cost, everywhere=everywhere)


def _sum(options: Sequence[Option]) -> Option:
    """The sum of several tables with equal places."""
    if len(options) == 1:
        return options[0]
    width = max(option.cost.shape[1] for option in options)
    cost: Floats = np.sum([np.broadcast_to(x.cost, (x.cost.shape[0], width, x.cost.shape[2])) for x in options], axis=0)
    return Option(options[0].label, options[0].span, cost, sum(option.everywhere for option in options))


def _cases(request: Request) -> list[tuple[Form, tuple[int, int, int]]]:
    """The forms of messages, with conditions: a collection uses a form if no product of these signs and the deciding
    numbers (`TableCosts.choice_of_form`) is above 0."""
    if not isinstance(request.tables[0], EmbeddingBagConfig):
        return [(Form.ROWS, (0, 0, 0))]
    if request.weighted or not any(map(request.batch.of_feature, features_of(request.tables).names)):
        return [(Form.BAGS, (1, 0, 0)), (Form.OCCUPIED, (-1, 0, 0))]
    return [
        (Form.BAGS, (1, -1, 0)), (Form.OCCUPIED, (-1, 0, -1)), (Form.ROWS, (1, 1, 0)), (Form.ROWS, (-1, 0, 1)),
    ]  # fmt: skip


def _limits(decisive: Floats, signs: Sequence[int]) -> Floats | None:
    used = [sign * decisive[:, number] for number, sign in enumerate(signs) if sign]
    return np.array(used) if used else None
