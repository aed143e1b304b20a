"""The toy models: torch's names, torch's arithmetic, and code that does not know how many ranks there are."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.testing._internal.distributed._tensor.common_dtensor as theirs
from torch import Tensor, nn

from shardwise import DTensor, Replicate, Shard, distribute_tensor, shard_module, testing
from shardwise._models import ModelArgs, Transformer
from shardwise.errors import ConfigError
from shardwise.testing import world

SWITCHES = [
    {},
    {"dropout_p": 0.0, "weight_tying": False},
    {"checkpoint_activations": True, "use_attn_mask": False},
    {"n_layers": 1, "dim": 24, "n_heads": 6, "vocab_size": 11},
    {"num_experts": 3},
]


def gradients(module: nn.Module, inputs: Tensor, seed: int = 1) -> list[Tensor]:
    torch.manual_seed(seed)
    out = module(inputs)
    out.square().mean().backward()
    return [out.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]


def same(ours: nn.Module, peer: nn.Module, inputs: Tensor) -> None:
    assert list(ours.state_dict()) == list(peer.state_dict())
    for name, value in peer.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
    for mine, expected in zip(gradients(ours, inputs), gradients(peer, inputs), strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_one_seed_makes_torch_s_transformer_bit_for_bit(switches: dict[str, int]) -> None:
    made: list[nn.Module] = []
    for kit in (testing, theirs):
        torch.manual_seed(3)
        made.append(kit.Transformer(kit.ModelArgs(**switches)))
    same(made[0], made[1], torch.randint(8, (3, 7)))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("RMSNormPython", (10,)), ("MLPModule", ("cpu",)), ("MLPModule", ("cpu", False)), ("MLPStacked", ("cpu", 3))],
)
def test_the_small_models_are_torch_s_bit_for_bit(name: str, arguments: tuple[object, ...]) -> None:
    same(getattr(testing, name)(*arguments), getattr(theirs, name)(*arguments), torch.randn(2, 3, 10))


def test_shared_key_and_value_heads_are_those_repeated_for_each_group() -> None:
    torch.manual_seed(0)
    few = Transformer(ModelArgs(n_kv_heads=2, hidden_dim=20, dropout_p=0.0))
    many = Transformer(ModelArgs(hidden_dim=20, dropout_p=0.0))
    states = few.state_dict()
    for name, value in states.items():
        if name.endswith(("wk.weight", "wv.weight")):
            states[name] = value.unflatten(0, (2, 4)).repeat_interleave(2, dim=0).flatten(0, 1)
    many.load_state_dict(states)
    tokens = torch.randint(8, (2, 16))
    torch.testing.assert_close(few(tokens), many(tokens))


@pytest.mark.parametrize(
    ("switches", "words"),
    [
        ({"n_heads": 3}, "3 heads do not divide dim=16"),
        ({"n_kv_heads": 3}, "cannot be shared evenly by 4 query heads"),
        ({"vocab_size": 0}, "vocab_size of a Transformer is 0"),
        ({"hidden_dim": -1}, "ffn_dim of a Transformer is -1"),
    ],
)
def test_sizes_that_do_not_fit_raise(switches: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ModelArgs(**switches)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=words):
        replace(ModelArgs(), **switches)  # type: ignore[arg-type]


def test_an_empty_batch_passes_through_and_a_sequence_that_is_too_long_raises() -> None:
    model = Transformer(ModelArgs())
    assert model(torch.zeros(0, 5, dtype=torch.int64)).shape == (0, 5, 8)
    with pytest.raises(ConfigError, match="17 tokens is longer than max_seq_len=16"):
        model(torch.zeros(1, 17, dtype=torch.int64))


COLUMNS = {"layers.**.w[qkv].weight": Shard(0), "layers.**.w[o2].weight": Shard(1), "layers.**.w1.**": Shard(0)}
TABLES = ("tok_embeddings.weight", "output.weight")  # one parameter, unless weight_tying is off
PLANS = {
    "tensor parallel": COLUMNS,
    "tables in rows": {"**.*embeddings.weight": Shard(0), "output.weight": Shard(0)},
    "tables in uneven rows": dict.fromkeys(TABLES, Shard(0, (3, 0, 5))),
    "tables in columns": dict.fromkeys(TABLES, Shard(1)),
    "all in rows": {"**.weight": Shard(0)},
    "replicated": {},
}


EXPERTS, UNTIED = {"num_experts": 2}, {"n_kv_heads": 2, "weight_tying": False}


@pytest.mark.parametrize(
    ("plan", "size", "switches"),
    [
        ("tensor parallel", 3, UNTIED),
        ("tensor parallel", 5, EXPERTS),
        ("tables in rows", 2, UNTIED),
        ("tables in uneven rows", 3, {}),
        ("tables in uneven rows", 3, UNTIED),
        ("tables in columns", 4, {}),
        ("all in rows", 3, EXPERTS),
        ("all in rows", 3, {}),
        ("replicated", 1, EXPERTS),
    ],
    ids=str,
)
def test_a_sharded_transformer_has_the_plain_one_s_gradients(plan: str, size: int, switches: dict[str, int]) -> None:
    torch.manual_seed(0)
    args = ModelArgs(**{"dropout_p": 0.0, "n_layers": 1, **switches})  # type: ignore[arg-type]
    model, tokens = Transformer(args), torch.randint(8, (4, 6))
    expected = gradients(model, tokens)

    def check() -> None:
        sharded = Transformer(args)
        sharded.load_state_dict(model.state_dict())
        shard_module(sharded, PLANS[plan])
        assert (sharded.output.weight is sharded.tok_embeddings.weight) == args.weight_tying
        for inputs in (tokens, *(distribute_tensor(tokens, None, [p]) for p in (Replicate(), Shard(0), Shard(1)))):
            sharded.zero_grad()
            for ours, value in zip(gradients(sharded, inputs), expected, strict=True):
                assert isinstance(ours, DTensor)
                torch.testing.assert_close(ours.full_tensor(), value, atol=1e-5, rtol=1e-5)

    world(size).run(check)


@pytest.mark.parametrize("switched", [False, True])
def test_checkpointed_blocks_run_again_in_backward_and_only_those(switched: bool) -> None:
    model = Transformer(ModelArgs(n_layers=2, checkpoint_activations=switched))
    runs: list[str] = []
    for name in ("norm", "layers.0", "layers.1"):
        model.get_submodule(name).register_forward_pre_hook(partial(lambda name, *_: runs.append(name), name))
    loss = model(torch.zeros(2, 3, dtype=torch.int64)).sum()
    assert runs == ["layers.0", "layers.1", "norm"]
    loss.backward()
    assert runs[3:] == (["layers.1", "layers.0"] if switched else [])
