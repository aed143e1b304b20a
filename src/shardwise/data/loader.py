"""`BatchLoader`: each rank loads its samples of a global batch, which comes as DTensors."""

import copy
import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
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
AS_THEY_ARE = (str, bytes, int, float, complex, type(None), np.generic)  # of this rank's samples

FIX = "make the same loader on all ranks, and pad samples to one length in collate_fn."


@runtime_checkable
class Indexed(Protocol):
    """A data set whose samples have numbers: a map-style `Dataset`, a list."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> object: ...


@checked_init
class BatchLoader:
    """The global batches of a data set; every rank loads its own samples of each.

        loader = BatchLoader(dataset, 256, mesh, shuffle=True, num_workers=2)
        for features, labels in loader:  # DTensors of 256 rows, sharded over the data axes
            loss = loss_of(model(features), labels)

    Tensors become DTensors that are sharded along dim 0 on the data axes, as by torch.chunk, and replicated on the
    others. A KeyedJaggedTensor stays plain, with the samples of this rank, as collections take it; so do strings and
    numbers. They may be in tuples, lists, dicts and dataclasses. The last batch of an epoch may be shorter: ranks
    then have fewer samples, or none.

    An iteration goes on where the last one stopped; after the end of an epoch the next one begins. Each epoch has an
    order of its own. A sample is loaded with random numbers (of torch, numpy and `random`) that depend only on the
    seed, the epoch and its index. So batches are the same on any number of ranks and workers, and after a resume.

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
            do not depend on them. On a rank without samples it gets one, which is removed from tensors and jagged
            features again; strings and numbers stay those of it.
        num_workers: processes that load ahead; 0 loads when a batch is taken.
        prefetch_factor: batches that each of them loads ahead; None is 2.

    Raises:
        ArgumentError: a data set without length or index, a batch size below 1; in the loop, what the collate_fn made
            is no batch.
        MeshError: this rank is not part of the mesh, or it has no such axis.
        MismatchError: in the loop, on all ranks: batches of different steps, dtypes or sizes.
        RemoteRankError: in the loop: samples of another rank could not be loaded. There the error is raised as it is.
            The next iteration begins with the same batch on all ranks.

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
        num_workers: int = 0,
        prefetch_factor: int | None = None,
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
        self.mesh = default_mesh() if mesh is None else collectives.as_mesh(mesh)
        if self.mesh.coordinate(collectives.rank()) is None:
            raise MeshError(
                f"BatchLoader: rank {collectives.rank()} is not part of {self.mesh}. Fix: make it on these ranks."
            )
        self.placements = _placements(self.mesh, axis)
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self._order = {"seed": seed, "shuffle": shuffle, "num_samples": len(dataset)}
        self._collate, self._num_workers, self._prefetch_factor = collate_fn, num_workers, prefetch_factor
        self._epoch, self._position, self._iteration = 0, 0, 0

    def _end(self, start: int) -> int:
        """Where an epoch ends whose next batch begins at sample `start`."""
        count = self._order["num_samples"]
        return count - (count - start) % self.batch_size if self.drop_last else count

    def __len__(self) -> int:
        """Batches of an epoch."""
        return (self._end(0) + self.batch_size - 1) // self.batch_size

    def state_dict(self) -> dict[str, int]:
        """Where the next batch begins, the same on every rank; JSON can hold it.

        It may be loaded for another number of ranks, and with another batch size.
        """
        return {"epoch": self._epoch, "position": self._position, **self._order}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Begin the next iteration where `state` was saved.

        Raises:
            ArgumentError: the state is of another order, or none of a `BatchLoader`.
        """
        for name, expected in self._order.items():
            if state.get(name) != expected:
                raise ArgumentError(
                    f"BatchLoader.load_state_dict: {name} is {state.get(name)!r} in the state and {expected!r} here, "
                    f"so samples have another order. Fix: make the loader as it was when the state was saved."
                )
        epoch, position = state.get("epoch"), state.get("position")
        if type(epoch) is not int or type(position) is not int:
            raise ArgumentError(
                f"BatchLoader.load_state_dict: epoch and position must be integers, got {epoch!r} and {position!r}. "
                f"Fix: a state of state_dict()."
            )
        if epoch < 0 or not 0 <= position <= self._order["num_samples"]:
            raise ArgumentError(
                f"BatchLoader.load_state_dict: epoch {epoch} and position {position} are of no state, as positions are "
                f"0 to {self._order['num_samples']}. Fix: a state of state_dict()."
            )
        no_batch_left = position and position == self._end(position)  # the state may be of another batch size
        self._epoch, self._position = (epoch + 1, 0) if no_batch_left else (epoch, position)
        self._iteration += 1

    def __iter__(self) -> Iterator[Any]:
        self._iteration += 1
        return self._batches(self._iteration)

    def _batches(self, iteration: int) -> Iterator[object]:
        epoch, order, end = self._epoch, self._order, self._end(self._position)
        indices = _epoch_order(order["num_samples"], order["seed"] if order["shuffle"] else None, epoch).tolist()
        starts = range(self._position, end, self.batch_size)
        steps = [(start, min(start + self.batch_size, end)) for start in starts]
        spans = [self._span(stop - start) for start, stop in steps]
        # A rank without samples loads the first of the batch, for the dtypes and sizes of its empty tensors.
        pairs = zip(steps, spans, strict=True)
        mine = [indices[start + first : start + last] or [indices[start]] for (start, _), (first, last) in pairs]
        loaded = self._loaded(mine, epoch)
        for (start, stop), (first, last) in zip(steps, spans, strict=True):
            if iteration != self._iteration:
                raise ArgumentError("BatchLoader: another iteration began, or a state was loaded. Fix: one at a time.")
            placed, out, failure = _Placed(self, stop - start, last - first), None, None
            try:
                out = placed.of(next(loaded), "the batch")
            except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must learn of it and not wait
                failure = error
            self._compare({"epoch": epoch, "samples": [start, stop], **order, "tensors": placed.facts}, failure)
            self._epoch, self._position = (epoch + 1, 0) if stop == end else (epoch, stop)
            yield out

    def _loaded(self, batches: list[list[int]], epoch: int) -> Iterator[object]:
        """What `collate_fn` makes of the samples with these indices."""
        yield from DataLoader(
            _Seeded(self.dataset, self._order["seed"], epoch),
            batch_sampler=batches,
            collate_fn=self._collate,
            num_workers=self._num_workers,
            prefetch_factor=self._prefetch_factor,
            generator=torch.Generator(),  # or it draws a seed from the default generator, at each epoch
        )

    def _compare(self, facts: dict[str, Any], failure: Exception | None) -> None:
        """Raise on all ranks if their batches differ, or one has none because of its `failure`, which it raises."""
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

    def _span(self, count: int) -> tuple[int, int]:
        """Which of the samples of a batch are this rank's: from, to."""
        boxes = Layout(self.mesh, self.placements, (count,)).boxes(collectives.rank())
        return (boxes[0].offsets[0], boxes[0].offsets[0] + boxes[0].sizes[0]) if boxes else (0, 0)


