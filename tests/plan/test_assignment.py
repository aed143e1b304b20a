"""Assignments: equal to all there are on small problems, never below their bound, and the same again."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, permutations
from types import SimpleNamespace

import numpy as np
import pytest

from shardwise.plan import bound, search
from shardwise.plan.assignment import Assignment, Floats, Option, Problem, Ranks, assignment_of
from shardwise.plan.bound import GAVE_UP, lower_bound, solver
from shardwise.plan.search import Found, replacements, solve


def problem(seed: int, most_tables: int = 6) -> Problem:
    """Up to 6 tables on up to 4 ranks, with all kinds of options."""
    g = np.random.default_rng(seed)
    hosts, per_host = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (1, 3)][int(g.integers(6))]
    ranks, phases = hosts * per_host, int(g.integers(1, 4))
    options = []
    for _ in range(int(g.integers(1, most_tables + 1))):
        cost = g.exponential(1, 1 + phases)
        found = [Option("table", 1, cost[None, None])]
        if ranks > 1:
            found.append(Option("column", 1, np.tile(cost / 2 * g.uniform(1, 1.4, 1 + phases), (2, 1, 1))))
            found.append(Option("balanced", 1, np.array([0.7 * cost, 0.4 * cost])[:, None]))
            found.append(Option("row", ranks, (cost / ranks * g.uniform(1, 1.5, 1 + phases))[None, None]))
            found.append(Option("replicated", ranks, cost[None, None] * np.append(1, g.uniform(0, 0.6, phases))))
            requested = cost * g.uniform(0, 0.3, 1 + phases)
            found.append(Option("requested", 1, np.tile(cost / 2, (2, 1, 1)), requested))
        if hosts > 1 and per_host > 1:
            found.append(Option("table_row", per_host, cost[None, None] / per_host * 1.1))
            found.append(Option("grid", per_host, np.tile(cost / ranks * 1.2, (hosts, 1, 1))))
        options.append(found)
    total = np.sum([of_table[0].total(ranks) for of_table in options], axis=0)
    memory = float(total[0] / ranks * g.choice([1.15, 1.5, 3]))
    return Problem(options, Ranks(hosts, per_host, memory, g.uniform(0.5, 1, phases), g.uniform(0, 0.5, phases)))


def loads_of(option: Option, ranks: int) -> Iterator[Floats]:
    """What an option adds to the ranks, for each choice of places."""
    places, blocks = ranks // option.span, len(option.cost)
    equal = len({block.tobytes() for block in option.cost}) == 1
    for where in combinations(range(places), blocks) if equal else permutations(range(places), blocks):
        found = np.zeros((ranks, option.cost.shape[2])) + option.everywhere
        for cost, place in zip(option.cost, where, strict=True):
            found[place * option.span : (place + 1) * option.span] += cost
        yield found


def exists_below(of: Problem, value: float) -> bool:
    """Whether any assignment that fits takes less than `value`: all are made, but for those that cannot any more."""
    ranks = of.ranks
    added = [
        np.array([loads for option in of_table for loads in loads_of(option, ranks.count)]) for of_table in of.options
    ]
    least = [loads.sum(1).min(0) for loads in added]  # of all ranks, that the tables to come need
    states = np.zeros((1, ranks.count, 1 + len(ranks.inside)))
    for number in sorted(range(len(added)), key=lambda table: -least[table][1:].sum()):
        states = (states[:, None] + added[number]).reshape(-1, *states.shape[1:])
        least[number] = least[number] * 0
        average = (states.sum(1) + np.sum(least, axis=0)) / ranks.count
        hosts = states.reshape(len(states), ranks.hosts, ranks.per_host, -1).sum(2).max(1)
        of_ranks, of_hosts = np.maximum(states.max(1), average), np.maximum(hosts, average * ranks.per_host)
        times = np.maximum(of_ranks[:, 1:] * ranks.inside, of_hosts[:, 1:] * ranks.between).sum(1)
        states = states[(times < value) & (of_ranks[:, 0] <= ranks.memory * (1 + 1e-9))]
        if not len(states):
            return False
    return True


def solved(of: Problem) -> Found | None:
    bound = lower_bound(of)
    return None if bound is None else solve(of, bound)


def check(of: Problem, found: Found | None) -> Assignment | None:
    """That an assignment is one, fits, and is not below its bound."""
    if found is None or found.assignment is None:
        return None
    one, again = found.assignment, assignment_of(of, found.assignment.choice, found.assignment.places)
    np.testing.assert_allclose(one.loads, again.loads)
    assert of.ranks.fit(one.loads)
    assert all(len(set(places)) == len(places) for places in one.places)
    assert one.value >= found.value * (1 - 1e-9)
    return one


@pytest.mark.parametrize("seed", range(10, 30))
def test_no_assignment_of_a_small_problem_is_better(seed: int) -> None:
    of = problem(seed)
    one = check(of, solved(of))
    if one is None:
        assert not exists_below(of, np.inf)
    else:
        assert not exists_below(of, one.value * (1 - 1e-5))
        assert exists_below(of, one.value * (1 + 1e-5))


def test_an_option_that_takes_far_longer_does_not_hide_small_differences() -> None:
    of = problem(29, most_tables=4)
    slow = Option("slow", 1, np.append(0.0, np.full(len(of.ranks.inside), 1e5))[None, None])
    one, other = solved(of), solved(replace(of, options=[[*of_table, slow] for of_table in of.options]))
    assert one is not None
    assert other is not None
    assert one.assignment is not None
    assert other.assignment is not None
    assert other.value <= one.assignment.value
    assert other.assignment.value <= one.assignment.value * (1 + 1e-5)


@pytest.mark.parametrize("seed", range(10))
def test_the_search_is_near_the_best_and_above_the_bound(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    of = problem(seed)
    best = check(of, solved(of))
    monkeypatch.setattr(search, "MOST_BINARIES", 0)
    near = check(of, solved(of))
    assert (near is None) >= (best is None)
    if best is not None and near is not None:
        assert best.value * (1 - 1e-5) <= near.value <= best.value * 1.3


def large(tables: int, hosts: int, per_host: int) -> Problem:
    g, ranks = np.random.default_rng(0), hosts * per_host
    options = []
    for _ in range(tables):
        cost = g.lognormal(0, 1.2, 4)
        found = [Option("table", 1, cost[None, None]), Option("row", ranks, cost[None, None] / ranks * [1, 3, 1, 2])]
        found += [Option("column", 1, np.tile(cost / n * [1, n, 1, 1], (n, 1, 1))) for n in (2, 4)]
        options.append(found)
    total = np.sum([of_table[0].total(ranks) for of_table in options], axis=0)
    return Problem(
        options, Ranks(hosts, per_host, float(total[0] / ranks * 1.3), np.ones(3), np.array([0.0, 0.2, 0.1]))
    )


@pytest.mark.parametrize(("tables", "hosts", "per_host", "most"), [(40, 1, 8, 0.06), (100, 2, 8, 0.08)])
def test_large_problems_are_near_their_bound_and_the_same_again(
    tables: int, hosts: int, per_host: int, most: float
) -> None:
    of = large(tables, hosts, per_host)
    found = solved(of)
    one = check(of, found)
    assert found is not None
    assert one is not None
    assert found.gap <= most
    again = solved(of)
    assert again is not None
    assert again.assignment is not None
    assert (again.assignment.choice, again.assignment.places) == (one.choice, one.places)


def test_blocks_above_the_times_of_the_bound_are_tried() -> None:
    """Fewer tables than ranks: the bound takes a part of a table whole, and it is much dearer to split all of it."""
    g, options = np.random.default_rng(0), []
    for ids in g.lognormal(0, 1.2, 60):
        split = [("column", n, np.tile([0.0, 0.1 * ids, ids / n, 1 / n], (n, 1, 1))) for n in (1, 2, 4, 8)]
        split += [("row", n, np.tile([0.0, 0.1 * ids / n, ids / n, 1.0], (n, 1, 1))) for n in (8, 16, 32)]
        options.append([Option(f"{name} {n}", 1, cost) for name, n, cost in split])
    of = Problem(options, Ranks(16, 8, 1.0, np.ones(3), np.array([0.5, 0.0, 0.5])))
    found = solved(of)
    assert check(of, found) is not None
    assert found is not None
    assert found.gap <= 0.12


def test_a_replacement_is_an_assignment_that_differs_in_one_table() -> None:
    of = large(20, 1, 4)
    one = check(of, solved(of))
    assert one is not None
    found = dict(replacements(of, one, 3))
    assert sorted([one.choice[3], *found]) == list(range(len(of.options[3])))
    for option, other in found.items():
        again = assignment_of(of, other.choice, other.places)
        assert np.allclose(other.loads, again.loads, rtol=1e-12, atol=1e-9 * again.loads.max(0))
        assert np.allclose(other.times, again.times)
        assert other.choice == (*one.choice[:3], option, *one.choice[4:])
        assert all(a == b for t, (a, b) in enumerate(zip(one.places, other.places, strict=True)) if t != 3)


def test_what_exceeds_memory_has_no_bound() -> None:
    one = Option("table", 1, np.array([[[2.0, 1.0]]]))
    assert lower_bound(Problem([[one]], Ranks(1, 2, 1.9, np.ones(1), np.zeros(1)))) is None
    half = Option("table", 1, np.array([[[1.0, 1.0]]]))
    assert lower_bound(Problem([[half]] * 3, Ranks(1, 2, 1.4, np.ones(1), np.zeros(1)))) is None
    assert solved(Problem([[half]] * 3, Ranks(1, 2, 2.0, np.ones(1), np.zeros(1)))) is not None


def test_limits_that_only_a_mix_of_options_keeps_have_no_assignment() -> None:
    options = [[Option("a", 1, np.array([[[0.0, 1.0]]])), Option("b", 1, np.array([[[0.0, 3.0]]]))]]
    of = Problem(options, Ranks(1, 2, 1.0, np.ones(1), np.zeros(1)), np.array([[1.0, -1.0], [-1.0, 1.0]]))
    found = solved(of)
    assert found is not None
    assert (found.value, found.assignment) == (np.inf, None)


def test_limits_exclude_choices() -> None:
    """Both tables want the first option; a limit allows it for one of them."""
    options = [[Option("a", 1, np.array([[[0.0, 1.0]]])), Option("b", 1, np.array([[[0.0, 3.0]]]))]] * 2
    ranks = Ranks(1, 2, 1.0, np.ones(1), np.zeros(1))
    free, limited = Problem(options, ranks), Problem(options, ranks, np.array([[1.0, -1.0, 1.0, -1.0]]))
    values = []
    for of in (free, limited):
        one = check(of, solved(of))
        assert one is not None
        values.append(one.value)
    assert values == [1.0, 3.0]


def test_where_the_simplex_method_gives_up_the_bound_is_that_of_interior_points(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of, optimize, tried = large(20, 1, 4), solver(), list[str]()

    def linprog(method: str, **program: object) -> object:
        tried.append(method)
        return SimpleNamespace(status=GAVE_UP) if method == "highs" else optimize.linprog(method=method, **program)

    expected = lower_bound(of)
    monkeypatch.setattr(bound, "solver", lambda: SimpleNamespace(linprog=linprog))
    found = lower_bound(of)
    assert tried == ["highs", "highs-ipm"]
    assert expected is not None
    assert found is not None
    assert found.value == pytest.approx(expected.value, rel=1e-5)
