"""The cost of a table's shard on its rank: memory, and the work of each phase of a training step.

A step of a sharded collection has six phases. Ranks wait for each other between them; nothing overlaps:

    requests    all ranks make messages of ids, add up the sums that they receive, and spread gradients (seconds)
    ids         owners of rows receive the ids of all ranks (bytes)
    lookup      they read the rows, and add those of each bag (seconds)
    results     they send the sums back (bytes)
    gradients   they receive the gradients of the sums (bytes)
    update      they add up the gradients of each row, and update it with its states (seconds)

Requests take equal time on all ranks, so they are one phase, with messages in between. A message has a run for each bag
at each owner, unless many are empty, or for each distinct row. The collection decides this for all tables together
(`embedding/exchange/requests.py`), so costs are computed for each `Form` of messages.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from typing import Annotated, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise._layout import Kind, checked, checked_init
from shardwise.embedding.configs import EmbeddingBagConfig, EmbeddingConfig
from shardwise.embedding.exchange.engine import SPARE
from shardwise.embedding.exchange.requests import MOST_RUNS, SPARSE
from shardwise.embedding.jagged import KeyedJaggedTensor
from shardwise.embedding.optimizers import RowOptimizer
from shardwise.errors import ConfigError, did_you_mean
from shardwise.plan.assignment import Floats, Ints
from shardwise.simulation.topology import Topology

PHASES = ("requests", "ids", "lookup", "results", "gradients", "update")
COMPUTED = (0, 2, 5)  # phases whose amounts are seconds; those of others are bytes
INDEX_BYTES = 80  # read and written to compute where one unit of a message belongs: ten integers

Numbers = Annotated[
    float | Mapping[str, float],
    Kind(
        "a number, or a number for each feature",
        lambda x: all(isinstance(n, int | float) for n in (x.values() if isinstance(x, Mapping) else [x])),
    ),
]  # fmt: skip


@checked_init
@dataclass(frozen=True)
class BatchShape:
    """The number of ids in a batch.

    Args:
        bags: number of samples in the batch of each rank.
        ids_per_bag: of each feature, on average; a number for all, or by name. Features without a name here have 1.

    Raises:
        ConfigError: numbers below 0, or no bag.
    """

    bags: int
    ids_per_bag: Numbers = 1.0

    def __post_init__(self) -> None:
        if self.bags < 1:
            raise ConfigError(f"BatchShape: bags is {self.bags}, expected 1 or more. Fix: the batch size of a rank.")
        each = (
            self.ids_per_bag.items() if isinstance(self.ids_per_bag, Mapping) else [("all features", self.ids_per_bag)]
        )
        for name, number in each:
            if not 0 <= number < np.inf:
                raise ConfigError(
                    f"BatchShape: ids_per_bag of {name} is {number}, expected 0 or more. Fix: the mean of its lengths."
                )

    @classmethod
    @checked
    def of(cls, features: KeyedJaggedTensor) -> "BatchShape":
        """The shape of a batch."""
        bags = features.stride_per_key()
        ids = zip(features.keys(), features.length_per_key(), bags, strict=True)
        return cls(max(bags), {name: n / max(of_key, 1) for name, n, of_key in ids})

    def of_feature(self, name: str) -> float:
        """Ids of a bag."""
        return self.ids_per_bag.get(name, 1.0) if isinstance(self.ids_per_bag, Mapping) else self.ids_per_bag


class Form(Enum):
    """The runs in the messages of a collection."""

    BAGS = auto()  # each bag at each owner
    OCCUPIED = auto()  # each bag that has an id at the owner
    ROWS = auto()  # each distinct row


class Shards(NamedTuple):
    """Shards of a table, in arrays of equal length.

    Attributes:
        first: the first row.
        rows, cols: numbers of rows and columns.
    """

    first: Ints
    rows: Ints
    cols: Ints


@dataclass(frozen=True, eq=False)
class TableCosts:
    """A table, its ids, and the costs of its shards.

    Args:
        counts: relative frequencies of rows in lookups; None: all equal.
    """

    config: EmbeddingConfig
    topology: Topology
    batch: BatchShape
    optimizer: RowOptimizer | None
    weighted: bool
    message_bytes: tuple[int, int]  # bytes of an element of results, and of gradients
    unit: int = 1  # columns that divide those of all tables
    counts: Tensor | None = None
    _distinct: dict[float, Floats] = field(default_factory=dict)

    @property
    def message_bandwidth(self) -> float:
        return self.topology.message_bandwidth or self.topology.memory_bandwidth

    @property
    def update_bandwidth(self) -> float:
        return self.topology.update_bandwidth or self.topology.lookup_bandwidth

    @cached_property
    def ids(self) -> Floats:
        """Ids of each feature in the batch of a rank."""
        of_bag = [self.batch.of_feature(name) for name in self.config.feature_names]
        return self.batch.bags * np.array(of_bag, np.float64)

    @cached_property
    def shares(self) -> Floats | None:
        """The share of the ids that is in the first n rows, [rows + 1]."""
        if self.counts is None:
            return None
        total = self.counts.double().cumsum(0)
        return np.append(0.0, (total / total[-1].clamp(min=1)).numpy())

    def share(self, shards: Shards) -> Floats:
        """The share of the table's ids that is in the rows of each shard."""
        found: Floats
        if self.shares is None:
            found = shards.rows / self.config.num_embeddings
            return found
        found = self.shares[shards.first + shards.rows] - self.shares[shards.first]
        return found

    def distinct(self, shards: Shards, ids: float) -> Floats:
        """The expected number of distinct rows of each shard among `ids` ids of the table."""
        found: Floats
        if self.shares is None:
            found = -shards.rows * np.expm1(ids * np.log1p(-1 / max(self.config.num_embeddings, 1 + 1e-9)))
            return found
        if ids not in self._distinct:
            chance = -np.expm1(ids * np.log1p(-np.minimum(np.diff(self.shares), 1 - 1e-15)))
            self._distinct[ids] = np.append(0.0, chance.cumsum())
        total = self._distinct[ids]
        found = total[shards.first + shards.rows] - total[shards.first]
        return found

    def runs(self, shards: Shards, form: Form) -> Floats:
        """The runs that a rank requests of the owner of each shard."""
        found: Floats
        if form is Form.ROWS:
            found = np.sum([self.distinct(shards, n) for n in self.ids], axis=0)
            return found
        if form is Form.BAGS:
            return np.full(len(shards.rows), float(self.batch.bags * len(self.ids)))
        outside = 1 - np.minimum(self.share(shards), 1.0)
        of_feature = [1 - outside ** (n / self.batch.bags) for n in self.ids]
        found = self.batch.bags * np.sum(of_feature, axis=0)
        return found

    def choice_of_form(self, shards: Shards, copies: Ints | Floats, counts: Ints | Floats) -> Floats:
        """Numbers of each shard, whose sums over all tables decide the form of messages, [shards, 3].

        If the first sum is above 0, fewer than MOST_RUNS of the runs have an id. Rows are requested if the second, or
        then the third, with INDEXED_ID for each id, is not above 0: they save bytes of results.

        Args:
            copies: number of ranks that are requested for each shard.
            counts: number of shards equal to each.
        """
        bags, occupied, rows = (self.runs(shards, form) for form in Form)
        size = self.message_bytes[0] * shards.cols * counts
        few = copies * (MOST_RUNS * bags - occupied)
        return np.column_stack([few, (rows - bags) * size, (rows - occupied) * size])

    def memory(self, rows: Ints, cols: Ints) -> Floats:
        """Bytes of shards and of their gradients or optimizer states."""
        found = np.asarray(rows * cols * self.config.data_type.itemsize, np.float64)
        if self.optimizer is None:
            return 2 * found
        return found + 4.0 * rows * (cols * len(self.optimizer.of_elements) + len(self.optimizer.of_rows))

    def id_bytes(self, shards: Shards, form: Form) -> Floats:
        """Bytes of the message of ids from a rank to the owner of each shard."""
        runs = self.runs(shards, form)
        ids = runs if form is Form.ROWS else self.share(shards) * self.ids.sum()
        integers = ids * (2 if self.weighted else 1) + (0 if form is Form.ROWS else runs)
        found: Floats = integers * (4 if self.config.num_embeddings < 1 << 31 else 8)
        return found

    def costs(self, shards: Shards, form: Form, replicated: NDArray[np.bool_]) -> Floats:
        """Memory and the amounts of each phase on the rank of each shard, [shards, 1 + phases].

        Args:
            replicated: shards with a copy on each rank. A rank then answers only itself, and gets all gradients.
        """
        ranks, topology, config = self.topology.ranks, self.topology, self.config
        runs, id_bytes = self.runs(shards, form), self.id_bytes(shards, form)
        ids = runs if form is Form.ROWS else self.share(shards) * self.ids.sum()
        answered = np.where(replicated, 1, ranks)
        size, states = config.data_type.itemsize, 0 if self.optimizer is None else len(self.optimizer.of_elements)
        elements = runs * shards.cols
        lookup = answered * ids * shards.cols * size / topology.lookup_bandwidth
        lookup = lookup + answered * elements * 2 * 4 / self.message_bandwidth  # sums are made, and copied
        updated = np.minimum(self.distinct(shards, ranks * float(self.ids.sum())), ranks * ids)
        update = update_bytes(ranks * ids, updated, shards.cols, size, states) / self.update_bandwidth
        update = update + ranks * elements * 4 / self.message_bandwidth
        if self.optimizer is None:  # a dense gradient is filled with zeros
            update = update + shards.rows * shards.cols * size / topology.memory_bandwidth
        buffers = 2 * ranks * id_bytes + 4 * (answered + 2 * ranks) * elements
        return np.column_stack([
            self.memory(shards.rows, shards.cols) + buffers,
            np.zeros(len(runs)),
            (ranks - 1) * id_bytes * (1 + 1 / SPARE),
            lookup,
            np.where(replicated, 0, ranks - 1) * elements * self.message_bytes[0],
            (ranks - 1) * elements * self.message_bytes[1],
            update,
        ])  # fmt: skip

    def requests(self, shards: Shards, form: Form, answers: Floats, gradients: Floats) -> Floats:
        """Memory and the amounts of each phase on every rank, to request rows of each shard, [shards, 1 + phases].

        Args:
            answers: number of equal shards that send sums to a rank.
            gradients: number of equal shards that get gradients of a rank.
        """
        elements, unit = self.runs(shards, form) * shards.cols, np.gcd(self.unit, shards.cols)
        output = answers * self.num_outputs * shards.rows * shards.cols / self.config.num_embeddings
        received, sent, id_bytes = answers * elements, gradients * elements, gradients * self.id_bytes(shards, form)
        of_bags = self.runs(shards, Form.BAGS) * shards.cols
        numbered = (form is Form.BAGS) | (self.share(shards) * self.ids.sum() > SPARSE * self.runs(shards, Form.BAGS))
        indexed = {  # elements whose places are computed in each step
            Form.BAGS: np.zeros(len(elements)),
            Form.OCCUPIED: np.where(numbered, (answers + gradients) * of_bags, received + sent),
            Form.ROWS: received + sent,
        }[form]
        moved = 4 * (received + output + 2 * sent) + 2 * id_bytes + INDEX_BYTES * indexed / unit
        index = (
            np.zeros(len(elements)) if form is Form.BAGS else received + sent + output
        )  # bytes of the index of this step
        if isinstance(
            self.config, EmbeddingBagConfig
        ):  # the index of all bags is computed once, if a batch numbers their runs
            index = index + numbered * ((answers + 2 * gradients) * of_bags + output) + output
        found = np.zeros((len(elements), 1 + len(PHASES)))
        found[:, 0] = 4 * (2 * output + sent) + 8 * index / unit + id_bytes  # 2: with its gradient
        found[:, 1] = moved / self.message_bandwidth
        return found

    @property
    def num_outputs(self) -> float:
        """The number of rows in the results of a rank."""
        pooled = isinstance(self.config, EmbeddingBagConfig)
        return float(self.batch.bags * len(self.ids) if pooled else self.ids.sum())


