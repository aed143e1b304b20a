"""A picture of a layout: as text, as SVG, in a notebook."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwise._layout import Layout, checked, checked_init
from shardwise._pictures.report import Report
from shardwise._pictures.svg import draw_svg
from shardwise._pictures.text import draw_text
from shardwise.errors import LayoutError

WIDTH = 100  # characters, by default


@checked_init
@dataclass(frozen=True, slots=True, repr=False)
class Picture(Report):
    """The shards of a tensor and their ranks. `str()` is the text; notebooks show the drawing.

    Args:
        layout: of the tensor.
        header: text above the picture, printed verbatim.
        itemsize: bytes of an element; None leaves bytes out.
    """

    layout: Layout
    header: str = ""
    itemsize: int | None = None

    def text(self, width: int | None = None, colour: bool = False) -> str:
        """Box drawing; the tensor's first dim runs downwards, the second to the right.

        Args:
            width: characters of a line, 100 if None. Parts that do not fit are summarized: `12 shards` means 12 cells.
            colour: ANSI colours, one per rank; a cell of several ranks has the first one's.
        """
        return draw_text(self.layout, self.header, self.itemsize, WIDTH if width is None else width, colour)

    def svg(self) -> str:
        """A self-contained drawing, with the full description of each cell as its tooltip."""
        return svg([self])

    def _repr_html_(self) -> str:
        return f"<div>{self.svg()}</div>"


def svg(pictures: Sequence[Picture]) -> str:
    """One drawing of all pictures, one below the other."""
    return draw_svg([(one.layout, one.header, one.itemsize) for one in pictures])


@checked
def picture(x: Any, header: str = "", itemsize: int | None = None) -> Picture:
    """The picture of a `Layout`, or of a DTensor, ours or torch's.

    Args:
        x: read without communication; other ranks need not call.
        header: text above the picture.
        itemsize: bytes of an element, for a layout; a DTensor knows them.

    Raises:
        LayoutError: another type.
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
