"""Torch's placements, meshes and DTensors in every argument of every public function: as ours, or one clear error."""

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, cast

import pytest
import torch
import torch.distributed.tensor as theirs
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard
from torch.testing import assert_close

import shardwise as sw
from shardwise import (
    DTensor,
    Mesh,
    Partial,
    Placement,
    Replicate,
    Shard,
    checkpoint,
    distribute_tensor,
    init_device_mesh,
    sharded_tensor,
)
from shardwise import _collectives as collectives
from shardwise._layout import contiguous_strides, placement_of
from shardwise.errors import CaptureError, LayoutError, PlanError, ShardwiseError
from shardwise.experimental import local_map
from shardwise.parallel import ColwiseParallel, fully_shard
from shardwise.sharded_tensor import ChunkShardingSpec, LocalShardsWrapper, shard_parameter
from shardwise.testing import world
from tests.test_nonsense import CALLS, RANKS, invoke, saved, saved_once

__all__ = ["saved", "saved_once"]  # fixtures

# ---- torch's objects ------------------------------------------------------------------------------------------


def torch_mesh(mesh: Mesh) -> DeviceMesh:
    ranks = torch.tensor(mesh.ranks).view(mesh.shape)
    return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=mesh.names, _init_backend=False, _rank=0)


def torch_dtensor(x: DTensor) -> Any:
    placements = tuple(torchs(p) for p in x.placements)
    meta = TensorMeta(x.shape, contiguous_strides(x.shape), x.dtype)
    local = x.to_local().detach()
    made: Any = theirs.DTensor(local, DTensorSpec(torch_mesh(x.layout_.mesh), placements, meta), requires_grad=False)
    made.requires_grad_(x.requires_grad)
    return made


def torchs(value: Any) -> Any:
    """`value` with torch's objects for ours; itself if there are none."""
    if isinstance(value, Shard):
        return theirs.Shard(value.dim)
    if isinstance(value, Replicate):
        return theirs.Replicate()
    if isinstance(value, Partial):
        return theirs.Partial(value.reduce_op)
    if isinstance(value, Mesh):
        return torch_mesh(value)
    if isinstance(value, DTensor):
        return torch_dtensor(value)
    if isinstance(value, Mapping):
        made: Any = {key: torchs(item) for key, item in value.items()}
        return made if any(made[key] is not item for key, item in value.items()) else value
    if type(value) in (list, tuple):
        made = type(value)(torchs(item) for item in value)
        return made if any(new is not old for new, old in zip(made, value, strict=True)) else value
    return value


# ---- what a call gives ----------------------------------------------------------------------------------------


