"""A command that must not start ranks."""

from importlib import import_module
from pathlib import Path

import pytest


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def launch(*args: object, **kwargs: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(import_module("shardwise.launch"), "launch", launch)  # `shardwise.launch` is the function
    monkeypatch.chdir(tmp_path)
