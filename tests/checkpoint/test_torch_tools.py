"""`torch.distributed.checkpoint`, its state-dict tools and `load_state_dict`, of sharded modules and optimizers.

Each job runs on processes, and raises an AssertionError on a rank where the result differs from that of one process.
"""

import copy
import re
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import _async_process_executor as executor
from torch.distributed.checkpoint import state_dict as tools
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor import distribute_tensor

from shardwise._layout import Box, Boxes, Layout, Mesh, OnRanks, Replicate, Shard
from shardwise._tensor import DTensor
from shardwise.errors import RuleError
from shardwise.testing import world
from tests.checkpoint.states import distributed, full

pytestmark = pytest.mark.processes

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}
FULL = StateDictOptions(full_state_dict=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Model(nn.Module):
    """Parameters and a buffer of several shapes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.items = nn.Embedding(9, 4)
        self.stack = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 3))
        self.scale = nn.Parameter(torch.rand(()))
        self.plain = nn.Parameter(torch.rand(2))
        self.register_buffer("seen", torch.rand(5, 3))


def layouts(size: int) -> dict[str, Layout]:
    """One for most tensors of `Model`: even, uneven and empty shards, several boxes, ranks that hold nothing."""
    line, grid = Mesh((size,)), Mesh((size // 2, 2))
    rows = Boxes([[Box((0, 0), (1, 7))], [Box((1, 0), (1, 7)), Box((2, 0), (1, 7))], *[[]] * (size - 2)])
    return {
        "items.weight": Layout(grid, [Shard(0), Shard(1)], (9, 4)),
        "stack.0.weight": Layout(grid, [Shard(0), Shard(0)], (7, 4), (1, 0)),
        "stack.0.bias": Layout(line, [Shard(0, sizes=(7, *[0] * (size - 1)))], (7,)),
        "stack.1.weight": Layout(line, [rows], (3, 7)),
        "stack.1.bias": Layout(line, [OnRanks(size - 1)], (3,)),
        "scale": Layout(line, [Replicate()], ()),
        "seen": Layout(line, [Shard(0)], (5, 3)),
    }


def other_layouts(size: int) -> dict[str, Layout]:
    """Shards of the last dim for all tensors of `layouts`."""
    mesh = Mesh((size,), tuple(reversed(range(size))))
    found = {name: layout.shape for name, layout in layouts(size).items()}
    return {
        name: Layout(mesh, [Shard(len(shape) - 1) if shape else Replicate()], shape) for name, shape in found.items()
    }


def replace_tensors(model: nn.Module, convert: Callable[[str, Tensor], Tensor]) -> None:
    """Put what `convert` makes of each parameter and buffer in its place."""
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
        owner, _, leaf = name.rpartition(".")
        made = convert(name, x.detach())
        setattr(model.get_submodule(owner), leaf, nn.Parameter(made) if isinstance(x, nn.Parameter) else made)


def sharded(seed: int, plan: dict[str, Layout], device: str = "cpu") -> Model:
    """A model whose tensors have the layouts of `plan`; others stay plain."""
    model = Model(seed).to(device)
    shard(model, plan)
    return model


def shard(model: nn.Module, plan: dict[str, Layout]) -> None:
    replace_tensors(model, lambda name, x: distributed(x, plan[name]) if name in plan else x)


def of_torch(seed: int, kind: str) -> nn.Module:
    """A model of torch's DTensors: by rows, the last dim, tensor parallelism and `fully_shard`; or a plain one."""
    model, size = Model(seed), dist.get_world_size()
    line, grid = init_device_mesh("cpu", (size,)), init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))

    def convert(name: str, x: Tensor) -> Tensor:
        if kind == "plain" or not x.ndim or name == "plain" or (kind == "tp in fsdp" and name == "seen"):
            return x
        if kind == "tp in fsdp":
            return distribute_tensor(x, grid["tp"], [TorchShard(0)])
        return distribute_tensor(x, line, [TorchShard(0 if kind == "rows" else x.ndim - 1)])

    replace_tensors(model, convert)
    if kind == "tp in fsdp":
        model.scale = nn.Parameter(model.scale.detach().view(1))  # fully_shard takes no scalars
        fully_shard(model, mesh=grid["dp"])
    return model


def gradients(model: nn.Module, step: int) -> None:
    """Give each parameter the same gradient in any sharding."""
    for number, (_, p) in enumerate(model.named_parameters()):
        full = torch.rand(p.shape, generator=torch.Generator().manual_seed(100 * step + number))
        if isinstance(p, TorchDTensor):
            p.grad = like_of_torch(full, p)
        else:
            p.grad = distributed(full, p.layout_) if isinstance(p, DTensor) else full


