"""Text that a distributed language model makes up."""

import torch
from torch import Tensor

from shardwise.demos.lm.batches import START, numbers
from shardwise.layout import REPLICATE, Mesh
from shardwise.models import Transformer
from shardwise.tensor import DTensor, distribute_tensor


@torch.no_grad()
def continued(model: Transformer, prompt: bytes, count: int, *, mesh: Mesh, temperature: float, seed: int) -> bytes:
    """`count` bytes that follow `prompt`, the same on every rank and for every mesh.

    What the first rank of the mesh has read is what all read, so ranks whose last bits differ do not drift apart.

    Args:
        temperature: scores are divided by it; 0 takes the likeliest byte.
        seed: of one number a byte, drawn outside the mesh.
    """
    generator = torch.Generator().manual_seed(seed)
    context = model.max_seq_len
    window = torch.zeros(context, dtype=torch.int64)  # always as long: what follows a byte does not change its scores
    known = numbers(START + prompt)[-context:]
    window[: len(known)] = known
    last, made = len(known) - 1, bytearray()
    was_training = model.training
    model.eval()
    for _ in range(count):
        read = distribute_tensor(window[None], mesh, [REPLICATE] * mesh.ndim)
        window = read.to_local()[0].clone()
        scores = model(read)[0, last]
        chosen = _chosen(scores.full_tensor() if isinstance(scores, DTensor) else scores, temperature, generator)
        made.append(chosen)
        if last + 1 == context:
            window = torch.cat([window[1:], torch.tensor([chosen])])
        else:
            last += 1
            window[last] = chosen
    model.train(was_training)
    return bytes(made)


def _chosen(scores: Tensor, temperature: float, generator: torch.Generator) -> int:
    number = torch.rand((), generator=generator, dtype=torch.float64)
    if not temperature:
        return int(scores.argmax())
    share = (scores.double() / temperature).softmax(0).cumsum(0)
    return int((share < number * share[-1]).sum().clamp(max=len(scores) - 1))
