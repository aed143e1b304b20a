"""How well a distributed language model expects a text, without gathering its scores."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from shardwise.demos.lm import batches
from shardwise.layout import Mesh
from shardwise.models import Transformer

BATCH_SIZE = 16  # windows


@torch.no_grad()
def bits_per_byte(model: Transformer, text: bytes, context: int, mesh: Mesh) -> float:
    """What a byte of `text` costs, every byte counted once: each but those of the first window sees at least half
    a context before it. Every rank gets the same.

    Raises:
        ValueError: `text` is empty.
    """
    if not text:
        raise ValueError("there is no text to measure. Fix: at least one byte")
    read = batches.numbers(batches.START + text)
    starts, first_new = plan(len(text), context)
    was_training = model.training
    model.eval()
    total: Tensor | float = 0.0
    for rows in torch.arange(len(starts)).split(BATCH_SIZE):
        windows = batches.at(read, starts[rows], min(context, len(text)))
        new = torch.arange(windows.bytes.shape[1]) >= first_new[rows, None]
        counted = replace(windows, targets=torch.where(new, windows.targets, batches.SKIPPED))
        total = total + batches.total_loss(model, counted, mesh)
    model.train(was_training)
    assert isinstance(total, Tensor)
    return total.item() / len(text) / math.log(2)


def plan(length: int, context: int) -> tuple[Tensor, Tensor]:
    """Windows over a text of `length` bytes: where each starts, and the place in it from which its bytes are new.

    They are half a context apart; the last one ends with the text.
    """
    context = min(context, length)
    starts = torch.arange(0, length - context + (stride := max(1, context // 2)), stride).clamp(max=length - context)
    ends = starts + context
    return starts, torch.cat([ends.new_zeros(1), ends[:-1]]) - starts
