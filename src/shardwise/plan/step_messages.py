"""The bytes that each rank sends in a step of a sharded collection, from the functions that size its messages."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from shardwise._layout import Layout, Mesh, Placement
from shardwise._lookups.bad_ids import Verdict
from shardwise._redistribute.transfers import Exchange
from shardwise._rules.row_exchange import IdMessage, id_message
from shardwise.embedding.batch import Batch, IdRules, features_of
from shardwise.embedding.configs import EmbeddingBagConfig
from shardwise.embedding.exchange.engine import Capacities
from shardwise.embedding.exchange.requests import IdRequest, PoolingChoice, make_batch_index, request_rows
from shardwise.embedding.exchange.routes import Routes, make_routes
from shardwise.embedding.jagged import KeyedJaggedTensor
from shardwise.embedding.kernels import Kernels
from shardwise.embedding.plan import Table, make_plan
from shardwise.plan.assignment import Ints
from shardwise.plan.table_request import Request


class StepBytes(NamedTuple):
    """The bytes that each rank sends to others in a step, [ranks]."""

    ids: Ints
    results: Ints
    gradients: Ints

    @property
    def total(self) -> Ints:
        """All three messages."""
        return self.ids + self.results + self.gradients


class _Rank:
    """The requests of one rank, batch after batch."""

    def __init__(self, routes: Routes, by_bags: bool, element_size: int) -> None:
        self.routes, self.by_bags = routes, by_bags
        self.pooling, self.capacities = PoolingChoice(element_size), Capacities(len(routes.plan.ranks))

    def request(self, batch: Batch) -> IdRequest:
        index = make_batch_index(self.routes, batch.bags)
        if self.by_bags:
            return self.pooling.request(index, batch)
        feature = index.feature_of_bag[batch.bag]
        dims = self.routes.dims[feature]
        return request_rows(self.routes, batch.values, feature, dims.cumsum(0) - dims, int(dims.sum()))

    def message(self, request: IdRequest, verdict: Verdict) -> IdMessage:
        """Message 1, not sent."""
        plan, capacities = self.routes.plan, self.capacities
        count = len(plan.ranks)
        headers = [[0, *verdict, *header] for header in request.headers(count)]
        return id_message(Exchange(plan.ranks), request.messages(count), headers, capacities.sent, capacities.received)


def step_messages(
    request: Request, placements: Mapping[str, Placement], batches: Sequence[KeyedJaggedTensor], steps: int
) -> StepBytes:
    """The bytes of the last of several equal steps.

    Raises:
        IdError: the error that a step would raise on every rank.
    """
    mesh = Mesh((request.topology.ranks,))
    tables = [
        Table(
            config.name,
            Layout(mesh, (placements[config.name],), (config.num_embeddings, config.embedding_dim)),
            str(config.data_type).removeprefix("torch."),
            tuple(config.feature_names),
        )
        for config in request.tables
    ]
    plan, by_bags = make_plan(tables), isinstance(request.tables[0], EmbeddingBagConfig)
    features, sizes = features_of(request.tables), request.dtypes
    rules = IdRules(features, skips_padding=by_bags)
    cpu = torch.device("cpu")
    given = [rules.apply(features.batch(batch, request.weighted, cpu)) for batch in batches]
    rules.raise_for([verdict for _, verdict in given], plan.ranks)
    ranks = [_Rank(make_routes(plan, rank, cpu, Kernels()), by_bags, sizes.forward.itemsize) for rank in plan.ranks]
    for _ in range(steps):
        requests = [one.request(batch) for one, (batch, _) in zip(ranks, given, strict=True)]
        messages = [
            one.message(of_rank, verdict) for one, of_rank, (_, verdict) in zip(ranks, requests, given, strict=True)
        ]
        ids = _bytes_of_ids(messages)
        lengths = np.array([message.lengths for message in messages])
        for number, one in enumerate(ranks):
            one.capacities.adapt(lengths[number].tolist(), lengths[:, number].tolist())
    received, sent = (np.array([getattr(x.results, name) for x in requests]) for name in ("received", "sent"))
    np.fill_diagonal(received, 0)
    np.fill_diagonal(sent, 0)
    return StepBytes(ids, received.sum(0) * sizes.forward.itemsize, sent.sum(1) * sizes.backward.itemsize)


def _bytes_of_ids(messages: Sequence[IdMessage]) -> Ints:
    """Bytes of message 1 of each rank: the capacities, then the excess of longer messages."""
    found = []
    for rank, message in enumerate(messages):
        pairs = [pair for other, pair in enumerate(zip(message.lengths, message.sent, strict=True)) if other != rank]
        elements = sum(message.header_size + capacity + max(0, length - capacity) for length, capacity in pairs)
        found.append(elements * message.first.element_size())
    return np.array(found, np.int64)
