"""Plain collections beside sums of rows, and what sharded ones have in common with them."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from shardwise._layout import Mesh, OnRanks, Placement, Replicate, Shard
from shardwise.embedding import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
    shard_embeddings,
)
from shardwise.errors import ArgumentError, ConfigError, IdError, IdTypeError
from shardwise.testing import world

CONFIGS = [
    EmbeddingBagConfig(10, 4, "users", feature_names=["user"], padding_idx=3),
    EmbeddingBagConfig(20, 2, "items", feature_names=["item", "last"], pooling=PoolingType.MEAN, padding_idx=0),
    EmbeddingBagConfig(12, 3, "other", feature_names=["user"], max_norm=0.5),
]
IDS = {"last": [[0], [0, 4], []], "user": [[1, 3, 3], [], [9]], "item": [[19, 19, 1], [2], []]}
OUTPUTS = ["user@users", "item", "last", "user@other"]


def batch(ids: dict[str, list[list[int]]] = IDS, weighted: bool = False) -> KeyedJaggedTensor:
    flat = [bag for bags in ids.values() for bag in bags]
    values = torch.tensor([i for bag in flat for i in bag], dtype=torch.int64)
    weights = torch.arange(len(values)) + 1.0 if weighted else None
    lengths = torch.tensor([len(bag) for bag in flat])
    return KeyedJaggedTensor(list(ids), values, weights, lengths, stride_per_key=[len(bags) for bags in ids.values()])


def test_tables_are_iterated_over_by_name() -> None:
    tables = EmbeddingBagCollection(CONFIGS).embedding_bags
    assert list(tables) == ["users", "items", "other"]
    assert len(tables) == 3
    assert "items" in tables
    assert "user" not in tables
    assert [tuple(tables[name].weight.shape) for name in tables] == [(10, 4), (20, 2), (12, 3)]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("variable", [False, True])
def test_bags_beside_sums_of_rows(weighted: bool, variable: bool) -> None:
    torch.manual_seed(0)
    collection = EmbeddingBagCollection(CONFIGS, weighted)
    ids = {name: bags[: 2 if variable and name == "user" else 3] for name, bags in IDS.items()}
    features = batch(ids, weighted)
    tables = {name: value.clone() for name, value in collection.state_dict().items()}
    out = collection(features)
    assert out.keys() == OUTPUTS
    for key, config in zip(OUTPUTS, (CONFIGS[0], CONFIGS[1], CONFIGS[1], CONFIGS[2]), strict=True):
        table = tables[f"embedding_bags.{config.name}.weight"]
        if config.max_norm is not None:
            table = table / (table.norm(dim=1, keepdim=True) / config.max_norm).clamp(min=1)
        of_feature = features[key.split("@")[0]]
        weights = of_feature.to_dense_weights() if weighted else [torch.ones(len(x)) for x in of_feature.to_dense()]
        rows = []
        for bag, of_ids in zip(of_feature.to_dense(), weights, strict=True):
            kept = bag != config.padding_idx if config.padding_idx is not None else torch.ones(len(bag)) > 0
            total = (table[bag[kept]] * of_ids[kept, None]).sum(0)
            is_mean = config.pooling is PoolingType.MEAN
            rows.append(total / max(1, int(kept.sum())) if is_mean else total)
        torch.testing.assert_close(out[key], torch.stack(rows))


def test_rows() -> None:
    configs = [
        EmbeddingConfig(
            c.num_embeddings, c.embedding_dim, c.name, feature_names=c.feature_names, padding_idx=c.padding_idx
        )
        for c in CONFIGS
    ]
    collection = EmbeddingCollection(configs)
    features = batch()
    out = collection(features)
    assert list(out) == OUTPUTS
    for key, config in zip(OUTPUTS, (configs[0], configs[1], configs[1], configs[2]), strict=True):
        of_feature = features[key.split("@")[0]]
        assert torch.equal(out[key].values(), collection.embeddings[config.name].weight[of_feature.values()])
        assert torch.equal(out[key].lengths(), of_feature.lengths())
    sum(x.values().sum() for x in out.values()).backward()
    gradient = collection.embeddings["users"].weight.grad
    assert gradient is not None
    assert gradient[3].eq(0).all()  # padding
    assert gradient[1].eq(1).all()


def test_a_bad_id_of_minus_one_is_not_the_padding_of_a_table_without_padding() -> None:
    configs = [
        EmbeddingBagConfig(4, 1, "zeros", feature_names=["f"], pooling=PoolingType.MEAN, bad_ids="zero"),
        EmbeddingBagConfig(4, 1, "padded", feature_names=["g"], padding_idx=0),
    ]
    collection = EmbeddingBagCollection(configs)
    nn.init.ones_(collection.embedding_bags["zeros"].weight)
    out = collection(batch({"f": [[1, -1], [-7, 2]], "g": [[0], []]}))
    assert out["f"].flatten().tolist() == [0.5, 0.5]  # zeros count in a mean, whatever the bad id


def test_gradients_of_weights() -> None:
    collection = EmbeddingBagCollection([CONFIGS[0]], is_weighted=True)
    ids = torch.tensor([1, 3, 9])
    weights = torch.ones(3, requires_grad=True)
    collection(KeyedJaggedTensor(["user"], ids, weights, torch.tensor([2, 1]))).values().sum().backward()
    expected = collection.embedding_bags["users"].weight.detach().sum(1)[ids] * torch.tensor([1.0, 0.0, 1.0])
    torch.testing.assert_close(weights.grad, expected)


BAD = 1_000
POLICIES = {"clip": 9, "hash": BAD % 10, "zero": None}


def with_policy(policy: str, bad: int, sharded: bool, pooled: bool) -> Tensor:
    kind = EmbeddingBagConfig if pooled else EmbeddingConfig
    configs = [
        kind(10, 2, "t", feature_names=["f"], bad_ids=policy),
        kind(10, 2, "u", feature_names=["g"]),
    ]
    collection = (EmbeddingBagCollection if pooled else EmbeddingCollection)(configs)  # type: ignore[arg-type]
    for parameter in collection.parameters():
        parameter.data = torch.arange(20.0).view(10, 2)
    module: nn.Module = shard_embeddings(collection, {"t": Shard(0)}, Mesh((2,))) if sharded else collection
    ids = {"f": [[1, bad], [2]], "g": [[3], [0, 0]]}
    out = module(batch(ids))
    return out["f"] if pooled else out["f"].values()  # type: ignore[no-any-return]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("pooled", [False, True])
def test_bad_ids_of_one_table(policy: str, pooled: bool) -> None:
    good = POLICIES[policy]
    row = torch.zeros(2) if good is None else torch.arange(20.0).view(10, 2)[good]
    first, second = torch.tensor([2.0, 3.0]), torch.tensor([4.0, 5.0])
    expected = torch.stack([first + row, second] if pooled else [first, row, second])
    assert torch.equal(with_policy(policy, BAD, False, pooled).detach(), expected)
    for found in world(2).run(with_policy, policy, BAD, True, pooled):
        assert torch.equal(found.detach(), expected)


@pytest.mark.parametrize("bad", [10, -1, 2**63 - 1])
@pytest.mark.parametrize("pooled", [False, True])
def test_bad_ids_are_named(bad: int, pooled: bool) -> None:
    text = "Table t, feature f: id {}, at position 1 of sample 0{}, is not in the table, whose valid ids are 0 to 9"
    with pytest.raises(IdError, match=text.format(bad, "")):
        with_policy("error", bad, False, pooled)
    with pytest.raises(IdError, match=text.format(bad, " of rank 0")):
        world(2).run(with_policy, "error", bad, True, pooled)


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
