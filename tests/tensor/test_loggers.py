"""Loggers read a replicated number of a DTensor; others are refused, since one rank writes the log."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise import DTensor, Mesh, Partial, Replicate, Shard, count_comms, distribute_tensor
from shardwise.errors import RuleError
from shardwise.testing import world

S0, R = Shard(0), Replicate()


def make_np(x: object) -> Any:
    """What `SummaryWriter.add_scalar` makes of its argument, read from torch, as tensorboard may not be installed."""
    found = spec_from_file_location("convert", Path(torch.__file__).parent / "utils" / "tensorboard" / "_convert_np.py")
    assert found is not None
    assert found.loader is not None
    module = module_from_spec(found)
    found.loader.exec_module(module)
    return module.make_np(x)


@world(2)
def test_tensorboard_takes_a_replicated_number_without_communication() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        x: Any = distribute_tensor(torch.tensor([2, 3], dtype=dtype), Mesh((2,)), [S0])
        loss = x.sum().redistribute(placements=[R])
        with count_comms() as comms:
            assert float(make_np(loss).squeeze()) == 5
            array = loss.numpy() if dtype != torch.bfloat16 else make_np(loss)
        assert comms.total_calls == 0
        array[...] = 7  # a copy: replicas stay equal
        assert loss.item() == 5
    x = distribute_tensor(torch.ones(()), Mesh((2,)), [R]).requires_grad_()
    with pytest.raises(RuntimeError, match=r"requires grad"):
        x.numpy()
    assert make_np(x) == 1


@world(2)
def test_what_one_rank_does_not_have_is_refused() -> None:
    mesh, one = Mesh((2,)), Mesh((1,))
    for x in (
        DTensor.from_local(torch.tensor(1.0), mesh, [Partial()]),
        distribute_tensor(torch.ones(1), mesh, [S0]),
        distribute_tensor(torch.ones(2), mesh, [R]),
        distribute_tensor(torch.ones(()), one, [R]).redistribute(Mesh((1,), (1,)), [R]),
    ):
        if x.layout_.mesh.size() == 1 and x.to_local().numel():
            continue  # the rank that has it
        with pytest.raises(RuleError, match=r"numpy\(\) would show only the local shard .* full_tensor\(\)"):
            make_np(x)