def like_of_torch(full: Tensor, like: TorchDTensor) -> Tensor:
    """`full` sharded as `like` is, by torch alone."""
    made = like.detach().clone()
    made.copy_(
        distribute_tensor(full, like.device_mesh, [TorchShard(0)] * like.device_mesh.ndim).redistribute(
            like.device_mesh, like.placements
        )
    )
    return made


def trained(model: nn.Module, kind: str, steps: int = 2) -> torch.optim.Optimizer:
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    for step in range(steps):
        gradients(model, step)
        optimizer.step()
    return optimizer


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    """Compare states whose tensors are full or distributed."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), (where, found.keys(), expected.keys())
        for key, value in expected.items():
            assert_same(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for number, value in enumerate(expected):
            assert_same(found[number], value, f"{where}.{number}")
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(
            full(found), full(expected), rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{where}: {m}"
        )
    else:
        assert found == expected, (where, found, expected)


def tensors_of(state: Any) -> list[Tensor]:
    if isinstance(state, dict):
        return [x for value in state.values() for x in tensors_of(value)]
    return [state] if isinstance(state, Tensor) else []


def assert_as_sharded(model: nn.Module, optimizer: torch.optim.Optimizer, plan: dict[str, Layout]) -> None:
    """Parameters have the layouts of `plan`, and states those of their parameters."""
    for name, layout in plan.items():
        x: Any = model.get_buffer(name) if name == "seen" else model.get_parameter(name)
        assert type(x) is DTensor, (name, type(x))
        assert x.layout_ == layout, name
        for key, state in optimizer.state.get(x, {}).items():
            if isinstance(state, Tensor):
                assert (type(state) is DTensor) == (key != "step"), (name, key)
                assert type(state) is not DTensor or state.layout_ == layout, (name, key)


def states(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: StateDictOptions | None = None
) -> dict[str, Any]:
    found = tools.get_state_dict(model, optimizer, options=options)
    return dict(zip(("model", "optimizer"), found, strict=True))


def get(kind: str) -> None:
    """`get_state_dict` with every option."""
    plain, model = Model(0), sharded(0, layouts(dist.get_world_size()))
    theirs, ours = trained(plain, kind), trained(model, kind)
    for options in (FULL, StateDictOptions(full_state_dict=True, cpu_offload=True)):
        found = states(model, ours, options)
        assert DTensor not in map(type, tensors_of(found))
        assert_same(found, states(plain, theirs, options))
    expected = states(plain, theirs)
    for options in (StateDictOptions(), StateDictOptions(cpu_offload=True)):
        found = states(model, ours, options)
        assert DTensor in map(type, tensors_of(found["model"]))
        assert_same(found, expected)
    partly = tools.get_model_state_dict(model, submodules={model.stack}, options=FULL)
    assert_same(partly, tools.get_model_state_dict(plain, submodules={plain.stack}, options=FULL))
    gradients(model, 7)
    assert_same(states(model, ours, FULL)["model"], states(plain, theirs, FULL)["model"])


def set_full(kind: str) -> None:
    """`set_state_dict` of full tensors, of every rank or the first; the steps after it equal a plain process."""
    plan = layouts(dist.get_world_size())
    for options in (FULL, BROADCAST):
        plain = Model(0)
        theirs = trained(plain, kind)
        expected = copy.deepcopy(states(plain, theirs, FULL))
        model = sharded(1, plan)
        ours = OPTIMIZERS[kind](list(model.parameters()))
        given = copy.deepcopy(expected) if options is FULL or dist.get_rank() == 0 else {"model": {}, "optimizer": {}}
        tools.set_model_state_dict(model, given["model"], options=options)
        if kind != "SGD":  # without states torch's function fails, for plain modules too
            tools.set_optimizer_state_dict(model, ours, given["optimizer"], options=options)
        assert_as_sharded(model, ours, plan)
        assert_same(states(model, ours), expected)
        for step in range(5, 7):
            for each, optimizer in ((model, ours), (plain, theirs)):
                gradients(each, step)
                optimizer.step()
        assert_same(states(model, ours), states(plain, theirs))
        on_meta = sharded(1, plan, "meta")  # full tensors take the place of its parameters
        given["model"] = dict(Model(0).state_dict()) if given["model"] else {}
        tools.set_model_state_dict(on_meta, given["model"], options=options)
        assert_as_sharded(on_meta, OPTIMIZERS["SGD"](list(on_meta.parameters())), plan)
        assert_same(dict(on_meta.state_dict()), dict(Model(0).state_dict()))


def load_of_torch(kind: str, sharding: str) -> None:
    """`load_state_dict` of torch's DTensors, or plain tensors, into sharded modules and optimizers, and back."""
    plan = layouts(dist.get_world_size())
    source = of_torch(0, sharding)
    theirs = trained(source, kind)
    expected = states(source, theirs)
    for assign in (False, True):
        model = Model(1)
        if sharding == "tp in fsdp":
            model.scale = nn.Parameter(model.scale.detach().view(1))
            line = Mesh((dist.get_world_size(),))  # torch copies no DTensor into a plain parameter
            plan |= {"scale": Layout(line, [Replicate()], (1,)), "plain": Layout(line, [Shard(0)], (2,))}
        shard(model, plan)
        model.load_state_dict(source.state_dict(), assign=assign)
        ours = OPTIMIZERS[kind](list(model.parameters()))
        ours.load_state_dict(theirs.state_dict())
        assert_as_sharded(model, ours, plan)
        assert_same(states(model, ours), expected)
    for assign in (False,) if sharding == "plain" else (False, True):
        back = of_torch(2, sharding)
        placements = {name: p.placements for name, p in back.named_parameters() if isinstance(p, TorchDTensor)}
        back.load_state_dict(model.state_dict(), assign=assign)
        again = OPTIMIZERS[kind](list(back.parameters()))
        again.load_state_dict(ours.state_dict())
        for name, wanted in placements.items():
            p: Any = back.get_parameter(name)
            assert isinstance(p, TorchDTensor), (name, type(p))
            assert p.placements == wanted, name
            for key, state in again.state.get(p, {}).items():
                assert key == "step" or (isinstance(state, TorchDTensor) and state.placements == wanted), (name, key)
        assert sharding != "plain" or DTensor not in map(type, tensors_of(states(back, again)))
        assert_same(states(back, again), expected)


