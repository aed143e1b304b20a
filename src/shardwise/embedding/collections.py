"""Collections of tables in one process; `shard_embeddings` shards them."""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise._layout import checked, checked_init
from shardwise._tensor import DTensor
from shardwise._tensor.transforms import refuse_compilation
from shardwise._trace.capture_hooks import RunsInReplays, allow_in_graph_with_backward, not_capturable
from shardwise.embedding.batch import Batch, Features, IdRules, features_of
from shardwise.embedding.configs import EmbeddingBagConfig, EmbeddingConfig, resized
from shardwise.embedding.jagged import JaggedFeatures, JaggedTensor, KeyedJaggedTensor, from_parts
from shardwise.embedding.keyed_tensor import KeyedTensor
from shardwise.embedding.plan import Block
from shardwise.embedding.tables import Tables, TableWeight, check_no_gradient, draw_seed, fill, new_rows

BAGS, ROWS = "embedding_bags", "embeddings"  # names in the state


class Collection(nn.Module, RunsInReplays):
    """Tables by name, and the ids of their features: the base of plain and sharded collections.

    Attributes:
        kind: the name of the tables in the state.
    """

    kind = ROWS

    def __init__(self, configs: Sequence[EmbeddingConfig], weighted: bool) -> None:
        super().__init__()
        self._weighted = weighted
        self._set_configs(configs)

    def _set_configs(self, configs: Sequence[EmbeddingConfig]) -> None:
        self._configs, self._features = tuple(configs), features_of(configs)
        self._rules = IdRules(self._features, skips_padding=self.kind == BAGS)


class RowCollection(Collection):
    """The common part of plain and sharded EmbeddingCollections."""

    def embedding_configs(self) -> tuple[EmbeddingConfig, ...]:
        """The configs of the tables, in their order."""
        return self._configs


class BagCollection(Collection):
    """The common part of plain and sharded EmbeddingBagCollections."""

    kind = BAGS
    _configs: tuple[EmbeddingBagConfig, ...]

    def embedding_bag_configs(self) -> tuple[EmbeddingBagConfig, ...]:
        """The configs of the tables, in their order."""
        return self._configs

    def is_weighted(self) -> bool:
        """Whether rows are multiplied by the weights of the input."""
        return self._weighted

    def forward(self, features: JaggedFeatures) -> KeyedTensor:
        """The sums or means of all bags, features in the order of their tables.

        A sharded collection returns the bags of this rank. All ranks have to call it, each with its own batch.

        Returns:
            [bags, columns of all features]; flat, if features have different numbers of bags.

        Raises:
            IdError: an id outside its table; on all ranks if on one.
            IdTypeError: a feature is missing, or weights are. Other ranks raise a RemoteRankError.
        """
        flat = look_up(self._look_up, features, *self._operands())
        return pooled(self._features, self._features.bags(features), flat)

    def _operands(self) -> Sequence[Tensor]:
        """The tables, or a placeholder tensor; see `look_up`."""
        raise NotImplementedError

    def _look_up(self, features: JaggedFeatures, *tables: Tensor) -> Tensor:
        """The sums or means, flat or side by side."""
        raise NotImplementedError


class _PlainCollection(Collection):
    """Tables in one process."""

    def __init__(
        self, configs: Sequence[EmbeddingConfig], device: torch.device | str | None, weighted: bool = False
    ) -> None:
        super().__init__(configs, weighted)
        tables = {config.name: TableWeight(nn.Parameter(_new_table(config, device))) for config in configs}
        self.add_module(self.kind, Tables(tables))

    @checked
    def resize_(self, sizes: Mapping[str, int]) -> None:
        """Give tables another number of rows, in place.

            collection.resize_({"users": 1200})

        Remaining rows keep their values; new rows are those of a new table, from torch's generator. Parameters stay the
        same objects, so an optimizer continues with their new rows, if it has no states of the old ones.

        Raises:
            ConfigError: an unknown table, no rows, or a table with a gradient of its old rows; then nothing changes.
        """
        configs = resized(self._configs, sizes)
        numbers = [number for number, config in enumerate(configs) if config.name in sizes]
        parameters = [self.get_parameter(f"{self.kind}.{config.name}.weight") for config in configs]
        for number in numbers:
            check_no_gradient(configs[number].name, parameters[number])
        seed = draw_seed()
        for number in numbers:
            config, old = configs[number], parameters[number].detach()
            rows, kept = config.num_embeddings, min(config.num_embeddings, old.shape[0])
            table = old.new_empty(rows, old.shape[1])
            table[:kept] = old[:kept]
            if not table.is_meta:
                block = Block(number, 0, range(kept, rows), range(old.shape[1]), 0, 0)
                fill(table[kept:], block, new_rows(config, seed + number))
            parameters[number].data = table
        self._set_configs(configs)

    def _operands(self) -> list[Tensor]:
        """The table of each feature."""
        return [self.get_parameter(f"{self.kind}.{config.name}.weight") for config in self._features.config_of]

    def _batch(self, features: JaggedFeatures) -> tuple[Batch, Batch]:
        """The ids of a batch, and the valid ones."""
        given = self._features.batch(features, self._weighted, self._operands()[0].device)
        batch, verdict = self._rules.apply(given)
        self._rules.raise_for([verdict])
        return given, batch


def _new_table(config: EmbeddingConfig, device: torch.device | str | None) -> Tensor:
    table = torch.empty(config.num_embeddings, config.embedding_dim, dtype=config.data_type, device=device)
    if not table.is_meta:
        config.initialize(table)
    return table


