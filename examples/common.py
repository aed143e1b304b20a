"""What the training examples share: options, starting ranks, steps with progress and checkpoints, tables of results.

    args = parser("Train a model.", folder="runs/mine", steps=100, save_every=50).parse_args()
    result = on_ranks(train, args)  # train(args) on every rank

and in `train`:

    run = Run(args, model, optimizer)  # goes on from the latest checkpoint of the folder
    for step in run.steps():
        ...
        run.loss = loss
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import TypeVar

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import shardwise as sw
from shardwise.checkpoint import latest, restore, save, state_of

T = TypeVar("T")
LINES = 20  # of progress, where the output is not a terminal


def parser(description: str, *, folder: str, steps: int, save_every: int) -> argparse.ArgumentParser:
    """The options that all examples have; each adds its own."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    found.add_argument("--nproc", type=int, default=2, help="ranks to start on this machine; torchrun starts its own")
    found.add_argument("--steps", type=int, default=steps, help="where the run ends, counted from its very first step")
    found.add_argument("--folder", default=folder, help="of the checkpoints; the run goes on from the latest one")
    found.add_argument("--save-every", type=int, default=save_every, help="steps between two checkpoints")
    return found


def on_ranks(train: Callable[[argparse.Namespace], T], args: argparse.Namespace) -> T | None:
    """Runs `train(args)` on the ranks of torchrun, or on new ones of this machine.

    Returns:
        What rank 0 returned; None on the other ranks of torchrun.
    """
    try:
        result = sw.launch(train, args, nproc=args.nproc)
    except KeyboardInterrupt:
        Console(stderr=True).show_cursor()
        print(f"\nInterrupted; latest checkpoint: {latest(args.folder)}. The same command goes on.", file=sys.stderr)
        sys.exit(130)
    return result if sw.rank() == 0 else None


class Run:
    """The steps of a run, with progress and checkpoints. All ranks make it and take its steps.

    Args:
        args: has `folder`, `steps` and `save_every`.
        optimizer, scheduler: as for `shardwise.checkpoint.state_of`: one, or several by name.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        model: nn.Module,
        optimizer: Optimizer | Mapping[str, Optimizer],
        scheduler: LRScheduler | None = None,
    ) -> None:
        self.args, self.parts = args, (model, optimizer, scheduler)
        self.first = restore(args.folder, *self.parts).step if latest(args.folder) else 0
        self.loss: Tensor | None = None
        """The loss of the current step."""

    def steps(self) -> Iterator[int]:
        """The numbers of the steps that are left. After each, the body has set `loss`.

        Raises:
            FloatingPointError: the loss is not finite; the checkpoints of earlier steps stay.
        """
        last, every = self.args.steps, max(1, self.args.steps // LINES)
        begins = f"Going on from step {self.first:,}" if self.first else "Starting"
        say(f"{begins}, to step {last:,}, with checkpoints in {self.args.folder}.")
        losses: list[Tensor] = []
        with shown(self.first, last) as show:
            for step in range(self.first, last):
                yield step
                assert self.loss is not None
                losses.append(self.loss.detach())
                done = step + 1
                if done % every == 0 or done == last:
                    mean = (sum(losses[1:], losses[0]) / len(losses)).item()
                    if not math.isfinite(mean):
                        raise FloatingPointError(f"step {done}: the loss is {mean}. Try a smaller learning rate.")
                    show(done, mean)
                    losses.clear()
                if done % self.args.save_every == 0 or done == last:
                    save(self.args.folder, state_of(*self.parts), step=done, keep=2, require_finite=True)


@contextmanager
def shown(first: int, last: int) -> Iterator[Callable[[int, float], None]]:
    """A function that shows step and loss on rank 0: a bar on a terminal, and elsewhere a line each time."""
    start = perf_counter()

    def line(step: int, loss: float) -> None:
        pace = (perf_counter() - start) / (step - first) * 1e3
        say(f"step {step:,}/{last:,}  loss {loss:.3f}  {pace:.0f} ms a step")

    console = Console(highlight=False)
    if not console.is_terminal or sw.rank() != 0:
        yield line
        return
    columns = BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.3f}"), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=last, completed=first, loss=math.nan)
        yield lambda step, loss: progress.update(task, completed=step, loss=loss)


def say(text: str) -> None:
    """Print on rank 0."""
    if sw.rank() == 0:
        print(text, flush=True)


def print_table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table whose first column has words and the others numbers."""
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
    for number, name in enumerate(heading):
        table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)
