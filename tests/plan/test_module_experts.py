"""Plans with experts on a part of the data axis: where they are chosen, and that they compute what one process does."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import gcd
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import Mesh, Replicate, Shard
from shardwise import _collectives as collectives
from shardwise.errors import PlanError
from shardwise.parallel import ExpertParallel, MixtureOfExperts
from shardwise.parallel.experts import balanced_choices
from shardwise.plan import Link, ModulePlan, Topology, plan_module, price_module
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.parallel.one_process import full
from tests.plan.test_families import loss_of
from tools.model_zoo import FAMILIES

LINK = Link(1e8, 1e-7)
# No tensor axis leaves a host, so there is none.
SLOW = Topology(4, 1, 1 << 30, LINK, LINK, flops=1e9, memory_bandwidth=1e10, lookup_bandwidth=1e9, device_type="cpu")
EP = ("edp", "ep")


class Layer(nn.Module):
    def __init__(self, dim: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.first, self.mixed = nn.Linear(dim, dim), MixtureOfExperts(dim, hidden, experts)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.mixed(self.first(x))
        return result


class Layers(nn.Module):
    """Two layers with experts, and one without."""

    def __init__(self, dim: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(dim, hidden, experts) for _ in range(2)])
        self.last = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        result: Tensor = self.last(x)
        return result


def mean_square(model: Callable[..., Tensor], x: Tensor) -> Tensor:
    return model(x).square().mean()


def steps(model: nn.Module, loss: Callable[[], Tensor]) -> tuple[list[Tensor], Mapping[str, Tensor]]:
    """Losses of two steps, and the gradients of the second."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for _ in range(2):
        optimizer.zero_grad()
        (now := loss()).backward()
        losses.append(full(now.detach()))
        optimizer.step()
    return losses, {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("shape", [(1, 4), (2, 2)], ids=str)
def test_steps_with_six_experts_on_four_ranks_are_those_of_one_process(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model, x = Layers(8, 16, 6).double(), torch.randn(8, 3, 8, dtype=torch.double)
    plan = plan_module(model, SLOW, (x,), mesh=Mesh(shape, names=EP), forward=mean_square)
    assert plan.styles == {"layers.*.mixed": ExpertParallel()}

    def body() -> tuple[tuple[list[Tensor], Mapping[str, Tensor]], int]:
        own = plan.apply(copy.deepcopy(model))
        part = x.chunk(4)[collectives.rank()]
        found = steps(own, lambda: mean_square(own, part))
        held = [as_dtensor(p).to_local().numel() for name, p in own.named_parameters() if name.endswith(("w1", "w2"))]
        return found, sum(held)

    found = world(4).run(body)
    losses, gradients = steps(model, lambda: mean_square(model, x))
    assert_close(torch.tensor([one[0][0] for one in found]).mean(0), torch.tensor(losses).double(), check_dtype=False)
    for (_, own), _ in found:
        assert_close(own, gradients)
    held = [size for _, size in found]
    assert sum(held) == 2 * 6 * 2 * 8 * 16  # every expert is stored once
    assert max(held) == sum(held) // 3  # two experts, or two thirds of three


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 4), (2, 2)], ids=str)
def test_a_model_of_transformers_is_that_of_one_process(shape: tuple[int, int]) -> None:
    family = FAMILIES["Qwen3-MoE"]
    config = {**family.config, "num_local_experts": 6, "num_experts": 6, "experts_implementation": "batched_mm"}
    family = replace(family, config=config)
    model, inputs = family.build(), family.inputs()
    plan = plan_module(model, SLOW, inputs, mesh=Mesh(shape, names=EP), forward=loss_of)
    assert plan.styles == {"model.layers.*.mlp.experts": ExpertParallel()}

    def body() -> tuple[list[Tensor], Mapping[str, Tensor]]:
        own = plan.apply(copy.deepcopy(model))
        part = {name: x.chunk(4)[collectives.rank()] for name, x in inputs.items()}
        return steps(own, lambda: loss_of(own, **part))

    found = world(4, timeout=500).run(body)
    losses, gradients = steps(model, lambda: loss_of(model, **inputs))
    assert_close(torch.tensor([own for own, _ in found]).mean(0), torch.tensor(losses))
    for _, own in found:
        assert_close(own, gradients, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("hidden", "tokens"), [(512, 16), (4, 512)], ids=["large experts", "many tokens"])
