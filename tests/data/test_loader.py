"""`BatchLoader`: the same batches on any mesh and number of workers, resumed anywhere; and what is not a batch."""

import json
import os
import random
import signal
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import InitVar, dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from shardwise import DTensor, Mesh, Replicate, Shard
from shardwise import _collectives as collectives
from shardwise.data import BatchLoader
from shardwise.embedding import (
    SGD,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    prefetch,
    shard_embeddings,
)
from shardwise.errors import ArgumentError, MeshError, MismatchError, ShardwiseError
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.checkpoint.states import failed

R, S0 = Replicate(), Shard(0)


class Samples(Dataset[tuple[Tensor, int]]):
    """11 samples, augmented with random numbers of three generators."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.cat([torch.rand(2), torch.tensor([np.random.rand(), random.random()])]), index  # noqa: NPY002


def steps(loader: BatchLoader) -> list[tuple[list[Any], list[int]]]:
    """The full batches, as lists."""
    return [(x.full_tensor().tolist(), y.full_tensor().tolist()) for x, y in loader]


def alone(**options: Any) -> list[list[tuple[list[Any], list[int]]]]:
    """Two epochs of one process."""

    def body() -> list[list[tuple[list[Any], list[int]]]]:
        loader = BatchLoader(Samples(), 4, **options)
        return [steps(loader), steps(loader)]

    return world(1).run(body)[0]


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.processes)])
def test_batches_are_those_of_one_process_on_any_mesh(num_workers: int) -> None:
    """11 samples, 4 a batch: the last has 3, so that one of 4 ranks has none; each epoch has its order and noise."""
    want = alone(shuffle=True, seed=5)
    assert [sorted(i for _, indices in epoch for i in indices) for epoch in want] == [list(range(11))] * 2
    assert [len(indices) for _, indices in want[0]] == [4, 4, 3]
    assert want[0] != want[1]

    def body(mesh: Mesh | None, placements: list[Any]) -> tuple[Any, Any]:
        loader = BatchLoader(Samples(), 4, mesh, shuffle=True, seed=5, num_workers=num_workers)
        x, y = next(iter(loader))
        assert x.placements == y.placements == tuple(placements)
        assert x.to_local().shape[0] == 2  # of 4, on two positions of the data axis
        return [want[0][0], *steps(loader)], steps(loader)

    grid = Mesh((2, 2), names=("dp", "tp"))
    meshes: list[tuple[int, Mesh | None, list[Any]]] = [(2, None, [S0]), (4, grid, [S0, R])]
    for size, mesh, placements in meshes[: 1 if num_workers else 2]:
        for epochs in world(size).run(body, mesh, placements):
            assert list(epochs) == want


@pytest.mark.parametrize("used", [1, 3, 4])
def test_a_saved_state_resumes_on_another_number_of_ranks(used: int) -> None:
    """In the middle of the first epoch, at its end, and in the second."""
    epochs = alone(shuffle=True)
    rest = [*epochs[0], *epochs[1]][used:]

    def save() -> str:
        loader = BatchLoader(Samples(), 4, shuffle=True)
        batches = (batch for _ in range(2) for batch in loader)
        for _ in range(used):
            next(batches)
        return json.dumps(loader.state_dict())

    (state,) = set(world(2).run(save))

    def resume() -> list[Any]:
        loader = BatchLoader(Samples(), 4, shuffle=True, num_workers=0)
        loader.load_state_dict(json.loads(state))
        return [*steps(loader), *(steps(loader) if used < 3 else [])]

    for size in (1, 3):
        assert world(size).run(resume) == [rest] * size


def test_an_iteration_goes_on_where_the_last_one_stopped() -> None:
    loader = BatchLoader(Samples(), 4)
    first = next(iter(loader))[1].to_local().tolist()
    assert [first, *(indices for _, indices in steps(loader))] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert len(loader) == 3
    older = iter(loader)
    next(older)
    next(iter(loader))
    with pytest.raises(ArgumentError, match="another one began"):
        next(older)


@pytest.mark.processes
def test_persistent_workers_load_all_epochs_and_go_on_in_the_middle_of_one() -> None:
    class Workers(Samples):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return super().__getitem__(index)[0], os.getpid()

    options: dict[str, Any] = {"shuffle": True, "seed": 5}
    loader = BatchLoader(Workers(), 4, **options, num_workers=1, persistent_workers=True, prefetch_factor=1)
    first = next(iter(loader))
    found = [[first, *loader], list(loader)]
    assert (
        len({pid for epoch in found for _, pids in epoch for pid in pids.full_tensor().tolist()} - {os.getpid()}) == 1
    )
    want = alone(**options)
    assert [[x.full_tensor().tolist() for x, _ in epoch] for epoch in found] == [[x for x, _ in e] for e in want]


def test_loading_leaves_the_generators_of_the_process_alone() -> None:
    torch.manual_seed(0), random.seed(0), np.random.seed(0)  # noqa: NPY002
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index] # noqa: NPY002
    list(BatchLoader(Samples(), 4, shuffle=True))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]  # type: ignore[index] # noqa: NPY002


def test_a_state_of_another_batch_size_has_full_batches_left_or_begins_the_next_epoch() -> None:
    """`drop_last` counts from where the state was saved."""
    loader = BatchLoader(Samples(), 4, drop_last=True)
    state = loader.state_dict()
    assert len(loader) == 2
    for position, rest in [(2, [[2, 3, 4, 5], [6, 7, 8, 9]]), (7, [[7, 8, 9, 10]]), (8, [[0, 1, 2, 3], [4, 5, 6, 7]])]:
        loader.load_state_dict(state | {"position": position})
        assert loader.state_dict()["epoch"] == (position == 8)
        assert [indices for _, indices in steps(loader)] == rest
        assert loader.state_dict() == state | {"epoch": 1 + (position == 8)}


# ---- ranks that fail ------------------------------------------------------------------------------------------------


class Damaged(Dataset[Tensor]):
    """11 samples, of which one cannot be loaded until it is mended; in a worker, it may also kill that."""

    def __init__(self, kills: bool = False) -> None:
        self.damaged, self.kills = 6, kills

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Tensor:
        if index == self.damaged and self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == self.damaged:
            raise ValueError("sample 6 is damaged")
        return torch.tensor(index)


def collate_damaged(samples: list[Tensor]) -> Tensor:
    """Fails where `Damaged` is not mended."""
    if 6 in samples:
        raise ValueError("sample 6 is damaged")
    return torch.stack(samples)


WORKERS = [pytest.param(where, marks=pytest.mark.processes) for where in ("worker", "dead worker")]


@pytest.mark.parametrize("where", ["sample", "collate_fn", "batch", *WORKERS])
def test_a_rank_that_cannot_load_samples_ends_the_iteration_of_all(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks name it; all stand at the same batch, and go on with it."""
    waits = _MultiProcessingDataLoaderIter._try_get_data
    monkeypatch.setattr(waits, "__defaults__", (0.1,))  # instead of 5 seconds, until a dead worker is noticed
    collate: dict[str, Any] = {
        "collate_fn": collate_damaged,
        "batch": lambda samples: {1} if 6 in samples else torch.stack(samples),
    }

    def body() -> tuple[list[list[int]], str, list[list[int]]]:
        data = Damaged(kills=where == "dead worker")
        if where in collate:
            data.damaged = -1
        workers: dict[str, Any] = {"num_workers": 1, "prefetch_factor": 1} if "worker" in where else {}
        loader = BatchLoader(data, 4, collate_fn=collate.get(where, torch.stack), **workers)
        batches = iter(loader)
        before = [next(batches).full_tensor().tolist()]
        with pytest.raises((ValueError, RuntimeError)) as caught:
            next(batches)
        assert loader.state_dict()["position"] == 4
        data.damaged, loader._options["collate_fn"] = -1, torch.stack
        rest = [batch.full_tensor().tolist() for batch in loader]
        return before, f"{caught.typename}: {caught.value}", rest

    every = world(3).run(body)
    assert [one[0] for one in every] == [[[0, 1, 2, 3]]] * 3
    assert [one[2] for one in every] == [[[4, 5, 6, 7], [8, 9, 10]]] * 3
    own = {"batch": "ArgumentError: BatchLoader: the batch is a set", "worker": "ValueError: Caught ValueError",
           "dead worker": "RuntimeError: DataLoader worker"}.get(where, "ValueError: sample 6 is damaged")  # fmt: skip
    assert every[1][1].startswith(own)
    assert every[0][1] == every[2][1]
    rank_1 = "RemoteRankError: BatchLoader: rank 1 could not load its samples of 4 to 7 of epoch 0: "
    assert every[0][1].startswith(rank_1 + own)