def evidence(x: object) -> object:
    """What can be compared of a result: layouts, values, and the states of modules."""
    if (placement := placement_of(x)) is not None:
        return repr(placement)
    if isinstance(x, DTensor):
        return str(x.layout_), x.requires_grad, evidence(x.to_local())
    if isinstance(x, Tensor):
        return "meta" if x.is_meta else x.detach().tolist(), str(x.dtype)
    if isinstance(x, nn.Module):
        return type(x).__name__, evidence(x.state_dict())
    if isinstance(x, Mapping):
        return {key: evidence(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [evidence(item) for item in x]
    if is_dataclass(x) and not isinstance(x, type):
        return type(x).__name__, {f.name: evidence(getattr(x, f.name)) for f in fields(x)}
    return re.sub(r" at 0x[0-9a-f]+", "", repr(x))


def outcome(name: str, argument: str, convert: Callable[[Any], Any]) -> object:
    """The evidence of a call, or the text of an error of ours."""
    torch.manual_seed(0)
    fn, arguments = CALLS[name]()
    arguments = arguments | {argument: convert(arguments[argument])}
    try:
        result = invoke(fn, arguments)
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}"
    return str(cast(DTensor, result).layout_) if name == "empty" else evidence(result)


def outcomes(name: str) -> dict[str, tuple[object, object]]:
    """By argument: what the call gives with our objects, and with torch's in that argument."""
    found = {}
    for argument, value in CALLS[name]()[1].items():
        if torchs(value) is not value:
            found[argument] = outcome(name, argument, lambda x: x), outcome(name, argument, torchs)
            collectives.barrier(tuple(range(RANKS)))
    return found


REFUSED = {  # what takes ours only, and what its error says
    ("embedding_bags", "weights"): r"each a tensor, got .*Fix: DTensor\.from_torch_dtensor\(x\)",
    ("parallel.ModuleContext", "mesh"): r"mesh must be a Mesh, got a torch\.",
    ("plan.plan_module", "mesh"): r"mesh must be a Mesh or None, got a torch\.",
    ("simulation.simulate", "mesh"): r"mesh must be a Mesh, got a torch\.",
    ("testing.check_rows", "meshes"): r"each a Mesh, got \[a torch\.",
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("saved")
def test_torchs_objects_in_an_argument_give_what_ours_give(name: str) -> None:
    for by_argument in world(RANKS, timeout=60).run(outcomes, name):
        for argument, (ours, found) in by_argument.items():
            refused = REFUSED.get((name, argument))
            if refused is None:
                assert found == ours, argument
            else:
                assert re.search(refused, str(found)), argument


def test_the_list_of_calls_has_many_such_arguments() -> None:
    counts = [len(found) for name in CALLS if name.startswith("DTensor.") for found in world(2).run(outcomes, name)]
    assert sum(counts) >= 12


# ---- a DTensor of torch where a tensor is taken ---------------------------------------------------------------

FULL = torch.arange(21, dtype=torch.float64).view(7, 3)  # uneven over four ranks, and over two


def line() -> Any:
    """Unevenly sharded over four ranks."""
    return theirs.distribute_tensor(FULL, init_device_mesh("cpu", (4,)), [theirs.Shard(0)])


def grid() -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return theirs.distribute_tensor(FULL, mesh, [theirs.Shard(0), theirs.Shard(1)])


def ours(placement: Placement | None = None) -> DTensor:
    return distribute_tensor(FULL, Mesh((4,)), [placement or Shard(1)])


def replaced(x: Any) -> tuple[nn.Linear, Tensor]:
    """A module whose weight is a DTensor of torch, and what it gives for one row."""
    layer = nn.Linear(3, 7, bias=False, dtype=torch.float64)
    layer.weight = nn.Parameter(x)
    return layer, torch.ones(1, 3, dtype=torch.float64) @ FULL.t()


def is_same_memory(x: Any, source: Any) -> bool:
    pointer: int = source.to_local().data_ptr()
    return bool(x.to_local().data_ptr() == pointer)


def distribute(source: Any) -> None:
    x = distribute_tensor(source)
    assert is_same_memory(x, source)
    assert x.layout_ == DTensor.from_torch_dtensor(source).layout_
    source = source.detach().requires_grad_()
    moved = distribute_tensor(source, Mesh((4,)), [Shard(1)])
    assert moved.placements == (Shard(1),)
    assert_close(moved.full_tensor(), FULL)
    moved.pow(2).sum().backward()
    assert source.grad is not None
    assert_close(source.grad.full_tensor(), 2 * FULL)
    spec = ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in (2, 0, 3, 1)])
    assert_close(spec.shard(source.detach()).full_tensor(), FULL)


def shard_modules(source: Any) -> None:
    ones, spec = torch.ones(1, 3, dtype=torch.float64), ChunkShardingSpec(1, ["rank:1/cpu", "rank:3/cpu"])
    shardings: list[Callable[[nn.Linear], object]] = [
        lambda layer: sw.shard_module(layer, {}, mesh=Mesh((4,))),
        lambda layer: sw.shard_module(layer, {"weight": [Shard(1)]}, mesh=Mesh((4,))),
        lambda layer: sw.distribute_module(layer, Mesh((4,))),
        lambda layer: sw.parallelize_module(layer, Mesh((4,)), ColwiseParallel(output_layouts=Replicate())),
        lambda layer: shard_parameter(layer, "weight", spec),
        lambda layer: sharded_tensor.shard_module(layer, sharded_tensor.ShardingPlan({"weight": spec})),
    ]
    for shard in shardings:
        layer, expected = replaced(source.detach())
        shard(layer)
        assert type(layer.weight) is DTensor or isinstance(layer.weight, nn.Parameter)
        assert isinstance(layer.weight, DTensor)
        assert_close(layer.weight.full_tensor(), FULL)
        out = layer(ones)
        assert_close(out.full_tensor() if isinstance(out, DTensor) else out, expected)
    layer, _ = replaced(source)
    sw.shard_module(layer, {}, mesh=Mesh((4,)))
    assert is_same_memory(layer.weight, source)
    with pytest.raises(PlanError, match=r"weight: it is a DTensor of torch\. Fix: shard_module\(module, \{\}\)"):
        fully_shard(replaced(source)[0], mesh=Mesh((4,)))


