"""Transformers whose parameters are sharded over the data axis: shardwise, torch's `fully_shard`, and replication.

All systems live in the same processes, start from the same parameters, see the same tokens and take turns; their losses
must agree with one plain process before anything is timed. Peak memory is that of the process over one system's steps,
beyond what it had before that system was built. Bytes are those that all ranks receive on the loopback interface.

    python benchmarks/fully_shard.py [--ranks 2] [--quick]
"""

import argparse
import ctypes
import gc
import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measure import Times, interleaved, machine, print_table
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as peer_fully_shard
from torch.multiprocessing.spawn import spawn

from shardwise import Replicate, Shard, distribute_tensor, init_device_mesh
from shardwise._models import ModelArgs, Transformer
from shardwise.collectives import init_processes
from shardwise.parallel import fully_shard
from shardwise.parallel.shard_module import shard_module

VOCABULARY = 512
LIBC = ctypes.CDLL("libc.so.6")


@dataclass(frozen=True)
class Sizes:
    """One measured setting."""

    layers: int
    dim: int
    heads: int
    batch: int  # of each rank
    tokens: int

    def __str__(self) -> str:
        return f"{self.layers} layers, dim {self.dim}, {self.batch * self.tokens} tokens a rank"

    def model(self) -> Transformer:
        torch.manual_seed(0)
        args = {"n_layers": self.layers, "dim": self.dim, "n_heads": self.heads, "max_seq_len": self.tokens}
        return Transformer(ModelArgs(**args, vocab_size=VOCABULARY, dropout_p=0.0))

    def data(self, ranks: int) -> Tensor:
        """Tokens of the batch of all ranks, and those that follow them."""
        size = self.batch * ranks, self.tokens + 1
        return torch.randint(VOCABULARY, size, generator=torch.Generator().manual_seed(1))


SETTINGS = [Sizes(4, 256, 4, 4, 64), Sizes(4, 512, 8, 2, 64), Sizes(2, 1024, 16, 1, 64)]


def loss_of(model: nn.Module, data: Tensor) -> Tensor:
    return F.cross_entropy(model(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten())


class System:
    """One way to train on the batch of all ranks."""

    def __init__(self, sizes: Sizes) -> None:
        self.model = self.sharded(sizes.model())
        self.data = self.batch(sizes.data(dist.get_world_size()))
        self.optimiser = torch.optim.Adam(self.model.parameters(), lr=1e-4, foreach=True)

    def sharded(self, model: Transformer) -> nn.Module:
        return model

    def batch(self, data: Tensor) -> Tensor:
        return data.chunk(dist.get_world_size())[dist.get_rank()].contiguous()

    def step(self) -> Tensor:
        loss = loss_of(self.model, self.data)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        self.optimiser.zero_grad()
        return loss.detach()

    def loss(self) -> float:
        """Of the batch of all ranks, and a step."""
        mean = self.step() / dist.get_world_size()
        dist.all_reduce(mean)
        return mean.item()


class Ours(System):
    """shardwise's `fully_shard`, with a plain batch on each rank as in torch's."""

    def sharded(self, model: Transformer) -> nn.Module:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)


class OurDTensors(Ours):
    """The same with the batch of all ranks as one DTensor."""

    def batch(self, data: Tensor) -> Tensor:
        return distribute_tensor(data, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])

    def loss(self) -> float:
        return self.step().item()


class Peer(System):
    """torch's `fully_shard` (FSDP2)."""

    def sharded(self, model: Transformer) -> nn.Module:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.layers:
            peer_fully_shard(layer, mesh=mesh)
        return peer_fully_shard(model, mesh=mesh)


