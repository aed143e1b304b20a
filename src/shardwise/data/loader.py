"""`BatchLoader`: each rank loads its samples of a global batch, which comes as DTensors."""

import copy
import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from inspect import signature
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from shardwise import _collectives as collectives
from shardwise._collectives import DeviceMesh
from shardwise._layout import REPLICATE, Layout, Mesh, Placement, Shard, checked_init
from shardwise._tensor.arguments import check_dense
from shardwise._tensor.conversion import wrap
from shardwise._tensor.dtensor import default_mesh
from shardwise.embedding.jagged import JaggedFeatures, KeyedJaggedTensor
from shardwise.errors import ArgumentError, MeshError, RemoteRankError, summary

TENSOR_AXIS = "tp"
AS_THEY_ARE = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    np.generic,
)  # values of this rank's samples that are collated as they are
FIX = "make the same loader on all ranks, and pad samples to one length in collate_fn."


@runtime_checkable
class Indexed(Protocol):
    """A data set whose samples have numbers: a map-style `Dataset`, a list."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> object: ...


@checked_init
class BatchLoader:
    """The global batches of a data set; every rank loads its own samples of each batch.

        loader = BatchLoader(dataset, 256, mesh, shuffle=True, num_workers=2)
        for features, labels in loader:  # DTensors of 256 rows, sharded over the data axes
            loss = loss_of(model(features), labels)

    Tensors become DTensors that are sharded along dim 0 on the data axes, as by torch.chunk, and replicated on the
    others. A KeyedJaggedTensor stays plain, with the samples of this rank, as collections take it; so do strings and
    numbers. Batches may be nested in tuples, lists, dicts and dataclasses. The last batch of an epoch may be shorter:
    ranks then have fewer samples, or none.

    An iteration resumes where the last one stopped; after the end of an epoch the next one begins. Each epoch has its
    own order. A sample is loaded with random numbers (of torch, numpy and `random`) that depend only on the seed, the
    epoch and its index. So batches are equal on any number of ranks and workers, and after a resume.

    Args:
        dataset: with a length and samples by index, the same on all ranks.
        batch_size: samples of all ranks in a batch.
        mesh: a `Mesh` or torch's `DeviceMesh`; None is one axis of all ranks.
        axis: names or numbers of the data axes; None is all axes but "tp". Ranks that differ on another axis only
            load the same samples.
        shuffle: whether the order of an epoch is random.
        seed: of the orders and of the samples.
        drop_last: leave out a last batch of fewer than `batch_size` samples.
        collate_fn: makes a batch of a list of samples. Its tensors have the samples along dim 0, and other sizes that
            do not depend on them. The list is never empty: a rank without samples passes one, and removes it from
            tensors and jagged features; strings and numbers stay.
        options: more arguments of torch's `DataLoader`, such as `num_workers`, `prefetch_factor`,
            `persistent_workers` and `pin_memory`.

    Raises:
        ArgumentError: a data set without length or index, a batch size below 1, an unknown option; in the loop, a
            result of the collate_fn that is not a batch.
        MeshError: this rank is not part of the mesh, or it has no such axis.
        MismatchError: in the loop, on all ranks: batches of different steps, dtypes or sizes.
        RemoteRankError: in the loop: another rank failed to load its samples, and raises the error itself. The next
            iteration begins with that batch on all ranks.

    Sends: for each batch one small message to every rank of the mesh, to compare its shapes.
    """

    def __init__(
        self,
        dataset: Indexed | Dataset[Any],
        batch_size: int,
        mesh: Mesh | DeviceMesh | None = None,
        *,
        axis: str | int | Sequence[str | int] | None = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], object] = default_collate,
        **options: Any,
    ) -> None:
        if not isinstance(dataset, Indexed) or isinstance(dataset, IterableDataset):
            raise ArgumentError(
                f"BatchLoader: {type(dataset).__name__} has no length or no samples by index, so ranks cannot divide "
                f"its samples and no epoch can be resumed. Fix: a map-style Dataset; or read files in steps, and make "
                f"DTensors by DTensor.from_local."
            )
        if batch_size < 1:
            raise ArgumentError(
                f"BatchLoader: batch_size must be at least 1, got {batch_size}. Fix: the samples of all ranks."
            )
        if unknown := options.keys() - signature(DataLoader).parameters.keys():
            raise ArgumentError(
                f"BatchLoader: torch's DataLoader has no option {min(unknown)}. Fix: its documentation names them."
            )
        self.mesh = default_mesh() if mesh is None else collectives.as_mesh(mesh)
        if self.mesh.coordinate(collectives.rank()) is None:
            raise MeshError(
                f"BatchLoader: rank {collectives.rank()} is not part of {self.mesh}. Fix: make it on these ranks."
            )
        self.placements = _placements(self.mesh, axis)
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self._order = {"seed": seed, "shuffle": shuffle, "num_samples": len(dataset)}
        self._samples, self._options = _Samples(dataset, seed), {"collate_fn": collate_fn, **options}
        self._loader: DataLoader[Any] | None = None
        self._epoch, self._position, self._iteration = 0, 0, 0

    def _end(self, start: int) -> int:
        """The end of the epoch whose next batch begins at sample `start`."""
        count = self._order["num_samples"]
        return count - (count - start) % self.batch_size if self.drop_last else count

    def __len__(self) -> int:
        """The number of batches of an epoch."""
        return (self._end(0) + self.batch_size - 1) // self.batch_size

    def state_dict(self) -> dict[str, int]:
        """The position of the next batch, equal on every rank, as JSON.

        It may be loaded on another number of ranks, and with another batch size.
        """
        return {"epoch": self._epoch, "position": self._position, **self._order}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Begin the next iteration where `state` was saved.

        Raises:
            ArgumentError: the state has another order, or is not of a `BatchLoader`.
        """
        for name, expected in self._order.items():
            if state.get(name) != expected:
                raise ArgumentError(
                    f"BatchLoader.load_state_dict: {name} is {state.get(name)!r} in the state and {expected!r} here, "
                    f"so samples have another order. Fix: make the loader as it was when the state was saved."
                )
        epoch, position = state.get("epoch"), state.get("position")
        count = self._order["num_samples"]
        if type(epoch) is not int or type(position) is not int or epoch < 0 or not 0 <= position <= count:
            raise ArgumentError(
                f"BatchLoader.load_state_dict: expected integers, an epoch of at least 0 and a position of 0 to "
                f"{count}, got {epoch!r} and {position!r}. Fix: a state of state_dict()."
            )
        no_batch_left = position and position == self._end(position)  # the state may be of another batch size
        self._epoch, self._position = (epoch + 1, 0) if no_batch_left else (epoch, position)
        self._iteration += 1

    def __iter__(self) -> Iterator[Any]:
        self._iteration += 1
        return self._batches(self._iteration)

    def _batches(self, iteration: int) -> Iterator[object]:
        epoch, loaded = self._epoch, None
        for start, stop, first, last in self._steps_left():
            if iteration != self._iteration:
                raise ArgumentError(
                    "BatchLoader: this iteration has ended, because another one began or a state was loaded. "
                    "Fix: run one iteration at a time."
                )
            placed, out, failure = _Placed(self, stop - start, last - first), None, None
            try:
                if loaded is None:
                    loaded = self._iterator()
                out = placed.of(next(loaded), "the batch")
            except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must learn of it and not wait
                self._loader, failure = None, error
            self._compare({"epoch": epoch, "samples": [start, stop], **self._order, "tensors": placed.facts}, failure)
            self._epoch, self._position = (epoch + 1, 0) if stop == self._end(start) else (epoch, stop)
            yield out

    def _iterator(self) -> Iterator[object]:
        if self._loader is None:  # one for all epochs, as workers may be persistent; its generator draws no seed
            steps = _Requests(self._requests)
            self._loader = DataLoader(self._samples, batch_sampler=steps, generator=torch.Generator(), **self._options)
        return iter(self._loader)

    def _steps_left(self) -> Iterator[tuple[int, int, int, int]]:
        """The first and last position of each batch that is left in this epoch, and of this rank's samples in it."""
        end = self._end(self._position)
        for start in range(self._position, end, self.batch_size):
            stop = min(start + self.batch_size, end)
            yield start, stop, *_span(self.mesh, self.placements, stop - start, collectives.rank())

    def _requests(self) -> Iterator[list[tuple[int, int]]]:
        """The epoch and the index of each sample of this rank, by batch."""
        epoch, count, seed = self._epoch, self._order["num_samples"], self._order["seed"]
        order = _shuffled(count, _seed_of(seed, epoch)) if self._order["shuffle"] else None
        for start, _, first, last in self._steps_left():
            # A rank without samples loads the first of the batch, for the dtypes and sizes of its empty tensors.
            own = range(start + first, start + last) if first < last else range(start, start + 1)
            yield [(epoch, index) for index in (own if order is None else order[own.start : own.stop].tolist())]

    def _compare(self, facts: dict[str, Any], failure: Exception | None) -> None:
        """Raise on all ranks if their batches differ, or if one has a `failure` instead, which it raises."""
        ranks = tuple(sorted(self.mesh.ranks))
        failed = None if failure is None else summary(failure)
        every = collectives.gather_if_different("a batch", facts | {"failed": failed}, ranks)
        if failure is not None:
            raise failure
        if every is None:
            return
        failures = {rank: theirs["failed"] for rank, theirs in zip(ranks, every, strict=True) if theirs["failed"]}
        if failures:
            rank, text = next(iter(failures.items()))
            first, last = facts["samples"]
            raise RemoteRankError(
                f"BatchLoader: rank {rank} could not load its samples of {first} to {last - 1} of epoch "
                f"{facts['epoch']}: {text}\n  Fix: its own error says where; this iteration has ended on all ranks.",
                rank,
            )
        raise collectives.disagreement("a batch", every, ranks, FIX)


