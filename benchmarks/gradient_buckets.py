"""A data-parallel step with gradients in one buffer, in buckets, and in buckets sent during backward.

    python benchmarks/gradient_buckets.py

The three take turns in the same gloo processes; each figure is the median over steps of the slowest rank's step, in
milliseconds: forward, backward and a step of SGD.
"""

from statistics import median
from time import perf_counter

import torch
from measure import machine, print_table
from torch import nn

from shardwise import Mesh, Replicate, Shard, distribute_tensor, gradient_buckets, shard_module, world_size
from shardwise._collectives import gather_json
from shardwise.testing import world

WAYS = {"one buffer": (1 << 40, False), "buckets": (2 << 20, False), "in backward": (2 << 20, True)}
SIZES = ((256, 8, 64), (512, 8, 128))  # width, layers, rows a rank
STEPS = 12


def steps(width: int, depth: int, rows: int) -> list[float]:
    """Milliseconds of a step each way."""
    torch.set_num_threads(1)
    mesh = Mesh((world_size(),))
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    module = shard_module(nn.Sequential(*layers), {"**": Replicate()}, mesh=mesh)
    x = distribute_tensor(torch.randn(rows * mesh.size(), width), mesh, [Shard(0)])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    found: list[list[float]] = [[] for _ in WAYS]
    for _ in range(3):
        for times, (max_bytes, overlap) in zip(found, WAYS.values(), strict=True):
            gradient_buckets(max_bytes, overlap=overlap)
            for number in range(2 + STEPS // 3):
                start = perf_counter()
                optimizer.zero_grad()
                module(x).square().mean().backward()
                optimizer.step()
                if number > 1:  # the first agrees on buckets, the second is the first that may overlap
                    times.append((perf_counter() - start) * 1e3)
    gradient_buckets()
    every = gather_json([median(times) for times in found], tuple(sorted(mesh.ranks)))
    return [max(ranks) for ranks in zip(*every, strict=True)]


def main() -> None:
    print(machine())
    rows = []
    for ranks in (2, 4):
        for size in SIZES:
            found = world(ranks, real=True, timeout=600).run(steps, *size)[0]
            rows.append([f"{ranks} ranks, {size[1]} x {size[0]}, {size[2]} rows", *(f"{ms:.1f}" for ms in found)])
    print_table("ms a step", ["", *WAYS], rows)


if __name__ == "__main__":
    main()
