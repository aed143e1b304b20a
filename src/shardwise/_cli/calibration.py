"""Measures the costs of collectives here, for `shardwise doctor --calibrate`, and writes a file of costs and speeds."""

import json
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch

from shardwise import _collectives as collectives
from shardwise._cli.measured_speeds import measure_speeds
from shardwise._collectives import Collective, Ranks, cost_tables
from shardwise._collectives.cost_tables import Measured
from shardwise._collectives.meshes import has_nccl
from shardwise._pictures.labels import count_text
from shardwise._pictures.report import table_text
from shardwise.errors import MeshError

KILOBYTES = (4, 64, 1024, 16384)  # sizes of the full tensor
ROUNDS = 9
FASTEST = 1e9  # megabytes per second, where sizes make no difference

Tables = tuple[Mapping[str, Measured], Mapping[str, Measured] | None]


class Timing(NamedTuple):
    """One call of a collective: the time of the slowest rank."""

    ranks: int
    num_bytes: float  # bytes that the busiest rank receives; between hosts, bytes on the link of a host
    microseconds: float


def measure(device_type: str) -> Tables:
    """The costs inside a host, and between hosts, if there are several. All ranks call this and get equal results.

    Raises:
        MeshError: the world has one rank, or none shares a host with another one.
    """
    world = collectives.world_size()
    per_host = cost_tables.ranks_per_host_of(world)
    if world == 1 or per_host == 1:
        raise MeshError(
            f"There are no two ranks on one host in a world of {world}. Fix: start at least 2, such as by --nproc 2."
        )
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", collectives.rank())))
    everyone = tuple(range(world))
    if per_host is None:
        return _fitted([everyone, *_pairs(device_type, (world,))], None, device_type), None
    shape = world // per_host, per_host
    inside = [_line(device_type, shape, 1), *_pairs(device_type, shape)]
    return _fitted(inside, None, device_type), _fitted([everyone, _line(device_type, shape, 0)], per_host, device_type)


def _line(device_type: str, shape: tuple[int, ...], axis: int) -> Ranks:
    """The ranks with which this one makes collectives along an axis of a mesh of this shape."""
    mesh = collectives.as_mesh(collectives.init_device_mesh(device_type, shape))
    return tuple(mesh.axis_ranks(collectives.rank(), axis))


