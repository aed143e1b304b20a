"""`prefetch`: the ids of the next batches are exchanged while the present one trains."""

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, fields, is_dataclass
from typing import Generic, TypeVar

from torch import Tensor, nn

from shardwise import _collectives as collectives
from shardwise._layout import checked
from shardwise._lookups.bad_ids import LOADER_ENDED, LOADER_FAILED, Verdict
from shardwise.embedding.batch_lookup import BatchLookup
from shardwise.embedding.jagged import JaggedFeatures
from shardwise.embedding.sharded import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from shardwise.errors import ArgumentError, MismatchError, PlanError, RemoteRankError

B = TypeVar("B")
Sharded = ShardedEmbeddingBagCollection | ShardedEmbeddingCollection
IdsOf = Callable[[B], JaggedFeatures | Mapping[str, JaggedFeatures]]


@checked
def prefetch(
    loader: Iterable[B],
    model: nn.Module,
    ids_of: Callable[[B], JaggedFeatures | Mapping[str, JaggedFeatures]] | None = None,
    *,
    depth: int = 1,
) -> "Prefetch[B]":
    """The batches of `loader`; the ids of the next `depth` ones are sent to the owners of their rows meanwhile.

        for dense, features, labels in prefetch(loader, model):
            loss = loss_of(model(dense, features), labels)

    A sharded collection looks up a batch that has arrived when it gets the KeyedJaggedTensor that the loader gave, or
    one of the same tensors; any other is exchanged as usual. Results are those without prefetch: rows are read in
    forward.

    `state_dict()` is that of the loader after the batch that was given last, for loaders that have one.

    All ranks iterate it alike, with as many batches each. Ids are sent after the results of the batch in front have
    arrived, or, if it is not looked up, when the next batch is taken; in the thread that trains.

    Args:
        loader: of any batches. One must not reuse the memory of another.
        model: a sharded collection, or a module that has some.
        ids_of: gives the KeyedJaggedTensor of a batch, for all collections, or a dict with that of each one by its name
            in the model. None: for each collection the only one with all its features in the batch, which may be a
            tuple, list, dict or dataclass.
        depth: how many batches ahead; each takes the memory of its ids.

    Raises:
        PlanError: the model has no sharded collection.
        ArgumentError: a depth below 1; when a batch is loaded: it is not clear which are the ids of a collection.
        MismatchError: in the loop, on all ranks: loaders of different lengths, or different depths.
        RemoteRankError: in the loop: the loader of another rank raised.
    """
    found = {name: module for name, module in model.named_modules() if isinstance(module, Sharded)}
    if not found:
        raise PlanError(
            f"prefetch: {type(model).__name__} has no sharded collection. Fix: make it with shard_embeddings first."
        )
    if depth < 1:
        raise ArgumentError(f"prefetch: depth must be at least 1, got {depth}. Fix: depth=1.")
    return Prefetch(loader, found, ids_of, depth)


@dataclass(frozen=True)
class _Loaded(Generic[B]):
    """What the loader gave: a batch, and the inputs of each collection; or why not.

    Attributes:
        batch: of one element; empty: there is none.
        error: of the loader, or None if it has ended.
        state: of the loader after the batch, if it has a `state_dict`.
    """

    batch: tuple[B, ...] = ()
    inputs: tuple[JaggedFeatures, ...] = ()
    error: Exception | None = None
    state: object = None

    @property
    def reason(self) -> int:
        """The code of the verdict for the other ranks, where there is no batch."""
        return LOADER_FAILED if self.error else LOADER_ENDED


