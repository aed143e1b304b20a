"""Training steps of sharded embedding bags: shardwise beside torch.distributed.tensor and torch's legacy _shard.

Every rank has its own batch of bags and wants their sums; the tables are row-wise, column-wise or
table-wise. One step is forward, backward and optimiser. All systems live in the same processes,
start from the same tables, see the same ids, and take turns.

    python benchmarks/embedding.py [--quick]
"""

import argparse
import ctypes
import gc
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as peer
import torch.nn.functional as F
from measure import machine, power_law_ids, print_table, ratio
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import shardwise._tensor as ours
from shardwise import OnRanks, Placement, Shard, count_comms, embedding_bags, init_device_mesh
from shardwise.collectives import init_processes


@dataclass(frozen=True)
class Sizes:
    """One measured setting; everything follows from it."""

    ranks: int
    tables: int
    rows: int
    dim: int
    batch: int  # bags a rank
    bag: int  # ids a bag
    steps: int
    optimizer: str
    skew: float


SECONDS_EACH = 15.0  # a slow system gets fewer turns, but at least three

Batch = list[Tensor]  # this rank's ids, (batch, bag) for each table


def draw_ids(sizes: Sizes, rank: int, steps: int) -> list[Batch]:
    """The ids of a rank in every step: a power law in every table."""
    generator = torch.Generator().manual_seed(1 + rank)

    def draw() -> Tensor:
        ids = power_law_ids(sizes.rows, sizes.skew, sizes.batch * sizes.bag, generator)
        return ids.view(sizes.batch, sizes.bag)

    return [[draw() for _ in range(sizes.tables)] for _ in range(steps)]


def first_values(sizes: Sizes, table: int) -> Tensor:
    return torch.randn(sizes.rows, sizes.dim, generator=torch.Generator().manual_seed(table))


# ---- the systems --------------------------------------------------------------------------------------------


