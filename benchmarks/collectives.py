"""The collectives of gloo beside each other, by size: the source of gloo's table in `collectives/cost_tables.py`.

    python benchmarks/collectives.py [--ranks 2 4] [--quick]

Each figure is the median over rounds of the slowest rank, in microseconds, of one call of `torch.distributed` with the
copies that belong to it: an all-gather as an all-to-all repeats the shard for each receiver, a reduce-scatter as an
all-to-all adds what it receives.
"""

import argparse
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from measure import interleaved, machine, print_table

from shardwise import rank, world_size
from shardwise._collectives import gather_json
from shardwise.testing import world

KILOBYTES = (1, 16, 256, 4096, 16384, 65536)  # of the full tensor, float32


def ways(elements: int) -> dict[str, Callable[[], object]]:
    n = world_size()
    full, out, shard = torch.randn(elements), torch.empty(elements), torch.randn(elements // n)
    part = torch.empty_like(shard)
    sent_by_first = [elements if rank() == 0 else 0] * n, [elements, *[0] * (n - 1)]
    nothing = torch.empty(0)
    return {
        "all-gather": lambda: dist.all_gather_single(out, shard),
        "by all-to-all": lambda: dist.all_to_all_single(out, shard.repeat(n)),
        "reduce-scatter": lambda: dist.reduce_scatter_single(part, full),
        "and all-to-all": lambda: (dist.all_to_all_single(out, full), out.view(n, -1).sum(0)),
        "all-reduce": lambda: dist.all_reduce(full.clone()),
        "broadcast": lambda: dist.broadcast(out if rank() else full, 0),
        "as all-to-all": lambda: dist.all_to_all_single(
            out, full.repeat(n) if rank() == 0 else nothing, sent_by_first[1], sent_by_first[0]
        ),
    }


def times(kilobytes: int, rounds: int) -> list[float]:
    """Microseconds of each way."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = interleaved(ways(kilobytes * 256), rounds, max(1, min(20, 4096 // kilobytes)))
    every = gather_json([x.median * 1e6 for x in found.values()], tuple(range(world_size())))
    return [max(ranks) for ranks in zip(*every, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time collectives.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--quick", action="store_true", help="few rounds and sizes: shows that it runs")
    options = parser.parse_args()
    print(machine())
    columns = [
        "", "all-gather", "by all-to-all", "reduce-scatter", "by all-to-all", "all-reduce", "broadcast", "by all-to-all"
    ]  # fmt: skip
    for ranks in options.ranks:
        rows = []
        for kilobytes in KILOBYTES[:3] if options.quick else KILOBYTES:
            found = world(ranks, real=True, timeout=600).run(times, kilobytes, 3 if options.quick else 15)[0]
            rows.append([f"{kilobytes} KB", *(f"{us:.0f}" for us in found)])
        print_table(f"{ranks} gloo ranks, microseconds", columns, rows)


if __name__ == "__main__":
    main()
