"""Choices with costs of their own and in pairs: the cheapest ones, and a lower bound.

    problem = Problem([np.array([0.0, 1.0]), np.array([2.0, 0.0])])
    problem.add(0, 1, np.array([[0.0, 3.0], [5.0, 0.0]]))
    solve(problem)            # Solution(choices=(1, 1), cost=1.0, bound=1.0)

Nodes are eliminated one by one: a table of the node's cheapest choice for all choices of its neighbors replaces the
node. On graphs of models, which are chains with a few branches, these tables are small and the result is the optimum.
If a table would be larger than `LARGEST`, its node is split into copies that may choose differently. This gives a lower
bound; the choices then follow from local search.
"""

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import prod

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
LARGEST = 1 << 22  # entries of a table


@dataclass
class Problem:
    """The costs of the choices of each node, and of pairs of choices of two nodes."""

    nodes: list[Array]
    edges: dict[tuple[int, int], Array] = field(default_factory=dict)

    def add(self, a: int, b: int, costs: Array) -> None:
        """Add costs of pairs, `costs[choice of a, choice of b]`; with a = b, of one choice twice."""
        if a == b:
            self.nodes[a] = self.nodes[a] + np.diagonal(costs)
            return
        if a > b:
            a, b, costs = b, a, costs.T
        known = self.edges.get((a, b))
        self.edges[a, b] = costs if known is None else known + costs

    def cost(self, choices: "tuple[int, ...] | list[int]") -> float:
        """The sum of all costs of these choices."""
        own = sum(float(costs[k]) for costs, k in zip(self.nodes, choices, strict=True))
        return own + sum(float(costs[choices[a], choices[b]]) for (a, b), costs in self.edges.items())


@dataclass(frozen=True)
class Solution:
    """A choice for each node, their cost, and a lower bound of all costs."""

    choices: tuple[int, ...]
    cost: float
    bound: float

    @property
    def is_optimal(self) -> bool:
        return self.cost <= self.bound * (1 + 1e-9) + 1e-15


Table = tuple[tuple[int, ...], Array]  # nodes, and a dim for each


def solve(problem: Problem, largest: int = LARGEST) -> Solution:
    """The cheapest choices, if no table is larger than `largest` entries; else good ones, and a bound."""
    sizes, of = [len(costs) for costs in problem.nodes], _tables(problem)
    eliminated: list[tuple[int, list[Table]]] = []
    bound = 0.0
    queue = [(_size(own, sizes), node) for node, own in of.items()]
    heapify(queue)
    while queue:
        size, node = heappop(queue)
        if node not in of or size != _size(of[node], sizes):  # it was eliminated, or there is a later entry
            continue
        own = of.pop(node)
        eliminated.append((node, list(own.values())))
        for group in _groups(list(own.values()), sizes, largest):
            scope, total = _sum(group, node, sizes)
            table = scope, total.min(axis=0)
            for i in scope:
                for other in group:
                    of[i].pop(id(other), None)
                of[i][id(table)] = table
                heappush(queue, (_size(of[i], sizes), i))
            if not scope:
                bound += float(table[1])
    choices = _decode(eliminated, sizes)
    cost = problem.cost(choices)
    if cost > bound * (1 + 1e-9) + 1e-15:
        choices, cost = _improve(problem, choices, cost)
    return Solution(tuple(choices), cost, min(bound, cost))


def _tables(problem: Problem) -> dict[int, dict[int, Table]]:
    """The tables of each node, by id."""
    of: dict[int, dict[int, Table]] = {i: {} for i in range(len(problem.nodes))}
    for table in [*(((i,), costs) for i, costs in enumerate(problem.nodes)), *problem.edges.items()]:
        for i in table[0]:
            of[i][id(table)] = table
    return of


def _size(tables: dict[int, Table], sizes: list[int]) -> int:
    """The entries of the sum of tables."""
    return prod(sizes[i] for i in _scope(list(tables.values())))


def _scope(tables: list[Table]) -> set[int]:
    return {i for nodes, _ in tables for i in nodes}


def _groups(tables: list[Table], sizes: list[int], largest: int) -> list[list[Table]]:
    """Groups of tables to add: all of them, or as many as fit."""
    groups: list[list[Table]] = []
    for table in sorted(tables, key=lambda table: -table[1].size):
        for group in groups:
            if prod(sizes[i] for i in _scope([*group, table])) <= largest:
                group.append(table)
                break
        else:
            groups.append([table])
    return groups


def _sum(tables: list[Table], node: int, sizes: list[int]) -> tuple[tuple[int, ...], Array]:
    """The other nodes of tables, and their sum with `node` as the first dim."""
    scope = tuple(sorted(_scope(tables) - {node}))
    order = (node, *scope)
    total = np.zeros([sizes[i] for i in order])
    for nodes, costs in tables:
        axes = sorted(range(len(nodes)), key=lambda k: order.index(nodes[k]))
        shape = [sizes[i] if i in nodes else 1 for i in order]
        total += costs.transpose(axes).reshape(shape)
    return scope, total


def _decode(eliminated: list[tuple[int, list[Table]]], sizes: list[int]) -> list[int]:
    """The choices, from the last node that was eliminated to the first."""
    choices = [0] * len(sizes)
    for node, tables in reversed(eliminated):
        total = np.zeros(sizes[node])
        for nodes, costs in tables:
            total += costs[tuple(slice(None) if i == node else choices[i] for i in nodes)]
        choices[node] = int(total.argmin())
    return choices


def _improve(problem: Problem, choices: list[int], cost: float) -> tuple[list[int], float]:
    """Change one node or two neighbors at a time while the cost falls."""
    near: dict[int, list[tuple[int, Array]]] = {i: [] for i in range(len(choices))}
    for (a, b), costs in problem.edges.items():
        near[a].append((b, costs))
        near[b].append((a, costs.T))

    def costs_of(i: int, without: int) -> Array:
        total = problem.nodes[i].copy()
        for j, costs in near[i]:
            if j != without:
                total += costs[:, choices[j]]
        return total

    gained = True
    while gained:
        before = cost
        for (a, b), costs in problem.edges.items():
            both = costs_of(a, b)[:, None] + costs_of(b, a)[None, :] + costs
            choices[a], choices[b] = (int(k) for k in np.unravel_index(int(both.argmin()), both.shape))
        cost = problem.cost(choices)
        gained = cost < before * (1 - 1e-12)
    return choices, cost
