"""accelerate and the Trainer of transformers refuse what they would do wrongly to a sharded model, on real processes.

`examples/with_accelerate.py` and `examples/with_lightning.py` are the loops that work.
"""

from pathlib import Path

import pytest

from shardwise import launch
from tests.models.loop_jobs import refused_by_accelerate, refused_by_the_trainer

pytestmark = [pytest.mark.slow, pytest.mark.processes]

WRAPPED = "RuleError: A wrapper such as DistributedDataParallel or fully_shard"


def test_accelerate_refuses_to_wrap_to_gather_and_to_save(tmp_path: Path) -> None:
    wrapped, gathered, saved = launch(refused_by_accelerate, str(tmp_path), nproc=2)
    assert wrapped.startswith(WRAPPED)
    assert gathered.startswith("RuleError: all_gather() would use the local tensor of a DTensor")
    assert saved.startswith("RuleError: data_ptr() would show only the local shard of a DTensor")


@pytest.mark.parametrize("by_layouts", [False, True])
def test_the_trainer_refuses_to_train_and_to_evaluate(by_layouts: bool, tmp_path: Path) -> None:
    """It would wrap the model, and give each rank a batch of its own."""
    trained, evaluated = launch(refused_by_the_trainer, str(tmp_path), by_layouts, nproc=2)
    assert trained.startswith(WRAPPED)
    assert evaluated.startswith("MismatchError: ")
    assert "must be the same on all ranks" in evaluated