class Prefetch(Generic[B]):
    """The batches of a loader; made by `prefetch`. As often as the loader can be iterated, it can."""

    def __init__(
        self, loader: Iterable[B], collections: Mapping[str, Sharded], ids_of: IdsOf[B] | None, depth: int
    ) -> None:
        self._loader, self._collections, self._ids_of, self._depth = loader, dict(collections), ids_of, depth
        self._state: object = None

    def __len__(self) -> int:
        if not isinstance(self._loader, Sized):
            raise TypeError(f"prefetch: a {type(self._loader).__name__} has no length. Fix: a loader with __len__().")
        return len(self._loader)

    def state_dict(self) -> object:
        """The state of the loader after the batch that was given last; it has read ahead.

        Raises:
            ArgumentError: the loader has no `state_dict`.
        """
        state = self._state_of_loader() if self._state is None else self._state
        if state is None:
            raise ArgumentError(
                f"prefetch: a {type(self._loader).__name__} has no state_dict. Fix: such as shardwise.data.BatchLoader."
            )
        return state

    def _state_of_loader(self) -> object:
        state_dict = getattr(self._loader, "state_dict", None)
        return None if state_dict is None else state_dict()

    def __iter__(self) -> Iterator[B]:
        collections, used, count = self._collections, set[str](), 0
        loads = self._loads()
        # The first arrives before others start: ranks that prefetch differently know it before they mix messages.
        waiting = deque([self._prepare(next(loads))])
        while self._receive(*(first := waiting.popleft()), count):
            while len(waiting) < self._depth:
                waiting.append(self._prepare(next(loads)))
            (batch,), lookups = first[0].batch, first[1]
            for number, (collection, lookup) in enumerate(zip(collections.values(), lookups, strict=True)):
                lookup.following = [of_batch[number] for _, of_batch in waiting]
                collection.offer(lookup)
            yield batch
            count += 1
            used |= {name for name, lookup in zip(collections, lookups, strict=True) if lookup.used}
            for _, of_batch in waiting:  # what no lookup has started
                for lookup in of_batch:
                    lookup.start()
        if count and len(used) < len(collections):
            unused = ", ".join(repr(name) for name in collections if name not in used)
            warnings.warn(
                f"prefetch sent the ids of {count} batches to the owners of collection {unused}, which looked up "
                f"none of them: a collection has to get the KeyedJaggedTensor that the loader gave, or its tensors. "
                f"Fix: convert batches, as by .to(device), in the loader; or name the ids by ids_of.",
                stacklevel=2,
            )

    def _loads(self) -> Iterator[_Loaded[B]]:
        """What the loader gives, without an end."""
        try:
            for batch in self._loader:
                yield _Loaded((batch,), self._inputs(batch), state=self._state_of_loader())
        except Exception as error:  # noqa: BLE001 - raised where the batch would have been used, on all ranks
            yield _Loaded(error=error)
        while True:
            yield _Loaded()

    def _prepare(self, loaded: _Loaded[B]) -> tuple[_Loaded[B], list[BatchLookup]]:
        inputs = loaded.inputs if loaded.batch else [None] * len(self._collections)
        pairs = zip(self._collections.values(), inputs, strict=True)
        return loaded, [collection.prepare(features, self._depth, loaded.reason) for collection, features in pairs]

    def _receive(self, loaded: _Loaded[B], lookups: Sequence[BatchLookup], number: int) -> bool:
        """Finish the lookups of a batch; False: the loaders of all ranks have ended."""
        verdicts = [lookup.arrive() for lookup in lookups]
        for lookup, of_all in zip(lookups, verdicts, strict=True):
            check_loaders(of_all, lookup.engine.plan.ranks, loaded.error, number)
        if not loaded.batch:
            return False
        self._state = loaded.state
        for lookup in lookups:
            lookup.finish()
        return True

    def _inputs(self, batch: B) -> tuple[JaggedFeatures, ...]:
        """The input of each collection.

        Raises:
            ArgumentError: it is not clear which that is.
        """
        if self._ids_of is None:
            candidates = list({id(one): one for one in _features_in(batch)}.values())
            return tuple(_only(candidates, name, one.feature_names()) for name, one in self._collections.items())
        given, names = self._ids_of(batch), list(self._collections)
        found = [given[name] for name in names if name in given] if isinstance(given, Mapping) else [given] * len(names)
        if len(found) < len(names) or not all(isinstance(one, JaggedFeatures) for one in found):
            raise ArgumentError(
                f"prefetch: ids_of must return a KeyedJaggedTensor, or a dict with one for each of the collections "
                f"{', '.join(map(repr, names))}, got {type(given).__name__}"
                f"{f' with the keys {list(given)}' if isinstance(given, Mapping) else ''}. Fix: return one of them."
            )
        return tuple(found)


def check_loaders(verdicts: Sequence[Verdict], ranks: Sequence[int], error: Exception | None, number: int) -> None:
    """Compare whether the loaders of all ranks have given batch `number`, or have ended. `error` is that of this one.

    Raises:
        MismatchError: only some have ended.
        RemoteRankError: one of another rank raised. This one's error is raised as it is.
    """
    if error is not None:
        raise error
    codes = [verdict[0] for verdict in verdicts]
    if LOADER_FAILED in codes:
        rank = ranks[codes.index(LOADER_FAILED)]
        raise RemoteRankError(
            f"The loader of rank {rank} raised at batch {number}, counted from 0, in prefetch. "
            f"Rank {collectives.rank()} waited for the batch. Fix: correct what its own error says.",
            rank,
        )
    ended = [rank for rank, code in zip(ranks, codes, strict=True) if code == LOADER_ENDED]
    if ended and len(ended) < len(ranks):
        other = next(rank for rank in ranks if rank not in ended)
        raise MismatchError(
            f"The loader of rank {ended[0]} has ended after {number} batches, that of rank {other} has not, in "
            f"prefetch; {number} batches were given.\n"
            f"  Fix: as many batches on each rank, such as by drop_last=True; a batch may have no bags."
        )


def _features_in(value: object) -> Iterator[JaggedFeatures]:
    """The jagged features in tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor | str):
        return
    if isinstance(value, JaggedFeatures):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _features_in(one)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _features_in(one)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _features_in(getattr(value, field.name))


def _only(candidates: Sequence[JaggedFeatures], name: str, features: Sequence[str]) -> JaggedFeatures:
    found = [one for one in candidates if set(features) <= set(one.keys())]
    if len(found) != 1:
        raise ArgumentError(
            f"prefetch: {'none' if not found else len(found)} of the {len(candidates)} KeyedJaggedTensors in a batch "
            f"has all features of collection {name!r}: {', '.join(features)}.\n"
            f"  Fix: ids_of=lambda batch: …, the one that the collection looks up."
        )
    return found[0]
