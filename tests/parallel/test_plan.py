"""From plans to modules: paths, globs, nesting, ties, the meta device, ranks that differ, styles of one's own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import DTensor, Mesh, Replicate, Shard, shard_module
from shardwise import _collectives as collectives
from shardwise._layout import Placement
from shardwise._models import MLPModule, MLPStacked, ModelArgs, Transformer
from shardwise.errors import MeshError, MismatchError, PlanError
from shardwise.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    first_input,
    parallelize_module,
)
from shardwise.parallel.plan import flattened, resolve
from shardwise.parallel.styles import InputFn, ModuleContext, OutputFn
from shardwise.testing import world
from tests.parallel.one_process import Tied, check_equals_one_process, full, raised

R, S0, S1 = Replicate(), Shard(0), Shard(1)
COL, ROW = ColwiseParallel(), RowwiseParallel()
PAIR = {"net1": COL, "net2": ROW}


def cuts(module: nn.Module, plan: Any) -> dict[str, Placement]:
    """The placements that a plan comes to on two ranks, by the name of the parameter."""
    found = resolve(module, list(flattened(plan)), Mesh((2,)))
    return {name: layout.placements[0] for name, layout in found.layouts.items()}


CUT_PAIR = {"net1.weight": S0, "net1.bias": S0, "net2.weight": S1, "net2.bias": R}


@pytest.mark.parametrize(
    "plan",
    [
        {"layers.0.net1": COL, "layers.0.net2": ROW, "layers.1.net1": COL, "layers.1.net2": ROW},
        {"layers.*.net1": COL, "layers.*.net2": ROW},
        {"layers.[01].net1": COL, "lay*.?.net2": ROW},
        {"layers.*": PAIR},
        {"layers": {"0": PAIR, "1": {"": {"net1": COL}, "net2": ROW}}},
        {"": {"layers": {"*": PAIR}}},
        {"layers.*": PAIR, "*.0.net1": COL},
        {"**.net1": COL, "layers.**.net2": ROW},
    ],
    ids=repr,
)
def test_paths_globs_and_nested_plans_name_the_same_modules(plan: Any) -> None:
    want = {f"layers.{i}.{name}": placement for i in range(2) for name, placement in CUT_PAIR.items()}
    assert cuts(MLPStacked("cpu"), plan) == want


def test_a_star_is_one_component_of_a_path() -> None:
    fix = r"'\*.net1' matches no module: a '\*' is one component of a name. Did you mean '\*\*.net1'\?"
    with pytest.raises(PlanError, match=fix):
        cuts(MLPStacked("cpu"), {"*.net1": COL})
    with pytest.raises(PlanError, match=fix.replace("net1", "net1.weight").replace("module", "parameter")):
        shard_module(MLPStacked("cpu"), {"*.net1.weight": S0}, mesh=Mesh((1,)))


def test_one_style_is_for_the_module_itself() -> None:
    assert cuts(nn.Linear(4, 6), COL) == cuts(nn.Linear(4, 6), {"": COL}) == {"weight": S0, "bias": S0}


def test_all_errors_of_a_plan_are_reported_at_once_on_every_rank_and_nothing_changes() -> None:
    plan: dict[str, Any] = {"net": COL, "zzz.*": ROW, "net1.wieght": S0, "relu": COL}
    plan |= {"net1": ColwiseParallel(unit=5), "net2": ROW, "*2": COL}

    def body() -> str:
        module = MLPModule("cpu")
        with pytest.raises(PlanError) as caught:
            parallelize_module(module, None, plan)
        assert not any(isinstance(p, DTensor) for p in module.parameters())
        assert not any(child._forward_pre_hooks or child._forward_hooks for child in module.modules())
        return str(caught.value)

    (text,) = set(world(2).run(body))
    assert text == (
        "The plan does not fit the module:\n"
        "  'net' matches no module. Did you mean 'net2'? Fix: use its name.\n"
        "  'zzz.*' matches no module. Known names: net1, relu, net2. Fix: use these, or leave it out.\n"
        "  'net1.wieght' matches no parameter. Did you mean 'net1.weight'? Fix: use its name.\n"
        "  relu: ColwiseParallel supports Linear, Embedding and EmbeddingBag of torch.nn, not "
        "torch.nn.modules.activation.ReLU. "
        "Fix: name the layers inside it, or write a style for it.\n"
        "  net1: 16 features are not a multiple of unit=5. Fix: a unit that divides them.\n"
        "  net2.weight: two entries give it the layouts Layout((10, 16) as [Shard(1)] on Mesh(0=2)) and "
        "Layout((10, 16) as [Shard(0)] on Mesh(0=2)). Fix: one entry.\n"
        "  net2.bias: two entries give it the layouts Layout((10,) as [Replicate()] on Mesh(0=2)) and "
        "Layout((10,) as [Shard(0)] on Mesh(0=2)). Fix: one entry."
    )


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (None, "needs a plan"),
        (ColwiseParallel, "and of parameters to placements; got the class"),
        ({"net1": "colwise"}, "got 'colwise' for 'net1'. Fix: a style such as ColwiseParallel()"),
        ({"net1": None}, "got None for 'net1'"),
        ({1: COL}, "A plan has paths of modules as keys, got 1"),
    ],
    ids=repr,
)
def test_what_is_no_plan_is_refused(plan: Any, text: str) -> None:
    with pytest.raises(PlanError) as caught:
        parallelize_module(MLPModule("cpu"), None, plan)
    assert text in str(caught.value)


def test_plans_that_differ_between_ranks_are_reported() -> None:
    def body() -> None:
        unit = 2 if collectives.rank() == 1 else 4
        parallelize_module(MLPModule("cpu"), None, {"net1": ColwiseParallel(unit=unit), "net2": ROW})

    text = raised(MismatchError, body, 3)
    assert text.startswith("Ranks disagree on the sharding plan:\n  rank 0, 2: ")
    assert "unit=2" in text


@world(3)
def test_a_rank_outside_the_mesh_raises() -> None:
    if collectives.rank() < 2:
        parallelize_module(MLPModule("cpu"), Mesh((2,)), PAIR)
    else:
        with pytest.raises(MeshError, match=r"Rank 2 is not part of Mesh\(0=2\)"):
            parallelize_module(MLPModule("cpu"), Mesh((2,)), PAIR)


@world(2)
def test_a_module_is_parallelised_once() -> None:
    module = parallelize_module(MLPModule("cpu"), None, PAIR)
    with pytest.raises(PlanError, match="net1: it was parallelised before"):
        parallelize_module(module, None, {"net1": COL})
    parallelize_module(module, None, PrepareModuleInput(input_layouts=R, desired_input_layouts=R))


@world(3)
def test_tied_parameters_stay_one_whatever_the_order_of_the_plans() -> None:
    whole_out = ColwiseParallel(output_layouts=R)

    several: list[list[dict[str, Any]]] = [[{"table": ROW, "out": whole_out}], [{"out": whole_out}, {"table": ROW}]]
    ids = torch.tensor([[0, 6, 3], [2, 2, 5]])
    for plans in several:

        def parallelize(module: nn.Module, plans: list[dict[str, Any]] = plans) -> None:
            for plan in plans:
                parallelize_module(module, None, plan)

        module = check_equals_one_process(Tied(), parallelize, ids, lambda out: out.square().sum())
        assert module.out.weight is module.table.weight  # type: ignore[union-attr]


def test_styles_that_tear_a_tie_or_name_unknown_parameters_are_refused() -> None:
    with pytest.raises(PlanError, match=r"table.weight and out.weight are tied, but the plan gives them"):
        cuts(Tied(), {"table": COL, "out": COL})
    with pytest.raises(PlanError, match=r"ChannelParallel shards weight, bias, the parameters are \."):
        cuts(nn.Sequential(nn.ReLU()), {"0": ChannelParallel()})


@world(2)
def test_a_module_in_two_places_is_parallelised_once() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    plan = {"*": ColwiseParallel(output_layouts=R)}
    plain = nn.Sequential(layer, nn.Sequential(nn.ReLU()), layer)
    module = check_equals_one_process(
        plain, lambda m: parallelize_module(m, None, {"[02]": plan["*"]}), torch.randn(3, 4), torch.sum
    )
    assert len(module[0]._forward_pre_hooks) == 1  # type: ignore[index]


def test_a_module_on_the_meta_device_is_materialised_submodule_by_submodule() -> None:
    """With the same values on any number of ranks."""

    def body() -> tuple[int, list[Tensor]]:
        with torch.device("meta"):
            module = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6), nn.Linear(6, 6))
        plan = {"0": COL, "1": SequenceParallel(sequence_dim=0), "2": ROW}
        torch.manual_seed(0)
        parallelize_module(module, None, plan)
        assert [p.is_meta for p in module.parameters()] == [False] * 6 + [True] * 2
        mine = [p for p in module.parameters() if isinstance(p, DTensor)]
        return sum(p.to_local().numel() for p in mine), [full(p).detach() for p in mine]

    alone = world(1).run(body)[0][1]
    assert 0 < alone[0].abs().max() < 1
    for held, values in world(2).run(body):
        assert held == (48 + 8) // 2 + 16 + 24 + 6
        for got, want in zip(values, alone, strict=True):
            assert_close(got, want)


@dataclass(frozen=True)
class ChannelParallel(ParallelStyle):
    """Conv1d: every rank computes some of the channels."""

    def parameters(self, module: nn.Module, context: ModuleContext) -> Mapping[str, Placement]:
        return {"weight": S0, "bias": S0}

    def input_fn(self, module: nn.Module, context: ModuleContext) -> InputFn:
        return first_input(module, context.redistribution(R, R))

    def output_fn(self, module: nn.Module, context: ModuleContext) -> OutputFn:
        return context.redistribution(None, R, use_local_output=True)


@world(2)
def test_a_style_of_one_s_own_is_one_short_class() -> None:
    def loss(out: Tensor) -> Tensor:
        return (out * torch.arange(out.shape[1]).view(-1, 1)).square().sum()

    torch.manual_seed(0)
    x = torch.randn(2, 3, 8)
    module = check_equals_one_process(
        nn.Sequential(nn.Conv1d(3, 5, 3)), lambda m: parallelize_module(m, None, {"0": ChannelParallel()}), x, loss
    )
    assert [tuple(p.to_local().shape) for p in module.parameters()] == (  # type: ignore[attr-defined]
        [(3, 3, 3), (3,)] if collectives.rank() == 0 else [(2, 3, 3), (2,)]
    )


class Careless:
    """Prints its address."""


def test_a_style_that_prints_its_address_is_no_difference_between_ranks() -> None:
    @dataclass(frozen=True)
    class Own(ParallelStyle):
        held: Any = None

    world(3).run(lambda: parallelize_module(nn.Linear(2, 2), None, Own(Careless())))


@world(3)
def test_the_plan_of_the_peer_s_transformer_works_as_it_is_written_there() -> None:
    """Plain tensors between the layers, positions cut by rows, scores whole: `use_local_output` as torch has it."""
    args = ModelArgs(dropout_p=0.0, n_layers=1)
    layer: dict[str, Any] = {
        "attention": PrepareModuleInput(input_layouts=S1, desired_input_layouts=R),
        "attention_norm": SequenceParallel(),
        "ffn_norm": SequenceParallel(),
        "attention.w[qkv]": ColwiseParallel(use_local_output=False),
        "attention.wo": RowwiseParallel(output_layouts=S1),
        "feed_forward.w1": ColwiseParallel(input_layouts=S1),
        "feed_forward.w2": RowwiseParallel(output_layouts=S1),
    }
    plan: dict[str, Any] = {
        "tok_embeddings": RowwiseParallel(input_layouts=R, output_layouts=S1),
        "pos_embeddings": RowwiseParallel(input_layouts=R, output_layouts=S0),
        "norm": SequenceParallel(),
        "layers.*": layer,
        "output": ColwiseParallel(input_layouts=S1, output_layouts=R),
    }
    torch.manual_seed(0)
    tokens = torch.randint(0, 8, (2, 7))
    module = check_equals_one_process(
        Transformer(args).double(), lambda m: parallelize_module(m, None, plan), tokens, lambda out: out.sum()
    )
    assert module.output.weight is module.tok_embeddings.weight  # type: ignore[union-attr]
