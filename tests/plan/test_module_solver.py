"""The cheapest choices of random graphs are those of brute force; with small tables the bound holds."""

from math import prod

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shardwise.plan import Topology
from shardwise.plan.module_costs import ModuleCosts
from shardwise.plan.module_problem import ModuleProblem, module_problem
from shardwise.plan.module_solver import Array, Problem, solve
from shardwise.plan.module_trace import trace_module


def grid_of(problem: Problem) -> Array:
    """The costs of all combinations of choices, with a dim for each node."""
    sizes = [len(costs) for costs in problem.nodes]
    grid = np.zeros(sizes)
    for i, costs in enumerate(problem.nodes):
        grid = grid + costs.reshape([-1 if j == i else 1 for j in range(len(sizes))])
    for (a, b), costs in problem.edges.items():
        grid = grid + costs.reshape([n if j in (a, b) else 1 for j, n in enumerate(sizes)])
    return grid


def random_problem(rng: np.random.Generator) -> Problem:
    """Up to 8 nodes, each with up to two choices on each of two axes; any pair may have costs."""
    count = int(rng.integers(1, 9))
    sizes = [int(rng.integers(1, 3)) * int(rng.integers(1, 3)) for _ in range(count)]
    problem = Problem([rng.random(n) for n in sizes])
    for a in range(count):
        for b in range(count):
            if rng.random() < 0.3:
                problem.add(a, b, rng.random((sizes[a], sizes[b])))
    return problem


def test_random_graphs_have_the_choices_of_brute_force() -> None:
    rng = np.random.default_rng(0)
    for _ in range(1000):
        problem = random_problem(rng)
        found, best = solve(problem), grid_of(problem).min()
        assert found.is_optimal
        np.testing.assert_allclose([found.cost, found.bound, problem.cost(found.choices)], best)


@pytest.mark.parametrize("largest", [1, 4, 16])
def test_small_tables_give_a_bound_below_the_optimum(largest: int) -> None:
    rng, gaps = np.random.default_rng(1), []
    for _ in range(200):
        problem = random_problem(rng)
        found, best = solve(problem, largest), grid_of(problem).min()
        assert found.bound <= best + 1e-12
        assert best <= problem.cost(found.choices) + 1e-12 == found.cost + 1e-12
        gaps.append(found.cost / best - 1)
    assert np.mean(gaps) < 0.01  # local search


def test_a_node_beside_itself_adds_the_diagonal() -> None:
    problem = Problem([np.zeros(2)])
    problem.add(0, 0, np.array([[3.0, 0.0], [0.0, 2.0]]))
    assert solve(problem).choices == (1,)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.up(x).relu())
        return result


@pytest.mark.parametrize("shape", [(1, 4), (2, 2)])
def test_a_module_on_two_axes_has_the_choices_of_brute_force(shape: tuple[int, int]) -> None:
    graph = trace_module(Small(), lambda model: model(torch.zeros(8, 64)))
    costs = ModuleCosts(graph, shape, Topology.preset("cpu"))
    with costs.clock.running():
        problem = module_problem(costs, reshard=True)
    assert isinstance(problem, ModuleProblem)
    grid = grid_of(problem.seconds)
    assert prod(grid.shape) > 1000
    np.testing.assert_allclose(problem.solve(0.0, {}).cost, grid.min())
