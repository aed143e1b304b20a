"""Plain collections: weights, first values, what is refused. `check_plain` (cases.py) has results and gradients."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from shardwise._layout import Mesh, OnRanks, Placement, Replicate, Shard
from shardwise.embedding import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    KeyedJaggedTensor,
    PoolingType,
    shard_embeddings,
)
from shardwise.errors import ArgumentError, ConfigError, IdTypeError
from shardwise.testing import world

CONFIGS = [
    EmbeddingBagConfig(10, 4, "users", feature_names=["user"], padding_idx=3),
    EmbeddingBagConfig(20, 2, "items", feature_names=["item", "last"], pooling=PoolingType.MEAN, padding_idx=0),
    EmbeddingBagConfig(12, 3, "other", feature_names=["user"], max_norm=0.5),
]
IDS = {"last": [[0], [0, 4], []], "user": [[1, 3, 3], [], [9]], "item": [[19, 19, 1], [2], []]}


def batch(ids: dict[str, list[list[int]]] = IDS) -> KeyedJaggedTensor:
    flat = [bag for bags in ids.values() for bag in bags]
    return KeyedJaggedTensor(
        list(ids), torch.tensor([i for bag in flat for i in bag]), lengths=torch.tensor([len(bag) for bag in flat])
    )


def test_tables_are_iterated_over_by_name() -> None:
    tables = EmbeddingBagCollection(CONFIGS).embedding_bags
    assert list(tables) == ["users", "items", "other"]
    assert len(tables) == 3
    assert "items" in tables
    assert "user" not in tables
    assert [tuple(tables[name].weight.shape) for name in tables] == [(10, 4), (20, 2), (12, 3)]


def test_gradients_of_weights() -> None:
    collection = EmbeddingBagCollection([CONFIGS[0]], is_weighted=True)
    ids = torch.tensor([1, 3, 9])
    weights = torch.ones(3, requires_grad=True)
    collection(KeyedJaggedTensor(["user"], ids, weights, torch.tensor([2, 1]))).values().sum().backward()
    expected = collection.embedding_bags["users"].weight.detach().sum(1)[ids] * torch.tensor([1.0, 0.0, 1.0])
    torch.testing.assert_close(weights.grad, expected)


def first_values(placement: Placement) -> dict[str, Tensor]:
    torch.manual_seed(torch.initial_seed() if placement == Shard(1) else 7)
    configs = [
        replace(CONFIGS[0], num_embeddings=70_001),
        replace(CONFIGS[1], weight_init_min=2.0, weight_init_max=3.0),
    ]
    configs.append(replace(CONFIGS[2], init_fn=nn.init.normal_, max_norm=None))
    torch.manual_seed(7)
    plan = {"users": placement, "items": placement, "other": placement}
    sharded = shard_embeddings(EmbeddingBagCollection(configs, device="meta"), plan, Mesh((2,)))
    return {name: value.full_tensor() for name, value in sharded.state_dict().items()}


def test_tables_on_meta_start_with_the_same_numbers_in_every_layout() -> None:
    results = [world(2).run(first_values, placement)[0] for placement in (Replicate(), Shard(0), Shard(1), OnRanks(1))]
    users, items, other = results[0].values()
    assert users.unique().numel() > 200_000
    assert -(70_001**-0.5) <= users.min() < users.max() <= 70_001**-0.5
    assert 2 <= items.min() < items.max() <= 3
    assert other.abs().max() > 1
    for found in results[1:]:
        for name, value in results[0].items():
            assert torch.equal(found[name], value), name


def test_collections_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="Two tables have the name 'users'"):
        EmbeddingBagCollection([CONFIGS[0], CONFIGS[0]])
    with pytest.raises(ConfigError, match="needs a table"):
        EmbeddingCollection([])
    with pytest.raises(ArgumentError, match="tables must be"):
        EmbeddingBagCollection(CONFIGS[0])  # type: ignore[arg-type]
    collection = EmbeddingBagCollection(CONFIGS, is_weighted=True)
    with pytest.raises(IdTypeError, match="no feature 'user'; it has 'item'"):
        collection(batch({"item": [[1]]}))
    with pytest.raises(IdTypeError, match="weighted, but the input has no weights"):
        collection(batch())
    with pytest.raises(IdTypeError, match="Ids are int32 or int64"):
        EmbeddingBagCollection(CONFIGS)(KeyedJaggedTensor(list(IDS), torch.ones(0), lengths=torch.zeros(3).long()))
    with pytest.raises(IdTypeError, match="looks up a KeyedJaggedTensor, got Tensor"):
        collection(torch.ones(2))
    with pytest.raises(IdTypeError, match="Tables are on meta, ids on cpu"):
        EmbeddingBagCollection(CONFIGS, device="meta")(batch())


WRONG = {
    "rows": ({"num_embeddings": 0}, "0 rows of 4 columns"),
    "attribute": ({"name": "type"}, "Fix: 'type_table'"),
    "dot": ({"name": "a.b"}, "no dot"),
    "no features": ({"feature_names": []}, r"Fix: feature_names=\['users'\]"),
    "twice": ({"feature_names": ["a", "a"]}, "name one twice"),
    "padding": ({"padding_idx": 10}, "padding_idx 10 is not in 0 to 9"),
    "norm": ({"max_norm": 0.0}, "max_norm 0.0 is not positive"),
    "integers": ({"data_type": torch.int64}, "has no gradients"),
}


@pytest.mark.parametrize("name", WRONG)
def test_configs_that_no_table_has_are_refused(name: str) -> None:
    change, text = WRONG[name]
    with pytest.raises(ConfigError, match=text):
        replace(CONFIGS[0], **change)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="bad_ids must be 'error', 'clip', 'hash' or 'zero', got 'skip'"):
        replace(CONFIGS[0], bad_ids="skip")
