"""`CommDebugMode` counts collectives and bytes by module, as worked out by hand and as torch's own attributes them."""

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol  # registers the ops that are keys
import torch.distributed.tensor as torch_dtensor
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode as TorchCommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from shardwise import Mesh, OnRanks, Partial, Replicate, Shard, count_comms, distribute_tensor, shard_module
from shardwise import _collectives as collectives
from shardwise._tensor import DTensor
from shardwise.debug import CommDebugMode
from shardwise.testing import world
from tests.debug.ops import halved

S0, R, P = Shard(0), Replicate(), Partial()
EXCHANGE = torch.ops.c10d_functional.all_to_all_single
REDUCE = torch.ops.c10d_functional.all_reduce


class Half(nn.Module):
    """Gathers its input, halves it: one exchange each way where it is cut by rows."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = halved(x)
        return out


class Cut(nn.Module):
    """Cuts by rows again; sends nothing."""

    def forward(self, x: Any) -> Any:
        return x.redistribute(placements=[S0])


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.halve = Half()
        self.cut = Cut()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.cut(self.halve(x))
        return out


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.first = Inner()
        self.second = Inner()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x * self.scale))
        return out


def model() -> nn.Module:
    return shard_module(Outer(), {}, mesh=Mesh((2,)))


def rows() -> DTensor:
    """5 x 2 in float32; rank 0 holds 3 rows, rank 1 holds 2."""
    return distribute_tensor(torch.ones(5, 2), Mesh((2,)), [S0])


@world(2)
def test_collectives_and_bytes_are_counted_by_module_forward_and_backward() -> None:
    outer = model()
    x = rows().requires_grad_()
    with CommDebugMode() as mode, count_comms() as counted:
        outer(x).sum().redistribute(placements=[R]).backward()
    assert mode.get_total_counts() == counted.total_calls
    assert sum(mode.get_comm_bytes().values()) == counted.total_bytes
    rank = collectives.rank()
    own, other = ((24, 16), (16, 24))[rank]
    counts, sent = mode.get_module_counts(), mode.get_module_bytes()
    for half in ("Outer.first.halve", "Outer.second.halve"):
        assert counts[half] == {"forward": {EXCHANGE: 1}, "backward": {EXCHANGE: 1}}
        assert sent[half] == {"forward": own, "backward": other}
    for inner in ("Outer.first", "Outer.second"):
        cut = sent.get(f"{inner}.cut", {"forward": 0, "backward": 0})  # its backward gathers rows again
        assert sent[inner] == {"forward": own, "backward": other + cut["backward"]}
    assert sent["Outer"]["forward"] == 2 * own
    assert sent["Outer"]["backward"] == sent["Outer.first"]["backward"] + sent["Outer.second"]["backward"]
    # One number is reduced, outside all modules.
    assert sent["Global"]["forward"] == 2 * own + 4


@world(4)
def test_the_keys_are_those_of_torch() -> None:
    large = DTensor.from_local(torch.ones(256, 512), Mesh((4,)), [P], run_check=False)
    sharded = distribute_tensor(torch.ones(4096, 512), Mesh((4,)), [Shard(0)])
    on_one = distribute_tensor(torch.ones(2), Mesh((4,)), [OnRanks(1)])
    with CommDebugMode() as mode:
        for x in (large, sharded, on_one):
            x.redistribute(placements=[R])
        collectives.reduce_scatter(torch.ones(10), (3, 3, 3, 1), (0, 1, 2, 3))
    ops = torch.ops.c10d_functional
    kinds = (REDUCE, ops.all_gather_into_tensor, ops.broadcast, ops.reduce_scatter_tensor)
    assert mode.get_comm_counts() == dict.fromkeys(kinds, 1)
    assert mode.get_comm_counts()[EXCHANGE] == 0
    assert mode.get_comm_bytes()[REDUCE] == 2 * 3 * 256 * 512 * 4 // 4  # a ring: 3 of 4 chunks, twice
    assert mode.get_comm_bytes()[ops.reduce_scatter_tensor] == 3 * 3 * 4
    assert mode.get_comm_bytes()[ops.all_gather_into_tensor] == 3 * 1024 * 512 * 4


@world(2)
def test_gradients_that_are_read_count_as_backward_of_no_module() -> None:
    outer = model()
    outer(rows()).sum().backward()
    with CommDebugMode() as mode:
        assert outer.scale.grad is not None
    assert mode.get_module_counts() == {"Global": {"forward": {}, "backward": {EXCHANGE: 1}}}
    assert mode.get_module_bytes() == {"Global": {"forward": 0, "backward": 8}}


def test_recomputation_counts_as_backward_of_its_module() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.halve = Half()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.halve, x, use_reentrant=False)  # type: ignore[no-any-return]

    def body() -> tuple[CommDebugMode, str]:
        x = rows().requires_grad_()
        module = Checkpointed()
        with CommDebugMode() as mode:
            module(x).sin().sum().backward()
        return mode, mode.generate_comm_debug_tracing_table(1)

    for mode, _ in world(2).run(body):
        counts = mode.get_module_counts()["Checkpointed.halve"]
        assert counts["forward"] == {EXCHANGE: 1}
        assert counts["backward"][EXCHANGE] >= 1


class Scaled(nn.Module):
    """Scales its input by half of a parameter; backward reaches the input before it is done with the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x * halved(self.weight)
        return out


