"""The search for an assignment near its bound: chooses options, places the largest first, then moves and swaps blocks.

The search is deterministic: limits are numbers of tries, not seconds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from shardwise.plan.assignment import MEMORY, Assignment, Floats, Ints, Option, Problem, assignment_of
from shardwise.plan.bound import MOST_BINARIES, Bound, num_binaries, solve_exactly

# Of the times of the bound, what the largest block may take: smaller blocks cost more and fit better. Above 1, because
# the bound mixes options of a table, and the smaller one of two may cost much more than their mix.
LARGEST_SHARES = (1.25, 1.0, 0.9, 0.7, 0.5, 0.35, 0.2)
MOST_IMPROVED = 8000  # blocks times ranks of the starts that are improved, but at least two starts
MOST_STEPS = 3000  # moves and swaps of a round
MOST_ROUNDS = 12
CLOSER = 0.7  # aim of the next round, as a share of the distance to the bound
WORST_RANKS = 6  # ranks from which blocks are moved
MOST_PARTNERS = 600  # blocks that may be swapped with those of a rank
CLOSE = 1e-5  # relative gap at which the exact solver's result counts as optimal
MEMORY_WEIGHT = 100.0  # weight of memory beyond the limit, relative to the time of a step


@dataclass(frozen=True, eq=False)
class Found:
    """The best assignment found, and the bound.

    Attributes:
        value: of the bound.
        assignment: the best one; None if none fits in memory.
    """

    value: float
    assignment: Assignment | None

    @property
    def gap(self) -> float:
        """The excess of the assignment over the bound, as a share of the bound."""
        assert self.assignment is not None
        return max(0.0, self.assignment.value / self.value - 1) if self.value else 0.0


def solve(problem: Problem, bound: Bound) -> Found:
    """The best assignment found; for small problems, the optimum."""
    proved, exact = bound.value, None
    if num_binaries(problem) <= MOST_BINARIES:
        exact, proved = solve_exactly(problem, bound)
        proved = max(proved, bound.value)
        if proved == np.inf:
            return Found(proved, None)
        if exact is not None and problem.ranks.fit(exact.loads) and exact.value <= proved * (1 + CLOSE):
            return Found(proved, exact)
    starts = sorted(_starts(problem, bound), key=_Packing.rank)
    improved = max(2, MOST_IMPROVED // (problem.ranks.count * sum(map(len, starts[0].places))))
    found = [packing.improve() for packing in starts[:improved]] + ([exact] if exact is not None else [])
    best = min(found, key=lambda x: (not problem.ranks.fit(x.loads), x.value))
    return Found(proved, best if problem.ranks.fit(best.loads) else None)


def replacements(problem: Problem, found: Assignment, table: int) -> Iterator[tuple[int, Assignment]]:
    """For each other option of a table an assignment with it, placed as well as possible; other tables stay."""
    times = np.maximum(found.times, found.times.max() * 1e-3)
    packing = _Packing(problem, Bound(found.value, times, np.zeros(0), np.zeros(len(problem.total))))
    packing.loads += found.loads
    packing.hosts += found.loads.reshape(problem.ranks.hosts, problem.ranks.per_host, -1).sum(1)
    packing.chosen, packing.places = list(found.choice), list(found.places)
    packing.remove(table)
    for option in range(len(problem.options[table])):
        if option != found.choice[table]:
            packing.place(table, option)
            places, loads = tuple(map(tuple, packing.places)), packing.loads.copy()
            yield option, Assignment(tuple(packing.chosen), places, loads, problem.ranks.times(loads))
            packing.remove(table)


def _starts(problem: Problem, bound: Bound) -> Iterator["_Packing"]:
    """Assignments for different choices of options; the last one needs the least memory."""
    seen = set()
    filled = (problem.fastest / np.maximum(bound.times, 1e-30)).max(1)  # the share of a phase that a block takes
    for choice in [*(_cheapest(problem, bound, filled, share) for share in LARGEST_SHARES), _smallest(problem)]:
        if choice not in seen:
            seen.add(choice)
            packing = _Packing(problem, bound)
            at = problem.starts[:-1] + choice
            size = filled[at] + problem.most[at, MEMORY] / problem.ranks.memory
            span = np.array([problem.every[number].span for number in at])
            for table in np.lexsort((-size, -span)):  # a block on all ranks has no choice of place, so it comes first
                packing.place(int(table), choice[table])
            yield packing


def _cheapest(problem: Problem, bound: Bound, filled: Floats, share: float) -> tuple[int, ...]:
    """The option of each table that raises the bound least, among options with small enough blocks."""
    found = []
    for start, stop in pairwise(problem.starts):
        fits, of_table = problem.fits[start:stop], filled[start:stop]
        allowed = fits & (of_table <= share * (1 + 1e-6))
        if not allowed.any():
            allowed = fits & (of_table <= of_table[fits].min())
        cost = bound.reduced[start:stop] - 1e-12 * bound.shares[start:stop]  # among equal costs, the bound's choice
        found.append(int(np.where(allowed, cost, np.inf).argmin()))
    return tuple(found)


def _smallest(problem: Problem) -> tuple[int, ...]:
    """The option of each table whose fullest rank needs the least memory."""
    memory = problem.most[:, MEMORY]
    return tuple(int(memory[a:b].argmin()) for a, b in pairwise(problem.starts))


class _Packing:
    """Tables on ranks, and how much their loads exceed those of the bound.

    The cost of a load above the bound is the square of its excess, of ranks and of hosts, so several busy ranks cost
    more than one. The first column is memory, which costs most.
    """

    def __init__(self, problem: Problem, bound: Bound) -> None:
        self.problem, self.bound, ranks = problem, bound, problem.ranks
        columns = 1 + len(ranks.inside)
        self.weight = np.append(MEMORY_WEIGHT, bound.times / max(bound.times.sum(), 1e-30))
        self.by_host = bool(ranks.hosts > 1 and ranks.between.any())
        self.aim_at(bound.times)
        self.loads = np.zeros((ranks.count, columns))
        self.hosts = np.zeros((ranks.hosts, columns))
        self.chosen = [-1] * len(problem.options)
        self.places: list[Sequence[int]] = [()] * len(problem.options)
        self.holds = np.zeros((len(problem.options), ranks.count), bool)

    def aim_at(self, times: Floats) -> None:
        """Set the times above which loads cost."""
        ranks = self.problem.ranks
        with np.errstate(divide="ignore", invalid="ignore"):
            self.of_rank = np.append(ranks.memory, np.where(times > 0, times / ranks.inside, np.inf))
            self.of_host = np.append(np.inf, np.where(times > 0, times / ranks.between, np.inf))

    def rank(self) -> tuple[bool, float]:
        """The key by which packings are compared."""
        return not self.problem.ranks.fit(self.loads), float(self.problem.ranks.times(self.loads).sum())

    def assignment(self) -> Assignment:
        return assignment_of(self.problem, self.chosen, self.places)

    # ---- cost ------------------------------------------------------------------------------------------------

    def excess(self, loads: Floats) -> Floats:
        """The cost of the loads of ranks, [..., 1 + phases] to [...]."""
        return self._excess(loads, self.of_rank)

    def excess_of_hosts(self, loads: Floats) -> Floats:
        """The cost of the loads of hosts."""
        return self._excess(loads, self.of_host)

    def _excess(self, loads: Floats, limit: Floats) -> Floats:
        over = loads / limit  # one array: making large ones takes longer than computing them
        over -= 1
        np.maximum(over, 0, out=over)
        over *= over
        found: Floats = over @ self.weight
        return found

    def cost(self) -> float:
        """The cost of all ranks and hosts."""
        return float(self.excess(self.loads).sum()) + float(self.excess_of_hosts(self.hosts).sum())

    # ---- placing -----------------------------------------------------------------------------------------------

    def put(self, table: int, option: int, places: Sequence[int]) -> None:
        """Put an unplaced table at `places`."""
        self._add(table, option, places, 1)
        self.chosen[table], self.places[table] = option, places

    def remove(self, table: int) -> None:
        self._add(table, self.chosen[table], self.places[table], -1)
        self.chosen[table], self.places[table] = -1, ()

    def _add(self, table: int, option: int, places: Sequence[int], sign: int) -> None:
        one = self.problem.options[table][option]
        at = np.asarray(places)[:, None] * one.span + np.arange(one.span)
        self.loads[at] += sign * one.cost
        self.loads += sign * one.everywhere
        per_host = self.problem.ranks.per_host
        if one.span < len(self.loads):
            self.hosts += sign * per_host * one.everywhere
            blocks = np.broadcast_to(one.cost, (len(at), one.span, self.loads.shape[1])).sum(1)
            np.add.at(self.hosts, at[:, 0] // per_host, sign * blocks)
        else:
            self.hosts = self.loads.reshape(len(self.hosts), per_host, -1).sum(1)
        self.holds[table, at] = sign > 0

    def place(self, table: int, option: int) -> None:
        """Place each block of a table where it costs least; among equal costs, where it adds least to other loads."""
        one = self.problem.options[table][option]
        if one.span == len(self.loads):
            self.put(table, option, (0,))
            return
        if one.blocks_are_equal:
            order = np.argsort(self._score(one, one.cost[0]), kind="stable")[: len(one.cost)]
            self.put(table, option, tuple(sorted(order.tolist())))
            return
        pairs: list[tuple[int, int]] = []
        for block in np.argsort(-(one.cost.sum(1) / self.of_rank) @ self.weight, kind="stable"):
            score = self._score(one, one.cost[block])
            score[[place for _, place in pairs]] = np.inf
            pairs.append((int(block), int(score.argmin())))
        self.put(table, option, tuple(place for _, place in sorted(pairs)))

    def _score(self, option: Option, cost: Floats) -> Floats:
        """The score of each place for a block; less is better."""
        loads = self.loads.reshape(-1, option.span, self.loads.shape[1])
        scaled = cost / self.of_rank
        align = loads / self.of_rank @ (self.weight * 1e-3 * scaled.mean(0))
        score = self.excess(loads + cost).sum(1) - self.excess(loads).sum(1) + align.sum(1)
        if self.by_host:
            ranks_of_block = option.span if len(cost) == 1 else 1
            here = cost.sum(0) * ranks_of_block
            of_hosts = self.excess_of_hosts(self.hosts + here) - self.excess_of_hosts(self.hosts)
            of_hosts = of_hosts + self.hosts / self.of_host @ (self.weight * 1e-3 * here / self.of_host)
            score = score + np.repeat(of_hosts, len(score) // len(of_hosts))
        found: Floats = score
        return found

    # ---- improving ---------------------------------------------------------------------------------------------

    def improve(self) -> Assignment:
        """Aim at the times of the bound, then ever closer below the reached ones. Returns the best packing."""
        best, best_rank = self.assignment(), self.rank()
        for number in range(MOST_ROUNDS):
            self._improve()
            if self.rank() < best_rank:
                best, best_rank = self.assignment(), self.rank()
            elif number > 0:
                break
            self.aim_at(self.bound.times + CLOSER * np.maximum(best.times - self.bound.times, 0))
        return best

    def _improve(self) -> None:
        """Move and swap blocks of the worst ranks, or change options of their tables, while the cost falls."""
        blocks = _Blocks(self)
        for _ in range(MOST_STEPS):
            excess = self.excess(self.loads)
            if self.by_host:
                excess = excess + np.repeat(self.excess_of_hosts(self.hosts), self.problem.ranks.per_host)
            worst = [int(rank) for rank in np.argsort(-excess, kind="stable")[:WORST_RANKS] if excess[rank] > 1e-12]
            if any(blocks.improve(rank) for rank in worst):
                continue
            if not any(self._change_option(rank) for rank in worst):
                return
            blocks = _Blocks(self)

    def _change_option(self, rank: int) -> bool:
        """Take another option of a table on a rank if that costs less."""
        slack = max(0.0, float(self.problem.ranks.times(self.loads).sum()) - self.bound.value)
        before = self.cost()
        for table in np.flatnonzero(self.holds[:, rank]).tolist():
            start, chosen, places = int(self.problem.starts[table]), self.chosen[table], self.places[table]
            for option in range(len(self.problem.options[table])):
                number = start + option
                if option == chosen or not self.problem.fits[number] or self.bound.reduced[number] > slack:
                    continue
                self.remove(table)
                self.place(table, option)
                if self.cost() < before - 1e-12:
                    return True
                self.remove(table)
                self.put(table, chosen, places)
        return False


class _Blocks:
    """The blocks of one rank each in a packing, as arrays, so that many moves are compared at once."""

    def __init__(self, packing: _Packing) -> None:
        self.packing = packing
        cost: list[Floats] = []
        table, number, place = list[int](), list[int](), list[int]()
        for t, (chosen, places) in enumerate(zip(packing.chosen, packing.places, strict=True)):
            option = packing.problem.options[t][chosen]
            if option.span == 1:
                table += [t] * len(places)
                number += range(len(places))
                place += places
                cost.append(option.cost[:, 0])
        columns = packing.loads.shape[1]
        self.table, self.number, self.place = (np.array(x, np.int64) for x in (table, number, place))
        self.cost: Floats = np.concatenate(cost) if cost else np.zeros((0, columns))
        self.random = np.random.default_rng(0)

    def improve(self, rank: int) -> bool:
        """Make the best move or swap of a block of `rank`, if one costs less."""
        own = np.flatnonzero(self.place == rank)
        if not len(own):
            return False
        gain, block, place = self._best_move(rank, own)
        partner = -1
        swap = self._best_swap(rank, own)
        if swap[0] < gain:
            gain, block, partner = swap
            place = int(self.place[partner])
        if gain > -1e-12:
            return False
        self._move(block, place)
        if partner >= 0:
            self._move(partner, rank)
        return True

    def _best_move(self, rank: int, own: Ints) -> tuple[float, int, int]:
        packing, cost = self.packing, self.cost[own]
        loads = packing.loads
        now = packing.excess(loads)
        change = packing.excess(loads + cost[:, None]) - now
        change += (packing.excess(loads[rank] - cost) - now[rank])[:, None]
        if packing.by_host:
            change += self._of_hosts(rank, cost, np.arange(len(loads)))
        change[packing.holds[self.table[own]]] = np.inf
        at = int(change.argmin())
        return float(change.flat[at]), int(own[at // len(loads)]), at % len(loads)

    def _best_swap(self, rank: int, own: Ints) -> tuple[float, int, int]:
        packing = self.packing
        others = np.flatnonzero(self.place != rank)
        if not len(others):
            return np.inf, -1, -1
        if len(others) > MOST_PARTNERS:
            others = np.sort(self.random.choice(others, MOST_PARTNERS, replace=False))
        place = self.place[others]
        difference = self.cost[own][:, None] - self.cost[others]  # moves from `rank` to the other
        now = packing.excess(packing.loads)
        change = packing.excess(packing.loads[rank] - difference) - now[rank]
        change += packing.excess(packing.loads[place] + difference) - now[place]
        if packing.by_host:
            change += self._of_hosts(rank, difference, place)
        holds = packing.holds
        change[holds[self.table[own]][:, place] | holds[self.table[others], rank]] = np.inf
        at = int(change.argmin())
        return float(change.flat[at]), int(own[at // len(others)]), int(others[at % len(others)])

    def _of_hosts(self, rank: int, moved: Floats, places: Ints) -> Floats:
        """The change in the cost of hosts if `moved`, [blocks, 1 + phases] or for each place, goes to places."""
        packing, per_host = self.packing, self.packing.problem.ranks.per_host
        hosts, here, there = packing.hosts, rank // per_host, places // per_host
        now = packing.excess_of_hosts(hosts)
        if moved.ndim == 2:
            to = (packing.excess_of_hosts(hosts + moved[:, None]) - now)[:, there]
            away = (packing.excess_of_hosts(hosts[here] - moved) - now[here])[:, None]
        else:
            to = packing.excess_of_hosts(hosts[there] + moved) - now[there]
            away = packing.excess_of_hosts(hosts[here] - moved) - now[here]
        found: Floats = np.where(there == here, 0.0, to + away)
        return found

    def _move(self, block: int, place: int) -> None:
        packing, table, before = self.packing, int(self.table[block]), int(self.place[block])
        places = list(packing.places[table])
        places[int(self.number[block])] = place
        packing.places[table] = places
        per_host, cost = packing.problem.ranks.per_host, self.cost[block]
        packing.loads[before] -= cost
        packing.loads[place] += cost
        packing.hosts[before // per_host] -= cost
        packing.hosts[place // per_host] += cost
        packing.holds[table, before], packing.holds[table, place] = False, True
        self.place[block] = place