# ---- kinds of batches -----------------------------------------------------------------------------------------------


@dataclass
class Clicks:
    features: KeyedJaggedTensor
    labels: Tensor
    names: list[str]


def clicks(samples: list[int]) -> Clicks:
    """Sample i has i % 3 ids of "a" and one of "b"."""
    ids = [[10 * i + j for j in range(i % 3)] for i in samples]
    values = torch.tensor([*chain.from_iterable(ids), *samples])
    lengths = torch.tensor([*map(len, ids), *[1] * len(samples)])
    weights = values.float() / 2
    features = KeyedJaggedTensor(["a", "b"], values, weights, lengths)
    return Clicks(features, torch.tensor(samples), [str(i) for i in samples])


@pytest.mark.parametrize("options", [{"prefetch_factor": 2}, {"timeout": -1}])
def test_an_option_that_torch_refuses_on_one_rank_ends_the_iteration_of_all(options: dict[str, Any]) -> None:
    def body() -> str:
        loader = BatchLoader(range(4), 2, **options if collectives.rank() == 1 else {})
        with pytest.raises((ValueError, ShardwiseError)) as caught:
            next(iter(loader))
        assert loader.state_dict()["position"] == 0
        return f"{caught.typename}: {caught.value}"

    first, second, third = world(3).run(body)
    assert second.startswith("ValueError: ")
    expected = f"RemoteRankError: BatchLoader: rank 1 could not load its samples of 0 to 1 of epoch 0: {second}"
    assert first == third
    assert first.startswith(expected)


