"""Ops replayed with other operands than they were recorded with; `tools/captures.py` tries all of them."""

import pytest

from tools.captures import tried
from tools.op_judge import Sample
from tools.rows import written

pytestmark = pytest.mark.slow

PART = 41  # every so many-th of the samples in tests/rules


def test_replays_of_ops_in_many_layouts_equal_the_ops_or_are_refused() -> None:
    samples: list[Sample] = list(written())[::PART]
    tally, wrong = tried(samples)
    assert not wrong, "\n".join(wrong)
    assert tally["ok"] > 2 * tally["refused"] > 0
