"""The three collectives of a step, without modules around them."""

from collections.abc import Sequence
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._collectives import Wait, count_comms
from shardwise._layout import Layout, Mesh, OnRanks, Placement, Replicate, Shard
from shardwise._redistribute.transfers import Exchange
from shardwise._rules.row_exchange import IdMessage, id_message
from shardwise._trace.comm_trace import CommEvent, Listener, listening_with
from shardwise.embedding.batch import make_batch
from shardwise.embedding.exchange import requests as requesting
from shardwise.embedding.exchange.engine import FIRST_CAPACITY, Capacities, Engine, Gradients, Results
from shardwise.embedding.exchange.owner import dense_gradient, new_stack
from shardwise.embedding.exchange.requests import request_bags
from shardwise.embedding.exchange.routes import make_routes
from shardwise.embedding.kernels import Kernels
from shardwise.embedding.plan import Table, make_plan
from shardwise.errors import MismatchError, RemoteRankError
from shardwise.testing import world


def full_table(rows: int, cols: int) -> Tensor:
    return torch.arange(rows * cols).view(rows, cols).remainder(17).float()


class Setup:
    """One table on `size` ranks, trained by SGD with a step of 1."""

    def __init__(self, size: int, placement: Placement, rows: int = 11, cols: int = 4) -> None:
        layout = Layout(Mesh((size,)), [placement], (rows, cols))
        self.plan = make_plan([Table("items", layout, "float32", ("item",))])
        device, numbers = torch.device("cpu"), range(len(self.plan.keys))
        self.stacks = [new_stack(self.plan, collectives.rank(), n, device, Kernels(), []) for n in numbers]
        for block in self.plan.blocks_of(collectives.rank(), 0):
            self.stacks[0].weight[:] = full_table(rows, cols)[
                block.rows.start : block.rows.stop, block.cols.start : block.cols.stop
            ]
        self.engine = Engine("test", self.plan, self.stacks, self.update, weighted=False)
        self.fails = False

    def update(self, gradients: Gradients) -> None:
        for stack, of_runs in zip(self.stacks, gradients, strict=True):
            stack.weight -= dense_gradient(stack, of_runs)

    def sums(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """The sums of bags of ids."""
        values = torch.tensor([i for bag in ids for i in bag], dtype=torch.int64)
        batch = make_batch(values, torch.tensor([len(bag) for bag in ids], dtype=torch.int64), None, [len(ids)])
        out = request_bags(self.engine.batch_index(batch.bags), batch)
        message = self.engine.message(out, ())
        requests = self.engine.receive(message.read(message.start()()))
        if self.fails:
            raise ValueError("between messages 1 and 2")
        found = Results.apply(self.engine.trigger_of_backward(), self.engine, out.results, requests)
        return found.view(len(ids), self.plan.dims[0])


def check_few_ids(placement: Placement, sparse: float) -> None:
    setup, bags, generator = Setup(4, placement, rows=64), 90, torch.Generator().manual_seed(collectives.rank())
    table = full_table(64, 4)
    for occupied in (0, 3, 9, 1):
        own: list[list[int]] = [[] for _ in range(bags)]
        for bag in torch.randperm(bags, generator=generator)[:occupied].tolist():
            own[bag] = torch.randint(64, (3,), generator=generator).tolist()
        with patch.object(requesting, "SPARSE", sparse):
            sums = setup.sums(own)
        assert sums.tolist() == [table[bag].sum(0).tolist() for bag in own]
        sums.sum().backward()
        for bag in collectives.gather_json(own, tuple(range(4))):
            for row in [row for ids in bag for row in ids]:
                table[row] -= 1


@pytest.mark.parametrize("sparse", [0.0, 1e9])
@pytest.mark.parametrize("placement", [Shard(0), Shard(0, (0, 50, 2, 12)), Shard(1), Replicate(), OnRanks(2)], ids=str)
def test_bags_of_which_few_have_an_id_are_summed_and_trained(placement: Placement, sparse: float) -> None:
    world(4).run(check_few_ids, placement, sparse)


@pytest.mark.parametrize("mesh", [Mesh((4,)), Mesh((2, 2))], ids=str)
@pytest.mark.parametrize("bags", [(20, 20, 20, 20), (20, 3, 0, 31)])
def test_runs_without_ids_need_not_be_numbered(mesh: Mesh, bags: tuple[int, ...]) -> None:
    placements: list[list[Placement]] = [
        [Shard(0)] * mesh.ndim,
        [Replicate()] * mesh.ndim,
        [*[Replicate()] * (mesh.ndim - 1), Shard(1)],
    ]
    shapes = [(9, 8), (5, 12), (7, 4)]
    tables = [
        Table(f"t{i}", Layout(mesh, per_axis, shape), "float32", (f"f{i}", f"g{i}")[: 1 + (i == 0)])
        for i, (per_axis, shape) in enumerate(zip(placements, shapes, strict=True))
    ]
    routes = make_routes(make_plan(tables), 1, torch.device("cpu"), Kernels())
    lengths = torch.zeros(sum(bags), dtype=torch.int64)
    lengths[[4, 21, 22, 41, -1]] = torch.tensor([2, 1, 3, 1, 1])
    batch = make_batch(torch.tensor([4, 8, 1, 1, 0, 1, 2, 3]), lengths, torch.rand(8), bags)
    found = []
    for sparse in (0.0, 1e9):
        with patch.object(requesting, "SPARSE", sparse):
            found.append(request_bags(requesting.make_batch_index(routes, bags), batch))
    numbered, occupied = found
    assert numbered.lengths is not None
    assert occupied.lengths is not None
    assert numbered.weights is not None
    assert torch.equal(numbered.lengths, occupied.lengths)
    assert torch.equal(numbered.rows, occupied.rows)
    assert occupied.weights is not None
    assert torch.equal(numbered.weights, occupied.weights)
    assert (numbered.runs, numbered.ids) == (occupied.runs, occupied.ids)
    assert (numbered.results.sent, numbered.results.received) == (occupied.results.sent, occupied.results.received)
    message = torch.rand(sum(numbered.results.received))
    assert torch.equal(numbered.results.combine(message), occupied.results.combine(message))
    gradient = torch.rand(numbered.results.num_units * numbered.results.unit)
    assert torch.equal(numbered.results.spread(gradient, torch.empty), occupied.results.spread(gradient, torch.empty))


ROWS = 1001  # so that sums stay exact


def calls_of_steps(sizes: Sequence[int]) -> list[int]:
    """The collectives of training steps in which rank 1 has bags of so many ids."""
    setup, found = Setup(2, Shard(0), rows=ROWS), []
    for step, size in enumerate(sizes):
        own = [[(7 * i + step) % ROWS for i in range(size if collectives.rank() else 3)]] * 2
        expected = F.embedding_bag(torch.tensor(own), expected_table(sizes, step), mode="sum")
        with count_comms() as comms:
            sums = setup.sums(own)
            assert torch.equal(sums.detach(), expected), (step, size)
            sums.sum().backward()
        found.append(comms.total_calls)
    return found


def expected_table(sizes: Sequence[int], steps: int) -> Tensor:
    table = full_table(ROWS, 4)
    for step, size in enumerate(sizes[:steps]):
        for count in (3, size):
            ids = torch.tensor([(7 * i + step) % ROWS for i in range(count)] * 2, dtype=torch.int64)
            table.index_add_(0, ids, torch.full((len(ids), 4), -1.0))
    return table


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.processes)])
def test_only_messages_longer_than_expected_cost_a_fourth_collective(real: bool) -> None:
    assert FIRST_CAPACITY == 1024
    sizes = [8, 4000, 4000, 4400, 8, 8, 8000, 8]
    assert world(2, real=real).run(calls_of_steps, sizes) == [[3, 4, 3, 3, 3, 3, 4, 3]] * 2


