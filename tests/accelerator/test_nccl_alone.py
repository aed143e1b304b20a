"""In a world that sends no CPU tensors all of the library works on an accelerator.

Without GPUs the accelerator is device.cpp, whose memory is the host's, and the backend `NcclRules`.
"""

import json
import os
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from shardwise import _collectives as collectives
from shardwise.testing import world
from tests.accelerator.scenarios import SCENARIOS
from tests.forked import forked

pytestmark = pytest.mark.processes

SIZE = 4
NAMES = [scenario.__name__ for scenario in SCENARIOS]
assert len(NAMES) > 15

Outcomes = list[dict[str, str]]  # of each rank: the traceback of each scenario, empty if there is none


def run(folder: Path, device: str, library: Path) -> Outcomes:
    environment = {**os.environ, "SHARDWISE_TEST_DEVICE": device, "OMP_NUM_THREADS": "1"}
    command = ["-m", "tests.accelerator.scenarios"]
    root = Path(__file__).parents[2]
    with ExitStack() as all_end:
        ranks = [
            all_end.enter_context(
                forked([*command, str(rank), str(SIZE), str(folder), str(library)], root, environment)
            )
            for rank in range(SIZE)
        ]
        for rank in ranks:
            _, said = rank.communicate()
            assert rank.returncode == 0, said
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(SIZE)]


def made_device(folder: Path) -> Path:
    """The library of device.cpp."""
    torch_folder = Path(torch.__file__).parent
    library, headers = folder / "device.so", torch_folder / "include"
    options = ["-shared", "-fPIC", "-std=c++20", "-O0", f"-I{headers}", f"-I{headers}/torch/csrc/api/include"]
    source = Path(__file__).with_name("device.cpp")
    linked = [f"-L{torch_folder}/lib", "-lc10", "-ltorch_cpu"]
    subprocess.run(["g++", *options, str(source), "-o", str(library), *linked], check=True)
    return library


def assert_all_passed(found: Outcomes) -> None:
    assert all(found[0].keys() == outcome.keys() == {*NAMES} for outcome in found)
    failed = [
        f"rank {rank}, {name}: {text}" for rank, outcome in enumerate(found) for name, text in outcome.items() if text
    ]
    assert not failed, "\n".join(failed)


if shutil.which("g++") is not None:  # which makes the device

    def test_no_cpu_tensor_is_sent_where_nccl_is_alone(tmp_path: Path) -> None:
        assert_all_passed(run(tmp_path, "fake", made_device(tmp_path)))


if torch.cuda.device_count() >= SIZE:

    @pytest.mark.gpu
    def test_so_it_is_with_nccl_itself(tmp_path: Path) -> None:
        assert_all_passed(run(tmp_path, "cuda", tmp_path))


def device_of_messages() -> str:
    return collectives.message_device((0, 1)).type


def test_messages_are_made_on_cpus_where_their_tensors_can_be_sent() -> None:
    assert world(2, real=True).run(device_of_messages) == ["cpu", "cpu"]
