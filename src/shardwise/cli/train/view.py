"""What every job shows: rich on a terminal, plain lines elsewhere."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from rich import box
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shardwise.checkpoint import latest
from shardwise.demos.ledger import Communication, Progress
from shardwise.demos.loop import Taken
from shardwise.demos.restarts import SavesOfRun
from shardwise.errors import printable
from shardwise.pictures.labels import aligned, bytes_text, count_text

P = TypeVar("P", bound=Progress)


def _console() -> Console:
    """Standard output; rich reads NO_COLOR and TERM itself."""
    return Console(file=sys.stdout, highlight=False, soft_wrap=True)


def _is_plain(console: Console) -> bool:
    return not console.is_terminal or console.is_dumb_terminal


def print_table(rows: Sequence[Sequence[str]], left: int) -> None:
    """A table with a heading; the first `left` columns are words and the others numbers."""
    console = _console()
    if _is_plain(console):
        print("\n".join(aligned(rows, left)))
        return
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    for i, name in enumerate(rows[0]):
        table.add_column(name, justify="left" if i < left else "right", no_wrap=True)
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    console.print(table)


def show_beginning(folder: Path | str, resumed_step: int | None) -> None:
    """What becomes of checkpoints that are there."""
    if resumed_step is not None:
        print(f"Going on from step {resumed_step:,} in {folder}.")
    elif (earlier := latest(folder)) is not None:
        print(f"{earlier} is of an earlier run, whose checkpoints this one replaces.")
    sys.stdout.flush()


@contextmanager
def live(line: Callable[[P], str]) -> Iterator[Callable[[P], None]]:
    """Something to call with progress: it redraws one line, or prints a new one where that cannot be."""
    console = _console()
    if _is_plain(console):
        yield lambda progress: print(line(progress), flush=True)
        return

    def drawn(progress: P) -> Table:
        grid = Table.grid(padding=(0, 1))
        grid.add_row(ProgressBar(progress.last_step, progress.step, width=24), line(progress))
        return grid

    with Live(Text("starting …"), console=console, auto_refresh=False) as screen:
        yield lambda progress: screen.update(drawn(progress), refresh=True)


def show_restart(line: str) -> None:
    """What happened, and what follows."""
    console = _console()
    if not _is_plain(console):
        console.show_cursor()  # the line that was live may have hidden it
    print(printable(line), file=sys.stderr, flush=True)


def show_interruption(saves: SavesOfRun) -> None:
    """Where to go on; the line that was live may have hidden the cursor."""
    console = _console()
    if not _is_plain(console):
        console.show_cursor()
    found = latest(saves.folder)
    if found is None:
        said = "No checkpoint was saved."
    elif saves.last() is None:
        said = f"No checkpoint was saved. {found} is of the earlier run, which was not replaced."
    else:
        said = f"Last checkpoint: {found}; go on with --resume."
    print(said, file=sys.stderr)


def show_pace(taken: Taken) -> None:
    """How long the steps took."""
    if taken.steps_done:
        pace = taken.seconds / taken.steps_done * 1e3
        print(f"{count_text(taken.steps_done, 'step')} in {taken.seconds:.1f} s, {pace:.1f} ms each.")
    else:
        print(f"Nothing left to do: step {taken.step:,} was the last one.")


def show_communication(communication: Communication) -> None:
    """Of a step; nothing where nothing was sent."""
    calls, sent = communication.calls, communication.rank_bytes
    if not calls:
        return
    kinds = ", ".join(f"{count:.1f} {kind}" for kind, count in calls.items())
    print(f"\nCommunication of a step: {kinds}; each rank sends {span_text(sent)}.")


def show_memory(peak_bytes: Sequence[int]) -> None:
    """Of the processes of the ranks."""
    print(f"Peak memory of a rank: {span_text(peak_bytes)}, its Python and torch included.")


def span_text(rank_bytes: Sequence[float]) -> str:
    """From the least to the most; one number where both read the same."""
    least, most = bytes_text(min(rank_bytes)), bytes_text(max(rank_bytes))
    return most if least == most else f"{least} to {most}"
