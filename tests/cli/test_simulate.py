"""`shardwise simulate` prints what `simulate` finds, writes its page, and refuses the rest in one line."""

import re
from pathlib import Path

import pytest

from shardwise import Mesh
from shardwise import _cli as cli
from shardwise._cli.calibration import write_costs
from shardwise._collectives.cost_tables import COLLECTIVES, Measured
from shardwise.plan import Topology
from shardwise.simulation import simulate
from shardwise.simulation.shapes import SHAPES, Options

Captured = pytest.CaptureFixture[str]
STEPS = """
import torch
from shardwise import Shard, distribute_tensor, shard_module

number = 3

def train(mesh):
    model = shard_module(torch.nn.Linear(4, 9), {"weight": Shard(0)}, mesh=mesh)
    return lambda: model(torch.ones(2, 4)).sum().backward()

def gather(mesh):
    return distribute_tensor(torch.ones(9), mesh, [Shard(0)]).full_tensor

def nothing(mesh):
    return None
"""


@pytest.fixture(autouse=True)
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_steps.py").write_text(STEPS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def test_a_function_is_simulated(capsys: Captured) -> None:
    assert cli.main(["simulate", "my_steps:train", "--mesh", "tp=3"]) == 0
    out, err = capsys.readouterr()
    from my_steps import train  # type: ignore[import-not-found]  # written above

    found = simulate(train, mesh=Mesh((3,), names=("tp",), device_type="cuda"), topology=Topology.preset("H100"))
    assert out == f"{found}\n"
    assert not err  # progress is for terminals


def test_options_of_a_shape_are_obeyed(capsys: Captured) -> None:
    options = ["--layers", "1", "--context", "8", "--batch-size", "2", "--sequence-parallel", "--fully-shard"]
    assert cli.main(["simulate", "llama-70b", "--mesh", "dp=2,tp=2", *options]) == 0
    given = Options(layers=1, context=8, batch_size=2, sequence_parallel=True, fully_shard=True)
    mesh = Mesh((2, 2), names=("dp", "tp"), device_type="cuda")
    found = simulate(lambda mesh: SHAPES["llama-70b"].build(given, mesh), mesh=mesh, topology=Topology.preset("H100"))
    assert capsys.readouterr().out == f"{found}\n"
    causes = " ".join(x.cause for one in found.classes for x in one.collectives)
    assert "layers.0.attention" in causes
    assert "layers.1" not in causes
    assert "layers.*.attention" in str(found)


@pytest.mark.parametrize(
    ("machine", "topology"),
    [
        ([], Topology.preset("H100", hosts=2)),
        (["--device", "cuda"], Topology.preset("H100", hosts=2)),
        (["--device", "cpu"], Topology.preset("cpu", hosts=3)),
        (["--preset", "a100", "--memory", "40GB"], Topology.preset("A100", hosts=2, memory=40 * 10**9)),
    ],
)
def test_the_machine_is_a_preset_or_the_usual_one_of_a_device(
    machine: list[str], topology: Topology, capsys: Captured
) -> None:
    assert cli.main(["simulate", "my_steps:train", "--mesh", "tp=9", *machine]) == 0
    from my_steps import train

    mesh = Mesh((9,), names=("tp",), device_type=topology.device_type)
    assert capsys.readouterr().out == f"{simulate(train, mesh=mesh, topology=topology)}\n"


def test_a_step_that_does_not_fit_exits_with_3(capsys: Captured) -> None:
    assert cli.main(["simulate", "my_steps:train", "--mesh", "tp=3", "--memory", "100B"]) == 3
    assert re.fullmatch(
        r"All ranks peak at \d+ B of 100 B: \d+ B too much\. Fix: ranks with 1 MiB of memory, .*\.",
        capsys.readouterr().out.splitlines()[1],
    )


def test_measured_costs_are_used_for_their_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    write_costs(tmp_path / "costs.json", "cpu", "here", {name: Measured(1e6, 0, 500) for name in COLLECTIVES}, None)
    monkeypatch.setenv("SHARDWISE_COSTS", str(tmp_path / "costs.json"))
    for device, slow in (("cpu", True), ("cuda", False)):
        assert cli.main(["simulate", "my_steps:gather", "--mesh", "tp=3", "--device", device]) == 0
        assert (" 1,000 ms" in capsys.readouterr().out) is slow


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["lama-70b", "--mesh", "dp=2"], "'lama-70b' is not a shape. Did you mean 'llama-70b'? Fix: use one of"),
        (["llama-70b", "--mesh", "dp=two"], "'dp=two' is not a mesh: "),
        (["llama-70b", "--mesh", "2,2"], "A shape needs a mesh with axis names, got Mesh(0=2, 1=2). Fix: "),
        (["llama-70b", "--mesh", "dp=2", "--sequence-parallel"], "sequence_parallel needs an axis tp in the mesh"),
        (["llama-70b", "--mesh", "tp=2", "--fully-shard"], "fully_shard needs an axis of dp, fs in the mesh, got"),
        (["llama-70b", "--mesh", "dp=2,tpp=2"], "has no axis 'tpp'. Did you mean 'tp'? Fix: a mesh of dp, fs, tp."),
        (["llama-70b", "--mesh", "dp=2,ep=2"], "has no axis 'ep'. Fix: a mesh of dp, fs, tp."),
        (["dlrm", "--mesh", "dp=2,tp=2"], "has no axis 'tp'. Fix: a mesh of dp."),
        (["my_steps:train", "--mesh", "2", "--memory", "80XB"], "'80XB' is not a size, "),
        (["my_steps:train", "--mesh", "2", "--preset", "H10"], "There is no preset 'H10'. Did you mean 'H100'? Fix: "),
        (["my_steps:train", "--mesh", "2", "--preset", "cpu", "--device", "cpu"], "not allowed with argument --preset"),
        (["llama-70b", "--mesh", "dp=2", "--layers", "0"], "layers is 0, expected 1 or more"),
        (["mixtral-8x7b", "--mesh", "tp=2", "--sequence-parallel"], "mixtral-8x7b has no options --sequence-parallel"),
        (["my_steps:train", "--mesh", "2", "--layers", "3"], "my_steps:train has no options --layers"),
        (["my_stops:train", "--mesh", "2"], "'my_stops:train' cannot be imported: No module named 'my_stops'. Fix: "),
        (
            ["my_steps:trian", "--mesh", "2"],
            "'my_steps:trian' cannot be imported: module 'my_steps' has no attribute 'trian'. Fix",
        ),
        (["my_steps:number", "--mesh", "2"], "'my_steps:number' is not a function. Fix: "),
        (["os:getcwd", "--mesh", "2"], "'os:getcwd' has other arguments: too many positional arguments. Fix: "),
        (["my_steps:nothing", "--mesh", "2"], "must return a function of one step, got NoneType. Fix: "),
        (["my_steps:train"], "required: --mesh"),
    ],
)
def test_what_cannot_be_simulated_is_one_line_and_exits_with_2(argv: list[str], why: str, capsys: Captured) -> None:
    assert cli.main(["simulate", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert why in err.splitlines()[-1]


def test_progress_is_one_line_of_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert cli.main(["simulate", "my_steps:train", "--mesh", "tp=3"]) == 0
    out, err = capsys.readouterr()
    assert "\x1b" not in out
    assert "rank 0, the first of its class" in err
    assert "\x1b[2K" in err  # lines are erased
