"""A rank ends while others all-gather or reduce units of `fully_shard`: all of them raise, and name it."""

from pathlib import Path

import pytest

from tests.collectives.real_ranks import outcomes
from tests.parallel import fault_jobs
from tests.timeouts import PATIENCE_SECONDS

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("how", ["raise", "kill"])
@pytest.mark.parametrize("where", ["all-gather", "backward", "reduce-scatter"])
def test_survivors_name_the_rank_that_ended(where: str, how: str, tmp_path: Path) -> None:
    limit = PATIENCE_SECONDS / 2
    found = outcomes(tmp_path, fault_jobs.fail_in_a_step, where, how, timeout=limit)
    for survivor in (0, 2):
        assert (found[survivor].error, found[survivor].named) == ("RemoteRankError", 1), found[survivor].text
        assert found[survivor].seconds < limit
    said = "Rank 1 failed: Broken: no such row" if how == "raise" else "Rank 1 ended without a report"
    assert found[0].first_line.startswith(said)


def test_ranks_that_use_other_units_raise(tmp_path: Path) -> None:
    found = outcomes(tmp_path, fault_jobs.use_other_units)
    assert [outcome.error for outcome in found.values()] == ["MismatchError"] * 3
    assert "rank 2: all_gather of float32 (10, 10, 0) (fully_shard, Linear: weight, bias (unit 2))" in found[0].text
