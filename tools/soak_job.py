"""`shardwise train`, whose rank 0 also appends every loss to a file: `python -m tools.soak_job LOSSES recommender …`.

A line is the step and the loss, as `float.hex` writes it. Everything else is the command itself.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from shardwise import cli
from shardwise.cli.train import JOBS, common

reporting = common.reporting


def on_rank(job: str, losses: str, *args: Any) -> object:
    """The body of each rank."""

    @contextmanager
    def recording(line: Callable[[Any], str]) -> Iterator[Callable[[Any], None]]:
        from shardwise import collectives

        file = os.open(losses, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        with reporting(line) as show:

            def record(progress: Any) -> None:
                if collectives.rank() == 0:
                    os.write(file, f"{progress.step} {float(progress.loss).hex()}\n".encode())  # whole, or not there
                show(progress)

            yield record

    common.reporting = recording
    answer: object = JOBS[job].on_rank(*args)
    return answer


def main(losses: str, job: str, arguments: Sequence[str]) -> int:
    """Run the command with that body."""
    JOBS[job].on_rank = partial(on_rank, job, losses)  # type: ignore[attr-defined] # of a module, not its first value
    return cli.main(["train", job, *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
