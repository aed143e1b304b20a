"""The table of docs/data-parallel.md says what happens."""

from pathlib import Path

import pytest

from shardwise.testing import world
from tests.parallel.compositions import NONE, YES, outcomes, table

pytestmark = pytest.mark.processes

PAGE = Path(__file__).parents[2] / "docs" / "data-parallel.md"


def test_the_documented_matrix_is_what_real_processes_do() -> None:
    found = world(4, real=True, timeout=120).run(outcomes)
    assert found[1:] == found[:1] * 3
    assert table(found[0]) in PAGE.read_text(encoding="utf-8"), table(found[0])
    words = [word for row in found[0] for word in row]
    assert words.count(YES) > 17
    assert words.count(NONE) == 9
