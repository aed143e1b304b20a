"""`visualize_sharding` prints the picture of a layout once."""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from shardwise import DTensor, Mesh, Shard, distribute_tensor, picture
from shardwise import _collectives as collectives
from shardwise.debug import visualize_sharding
from shardwise.testing import world


@contextmanager
def printed() -> Iterator[io.StringIO]:
    """What all simulated ranks print."""
    before, sys.stdout = sys.stdout, io.StringIO()
    try:
        yield sys.stdout
    finally:
        sys.stdout = before


def uneven() -> DTensor:
    return distribute_tensor(torch.ones(7, 4), Mesh((3,), (2, 0, 1)), [Shard(0, sizes=(4, 0, 3))])


def test_ranks_outside_the_mesh_need_not_call() -> None:
    def body() -> None:
        if collectives.rank():
            visualize_sharding(distribute_tensor(torch.ones(3), Mesh((2,), (1, 2)), [Shard(0)]), "of ranks 1 and 2")

    with printed() as out:
        world(3).run(body)
    assert out.getvalue().startswith("of ranks 1 and 2\n3 as [Shard(0)]")


@pytest.mark.parametrize("use_rich", [False, True])
def test_the_picture_is_printed_once_below_the_header(use_rich: bool) -> None:
    with printed() as out:
        world(3).run(lambda: visualize_sharding(uneven(), "weights", use_rich))
    layout = world(3).run(lambda: uneven().layout_)[0]
    assert out.getvalue() == f"weights\n{picture(layout, itemsize=4)}\n"


def test_rich_colours_what_is_piped_where_the_environment_forces_it() -> None:
    with pytest.MonkeyPatch.context() as environment, printed() as out:
        environment.setenv("FORCE_COLOR", "1")
        environment.setenv("TERM", "xterm-256color")
        environment.delenv("NO_COLOR", raising=False)
        world(3).run(lambda: visualize_sharding(uneven(), use_rich=True))
        world(3).run(lambda: visualize_sharding(uneven()))
    assert out.getvalue().count("\x1b[32mrank 2") == 1


def test_nothing_is_printed_of_a_tensor_without_elements() -> None:
    with printed() as out:
        world(2).run(lambda: visualize_sharding(distribute_tensor(torch.ones(0, 4), Mesh((2,)), [Shard(0)]), "empty"))
    assert out.getvalue() == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("no_color", ["", "1"])
def test_a_terminal_gets_colours_of_rich_unless_they_are_refused(no_color: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        screen = Terminal()
        patch.setattr(sys, "stdout", screen)
        patch.delenv("FORCE_COLOR", raising=False)
        patch.setenv("TERM", "xterm-256color")
        patch.setenv("NO_COLOR", no_color)
        world(3).run(lambda: visualize_sharding(uneven(), use_rich=True))
        drawn = screen.getvalue()
    assert ("\x1b[32mrank 2\x1b[0m" in drawn) == (not no_color)
    assert "\x1b[3" not in drawn if no_color else "\x1b[35mrank 1\x1b[0m" in drawn
