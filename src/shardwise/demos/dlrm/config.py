"""What can be set for a run of the DLRM. Imports no torch, so that it can be read and printed at once."""

from dataclasses import dataclass
from math import inf
from typing import ClassVar

from shardwise.demos.config import RunConfig

PLANS = ("row", "column", "table", "replicate")


@dataclass(frozen=True, kw_only=True)
class DlrmConfig(RunConfig):
    """The defaults fit the bundled sample."""

    SAME_RUN: ClassVar[tuple[str, ...]] = (
        *("batch_size", "dim", "hidden", "learning_rate", "num_embeddings", "seed"),
        "table_learning_rate",
    )
    POSITIVE: ClassVar[tuple[str, ...]] = (
        *(*RunConfig.POSITIVE, "nproc", "epochs", "steps", "num_embeddings", "dim", "hidden"),
    )

    data: str = "criteo:sample"
    """criteo:PATH, a file or folder of Criteo's Kaggle or Terabyte lines, also gz; or the bundled sample."""
    test_data: str | None = None
    """Lines to measure the trained model on, as data."""
    plan: str = "row"
    """How every table is sharded: row, column, table or replicate."""
    nproc: int = 2
    """Ranks to start; under torchrun it decides."""
    epochs: int = 1
    """Passes over the lines."""
    steps: int | None = None
    """Stop after this many steps, counted from the very first, if the epochs are longer."""
    batch_size: int = 32
    """Lines of a step, over all ranks; a multiple of their number."""
    num_embeddings: int = 1000
    """Rows of each of the 26 tables."""
    dim: int = 16
    """Columns of the tables."""
    hidden: int = 64
    """Features of the hidden layers."""
    learning_rate: float = 0.01
    """Of Adam, for the layers."""
    table_learning_rate: float = 0.05
    """Of row-wise Adagrad, for the tables."""
    log_every: int = 4
    """Steps between two looks at the loss, over which AUC and normalised entropy are measured."""
    checkpoint: str = "runs/dlrm"
    """Folder of the runs, which have folders of their own there; relative to where the command runs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.plan not in PLANS:
            raise ValueError(f"plan is {self.plan!r}, expected one of {', '.join(PLANS)}")
        for name in ("data", "test_data"):
            value = getattr(self, name)
            if value is not None and not (value.startswith("criteo:") and value != "criteo:"):
                raise ValueError(f"{name} is {value!r}, expected criteo:PATH or criteo:sample")
        if not 0 < self.table_learning_rate < inf:
            raise ValueError(f"table_learning_rate is {self.table_learning_rate}, expected a number above 0")
