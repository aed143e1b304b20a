"""What can be set for every training run. Imports no torch, so that it can be read and printed at once."""

import dataclasses
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import ClassVar

NO_RUN = ("step-", ".")
"""How no run is named: as checkpoints and hidden files."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What all jobs have; a job adds fields of its own, and other defaults."""

    SAME_RUN: ClassVar[tuple[str, ...]] = ("batch_size", "learning_rate", "seed")
    """Where these differ, a run is another run and not the continuation of one."""
    POSITIVE: ClassVar[tuple[str, ...]] = ("batch_size", "save_every", "keep", "log_every", "min_nproc")
    """Integers of at least 1; a field that may be none may also be none."""

    batch_size: int
    """Examples of a step, over all ranks."""
    learning_rate: float
    """Of the optimizer."""
    seed: int = 0
    """Of the initial values and of the order of the examples."""
    checkpoint: str
    """Folder of the runs, which have folders of their own there; relative to where the command runs. Or a URL."""
    run: str | None = None
    """Name of the run and its folder. None: a new run takes the next number, --resume the run that saved last."""
    save_every: int = 200
    """Steps between checkpoints; the last step is always saved."""
    keep: int = 2
    """Checkpoints that stay."""
    log_every: int = 50
    """Steps between two looks at the loss."""
    max_restarts: int = 0
    """How often the run is started again from its last checkpoint when a rank dies, hangs or raises."""
    min_nproc: int | None = None
    """Ranks that are enough, where the run fails again before another checkpoint. None: all of them."""
    timeout_seconds: float = 60.0
    """How long a rank waits for the others in one collective; one that lets them wait longer hangs."""

    def __post_init__(self) -> None:
        for name in self.POSITIVE:
            value = getattr(self, name)
            may_be_none = type(self).__dataclass_fields__[name].default is None
            if value is None and may_be_none:
                continue
            if value < 1:
                raise ValueError(f"{name} is {value}, expected 1 or more{', or none' if may_be_none else ''}")
        for name in ("learning_rate", "timeout_seconds"):
            if not 0 < getattr(self, name) < inf:
                raise ValueError(f"{name} is {getattr(self, name)}, expected a number above 0")
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts is {self.max_restarts}, expected 0 or more")
        if not self.checkpoint:
            raise ValueError("checkpoint is empty, expected a folder")
        if self.run is not None and (self.run in ("", "latest") or "/" in self.run or self.run.startswith(NO_RUN)):
            raise ValueError(f"run is {self.run!r}, expected a name such as baseline or 3")

    @property
    def folder(self) -> Path | str:
        """That of the checkpoints; a URL if `checkpoint` is one."""
        if "://" in self.checkpoint:
            return f"{self.checkpoint.rstrip('/')}/{self.run}" if self.run else self.checkpoint
        return Path(self.checkpoint, self.run or "")


def differences(config: RunConfig, saved: object) -> list[str]:
    """What keeps `config` from continuing the run whose configuration was saved as JSON, a line each."""
    mine = dataclasses.asdict(config)
    theirs = saved if isinstance(saved, dict) else {}
    return [
        f"{name} was {theirs.get(name)!r}, now {mine[name]!r}"
        for name in config.SAME_RUN
        if theirs.get(name) != mine[name]
    ]
