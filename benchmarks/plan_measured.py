"""Steps of sharded collections, measured on gloo ranks: of a plan of ours, and of TorchRec's for the same tables."""

import gc
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any, Protocol

import torch
import torch.distributed as dist
from plan_cells import Tables
from plan_torchrec import InTorchRec
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from shardwise import Placement, init_device_mesh
from shardwise.collectives import init_processes
from shardwise.embedding import EmbeddingBagCollection, KeyedJaggedTensor, RowWiseAdagrad, shard_embeddings

DRAWN = 3  # batches, used in turn


class Engine(Protocol):
    """A sharded collection."""

    def step(self, ids: Tensor, lengths: Tensor) -> None:
        """Forward, backward, and the update of the rows."""


class InShardwise:
    """The tables in the engine of `shard_embeddings`."""

    def __init__(self, tables: Tables, plan: Mapping[str, Placement]) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        made = EmbeddingBagCollection(tables.configs, device="meta")
        self.module: Any = shard_embeddings(made, plan, mesh, RowWiseAdagrad(lr=0.1))
        self.keys = list(tables.ids)

    def step(self, ids: Tensor, lengths: Tensor) -> None:
        sums = self.module(KeyedJaggedTensor(self.keys, ids, lengths=lengths)).values()
        sums.backward(torch.ones_like(sums))


def measure(
    tables: Tables, plans: Mapping[str, Mapping[str, Placement]], torchrec: Mapping[str, Any], ranks: int, rounds: int
) -> dict[str, tuple[float, float]]:
    """Medians of a step in milliseconds, in turns: until the slowest rank ends, and CPU time of the busiest rank.

    Ranks that share cores hide part of what the slowest one needs; CPU time does not.

    Args:
        plans: run by our engine, by name.
        torchrec: plans of its planner that are run by its own engine.
    """
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank_main, args=(tables, plans, torchrec, ranks, rounds, folder), nprocs=ranks)
        found: dict[str, tuple[float, float]] = torch.load(Path(folder) / "results")
    return found


def _rank_main(
    rank: int,
    tables: Tables,
    plans: Mapping[str, Mapping[str, Placement]],
    torchrec: Mapping[str, Any],
    ranks: int,
    rounds: int,
    folder: str,
) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # of the peers
    init_processes(rank, ranks, str(Path(folder) / "store"), timeout_seconds=600)
    engines: dict[str, Engine] = {name: InShardwise(tables, plan) for name, plan in plans.items()}
    engines |= {name: InTorchRec(tables, plan) for name, plan in torchrec.items()}
    batches = [_draw(tables, 1000 * number + rank) for number in range(DRAWN)]
    seconds = torch.zeros(len(engines), rounds, 2, dtype=torch.float64)
    for engine in engines.values():
        engine.step(*batches[0])
    gc.disable()
    for turn in range(rounds):
        for number, engine in enumerate(engines.values()):
            engine.step(*batches[(turn + 1) % DRAWN])  # the caches are full of what other engines used
            dist.barrier()
            start, cpu = perf_counter(), process_time()
            engine.step(*batches[turn % DRAWN])
            seconds[number, turn] = torch.tensor([perf_counter() - start, process_time() - cpu])
        gc.collect()
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    if rank == 0:
        found = {
            name: tuple(1e3 * median(of[:, column].tolist()) for column in (0, 1))
            for name, of in zip(engines, seconds, strict=True)
        }
        torch.save(found, Path(folder) / "results")
    dist.destroy_process_group()


def _draw(tables: Tables, seed: int) -> tuple[Tensor, Tensor]:
    """Ids and lengths of a rank: all rows equally often."""
    g = torch.Generator().manual_seed(seed)
    means = torch.tensor([tables.ids[config.feature_names[0]] for config in tables.configs])
    lengths = torch.poisson(means[:, None].expand(-1, tables.bags).contiguous(), generator=g).int()
    counts = zip(tables.configs, lengths.sum(1).tolist(), strict=True)
    ids = torch.cat([torch.randint(config.num_embeddings, (count,), generator=g) for config, count in counts])
    return ids, lengths.flatten()