def update_bytes(ids: Floats | float, distinct: Floats | float, cols: Ints | int, size: int, states: int) -> Floats:
    """Bytes that an update reads and writes: a gradient for each id; each distinct row and its states, twice."""
    return np.asarray(ids * cols * 4 + distinct * cols * 2 * (size + 4 * states))


def speeds(topology: Topology) -> tuple[Floats, Floats, float]:
    """Seconds per amount of each phase on a rank, and on a host for all its ranks; and the latencies of a step."""
    costs, ranks = topology.costs, topology.ranks
    inside, between = np.zeros(len(PHASES)), np.zeros(len(PHASES))
    inside[[*COMPUTED]] = 1 / topology.alone
    if topology.alone > 1:
        between[[*COMPUTED]] = 1 / topology.ranks_per_host
    if ranks == 1:
        return inside, between, 0.0
    sent = [phase for phase in range(len(PHASES)) if phase not in COMPUTED]
    per_byte = costs.inside["all_to_all"].per_byte / costs.bytes_per_second
    inside[sent] = per_byte / topology.alone
    if topology.alone > 1:
        between[sent] = per_byte / topology.ranks_per_host
    if topology.hosts > 1:
        leaves = (ranks - topology.ranks_per_host) / (ranks - 1)
        link = leaves * costs.between["all_to_all"].per_byte / costs.bytes_per_second
        between[sent] = np.maximum(between[sent], link)
    everyone = range(ranks)
    return inside, between, len(sent) * costs.seconds("all_to_all", everyone, everyone, 0)


def check_counts(config: EmbeddingConfig, counts: Tensor) -> None:
    """Raise a ConfigError unless there is a number of 0 or more for each row."""
    if counts.shape != (config.num_embeddings,) or counts.dtype != torch.int64:
        raise ConfigError(
            f"counts of table {config.name}: expected an int64 for each of {config.num_embeddings} rows, got "
            f"{tuple(counts.shape)} of {counts.dtype}. Fix: count_rows(config, batches)."
        )
    if bool((counts < 0).any()):
        raise ConfigError(f"counts of table {config.name} has a number below 0. Fix: count_rows(config, batches).")


def check_features(batch: BatchShape, names: set[str]) -> None:
    """Raise a ConfigError if the batch has ids of a feature that no table has."""
    if isinstance(batch.ids_per_bag, Mapping):
        for name in batch.ids_per_bag:
            if name not in names:
                raise ConfigError(
                    f"BatchShape: ids_per_bag has {name!r}, and no table has this feature.{did_you_mean(name, names)} "
                    f"Fix: features of the tables."
                )
