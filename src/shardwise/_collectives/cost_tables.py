"""Costs of collectives, by which the planner compares sequences of them: numbers for each backend, and for links.

    SHARDWISE_COSTS=costs.json torchrun … train.py   # measured by `shardwise doctor --calibrate`

A cost is the bytes that an all-to-all inside a host sends in that time. Ranks of one host are `ranks_per_host`
consecutive ones. Traffic between hosts takes turns on the link of a host: for a ring, what one rank of each group
receives; for an all-to-all, what all ranks send to other hosts.
"""

import json
import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.errors import ConfigError

VARIABLE = "SHARDWISE_COSTS"
FORMAT = "shardwise costs 1"
COLLECTIVES = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce", "broadcast")
SPEEDS = ("flops", "memory_bandwidth", "lookup_bandwidth", "message_bandwidth", "update_bandwidth", "alone")

SAME_COSTS = f"set {VARIABLE} to the same file on all hosts, and start as many ranks on each."


class Cost(NamedTuple):
    """The cost of one collective on one kind of link.

    Attributes:
        latency: of a collective of no bytes between two ranks, in bytes.
        per_byte: per byte that the busiest rank receives; between hosts, per byte on the link of a host.
        per_rank: of each further rank, in bytes.
    """

    latency: float
    per_byte: float
    per_rank: float = 0.0

    def of(self, size: int, num_bytes: float) -> float:
        """The cost in a group of `size` ranks."""
        return self.latency + self.per_rank * max(0, size - 2) + self.per_byte * num_bytes


@dataclass(frozen=True, eq=False)
class Costs:
    """The costs of the collectives of one backend. Equal only to itself, so that it is a cheap key of caches.

    Attributes:
        source: the origin of the numbers.
        inside: of groups of ranks on one host, by collective.
        between: of groups of several hosts.
        ranks_per_host: None if all ranks are on one host.
        bytes_per_second: of an all-to-all inside a host; converts a cost into seconds.
    """

    source: str
    inside: Mapping[str, Cost]
    between: Mapping[str, Cost]
    ranks_per_host: int | None = None
    bytes_per_second: float = 1.25e9

    def of(self, collective: str, group: Sequence[int], ranks: Sequence[int], num_bytes: float) -> float:
        """The cost of a collective in this group and the parallel ones, in bytes.

        Args:
            group: rising ranks.
            ranks: ranks of all groups, rising.
            num_bytes: bytes that the busiest rank receives.
        """
        cost = self.inside[collective].of(len(group), num_bytes)
        on_link = link_bytes(collective, group, ranks, num_bytes, self.ranks_per_host)
        return max(cost, self.between[collective].of(len(group), on_link)) if on_link else cost

    def seconds(self, collective: str, group: Sequence[int], ranks: Sequence[int], num_bytes: float) -> float:
        """The time of a collective; see `of`."""
        return self.of(collective, group, ranks, num_bytes) / self.bytes_per_second

    def numbers(self) -> dict[str, float]:
        """All numbers by name, for comparison with other ranks."""
        found: dict[str, float] = {"ranks_per_host": self.ranks_per_host or 0}
        for where, table in (("inside", self.inside), ("between", self.between)):
            for name, cost in table.items():
                found |= {f"{where}.{name}.{key}": x for key, x in cost._asdict().items()}
        return found


