"""What `shardwise train` shows: rich on a terminal, plain lines elsewhere."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shardwise import report
from shardwise.checkpoint import latest
from shardwise.data import PyIdent, Quality
from shardwise.report import Placed
from shardwise.report.words import aligned, bytes_text, count_text
from shardwise.train.config import TrainConfig
from shardwise.train.ledger import Progress
from shardwise.train.loop import Outcome
from shardwise.train.plans import NAMED


def _console() -> Console:
    """Standard output; rich reads NO_COLOR and TERM itself."""
    return Console(file=sys.stdout, highlight=False, soft_wrap=True)


def _is_plain(console: Console) -> bool:
    return not console.is_terminal or console.is_dumb_terminal


def _print_table(rows: Sequence[Sequence[str]], left: int) -> None:
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


# ---- before -------------------------------------------------------------------------------------------------


def show_start(config: TrainConfig, data: PyIdent, placed: Sequence[Placed], resumed_step: int | None) -> None:
    """The data, and what every rank will hold of each table."""
    num_ranks = len(placed[0].rank_bytes)
    print(data)
    print(f"Plan {config.plan} for {count_text(num_ranks, 'rank')}: {NAMED.get(config.plan, 'read from this file')}.")
    _print_table(report.Table(tuple(placed), tuple(range(num_ranks))).rows(), left=3)
    print("The gradients and the state of Adagrad take as much again, each.")
    if resumed_step is not None:
        print(f"Going on from step {resumed_step:,} in {config.checkpoint}.")
    elif (earlier := latest(config.checkpoint)) is not None:
        print(f"{earlier} is of an earlier run, whose checkpoints this one replaces; --resume would go on with it.")
    sys.stdout.flush()


# ---- meanwhile ----------------------------------------------------------------------------------------------


@contextmanager
def live() -> Iterator[Callable[[Progress], None]]:
    """Something to call with progress: it redraws one line, or prints a new one where that cannot be."""
    console = _console()
    if _is_plain(console):
        yield lambda progress: print(_line(progress), flush=True)
        return
    with Live(Text("starting …"), console=console, auto_refresh=False) as screen:
        yield lambda progress: screen.update(_drawn(progress), refresh=True)


def _line(progress: Progress) -> str:
    return (
        f"step {progress.step:,}/{progress.last_step:,}  epoch {progress.epoch}  loss {progress.loss:.3f}  "
        f"{progress.examples_per_second:,.0f} examples/s"
    )


def _drawn(progress: Progress) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_row(ProgressBar(progress.last_step, progress.step, width=24), _line(progress))
    return grid


def show_interruption(config: TrainConfig) -> None:
    """Where to go on; the line that was live may have hidden the cursor."""
    console = _console()
    if not _is_plain(console):
        console.show_cursor()
    found = latest(config.checkpoint)
    print(f"Last checkpoint: {found}; go on with --resume." if found else "No checkpoint was saved.", file=sys.stderr)


# ---- afterwards ---------------------------------------------------------------------------------------------


def show_outcome(outcome: Outcome, baseline: Quality) -> None:
    """Quality beside the baseline, some neighbours, communication, the checkpoint."""
    if outcome.steps_done:
        pace = outcome.seconds / outcome.steps_done * 1e3
        print(f"{count_text(outcome.steps_done, 'step')} in {outcome.seconds:.1f} s, {pace:.1f} ms each.")
    else:
        print(f"Nothing left to do: step {outcome.step:,} was the last one.")
    print(f"\nOf {outcome.quality.num_examples:,} functions in files never seen, the hidden identifier:\n")
    rows = [["", "HR@10", "MRR"]]
    for name, quality in (("popularity", baseline), ("this model", outcome.quality)):
        rows.append([name, f"{quality.hit_rate_10:.3f}", f"{quality.mrr:.3f}"])
    _print_table(rows, left=1)
    print("\nWhat it expects beside …")
    for word, others in outcome.neighbours.items():
        print(f"  {word:<8} {', '.join(others)}")
    _show_communication(outcome)
    print(f"Checkpoint: {outcome.checkpoint}")


def _show_communication(outcome: Outcome) -> None:
    calls, sent = outcome.communication.calls, outcome.communication.rank_bytes
    if not calls:
        return
    kinds = ", ".join(f"{count:.1f} {kind}" for kind, count in calls.items())
    least, most = bytes_text(min(sent)), bytes_text(max(sent))
    span = most if least == most else f"{least} to {most}"
    print(f"\nCommunication of a step: {kinds}; each rank sends {span}.")