class Around(nn.Module):
    """Gathers by itself before the module inside and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Tanh()

    def forward(self, x: Any) -> Any:
        return halved(self.inner(halved(x).redistribute(placements=[S0])))


@world(2)
def test_a_module_is_not_done_before_its_parameters_are() -> None:
    scaled = shard_module(Scaled(), {"weight": S0}, mesh=Mesh((2,)))
    x = distribute_tensor(torch.ones(5, 2), Mesh((2,)), [R]).requires_grad_()
    with CommDebugMode() as mode:
        scaled(x).sum().backward()
    rank = collectives.rank()
    assert mode.get_module_bytes()["Scaled"] == {"forward": (24, 16)[rank], "backward": (16, 24)[rank]}


@world(2)
def test_what_a_module_does_around_another_one_is_its_own() -> None:
    x = rows().requires_grad_()
    with CommDebugMode() as mode:
        Around()(x * 1).sum().backward()
    counts = mode.get_module_counts()
    assert "Around.inner" not in counts
    assert counts["Around"]["forward"] == {EXCHANGE: 2}
    assert counts["Around"]["backward"] == {EXCHANGE: 2}


@world(2)
def test_a_backward_outside_modules_does_not_count_for_the_last_one_of_another_backward() -> None:
    x = rows().requires_grad_()
    with CommDebugMode() as mode:
        Half()(x).sum().backward()
        halved(x).sum().backward()
    assert mode.get_module_counts()["Half"]["backward"] == {EXCHANGE: 1}
    assert mode.get_module_counts()["Global"]["backward"] == {EXCHANGE: 2}


@world(2)
def test_parameters_and_their_placements_are_reported_by_module() -> None:
    linear = shard_module(nn.Sequential(nn.Linear(3, 4)), {"0.weight": S0}, mesh=Mesh((2,)))
    linear.register_parameter("plain", nn.Parameter(torch.ones(1)))
    with CommDebugMode() as mode:
        linear(distribute_tensor(torch.ones(2, 3), Mesh((2,)), [R]))
    parameters, placements = mode.get_parameter_info(), mode.get_sharding_info()
    assert {name: list(own) for name, own in parameters.items()} == {
        "Sequential": ["plain"],
        "Sequential.0": ["weight", "bias"],
    }
    assert not parameters["Sequential.0"]["weight"].requires_grad
    assert placements == {"Sequential.0.weight": (S0,), "Sequential.0.bias": (R,)}


def test_a_mode_that_is_entered_again_starts_from_zero() -> None:
    def body() -> None:
        outer, mode = model(), CommDebugMode()
        for _ in range(2):
            with mode:
                outer(rows())
            outer(rows())
            assert mode.get_total_counts() == 2 + 2  # gathers; to agree on the tensor to distribute, and to do it
        assert repr(mode) == "CommDebugMode(get_total_counts()=4)"

    world(2).run(body)
    hooks = torch.nn.modules.module
    assert not hooks._global_forward_hooks
    assert not hooks._global_forward_pre_hooks


def test_an_error_inside_a_module_leaves_the_modules_around_it_right() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ZeroDivisionError

    def body() -> dict[str, Any]:
        with CommDebugMode() as mode:
            with pytest.raises(ZeroDivisionError):
                nn.Sequential(Fails())(rows())
            halved(rows())
        return mode.get_module_counts()

    for counts in world(2).run(body):
        assert list(counts) == ["Global"]


# ---- beside torch's ------------------------------------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Sequential(nn.Linear(4, 5), nn.Sequential(nn.ReLU(), nn.Linear(5, 3)))
        self.flat = nn.Linear(4, 3)
        self.same = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.same(self.deep(x).tanh() * self.flat(x).sigmoid())
        return out


def table_of(mode: Any, noise_level: int) -> list[str]:
    """The table of a plain module, without the views that torch's own hooks add, and without empty headings."""
    torch.manual_seed(0)
    module, x = Branches(), torch.randn(2, 4, requires_grad=True)
    with mode:
        module(x).sum().backward()
    lines = mode.generate_comm_debug_tracing_table(noise_level).splitlines()
    lines = [line for line in lines if not re.search(r"\*\*aten\.(view|detach|t)\.", line)]
    return [line for line, after in zip(lines, [*lines[1:], ""], strict=True) if "PASS" not in line or "**" in after]