def _pairs(device_type: str, shape: tuple[int, ...]) -> list[Ranks]:
    """Groups of two neighbors of a host, if they are not all of it."""
    *hosts, per_host = shape
    return [_line(device_type, (*hosts, per_host // 2, 2), len(shape))] if per_host > 2 and per_host % 2 == 0 else []


def _fitted(groups: Sequence[Ranks], per_host: int | None, device_type: str) -> dict[str, Measured]:
    timings: dict[str, list[Timing]] = {name: [] for name in cost_tables.COLLECTIVES}
    for group in groups:
        for kilobytes in KILOBYTES:
            for name, timing in _timed(group, kilobytes * 256, device_type, per_host).items():
                timings[name].append(timing)
    return {name: fit(found) for name, found in timings.items()}


def _timed(group: Ranks, elements: int, device_type: str, per_host: int | None) -> dict[str, Timing]:
    """Each collective, of a full tensor of about `elements` float32. All groups of this kind run at once."""
    n, everyone = len(group), tuple(range(collectives.world_size()))
    size = -(-elements // n) * n
    full, reduced = (torch.ones(size, device=device_type) for _ in range(2))
    shard, counts, ring = full[: size // n], [size // n] * n, (n - 1) / n
    calls = {
        "all_to_all": (ring, Collective("all_to_all", full, group, (), counts, counts)),
        "all_gather": (ring, Collective("all_gather", shard, group, counts)),
        "reduce_scatter": (ring, Collective("reduce_scatter", full, group, counts)),
        "all_reduce": (2 * ring, Collective("all_reduce", reduced, group, reduced.shape, in_place=True)),
        "broadcast": (1.0, Collective("broadcast", full, group, (size,), root=group[0])),
    }
    found = {}
    for name, (busiest, collective) in calls.items():
        times = [_seconds(collective, device_type) for _ in range(ROUNDS + 1)][1:]  # the first one connects
        slowest = [max(ranks) for ranks in zip(*collectives.gather_json(times, everyone), strict=True)]
        num_bytes = 4 * size * busiest
        on_link = cost_tables.link_bytes(name, group, everyone, num_bytes, per_host)
        found[name] = Timing(n, on_link or num_bytes, 1e6 * median(slowest))
    return found


def _seconds(collective: Collective, device_type: str) -> float:
    collectives.barrier(collective.ranks)
    if device_type == "cuda":
        torch.cuda.synchronize()
    begun = perf_counter()
    collectives.start(collective)()
    if device_type == "cuda":
        torch.cuda.synchronize()
    return perf_counter() - begun


def fit(timings: Sequence[Timing]) -> Measured:
    """The costs with the smallest relative errors for these timings, none of them negative."""
    weighted = np.array([np.array([1.0, max(0, t.ranks - 2), t.num_bytes]) / t.microseconds for t in timings])
    used = [i for i in range(3) if i != 1 or len({t.ranks for t in timings}) > 1]
    found = np.zeros(3)
    while used:
        best = np.linalg.lstsq(weighted[:, used], np.ones(len(timings)), rcond=None)[0]
        if best.min() >= 0:
            found[used] = best
            break
        used.pop(int(best.argmin()))
    latency, per_rank, per_byte = (float(x) for x in found)
    return Measured(latency, per_rank, 1 / max(per_byte, 1 / FASTEST))


def write_costs(
    path: Path,
    device_type: str,
    source: str,
    *tables: Mapping[str, Measured] | None,
    speeds: Mapping[str, float] | None = None,
) -> None:
    """Write the costs inside a host and between hosts, and the speeds of ranks."""
    content: dict[str, object] = {"format": cost_tables.FORMAT, "device_type": device_type, "source": source}
    for where, found in zip(("inside", "between"), tables, strict=True):
        rounded = {name: {k: round(x, 3) for k, x in m._asdict().items()} for name, m in (found or {}).items()}
        content[where] = rounded or None
    if speeds is not None:
        content["speeds"] = {name: float(f"{x:.4g}") for name, x in speeds.items()}
    path.write_text(json.dumps(content, indent=2) + "\n")


def calibrate(output: Path) -> str:
    """Measure the costs of collectives in this world, and the speeds of ranks. Rank 0 writes the file, and gets a
    table.

    Runs on ranks.
    """
    device_type = "cuda" if collectives.world_size() > 1 and has_nccl() else "cpu"
    tables, speeds = measure(device_type), measure_speeds(device_type)
    if collectives.rank() != 0:
        return ""
    ranks, per_host = collectives.world_size(), cost_tables.ranks_per_host_of(collectives.world_size())
    hosts = count_text(ranks // per_host if per_host else 1, "host")
    source = f"torch {torch.__version__}, {ranks} ranks on {hosts}, {datetime.now(UTC).date()}"
    write_costs(output, device_type, source, *tables, speeds=speeds)
    cost_tables.read_costs(output)
    rows = [("", "latency", "each rank", "speed")]
    for where, table in zip(("inside a host", "between hosts"), tables, strict=True):
        for name, (latency, per_rank, speed) in (table or {}).items():
            rows.append((f"{where}, {name}", f"{latency:.0f} us", f"{per_rank:.0f} us", f"{speed:.0f} MB/s"))
    rates = [
        (name.replace("_", " "), f"{x:.1f}" if name == "alone" else f"{x / 1e9:.1f} G/s") for name, x in speeds.items()
    ]
    written = f"Written to {output}. To plan by it: {cost_tables.VARIABLE}={output}"
    return "\n".join([f"{source}, {device_type}", table_text(rows, "lrrr"), "", table_text(rates, "lr"), written])
