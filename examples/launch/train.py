"""Trains, and goes on from the last checkpoint: the same command is right the first time and after every failure.

    python examples/launch/train.py                            two ranks of this machine
    torchrun --nproc-per-node 4 examples/launch/train.py       the ranks that torchrun starts

docs/launching.md starts it on several hosts.
"""

import argparse

import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint import latest, restore, save, state_of


def batch(step: int) -> tuple[sw.DTensor, sw.DTensor]:
    """64 examples of this rank: three ids each, and whether the first one is even."""
    generator = torch.Generator().manual_seed(1000 * step + sw.rank())
    ids = torch.randint(0, 100, (64, 3), generator=generator)
    labels = (ids[:, :1] % 2 == 0).float()
    return sw.DTensor.from_local(ids, placements=[sw.Shard(0)]), sw.DTensor.from_local(labels, placements=[sw.Shard(0)])


def train(folder: str, steps: int) -> str:
    """All steps that no checkpoint in `folder` has; which these were, and the last loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(100, 16), nn.Linear(16, 1))
    sw.shard_module(model, {"0.weight": sw.Shard(0)})
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    first = restore(folder, model, optimizer).step if latest(folder) else 0
    loss = float("nan")
    for step in range(first, steps):
        ids, labels = batch(step)
        value = nn.functional.binary_cross_entropy_with_logits(model(ids), labels)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        loss = value.item()
        if (step + 1) % 10 == 0:
            save(folder, state_of(model, optimizer), step=step + 1, keep=2)
    return f"steps {first} to {steps} on {sw.world_size()} ranks, loss {loss:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model, or go on with it.")
    parser.add_argument("--folder", default="runs/launch", help="of the checkpoints, which all hosts reach")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    said = sw.launch(train, arguments.folder, arguments.steps, nproc=2)
    if sw.rank() == 0:
        print(said)


if __name__ == "__main__":
    main()
