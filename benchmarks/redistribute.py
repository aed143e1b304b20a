"""One redistribution beside the bare collective, and beside torch's DTensor, by size.

    python benchmarks/redistribute.py [--ranks 2 4] [--quick] [--only gather]

They take turns in the same gloo processes; each figure is the median over rounds of the slowest rank. "Bare" is the
call of `torch.distributed` that a person would write, into a buffer that is there already, with the sum or the copy
that belongs to it; "new" is the same into a new buffer, as the result of a redistribution is a new tensor. A round is
as many calls as take a few milliseconds.
"""

import argparse
import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from measure import interleaved, machine, print_table, ratio
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from shardwise import DTensor, Mesh, OnRanks, Partial, Placement, Replicate, Shard, rank, world_size
from shardwise._collectives import gather_json
from shardwise._redistribute.plan import plan_redistribute
from shardwise.testing import world

KILOBYTES = (1, 16, 256, 1024, 4096, 16384, 65536)  # of the full tensor, float32
COLUMNS = 64
MOVES: dict[str, tuple[Placement, Placement]] = {
    "gather rows": (Shard(0), Replicate()),
    "gather columns": (Shard(1), Replicate()),
    "rows to columns": (Shard(0), Shard(1)),
    "scatter sums": (Partial(), Shard(0)),
    "all-reduce": (Partial(), Replicate()),
    "broadcast": (OnRanks(0), Replicate()),
}


def bare(move: str, local: Tensor, rows: int) -> Callable[[], object]:
    """What a person would write."""
    n = world_size()
    out = torch.empty(rows, COLUMNS)
    match move:
        case "gather rows":
            return lambda: dist.all_gather_single(out, local)
        case "gather columns":
            parts = torch.empty(n, *local.shape)
            return lambda: (dist.all_gather_single(parts.view(-1), local.reshape(-1)), torch.cat(parts.unbind(), 1))
        case "rows to columns":
            into = torch.empty(n, rows // n, COLUMNS // n)
            return lambda: dist.all_to_all_single(into, torch.stack(local.chunk(n, 1)))
        case "scatter sums":
            terms = torch.empty(n, rows // n, COLUMNS)
            return lambda: (dist.all_to_all_single(terms.view(rows, COLUMNS), local), terms.sum(0))
        case "all-reduce":
            return lambda: dist.all_reduce(local.clone())
    return lambda: dist.broadcast(local if rank() == 0 else out, 0)


def into_new_buffer(move: str, local: Tensor, rows: int) -> object:
    return bare(move, local, rows)()


def as_torch(placement: Placement) -> object:
    match placement:
        case Shard():
            return TorchShard(placement.dim)
        case Partial():
            return TorchPartial()
    return TorchReplicate()


def times(move: str, kilobytes: int, rounds: int) -> tuple[list[float], str]:
    """Seconds of each variant, and the collectives of our plan."""
    warnings.simplefilter("ignore")  # deprecated names that torch's DTensor uses
    torch.set_num_threads(1)
    mesh, (src, dst) = Mesh((world_size(),)), MOVES[move]
    rows = kilobytes * 256 // COLUMNS
    full = torch.randn(rows, COLUMNS)
    ours = DTensor.from_local(full, mesh, [Replicate()], run_check=False).redistribute(placements=[src])
    assert isinstance(ours, DTensor)
    shard = ours.to_local().contiguous()
    variants: dict[str, Callable[[], object]] = {
        "bare": bare(move, shard, rows),
        "new": partial(into_new_buffer, move, shard, rows),
        "ours": partial(ours.redistribute, placements=[dst]),
    }
    if not isinstance(src, OnRanks):
        torch_mesh = init_device_mesh("cpu", (world_size(),))
        theirs = TorchDTensor.from_local(ours.to_local().contiguous(), torch_mesh, [as_torch(src)], run_check=False)
        variants["torch"] = partial(theirs.redistribute, placements=[as_torch(dst)])
    calls = max(1, min(20, 4096 // kilobytes))
    with torch.no_grad():
        found = interleaved(variants, rounds, calls, before=dist.barrier)
    every = gather_json(
        [found[name].median if name in found else 0.0 for name in ("bare", "new", "ours", "torch")], mesh.ranks
    )
    names = plan_redistribute(ours.layout_, ours.layout_.with_axis(0, dst)).collectives
    return [max(ranks) for ranks in zip(*every, strict=True)], " + ".join(names)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time redistributions.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--only", default="", help="moves with this in their name")
    parser.add_argument("--quick", action="store_true", help="few rounds and sizes: shows that it runs")
    options = parser.parse_args()
    print(machine())
    for ranks in options.ranks:
        rows = []
        for move in (name for name in MOVES if options.only in name):
            for kilobytes in KILOBYTES[:3] if options.quick else KILOBYTES:
                (by_hand, new, ours, theirs), names = world(ranks, real=True, timeout=600).run(
                    times, move, kilobytes, 3 if options.quick else 15
                )[0]
                rows.append(
                    [f"{move}, {kilobytes} KB", *(f"{s * 1e6:.0f}" for s in (by_hand, new, ours, theirs)),
                     ratio(ours, by_hand), ratio(ours, new), ratio(ours, theirs), names]
                )  # fmt: skip
        print_table(
            f"{ranks} gloo ranks, microseconds",
            ["", "bare", "new", "shardwise", "torch", "/ bare", "/ new", "/ torch", "collectives"],
            rows,
        )


if __name__ == "__main__":
    main()
