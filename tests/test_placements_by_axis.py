"""Every public entry that takes placements takes them by axis name too, on meshes of one axis and of two."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise import DTensor, Mesh, Partial, Replicate, Shard, distribute_tensor
from shardwise._layout import Placements, as_placements
from shardwise.errors import LayoutError, PlanError
from shardwise.experimental import local_map
from shardwise.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)
from shardwise.testing import world

LINE = Mesh((4,), names=("tp",))
GRID = Mesh((2, 2), names=("dp", "tp"))
MESHES = [LINE, GRID]
FULL = torch.arange(24.0).view(4, 6)


def on_ranks(job: Callable[[], Any]) -> Any:
    return world(4).run(job)[0]


def from_local(mesh: Mesh, placements: Placements, **options: Any) -> DTensor:
    local = distribute_tensor(FULL, mesh, as_placements(mesh, placements)).to_local()
    return DTensor.from_local(local, mesh, placements, **options)


def redistributed(mesh: Mesh, placements: Placements, **options: Any) -> DTensor:
    return distribute_tensor(FULL, mesh).redistribute(placements=placements, **options)


def of_shard_module(mesh: Mesh, placements: Placements) -> DTensor:
    return sw.shard_module(linear(), {"weight": placements}, mesh=mesh).weight  # type: ignore[return-value]


def of_local_map(mesh: Mesh, placements: Placements) -> DTensor:
    plus_one: Any = local_map(lambda x: x + 1, placements, (placements,), (placements,), redistribute_inputs=True)
    return plus_one(distribute_tensor(FULL - 1, mesh))  # type: ignore[no-any-return]


def of_a_style(mesh: Mesh, placements: Placements) -> DTensor:
    class Style(ParallelStyle):
        def parameters(self, module: nn.Module, where: Any) -> dict[str, Placements]:
            return {"weight": placements}

    model = nn.Sequential(linear())
    parallelize_module(model, mesh, {"0": Style()})
    return model[0].weight  # type: ignore[return-value]


def linear() -> nn.Linear:
    """One whose weight is `FULL`."""
    made = nn.Linear(6, 4)
    made.weight.data.copy_(FULL)
    return made


ENTRIES: list[Callable[[Mesh, Placements], DTensor]] = [
    lambda mesh, placements: distribute_tensor(FULL, mesh, placements),
    partial(from_local, run_check=False, shape=FULL.shape),
    from_local,
    redistributed,
    partial(redistributed, async_op=True),
    of_shard_module,
    of_local_map,
    of_a_style,
]
FACTORIES: list[Any] = [sw.empty, sw.zeros, sw.ones, sw.rand, sw.randn, lambda n, m, **kw: sw.full((n, m), 2.0, **kw)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@world(4)
def test_an_entry_takes_placements_by_axis_name(mesh: Mesh) -> None:
    by_name: Placements = {"tp": Shard(0)}
    for entry in ENTRIES:
        x = entry(mesh, by_name)
        assert x.placements == as_placements(mesh, by_name), entry
        assert torch.equal(x.detach().full_tensor(), FULL), entry
    for make in FACTORIES:
        assert make(4, 6, device_mesh=mesh, placements={"tp": Shard(1)}).placements == (
            as_placements(mesh, {"tp": Shard(1)})
        )


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_an_unknown_axis_name_is_the_same_error_on_every_rank(mesh: Mesh) -> None:
    def job() -> list[str]:
        said = []
        for entry in (ENTRIES[0], redistributed, of_local_map):
            with pytest.raises(LayoutError) as info:
                entry(mesh, {"tpp": Shard(0)})
            said.append(str(info.value))
        with pytest.raises(PlanError, match="has no axis 'pp'"):
            parallelize_module(linear(), mesh, ColwiseParallel(input_layouts={"pp": Shard(0)}))
        return said

    first, *others = world(4).run(job)
    assert all(found == first for found in others)
    assert all("has no axis 'tpp'" in text for text in first)


def test_gradients_are_placed_by_axis_name() -> None:
    def job() -> list[Tensor]:
        grads = []
        for placements in ([Partial(), Replicate()], {"dp": Partial()}):
            x = distribute_tensor(FULL.clone().requires_grad_(), GRID)
            x.to_local(grad_placements=placements).sum().backward()
            assert x.grad is not None
            grads.append(x.grad.full_tensor())
        return grads

    by_sequence, by_name = on_ranks(job)
    assert torch.equal(by_sequence, by_name)
    assert by_name[0, 0] == 2


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_styles_take_input_and_output_layouts_by_axis_name(mesh: Mesh) -> None:
    def job() -> list[tuple[Any, Tensor]]:
        outputs = []
        for output, tokens in ((Shard(0), Replicate()), ({"tp": Shard(0)}, {"tp": Replicate()})):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
            plan = {
                "0": ColwiseParallel(input_layouts=tokens),
                "1": RowwiseParallel(output_layouts=output, use_local_output=False),
            }
            parallelize_module(model, mesh, plan)
            y = model(FULL)
            outputs.append((y.placements, y.full_tensor()))
        return outputs

    (by_placement, expected), (by_name, found) = on_ranks(job)
    assert by_name == by_placement
    assert torch.equal(found, expected)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_prepared_inputs_and_outputs_take_placements_by_axis_name(mesh: Mesh) -> None:
    def job() -> tuple[Any, Any]:
        model = nn.Sequential(nn.Identity())
        before = PrepareModuleInput(input_layouts=({"tp": Shard(0)},), desired_input_layouts=({"tp": Replicate()},))
        after = PrepareModuleOutput(
            output_layouts=({"tp": Replicate()},), desired_output_layouts=({"tp": Shard(1)},), use_local_output=False
        )
        parallelize_module(model, mesh, {"0": before})
        given = model(FULL).placements
        model = nn.Sequential(nn.Identity())
        parallelize_module(model, mesh, {"0": after})
        return given, model(distribute_tensor(FULL, mesh)).placements

    given, returned = on_ranks(job)
    assert given[-1] == Replicate()
    assert returned == as_placements(mesh, {"tp": Shard(1)})


def test_names_of_keys_still_reach_into_a_dict() -> None:
    class Sum(nn.Module):
        def forward(self, x: dict[str, Tensor]) -> Tensor:
            return x["tp"] + x["other"]

    def job() -> Any:
        model = nn.Sequential(Sum())
        layouts = {"tp": Shard(0), "other": Shard(0)}
        parallelize_module(model, LINE, {"0": PrepareModuleInput(input_layouts=(layouts,))})
        return model({"tp": FULL, "other": FULL}).placements

    assert on_ranks(job) == (Shard(0),)


def test_the_repr_of_a_tensor_names_axes() -> None:
    said = on_ranks(lambda: repr(distribute_tensor(FULL, GRID, {"dp": Shard(1)})))
    assert said.startswith(
        "DTensor(shape=(4, 6), placements={'dp': Shard(1), 'tp': Replicate()}, mesh=Mesh(dp=2, tp=2), "
    )


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("steps", [0, 1, 7])
def test_evenly_spaced_values_are_those_of_torch(mesh: Mesh, steps: int) -> None:
    def job() -> None:
        there: dict[str, Any] = {"device_mesh": mesh, "placements": {"tp": Shard(0)}}
        for dtype in (None, torch.float64, torch.int64):
            line = sw.linspace(-2, torch.tensor(9.5), steps, dtype=dtype, **there)
            assert torch.equal(line.full_tensor(), torch.linspace(-2, 9.5, steps, dtype=dtype))
        assert torch.equal(sw.linspace(0, 2j, steps, **there).full_tensor(), torch.linspace(0, 2j, steps))
        powers = sw.logspace(0, 3, steps, 2.0, requires_grad=True, **there)
        assert powers.is_leaf
        assert powers.requires_grad
        assert torch.equal(powers.detach().full_tensor(), torch.logspace(0, 3, steps, 2.0))
        with pytest.raises(LayoutError, match=r"^linspace\(\) cannot create a Partial tensor"):
            sw.linspace(0, 1, steps, device_mesh=mesh, placements={"tp": Partial()})

    on_ranks(job)