def exchange_random(size: int, in_flight: int) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 3000, (6, size, size), generator=generator).tolist()
    capacities, ranks, me = Capacities(size), tuple(range(size)), collectives.rank()
    started: list[tuple[int, IdMessage, Wait]] = []

    def finish(step: int, ids: IdMessage, wait: Wait) -> None:
        reply = ids.read(wait())
        assert reply.headers == [[source, me] for source in ranks]
        assert reply.lengths == [of_source[me] for of_source in lengths[step]]
        capacities.adapt(ids.lengths, reply.lengths)
        assert [x.tolist() for x in reply.messages()] == [
            [100 * step + 10 * source + me] * lengths[step][source][me] for source in ranks
        ]

    for step, table in enumerate(lengths):
        sent = [torch.full((n,), 100 * step + 10 * me + to, dtype=torch.int32) for to, n in enumerate(table[me])]
        halves = [list(x.split([len(x) // 2, len(x) - len(x) // 2])) for x in sent]
        ids = id_message(Exchange(ranks), halves, [[me, to] for to in ranks], capacities.sent, capacities.received)
        started.append((step, ids, ids.start()))
        if len(started) == in_flight:
            finish(*started.pop(0))
    for one in started:
        finish(*one)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_messages_of_any_lengths_arrive(size: int, in_flight: int) -> None:
    world(size).run(exchange_random, size, in_flight)


def test_ranks_that_start_a_message_for_another_batch_all_raise() -> None:
    def started_differently(ahead: Sequence[int]) -> None:
        setup = Setup(3, Shard(0))
        nothing = torch.zeros(0, dtype=torch.int64)
        request = request_bags(setup.engine.batch_index((0,)), make_batch(nothing, nothing, None, [0]))
        message = setup.engine.message(request, (), ahead[collectives.rank()])
        text = r"^Rank 0 does not prefetch .* and rank 1 prefetches 2 ahead\. Nothing was"
        with pytest.raises(MismatchError, match=text):
            setup.engine.check_ahead(message.read(message.start()()))

    world(3).run(started_differently, (0, 2, 0))


def fail_on_rank_1() -> None:
    setup = Setup(3, Shard(0))
    setup.fails = collectives.rank() == 1  # after it has sent its ids
    before = setup.stacks[0].weight.clone()
    if setup.fails:
        setup.sums([[1, 2, 9]])
    with pytest.raises(RemoteRankError, match="between messages 1 and 2"):
        setup.sums([[1, 2, 9]])
    assert torch.equal(setup.stacks[0].weight, before)


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.processes)])
def test_a_rank_that_raises_between_messages_ends_all(real: bool) -> None:
    with pytest.raises(ValueError, match="between messages 1 and 2"):
        world(3, real=real).run(fail_on_rank_1)


@world(3)
def test_fewer_results_than_bags_are_sent_if_few_bags_have_ids() -> None:
    setup = Setup(3, Shard(0), rows=300, cols=64)
    with count_comms() as comms:
        sums = setup.sums([[i * 3] for i in range(100)])  # each is on one rank only
    results = comms.total_bytes
    assert torch.equal(sums.detach(), full_table(300, 64)[::3])
    assert results < 100 * 64 * 4 + 3 * 8 * FIRST_CAPACITY


class Events(Listener):
    """The purposes and bytes of events, and the bytes of their collectives."""

    def __init__(self) -> None:
        self.said: list[tuple[str, int]] = []
        self.sent: list[int] = []

    def record(self, event: CommEvent) -> None:
        self.said.append((str(event), event.sent_bytes))
        self.sent.append(0)

    def collective(self, kind: str, sent_bytes: int, event: CommEvent | None) -> None:
        assert event is not None
        self.sent[-1] += sent_bytes


@pytest.mark.parametrize("count", [3, 4000])
@world(3)
def test_the_trace_says_what_is_sent_and_how_much(count: int) -> None:
    setup, events = Setup(3, Shard(0), rows=ROWS), Events()
    with listening_with(events):
        setup.sums([list(range(count // 4))] * 4).sum().backward()
    assert [text for text, _ in events.said] == [
        "ids of an embedding collection, test",
        *(["ids of an embedding collection, test"] if count > FIRST_CAPACITY else []),
        "results of an embedding collection, test",
        "gradients of an embedding collection in backward, test",
    ]
    assert [n for _, n in events.said] == events.sent
