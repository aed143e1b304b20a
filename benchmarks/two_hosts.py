"""Bytes that cross the link between two hosts in redistributions over a mesh (hosts, ranks of a host), and their time.

    python tools/two_hosts.py [--mbit 1000] benchmarks/two_hosts.py [--kilobytes 4096]

Each line is one redistribution of a float32 tensor of that size on every layout of a 2 x 2 mesh, as shardwise plans it
and, for the sum, as one all-reduce of all ranks and by hand along one axis after the other. Bytes are those of the
interface, headers included, as multiples of the tensor's size: sent by each host. Time is the median of the slowest
rank.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from measure import print_table
from torch import Tensor

from shardwise import DTensor, Layout, Mesh, Partial, Placement, Replicate, Shard, launch, rank
from shardwise._collectives import gather_json
from shardwise._redistribute.plan import plan_redistribute
from shardwise.collectives import barrier

WORLD = (0, 1, 2, 3)
COLUMNS = 256
CALLS = 5
MOVES: dict[str, tuple[tuple[Placement, ...], tuple[Placement, ...]]] = {
    "[P, P] -> [R, R]": ((Partial(), Partial()), (Replicate(), Replicate())),
    "[S0, S0] -> [R, R]": ((Shard(0), Shard(0)), (Replicate(), Replicate())),
    "[S0, S1] -> [S1, S0]": ((Shard(0), Shard(1)), (Shard(1), Shard(0))),
}


def sent_bytes() -> int:
    """What this host has sent over its interface."""
    lines = Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[9]) for line in lines if line.split()[0] == "eth0:")


def measured(run: Callable[[], object], full_bytes: int) -> tuple[str, str, str]:
    """Bytes that the first and the second host sent in a call, and milliseconds of a call."""
    run()
    barrier(WORLD)
    before, seconds = sent_bytes(), []
    for _ in range(CALLS):
        start = perf_counter()
        run()
        seconds.append(perf_counter() - start)
    barrier(WORLD)
    found = gather_json([(sent_bytes() - before) / CALLS / full_bytes, median(seconds)], WORLD)
    return f"{found[0][0]:.2f}", f"{found[2][0]:.2f}", f"{1000 * max(time for _, time in found):.1f}"


def compare(kilobytes: int) -> None:
    mesh, rows = Mesh((2, 2), names=("host", "local")), kilobytes
    full_bytes = rows * COLUMNS * 4
    full = torch.arange(rows * COLUMNS, dtype=torch.float32).view(rows, COLUMNS) % 251
    groups = [dist.new_group(list(ranks)) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))]
    local_group, host_group = groups[rank() // 2], groups[2 + rank() % 2]

    def by_axis(first: dist.ProcessGroup, second: dist.ProcessGroup) -> Tensor:
        out = full.clone()
        dist.all_reduce(out, group=first)
        dist.all_reduce(out, group=second)
        return out

    def by_shards() -> Tensor:
        part, out = torch.empty(rows // 2, COLUMNS), torch.empty(rows, COLUMNS)
        terms = torch.empty(2, rows // 2, COLUMNS)
        dist.all_to_all_single(terms.view(rows, COLUMNS), full, group=local_group)
        torch.sum(terms, 0, out=part)
        dist.all_reduce(part, group=host_group)
        dist.all_gather_single(out, part, group=local_group)
        return out

    table: list[tuple[str, ...]] = [
        ("one all_reduce of 4 ranks", *measured(lambda: dist.all_reduce(full.clone()), full_bytes), ""),
        ("all_reduce local, host", *measured(lambda: by_axis(local_group, host_group), full_bytes), ""),
        ("reduce-scatter local, all_reduce host, all_gather local", *measured(by_shards, full_bytes), ""),
    ]
    for name, (source, target) in MOVES.items():
        x = full
        for axis, placement in enumerate(source):
            if isinstance(placement, Shard):
                index = (rank() // 2, rank() % 2)[axis]
                x = x.chunk(2, placement.dim)[index]
        tensor = DTensor.from_local(x.contiguous(), mesh, source)
        layout = Layout(mesh, source, (rows, COLUMNS))
        plan = plan_redistribute(layout, Layout(mesh, target, (rows, COLUMNS)))
        steps = ", ".join(type(step).__name__ for step in plan.steps)
        table.append((name, *measured(lambda t=tensor, to=target: t.redistribute(placements=to), full_bytes), steps))
    if rank() == 0:
        print_table(
            f"{kilobytes} KB, float32, 2 hosts x 2 ranks", ("", "host 0 sends", "host 1 sends", "ms", "steps"), table
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kilobytes", type=int, default=8192, help="of the full tensor; even")
    launch(compare, parser.parse_args().kilobytes, nproc=4)
