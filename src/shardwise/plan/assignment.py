"""Which option each table takes, and which ranks: the abstract problem, and the value of an assignment.

Two ranks of one host, tables a and b. An option has blocks, each of which needs a place:

    a   "table"    one block on one rank
    a   "column"   two blocks on different ranks
    b   "row"      one block that spans all ranks

What a block needs on each of its ranks is a row of numbers: bytes of memory, then an amount of each phase of a step,
such as bytes received. An option may need as much again on every rank, wherever its blocks are. A phase ends when its
slowest rank ends, so a step takes the sum of the largest times.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MEMORY = 0  # the first column of costs and loads
TOLERANCE = 1e-9  # relative, by which loads may exceed a limit, as floats do


@dataclass(frozen=True, eq=False)
class Option:
    """One way to shard a table.

    Attributes:
        label: what it is called.
        span: the ranks of each block: 1, those of a host, or all.
        cost: [blocks, span or 1, 1 + phases]: memory and amounts on each rank of a block; 1: equal on all.
        everywhere: [1 + phases]: what every rank needs besides, such as to request rows.
    """

    label: str
    span: int
    cost: Floats
    everywhere: Floats | float = 0.0

    def total(self, ranks: int) -> Floats:
        """The sum over all ranks, [1 + phases]."""
        found: Floats = self.cost.sum((0, 1)) * (self.span // self.cost.shape[1]) + ranks * self.everywhere
        return found

    @cached_property
    def largest(self) -> Floats:
        """On any of its ranks, [1 + phases]."""
        found: Floats = self.cost.max((0, 1)) + self.everywhere
        return found

    @cached_property
    def largest_block(self) -> Floats:
        """The sum over the ranks of a block, [1 + phases]."""
        found: Floats = self.cost.sum(1).max(0) * (self.span // self.cost.shape[1])
        return found

    @cached_property
    def blocks_are_equal(self) -> bool:
        return bool((self.cost == self.cost[:1]).all())


@dataclass(frozen=True, eq=False)
class Ranks:
    """Where blocks are placed.

    Attributes:
        memory: bytes of each rank for the tables.
        inside: seconds of an amount on a rank, [phases].
        between: seconds of an amount on the link of a host, that of all its ranks, [phases]; 0 where none crosses it.
    """

    hosts: int
    per_host: int
    memory: float
    inside: Floats
    between: Floats

    @property
    def count(self) -> int:
        return self.hosts * self.per_host

    def times(self, loads: Floats) -> Floats:
        """How long each phase takes, [phases], of what each rank has to do, [ranks, 1 + phases]."""
        of_hosts = loads.reshape(self.hosts, self.per_host, -1).sum(1)
        found: Floats = np.maximum(loads.max(0)[1:] * self.inside, of_hosts.max(0)[1:] * self.between)
        return found

    def fit(self, loads: Floats) -> bool:
        """Whether no rank has more than its memory."""
        return bool(loads[:, MEMORY].max() <= self.memory * (1 + TOLERANCE))


@dataclass(frozen=True, eq=False)
class Problem:
    """The options of each table, and the ranks.

    Attributes:
        limits: for all options in one list, [limits, options]: the sum over those that are chosen is not above 0. A
            search need not keep them: who set them knows what an assignment costs that does not.
    """

    options: Sequence[Sequence[Option]]
    ranks: Ranks
    limits: Floats | None = None

    @cached_property
    def starts(self) -> Ints:
        """Where the options of each table start if all are in one list, and their number."""
        return np.cumsum([0, *map(len, self.options)])

    @cached_property
    def total(self) -> Floats:
        """Of all options in one list, [options, 1 + phases]."""
        return np.array([option.total(self.ranks.count) for of_table in self.options for option in of_table])

    @cached_property
    def largest(self) -> Floats:
        """What the busiest rank of an option needs in each phase, in seconds, [options, phases]."""
        every = [option.largest for of_table in self.options for option in of_table]
        found: Floats = np.array(every)[:, 1:] * self.ranks.inside
        return found

    @cached_property
    def fastest(self) -> Floats:
        """The shortest time of each phase that an option allows, whatever else there is, [options, phases]."""
        ranks, every = self.ranks, [option for of_table in self.options for option in of_table]
        blocks = np.array([
            option.largest_block + ranks.per_host * option.everywhere
            if option.span <= ranks.per_host
            else option.total(ranks.count) / ranks.hosts
            for option in every
        ])  # fmt: skip
        found: Floats = np.maximum(self.largest, blocks[:, 1:] * self.ranks.between)
        return found

    @cached_property
    def least(self) -> Floats:
        """What every rank needs at least in each phase, in seconds, [options, phases]."""
        every = [
            option.everywhere + option.cost.min((0, 1)) * (option.span == self.ranks.count)
            for of_table in self.options
            for option in of_table
        ]
        found: Floats = np.array(every)[:, 1:] * self.ranks.inside
        return found

    @cached_property
    def fits(self) -> NDArray[np.bool_]:
        """Which options have no rank with more than its memory, [options]."""
        every = [option.largest[MEMORY] for of_table in self.options for option in of_table]
        return np.array(every) <= self.ranks.memory * (1 + TOLERANCE)


@dataclass(frozen=True, eq=False)
class Assignment:
    """A solution.

    Attributes:
        choice: the option of each table.
        places: of each table, the place of each of its blocks: a rank, a host, or 0 for all ranks.
        loads: of each rank, [ranks, 1 + phases].
    """

    choice: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]
    loads: Floats
    times: Floats

    @property
    def value(self) -> float:
        """The time of a step."""
        return float(self.times.sum())


def assignment_of(problem: Problem, choice: Sequence[int], places: Sequence[Sequence[int]]) -> Assignment:
    """The loads and times of a choice of options and their places."""
    loads = np.zeros((problem.ranks.count, len(problem.ranks.inside) + 1))
    for of_table, chosen, where in zip(problem.options, choice, places, strict=True):
        option = of_table[chosen]
        loads += option.everywhere
        for cost, place in zip(option.cost, where, strict=True):
            loads[place * option.span : (place + 1) * option.span] += cost
    return Assignment(tuple(choice), tuple(map(tuple, places)), loads, problem.ranks.times(loads))
