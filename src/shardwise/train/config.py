"""What can be set for a training run. Imports no torch, so that it can be read and printed at once."""

import dataclasses
from dataclasses import dataclass
from math import inf

# Where these differ, a run is another run and not the continuation of one.
SAME_RUN = ("batch_size", "dim", "init_std", "learning_rate", "seed")


@dataclass(frozen=True)
class TrainConfig:
    """The defaults are the demo."""

    plan: str = "row"
    """row, column, table, replicate, auto-simple, or a TOML file; see `shardwise.train.plans`."""
    nproc: int = 2
    """Ranks to start; under torchrun it decides."""
    epochs: int = 3
    """Passes over the training examples."""
    steps: int | None = None
    """Stop after this many steps, counted from the very first, if the epochs are longer."""
    batch_size: int = 256
    """Examples of a step, over all ranks."""
    dim: int = 128
    """Columns of the tables."""
    init_std: float = 0.1
    """Standard deviation of the initial context and item embeddings."""
    learning_rate: float = 0.1
    """Of Adagrad."""
    seed: int = 0
    """Of the initial values and of the order of the examples."""
    checkpoint: str = "runs/pyident"
    """Folder of the checkpoints; relative ones to where the command runs."""
    save_every: int = 200
    """Steps between checkpoints; the last step is always saved."""
    keep: int = 2
    """Checkpoints that stay."""
    log_every: int = 50
    """Steps between two looks at the loss."""

    def __post_init__(self) -> None:
        least = {"nproc": 1, "epochs": 1, "batch_size": 1, "dim": 1, "save_every": 1, "keep": 1, "log_every": 1}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} is {getattr(self, name)}, expected {low} or more")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps is {self.steps}, expected 1 or more, or none")
        if not 0 < self.learning_rate < inf:
            raise ValueError(f"learning_rate is {self.learning_rate}, expected a number above 0")
        if not 0 <= self.init_std < inf:
            raise ValueError(f"init_std is {self.init_std}, expected a number from 0")
        if not self.checkpoint:
            raise ValueError("checkpoint is empty, expected a folder")


def differences(config: TrainConfig, saved: object) -> list[str]:
    """What keeps `config` from continuing the run whose configuration was saved as JSON, a line each."""
    mine = dataclasses.asdict(config)
    theirs = saved if isinstance(saved, dict) else {}
    return [
        f"{name} was {theirs.get(name)!r}, now {mine[name]!r}" for name in SAME_RUN if theirs.get(name) != mine[name]
    ]
