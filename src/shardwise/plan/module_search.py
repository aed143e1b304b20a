"""The search for the plan of a module: its mesh, its choices, and whether parameters are resharded after forward.

Shapes of the mesh are tried one after the other. A shape is left out if the cheapest choices of its nodes, without
redistributions, take longer than the best plan so far times `CLOSE`. If the cheapest choices do not fit in memory,
bytes get a price, which is raised until they do.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise._layout import Placement
from shardwise.errors import PlanError
from shardwise.plan.module_costs import ModuleCosts
from shardwise.plan.module_experts import ExpertCosts
from shardwise.plan.module_problem import REFUSED, Forced, ModuleProblem, module_problem
from shardwise.plan.module_solver import Solution
from shardwise.plan.module_trace import OP, PARAMETER, trace_module
from shardwise.simulation.api import without_values
from shardwise.simulation.topology import Topology

Inputs = Sequence[Any] | Mapping[str, Any]
Forward = Callable[..., Any]
CLOSE = 1.05  # plans within this factor of the best costs are simulated: costs differ from simulated steps by as much
ROUNDS = 23  # steps of raising and lowering the price of a byte
DEAREST = 1e-6  # seconds: at this price of a byte choices take the least memory


class Found(NamedTuple):
    """Choices on one mesh.

    Attributes:
        reshard: whether parameters are all-gathered again for backward.
        bound: seconds that no choices fall below on this mesh, within the memory.
        price: of a byte, in seconds.
        forced: given choices.
    """

    problem: ModuleProblem
    costs: ModuleCosts
    solution: Solution
    reshard: bool
    seconds: float
    bytes: float
    bound: float
    price: float
    forced: Forced


class Tried(NamedTuple):
    """A shape of the mesh, and the seconds of its best plan, or a bound of these; None if no plan fits.

    Attributes:
        experts: number of ranks of the axis of experts, a part of the data axis.
    """

    shape: tuple[int, int]
    seconds: float | None
    is_bound: bool
    experts: int = 1

    @property
    def text(self) -> str:
        """The shape, data x tensor."""
        experts = f", experts on {self.experts}" if self.experts > 1 else ""
        return f"{self.shape[0]} x {self.shape[1]}{experts}"


@dataclass(frozen=True)
class Reason:
    """The reason for a parameter's placement.

    Attributes:
        names: of the parameters that share the choice.
        bytes: bytes of these parameters on a rank.
        why: the reason of the row of the op that reads it.
        next_best: the cheapest other placement; None if there is no other.
        more_seconds, more_bytes: its additional cost; other choices adapt to it, unless they are pinned.
    """

    names: tuple[str, ...]
    bytes: float
    placement: Placement
    why: str
    next_best: Placement | None
    more_seconds: float
    more_bytes: float


# ---- the step -------------------------------------------------------------------------------------------------------


def step_of(inputs: Inputs, forward: Forward | None, data_ranks: int = 1) -> Callable[[nn.Module], object]:
    """A forward of the first of `data_ranks` parts of the batch."""
    rows = batch_rows(inputs)

    def part(x: Tensor) -> Tensor:
        x = torch.zeros(x.shape, dtype=x.dtype) if x.is_meta else x
        return x.chunk(data_ranks)[0] if data_ranks > 1 and x.ndim and len(x) == rows else x

    def step(model: nn.Module) -> object:
        given = pytree.tree_map_only(Tensor, part, inputs)
        run = model if forward is None else partial(forward, model)
        return run(**given) if isinstance(given, Mapping) else run(*given)

    return step


def check_call(module: nn.Module, inputs: Inputs, forward: Forward | None) -> None:
    """Raise a PlanError if the module or `forward` does not take the inputs."""
    called = module.forward if forward is None else partial(forward, module)
    positional, named = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
    try:
        signature(called).bind(*positional, **named)
    except TypeError as error:
        if forward is None:
            raise PlanError(
                f"plan_module: {type(module).__name__}.forward does not take the inputs: {error}. "
                f"Fix: inputs that it takes, or forward=, a function from the module and the inputs to the loss."
            ) from error
        raise PlanError(
            f"plan_module: {getattr(forward, '__name__', 'forward')} does not take the module and the inputs: {error}. "
            f"Fix: a function from the module and {len(inputs)} inputs to the loss."
        ) from error
    except ValueError:  # a function in C has no signature
        pass


def batch_rows(inputs: Inputs) -> int:
    """The rows of the batch: those of the first tensor."""
    for x in pytree.tree_leaves(inputs):
        if isinstance(x, Tensor) and x.ndim:
            return len(x)
    raise PlanError("plan_module: no input is a tensor. Fix: inputs=(batch,), as the module's forward takes them.")


@contextmanager
def collecting_new_objects() -> Iterator[None]:
    """Inside, the garbage collector visits new objects only: a fifth less time, as models have many."""
    if gc.get_freeze_count():  # the program has frozen objects, which stay frozen
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


# ---- the search -----------------------------------------------------------------------------------------------------


class Search:
    """The best choices over shapes of the mesh.

    Attributes:
        module: a copy on the meta device.
        tried: the shapes of the last run.
        bound: seconds that no choices fall below on these, within the memory of that run.
        least_bytes: the least memory of any choices.
    """

    def __init__(self, module: nn.Module, topology: Topology, inputs: Inputs, forward: Forward | None) -> None:
        self.module = without_values(module, torch.device("meta"))
        self.topology, self.inputs, self.forward = topology, inputs, forward
        self.tried: list[Tried] = []
        self.bound = self.least_bytes = inf
        self._costs: dict[tuple[tuple[int, int], int], ModuleCosts] = {}
        self._problems: dict[tuple[ModuleCosts, bool], ModuleProblem | float] = {}

    def run(
        self,
        shapes: Sequence[tuple[int, int]],
        memory: float,
        pinned: Mapping[str, Placement],
        experts: Sequence[int] = (),
    ) -> list[Found]:
        """The best plan of these shapes with the pinned placements, and the plan of the longest data axis with close
        costs, which is simpler; empty if no choices fit in memory.

        Args:
            experts: sizes of an axis of experts to try on a data axis of all ranks.

        Raises:
            PlanError: no plan has the pinned placements.
        """
        self.tried, self.bound = [], inf
        found: list[Found] = []
        limit, everyone = inf, (self.topology.ranks, 1)
        for shape, ranks in [*((shape, 1) for shape in shapes), *((everyone, n) for n in experts)]:
            one = self._on(shape, ranks, memory, pinned, limit)
            if one is not None:
                found.append(one)
                limit = min(limit, CLOSE * one.seconds)
        best = min(found, key=lambda one: one.seconds, default=None)
        if best is None:
            return []
        close = [one for one in found if one.seconds <= limit and one.costs.shape[0] > best.costs.shape[0]]
        return [best, *sorted(close, key=lambda one: -one.costs.shape[0])[:1]]

    def _costs_on(self, shape: tuple[int, int], experts: int) -> ModuleCosts:
        if (shape, experts) not in self._costs:
            if experts > 1:
                found: ModuleCosts = ExpertCosts(self._costs_on(shape, 1), self.module, experts)
            else:
                graph = trace_module(self.module, step_of(self.inputs, self.forward, shape[0]))
                found = ModuleCosts(graph, shape, self.topology)
            self._costs[shape, experts] = found
        return self._costs[shape, experts]

    def _on(
        self, shape: tuple[int, int], experts: int, memory: float, pinned: Mapping[str, Placement], limit: float
    ) -> Found | None:
        """The best choices on a shape, if they may take less than `limit` seconds."""
        costs = self._costs_on(shape, experts)
        found: list[Found] = []
        least = inf
        for reshard in (False, True)[: 1 + (shape[0] > 1)]:
            problem = self._problem(costs, reshard, limit)
            if isinstance(problem, float):
                least = min(least, problem)
            else:
                found += self._within_memory(problem, costs, reshard, memory, problem.forced(pinned))
        self.bound = min([self.bound, *(one.bound for one in found)])
        chosen = min(found, key=lambda one: one.seconds, default=None)
        seconds = chosen.seconds if chosen is not None else least if least < inf else None
        self.tried.append(Tried(shape, seconds, chosen is None and seconds is not None, experts))
        return chosen

    def _problem(self, costs: ModuleCosts, reshard: bool, limit: float) -> ModuleProblem | float:
        """The problem, or a bound that reaches the limit."""
        known = self._problems.get((costs, reshard))
        if known is None or (isinstance(known, float) and known < limit):
            with costs.clock.running():
                known = self._problems[costs, reshard] = module_problem(costs, reshard, limit)
        return known

    def _within_memory(
        self, problem: ModuleProblem, costs: ModuleCosts, reshard: bool, memory: float, forced: Forced
    ) -> Iterator[Found]:
        """The cheapest choices within the memory; None if there are none."""

        def at(price: float) -> Found:
            solution = problem.solve(price, forced)
            size, seconds = problem.bytes(solution), problem.seconds.cost(solution.choices)
            if seconds < REFUSED:
                self.least_bytes = min(self.least_bytes, size)
            bound = solution.bound - (price * memory if price else 0.0)
            return Found(problem, costs, solution, reshard, seconds, size, bound, price, forced)

        best = at(0.0)
        bound, low, high, price = best.bound, 0.0, None, 1e-14
        if best.seconds >= REFUSED:
            raise PlanError("plan_module: no op takes the placements that are pinned. Fix: pin fewer, or others.")
        if best.bytes > memory:
            best = at(DEAREST)
            for _ in range(ROUNDS if best.bytes <= memory or best.seconds >= REFUSED else 0):
                one = at(price)
                bound = max(bound, one.bound)
                # So dear may bytes be that choices which no plan has seem cheaper.
                if one.bytes <= memory or one.seconds >= REFUSED:
                    best, high = min(one, best, key=lambda found: found.seconds), price
                else:
                    low = price
                price = (low + high) / 2 if high is not None else 8 * low
        if best.bytes <= memory and best.seconds < REFUSED:
            yield best._replace(bound=min(bound, best.seconds))


def reasons_of(found: Found) -> list[Reason]:
    """The choice of each parameter and the next best one, with all others free to adapt."""
    graph, problem = found.costs.graph, found.problem
    chosen = problem.chosen(found.solution)
    numbers = {first: i for i, first in enumerate(sorted(set(graph.first)))}
    taken: dict[int, str] = {}
    for number, node in enumerate(graph.nodes):
        for value in node.operands if node.kind == OP else ():
            taken.setdefault(value.node, chosen[number].why)
    sharing: dict[int, list[int]] = {}
    for number, node in enumerate(graph.nodes):
        if node.kind == PARAMETER:
            sharing.setdefault(graph.first[number], []).append(number)
    found_reasons = []
    for first, parameters in sharing.items():
        at, own = numbers[first], problem.choices[first]
        others = []
        for k, choice in enumerate(own):
            if k != found.solution.choices[at]:
                other = problem.solve(found.price, {**found.forced, at: k})
                seconds = problem.seconds.cost(other.choices)
                if seconds < REFUSED:
                    others.append((seconds - found.seconds, problem.bytes(other) - found.bytes, choice.outputs[0]))
        more = min(others, key=lambda other: other[0] + found.price * other[1], default=(0.0, 0.0, None))
        placement = own[found.solution.choices[at]].outputs[0]
        stored = [found.costs.stored(number, placement) for number in parameters]
        placement, _, own_why = stored[0]
        why = "it is pinned" if at in found.forced else own_why or taken.get(first, "")
        names = [name for number in parameters for name in graph.names[graph.nodes[number].name]]
        size = sum(size for _, size, _ in stored)
        found_reasons.append(Reason(tuple(names), size, placement, why, more[2], more[0], more[1]))
    return found_reasons
