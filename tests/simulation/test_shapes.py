"""The shapes have the sizes of the models they are named after, and steps that run."""

from collections.abc import Callable

import pytest
import torch

from shardwise import Mesh
from shardwise._cli.simulate import OPTIONS
from shardwise._cli.simulate import SHAPES as NAMED
from shardwise._models import ModelArgs, Transformer
from shardwise.simulation import simulate
from shardwise.simulation.api import Step
from shardwise.simulation.shapes import (
    LLAMA_70B,
    MIXTRAL_8X7B,
    SHAPES,
    BalancedExperts,
    Options,
    recommender,
    transformer,
)

MESH = Mesh((2, 2), names=("dp", "tp"))
SMALL = ModelArgs(n_layers=1, vocab_size=32, dim=16, n_heads=4, dropout_p=0.0, weight_tying=False)
EXPERTS = ModelArgs(**{**vars(SMALL), "num_experts": 4})


def test_the_command_names_all_shapes_and_their_options() -> None:
    assert tuple(SHAPES) == NAMED
    assert {name for shape in SHAPES.values() for name in shape.options} == set(OPTIONS)


def test_sizes_are_those_of_the_models() -> None:
    with torch.device("meta"):
        llama = Transformer(ModelArgs(**{**vars(LLAMA_70B), "n_layers": 1}))
        mixtral = BalancedExperts(MIXTRAL_8X7B.dim, MIXTRAL_8X7B.ffn_dim, MIXTRAL_8X7B.num_experts)
    of_layer = sum(p.numel() for p in llama.layers.parameters())
    assert of_layer * 80 + 2 * 32_000 * 8192 == pytest.approx(68.98e9, rel=2e-3)  # of Llama 2 70B
    assert sum(p.numel() for p in mixtral.parameters()) == 3 * 8 * 4096 * 14_336 + 8 * 4096


@pytest.mark.parametrize("fully_shard", [False, True])
@pytest.mark.parametrize("args", [SMALL, EXPERTS])
def test_transformers_are_sharded(args: ModelArgs, fully_shard: bool) -> None:
    options = Options(context=8, batch_size=3, fully_shard=fully_shard)
    found = simulate(lambda mesh: transformer(args, options, mesh), mesh=MESH)
    (one,) = found.classes
    full_bytes = sum(p.nbytes for p in Transformer(ModelArgs(**{**vars(args), "max_seq_len": 8})).parameters())
    assert {"dp", "tp"} <= {found.axes(x) for x in one.collectives}
    assert one.memory["parameters"] < full_bytes / (3 if fully_shard else 1.2)


def test_tables_of_a_recommender_are_sharded_over_all_ranks() -> None:
    def build(tables: int) -> Callable[[Mesh], Step]:
        return lambda mesh: recommender(Options(batch_size=2), mesh, tables=tables, rows=64, dim=8)

    torch.manual_seed(0)
    few, more = (simulate(build(tables), mesh=Mesh((4,), names=("dp",))).classes[0] for tables in (2, 3))
    top = 8 * 1024 * 4
    assert more.memory["parameters"] - few.memory["parameters"] == 64 * 8 * 4 // 4 + top
    of_tables = [[x.sent_bytes for x in one.collectives if "embedding collection" in x.cause] for one in (few, more)]
    assert [len(sent) for sent in of_tables] == [3, 3]  # ids, results and gradients of all tables at once
    assert sum(of_tables[0]) < sum(of_tables[1])


def test_tokens_choose_experts_equally_often() -> None:
    layer = BalancedExperts(8, 16, 4)
    chosen = layer.route(torch.randn(10, 8)).chosen
    assert chosen.flatten().bincount().tolist() == [5, 5, 5, 5]
    assert (chosen[:, 0] != chosen[:, 1]).all()
