"""A model's own tensor-parallel plan: every style that transformers has, parameters named by it, tied weights."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import DTensor, Mesh, Replicate, Shard
from shardwise.errors import PlanError
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module, plan_from_transformers
from shardwise.parallel.transformers_plan import STYLES, WITHOUT_STYLE
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.parallel.one_process import full
from tools.model_zoo import FAMILIES
from tools.models import Trial

TOY_PLAN = {
    "table": "embedding_colwise",
    "norm": "sequence_parallel",
    "up": "packed_colwise",
    "down": "rowwise_rep",
    "wide": "colwise_rep",
    "stack": "packed_rowwise",
    "bias": "packed_colwise",
    "scale": "replicate",
    "inner": "all_reduce",
    "inner.weight": "colwise",
    "absent.*": "rowwise",
}


class Toy(nn.Module):
    """One layer for each style that no small model of transformers has. 7 and 10 features: 3 ranks divide neither."""

    def __init__(self) -> None:
        super().__init__()
        self._tp_plan = dict(TOY_PLAN)
        self.table, self.norm = nn.Embedding(5, 7), nn.LayerNorm(7)
        self.up, self.down, self.wide = nn.Linear(7, 10), nn.Linear(10, 7), nn.Linear(7, 7)
        self.inner, self.scale = nn.Linear(7, 7), nn.Parameter(torch.randn(7))
        self.stack, self.bias = nn.Parameter(torch.randn(2, 7, 10)), nn.Parameter(torch.randn(10))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.table(ids))
        x = self.down(self.up(x).relu()) + self.inner(self.wide(x))
        result: Tensor = ((x @ self.stack[1] + self.bias).sum(-1, keepdim=True) + self.scale).square()
        return result


def learnt(model: nn.Module, *inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    out = model(*inputs)
    out.sum().backward()
    grads = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return full(out.detach()), grads


@world(3)
def test_styles_that_no_small_model_has_equal_one_process() -> None:
    torch.manual_seed(0)
    plain, ids = Toy().double(), torch.randint(5, (2, 4))
    want = learnt(deepcopy(plain), ids)
    assert len(want[1]) == len(list(plain.parameters()))
    model = parallelize_module(deepcopy(plain), Mesh((3,)), plan_from_transformers(plain))
    sharded = {name for name, p in model.named_parameters() if isinstance(p, DTensor) and p.placements[0].is_shard()}
    assert sharded == {"table.weight", "up.weight", "up.bias", "down.weight", "wide.weight", "wide.bias", "stack",
                       "bias", "inner.weight"}  # fmt: skip
    assert_close(learnt(model, ids), want)


def test_every_style_of_transformers_is_known() -> None:
    from transformers.distributed import expert_parallel  # noqa: F401 - it registers styles, too
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    assert set(ALL_PARALLEL_STYLES) <= {*STYLES, *WITHOUT_STYLE}


MODELS = ("Llama", "Phi-3", "Qwen3", "Mixtral", "Qwen2-MoE", "DeepSeek-V3", "GPT-OSS")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_under_their_own_plans_equal_one_process(name: str) -> None:
    """Dense ones, ones that gather outputs, and those of experts, whose plans name parameters."""
    trial = Trial(FAMILIES[name])
    assert trial.judge("values", "own", 3) == ""

    def body() -> float:
        model = parallelize_module(deepcopy(trial.plain), None, plan_from_transformers(trial.plain))
        here = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters())
        return float(here / sum(p.numel() for p in model.parameters()))

    assert max(world(3).run(body)) < 0.6  # a rank has one of two key heads, and 2 of 4 experts of GPT-OSS


@pytest.mark.slow
def test_a_plan_names_modules_in_units_of_heads_and_parameters_of_experts() -> None:
    plan = plan_from_transformers(FAMILIES["Mixtral"].build())
    assert plan["model.layers.*.self_attn.q_proj"] == ColwiseParallel(use_local_output=False, unit=16)
    assert plan["model.layers.*.self_attn.k_proj"] == ColwiseParallel(use_local_output=False, unit=8)
    assert plan["model.layers.*.mlp.experts.gate_up_proj"] == Shard(1)
    assert plan["model.layers.*.mlp.experts.down_proj"] == Shard(2)
    assert plan_from_transformers(FAMILIES["GPT-OSS"].build())["model.layers.*.mlp.experts.down_proj"] == Shard(0)


@pytest.mark.slow
def test_a_table_that_is_tied_to_a_layer_of_the_plan_is_sharded_with_it() -> None:
    """The plan of GPT-NeoX names the layer only."""
    family = FAMILIES["GPT-NeoX"]
    trial = Trial(replace(family, config={**family.config, "tie_word_embeddings": True}))
    assert trial.plain.gpt_neox.embed_in.weight is trial.plain.lm_head.weight
    assert plan_from_transformers(trial.plain)["gpt_neox.embed_in"] == RowwiseParallel()
    assert trial.judge("values", "own", 2) == ""


def test_a_model_without_a_plan_or_with_an_unknown_style_is_refused() -> None:
    with pytest.raises(PlanError, match=r"Linear has no tensor-parallel plan.*\n?.*Fix: shard_module"):
        plan_from_transformers(nn.Linear(2, 2))
    model = Toy()
    model._tp_plan["up"] = "colwize"
    with pytest.raises(PlanError, match=r"Toy: its plan has the style 'colwize' for 'up', which is not known here"):
        plan_from_transformers(model)


@world(4)
def test_a_plan_may_name_parameters_and_their_placements() -> None:
    torch.manual_seed(0)
    plain, ids = Toy().double(), torch.randint(5, (2, 4))
    want = learnt(deepcopy(plain), ids)
    mesh = Mesh((2, 2), names=("dp", "tp"))
    model = parallelize_module(
        deepcopy(plain), mesh, {"stack": Shard(2), "*.weight": Replicate(), "inner.bias": Shard(0)}
    )
    assert as_dtensor(model.stack).placements == (Replicate(), Shard(2))
    assert not isinstance(model.bias, DTensor)
    assert_close(learnt(model, ids), want)