class System:
    """Tables of one system in one sharding. `sums` is the forward: this rank's sums, plain tensors."""

    library = ""
    trains = True  # False: only the forward works

    def __init__(self, sizes: Sizes, sharding: str) -> None:
        self.sizes, self.sharding = sizes, sharding
        self.params: list[Any] = []
        self.optimizer: torch.optim.Optimizer | None = None

    def sums(self, ids: Batch) -> list[Tensor]:
        raise NotImplementedError

    def step(self, ids: Batch) -> None:
        """One training step. The loss weighs every column differently, so no gradient is trivial."""
        if not self.trains:
            with torch.no_grad():
                self.sums(ids)
            return
        assert self.optimizer is not None
        out = torch.cat(self.sums(ids), 1)
        (out * torch.linspace(-1, 1, out.shape[1])).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def optimize(self, params: Sequence[Any]) -> None:
        kind: dict[str, Callable[..., torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
        self.optimizer = kind[self.sizes.optimizer](params, lr=0.01)

    def local(self, param: Any) -> Tensor:
        """This rank's part of a parameter, of its gradient or of optimiser state."""
        return param.to_local() if hasattr(param, "to_local") else param  # type: ignore[no-any-return]


class Ours(System):
    """shardwise: one embedding_bag a table."""

    library = "shardwise"

    def __init__(self, sizes: Sizes, sharding: str, sparse: bool) -> None:
        super().__init__(sizes, sharding)
        self.sparse = sparse
        self.mesh = init_device_mesh("cpu", (sizes.ranks,))
        for table in range(sizes.tables):
            value = ours.distribute_tensor(first_values(sizes, table), self.mesh, [self.placement(table)])
            self.params.append(nn.Parameter(value))
        self.optimize(self.params)

    def placement(self, table: int) -> Placement:
        on_one = OnRanks(table % self.sizes.ranks)
        return {"row-wise": Shard(0), "column-wise": Shard(1), "table-wise": on_one}[self.sharding]

    def sums(self, ids: Batch) -> list[Tensor]:
        found = []
        for own, table in zip(ids, self.params, strict=True):
            ids_of_all = ours.DTensor.from_local(own, self.mesh, [Shard(0)], run_check=False)
            sums: Any = F.embedding_bag(ids_of_all, table, mode="sum", sparse=self.sparse)
            found.append(sums.to_local())
        return found


class OursGrouped(Ours):
    """shardwise: the tables share one exchange of ids and one of sums."""

    def sums(self, ids: Batch) -> list[Tensor]:
        wholes = [ours.DTensor.from_local(own, self.mesh, [Shard(0)], run_check=False) for own in ids]
        sums: Any = embedding_bags(wholes, self.params, mode="sum", sparse=self.sparse)
        return [x.to_local() for x in sums]


class Peer(System):
    """torch.distributed.tensor: it has no embedding_bag, so a lookup and a sum."""

    library = "torch.distributed.tensor"

    def __init__(self, sizes: Sizes, sharding: str) -> None:
        super().__init__(sizes, sharding)
        self.mesh = init_device_mesh("cpu", (sizes.ranks,))
        placement = peer.Shard({"row-wise": 0, "column-wise": 1}[sharding])
        for table in range(sizes.tables):
            value = peer.distribute_tensor(first_values(sizes, table), self.mesh, [placement])
            self.params.append(nn.Parameter(value))
        self.optimize(self.params)

    def sums(self, ids: Batch) -> list[Tensor]:
        found = []
        for own, table in zip(ids, self.params, strict=True):
            ids_of_all = peer.DTensor.from_local(own, self.mesh, [peer.Shard(0)], run_check=False)
            rows: Any = F.embedding(ids_of_all, table).sum(1)
            found.append(rows.redistribute(placements=[peer.Shard(0)]).to_local())
        return found


class Legacy(System):
    """torch.distributed._shard: sharded embedding bags of a module."""

    library = "torch.distributed._shard"

    def __init__(self, sizes: Sizes, sharding: str, trains: bool) -> None:
        super().__init__(sizes, sharding)
        self.trains = trains
        from torch.distributed._shard.api import shard_parameter
        from torch.distributed._shard.sharding_spec import ChunkShardingSpec

        spec = ChunkShardingSpec(
            {"row-wise": 0, "column-wise": 1}[sharding], [f"rank:{r}/cpu" for r in range(sizes.ranks)]
        )
        self.bags = []
        for table in range(sizes.tables):
            bag = nn.EmbeddingBag(sizes.rows, sizes.dim, mode="sum", _weight=first_values(sizes, table))
            shard_parameter(bag, "weight", spec)
            self.bags.append(bag)
            sharded: Any = bag.weight
            self.params += [shard.tensor for shard in sharded.local_shards()]
        if trains:
            for param in self.params:
                param.requires_grad_()
            self.optimize(self.params)

    def sums(self, ids: Batch) -> list[Tensor]:
        return [bag(own) for own, bag in zip(ids, self.bags, strict=True)]


Make = Callable[[Sizes], System]
CANDIDATES: dict[str, Make] = {
    "row-wise: shardwise": lambda s: Ours(s, "row-wise", sparse=False),
    "row-wise: shardwise, sparse gradients": lambda s: Ours(s, "row-wise", sparse=True),
    "row-wise: shardwise, sparse, grouped": lambda s: OursGrouped(s, "row-wise", sparse=True),
    "row-wise: torch.distributed.tensor": lambda s: Peer(s, "row-wise"),
    "row-wise: legacy _shard": lambda s: Legacy(s, "row-wise", trains=True),
    "row-wise: legacy _shard, forward alone": lambda s: Legacy(s, "row-wise", trains=False),
    "column-wise: shardwise": lambda s: Ours(s, "column-wise", sparse=False),
    "column-wise: shardwise, sparse gradients": lambda s: Ours(s, "column-wise", sparse=True),
    "column-wise: shardwise, sparse, grouped": lambda s: OursGrouped(s, "column-wise", sparse=True),
    "column-wise: torch.distributed.tensor": lambda s: Peer(s, "column-wise"),
    "column-wise: legacy _shard": lambda s: Legacy(s, "column-wise", trains=True),
    "column-wise: legacy _shard, forward alone": lambda s: Legacy(s, "column-wise", trains=False),
    "table-wise: shardwise": lambda s: Ours(s, "table-wise", sparse=False),
    "table-wise: shardwise, sparse gradients": lambda s: Ours(s, "table-wise", sparse=True),
    "table-wise: shardwise, sparse, grouped": lambda s: OursGrouped(s, "table-wise", sparse=True),
}


# ---- one measured run -----------------------------------------------------------------------------------------


@dataclass
class Result:
    """What one rank saw of one system."""

    seconds: list[float] = field(default_factory=list)
    failure: str | None = None
    collectives: int | None = None
    sent_bytes: int | None = None
    peak_bytes: int = 0
    param_bytes: int = 0
    grad_bytes: int = 0
    state_bytes: int = 0


def rank_main(rank: int, sizes: Sizes, names: list[str], folder: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # of the peers
    init_processes(rank, sizes.ranks, str(Path(folder) / "store"), timeout_seconds=120)
    batches = draw_ids(sizes, rank, sizes.steps)
    results = {name: Result() for name in names}
    living: dict[str, System] = {}
    turns: dict[str, int] = {}
    for name in names:
        system, turns[name], results[name].failure = first_steps(name, sizes, batches[0])
        if system is not None:
            living[name] = system
    differences = compare(living, sizes)  # all have taken the same two steps
    for turn, ids in enumerate(batches):
        for name, system in living.items():
            if turn >= turns[name]:
                continue
            dist.barrier()
            start = perf_counter()
            system.step(ids)
            results[name].seconds.append(perf_counter() - start)
    for name, system in living.items():
        inspect(system, batches[0], results[name])
    everyone = gathered(results, rank, sizes.ranks, folder)
    if rank == 0:
        report(sizes, everyone, differences)
    dist.destroy_process_group()


def first_steps(name: str, sizes: Sizes, ids: Batch) -> tuple[System | None, int, str | None]:
    """Build a system and warm it up: the system, how many turns it gets, and why it failed if it did."""
    reason, system, seconds = "", None, 0.0
    try:
        system = CANDIDATES[name](sizes)
        for _ in range(2):
            start = perf_counter()
            system.step(ids)
            seconds = perf_counter() - start
    except Exception as error:  # noqa: BLE001 - a peer that cannot do it is a finding, not a failure
        lines = str(error).strip().splitlines() or [""]
        reason = f"{type(error).__name__}: {lines[0]}"
    worst = torch.tensor([float(bool(reason)), seconds])
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    turns = min(sizes.steps, max(3, int(SECONDS_EACH / max(worst[1].item(), 1e-9))))
    return (None, 0, reason or "fails on another rank") if worst[0] else (system, turns, None)


def inspect(system: System, ids: Batch, result: Result) -> None:
    """Collectives and bytes of one step, its peak memory, and what it leaves behind."""
    with count_comms() as comms:
        system.step(ids)
    if isinstance(system, Ours):
        result.collectives, result.sent_bytes = comms.total_calls, comms.total_bytes
    gc.collect()
    before = reset_peak()
    system.step(ids)
    result.peak_bytes = peak() - before
    result.param_bytes = sum(num_bytes(system.local(p)) for p in system.params)
    if system.optimizer is None:
        return
    torch.cat(system.sums(ids), 1).sum().backward()
    result.grad_bytes = sum(num_bytes(system.local(p.grad)) for p in system.params if p.grad is not None)
    system.optimizer.zero_grad(set_to_none=True)
    states = [v for state in system.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    result.state_bytes = sum(num_bytes(system.local(v)) for v in states)


def num_bytes(x: Tensor) -> int:
    if x.is_sparse:
        return num_bytes(x._indices()) + num_bytes(x._values())
    return x.numel() * x.element_size()


def reset_peak() -> int:
    """Give freed memory back, forget the highest resident memory so far (Linux); the resident bytes now."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    return _status("VmHWM")


def _status(key: str) -> int:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    return 0


def compare(living: dict[str, System], sizes: Sizes) -> dict[str, float]:
    """How far the tables of the systems are from those of the first: the largest difference of an element."""
    sample: dict[str, Tensor] = {}
    for name, system in living.items():
        if system.trains and hasattr(system.params[0], "full_tensor"):
            sample[name] = system.params[0].full_tensor().detach()[:: max(1, sizes.rows // 5000)].clone()
    reference = next(iter(sample.values()), None)
    return {} if reference is None else {name: float((x - reference).abs().max()) for name, x in sample.items()}


def gathered(results: dict[str, Result], rank: int, ranks: int, folder: str) -> list[dict[str, Result]]:
    """Every rank's results on rank 0, through files."""
    torch.save({name: vars(result) for name, result in results.items()}, Path(folder) / f"rank{rank}.pt")
    dist.barrier()
    if rank:
        return []
    every = [torch.load(Path(folder) / f"rank{r}.pt") for r in range(ranks)]
    return [{name: Result(**values) for name, values in one.items()} for one in every]


# ---- what is printed --------------------------------------------------------------------------------------------


def report(sizes: Sizes, everyone: list[dict[str, Result]], differences: dict[str, float]) -> None:
    slowest: dict[str, list[float]] = {}
    for name, result in everyone[0].items():
        if not result.failure:
            slowest[name] = [max(times) for times in zip(*(r[name].seconds for r in everyone), strict=True)]
    medians = {name: median(times) for name, times in slowest.items()}
    rows = []
    for name, result in everyone[0].items():
        if result.failure:
            rows.append([name, f"fails: {result.failure[:90]}", *[""] * 5])
            continue
        base = medians.get(name.split(":")[0] + ": shardwise", 0.0)
        rows.append([
            name,
            f"{medians[name] * 1e3:.1f}",
            f"{min(slowest[name]) * 1e3:.1f}",
            ratio(medians[name], base),
            "" if result.collectives is None else str(result.collectives),
            "" if result.sent_bytes is None else f"{result.sent_bytes / 1e3:.0f}",
            f"{differences[name]:.1e}" if name in differences else "",
        ])  # fmt: skip
    print_table(
        f"A training step of {sizes.tables} tables of {sizes.rows:,} x {sizes.dim}, {sizes.ranks} gloo ranks, "
        f"{sizes.batch} bags of {sizes.bag} ids a rank (power law {sizes.skew}), mode sum, {sizes.optimizer}",
        [
            "sharding and system",
            "ms (median)",
            "ms (best)",
            "beside the first",
            "collectives",
            "kB sent by rank 0",
            "difference",
        ],
        rows,
    )
    memory = []
    for name, result in everyone[0].items():
        if not result.failure:
            worst = [
                max(getattr(r[name], f) for r in everyone)
                for f in ("peak_bytes", "grad_bytes", "state_bytes", "param_bytes")
            ]
            memory.append([name, *(f"{n / 1e6:.1f}" for n in worst)])
    print_table(
        "Memory of a step, MB on the rank that needs most: resident above before the step; exact bytes of the rest",
        ["sharding and system", "peak of the step", "gradients", "optimiser state", "tables on it"],
        memory,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tables", type=int, default=4)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=512, help="bags a rank")
    parser.add_argument("--bag", type=int, default=8, help="ids a bag")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--optimizer", choices=["sgd", "adagrad"], default="adagrad")
    parser.add_argument("--skew", type=float, default=1.05, help="exponent of the power law of the ids")
    parser.add_argument("--only", default="", help="only systems whose name contains one of these words, by commas")
    parser.add_argument("--quick", action="store_true", help="small tables and few steps: shows that it runs")
    options = vars(parser.parse_args())
    words, quick = options.pop("only").split(","), options.pop("quick")
    if quick:
        options |= {"rows": 20_000, "steps": 5}
    sizes = Sizes(**options)
    torch.set_num_threads(1)
    print(machine())
    names = [name for name in CANDIDATES if any(word in name for word in words)]
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank_main, args=(sizes, names, folder), nprocs=sizes.ranks)


if __name__ == "__main__":
    main()
