"""Entries of plans that belong elsewhere: what was expected, and what to write instead."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
import torch.distributed.tensor.parallel as torch_parallel
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh as torch_mesh_of
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise import DTensor, Mesh, Shard, distribute_module, distribute_tensor, shard_module
from shardwise.embedding import EmbeddingBagCollection, EmbeddingBagConfig, shard_embeddings
from shardwise.errors import ArgumentError, PlanError
from shardwise.parallel import ColwiseParallel, fully_shard, parallelize_module
from shardwise.testing import world
from tests.parallel.one_process import raised

S0 = Shard(0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(6, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))


def text_of(apply: Callable[[nn.Module, Any], object], plan: Any, kind: type[Exception] = PlanError) -> str:
    def body() -> str:
        module = Model()
        with pytest.raises(kind) as caught:
            apply(module, plan)
        assert not any(isinstance(p, DTensor) for p in module.parameters())
        return str(caught.value)

    (text,) = set(world(2).run(body))
    return text


def parallelized(module: nn.Module, plan: Any) -> object:
    return parallelize_module(module, None, plan)


@pytest.mark.parametrize("name", ["ColwiseParallel", "RowwiseParallel", "SequenceParallel", "PrepareModuleInput"])
def test_a_style_of_torch_is_named_with_where_to_import_it(name: str) -> None:
    style = getattr(torch_parallel, name)
    for entry in (style, style(input_layouts=None, desired_input_layouts=None) if "Module" in name else style()):
        for plan in (entry, {"blocks.*.0": entry}, {"blocks": {"0.0": entry}}):
            text = text_of(parallelized, plan)
            assert text.endswith(f"Fix: it is torch's class, import {name} from shardwise.parallel."), text
    assert text_of(shard_module, {"items.weight": style}).endswith(
        "but shard_module takes placements such as Shard(0). Fix: parallelize_module takes styles, those of "
        "shardwise.parallel, for modules."
    )


@pytest.fixture
def torch_mesh() -> Iterator[Any]:
    """Of a process group of torch that sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield torch_mesh_of("cpu", (2,))
    dist.destroy_process_group()


STYLES: list[Any] = [
    torch_parallel.ColwiseParallel(),
    torch_parallel.PrepareModuleInput(input_layouts=None, desired_input_layouts=None),
    torch_parallel.PrepareModuleOutput(output_layouts=theirs.Replicate(), desired_output_layouts=theirs.Replicate()),
]


@pytest.mark.parametrize("style", STYLES, ids=lambda style: type(style).__name__)
def test_a_module_with_hooks_of_torch_is_refused_at_every_door_in_one_line(torch_mesh: Any, style: Any) -> None:
    module = Model()
    torch_parallel.parallelize_module(module, torch_mesh, {"blocks.1.0": style})
    doors: list[Callable[[], object]] = [
        lambda: shard_module(module, {}),
        lambda: parallelize_module(module, None, {"blocks.0.0": ColwiseParallel()}),
        lambda: fully_shard(module),
        lambda: distribute_module(module),
    ]
    before = dict(module.named_parameters())
    for door in doors:
        with pytest.raises(PlanError) as caught:
            door()
        assert str(caught.value) == (
            "blocks.1.0 was parallelised by torch's parallelize_module or distribute_module, whose hooks make DTensors "
            "of torch. Fix: import parallelize_module and its styles from shardwise.parallel."
        )
    assert all(before[name] is p for name, p in module.named_parameters())


MODULES = {  # what a plan of placements names, and the fix
    "items": "'items.weight', or 'items.*' for all of its parameters",
    "blocks.*.0": "'blocks.*.0.weight', or 'blocks.*.0.*' for all of its parameters",
    "blocks": "'blocks.0.0.weight', or 'blocks.**' for all of its parameters",
}


