"""Modules with sharded batches and parameters on three ranks, beside one process; `tools.modules` tries more."""

import pytest

from tools.modules import CASES, MODES, judge


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("timm")])
def test_sharded_modules_equal_plain_ones(name: str, mode: str) -> None:
    assert judge(CASES[name], mode, ranks=3) == ""