def test_jagged_features_stay_plain_with_the_samples_of_the_rank() -> None:
    def body() -> list[Any]:
        found = []
        for batch in BatchLoader(list(range(5)), 3, collate_fn=clicks):
            assert isinstance(batch.labels, DTensor)
            mine = batch.labels.to_local().tolist()
            want = clicks(mine).features if mine else None
            assert type(batch.features) is KeyedJaggedTensor
            assert batch.features.stride() == len(mine)
            if want is not None:
                assert batch.features.values().equal(want.values())
                assert batch.features.lengths().equal(want.lengths())
            else:
                assert batch.features.keys() == ["a", "b"]
                assert batch.features.weights().numel() == 0
            found.append(mine)
        return found

    assert world(3).run(body) == [[[0], [3]], [[1], [4]], [[2], []]]


@dataclass(frozen=True)
class Checked:
    """Cannot be made again of its fields, which then no longer fit each other."""

    x: Tensor
    names: list[str]
    scale: InitVar[int]
    scaled: Tensor = field(init=False)
    later: Tensor = field(init=False)

    def __post_init__(self, scale: int) -> None:
        assert len(self.x) == len(self.names)
        object.__setattr__(self, "scaled", scale * self.x)


class Pair(NamedTuple):
    x: Tensor
    names: list[str]


@pytest.mark.parametrize(
    "kind",
    [Pair, lambda x, names: Checked(x, names, 2), lambda x, names: OrderedDict(x=x, names=names)],
    ids=["named tuple", "dataclass", "ordered dict"],
)
def test_a_batch_keeps_its_container(kind: Any) -> None:
    def collate(samples: list[int]) -> Any:
        return kind(torch.tensor(samples), [str(i) for i in samples])

    def body() -> None:
        for batch, first in zip(BatchLoader(range(3), 2, collate_fn=collate), (0, 2), strict=True):
            assert type(batch) is type(collate([0]))
            found = batch if isinstance(batch, dict) else {n: getattr(batch, n) for n in ("x", "names")}
            want = torch.arange(first, min(first + 2, 3))
            assert found["x"].full_tensor().equal(want)
            assert found["names"] == [str(min(first + collectives.rank(), 2))]  # also on a rank without samples
            if isinstance(batch, Checked):
                assert as_dtensor(batch.scaled).full_tensor().equal(2 * want)
                assert not hasattr(batch, "later")

    world(2).run(body)


