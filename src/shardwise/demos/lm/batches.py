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
SKIPPED = -100  # in place of a target that is not to count
START = b"\n"  # stands before the first byte of a text, so that it is expected by something too


@dataclass(frozen=True, eq=False)
class Windows:
    """Some windows of a text, int64 (windows, bytes): the plain batch that every rank knows."""

    bytes: Tensor
    targets: Tensor
    """The byte that follows each."""

    @property
    def num_bytes(self) -> int:
        """How many are to be expected."""
        return self.targets.numel()


def numbers(text: bytes) -> Tensor:
    """The bytes of a text as int64."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int64)


def at(text: Tensor, starts: Tensor, length: int) -> Windows:
    """The windows of `text` that begin at `starts`."""
    found = text[starts[:, None] + torch.arange(length + 1)]
    return Windows(found[:, :-1], found[:, 1:])


def drawn(text: Tensor, count: int, length: int, *, seed: int, step: int) -> Windows:
    """The windows of a step, at places that depend on nothing but the seed and the step."""
    generator = torch.Generator().manual_seed(seed_of(seed, step))
    return at(text, torch.randint(len(text) - length, (count,), generator=generator), length)


def seed_of(seed: int, step: int) -> int:
    """What a generator takes for one step of a run: 32 bits, for it looks at no more."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {step}".encode(), digest_size=4).digest())


def shared_out(x: Tensor, mesh: Mesh) -> DTensor:
    """What every rank knows, cut by rows over the data axes. Nothing is sent."""
    return distribute_tensor(x, mesh, batch_placements(mesh), src_data_rank=None)


def total_loss(model: nn.Module, windows: Windows, mesh: Mesh) -> Tensor:
    """What all targets of the windows cost, in nats; targets of `SKIPPED` cost nothing.

    Where the model is cut, the scores stay cut by bytes: no rank sees those of all.
    """
    scores = model(shared_out(windows.bytes, mesh)).flatten(0, 1)
    targets = shared_out(windows.targets, mesh).flatten()
    with loss_parallel() if TENSOR_AXIS in (mesh.names or ()) else nullcontext():
        return F.cross_entropy(scores, targets, reduction="sum", ignore_index=SKIPPED)


def batch_placements(mesh: Mesh) -> list[Placement]:
    """Of a batch: rows are cut on every axis but the tensor axis."""
    return [REPLICATE if name == TENSOR_AXIS else Shard(0) for name in mesh.names or ()]
