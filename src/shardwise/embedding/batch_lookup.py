"""`BatchLookup`: a batch on its way through the exchange of a sharded collection."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise._collectives import Wait
from shardwise._lookups.row_requests import RowRequests
from shardwise._rules.row_exchange import Headers, IdMessage, IdReply
from shardwise.embedding.batch import VERDICT_SIZE, Batch, IdRules
from shardwise.embedding.exchange.engine import Engine
from shardwise.embedding.exchange.results import ResultIndex
from shardwise.embedding.jagged import JaggedFeatures, version_of
from shardwise.errors import IdError, IdTypeError, RemoteRankError, ShardwiseError

Versions = tuple[tuple[Tensor, int], ...]  # tensors, and how often each had been changed in place


@dataclass(eq=False)
class BatchLookup:
    """A batch of one rank, from its message of ids to what all ranks request of this one.

        lookup = collection.prepare(features)  # the message is made, not sent
        lookup.start()
        lookup.finish()                        # the messages of all ranks are here: `requests`, or `error`

    Attributes:
        features: the input; None: the rank has none.
        batch: its valid ids.
        index: where the results belong.
        error: why nothing is looked up; the same on all ranks, or, where the batch of a rank is none, its own and a
            RemoteRankError on others.
        by_rows: whether a row of each id is requested, because weights of ids need gradients.
        versions: of a prefetched input.
        requests: of all ranks, of each stack of this one; empty before `finish`.
        following: lookups to start after the results of this one.
        used: whether a collection has looked it up.
    """

    features: JaggedFeatures | None
    batch: Batch
    engine: Engine
    rules: IdRules
    message: IdMessage
    index: ResultIndex
    error: ShardwiseError | None = None
    by_rows: bool = False
    versions: Versions = ()
    requests: Sequence[RowRequests] = ()
    following: Sequence["BatchLookup"] = ()
    used: bool = False
    _wait: Wait | None = None
    _reply: IdReply | None = None

    def start(self) -> None:
        """Start the message of ids, unless it was started."""
        if self._wait is None:
            self._wait = self.message.start()

    def arrive(self) -> Headers:
        """Wait for the messages of all ranks, once; returns their verdicts.

        Raises:
            MismatchError: ranks sent them for different numbers of batches ahead.
        """
        if self._reply is None:
            self.start()
            assert self._wait is not None
            self._reply = self.message.read(self._wait())
            self.engine.check_ahead(self._reply)
        return [header[1 : 1 + VERDICT_SIZE] for header in self._reply.headers]

    def finish(self) -> None:
        """Read what all ranks request. If the batch of any rank is an error, all ranks get one."""
        try:
            self.rules.raise_for(self.arrive(), self.engine.plan.ranks)
        except (IdError, RemoteRankError) as error:
            self.error = self.error or error
        if self.error is None:
            assert self._reply is not None
            self.requests = self.engine.receive(self._reply)

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
        """Compare the input with what was sent.

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
        weights = self.features.weights_or_none() if self.batch.weights is not None else None
        if weights is not None and weights.requires_grad and torch.is_grad_enabled() and not self.by_rows:
            raise IdTypeError(
                "The weights of ids of a prefetched batch need gradients since its ids were sent. Nothing was looked "
                "up.\n  Fix: requires_grad_() in the loader, before prefetch gets the batch."
            )


def versions_of(features: JaggedFeatures) -> Versions:
    """The versions of the ids, lengths and weights."""
    tensors = (features.values(), features.lengths(), features.weights_or_none())
    return tuple((x, version_of(x)) for x in tensors if x is not None)
