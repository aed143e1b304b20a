"""Optimizers that `get_state_dict` of torch named, and states under names that nothing looks for."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import shardwise as sw
from shardwise.checkpoint import restore, save, state_of
from shardwise.checkpoint.offline import import_torch
from shardwise.errors import CheckpointError
from shardwise.testing import world


def full(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, sw.DTensor) else x.detach()


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 4), 1.0 + step)).square().mean().backward()
        optimizer.step()


def trained() -> tuple[nn.Sequential, torch.optim.Adam]:
    model = made()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer, 3)
    return model, optimizer


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_usual_checkpoint_of_fsdp_is_restored_with_its_optimizer(tmp_path: Path) -> None:
    model, optimizer = trained()
    parameters, states = get_state_dict(model, optimizer)
    dcp_save({"model": parameters, "optimizer": states}, checkpoint_id=tmp_path / "dcp")
    run = import_torch(tmp_path / "dcp", tmp_path / "run", allow_pickle_metadata=True, step=3)
    train(model, optimizer, 2)

    def go_on() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        other = sw.shard_module(made(), {"0.weight": sw.Shard(0), "1.weight": sw.Shard(1)})
        fresh = torch.optim.Adam(other.parameters(), lr=0.5)
        restore(run, other, fresh)
        train(other, fresh, 2)
        moments = [fresh.state[p]["exp_avg"] for p in other.parameters()]
        return [full(p) for p in other.parameters()], [full(x) for x in moments]

    for values, moments in world(3).run(go_on):
        for ours, theirs in zip(values, model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)
        for moment, p in zip(moments, model.parameters(), strict=True):
            torch.testing.assert_close(moment, optimizer.state[p]["exp_avg"])


def test_states_under_names_that_nothing_looks_for_are_not_lost_in_silence(tmp_path: Path) -> None:
    model, optimizer = trained()
    state = state_of(model, optimizer)
    of_states = {name: x for name, x in state.items() if name.startswith("optimizer.") and isinstance(x, torch.Tensor)}
    rest = {name: x for name, x in state.items() if name not in of_states}
    save(tmp_path, rest | {name.replace(".", ".old.", 1): x for name, x in of_states.items()}, step=1)
    other = made()
    fresh = torch.optim.Adam(other.parameters(), lr=0.01)
    with pytest.raises(CheckpointError, match=r"'optimizer\.old\.0\.weight\.exp_avg' looks like a state of 0\.weight"):
        restore(tmp_path, other, fresh, subset=True)
    dropped = restore(tmp_path, other, fresh, strict=False, subset=True).dropped
    assert sum("looks like a state of" in line for line in dropped) == len(of_states) == 12
    assert not fresh.state


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_optimizer_under_another_name_is_named(tmp_path: Path) -> None:
    model, optimizer = trained()
    parameters, states = get_state_dict(model, optimizer)
    run = save(tmp_path / "run", {"model": parameters, "opt": states}, step=3)
    text = "no optimizer in the checkpoint called 'optimizer'; there is one called 'opt': save it under 'optimizer'"
    with pytest.raises(CheckpointError, match=text):
        restore(run, model, optimizer, subset=True)
