"""`torch.distributed.checkpoint`, its state-dict tools and `load_state_dict`, of sharded modules and optimizers."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.testing import world
from tests.checkpoint import torch_tool_jobs as jobs

pytestmark = pytest.mark.processes


CASES = pytest.mark.parametrize(
    ("size", "optimizer"),
    [(4, "Adam"), (2, "SGD"), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, "Adam"), (4, "SGD")))],
)


@CASES
@pytest.mark.parametrize("job", [jobs.get, jobs.set_full, jobs.load_plain])
def test_states_are_gathered_set_and_loaded(size: int, optimizer: str, job: Callable[[str], None]) -> None:
    world(size, real=True).run(job, optimizer)


@CASES
@pytest.mark.parametrize("sharding", ["rows", "last dim", "tp in fsdp"])
def test_modules_of_torch_dtensors_load_into_sharded_ones_and_back(size: int, optimizer: str, sharding: str) -> None:
    world(4 if sharding == "tp in fsdp" else size, real=True).run(jobs.load_of_torch, optimizer, sharding)


@CASES
@pytest.mark.parametrize("asynchronously", [False, True], ids=["save", "async_save"])
def test_what_dcp_saved_is_loaded_in_any_sharding(
    size: int, optimizer: str, asynchronously: bool, tmp_path: Path
) -> None:
    world(size, real=True).run(jobs.save, tmp_path / "dcp", optimizer, asynchronously)
    for loading in (1, 2, 4):
        world(loading, real=True).run(jobs.load, tmp_path / "dcp", optimizer)


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_outside_the_mesh_of_a_parameter_cannot_gather_it(size: int, tmp_path: Path) -> None:
    *outside, inside = world(size, real=True).run(jobs.on_the_last_rank, tmp_path / "dcp")
    assert inside == ["2"] * 4
    for loaded, *texts in outside:
        assert loaded == "2"
        for text in texts:
            assert re.search(r"rank \d is outside Mesh\(.*and has no elements of it", text), text


SIZES = r"torch.Size\(\[10, 4\]\).*torch.Size\(\[9, 4\]\)"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("processes", "^RuleError: A DTensor cannot be pickled: a rank holds only its local shard."),
        ("differing parameters", r"^MismatchError: load_state_dict: items.weight of shape \(9, 4\)"),
        ("differing states", "^MismatchError: load_state_dict of an optimizer: state exp_avg of parameter 2 of shape"),
        ("saved shape", f"^CheckpointException: (?s:.*)Size mismatch between saved {SIZES} for model.items.weight"),
    ],
)
def test_bad_input_is_an_error_on_all_ranks(kind: str, text: str, tmp_path: Path) -> None:
    for found in world(2, real=True).run(jobs.bad_input, kind, tmp_path / "dcp"):
        assert re.search(text, found), found
