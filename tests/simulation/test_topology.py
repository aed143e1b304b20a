"""Topologies: their presets, times of collectives, and what they refuse."""

from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise._cli.calibration import write_costs
from shardwise._collectives.cost_tables import COLLECTIVES, GLOO, Measured
from shardwise.errors import ConfigError
from shardwise.plan import Link, Topology

LINK = Link(1e9, 1e-6)


def topology(**fields: object) -> Topology:
    good: dict[str, object] = {
        "hosts": 2, "ranks_per_host": 4, "memory": 100, "inside": LINK, "between": Link(1e8, 1e-5), "flops": 1e12,
        "memory_bandwidth": 1e12, "lookup_bandwidth": 1e11,
    }  # fmt: skip
    return Topology(**{**good, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["A100", "H100", "H200", "cpu"])
def test_presets_have_memory_and_speeds_and_any_number_of_hosts(name: str) -> None:
    one = Topology.preset(name, hosts=3, ranks_per_host=2, memory=5 << 30)
    assert (one.ranks, one.memory) == (6, 5 << 30)
    assert one.device_type == ("cpu" if name == "cpu" else "cuda")
    assert one.lookup_bandwidth <= one.memory_bandwidth
    assert Topology.preset(name.lower()) == Topology.preset(name)


def test_gpus_reach_the_documented_shares_of_their_peaks() -> None:
    one = Topology.preset("H100")
    assert (one.flops, one.memory_bandwidth) == pytest.approx((0.6 * 989e12, 0.8 * 3.35e12))
    assert one.lookup_bandwidth == pytest.approx(0.5 * one.memory_bandwidth)
    assert (one.inside.bytes_per_second, one.between.bytes_per_second) == pytest.approx((360e9, 0.8 * 8 * 400e9 / 8))


def test_a_collective_takes_its_latency_and_its_bytes_over_the_link() -> None:
    costs = topology().costs
    assert costs.seconds("all_gather", (0, 1), (0, 1), 1e6) == pytest.approx(1e-6 + 1e-3)
    assert costs.seconds("all_reduce", (0, 1), (0, 1), 0) == pytest.approx(2e-6)
    # A ring through both hosts crosses the link of a host once; an all-to-all sends half of 8 ranks' bytes over it.
    assert costs.seconds("all_gather", range(8), range(8), 1e6) == pytest.approx(1e-5 + 1e-2)
    assert costs.seconds("all_to_all", range(8), range(8), 7e5) == pytest.approx(1e-5 + 4 * 4 * 1e5 / 1e8)


def test_ranks_of_one_host_use_no_link_between_hosts() -> None:
    assert topology(hosts=1).costs.ranks_per_host is None
    assert topology(hosts=1).costs.seconds("all_gather", range(4), range(4), 1e6) == pytest.approx(1e-6 + 1e-3)


def test_measured_costs_replace_the_links(tmp_path: Path) -> None:
    table = {name: Measured(10, 1, 500) for name in COLLECTIVES}
    write_costs(tmp_path / "costs.json", "cpu", "here", table, None)
    measured = Topology.preset("cpu", hosts=2).with_costs_of(tmp_path / "costs.json")
    assert measured.costs.seconds("all_gather", (0, 1), (0, 1), 5e8) == pytest.approx(1 + 10e-6)
    assert measured.costs.ranks_per_host == 4
    assert measured.lookup_bandwidth == Topology.preset("cpu").lookup_bandwidth
    speeds = {"flops": 2e12, "lookup_bandwidth": 3e9, "update_bandwidth": 4e9, "alone": 2.5}
    write_costs(tmp_path / "speeds.json", "cpu", "here", table, None, speeds=speeds)
    faster = Topology.preset("cpu").with_costs_of(tmp_path / "speeds.json")
    assert {name: getattr(faster, name) for name in speeds} == speeds
    with pytest.raises(ConfigError, match="was measured on cpu, and the topology has cuda"):
        Topology.preset("A100").with_costs_of(tmp_path / "costs.json")


def test_the_cpu_preset_has_the_costs_by_which_redistributions_are_planned() -> None:
    costs = Topology.preset("cpu").costs
    assert (costs.inside, costs.between) == (GLOO.inside, GLOO.between)


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "no bandwidth": (lambda: Link(0.0, 1e-6), "Link: bytes_per_second is 0.0, expected a finite number above 0"),
    "negative latency": (lambda: Link(1e9, -1e-6), "Link: latency is -1e-06, expected a finite number of 0 or more"),
    "infinite": (lambda: Link(float("inf"), 0.0), "Link: bytes_per_second is inf, expected a finite number above 0"),
    "no hosts": (lambda: topology(hosts=0), "Topology: hosts is 0, expected a finite number above 0"),
    "no memory": (lambda: topology(memory=-1), "Topology: memory is -1, expected a finite number above 0"),
    "no updates": (lambda: topology(update_bandwidth=0.0), "Topology: update_bandwidth is 0.0, expected a finite "),
    "no lookups": (lambda: topology(lookup_bandwidth=0.0), "Topology: lookup_bandwidth is 0.0, expected "),
    "unknown": (lambda: Topology.preset("H10"), "There is no preset 'H10'. Did you mean 'H100'? Fix: one of A100, "),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_machine_that_there_is_not_is_one_sentence(case: str) -> None:
    make, text = WRONG[case]
    with pytest.raises(ConfigError) as error:
        make()
    assert str(error.value).startswith(text)
