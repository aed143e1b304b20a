"""What `shardwise train recommender` shows."""

from collections.abc import Sequence

from shardwise import pictures
from shardwise.cli.train import view
from shardwise.demos.data import PyIdent, Quality
from shardwise.demos.ledger import Progress
from shardwise.demos.recommender.config import TrainConfig
from shardwise.demos.recommender.plans import NAMED
from shardwise.demos.recommender.training import Outcome
from shardwise.pictures import Placed
from shardwise.pictures.labels import count_text


def show_start(config: TrainConfig, data: PyIdent, placed: Sequence[Placed], resumed_step: int | None) -> None:
    """The data, and what every rank will hold of each table."""
    num_ranks = len(placed[0].rank_bytes)
    print(data)
    print(f"Plan {config.plan} for {count_text(num_ranks, 'rank')}: {NAMED.get(config.plan, 'read from this file')}.")
    view.print_table(pictures.Table(tuple(placed), tuple(range(num_ranks))).rows(), left=3)
    print("The state of Adagrad takes as much again.")
    view.show_beginning(config.folder, resumed_step)


def line(progress: Progress) -> str:
    """One line of progress."""
    return (
        f"step {progress.step:,}/{progress.last_step:,}  epoch {progress.epoch}  loss {progress.loss:.3f}  "
        f"{progress.examples_per_second:,.0f} examples/s"
    )


def show_outcome(outcome: Outcome, baseline: Quality) -> None:
    """Quality beside the baseline, some neighbours, communication, the checkpoint."""
    view.show_pace(outcome.taken)
    print(f"\nOf {outcome.quality.num_examples:,} functions in files never seen, the hidden identifier:\n")
    rows = [["", "HR@10", "MRR"]]
    for name, quality in (("popularity", baseline), ("this model", outcome.quality)):
        rows.append([name, f"{quality.hit_rate_10:.3f}", f"{quality.mrr:.3f}"])
    view.print_table(rows, left=1)
    print("\nWhat it expects beside …")
    for word, others in outcome.neighbours.items():
        print(f"  {word:<8} {', '.join(others)}")
    view.show_communication(outcome.taken.communication)
    print(f"Checkpoint: {outcome.taken.checkpoint}")
