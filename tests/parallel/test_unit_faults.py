"""A rank ends while others all-gather or reduce units of `fully_shard`: all of them raise, and name it."""

from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise import Mesh, Shard, distribute_tensor
from shardwise import _collectives as collectives
from tests.collectives.real_ranks import each, outcomes
from tests.collectives.test_survivors import end
from tests.parallel.units import as_units
from tests.timeouts import PATIENCE_SECONDS

pytestmark = pytest.mark.processes

LIMIT = PATIENCE_SECONDS / 2


def fail_in_a_step(where: str, how: str) -> None:
    """Rank 1 ends in the second step, while others gather or reduce."""
    torch.manual_seed(0)
    mesh = Mesh((3,))
    model = as_units(nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), mesh, prefetch=2)
    batch = distribute_tensor(torch.ones(6, 8), mesh, [Shard(0)])
    model(batch).sum().backward()

    def fail(*args: object) -> None:
        if collectives.rank() == 1:
            end(how)

    match where:
        case "all-gather":  # of the unit after the one in which it ends
            model[1].register_forward_pre_hook(fail)
        case "backward":
            model[2].register_full_backward_pre_hook(fail)
        case "reduce-scatter":  # of the unit before
            model[1].register_full_backward_hook(fail)
    model(batch).sum().backward()
    for p in model.parameters():
        assert p.grad is not None
        p.grad.to_local()


def use_other_units() -> None:
    mesh = Mesh((3,))
    model = as_units(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh)
    batch = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)])
    model(batch).sum().backward()
    unit = model[1 if collectives.rank() == 2 else 0]
    unit(batch).sum().backward()
    unit.weight.grad.to_local()


def test_survivors_name_the_rank_that_ended_or_raise_the_same(tmp_path: Path) -> None:
    cases = list(product(("all-gather", "backward", "reduce-scatter"), ("raise", "kill")))
    worlds = {
        f"{where} {how}": partial(outcomes, job=partial(fail_in_a_step, where, how), timeout=LIMIT)
        for where, how in cases
    }
    found = each(tmp_path, {**worlds, "other units": partial(outcomes, job=use_other_units)})
    for where, how in cases:
        ranks = found[f"{where} {how}"]
        for survivor in (0, 2):
            assert (ranks[survivor].error, ranks[survivor].named) == ("RemoteRankError", 1), (where, ranks[survivor])
            assert ranks[survivor].seconds < LIMIT
        said = "Rank 1 failed: Broken: no such row" if how == "raise" else "Rank 1 ended without a report"
        assert ranks[0].first_line.startswith(said), where
    others = found["other units"]
    assert [outcome.error for outcome in others.values()] == ["MismatchError"] * 3
    assert "rank 2: all_gather of float32 (10, 10, 0) (fully_shard, 1 (unit 2): weight, bias)" in others[0].text
