"""The machine of a plan: hosts, ranks, memory, links, and how fast a rank computes and looks up rows."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite
from pathlib import Path
from types import MappingProxyType

from shardwise._collectives.cost_tables import COLLECTIVES, GLOO, Cost, Costs, read_costs, read_speeds
from shardwise._layout import checked, checked_init
from shardwise.errors import ConfigError, did_you_mean

GIB = 1 << 30


@checked_init
@dataclass(frozen=True)
class Link:
    """A link between ranks.

    Args:
        bytes_per_second: inside a host, of each receiving rank; between hosts, of a host's link.
        latency: seconds of a collective of no bytes between two ranks.
        latency_per_rank: seconds of each further rank.
    """

    bytes_per_second: float
    latency: float
    latency_per_rank: float = 0.0

    def __post_init__(self) -> None:
        _check(self, "Link", positive=("bytes_per_second",), others=("latency", "latency_per_rank"))

    def _costs(self, unit: float) -> dict[str, Cost]:
        """The cost of each collective, in bytes on a link of `unit` bytes per second; an all-reduce has two rounds."""
        once = Cost(self.latency * unit, unit / self.bytes_per_second, self.latency_per_rank * unit)
        twice = once._replace(latency=2 * once.latency, per_rank=2 * once.per_rank)
        return dict.fromkeys(COLLECTIVES, once) | {"all_reduce": twice}


@checked_init
@dataclass(frozen=True)
class Topology:
    """Hosts with equal ranks.

        Topology.preset("H100", hosts=2)
        Topology.preset("A100", ranks_per_host=4, memory=40 << 30)

    Ranks of a host are `ranks_per_host` consecutive ones.

    Args:
        hosts: how many.
        ranks_per_host: how many ranks each has.
        memory: bytes of a rank.
        inside: the links of the ranks of a host.
        between: the link of a host to others.
        flops: floating-point operations of a rank in a second.
        memory_bandwidth: bytes that a rank reads or writes in a second, in order.
        lookup_bandwidth: bytes of rows that a rank looks up in a second.
        device_type: of the ranks: "cuda" or "cpu".
        measured: costs of collectives that replace the links, for example of `shardwise doctor --calibrate`.
        message_bandwidth: bytes per second of sums of rows, and of copies into messages; None: `memory_bandwidth`.
        update_bandwidth: bytes of gradients, rows and states of an update in a second; None: `lookup_bandwidth`.
        alone: how many times as fast a rank is while the others of its host wait, for ranks that share cores.

    Raises:
        ConfigError: an impossible number.
    """

    hosts: int
    ranks_per_host: int
    memory: int
    inside: Link
    between: Link
    flops: float
    memory_bandwidth: float
    lookup_bandwidth: float
    device_type: str = "cuda"
    measured: Costs | None = None
    message_bandwidth: float | None = None
    update_bandwidth: float | None = None
    alone: float = 1.0

    def __post_init__(self) -> None:
        optional = [name for name in ("message_bandwidth", "update_bandwidth") if getattr(self, name) is not None]
        speeds = ("flops", "memory_bandwidth", "lookup_bandwidth", "alone", *optional)
        _check(self, "Topology", positive=("hosts", "ranks_per_host", "memory", *speeds))

    @classmethod
    @checked
    def preset(
        cls, name: str, *, hosts: int = 1, ranks_per_host: int | None = None, memory: int | None = None
    ) -> "Topology":
        """A common machine: A100 (80 GB), H100, H200, or cpu.

        Speeds are those that programs reach, not peaks: 0.6 of the FLOP/s in bfloat16, 0.8 of memory bandwidth, of
        NVLink, and of the network; a lookup of rows reaches half of the memory bandwidth (both shares assumed).
        Latencies are the constants of torch 2.13 (`torch/distributed/tensor/_collective_utils.py`).

        Sources of the peaks: NVIDIA's data sheets of A100 80GB SXM (312 TFLOP/s, 2.039 TB/s, NVLink 300 GB/s each way),
        H100 SXM (989 TFLOP/s, 3.35 TB/s, 450 GB/s each way) and H200 SXM (989 TFLOP/s, 4.8 TB/s, 450 GB/s each way); of
        DGX A100 and DGX H100, with 8 network cards of 200 and of 400 Gbit/s. cpu: gloo on one host, measured at 2 and 4
        ranks on 2 cores; between hosts 10 Gbit/s, assumed.

        Args:
            name: of the machine.
            hosts: how many.
            ranks_per_host: None: 8, of cpu 4.
            memory: bytes of a rank; None: those of the machine.

        Raises:
            ConfigError: an unknown name, or an impossible number.
        """
        known = {key.lower(): value for key, value in PRESETS.items()}
        if name.lower() not in known:
            raise ConfigError(
                f"There is no preset {name!r}.{did_you_mean(name, PRESETS)} Fix: one of {', '.join(PRESETS)}."
            )
        one = known[name.lower()]
        return replace(
            one,
            hosts=hosts,
            ranks_per_host=one.ranks_per_host if ranks_per_host is None else ranks_per_host,
            memory=one.memory if memory is None else memory,
        )

    @checked
    def with_costs_of(self, path: str | Path) -> "Topology":
        """The topology with costs of collectives, and speeds of ranks, measured by `shardwise doctor --calibrate`.

        Without speeds in the file, the topology keeps its own.

        Raises:
            ConfigError: it cannot be read, or was measured on devices of another type.
        """
        device_type, costs = read_costs(Path(path))
        if device_type != self.device_type:
            raise ConfigError(
                f"{path} was measured on {device_type}, and the topology has {self.device_type}. "
                f"Fix: a file of {self.device_type} devices."
            )
        return replace(self, measured=costs, **read_speeds(Path(path)))

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.hosts * self.ranks_per_host

    @cached_property
    def costs(self) -> Costs:
        """The costs of collectives: `costs.seconds` is their time, by which redistributions are planned."""
        per_host = self.ranks_per_host if self.hosts > 1 else None
        if self.measured is not None:
            return replace(self.measured, ranks_per_host=per_host)
        unit = self.inside.bytes_per_second
        inside, between = (link._costs(unit) for link in (self.inside, self.between))
        return Costs("links of the topology", inside, between, per_host, unit)


def _check(of: object, kind: str, positive: tuple[str, ...], others: tuple[str, ...] = ()) -> None:
    for name in (*positive, *others):
        value = getattr(of, name)
        if not isfinite(value) or value < 0 or (name in positive and not value):
            expected = "a finite number above 0" if name in positive else "a finite number of 0 or more"
            raise ConfigError(f"{kind}: {name} is {value}, expected {expected}. Fix: that of the machine.")


def _gpu(memory: int, flops: float, memory_bandwidth: float, nvlink: float, network: float) -> Topology:
    """A host of 8 GPUs, from peaks: FLOP/s, bytes per second of memory, of NVLink each way, of all network cards."""
    return Topology(
        hosts=1,
        ranks_per_host=8,
        memory=memory,
        inside=Link(0.8 * nvlink, 7.2e-6, 0.6e-6),
        between=Link(0.8 * network, 9.3e-6, 2.7e-6),
        flops=0.6 * flops,
        memory_bandwidth=0.8 * memory_bandwidth,
        lookup_bandwidth=0.4 * memory_bandwidth,
    )


_CPU = Topology(
    hosts=1,
    ranks_per_host=4,
    memory=16 * GIB,
    inside=Link(GLOO.bytes_per_second, 52e-6),
    between=Link(1.25e9, 210e-6),
    flops=5e10,
    memory_bandwidth=8e9,
    lookup_bandwidth=8e9,
    device_type="cpu",
    measured=GLOO,
    message_bandwidth=2.5e9,
    update_bandwidth=6e9,
)
PRESETS: Mapping[str, Topology] = MappingProxyType({
    "A100": _gpu(80 * 10**9, 312e12, 2.039e12, 300e9, 8 * 25e9),
    "H100": _gpu(80 * 10**9, 989e12, 3.35e12, 450e9, 8 * 50e9),
    "H200": _gpu(141 * 10**9, 989e12, 4.8e12, 450e9, 8 * 50e9),
    "cpu": _CPU,
})  # fmt: skip
