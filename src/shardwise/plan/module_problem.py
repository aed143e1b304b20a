"""The problem of the choices of a graph on one mesh, and its solution.

Nodes that share a choice are one node of the problem, with the sum of their costs.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

import numpy as np

from shardwise._layout import PARTIAL, REPLICATE, Placement, Shard
from shardwise.errors import PlanError
from shardwise.plan.module_choices import Choice, replicated
from shardwise.plan.module_costs import ModuleCosts
from shardwise.plan.module_solver import Array, Problem, Solution, solve
from shardwise.plan.module_trace import BOUNDARY, PARAMETER, ModuleGraph, Node, Value

REFUSED = 1e6  # seconds
TIE = 1e-9  # seconds: of equal costs the plan that is written in the fewest words
Forced = Mapping[int, int]  # nodes of a problem and their given choices


@dataclass(frozen=True)
class ModuleProblem:
    """The choices of a graph on one mesh, with their costs.

    Attributes:
        memory: bytes of each choice, summed over the nodes that share it.
    """

    graph: ModuleGraph
    choices: list[list[Choice]]
    seconds: Problem
    memory: list[Array]

    def solve(self, price: float, forced: Forced) -> Solution:
        """The cheapest of the allowed choices of nodes, if a byte of memory costs `price` seconds."""
        nodes = [a + price * b for a, b in zip(self.seconds.nodes, self.memory, strict=True)]
        for node, choice in forced.items():
            nodes[node] = np.where(np.arange(len(nodes[node])) == choice, nodes[node], inf)
        return solve(Problem(nodes, self.seconds.edges))

    def forced(self, placements: Mapping[str, Placement]) -> Forced:
        """The choices of parameters with these placements; among equal blocks one parameter decides for all.

        Raises:
            PlanError: a placement that the parameter cannot have.
        """
        number = {first: i for i, first in enumerate(sorted(set(self.graph.first)))}
        found = {}
        for i, node in enumerate(self.graph.nodes):
            for name in self.graph.names[node.name] if node.kind == PARAMETER else ():
                if name in placements:
                    possible = [choice.outputs[0] for choice in self.choices[i]]
                    if placements[name] not in possible:
                        raise PlanError(
                            f"plan_module: {name} of shape {node.results[0].shape} is pinned to {placements[name]}. "
                            f"Fix: one of {', '.join(map(str, possible))}."
                        )
                    found[number[self.graph.first[i]]] = possible.index(placements[name])
        return found

    def bytes(self, solution: Solution) -> float:
        return sum(float(costs[k]) for costs, k in zip(self.memory, solution.choices, strict=True))

    def chosen(self, solution: Solution) -> list[Choice]:
        """The choice of each node."""
        first = self.graph.first
        of = dict(zip(sorted(set(first)), solution.choices, strict=True))
        return [own[of[first[i]]] for i, own in enumerate(self.choices)]


def module_problem(costs: ModuleCosts, reshard: bool, limit: float = inf) -> ModuleProblem | float:
    """The problem of the choices of the graph of `costs`, with parameters resharded after forward or not.

    If the cheapest choices of all nodes, without redistributions, take at least the limit: their seconds.
    """
    graph, first, choices = costs.graph, costs.graph.first, costs.choices
    count = Counter(first)
    index = {node: i for i, node in enumerate(sorted(count))}
    consumers = Counter(x for node in graph.nodes if node.trains for x in dict.fromkeys(node.operands))
    problem = Problem([count[i] * np.array([_own_cost(costs, i, c, reshard, consumers) for c in choices[i]])
                       for i in index])  # fmt: skip
    least = sum(float(own.min()) for own in problem.nodes)
    if least >= limit:
        return least
    memory = [count[i] * np.array([_own_memory(costs, i, c, reshard) for c in choices[i]]) for i in index]
    known: dict[object, Array] = {}
    for number, node in enumerate(graph.nodes):
        at = index[first[number]]
        for position, value in enumerate(node.operands):
            source = index[first[value.node]]
            key = source, at, position, value.result
            if key not in known:
                known[key] = _edge(costs, number, position)
            problem.add(source, at, known[key])
    _results_are_replicated(costs, problem, [index[i] for i in first])
    return ModuleProblem(graph, choices, problem, memory)


def _own_cost(costs: ModuleCosts, number: int, choice: Choice, reshard: bool, consumers: Mapping[Value, int]) -> float:
    node = costs.graph.nodes[number]
    if node.kind == PARAMETER:
        return costs.parameter(number, choice.outputs[0], reshard)
    ties = TIE * (sum(p == PARTIAL for p in choice.inputs) + sum(p == Shard(0) for p in choice.outputs))
    for i, placement in enumerate(choice.outputs if node.trains else ()):
        ties += costs.sum_of_gradients(Value(number, i), placement, consumers[Value(number, i)])
    seconds = costs.op(number, choice)
    if seconds == inf:  # no simulated rank can run it, such as a kernel without a meta version
        seconds = 0.0 if choice == replicated(node) else REFUSED
    return seconds + ties


def _own_memory(costs: ModuleCosts, number: int, choice: Choice, reshard: bool) -> float:
    if costs.graph.nodes[number].kind == PARAMETER:
        return costs.state_memory(number, choice.outputs[0], reshard)
    return costs.activation_memory(number, choice)


def _edge(costs: ModuleCosts, number: int, position: int) -> Array:
    """Seconds from each choice of an operand to each choice of a node; `REFUSED` where no plan has both."""
    graph, node, choices = costs.graph, costs.graph.nodes[number], costs.choices
    value = node.operands[position]
    tie, source = _boundary(graph, node, value), graph.nodes[value.node]
    is_result = Value(number) in plain_results(graph)
    found = np.zeros((len(choices[value.node]), len(choices[number])))
    for i, before in enumerate(choices[value.node]):
        for j, after in enumerate(choices[number]):
            src, dst = before.outputs[value.result], after.inputs[position]
            if src != dst:
                # Along the tensor axis parameters are used as they are stored; `fully_shard` gathers them.
                refused = src != REPLICATE if source.kind == PARAMETER else tie is None or dst == PARTIAL
                more = TIE if node.is_output and src == PARTIAL else tie or 0.0
                found[i, j] = inf if refused else costs.redistribution(value, src, dst, is_result) + more
    return np.minimum(found, REFUSED)


def _boundary(graph: ModuleGraph, node: Node, value: Value) -> float | None:
    """Further costs of a redistribution of an operand; None if it would be inside a module.

    Plans redistribute inputs and outputs of modules: sums at outputs, others at inputs. Inside a module dispatch would
    redistribute: it takes the row with the placements of the operands, or another one than planned. Plain tensors
    become shards there.
    """
    source = graph.nodes[value.node]
    if node.kind == BOUNDARY:
        return (3 if node.is_output else 2) * TIE
    if not source.of_parameters:
        return 0.0
    return 2 * TIE if node.module in graph.leaves and source.module != node.module else None


def plain_results(graph: ModuleGraph) -> list[Value]:
    """The results of a step without a loss."""
    return [] if _losses(graph) else graph.outputs


def _losses(graph: ModuleGraph) -> list[Value]:
    return [x for x in graph.outputs if not graph.result(x).shape]


def _results_are_replicated(costs: ModuleCosts, problem: Problem, at: list[int]) -> None:
    """Require a replicated loss or, without one, replicated results."""
    losses = _losses(costs.graph)
    for value in losses or costs.graph.outputs:
        placements = [c.outputs[value.result] for c in costs.choices[value.node]]
        ends = [costs.redistribution(value, p, REPLICATE, not losses) + TIE * (p != REPLICATE) for p in placements]
        problem.nodes[at[value.node]] = problem.nodes[at[value.node]] + np.minimum(ends, REFUSED)
