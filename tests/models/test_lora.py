"""LoRA adapters of peft on a sharded Llama: loss and gradients are those of one process, in each order of the page."""

import importlib
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from shardwise import Mesh, Shard, rank, shard_module
from shardwise.errors import PlanError
from shardwise.parallel import fully_shard, parallelize_module, plan_from_transformers
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor

# peft 0.21 reads an alias that transformers 5.23 deprecates.
OF_PEFT = "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(OF_PEFT)]

S0, S1 = Shard(0), Shard(1)
LAYOUTS = {
    "**.q_proj.base_layer.weight": S0, "**.q_proj.lora_B.*.weight": S0,
    "**.down_proj.base_layer.weight": S1, "**.down_proj.lora_A.*.weight": S1,
}  # fmt: skip
IDS = torch.randint(3, 37, (4, 7), generator=torch.Generator().manual_seed(1))


def library(name: str) -> ModuleType:
    """Imported when it is first used: transformers takes seconds, also where these tests are left out."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    return importlib.import_module(name)


def llama() -> Any:
    """Three keys, which no two ranks divide."""
    transformers = library("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=37, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def adapted(model: Any) -> Any:
    """Adapters of random values in all layers of the blocks: zeros would have no gradients in one of two matrices."""
    peft = library("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    return peft.get_peft_model(model, config)


def full(x: Tensor) -> Tensor:
    return as_dtensor(x).full_tensor() if hasattr(x, "placements") else x


def learnt(model: Any, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss, and gradients of what is trained."""
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return full(loss).detach(), {name: full(p.grad) for name, p in model.named_parameters() if p.requires_grad}


def by_styles() -> Any:
    model = llama()
    parallelize_module(model, None, plan_from_transformers(model))
    return adapted(model)


def by_layouts() -> Any:
    return shard_module(adapted(llama()), LAYOUTS)


@pytest.mark.parametrize("sharded", [by_styles, by_layouts])
def test_loss_and_gradients_of_adapters_equal_one_process(sharded: Callable[[], Any]) -> None:
    expected = learnt(adapted(llama()), IDS)
    assert len(expected[1]) == 2 * 2 * 7  # two matrices for each of seven layers in two blocks
    for got in world(2).run(lambda: learnt(sharded(), IDS)):
        assert_close(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(2, 1), (2, 2)])
def test_fully_sharded_adapters_have_the_gradients_of_the_mean_over_the_data_axis(shape: tuple[int, int]) -> None:
    _, expected = learnt(adapted(llama()), IDS)

    def body() -> dict[str, Tensor]:
        mesh, model = Mesh(shape, names=("dp", "tp")), llama()
        parallelize_module(model, mesh["tp"], plan_from_transformers(model))
        found = adapted(model)
        for unit in (*model.model.layers, model):
            fully_shard(unit, mesh=mesh["dp"])
        return learnt(found, IDS.chunk(2)[rank() // shape[1]])[1]

    for got in world(shape[0] * shape[1]).run(body):
        assert_close(got, expected, rtol=1e-4, atol=1e-6)


@world(2)
def test_the_own_plan_of_a_model_is_refused_after_the_adapters() -> None:
    model = llama()
    plan = plan_from_transformers(model)
    adapted(model)
    with pytest.raises(PlanError, match=r"q_proj: ColwiseParallel supports .*self_attn\.q_proj\.base_layer'"):
        parallelize_module(model, None, plan)