def _placements(mesh: Mesh, axis: str | int | Sequence[str | int] | None) -> tuple[Placement, ...]:
    if axis is None:
        data = [number for number in range(mesh.ndim) if not mesh.names or mesh.names[number] != TENSOR_AXIS]
    else:
        data = [mesh.axis(one) for one in ([axis] if isinstance(axis, str | int) else axis)]
    return tuple(Shard(0) if number in data else REPLICATE for number in range(mesh.ndim))


@lru_cache
def _span(mesh: Mesh, placements: tuple[Placement, ...], count: int, rank: int) -> tuple[int, int]:
    """The range of this rank's samples among the `count` of a batch: first, last + 1."""
    boxes = Layout(mesh, placements, (count,)).boxes(rank)
    return (boxes[0].offsets[0], boxes[0].offsets[0] + boxes[0].sizes[0]) if boxes else (0, 0)


def _shuffled(count: int, seed: int) -> Tensor:
    """A permutation of `count` indices, equal on every rank; of 4 bytes an index if possible."""
    dtype = torch.int32 if count < 1 << 31 else torch.int64
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _seed_of(*numbers: int) -> int:
    """A seed of 32 bits that depends on all these numbers: a CPU generator reads no more bits."""
    mixed = hashlib.sha256(" ".join(map(str, numbers)).encode()).digest()[:4]
    return int.from_bytes(mixed, "little")


