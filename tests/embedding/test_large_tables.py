"""Requests of tables with more than 2^31 rows: plans only, no memory."""

import pytest
import torch

from shardwise._layout import Layout, Mesh, OnRanks, Placement, Shard
from shardwise.embedding.batch import make_batch
from shardwise.embedding.exchange.requests import make_batch_index, make_routes, request_bags
from shardwise.embedding.kernels import Kernels
from shardwise.embedding.plan import Plan, Table, make_plan, requests_of
from tests.embedding.kernel_cases import KERNELS

RANKS = 4
HUGE = 3 * 2**31 + 5
PLANS: dict[str, list[tuple[Placement, int]]] = {
    "rows of ranks fit 32 bits": [(Shard(0), HUGE)],
    "rows of a rank do not": [(OnRanks(1), HUGE), (OnRanks(1), 2**31 + 7)],
    "stacks of small tables do not": [(OnRanks(2), 2**30)] * 3,
    "one table does": [(OnRanks(2), 2**30), (Shard(0, (1, 0, 5, HUGE - 6)), HUGE)],
}


def requested(plan: Plan, kernels: Kernels, ids: list[list[int]]) -> list[tuple[int, int]]:
    """The owner and the row of its stack of every id, one bag for each feature."""
    values = torch.tensor([i for bag in ids for i in bag])
    batch = make_batch(values, torch.tensor([len(bag) for bag in ids]), None, [1] * len(ids))
    routes = make_routes(plan, requests_of(plan, 0), torch.device("cpu"), kernels)
    outgoing = request_bags(make_batch_index(routes, batch.bags), batch)
    ends = outgoing.ids[:: len(plan.keys)]
    rows = outgoing.rows.tolist()
    return [(owner, row) for owner in range(RANKS) for row in rows[ends[owner] : ends[owner + 1]]]


def expected(plan: Plan, ids: list[list[int]]) -> list[tuple[int, int]]:
    """The same, of the boxes of the layouts, which are below each other on each rank."""
    found = []
    below = [0] * RANKS
    for table, bag in zip(plan.tables, ids, strict=True):
        for rank in range(RANKS):
            for box in table.layout.boxes(rank):
                first, rows = box.offsets[0], box.sizes[0] if box.numel else 0
                found += [(rank, below[rank] + i - first) for i in bag if first <= i < first + rows]
                below[rank] += rows
    return found


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("name", PLANS)
def test_every_id_is_requested_from_its_owner(name: str, kernels: Kernels) -> None:
    tables = [
        Table(f"t{number}", Layout(Mesh((RANKS,)), [placement], (rows, 4)), "float32", (f"f{number}",))
        for number, (placement, rows) in enumerate(PLANS[name])
    ]
    plan = make_plan(tables)
    ids = [
        sorted(
            {i for near in (0, 2**31, 2**32, rows // RANKS, rows) for i in range(near - 8, near + 8) if 0 <= i < rows}
        )
        for _, rows in PLANS[name]
    ]
    assert sorted(requested(plan, kernels, ids)) == sorted(expected(plan, ids))
