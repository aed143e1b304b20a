"""The choice of an option and of ranks for each table: the abstract problem, and the value of an assignment.

Two ranks of one host, tables a and b. An option has blocks, which are placed:

    a   "table"    one block on one rank
    a   "column"   two blocks on different ranks
    b   "row"      one block that spans all ranks

The cost of a block on each of its ranks is a row of numbers: bytes of memory, then an amount for each phase of a step,
such as bytes received. An option may also have a cost on every rank, wherever its blocks are. A phase ends with its
slowest rank, so a step takes the sum of the largest times.
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
        label: its name.
        span: number of ranks of each block: 1, the ranks of a host, or all.
        cost: [blocks, span or 1, 1 + phases]: memory and amounts on each rank of a block; 1: equal on all.
        everywhere: [1 + phases]: further cost on every rank, such as for requests of rows.
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
        """The largest cost on any of its ranks, [1 + phases]."""
        found: Floats = self.cost.max((0, 1)) + self.everywhere
        return found

    @cached_property
    def blocks_are_equal(self) -> bool:
        return bool((self.cost == self.cost[:1]).all())


@dataclass(frozen=True, eq=False)
class Ranks:
    """The ranks on which blocks are placed.

    Attributes:
        memory: bytes of each rank for the tables.
        inside: seconds per amount on a rank, [phases].
        between: seconds per amount on the link of a host, by the sum of its ranks, [phases]; 0 if none crosses it.
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
        """The time of each phase, [phases], for loads of ranks, [ranks, 1 + phases]."""
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
        limits: over all options in one list, [limits, options]: the sum over the chosen options is at most 0. A search
            need not keep them: their author knows the cost of an assignment that does not.
    """

    options: Sequence[Sequence[Option]]
    ranks: Ranks
    limits: Floats | None = None

    @cached_property
    def starts(self) -> Ints:
        """The first index of each table's options in one list of all, and the length of the list."""
        return np.cumsum([0, *map(len, self.options)])

    @cached_property
    def every(self) -> list[Option]:
        """All options in one list."""
        return [option for of_table in self.options for option in of_table]

    @cached_property
    def everywhere(self) -> Floats:
        """The cost on every rank, [options, 1 + phases]."""
        return np.array([np.zeros(1 + len(self.ranks.inside)) + option.everywhere for option in self.every])

    @cached_property
    def _of_ranks(self) -> tuple[Floats, Ints]:
        """The cost of each rank of each block, and where the ranks of each option start: arrays of all are fast."""
        rows = [option.cost.reshape(-1, option.cost.shape[2]) for option in self.every]
        return np.concatenate(rows), np.cumsum([0, *map(len, rows[:-1])])

    @cached_property
    def _of_blocks(self) -> tuple[Floats, Ints]:
        """The cost of each block on all its ranks together, and where the blocks of each option start."""
        blocks = [len(option.cost) for option in self.every]
        width = np.repeat([option.cost.shape[1] for option in self.every], blocks)
        span = np.repeat([option.span for option in self.every], blocks)
        sums = np.add.reduceat(self._of_ranks[0], np.cumsum(width) - width) * (span // width)[:, None]
        return sums, np.cumsum([0, *blocks[:-1]])

    @cached_property
    def total(self) -> Floats:
        """The sum over all ranks, [options, 1 + phases]."""
        found: Floats = np.add.reduceat(*self._of_blocks) + self.ranks.count * self.everywhere
        return found

    @cached_property
    def most(self) -> Floats:
        """The cost on the busiest rank of an option, [options, 1 + phases]."""
        found: Floats = np.maximum.reduceat(*self._of_ranks) + self.everywhere
        return found

    @property
    def largest(self) -> Floats:
        """The largest cost of each phase, in seconds, [options, phases]."""
        return self.most[:, 1:] * self.ranks.inside

    @cached_property
    def fastest(self) -> Floats:
        """The shortest time of each phase that an option allows, whatever the others are, [options, phases]."""
        ranks = self.ranks
        of_host = np.maximum.reduceat(*self._of_blocks) + ranks.per_host * self.everywhere
        spans_hosts = np.array([option.span > ranks.per_host for option in self.every])
        of_host[spans_hosts] = self.total[spans_hosts] / ranks.hosts
        found: Floats = np.maximum(self.largest, of_host[:, 1:] * ranks.between)
        return found

    @property
    def least(self) -> Floats:
        """The least time of every rank in each phase, in seconds, [options, phases]."""
        of_all = np.array([option.span == self.ranks.count for option in self.every])
        found: Floats = self.everywhere + np.minimum.reduceat(*self._of_ranks) * of_all[:, None]
        return found[:, 1:] * self.ranks.inside

    @cached_property
    def fits(self) -> NDArray[np.bool_]:
        """Whether all ranks of each option have enough memory, [options]."""
        return self.most[:, MEMORY] <= self.ranks.memory * (1 + TOLERANCE)


@dataclass(frozen=True, eq=False)
class Assignment:
    """A solution.

    Attributes:
        choice: the option of each table.
        places: for each table, the place of each block: a rank, a host, or 0 for all ranks.
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
