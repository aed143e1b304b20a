"""The examples of sharded embedding tables: each by its name, on simulated ranks and under torchrun."""

import importlib.util
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from shardwise.testing import world
from tests.collectives.real_ranks import free_port
from tests.forked import run_forked

pytestmark = pytest.mark.processes

FILE = Path(__file__).parents[1] / "examples" / "torchrec_sharding.py"
NAMES = ["row-wise-even", "row-wise-uneven", "table-wise", "column-wise", "grid"]
UNEVEN = """\
Row-wise, uneven:
8 x 16 as [Shard(0, sizes=(1, 3, 1, 3))] on Mesh(0=4)
   0
  ┌────────┐
0 │ rank 0 │
  ├────────┤
1 │        │
  │ rank 1 │
  │        │
  ├────────┤
4 │ rank 2 │
  ├────────┤
5 │        │
  │ rank 3 │
  │        │
  └────────┘
rank 0, 2: 1 x 16, 64 B each
rank 1, 3: 3 x 16, 192 B each
"""


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("torchrec_sharding", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_the_examples_that_the_command_line_names(example: ModuleType) -> None:
    assert list(example.EXAMPLES) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_an_example_checks_itself_and_draws_every_rank(
    example: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["torchrec_sharding.py", "-e", name])
    example.main()
    printed = capsys.readouterr().out
    for rank in range(4):
        assert f"rank {rank}" in printed
    assert name != "row-wise-uneven" or printed == UNEVEN


def test_other_names_and_other_worlds_are_refused(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["torchrec_sharding.py", "-e", "row-wise"])
    with pytest.raises(SystemExit):
        example.main()
    assert "invalid choice: 'row-wise'" in capsys.readouterr().err
    with pytest.raises(AssertionError, match="for 4 ranks"):
        world(2).run(example.run, ["grid"])


def test_under_torchrun_the_processes_are_the_ranks(tmp_path: Path) -> None:
    """Started with the variables that torchrun sets."""
    one_world = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"}
    one_world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}

    def printed(rank: str) -> str:
        variables = {**os.environ, **one_world, "RANK": rank, "LOCAL_RANK": rank}
        done = run_forked([str(FILE), "-e", "row-wise-uneven"], tmp_path, variables)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(printed, "0123")) == [UNEVEN, "", "", ""]
