"""accelerate and the Trainer of transformers refuse what they would do wrongly to a sharded model, on real processes.

`examples/with_accelerate.py` and `examples/with_lightning.py` are the loops that work.
"""

from pathlib import Path

import pytest

from shardwise import launch
from tests.models.loop_jobs import refused_by_accelerate, with_the_trainer

pytestmark = [pytest.mark.slow, pytest.mark.processes]

WRAPPED = "RuleError: A wrapper such as DistributedDataParallel or fully_shard"


def test_accelerate_refuses_to_wrap_to_gather_and_to_save(tmp_path: Path) -> None:
    said = launch(refused_by_accelerate, str(tmp_path), nproc=2)
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
def test_the_trainer_refuses_to_train_and_to_evaluate(sharded: str, tmp_path: Path) -> None:
    """It would wrap the model, and give each rank a batch of its own."""
    trained, evaluated = launch(with_the_trainer, str(tmp_path), sharded, nproc=2)
    assert trained.startswith(WRAPPED)
    assert evaluated.startswith("MismatchError: ")
    assert "must be the same on all ranks" in evaluated


def test_the_trainer_evaluates_a_fully_sharded_model_and_refuses_to_train_it(tmp_path: Path) -> None:
    """Each rank has batches of its own, as `fully_shard` takes them."""
    trained, evaluated = launch(with_the_trainer, str(tmp_path), "fully", nproc=2)
    assert trained.startswith(WRAPPED)
    assert evaluated == "loss 1.00000 of that of one process"
