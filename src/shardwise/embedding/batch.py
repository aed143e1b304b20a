"""A batch of a collection: the ids of all features in the order of its tables, bad ids, and padding."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from shardwise._lookups.bad_ids import NO_BATCH, VALID, Verdict, first_bad, not_in_table
from shardwise.embedding.configs import POLICIES, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from shardwise.embedding.jagged import JaggedFeatures, KeyedJaggedTensor
from shardwise.errors import ConfigError, IdTypeError, RemoteRankError

VERDICT_SIZE = 4  # feature, sample, position in the sample, and the id


@dataclass(frozen=True)
class Batch:
    """The ids of all features.

    Attributes:
        values: int64, by feature and bag.
        lengths: of all bags.
        weights: of each id, or None.
        bags: how many each feature has.
        counted: ids of each bag that a mean divides by.
        kept: which ids of the input these are; None: all.
    """

    values: Tensor
    lengths: Tensor
    weights: Tensor | None
    bags: tuple[int, ...]
    counted: Tensor
    kept: Tensor | None = None

    @cached_property
    def bag(self) -> Tensor:
        """The bag of each id, numbered over all features."""
        return torch.repeat_interleave(self.lengths, output_size=self.values.numel())

    @cached_property
    def sizes(self) -> list[int]:
        """The ids of each feature."""
        return [int(n.sum()) for n in self.lengths.split(self.bags)]

    def where(self, keep: Tensor) -> "Batch":
        """Only some of the ids; `counted` stays as it is."""
        lengths = torch.bincount(self.bag[keep], minlength=self.lengths.numel())
        weights = None if self.weights is None else self.weights[keep]
        return replace(self, values=self.values[keep], lengths=lengths, weights=weights, kept=keep)


def make_batch(values: Tensor, lengths: Tensor, weights: Tensor | None, bags: Sequence[int]) -> Batch:
    """The batch of ids and the lengths of bags, both by feature."""
    lengths = lengths.long()
    return Batch(values.long(), lengths, weights, tuple(bags), lengths)


@dataclass(frozen=True)
class Features:
    """The features of some tables, in their order.

    A feature of two tables is there twice, and its results are named `feature@table`, as in TorchRec.

    Attributes:
        names: in the input.
        outputs: in the result.
        config_of: the table of each feature.
    """

    names: tuple[str, ...]
    outputs: tuple[str, ...]
    config_of: tuple[EmbeddingConfig, ...]

    @cached_property
    def dims(self) -> tuple[int, ...]:
        """Columns of each feature."""
        return tuple(config.embedding_dim for config in self.config_of)

    @cached_property
    def means(self) -> tuple[bool, ...]:
        """Whether the bags of each feature give means."""
        return tuple(isinstance(c, EmbeddingBagConfig) and c.pooling is PoolingType.MEAN for c in self.config_of)

    def bags(self, features: JaggedFeatures) -> tuple[int, ...]:
        """How many each of these features has in a batch that has them all."""
        by_key = dict(zip(features.keys(), features.stride_per_key(), strict=True))
        return tuple(by_key[name] for name in self.names)

    def lengths(self, features: JaggedFeatures) -> list[Tensor]:
        """Of the bags of each of these features, in a batch that has them all."""
        by_key = dict(
            zip(features.keys(), features.lengths().long().split(list(features.stride_per_key())), strict=True)
        )
        return [by_key[name] for name in self.names]

    def batch(self, features: JaggedFeatures, weighted: bool, device: torch.device) -> Batch:
        """The ids of these features, in their order.

        Raises:
            IdTypeError: something else, a feature is missing, ids are not integers or on another device, or a
                collection with weights gets none.
            JaggedError: lengths that do not fit the ids.
        """
        if isinstance(features, KeyedJaggedTensor):
            given = features
        elif isinstance(features, JaggedFeatures):
            given = KeyedJaggedTensor.from_torchrec(features)
        else:
            raise IdTypeError(
                f"A collection looks up a KeyedJaggedTensor, got {type(features).__name__}. "
                f"Fix: KeyedJaggedTensor(keys, values, lengths=lengths)."
            )
        known = set(given.keys())
        missing = [name for name in self.names if name not in known]
        if missing:
            raise IdTypeError(
                f"The input has no feature {missing[0]!r}; it has {', '.join(map(repr, given.keys()))}. "
                f"Fix: give all features of the collection; a bag may be empty."
            )
        if given.values().dtype not in (torch.int32, torch.int64):
            raise IdTypeError(f"Ids are int32 or int64, got {given.values().dtype}. Fix: values.long().")
        if weighted and given.weights_or_none() is None:
            raise IdTypeError(
                "The collection is weighted, but the input has no weights. Fix: weights=, one of each id."
            )
        if given.values().device != device:
            raise IdTypeError(
                f"Tables are on {device}, ids on {given.values().device}. Fix: features.to({str(device)!r})."
            )
        given = given.of_features(self.names)
        weights = given.weights_or_none() if weighted else None
        return make_batch(given.values(), given.lengths(), weights, given.stride_per_key())

    def no_batch(self, device: torch.device) -> Batch:
        """Of no bags."""
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        return make_batch(nothing, nothing, None, [0] * len(self.names))


def features_of(configs: Sequence[EmbeddingConfig]) -> Features:
    """The features of the tables.

    Raises:
        ConfigError: no table, or two of one name.
    """
    if not configs:
        raise ConfigError("A collection needs a table. Fix: tables=[EmbeddingBagConfig(...)].")
    repeated = [name for name, count in Counter(config.name for config in configs).items() if count > 1]
    if repeated:
        raise ConfigError(f"Two tables have the name {repeated[0]!r}. Fix: a name of its own for each table.")
    pairs = [(name, config) for config in configs for name in config.feature_names]
    tables = Counter(name for name, _ in pairs)
    return Features(
        tuple(name for name, _ in pairs),
        tuple(name if tables[name] == 1 else f"{name}@{config.name}" for name, config in pairs),
        tuple(config for _, config in pairs),
    )


class IdRules:
    """What ids of each feature are valid, and what becomes of others.

    Args:
        features: of the tables.
        skips_padding: whether ids that are padding are not looked up.
    """

    def __init__(self, features: Features, skips_padding: bool) -> None:
        configs = self._configs = features.config_of
        self._names = features.names
        self._rows = [config.num_embeddings for config in configs]
        padding = [-1 if config.padding_idx is None else config.padding_idx for config in configs]
        self._padding = padding if skips_padding and max(padding) >= 0 else None
        self._chosen = {policy: [config.bad_ids == policy for config in configs] for policy in POLICIES}

    def apply(self, batch: Batch) -> tuple[Batch, Verdict]:
        """The batch with valid ids only, and the verdict on it: the first id that is an error.

        If there is one, the batch is empty.
        """
        verdict = [VALID, 0, 0, 0]
        keep: Tensor | None = None
        bad = self._bad(batch)
        if bad is not None:
            of_error, of_clip, of_hash, of_zero = (bad & _of_ids(self._chosen[policy], batch) for policy in POLICIES)
            if bool(of_error.any()):
                verdict = self._verdict(batch, int(of_error.nonzero()[0]))
                nothing = torch.zeros_like(of_error)
                return batch.where(nothing), verdict
            rows = _of_ids(self._rows, batch)
            clipped = torch.minimum(batch.values.clamp(min=0), rows - 1)
            values = torch.where(of_clip, clipped, torch.where(of_hash, batch.values.remainder(rows), batch.values))
            batch, keep = replace(batch, values=values), ~of_zero
        if self._padding is not None:
            is_padding = batch.values == _of_ids(self._padding, batch)
            if keep is not None:
                is_padding &= keep  # -1 is not padding, but a table's bad id, or that it has none
            padded = torch.bincount(batch.bag[is_padding], minlength=batch.lengths.numel())
            batch = replace(batch, counted=batch.lengths - padded)
            keep = ~is_padding if keep is None else keep & ~is_padding
        return (batch if keep is None else batch.where(keep)), verdict

    def raise_for(self, verdicts: Sequence[Verdict], ranks: Sequence[int] = ()) -> None:
        """Raise for the first bad id; `verdicts` are those of `ranks`, or of one process.

        Raises:
            IdError: the same on every rank.
            RemoteRankError: a rank has no batch.
        """
        bad = first_bad(verdicts, ranks or [0])
        if bad is None:
            return
        (feature, sample, position, value), rank = bad
        if feature == NO_BATCH:
            raise RemoteRankError(
                f"Rank {rank} could not take its batch. Nothing was looked up. Fix: correct what its own error says.",
                rank,
            )
        config, place = self._configs[feature], f" at position {position} of sample {sample}"
        raise not_in_table(
            f"Table {config.name}, feature {self._names[feature]}",
            f"{place} of rank {rank}" if ranks else place,
            value,
            config.num_embeddings,
            "correct the ids, or bad_ids='clip', 'hash' or 'zero' in the table's config.",
        )

    def _bad(self, batch: Batch) -> Tensor | None:
        """Which ids are not in their table; None: all are. Cheap where all are in the smallest one."""
        if not batch.values.numel():
            return None
        low, high = torch.stack(torch.aminmax(batch.values)).tolist()
        if low >= 0 and (high < min(self._rows) or self._below_rows(batch)):
            return None
        bad = batch.values >= _of_ids(self._rows, batch)
        if low < 0:
            bad |= batch.values < 0
        return bad if bool(bad.any()) else None

    def _below_rows(self, batch: Batch) -> bool:
        """Whether the largest id of each feature is in its table. One pass on the CPU; elsewhere not looked at."""
        if batch.values.device.type != "cpu":
            return False
        bags = np.cumsum([0, *batch.bags])
        starts = np.concatenate(([0], batch.lengths.numpy().cumsum()))[bags]
        given = np.diff(starts) > 0
        largest = np.maximum.reduceat(batch.values.numpy(), starts[:-1][given])
        return bool((largest < np.array(self._rows)[given]).all())

    def _verdict(self, batch: Batch, number: int) -> Verdict:
        bag, value = int(batch.bag[number]), int(batch.values[number])
        position = number - int(batch.lengths[:bag].sum())
        feature = 0
        while bag >= batch.bags[feature]:
            bag -= batch.bags[feature]
            feature += 1
        return [feature, bag, position, value]


def code(number: int) -> Verdict:
    """A verdict without an id."""
    return [number, 0, 0, 0]


def _of_ids(of_features: Sequence[int], batch: Batch) -> Tensor:
    """The number, or truth, of the feature of each id."""
    return torch.tensor(np.repeat(of_features, batch.bags), device=batch.bag.device)[batch.bag]
