"""Tracebacks that ranks send: all frames of a bug, those of the user for an error that says what is wrong."""

import torch

import shardwise as sw
from shardwise._launch.launcher import format_traceback
from shardwise.errors import ShardwiseError


def refused() -> None:
    x = torch.ones(2, 3)
    sw.shard_module(torch.nn.Linear(3, 2), {"weight": x})  # type: ignore[dict-item]


def chained() -> None:
    try:
        refused()
    except ShardwiseError as error:
        raise KeyError("mine") from error


def text_of(fail: object) -> list[str]:
    try:
        fail()  # type: ignore[operator]
    except Exception as error:  # noqa: BLE001 - any
        return format_traceback(error, error.__traceback__).splitlines()
    raise AssertionError("no error")


def files(lines: list[str]) -> list[str]:
    return [line.split('"')[1].rsplit("/", 1)[1] for line in lines if line.startswith("  File ")]


def test_an_error_of_the_library_shows_the_frames_of_the_user() -> None:
    lines = text_of(refused)
    assert files(lines) == ["test_tracebacks.py"] * 2
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1].endswith("got a torch.Tensor. Fix: pass a placement.")


def test_other_errors_show_all_frames() -> None:
    lines = text_of(lambda: torch.nn.Linear(3, 2)(torch.ones(2, 4)))
    assert "linear.py" in files(lines)


def test_the_error_below_another_one_is_shown_as_well() -> None:
    lines = text_of(chained)
    assert files(lines) == ["test_tracebacks.py"] * 4
    assert lines[-1] == "KeyError: 'mine'"
    assert any("direct cause" in line for line in lines)
