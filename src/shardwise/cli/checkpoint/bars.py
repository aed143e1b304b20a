"""The progress bar of operations on checkpoints."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardwise.errors import printable

if TYPE_CHECKING:
    from shardwise.checkpoint.offline import Progress


@contextmanager
def progress_bar() -> "Iterator[Progress]":
    """A bar on standard error if that is a terminal, with the bytes read and written and the tensor at work."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    from shardwise.checkpoint.offline import Progress

    columns = (
        BarColumn(),
        DownloadColumn(True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[what]}", markup=False),
    )
    console = Console(stderr=True, highlight=False)
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("", total=None, what="")

        class Shown(Progress):
            def begin(self, num_bytes: int) -> None:
                bars.update(task, total=num_bytes)

            def advance(self, what: str, num_bytes: int) -> None:
                bars.update(task, advance=num_bytes, what=printable(what))

        yield Shown()