def test_prefetch_has_the_state_after_the_batch_that_was_used() -> None:
    """Although the loader gave two more."""
    tables = [
        EmbeddingBagConfig(num_embeddings=200, embedding_dim=4, name=name, feature_names=[name]) for name in ("a", "b")
    ]

    def body() -> None:
        model = shard_embeddings(EmbeddingBagCollection(tables), {"a": S0, "b": S0}, Mesh((2,)), SGD(lr=0.1))
        loader, plain = (BatchLoader(list(range(11)), 3, collate_fn=jagged) for _ in range(2))
        batches = prefetch(loader, model, depth=2)
        states = []
        for features, _ in batches:
            model(features)
            states.append(batches.state_dict())
        assert states == [plain.state_dict() for _ in plain]
        with pytest.raises(ArgumentError, match="a list has no state_dict"):
            prefetch([], model).state_dict()

    world(2).run(body)


def jagged(samples: list[int]) -> tuple[KeyedJaggedTensor, Tensor]:
    unweighted = clicks(samples).features
    return KeyedJaggedTensor(["a", "b"], unweighted.values(), lengths=unweighted.lengths()), torch.tensor(samples)


class Table(dict[str, Any]):
    """A mapping of its own class, such as the batches of tokenizers."""


@pytest.mark.parametrize(
    ("collate", "text"),
    [
        (lambda samples: torch.tensor(0.0), "the batch has shape (), but the batch has 2 samples here"),
        (lambda samples: Table(x=torch.zeros(3, 2)), "the batch['x'] has shape (3, 2), but the batch has 2 samples"),
        (lambda samples: [torch.zeros(2), {1, 2}], "the batch[1] is a set. Fix: a collate_fn that makes tensors"),
        (lambda samples: [torch.eye(2).to_sparse()], "the batch[0] takes a dense tensor, got a sparse_coo one"),
        (lambda samples: clicks([*samples, *samples]), "the batch.features has [4, 4] bags of ['a', 'b'], but the"),
    ],
)
def test_what_is_no_batch_is_refused(collate: Any, text: str) -> None:
    assert text in failed(lambda: next(iter(BatchLoader(range(4), 4, collate_fn=collate))), ShardwiseError)


def test_ranks_with_different_lengths_or_loaders_are_refused() -> None:
    def padded(samples: list[int]) -> Tensor:
        return torch.zeros(len(samples), max(samples))

    def refused(collate: Any, seeds: tuple[int, int] = (0, 0)) -> str:
        def body() -> None:
            next(iter(BatchLoader(range(1, 5), 4, seed=seeds[collectives.rank()], collate_fn=collate)))

        return failed(body, MismatchError)

    lengths = refused(padded)
    assert "torch.float32, (2,) a sample" in lengths
    assert "pad samples to one length in collate_fn" in lengths
    assert "seed" in refused(torch.tensor, (0, 1))

    def weighted(samples: list[int]) -> KeyedJaggedTensor:
        features = clicks(samples).features
        weights = features.weights_or_none() if collectives.rank() else None
        return KeyedJaggedTensor(features.keys(), features.values(), weights, features.lengths())

    assert 'rank 0: {"tensors": {"the batch": "torch.int64 ids of a, b, no weights"}}' in refused(weighted)

    def elsewhere() -> None:
        loader = BatchLoader(range(8), 2)
        loader.load_state_dict(loader.state_dict() | {"position": 2 * collectives.rank()})
        next(iter(loader))

    assert 'rank 1: {"samples": [2, 4]}' in failed(elsewhere, MismatchError)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_arguments_and_states_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ArgumentError, match="Stream has no length or no samples by index"):
        BatchLoader(Stream(), 2)
    with pytest.raises(ArgumentError, match="batch_size must be at least 1, got 0"):
        BatchLoader(range(3), 0)
    with pytest.raises(ArgumentError, match="DataLoader has no option num_wrokers"):
        BatchLoader(range(3), 2, num_wrokers=2)
    with pytest.raises(MeshError, match="rank 0 is not part of"):
        world(2).run(lambda: BatchLoader(range(3), 2, Mesh((1,), (1,))))
    with pytest.raises(MeshError):
        BatchLoader(range(3), 2, Mesh((1,), names=("dp",)), axis="data")
    loader = BatchLoader(range(3), 2)
    state = loader.state_dict()
    with pytest.raises(ArgumentError, match="num_samples is 4 in the state and 3 here"):
        loader.load_state_dict(state | {"num_samples": 4})
    with pytest.raises(ArgumentError, match="seed is None in the state"):
        loader.load_state_dict({})
    for position in (9, "2", 2.5, None):
        with pytest.raises(ArgumentError, match="a position of 0 to 3, got 0 and"):
            loader.load_state_dict(state | {"position": position})  # type: ignore[arg-type]