@checked_init
class EmbeddingBagCollection(_PlainCollection, BagCollection):
    """Tables whose rows are pooled in bags.

        collection = EmbeddingBagCollection([
            EmbeddingBagConfig(1000, 64, "users", feature_names=["user"]),
            EmbeddingBagConfig(5000, 64, "items", feature_names=["item", "last_item"]),
        ])
        pooled = collection(features)  # KeyedTensor with the keys user, item, last_item

    Args:
        tables: one config for each.
        is_weighted: whether rows are multiplied by the weights of the input.
        device: of the tables; "meta" allocates them when they are sharded.

    Raises:
        ConfigError: no table, or two of one name.
    """

    embedding_bags: Tables

    def __init__(
        self, tables: Sequence[EmbeddingBagConfig], is_weighted: bool = False, device: torch.device | str | None = None
    ) -> None:
        super().__init__(tables, device, is_weighted)

    def _look_up(self, features: JaggedFeatures, *tables: Tensor) -> Tensor:
        _, batch = self._batch(features)
        weights = [None] * len(batch.sizes) if batch.weights is None else batch.weights.split(batch.sizes)
        lengths, counted = batch.lengths.split(batch.bags), batch.counted.split(batch.bags)
        found = []
        for config, is_mean, table, ids, of_ids, of_bags, divisors in zip(
            self._features.config_of, self._features.means, tables, batch.values.split(batch.sizes), weights, lengths,
            counted, strict=True,
        ):  # fmt: skip
            sums = F.embedding_bag(
                ids, table, F.pad(of_bags.cumsum(0), (1, 0)), config.max_norm, mode="sum",
                per_sample_weights=None if of_ids is None else of_ids.to(table.dtype), include_last_offset=True,
            )  # fmt: skip
            found.append(sums / divisors.clamp(min=1)[:, None] if is_mean else sums)
        same = len(set(batch.bags)) == 1
        return torch.cat(found, 1) if same else torch.cat([part.reshape(-1) for part in found])


@checked_init
class EmbeddingCollection(_PlainCollection, RowCollection):
    """Tables that give a row for every id.

        collection = EmbeddingCollection([EmbeddingConfig(5000, 64, "items", feature_names=["history"])])
        rows = collection(features)["history"]  # JaggedTensor with values [ids, 64]

    Args:
        tables: one config for each.
        device: of the tables; "meta" allocates them when they are sharded.

    Raises:
        ConfigError: no table, or two of one name.
    """

    embeddings: Tables

    def __init__(self, tables: Sequence[EmbeddingConfig], device: torch.device | str | None = None) -> None:
        super().__init__(tables, device)

    def forward(self, features: JaggedFeatures) -> dict[str, JaggedTensor]:
        """The rows of the ids of each feature: values of [ids, columns], with the lengths of the input.

        Raises:
            IdError: an id outside its table.
            IdTypeError: a feature is missing.
        """
        not_capturable("a lookup of an EmbeddingCollection that is not sharded")
        given, batch = self._batch(features)
        rows: list[Tensor] = [
            F.embedding(ids, table, config.padding_idx, config.max_norm)
            for config, table, ids in zip(
                self._features.config_of, self._operands(), batch.values.split(batch.sizes), strict=True
            )
        ]
        if batch.kept is not None:
            of_feature = batch.kept.split(given.sizes)
            rows = [
                found.new_zeros(keep.numel(), found.shape[1]).index_put((keep,), found)
                for found, keep in zip(rows, of_feature, strict=True)
            ]
        return rows_by_feature(self._features, rows, given.lengths.split(given.bags))


def pooled(features: Features, bags: Sequence[int], flat: Tensor) -> KeyedTensor:
    """The results of bags: [bags, columns] of each feature, flat; or side by side, if all have as many bags."""
    if len(set(bags)) == 1:
        return KeyedTensor(features.outputs, features.dims, flat.view(bags[0], sum(features.dims)))
    return KeyedTensor(features.outputs, features.dims, flat.view(-1), bags)


def rows_by_feature(features: Features, rows: Sequence[Tensor], lengths: Sequence[Tensor]) -> dict[str, JaggedTensor]:
    """The rows of the ids of each feature."""
    return {
        name: from_parts(found, None, of_bags)
        for name, found, of_bags in zip(features.outputs, rows, lengths, strict=True)
    }


# ---- captured graphs: a lookup is one opaque call, whose Python code runs at every replay with new ids -----------


def look_up(lookup: Callable[..., Tensor], features: JaggedFeatures, *tables: Tensor) -> Tensor:
    """`lookup(features, *tables)`, the results of a collection as one tensor.

    Args:
        tables: tables that get gradients, or a tensor instead: backward runs if one of them requires grad.
    """
    refuse_compilation()
    if not isinstance(features, KeyedJaggedTensor) and isinstance(features, JaggedFeatures):
        not_capturable(f"a lookup of a {type(features).__module__}.{type(features).__qualname__}")
    if any(isinstance(table, DTensor) for table in tables):
        not_capturable("a lookup in tables that are DTensors, of a collection without shard_embeddings")
    return _in_graph(lookup, features, *tables)


def _collection_lookup(lookup: Callable[..., Tensor], features: JaggedFeatures, *tables: Tensor) -> Tensor:
    return lookup(features, *tables)


_in_graph = allow_in_graph_with_backward(_collection_lookup, any_sizes=True)
