"""Plans of models of Hugging Face: a step under the plan is that of one process, with uneven heads and vocabularies."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import Mesh, Shard
from shardwise import _collectives as collectives
from shardwise.errors import MismatchError
from shardwise.parallel import ColwiseParallel, RowwiseParallel
from shardwise.parallel.experts import MixtureOfExperts
from shardwise.plan import Link, ModulePlan, Topology, plan_module
from shardwise.testing import world
from tests.parallel.one_process import full, raised
from tests.timeouts import PATIENCE_SECONDS
from tools.model_zoo import FAMILIES

LINK = Link(1e9, 1e-7)
# So slow that sharding pays for tiny modules.
SLOW = Topology(1, 4, 1 << 30, LINK, LINK, flops=1e9, memory_bandwidth=1e10, lookup_bandwidth=1e9, device_type="cpu")
UNEVEN: dict[str, Mapping[str, Any]] = {  # three heads or key heads; the vocabulary has 37 entries
    "Llama": {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 3},
    "GPT-2": {"n_head": 3, "n_embd": 30},
    "Qwen3-MoE": {
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "num_experts": 5,
        "experts_implementation": "batched_mm",
    },
    "BERT": {"num_attention_heads": 3, "hidden_size": 30},
    "T5": {"num_heads": 3},
    "ViT": {"num_attention_heads": 3, "hidden_size": 30},
}
MESHES = [Mesh((4,)), Mesh((2, 2), names=("dp", "tp"))]
QUICK = [("GPT-2", MESHES[0]), ("BERT", MESHES[0]), ("Llama", MESHES[1])]
CASES = [pytest.param(name, mesh, marks=[] if (name, mesh) in QUICK else pytest.mark.slow, id=f"{name}-{mesh.ndim}")
         for name in UNEVEN for mesh in MESHES]  # fmt: skip


def tiny(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model of one family, and a batch."""
    family = FAMILIES[name]
    family = replace(family, config={**family.config, **UNEVEN[name]})
    return family.build(), family.inputs()


def loss_of(model: nn.Module, **inputs: Tensor) -> Tensor:
    loss: Tensor = model(**inputs).loss
    return loss


def learnt(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    loss = loss_of(model, **inputs)
    loss.backward()
    return full(loss.detach()), {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_a_step_under_the_plan_is_that_of_one_process(name: str, mesh: Mesh) -> None:
    model, inputs = tiny(name)
    plan = plan_module(model, SLOW, inputs, mesh=mesh, forward=loss_of)
    assert any(isinstance(reason.placement, Shard) for reason in plan.reasons)
    parts = mesh.shape[0] if mesh.ndim > 1 else 1

    def body() -> tuple[Tensor, dict[str, Tensor]]:
        part = collectives.rank() // (mesh.size() // parts)
        return learnt(plan.apply(copy.deepcopy(model)), {n: x.chunk(parts)[part] for n, x in inputs.items()})

    found = world(mesh.size(), timeout=PATIENCE_SECONDS).run(body)
    loss, gradients = learnt(copy.deepcopy(model), inputs)
    assert_close(torch.stack([one[0] for one in found]).mean(), loss)
    for _, own in found:
        assert_close(own, gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("experts", [4, 5])
def test_experts_are_sharded_by_experts_or_their_features(experts: int, mesh: Mesh) -> None:
    torch.manual_seed(0)
    model, x = MixtureOfExperts(8, 16, experts).double(), torch.randn(4, 9, 8, dtype=torch.double)
    plan = plan_module(model, SLOW, (x,), mesh=mesh)
    assert plan.styles["w1"] in ((Shard(0),) if experts == 4 else (Shard(0), Shard(1)))
    parts = mesh.shape[0] if mesh.ndim > 1 else 1

    def body() -> tuple[Tensor, dict[str, Tensor]]:
        applied = plan.apply(copy.deepcopy(model))
        out = applied(x.chunk(parts)[collectives.rank() // (mesh.size() // parts)])
        out.sum().backward()
        return out.detach(), {name: parts * full(p.grad) for name, p in applied.named_parameters()}

    model(x).sum().backward()
    expected = {name: full(p.grad) for name, p in model.named_parameters()}
    for rank, (out, gradients) in enumerate(world(mesh.size()).run(body)):
        assert_close(out, model(x).chunk(parts)[rank // (mesh.size() // parts)])
        assert_close(gradients, expected)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_module_that_differs_on_one_rank_is_one_error_on_all(mesh: Mesh) -> None:
    units = ("1", "") if mesh.ndim > 1 else ()
    plan = ModulePlan(mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()}, units)

    def apply() -> None:
        missing = collectives.rank() == 2
        plan.apply(nn.Sequential(nn.Linear(8, 8), *[nn.Linear(8, 8)][missing:]))

    text = raised(MismatchError, apply, 4)
    assert "Ranks disagree on the sharding plan" in text
    assert 'rank 2: {"parameter 1.bias": null' in text


def loss_of_ids(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def loss_under(plan: ModulePlan, model: nn.Module, ids: Tensor) -> Tensor:
    """The loss of this rank's half of the batch."""
    return full(loss_of_ids(plan.apply(model), ids.chunk(2)[collectives.rank() // 2]).detach())


@pytest.mark.processes
def test_process_ranks_compute_what_one_process_does() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(37, 12), nn.Linear(12, 30), nn.ReLU(), nn.Linear(30, 37))
    ids = torch.randint(37, (4, 9))
    plan = plan_module(model, SLOW, (ids,), mesh=MESHES[1], forward=loss_of_ids)
    assert any(isinstance(reason.placement, Shard) for reason in plan.reasons)
    sent = replace(plan, origin=None)  # which no process can be sent
    losses = world(4, real=True).run(loss_under, sent, model, ids)
    assert_close(torch.stack(losses).mean(), loss_of_ids(model, ids).detach())
