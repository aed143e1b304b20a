"""Weights of ids by their position in the bag, which are trained."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shardwise._layout import checked_init
from shardwise.embedding.collections import EmbeddingBagCollection
from shardwise.embedding.jagged import JaggedFeatures, KeyedJaggedTensor
from shardwise.embedding.keyed_tensor import KeyedTensor
from shardwise.embedding.sharded import ShardedEmbeddingBagCollection
from shardwise.errors import ConfigError, JaggedError, ShardwiseError


@checked_init
class PositionWeightedModuleCollection(nn.Module):
    """Gives each id the weight of its position in its bag: a parameter for each feature, 1 at first.

        processor = PositionWeightedModuleCollection({"item": 20})
        weighted = processor(features)  # a KeyedJaggedTensor with weights

    Args:
        max_feature_lengths: the most ids of a bag of each feature; ids of other features have the weight 1.
        device: of the weights.

    Raises:
        ConfigError: a length below 1.
    """

    def __init__(self, max_feature_lengths: Mapping[str, int], device: torch.device | str | None = None) -> None:
        super().__init__()
        for name, length in max_feature_lengths.items():
            if length < 1:
                raise ConfigError(
                    f"Feature {name!r}: bags of at most {length} ids, expected 1 or more. "
                    f"Fix: the length of its longest bag."
                )
        self.position_weights = nn.ParameterDict(
            {name: torch.ones(length, device=device) for name, length in max_feature_lengths.items()}
        )

    def forward(self, features: JaggedFeatures) -> KeyedJaggedTensor:
        """The same bags with weights; those that they have are replaced.

        Raises:
            JaggedError: a bag that has more ids than its feature may.
        """
        given = features if isinstance(features, KeyedJaggedTensor) else KeyedJaggedTensor.from_torchrec(features)
        weights = [self._weights(name, jagged.lengths()) for name, jagged in given.to_dict().items()]
        return KeyedJaggedTensor(
            given.keys(), given.values(), torch.cat(weights), given.lengths(), stride_per_key=given.stride_per_key()
        )

    def _weights(self, feature: str, lengths: Tensor) -> Tensor:
        lengths = lengths.long()
        total = int(lengths.sum())
        if feature not in self.position_weights:
            return torch.ones(total, device=lengths.device)
        of_feature, longest = self.position_weights[feature], int(lengths.max()) if lengths.numel() else 0
        if longest > len(of_feature):
            raise JaggedError(
                f"Feature {feature}: sample {int(lengths.argmax())} has {longest} ids, but only the first "
                f"{len(of_feature)} positions have weights. "
                f"Fix: shorten the bag, or a larger number in max_feature_lengths."
            )
        starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
        positions = torch.arange(total, device=lengths.device) - starts
        found: Tensor = of_feature.index_select(0, positions)
        return found


@checked_init
class FeatureProcessedEmbeddingBagCollection(nn.Module):
    """A weighted collection whose weights of ids are parameters, such as those of positions.

        model = FeatureProcessedEmbeddingBagCollection(
            EmbeddingBagCollection(tables, is_weighted=True), PositionWeightedModuleCollection({"item": 20})
        )

    Args:
        embedding_bag_collection: a plain or sharded one.
        feature_processors: gives ids their weights; a replica on every rank.

    Raises:
        ConfigError: the collection takes no weights.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection | ShardedEmbeddingBagCollection,
        feature_processors: nn.Module,
    ) -> None:
        super().__init__()
        if not embedding_bag_collection.is_weighted():
            raise ConfigError("The collection takes no weights of ids. Fix: is_weighted=True.")
        self._embedding_bag_collection, self._feature_processors = embedding_bag_collection, feature_processors

    def forward(self, features: JaggedFeatures) -> KeyedTensor:
        """The weighted sums or means of bags; see the collection.

        Raises:
            JaggedError: a bag that has more ids than its feature may; ranks without one raise a RemoteRankError.
        """
        collection = self._embedding_bag_collection
        try:
            weighted = self._feature_processors(features)
        except ShardwiseError as error:
            if isinstance(collection, ShardedEmbeddingBagCollection):
                collection.refuse(error)
            raise
        out: KeyedTensor = collection(weighted)
        return out
