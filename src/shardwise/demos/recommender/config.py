"""What can be set for a run of the recommender. Imports no torch, so that it can be read and printed at once."""

from dataclasses import dataclass
from math import inf
from typing import ClassVar

from shardwise.demos.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """The defaults are the demo."""

    SAME_RUN: ClassVar[tuple[str, ...]] = ("batch_size", "dim", "init_std", "learning_rate", "negatives", "seed")
    POSITIVE: ClassVar[tuple[str, ...]] = (*RunConfig.POSITIVE, "nproc", "epochs", "steps", "dim", "negatives")

    plan: str = "row"
    """row, column, table, replicate, auto-simple, or a TOML file; see `shardwise.demos.recommender.plans`."""
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
    negatives: int = 1024
    """Identifiers that the targets of a step are compared with; as many as there are: all."""
    learning_rate: float = 0.1
    """Of Adagrad."""
    checkpoint: str = "runs/pyident"
    """Folder of the runs, which have folders of their own there; relative to where the command runs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.init_std < inf:
            raise ValueError(f"init_std is {self.init_std}, expected a number from 0")