class Replicated(OurDTensors):
    """shardwise with parameters that every rank has in full."""

    def sharded(self, model: Transformer) -> nn.Module:
        return shard_module(model, {"**": Replicate()}, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


SYSTEMS: dict[str, type[System]] = {
    "ours": Ours, "ours, DTensors": OurDTensors, "torch": Peer, "replicated": Replicated,
}  # fmt: skip


# ---- figures --------------------------------------------------------------------------------------------------


def peak_megabytes(build: Callable[[], System]) -> float:
    """Of three steps of a new system, by the kernel's count of resident memory."""
    gc.collect()
    LIBC.malloc_trim(0)
    before = _status("VmRSS")
    system = build()
    system.step()
    gc.collect()
    LIBC.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(3):
        system.step()
    return (_status("VmHWM") - before) / 1024


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1])


def megabytes_a_step(system: System) -> float:
    """Received on the loopback interface, by all ranks."""
    dist.barrier()
    before = _received()
    dist.barrier()
    for _ in range(3):
        system.step()
    dist.barrier()
    found = (_received() - before) / 3 / 2**20
    dist.barrier()
    return found


def _received() -> int:
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def slowest(times: Times) -> Times:
    """Of each round the time of the slowest rank."""
    found = torch.tensor(times.rounds, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return Times(tuple(found.tolist()))


def expected_losses(sizes: Sizes, ranks: int) -> Tensor:
    model, data = sizes.model(), sizes.data(ranks)
    optimiser, found = torch.optim.Adam(model.parameters(), lr=1e-4), []
    for _ in range(3):
        loss = loss_of(model, data)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        optimiser.zero_grad()
        found.append(loss.item())
    return torch.tensor(found)


def measure(sizes: Sizes, rounds: int) -> list[list[str]]:
    expected = expected_losses(sizes, dist.get_world_size())
    peaks = {name: peak_megabytes(lambda kind=kind: kind(sizes)) for name, kind in SYSTEMS.items()}
    living = {name: kind(sizes) for name, kind in SYSTEMS.items()}
    for name, system in living.items():
        found = torch.tensor([system.loss() for _ in range(3)])
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5), f"{sizes}: {name} finds {found}, not {expected}"
    sent = {name: megabytes_a_step(system) for name, system in living.items()}
    runs = {name: system.step for name, system in living.items()}
    times = {name: slowest(t) for name, t in interleaved(runs, rounds, 1, warmup=1).items()}
    rows = []
    for name in SYSTEMS:
        beside = median(a / b for a, b in zip(times[name].rounds, times["torch"].rounds, strict=True))
        rows.append([
            name, f"{peaks[name]:.0f}", f"{peaks[name] / peaks['torch']:.2f}x", f"{sent[name]:.1f}",
            f"{sent[name] / sent['torch']:.2f}x", f"{times[name].best * 1e3:.0f}", f"{times[name].median * 1e3:.0f}",
            f"{beside:.2f}x",
        ])  # fmt: skip
    return rows


def rank_main(rank: int, ranks: int, settings: list[Sizes], rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # of the peer
    init_processes(rank, ranks, str(Path(folder) / "store"), timeout_seconds=300)
    for sizes in settings:
        rows = measure(sizes, rounds)
        if rank > 0:
            continue
        print_table(
            f"{ranks} ranks, {sizes}: peak memory of a rank (MB) in a training step,\n"
            "bytes received by all ranks a step (MB), and a step of Adam (ms of the slowest rank: best, median).\n"
            "Ratios are to torch, of time the median of turns.",
            ["system", "peak", "ratio", "sent", "ratio", "best", "median", "ratio"],
            rows,
        )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--quick", action="store_true", help="the smallest model, few rounds")
    arguments = parser.parse_args()
    # Large tensors return to the system when they are freed, so that peaks of one system do not hide those of another.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")
    print(machine())
    settings, rounds = (SETTINGS[:1], 3) if arguments.quick else (SETTINGS, 5)
    for ranks in arguments.ranks:
        with tempfile.TemporaryDirectory() as folder:
            spawn(rank_main, (ranks, settings, rounds, folder), ranks)


if __name__ == "__main__":
    main()
