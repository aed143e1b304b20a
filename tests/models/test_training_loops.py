"""accelerate and the Trainer of transformers refuse what they would do wrongly to a sharded model, on real processes.

`examples/with_accelerate.py` and `examples/with_lightning.py` are the loops that work.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.forked import run_forked

pytestmark = [pytest.mark.slow, pytest.mark.processes]

WRAPPED = "RuleError: A wrapper such as DistributedDataParallel or fully_shard"


@pytest.fixture(scope="module")
def said_by_all(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each job said. One program starts the ranks of all, so that the two libraries are imported once."""
    folder = tmp_path_factory.mktemp("loops")
    done = run_forked(["-m", "tests.models.loop_jobs", str(folder)], Path(__file__).parents[2], os.environ, ranks=True)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def test_accelerate_refuses_to_wrap_to_gather_and_to_save(said_by_all: dict[str, Any]) -> None:
    said = said_by_all["accelerate"]
    for call in ("prepare", "prepare with an optimizer", "prepare of a unit"):
        assert said[call].startswith(WRAPPED), call
    for call in ("gather", "gather_for_metrics"):
        assert said[call].startswith("RuleError: all_gather() would use the local tensor of a DTensor"), call
    assert said["reduce"].startswith("RuleError: all_reduce() would use the local tensor of a DTensor")
    assert said["batches"].startswith("MismatchError: linear: the plain tensor beside DTensors")
    assert said["save_state"].startswith("RuleError: data_ptr() would show only the local shard of a DTensor")
    assert said["save_model"].startswith("RuleError: untyped_storage() would use the local tensor of a DTensor")
    assert said["save"].startswith("RuleError: A DTensor cannot be pickled")
    assert len(said) == 10


@pytest.mark.parametrize("sharded", ["by styles", "by layouts"])
def test_the_trainer_refuses_to_train_and_to_evaluate(sharded: str, said_by_all: dict[str, Any]) -> None:
    """It would wrap the model, and give each rank a batch of its own."""
    trained, evaluated = said_by_all[sharded]
    assert trained.startswith(WRAPPED)
    assert evaluated.startswith("MismatchError: ")
    assert "must be the same on all ranks" in evaluated


def test_the_trainer_evaluates_a_fully_sharded_model_and_refuses_to_train_it(said_by_all: dict[str, Any]) -> None:
    """Each rank has batches of its own, as `fully_shard` takes them."""
    trained, evaluated = said_by_all["fully"]
    assert trained.startswith(WRAPPED)
    assert evaluated == "loss 1.00000 of that of one process"
