"""Windows of a text: what the model reads, and the bytes that follow."""

import hashlib
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.demos.lm.config import TENSOR_AXIS
from shardwise.layout import REPLICATE, Mesh, Placement, Shard
from shardwise.parallel import loss_parallel
from shardwise.tensor import DTensor, distribute_tensor

NUM_BYTES = 256
SKIPPED = -100  # a target that adds no loss
START = b"\n"  # prepended to a text, so that its first byte is predicted too


@dataclass(frozen=True, eq=False)
class Windows:
    """Some windows of a text, int64 (windows, bytes): the plain batch, the same on every rank."""

    bytes: Tensor
    targets: Tensor
    """The next byte of each."""

    @property
    def num_bytes(self) -> int:
        """Number of targets."""
        return self.targets.numel()


def numbers(text: bytes) -> Tensor:
    """The bytes of a text as int64."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int64)


def at(text: Tensor, starts: Tensor, length: int) -> Windows:
    """The windows of `text` that begin at `starts`."""
    found = text[starts[:, None] + torch.arange(length + 1)]
    return Windows(found[:, :-1], found[:, 1:])


def drawn(text: Tensor, count: int, length: int, *, seed: int, step: int) -> Windows:
    """The windows of a step, at random positions that depend only on the seed and the step."""
    generator = torch.Generator().manual_seed(seed_of(seed, step))
    return at(text, torch.randint(len(text) - length, (count,), generator=generator), length)


def seed_of(seed: int, step: int) -> int:
    """The 32-bit seed of one step: torch's CPU generator ignores higher bits."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {step}".encode(), digest_size=4).digest())


def shard_batch(x: Tensor, mesh: Mesh) -> DTensor:
    """A tensor that is equal on every rank, sharded by rows over the data axes. Sends nothing."""
    return distribute_tensor(x, mesh, batch_placements(mesh), src_data_rank=None)


def total_loss(model: nn.Module, windows: Windows, mesh: Mesh) -> Tensor:
    """The sum of the cross-entropy of all targets, in nats; targets of `SKIPPED` add nothing.

    On a mesh with the axis tp the logits stay sharded along the class dim.
    """
    scores = model(shard_batch(windows.bytes, mesh)).flatten(0, 1)
    targets = shard_batch(windows.targets, mesh).flatten()
    with loss_parallel() if TENSOR_AXIS in (mesh.names or ()) else nullcontext():
        return F.cross_entropy(scores, targets, reduction="sum", ignore_index=SKIPPED)


def batch_placements(mesh: Mesh) -> list[Placement]:
    """Placements of a batch: Shard(0) on every axis but tp."""
    return [REPLICATE if name == TENSOR_AXIS else Shard(0) for name in mesh.names or ()]
