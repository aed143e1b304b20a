"""A picture of a layout: as text, as SVG, in a notebook."""

import os
import shutil
import sys
from dataclasses import dataclass
from typing import Any, TextIO

from shardwise._layout import Layout, checked, checked_init
from shardwise._pictures.labels import fitting
from shardwise._pictures.scene import Subject
from shardwise._pictures.svg import draw_svg
from shardwise._pictures.text import draw_text
from shardwise.errors import LayoutError

WIDTH = 100  # characters, by default


@checked_init
@dataclass(frozen=True, slots=True, repr=False)
class Picture(Subject):
    """Which rank holds which shard of a tensor. `str()` is the text; notebooks show the drawing."""

    def text(self, width: int = WIDTH, colour: bool = False) -> str:
        """Box drawing; the tensor's first dim runs downwards, the second to the right.

        Args:
            width: characters of a line. What does not fit is summarized: `12 shards` means 12 cells.
            colour: ANSI colours, one per rank; a cell of several ranks has that of the first.
        """
        return draw_text(self, width, colour)

    def svg(self) -> str:
        """A self-contained drawing, with the full description of each cell as its tooltip."""
        return draw_svg([self])

    def show(self, file: TextIO | None = None) -> None:
        """Print the text, on standard output if no file is given.

        It is coloured on a terminal, unless the environment sets NO_COLOR or TERM says that the terminal is dumb.
        """
        out = sys.stdout if file is None else file
        terminal = out.isatty()
        width = shutil.get_terminal_size((WIDTH, 24)).columns if terminal else WIDTH
        out.write(fitting(self.text(width, terminal and takes_colour()), out.encoding) + "\n")

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<div>{self.svg()}</div>"


def takes_colour() -> bool:
    """Whether a terminal may be sent colours, by https://no-color.org and its own name."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


@checked
def picture(x: Any, header: str = "", itemsize: int | None = None) -> Picture:
    """The picture of a `Layout`, or of a DTensor, ours or torch's.

    Args:
        x: read without communication; no other rank has to call.
        header: text above the picture.
        itemsize: bytes of an element, for a layout; a DTensor knows them.

    Raises:
        LayoutError: neither of the two.
    """
    if isinstance(x, Layout):
        return Picture(x, header, itemsize)
    if type(x).__name__ == "DTensor" and not hasattr(x, "layout_"):
        from shardwise._torch_bridge.torch_dtensors import converted

        x = converted(x.detach())
    layout = getattr(x, "layout_", None)
    if not isinstance(layout, Layout):
        raise LayoutError(
            f"picture() draws a Layout or a DTensor, got {type(x).__name__}. Fix: distribute_tensor() first, or "
            f"sharding_table() for a module."
        )
    return Picture(layout, header, x.element_size())