def _placements(mesh: Mesh, axis: str | int | Sequence[str | int] | None) -> tuple[Placement, ...]:
    if axis is None:
        data = [number for number in range(mesh.ndim) if not mesh.names or mesh.names[number] != TENSOR_AXIS]
    else:
        data = [mesh.axis(one) for one in ([axis] if isinstance(axis, str | int) else axis)]
    return tuple(Shard(0) if number in data else REPLICATE for number in range(mesh.ndim))


def _epoch_order(count: int, seed: int | None, epoch: int) -> Tensor:
    """A permutation of `count` indices, int64: the same on every rank; another for each seed and epoch.

    Args:
        seed: None keeps the order.
    """
    if seed is None:
        return torch.arange(count)
    return torch.randperm(count, generator=torch.Generator().manual_seed(_seed_of(seed, epoch)))


def _seed_of(*numbers: int) -> int:
    """A seed of 32 bits, of all of which each of these numbers counts: a generator on the CPU looks at no more."""
    mixed = hashlib.sha256(" ".join(map(str, numbers)).encode()).digest()[:4]
    return int.from_bytes(mixed, "little")


class _Seeded(Dataset[object]):
    """The samples of a data set, each loaded with random numbers of its own."""

    def __init__(self, dataset: Indexed, seed: int, epoch: int) -> None:
        self.dataset, self.seed, self.epoch = dataset, seed, epoch

    def __getitem__(self, index: int) -> object:
        with _random_numbers(_seed_of(self.seed, self.epoch, index)):
            return self.dataset[index]


@contextmanager
def _random_numbers(seed: int) -> Iterator[None]:
    """Those of `seed` on the CPU in the block; the states of the generators are as before afterwards."""
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - what samples may use
    try:
        with torch.random.fork_rng(devices=[]):
            random.seed(seed)
            np.random.seed(seed)  # noqa: NPY002
            torch.default_generator.manual_seed(seed)
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002


class _Placed:
    """Gives the tensors of a batch their layout, and notes what has to be equal on all ranks.

    Args:
        count: samples of all ranks.
        here: samples of this rank.
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
        return wrap(x[: self.here].contiguous().to(self.mesh.device_type), layout)

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