@pytest.mark.parametrize("noise_level", [0, 1, 2, 3])
def test_plain_modules_are_tracked_as_by_torch(noise_level: int) -> None:
    ours = table_of(CommDebugMode(), noise_level)
    assert ours == table_of(TorchCommDebugMode(), noise_level)
    assert (len(ours) > 50) == (noise_level > 1)


def test_the_table_shows_more_with_each_level_and_the_file_has_no_colours(tmp_path: Path) -> None:
    def body() -> tuple[list[str], str, dict[str, Any]]:
        outer = model()
        with CommDebugMode() as mode:
            outer(rows()).view(2, 5)
        tables = [mode.generate_comm_debug_tracing_table(level) for level in range(4)]
        if collectives.rank() == 0:
            mode.log_comm_debug_tracing_table_to_file(str(tmp_path / "table.txt"), noise_level=1)
            mode.generate_json_dump(str(tmp_path / "log.json"), noise_level=1)
        collectives.barrier((0, 1))
        return tables, (tmp_path / "table.txt").read_text(), json.loads((tmp_path / "log.json").read_text())

    tables, written, tree = world(2).run(body)[0]
    assert all(len(a) < len(b) for a, b in pairwise(tables))
    assert "\x1b" in tables[1]
    assert written == re.sub(r"\x1b\[[\d;]*m", "", tables[1])
    lines = written.splitlines()
    at = lines.index("            Outer.first.halve")
    assert [line.strip() for line in lines[at + 1 : at + 9]] == [
        "*module type: class 'tests.debug.test_comm_mode.Half'",
        "FORWARD PASS",
        "*c10d_functional.all_to_all_single: 1",
        "*sent bytes: 24",
        "**halved",
        "shape: [(5, 2)]",
        "sharding: [(Shard(0),)]",
        "device mesh: Mesh(0=2)",
    ]
    assert [line.strip() for line in lines if "Parameter" in line or "scale" in line] == [
        "*Parameter List",
        "*scale: (Replicate(),)",
    ]
    (outer,) = tree["children"]
    assert (outer["fqn"], outer["parameters"]) == ("Outer", [["scale", "(Replicate(),)"]])
    half = outer["children"][0]["children"][0]
    assert half["collectives_forward"] == [["c10d_functional.all_to_all_single", 1]]
    assert half["sent_bytes_forward"] == 24
    assert [operation["name"] for operation in half["operations_forward"]] == ["halved"]


def test_values_and_gradients_are_those_without_the_mode() -> None:
    def outcome(watched: bool) -> list[Tensor]:
        torch.manual_seed(0)
        plan = {"0.weight": S0, "0.bias": S0}
        module = shard_module(nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5)), plan, mesh=Mesh((2,)))
        x = distribute_tensor(torch.randn(4, 3), Mesh((2,)), [R])
        with CommDebugMode() if watched else count_comms():
            loss = module(x).square().sum()
            loss.backward()
        full: Any = [loss, *(p.grad for p in module.parameters())]
        return [part.full_tensor() for part in full]

    world(2).run(lambda: torch.testing.assert_close(outcome(True), outcome(False), rtol=0, atol=0))