@pytest.mark.parametrize("apply", [shard_module, parallelized])
@pytest.mark.parametrize("name", MODULES)
def test_a_placement_for_a_module_names_its_parameters(name: str, apply: Callable[[nn.Module, Any], object]) -> None:
    assert text_of(apply, {name: S0}) == (
        f"The plan does not fit the module:\n  {name!r} is a module, but a placement is for a parameter. "
        f"Fix: {MODULES[name]}."
    )
    for fixed in MODULES[name].split("'")[1::2]:

        def body(plan: dict[str, Shard]) -> None:
            apply(Model(), plan)

        world(2).run(body, {fixed: S0})


def test_entries_of_another_kind_say_what_to_write() -> None:
    text = text_of(shard_module, {"blocks.0.1": S0, "": S0})
    assert "'blocks.0.1' is a module without parameters. Fix: leave it out." in text
    assert "'' is a module, but a placement is for a parameter. Fix: 'items.weight', or '**'" in text
    assert text_of(parallelized, {"blocks.0.0": ColwiseParallel}).endswith(
        "got the class ColwiseParallel for 'blocks.0.0'. Fix: ColwiseParallel(), with its parentheses."
    )
    assert "'blocks.0.0.weight' is a parameter, but a style is for a module. Fix: 'blocks.0.0', or a placement." in (
        text_of(parallelized, {"blocks.0.0.weight": ColwiseParallel()})
    )
    text = text_of(shard_module, {"blocks.0.0": ColwiseParallel(), "itmes.weight": S0, "items.weight": "row_wise"})
    assert "'blocks.0.0' has a shardwise.parallel.styles.ColwiseParallel, but shard_module takes placements" in text
    assert "'itmes.weight' matches no parameter. Did you mean 'items.weight'?" in text
    assert "got 'row_wise'. Fix: Shard(0)." in text


WRONG: dict[str, tuple[Any, str]] = {
    "row_wise": ("row_wise", "Fix: Shard(0), for 'user'."),
    "by axis": ({"tp": "column_wise"}, "Fix: Shard(1), for 'user'."),
    "a list": (["data_parallel"], "Fix: Replicate(), for 'user'."),
    "text": ("Shard(0)", "Fix: an object, such as Shard(0), not a string, for 'user'."),
    "a class": (Shard, "Fix: Shard(…), with parentheses, for 'user'."),
    "a number": (3, """Fix: such as [Shard(0)], or {"tp": Shard(0)} by axis name, for 'user'."""),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_placement_of_a_table_has_a_fix(name: str) -> None:
    entry, fix = WRONG[name]

    def sharded(module: nn.Module, plan: Any) -> object:
        config = EmbeddingBagConfig(6, 4, "user", feature_names=["user"])
        return shard_embeddings(EmbeddingBagCollection([config]), plan, Mesh((2,), names=("tp",)))

    assert text_of(sharded, {"user": entry}, ArgumentError).endswith(fix)


class Linear(nn.Module):
    """A wrapper that has the name of the layer inside it, as that of peft has."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(4, 4)


def test_a_module_that_is_called_like_a_layer_of_torch_is_named_in_full() -> None:
    text = raised(PlanError, lambda: parallelize_module(nn.Sequential(Linear()), None, {"0": ColwiseParallel()}))
    assert "of torch.nn, not tests.parallel.test_wrong_plans.Linear. Fix: name the layers inside it, such as" in text
    assert "'0.base_layer'" in text


def test_the_loss_parallel_of_torch_changes_nothing_of_dtensors_of_shardwise() -> None:
    scores, targets = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 2, 3, 0])

    def gradient(logits: Tensor) -> Tensor:
        logits.requires_grad_()
        F.cross_entropy(logits, targets).backward()
        assert logits.grad is not None
        return logits.grad

    def body() -> None:
        grad = gradient(distribute_tensor(scores, Mesh((2,)), [Shard(1)]))
        assert isinstance(grad, DTensor)
        assert grad.placements == (Shard(1),)
        torch.testing.assert_close(grad.full_tensor(), gradient(scores.clone()))

    with torch_parallel.loss_parallel():  # of the process, so of all simulated ranks
        world(2).run(body)