def save(folder: Path, kind: str, asynchronously: bool) -> None:
    """`dcp.save` or `async_save`; what changes afterwards is not saved."""
    model = sharded(0, layouts(dist.get_world_size()))
    optimizer = trained(model, kind)
    state = states(model, optimizer) | {"step": 7}
    if not asynchronously:
        dcp_save(state, checkpoint_id=folder)
        return
    saving = async_save(state, checkpoint_id=folder)
    assert isinstance(saving, Future)
    gradients(model, 9)
    optimizer.step()
    saving.result()


def load(folder: Path, kind: str) -> None:
    """What `save` wrote, loaded by `dcp.load` into other shardings, DTensors of torch and plain modules."""
    plain = Model(0)
    expected = copy.deepcopy(states(plain, trained(plain, kind)))
    size = dist.get_world_size()
    targets: list[nn.Module] = [Model(1)]
    if size > 1:
        targets += [sharded(1, layouts(size)), sharded(1, other_layouts(size)), of_torch(1, "rows")]
    for target in targets:
        optimizer = OPTIMIZERS[kind](list(target.parameters()))
        state = states(target, optimizer) | {"step": 0}
        dcp_load(state, checkpoint_id=folder)
        tools.set_state_dict(target, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        assert state["step"] == 7
        assert_same(states(target, optimizer), expected)
    if size > 1:
        on_meta = sharded(1, layouts(size), "meta")
        state = {"model": on_meta.state_dict()}
        dcp_load(state, checkpoint_id=folder)
        on_meta.load_state_dict(state["model"], assign=True)
        assert_same(dict(on_meta.state_dict()), expected["model"])


def on_the_last_rank(folder: Path) -> list[str]:
    """A parameter on one rank is saved and loaded, also on the meta device; other ranks cannot gather it."""
    size = dist.get_world_size()
    plan = {"plain": Layout(Mesh((1,), (size - 1,)), [Replicate()], (2,))}
    model, on_meta = sharded(0, plan), sharded(1, plan, "meta")
    dcp_save({"model": model.state_dict()}, checkpoint_id=folder)
    state = {"model": on_meta.state_dict()}
    dcp_load(state, checkpoint_id=folder)
    on_meta.load_state_dict(state["model"], assign=True)
    assert on_meta.plain.device.type == "cpu"
    optimizer = trained(model, "Adam")
    held: Any = on_meta.plain
    plain, fresh = Model(1), OPTIMIZERS["Adam"](list(Model(1).parameters()))

    def everywhere() -> Tensor:
        return cast(Tensor, held.redistribute(Mesh((size,)), [Replicate()]).full_tensor())

    def gathered() -> Tensor:
        return cast(Tensor, tools.get_model_state_dict(model, options=FULL)["plain"])

    def loaded() -> Tensor:
        plain.load_state_dict(model.state_dict())
        return plain.plain

    def loaded_states() -> Tensor:
        fresh.load_state_dict(optimizer.state_dict())
        return cast(Tensor, full(optimizer.state[model.plain]["exp_avg"]))

    found = []
    for action in (everywhere, gathered, loaded, loaded_states):
        try:
            found.append(str(len(action())))
        except (RuleError, RuntimeError) as error:
            found.append(str(error))
    return found


def bad_input(kind: str, folder: Path) -> str:
    """The type and text of the error that torch's tools raise of bad input."""
    model = sharded(0, layouts(dist.get_world_size()))
    optimizer = trained(model, "Adam")
    plain = Model(0)
    try:
        if kind == "processes":
            in_processes = AsyncCheckpointerType.PROCESS
            saving = async_save({"m": model.state_dict()}, checkpoint_id=folder, async_checkpointer_type=in_processes)
            assert isinstance(saving, Future)
            try:
                saving.result()
            finally:  # or its process reports that this one has ended
                executor._CHECKPOINT_PROCESS = None
        elif kind == "differing parameters":
            model.load_state_dict(
                plain.state_dict() | {"items.weight": torch.full((9, 4), float(dist.get_rank()))}, assign=True
            )
            full(model.items.weight)
        elif kind == "differing states":
            states_of_optimizer = trained(plain, "Adam").state_dict()
            states_of_optimizer["state"][2]["exp_avg"] += dist.get_rank()
            optimizer.load_state_dict(states_of_optimizer)
            full(optimizer.state[model.items.weight]["exp_avg"])
    except Exception as error:  # noqa: BLE001 - its type is returned
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


CASES = pytest.mark.parametrize(
    ("size", "optimizer"),
    [(4, "Adam"), (2, "SGD"), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, "Adam"), (4, "SGD")))],
)