@pytest.fixture
def rank_1_of_4() -> Iterator[None]:
    """A process group of torch that sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


def of_other_code() -> None:
    """Functional collectives of 8 x 3 floats, 96 bytes; then those of torch's DTensor."""
    x, group = torch.ones(8, 3), dist.group.WORLD
    assert group is not None
    started = [
        funcol.all_reduce(x, "sum", group),
        funcol.all_gather_single(x, 0, group),
        funcol.reduce_scatter_single(x, "sum", 0, group),
        funcol.all_to_all_single(x, [2] * 4, [1, 4, 1, 2], group),
        funcol.broadcast(x, 2, group),
        *funcol.all_reduce_coalesced([x, x], "sum", group),
    ]
    for result in started:
        funcol.wait_tensor(result)
    mesh = init_device_mesh("cpu", (4,))
    weight = torch_dtensor.DTensor.from_local(torch.ones(3, 5), mesh, [torch_dtensor.Replicate()])
    rows = torch_dtensor.DTensor.from_local(x, mesh, [torch_dtensor.Shard(0)])
    product: Any = rows @ weight
    product.full_tensor()


def test_functional_collectives_of_other_code_count_as_torch_counts_them(rank_1_of_4: None) -> None:
    def ours() -> tuple[dict[Any, int], dict[str, int]]:
        with CommDebugMode() as mode:
            of_other_code()
        assert mode.get_module_bytes()["Global"]["forward"] == sum(mode.get_comm_bytes().values())
        return dict(mode.comm_counts), {str(key): sent for key, sent in mode.get_comm_bytes().items()}

    ((counts, sent),) = world(1).run(ours)
    with TorchCommDebugMode() as peer:
        of_other_code()
    assert counts == peer.comm_counts
    assert sent == {
        "c10d_functional.all_reduce": 144,
        "c10d_functional.all_gather_into_tensor": 3 * 96 + 3 * 160,
        "c10d_functional.reduce_scatter_tensor": 72,
        "c10d_functional.all_to_all_single": 48,
        "c10d_functional.broadcast": 0,
        "c10d_functional.all_reduce_coalesced": 288,
    }


class Reduced(nn.Module):
    """Sums its input over the ranks in forward, and its gradient in backward."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = funcol.wait_tensor(funcol.all_reduce(x, "sum", dist.group.WORLD))  # type: ignore[arg-type]
        return out


class Blocks(nn.Module):
    """Equal blocks, each with a module that sends inside a module inside; gathers by itself at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Tanh(), nn.Sequential(Reduced(), nn.ReLU())) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        x = funcol.all_gather_single(self.blocks(x), 0, dist.group.WORLD)  # type: ignore[arg-type]
        out: Tensor = funcol.wait_tensor(x)
        return out


class Repeated(nn.Module):
    """Calls one module three times. Torch's `CommDebugMode` fails for that, with an IndexError."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Sequential(Reduced())

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.again(x).sin()
        return x


def module_counts(mode: Any, module: nn.Module) -> dict[str, dict[str, dict[str, int]]]:
    with mode:
        module(torch.ones(2, 3, requires_grad=True)).sum().backward()
    counts = mode.comm_module_counts.items()
    return {
        name: {phase: {str(k): n for k, n in own.items()} for phase, own in found.items()} for name, found in counts
    }


def test_comm_module_counts_of_nested_modules_are_those_of_torch(rank_1_of_4: None) -> None:
    (ours,) = world(1).run(lambda: module_counts(CommDebugMode(), Blocks()))
    assert ours == module_counts(TorchCommDebugMode(), Blocks())
    assert len(ours) == 2 + 3 * 3 + 1  # "Global" and the model, three modules of each block, and what holds the blocks
    assert ours["Blocks"]["backward"]["c10d_functional.all_reduce"] == 3


def test_comm_module_counts_of_a_module_that_is_called_three_times_are_those_of_all_calls(rank_1_of_4: None) -> None:
    (ours,) = world(1).run(lambda: module_counts(CommDebugMode(), Repeated()))
    three = {"c10d_functional.all_reduce": 3}
    names = ("Global", "Repeated", "Repeated.again", "Repeated.again.0")
    assert ours == {name: {"forward": three, "backward": three} for name in names}


@pytest.mark.processes
def test_real_ranks_count_the_same() -> None:
    sent = world(2, real=True).run(sent_on_a_real_rank)
    assert sent == [{"forward": 24, "backward": 16}, {"forward": 16, "backward": 24}]


def sent_on_a_real_rank() -> dict[str, int]:
    half, x = Half(), rows().requires_grad_()
    with CommDebugMode() as mode:
        half(x).sum().backward()
    return mode.get_module_bytes()["Half"]