class _Requests:
    """A batch sampler: the requests that `begin` returns, in each epoch."""

    def __init__(self, begin: Callable[[], Iterator[list[tuple[int, int]]]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self._begin()


class _Samples(Dataset[object]):
    """The samples of a data set, each loaded with random numbers of its own."""

    def __init__(self, dataset: Indexed, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitems__(self, requests: list[tuple[int, int]]) -> list[object]:
        """Load samples; restores the generators on the CPU."""
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 - what samples may use
        try:
            return [self._sample(_seed_of(self._seed, *request), request[1]) for request in requests]
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])  # noqa: NPY002
            torch.set_rng_state(before[2])

    def _sample(self, seed: int, index: int) -> object:
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        torch.default_generator.manual_seed(seed)
        return self._dataset[index]


class _Placed:
    """Gives the tensors of a batch their layout, and records values that must be equal on all ranks.

    Args:
        count: number of samples on all ranks.
        here: number of samples on this rank.
    """

    def __init__(self, loader: BatchLoader, count: int, here: int) -> None:
        self.mesh, self.placements, self.count, self.here = loader.mesh, loader.placements, count, here
        self.facts: dict[str, str] = {}

    def of(self, value: object, path: str) -> object:
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, JaggedFeatures):
            return self._jagged(value, path)
        if isinstance(value, MutableMapping):
            out = copy.copy(value)
            for key, one in value.items():
                out[key] = self.of(one, f"{path}[{key!r}]")
            return out
        if isinstance(value, tuple | list):
            items: list[Any] = [self.of(one, f"{path}[{number}]") for number, one in enumerate(value)]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if is_dataclass(value) and not isinstance(value, type):
            made = copy.copy(value)
            for name in [field.name for field in fields(value) if hasattr(value, field.name)]:
                object.__setattr__(made, name, self.of(getattr(value, name), f"{path}.{name}"))  # frozen or not
            return made
        if isinstance(value, AS_THEY_ARE):
            return value
        raise ArgumentError(
            f"BatchLoader: {path} is a {type(value).__name__}. Fix: a collate_fn that makes tensors or a "
            f"KeyedJaggedTensor of it, in tuples, lists, dicts or dataclasses."
        )

    def _tensor(self, x: Tensor, path: str) -> Tensor:
        check_dense(x, f"BatchLoader: {path}")
        loaded = max(self.here, 1)
        if not x.ndim or len(x) != loaded:
            raise ArgumentError(
                f"BatchLoader: {path} has shape {tuple(x.shape)}, but the batch has {loaded} samples here. "
                f"Fix: a collate_fn that stacks samples along dim 0."
            )
        self.facts[path] = f"{x.dtype}, {tuple(x.shape[1:])} a sample"
        layout = Layout(self.mesh, self.placements, (self.count, *x.shape[1:]))
        return wrap(x[: self.here].contiguous().to(self.mesh.device_type, non_blocking=True), layout)

    def _jagged(self, features: JaggedFeatures, path: str) -> JaggedFeatures:
        given = features if isinstance(features, KeyedJaggedTensor) else KeyedJaggedTensor.from_torchrec(features)
        loaded, weights = max(self.here, 1), given.weights_or_none()
        if any(bags != loaded for bags in given.stride_per_key()):
            raise ArgumentError(
                f"BatchLoader: {path} has {given.stride_per_key()} bags of {given.keys()}, but the batch has {loaded} "
                f"samples here. Fix: a collate_fn that makes one bag of each feature for each sample."
            )
        of_weights = "no" if weights is None else weights.dtype
        self.facts[path] = f"{given.values().dtype} ids of {', '.join(given.keys())}, {of_weights} weights"
        if not self.here:
            no_weights = None if weights is None else weights[:0]
            given = KeyedJaggedTensor(given.keys(), given.values()[:0], no_weights, lengths=given.lengths()[:0])
        return given.to(self.mesh.device_type)