def mix(source: Any) -> None:
    """Ops in place, on lists, with `out=`, and gradients."""
    double = 2 * FULL
    sums: Any = torch._foreach_add([ours(), source], [source, source])
    assert [type(item) for item in sums] == [DTensor, theirs.DTensor]
    for item in sums:
        assert_close(item.full_tensor(), double)
    target: Any = source.detach().clone()
    target.copy_(2 * ours())
    assert_close(target.full_tensor(), double)
    out: Any = torch.add(ours(), ours(), out=source.detach().clone())
    assert type(out) is theirs.DTensor
    assert_close(out.full_tensor(), double)
    target.add_(ours())
    assert_close(target.full_tensor(), 3 * FULL)
    x: Any = ours()
    x.copy_(source)
    x += source
    assert_close(x.full_tensor(), double)
    x[:] = source
    assert_close(x.full_tensor(), FULL)
    x.data = 2 * source
    assert_close(x.full_tensor(), double)
    x.set_(source)
    assert x.placements == (Shard(1),)
    assert_close(x.full_tensor(), FULL)
    x = ours().requires_grad_()
    (2 * x).backward(gradient=source)
    assert_close(x.grad.full_tensor(), double)
    gradients: Any = torch.autograd.grad(3 * x, x, grad_outputs=source)
    assert_close(gradients[0].full_tensor(), 3 * FULL)
    x.grad = source
    assert x.grad.placements == (Shard(1),)
    assert_close(x.grad.full_tensor(), FULL)


@contextmanager
def on_first_rank_folder() -> Iterator[str]:
    """A folder that all ranks see, made and removed by the first."""
    made = [tempfile.mkdtemp() if sw.rank() == 0 else ""]
    torch.distributed.broadcast_object_list(made)
    try:
        yield made[0]
        collectives.barrier((0, 1, 2, 3))
    finally:
        if sw.rank() == 0:
            shutil.rmtree(made[0])


def save_and_load(source: Any) -> None:
    with on_first_rank_folder() as folder:
        checkpoint.save(folder, {"x": source}, step=1)
        x: Any = torch.zeros_like(ours())
        checkpoint.load(folder, {"x": x})
        assert_close(x.full_tensor(), FULL)
        empty: Any = source.detach().clone().zero_()
        local = empty.to_local()
        checkpoint.load(folder, {"x": empty})
        assert_close(empty.full_tensor(), FULL)
        assert_close(local, source.to_local())  # filled in place


def look(source: Any) -> None:
    twin = DTensor.from_torch_dtensor(source)
    assert str(sw.picture(source)) == str(sw.picture(twin))
    seen = []
    run = local_map(lambda x: seen.append(x.data_ptr()) or 2 * x, [*twin.placements])  # type: ignore[func-returns-value]
    assert_close(run(source).full_tensor(), 2 * FULL)
    assert seen == [source.to_local().data_ptr()]
    with pytest.raises(CaptureError, match=r"a DTensor of torch, whose ops are not traced(.|\n)*from_torch_dtensor"):
        sw.capture(lambda x: x + 1)(source)


def all_work() -> None:
    for make in (line, grid):
        for check in (distribute, shard_modules, mix, save_and_load, look):
            check(make())


@pytest.mark.processes
def test_a_dtensor_of_torch_is_taken_without_a_copy() -> None:
    world(4, real=True).run(all_work)


# ---- what has no counterpart ----------------------------------------------------------------------------------


@world(2)
def test_placements_without_a_counterpart_are_refused() -> None:
    strided, masked = _StridedShard(0, split_factor=2), _MaskPartial("sum", torch.Size([4, 3]), 0)
    for placement, fix in ((strided, "and shard_order="), (masked, "redistribute it .* in torch first")):
        attempts: list[Callable[[], object]] = [
            lambda p=placement: distribute_tensor(torch.ones(4, 3), Mesh((2,)), [p]),  # type: ignore[misc]
            lambda p=placement: DTensor.from_local(torch.ones(2, 3), Mesh((2,)), [p]),  # type: ignore[misc]
            lambda p=placement: sw.zeros(4, 3, device_mesh=Mesh((2,)), placements=[p]),  # type: ignore[misc]
        ]
        for attempt in attempts:
            with pytest.raises(LayoutError, match=rf"needs a placement such as .*Fix: .*{fix}"):
                attempt()


@world(2)
def test_where_a_local_tensor_is_taken_a_dtensor_of_torch_is_refused() -> None:
    y: Any = distribute_tensor(torch.ones(4, 3), Mesh((2,)), [Shard(0)])
    x = torch_dtensor(y)
    attempts: list[Callable[[], object]] = [
        lambda: DTensor.from_local(x, Mesh((2,)), [Shard(0)]),
        lambda: sharded_tensor.LocalShard(x, sharded_tensor.ShardMetadata([0, 0], [4, 3])),
        lambda: LocalShardsWrapper([x], [(0, 0)]),
        lambda: y.gather(0, out=x),
    ]
    for attempt in attempts:
        with pytest.raises(LayoutError, match=r"Fix: DTensor\.from_torch_dtensor\(x\) makes a DTensor of shardwise"):
            attempt()