def test_experts_are_on_as_many_ranks_as_a_step_is_shortest_with(hidden: int, tokens: int) -> None:
    """Of all meshes, by hand."""
    with torch.device("meta"):
        model, batch = Layers(16, hidden, 8), (torch.empty(4, tokens, 16),)
    layers, rest = ("layers.0.mixed", "layers.1.mixed"), ("layers.0", "layers.1", "")
    styles = {"layers.*.mixed": ExpertParallel()}
    by_hand = [ModulePlan(Mesh((4, 1), names=("dp", "tp")), {}, rest, reshard) for reshard in (False, True)]
    by_hand += [ModulePlan(Mesh((4 // n, n), names=EP), styles, (*layers, *rest), reshard)
                for n in (2, 4) for reshard in (False, True)]  # fmt: skip
    seconds = [price_module(model, one, SLOW, batch, forward=mean_square).seconds for one in by_hand]
    best = by_hand[seconds.index(min(seconds))]
    plan = plan_module(model, SLOW, batch, forward=mean_square)
    assert plan.step is not None
    assert plan.step.seconds <= min(seconds)
    assert (plan.mesh, plan.styles) == (best.mesh, best.styles)
    assert (plan.mesh.names == EP) == (hidden == 512)
    assert plan.seconds == pytest.approx(plan.step.seconds, rel=0.1)
    assert {one.experts for one in plan.tried} == {1, 2, 4}


def test_a_plan_with_experts_says_what_it_assumes_and_is_saved(tmp_path: Path) -> None:
    with torch.device("meta"):
        model, batch = Layers(16, 512, 8), (torch.empty(4, 16, 16),)
    plan = plan_module(model, SLOW, batch, forward=mean_square)
    assert "Tokens are taken to choose all experts equally often." in str(plan)
    assert "4 x 1, experts on 4" in str(plan)
    assert plan.explain("layers.0.mixed.w1").startswith(
        "layers.0.mixed.w1 is Shard(0): tokens are sent to their experts"
    )
    assert "fully_shard(model.get_submodule(path), mesh=mesh['edp']" in plan.as_code()
    assert "fully_shard(model.get_submodule(path), mesh=Mesh((4,))" in plan.as_code()
    plan.save(tmp_path / "plan.toml")
    assert replace(ModulePlan.load(tmp_path / "plan.toml"), seconds=plan.seconds, bound=plan.bound) == plan
    pinned = plan_module(model, SLOW, batch, forward=mean_square, pinned={"layers.*.mixed.w1": Replicate()})
    assert {one.experts for one in pinned.tried} == {1}
    for mesh, given in ((Mesh((1, 4), names=EP), {"layers.*.mixed.w1": Replicate()}), (Mesh((4, 1), names=EP), {})):
        with pytest.raises(PlanError, match=r"shards experts along ep.*Fix: mesh=None"):
            plan_module(model, SLOW, batch, forward=mean_square, mesh=mesh, pinned=given)


@pytest.mark.parametrize(("experts", "top_k", "ranks"), [(128, 8, 8), (128, 8, 64), (6, 2, 3), (5, 3, 5), (4, 1, 2)])
def test_balanced_tokens_choose_all_experts_and_go_to_as_many_ranks_as_they_can(
    experts: int, top_k: int, ranks: int
) -> None:
    chosen = balanced_choices(4 * experts, top_k, experts)
    assert chosen.flatten().bincount().tolist() == [4 * top_k] * experts
    owners = chosen // (experts // ranks if experts % ranks == 0 else gcd(experts, ranks))
    assert {len(set(row)) for row in owners.tolist()} == {min(top_k, ranks)}


def test_exchanges_of_a_plan_are_of_tokens_for_each_rank_that_has_experts_of_them() -> None:
    with torch.device("meta"):
        model, batch = Layers(16, 32, 4), (torch.empty(16, 4, 16),)
    plan = plan_module(model, SLOW, batch, forward=mean_square, mesh=Mesh((1, 4), names=EP))
    assert plan.step is not None
    sent = [one.sent_bytes for one in plan.step.collectives if one.cause.startswith("mix_experts")]
    # Of 16 tokens a rank, half go to each rank, three of which are others: forward and backward, for two layers.
    there, back, head = 3 * 8 * (16 + 2 * 2) * 4, 3 * 8 * 16 * 4, 3 * 24
    assert sorted(size for size in sent if size > head) == sorted(2 * [there, back, back, there])
    assert plan.reasons[[r.names[0] for r in plan.reasons].index("layers.0.mixed.w1")].placement == Shard(0)


@pytest.mark.parametrize(
    ("shape", "units"), [((2, 2), ("",)), ((2, 2), ("layers.0.mixed", "")), ((4,), ()), ((4,), ("layers.0.mixed", ""))]
)
def test_experts_without_a_unit_of_their_own_are_refused(shape: tuple[int, ...], units: tuple[str, ...]) -> None:
    """Their gradients would be several times those of one process."""
    plan = ModulePlan(Mesh(shape), {"layers.*.mixed": ExpertParallel()}, units)
    with pytest.raises(PlanError, match=r"layers\.[01]\.mixed has ExpertParallel"):
        price_module(Layers(8, 16, 6), plan, SLOW, (torch.ones(8, 3, 8),), forward=mean_square)


def test_experts_whose_tokens_are_replicated_do_not_shard_the_batch() -> None:
    for replicated in (Replicate(), [Replicate()]):
        style = ExpertParallel(input_layouts=replicated, output_layouts=replicated)
        assert ModulePlan(Mesh((2, 2)), {"layers.*.mixed": style}, ("",)).data_ranks == 2
