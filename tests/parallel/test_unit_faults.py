"""A rank ends while others all-gather or reduce units of `fully_shard`: all of them raise, and name it."""

from functools import partial
from itertools import product
from pathlib import Path

import pytest

from tests.collectives.real_ranks import each, outcomes
from tests.parallel import fault_jobs
from tests.timeouts import PATIENCE_SECONDS

pytestmark = pytest.mark.processes

LIMIT = PATIENCE_SECONDS / 2


def test_survivors_name_the_rank_that_ended_or_raise_the_same(tmp_path: Path) -> None:
    cases = list(product(("all-gather", "backward", "reduce-scatter"), ("raise", "kill")))
    worlds = {
        f"{where} {how}": partial(outcomes, job=partial(fault_jobs.fail_in_a_step, where, how), timeout=LIMIT)
        for where, how in cases
    }
    found = each(tmp_path, {**worlds, "other units": partial(outcomes, job=fault_jobs.use_other_units)})
    for where, how in cases:
        ranks = found[f"{where} {how}"]
        for survivor in (0, 2):
            assert (ranks[survivor].error, ranks[survivor].named) == ("RemoteRankError", 1), (where, ranks[survivor])
            assert ranks[survivor].seconds < LIMIT
        said = "Rank 1 failed: Broken: no such row" if how == "raise" else "Rank 1 ended without a report"
        assert ranks[0].first_line.startswith(said), where
    others = found["other units"]
    assert [outcome.error for outcome in others.values()] == ["MismatchError"] * 3
    assert "rank 2: all_gather of float32 (10, 10, 0) (fully_shard, Linear: weight, bias (unit 2))" in others[0].text
