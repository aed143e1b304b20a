"""`BatchLoader`: the same batches on any mesh and number of workers, resumed anywhere; and what is no batch."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from shardwise import DTensor, Mesh, Replicate, Shard, collectives
from shardwise.data import BatchLoader
from shardwise.embedding import (
    SGD,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    prefetch,
    shard_embeddings,
)
from shardwise.errors import ArgumentError, MeshError, MismatchError
from shardwise.testing import world

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


@pytest.mark.parametrize("num_workers", [0, 1])
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
        assert x.to_local().shape[0] == mesh_share(4)
        return [want[0][0], *steps(loader)], steps(loader)

    def mesh_share(count: int) -> int:
        return count // {2: 2, 4: 2}[collectives.world_size()]

    meshes: list[tuple[int, Mesh | None, list[Any]]] = (
        [(2, None, [S0])] if num_workers else [(2, None, [S0]), (4, Mesh((2, 2), names=("dp", "tp")), [S0, R])]
    )
    for size, mesh, placements in meshes:
        for epochs in world(size).run(body, mesh, placements):
            assert list(epochs) == want


def test_a_rank_without_samples_has_empty_tensors_of_the_dtypes_and_sizes() -> None:
    def body() -> tuple[Any, ...]:
        loader = BatchLoader(Samples(), 4, Mesh((2, 2), names=("a", "b")))
        x, y = list(loader)[-1]
        assert (x.shape, y.shape) == ((3, 4), (3,))
        return tuple(x.to_local().shape), y.to_local().tolist(), x.dtype, y.dtype

    float32, int64 = torch.float32, torch.int64
    assert world(4).run(body) == [((1, 4), [8], float32, int64), ((1, 4), [9], float32, int64),
                                  ((1, 4), [10], float32, int64), ((0, 4), [], float32, int64)]  # fmt: skip


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
    with pytest.raises(ArgumentError, match="another iteration began"):
        next(older)


def test_the_last_batch_may_be_left_out() -> None:
    loader = BatchLoader(Samples(), 4, drop_last=True)
    assert [indices for _, indices in steps(loader)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(loader) == 2
    assert loader.state_dict()["epoch"] == 1


def test_loading_leaves_the_generators_of_the_process_alone() -> None:
    torch.manual_seed(0), random.seed(0), np.random.seed(0)  # noqa: NPY002
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index] # noqa: NPY002
    list(BatchLoader(Samples(), 4, shuffle=True))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]  # type: ignore[index] # noqa: NPY002


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
    ],
)
def test_what_is_no_batch_is_refused(collate: Any, text: str) -> None:
    def body() -> str:
        with pytest.raises(ArgumentError) as caught:
            next(iter(BatchLoader(range(4), 4, collate_fn=collate)))
        return str(caught.value)

    assert all(text in message for message in world(2).run(body))


def test_ranks_with_different_lengths_or_loaders_are_refused() -> None:
    def padded(samples: list[int]) -> Tensor:
        return torch.zeros(len(samples), max(samples))

    def body(seeds: tuple[int, int], collate: Any) -> str:
        loader = BatchLoader(range(1, 5), 4, seed=seeds[collectives.rank()], collate_fn=collate)
        with pytest.raises(MismatchError) as caught:
            next(iter(loader))
        return str(caught.value)

    (lengths,) = set(world(2).run(body, (0, 0), padded))
    assert "torch.float32, (2,) a sample" in lengths
    assert "pad samples to one length in collate_fn" in lengths
    (seeds,) = set(world(2).run(body, (0, 1), torch.tensor))
    assert "seed" in seeds


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_arguments_and_states_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ArgumentError, match="Stream has no length or no samples by index"):
        BatchLoader(Stream(), 2)
    with pytest.raises(ArgumentError, match="batch_size must be at least 1, got 0"):
        BatchLoader(range(3), 0)
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
    with pytest.raises(ArgumentError, match="position 9 are of no state"):
        loader.load_state_dict(state | {"position": 9})
