"""The picture of a DTensor, under the name that torch has for it."""

import re
import sys

from rich.console import Console
from rich.text import Text

from shardwise import collectives
from shardwise.report import picture
from shardwise.tensor import DTensor

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


def visualize_sharding(dtensor: DTensor, header: str = "", use_rich: bool = False) -> None:
    """Print which rank holds which part of `dtensor`, once: on the first rank of its mesh.

    Of a tensor without elements nothing is printed. `shardwise.picture` gives the same as text.

    Args:
        header: a line above the picture.
        use_rich: colour the cells by the first rank that holds them, where the terminal has colours.

    Raises:
        LayoutError: a dim beyond the second is cut.
    """
    layout = dtensor.layout_
    if not dtensor.numel() or collectives.rank() != layout.mesh.ranks[0]:
        return
    text = f"{header}\n{picture(layout)}" if header else picture(layout)
    if use_rich:
        Console(soft_wrap=True).print(_coloured(text))
    else:
        sys.stdout.write(text + "\n")


def _coloured(text: str) -> Text:
    coloured = Text(text)
    for holders in re.finditer(r"rank (\d+)[\d, -]*", text):
        coloured.stylize(_COLOURS[int(holders[1]) % len(_COLOURS)], *holders.span())
    return coloured
