"""`visualize_sharding` prints the picture of a layout once."""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from shardwise import DTensor, Mesh, Shard, collectives, distribute_tensor, picture
from shardwise.debug import visualize_sharding
from shardwise.errors import LayoutError
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
    assert out.getvalue() == f"weights\n{picture(layout)}\n"


def test_a_terminal_with_colours_gets_them() -> None:
    with pytest.MonkeyPatch.context() as environment, printed() as out:
        environment.setenv("FORCE_COLOR", "1")
        environment.setenv("TERM", "xterm-256color")
        environment.delenv("NO_COLOR", raising=False)
        world(3).run(lambda: visualize_sharding(uneven(), use_rich=True))
    assert "\x1b[32mrank 2" in out.getvalue()  # green is the third colour
    assert "\x1b[35mrank 1" in out.getvalue()


def test_nothing_is_printed_of_a_tensor_without_elements() -> None:
    with printed() as out:
        world(2).run(lambda: visualize_sharding(distribute_tensor(torch.ones(0, 4), Mesh((2,)), [Shard(0)]), "empty"))
    assert out.getvalue() == ""


def test_a_cut_that_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(LayoutError, match="first two dims"):
        world(2).run(lambda: visualize_sharding(distribute_tensor(torch.ones(2, 2, 4), Mesh((2,)), [Shard(2)])))
