"""What `shardwise train lm` shows."""

import math

from torch import nn

from shardwise import pictures
from shardwise.cli.train import view
from shardwise.demos.data import PydocTopics, lzma_bits, order2_bits
from shardwise.demos.ledger import Progress
from shardwise.demos.lm.config import TENSOR_AXIS, LanguageModelConfig
from shardwise.demos.lm.training import Outcome
from shardwise.errors import printable
from shardwise.layout import Mesh
from shardwise.pictures.labels import bytes_text


def show_start(config: LanguageModelConfig, data: PydocTopics, mesh: Mesh, resumed_step: int | None) -> None:
    """The data, and what the axes of the mesh do."""
    print(data)
    axes = dict(zip(mesh.names or (), mesh.shape, strict=True))
    copies = math.prod(size for name, size in axes.items() if name != TENSOR_AXIS)
    axes_text = [
        f"the {what} is sharded by {size}" if size > 1 else f"the {what} is replicated"
        for what, size in (("batch", copies), ("model", axes.get(TENSOR_AXIS, 1)))
    ]
    along = ", its activations along the sequence" if config.sequence_parallel else ""
    over_data = ", its parameters over the axes of the batch" if config.fully_shard else ""
    print(f"{mesh}: {'; '.join(axes_text)}{along}{over_data}.")
    view.show_beginning(config.folder, resumed_step)


def show_model(model: nn.Module) -> None:
    """How large it is, and what every rank holds of it."""
    table = pictures.sharding_table(model)
    held = [sum(column) for column in zip(*(one.rank_bytes for one in table.placed), strict=True)]
    sizes = [(parameter.numel(), parameter.nbytes) for parameter in model.parameters()]
    count, num_bytes = map(sum, zip(*sizes, strict=True))
    print(
        f"{count:,} parameters, {bytes_text(num_bytes)}; a rank holds {view.span_text(held)}. "
        f"The gradients take as much again, and the state of AdamW twice as much.",
        flush=True,
    )


def line(progress: Progress) -> str:
    """One line of progress."""
    return (
        f"step {progress.step:,}/{progress.last_step:,}  pass {progress.epoch}  "
        f"{progress.loss / math.log(2):.3f} bits/byte  {progress.examples_per_second:,.0f} bytes/s"
    )


def show_outcome(outcome: Outcome, data: PydocTopics, config: LanguageModelConfig) -> None:
    """Bits per byte beside what needs no model, a generated text, communication, the checkpoint."""
    view.show_pace(outcome.taken)
    print(f"\nOf {len(data.test):,} bytes in topics never seen, a byte costs:\n")
    rows = [("", "bits"), *((name, f"{bits:.3f}") for name, bits in _figures(outcome, data))]
    view.print_table(rows, left=1)
    if outcome.sample:
        print(f"\nGenerated text (temperature {config.temperature:g}):\n")
        text = printable(config.prompt + outcome.sample.decode(errors="replace"))
        print("\n".join(f"  {row}".rstrip() for row in text.splitlines()))
    view.show_communication(outcome.taken.communication)
    view.show_memory(outcome.taken.peak_bytes)
    print(f"Checkpoint: {outcome.taken.checkpoint}")


def _figures(outcome: Outcome, data: PydocTopics) -> list[tuple[str, float]]:
    return [
        ("statistics of order 2 (Witten-Bell)", order2_bits(data.test, given=data.train)),
        ("lzma, on its own", lzma_bits(data.test)),
        ("lzma, after the training text", lzma_bits(data.test, given=data.train)),
        ("this model", outcome.bits_per_byte),
    ]