def link_bytes(
    collective: str, group: Sequence[int], ranks: Sequence[int], num_bytes: float, ranks_per_host: int | None
) -> float:
    """The bytes on the link of a host if each group like this one makes a collective; see `Costs.of`.

    A ring goes through all ranks of a host, then to the next one. An all-to-all sends equal parts to all ranks.
    """

    def on_first_host(ranks: Sequence[int], per_host: int) -> int:
        return bisect_left(ranks, (ranks[0] // per_host + 1) * per_host)

    own = len(group) if ranks_per_host is None else on_first_host(group, ranks_per_host)
    if ranks_per_host is None or own == len(group):
        return 0.0
    on_link = num_bytes * on_first_host(ranks, ranks_per_host) / own
    return on_link * own * (len(group) - own) / (len(group) - 1) if collective == "all_to_all" else on_link


# gloo on one host: medians at 2 and 4 ranks on 2 cores, 1 KB to 64 MB, torch 2.13 (`benchmarks/collectives.py`). An
# all-to-all of up to 16 KiB takes as long as one of 64 KiB. Bytes are those that the busiest rank receives: of an
# all-to-all and an all-gather (n - 1) / n of the result, of a broadcast all of it.
_GLOO = {
    "all_to_all": Cost(65536, 1.0),
    "all_gather": Cost(131072, 0.95),
    "reduce_scatter": Cost(131072, 2.5),
    "all_reduce": Cost(131072, 1.0),
    "broadcast": Cost(32768, 0.25),
}
# Assumed: a link of 10 Gbit/s, about as fast as gloo's all-to-all inside a host, and four times its latency. What
# crosses the link was counted on two hosts (`benchmarks/two_hosts.py`).
_GLOO_BETWEEN = {name: Cost(4 * cost.latency, 1.0) for name, cost in _GLOO.items()}
# NCCL: constants of torch 2.13 (`torch/distributed/tensor/_collective_utils.py`, `torch/_inductor/comm_analysis.py`): a
# ring of n ranks takes 6.6 microseconds, and n - 1 hops of 0.6 on NVLink or 2.7 between hosts, an all-reduce and an
# all-to-all twice as many; 87.7 GB/s inside a host, of which an all-to-all gets half, 0.22 of it from each GPU to other
# hosts. In bytes of an all-to-all; a host has 8 GPUs, each with its network card.
_SPEED = 87_700 / 2  # bytes in a microsecond


def _nccl(hop: float, speed: float) -> dict[str, Cost]:
    once = Cost((6.6 + hop) * _SPEED, _SPEED / speed, hop * _SPEED)
    twice = Cost((6.6 + 2 * hop) * _SPEED, _SPEED / speed, 2 * hop * _SPEED)
    return dict.fromkeys(COLLECTIVES, once) | {
        "all_reduce": twice, "all_to_all": twice._replace(per_byte=2 * twice.per_byte)
    }  # fmt: skip


_NCCL, _NCCL_BETWEEN = _nccl(0.6, 87_700), _nccl(2.7, 0.22 * 87_700 * 8)

GLOO = Costs("measured on one host, assumed between hosts", _GLOO, _GLOO_BETWEEN)
NCCL = Costs("constants of torch", _NCCL, _NCCL_BETWEEN, bytes_per_second=_SPEED * 1e6)


@lru_cache(maxsize=64)
def costs_of(device_type: str, path: str | None, ranks_per_host: int | None) -> Costs:
    """The costs for meshes of such devices.

    Args:
        path: of a file that `shardwise doctor --calibrate` wrote, for devices of its own type; None: no file.

    Raises:
        ConfigError: it cannot be read, or has a wrong format.
    """
    found = GLOO if device_type == "cpu" else NCCL
    if path:
        device, measured = read_costs(Path(path))
        found = measured if device == device_type else found
    return found if ranks_per_host is None else replace(found, ranks_per_host=ranks_per_host)


def path_of_environment() -> str | None:
    """The file that the environment names."""
    return os.environ.get(VARIABLE) or None


def ranks_per_host_of(world_size: int) -> int | None:
    """The number of ranks that the launcher started on each host; None if all are on one, or if it is unknown."""
    local, hosts = (os.environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"))
    if not local.isdecimal() or not 0 < int(local) < world_size or world_size % int(local):
        return None
    return int(local) if not hosts.isdecimal() or int(hosts) * int(local) == world_size else None


# ---- files ---------------------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """The time of one collective of no bytes between two ranks, of each further rank, and the speed."""

    latency_us: float
    per_rank_us: float
    megabytes_per_s: float


def read_costs(path: Path) -> tuple[str, Costs]:
    """The type of device, and the costs in a file.

    Raises:
        ConfigError: it cannot be read, or has a wrong format; the text names the key.
    """
    content = _read(path)
    measured = _table(path, content, "inside")
    between = _table(path, content, "between") if content.get("between") is not None else measured
    speed = measured["all_to_all"].megabytes_per_s  # bytes in a microsecond
    source = f"{path}: {content['source']}"
    inside, outside = _in_bytes(measured, speed), _in_bytes(between, speed)
    return content["device_type"], Costs(source, inside, outside, bytes_per_second=speed * 1e6)


def read_speeds(path: Path) -> dict[str, Any]:
    """The speeds of ranks in a file, as arguments of `Topology`; none in a file of costs alone.

    Raises:
        ConfigError: it cannot be read, or has a wrong format; the text names the key.
    """
    found = _read(path).get("speeds", {})
    if not isinstance(found, dict) or set(found) - set(SPEEDS):
        raise _refused(path, f"speeds has {', '.join(SPEEDS)}, got {found!r}")
    for name, x in found.items():
        if type(x) not in (int, float) or not 0 < x < 1e18:
            raise _refused(path, f"speeds.{name} is a number above 0, got {x!r}")
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _refused(path, f"it cannot be read: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise _refused(path, f"its format is {FORMAT!r}")
    for key in ("device_type", "source"):
        if not isinstance(content.get(key), str):
            raise _refused(path, f"{key} is a text, got {content.get(key)!r}")
    return content


def _in_bytes(table: Mapping[str, Measured], speed: float) -> dict[str, Cost]:
    """The costs of measured collectives, if an all-to-all sends `speed` bytes in a microsecond."""
    return {
        name: Cost(m.latency_us * speed, speed / m.megabytes_per_s, m.per_rank_us * speed) for name, m in table.items()
    }


def _table(path: Path, content: Mapping[str, object], where: str) -> dict[str, Measured]:
    found, table = content.get(where), {}
    for name in COLLECTIVES:
        row = found.get(name) if isinstance(found, dict) else None
        if not isinstance(row, dict) or set(row) != set(Measured._fields):
            raise _refused(path, f"{where}.{name} has {', '.join(Measured._fields)}, got {row!r}")
        for key, x in row.items():
            if type(x) not in (int, float) or not (0 <= x < 1e12) or (key == "megabytes_per_s" and not x):
                raise _refused(path, f"{where}.{name}.{key} is a number of 0 or more, of a speed more, got {x!r}")
        table[name] = Measured(**row)
    return table


def _refused(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path}, the costs of collectives that {VARIABLE} names: {why}. "
        "Fix: write it by shardwise doctor --calibrate --output FILE, or unset the variable."
    )
