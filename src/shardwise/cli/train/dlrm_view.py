"""What `shardwise train dlrm` shows."""

from shardwise.cli.train import view
from shardwise.demos.data.criteo import KEYS
from shardwise.demos.dlrm.config import DlrmConfig
from shardwise.demos.dlrm.training import ClickProgress, Outcome
from shardwise.pictures.labels import bytes_text, count_text

PLANS = {
    "row": "rows of every table on all ranks",
    "column": "columns of every table on all ranks",
    "table": "each table on one rank",
    "replicate": "every table on every rank",
}


def show_start(config: DlrmConfig, num_files: int, num_ranks: int, resumed_step: int | None) -> None:
    """The data and the tables."""
    num_bytes = len(KEYS) * config.num_embeddings * config.dim * 4
    print(f"{config.data}: {count_text(num_files, 'file')} of Criteo's lines.")
    print(
        f"{len(KEYS)} tables of {config.num_embeddings:,} x {config.dim}, {bytes_text(num_bytes)}, "
        f"on {count_text(num_ranks, 'rank')}: {PLANS[config.plan]}."
    )
    view.show_beginning(config.folder, resumed_step)


def line(done: ClickProgress) -> str:
    """One line of progress."""
    return (
        f"step {done.step:,}{'' if done.last_step is None else f'/{done.last_step:,}'}  epoch {done.epoch}  "
        f"loss {done.loss:.3f}  AUC {done.quality.auc:.3f}  NE {done.quality.normalised_entropy:.3f}  "
        f"{done.examples_per_second:,.0f} lines/s"
    )


def show_outcome(outcome: Outcome) -> None:
    """Quality, communication, the checkpoint."""
    view.show_pace(outcome.taken)
    if outcome.quality is not None:
        quality = outcome.quality
        print(
            f"Of {quality.num_examples:,} lines of the test data: AUC {quality.auc:.4f}, "
            f"normalised entropy {quality.normalised_entropy:.4f}."
        )
    view.show_communication(outcome.taken.communication)
    view.show_memory(outcome.taken.peak_bytes)
    print(f"Checkpoint: {outcome.taken.checkpoint}")