@CASES
@pytest.mark.parametrize("job", [get, set_full])
def test_states_are_gathered_and_set(size: int, optimizer: str, job: Callable[[str], None]) -> None:
    world(size, real=True).run(job, optimizer)


@pytest.mark.parametrize(
    ("size", "optimizer", "sharding"),
    [(4, "Adam", "rows"), (2, "Adam", "plain"), (2, "SGD", "last dim"), (4, "Adam", "tp in fsdp")],
)
def test_modules_of_torch_dtensors_load_into_sharded_ones_and_back(size: int, optimizer: str, sharding: str) -> None:
    world(size, real=True).run(load_of_torch, optimizer, sharding)


@pytest.mark.parametrize(("size", "optimizer", "asynchronously"), [(4, "Adam", False), (2, "SGD", True)])
def test_what_dcp_saved_loads_in_any_sharding(size: int, optimizer: str, asynchronously: bool, tmp_path: Path) -> None:
    world(size, real=True).run(save, tmp_path / "dcp", optimizer, asynchronously)
    for loading in (1, 2, 4):
        world(loading, real=True).run(load, tmp_path / "dcp", optimizer)


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_outside_the_mesh_of_a_parameter_cannot_gather_it(size: int, tmp_path: Path) -> None:
    *outside, inside = world(size, real=True).run(on_the_last_rank, tmp_path / "dcp")
    assert inside == ["2"] * 4
    for loaded, *texts in outside:
        assert loaded == "2"
        for text in texts:
            assert re.search(r"rank \d is outside Mesh\(.*and has no elements of it", text), text


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        pytest.param(
            "processes",
            "^RuleError: A DTensor cannot be pickled: a rank holds only its local shard.",
            marks=pytest.mark.slow,  # a process for checkpoints starts
        ),
        ("differing parameters", r"^MismatchError: load_state_dict: items.weight of shape \(9, 4\)"),
        ("differing states", "^MismatchError: load_state_dict of an optimizer: state exp_avg of parameter 2 of shape"),
    ],
)
def test_bad_input_is_an_error_on_all_ranks(kind: str, text: str, tmp_path: Path) -> None:
    for found in world(2, real=True).run(bad_input, kind, tmp_path / "dcp"):
        assert re.search(text, found), found
