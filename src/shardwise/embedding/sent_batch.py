"""A batch of a sharded collection between messages 1 and 2."""

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.embedding.batch import Batch
from shardwise.embedding.exchange.engine import Engine, Requested, Requesting
from shardwise.embedding.jagged.keyed_jagged_tensor import JaggedFeatures
from shardwise.errors import IdTypeError, ShardwiseError

Versions = tuple[tuple[Tensor, int], ...]  # tensors, and how often each had been changed in place


def versions_of(features: JaggedFeatures) -> Versions:
    """Those of the ids, lengths and weights."""
    tensors = (features.values(), features.lengths(), features.weights_or_none())
    return tuple((x, 0 if x.is_inference() else x._version) for x in tensors if x is not None)


@dataclass(frozen=True)
class SentBatch:
    """A batch whose ids are on their way, or will be.

    Attributes:
        features: the input; None: the rank has none.
        versions: of a prefetched input.
        given: the ids of the input.
        batch: its valid ids.
        error: why the input is no batch; or None.
        by_rows: whether a row of each id was requested, because weights of ids need gradients.
    """

    features: JaggedFeatures | None
    versions: Versions
    given: Batch
    batch: Batch
    error: ShardwiseError | None
    engine: Engine
    requesting: Requesting
    by_rows: bool = False

    def is_of(self, features: JaggedFeatures) -> bool:
        """Whether `features` is the input, or has its tensors, as in a captured graph, and no gradients of weights."""
        own = self.features
        if own is features or own is None:
            return own is features
        keys = list(own.keys()), list(own.stride_per_key())
        if not isinstance(features, JaggedFeatures) or keys != (list(features.keys()), list(features.stride_per_key())):
            return False
        pairs = [(own.values(), features.values()), (own.lengths(), features.lengths())]
        weights = own.weights_or_none(), features.weights_or_none()
        if weights != (None, None):
            if weights[0] is None or weights[1] is None or weights[0].requires_grad or weights[1].requires_grad:
                return False
            pairs.append((weights[0], weights[1]))
        return all(x.dtype == y.dtype and x.is_set_to(y) for x, y in pairs)

    def check_unchanged(self) -> None:
        """Whether the input is still what was sent.

        Raises:
            IdTypeError: it was changed in place, or its weights need gradients since then.
        """
        assert self.features is not None
        now = versions_of(self.features)
        same = [x is y and version == v for (x, version), (y, v) in zip(self.versions, now, strict=False)]
        if len(now) != len(self.versions) or not all(same):
            raise IdTypeError(
                "A prefetched batch was changed after its ids were sent. Nothing was looked up.\n"
                "  Fix: change batches in the loader, before prefetch gets them."
            )
        weights = self.features.weights_or_none() if self.given.weights is not None else None
        if weights is not None and weights.requires_grad and torch.is_grad_enabled() and not self.by_rows:
            raise IdTypeError(
                "The weights of ids of a prefetched batch need gradients since its ids were sent. Nothing was looked "
                "up.\n  Fix: requires_grad_() in the loader, before prefetch gets the batch."
            )


@dataclass(frozen=True)
class ReadyBatch:
    """A batch whose ids have arrived.

    Attributes:
        requested: None if there is an error.
        error: the same on all ranks, or, where the batch of a rank is none, its own and a RemoteRankError on others.
    """

    sent: SentBatch
    requested: Requested | None
    error: ShardwiseError | None
