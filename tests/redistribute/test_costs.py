"""What collectives cost, inside a host and between hosts, and what the planner makes of it."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise import _collectives as collectives
from shardwise import distribute_tensor
from shardwise._cli import calibration, measured_speeds
from shardwise._cli.calibration import Timing, fit, measure, write_costs
from shardwise._collectives.cost_tables import (
    COLLECTIVES,
    GLOO,
    NCCL,
    SPEEDS,
    VARIABLE,
    Cost,
    Costs,
    Measured,
    costs_of,
    ranks_per_host_of,
    read_costs,
    read_speeds,
)
from shardwise._layout import Layout, Mesh, Partial, Placement, Replicate, Shard
from shardwise._redistribute.plan import alternatives, plan_redistribute
from shardwise._redistribute.steps import CommStep
from shardwise.errors import ConfigError, MismatchError
from shardwise.testing import world

FREE = dict.fromkeys(COLLECTIVES, Cost(0, 0))
BYTES = dict.fromkeys(COLLECTIVES, Cost(0, 1))
CROSSING = Costs("what crosses the link of a host", FREE, BYTES, ranks_per_host=2)
SLOW_LINK = replace(GLOO, between={name: Cost(c.latency, 20 * c.per_byte) for name, c in GLOO.inside.items()},
                    ranks_per_host=2)  # fmt: skip
HOSTS = Mesh((2, 2), names=("host", "local"))
OTHER_WAY = Mesh((2, 2), (0, 2, 1, 3), names=("local", "host"))
SHAPE = (1024, 1024)
MB = 4 * 1024 * 1024


def steps(mesh: Mesh, src: list[Placement], dst: list[Placement]) -> tuple[str, ...]:
    plan = plan_redistribute(Layout(mesh, src, SHAPE), Layout(mesh, dst, SHAPE))
    return tuple(f"{step.collective} of {step.group(0)}" for step in plan.comm_steps)


@contextmanager
def using_costs(costs: Costs) -> Iterator[None]:
    """Let this rank plan by these."""
    here = collectives.owner()
    before, here.costs = here.costs, {"cpu": costs}
    here.forget_calls()
    try:
        yield
    finally:
        here.costs = before
        here.forget_calls()


def crossing(mesh: Mesh, *placements: list[Placement]) -> float:
    """Bytes on the link of a host, relative to the tensor, if each change of placements is a plan of its own."""
    with using_costs(CROSSING):
        found = [Layout(mesh, p, SHAPE) for p in placements]
        return sum(plan_redistribute(a, b).cost for a, b in pairwise(found)) / MB


def test_what_crosses_a_link_is_what_was_counted_on_two_hosts() -> None:
    """`benchmarks/two_hosts.py`, of 2 x 2 ranks: 1.51, 2.00, 1.00, 0.76 and 0.25 with headers."""
    p, s, r, c = Partial(), Shard(0), Replicate(), Shard(1)
    all_axes = CommStep(Layout(HOSTS, [p, p], SHAPE), Layout(HOSTS, [r, r], SHAPE), "all_reduce")
    assert CROSSING.of("all_reduce", (0, 1, 2, 3), (0, 1, 2, 3), 4 * all_axes.received.busiest) == 1.5 * MB
    along_host = CommStep(Layout(HOSTS, [p, r], SHAPE), Layout(HOSTS, [r, r], SHAPE), "all_reduce")
    assert CROSSING.of("all_reduce", (0, 2), (0, 1, 2, 3), 4 * along_host.received.busiest) == 2 * MB
    assert crossing(HOSTS, [p, p], [p, s], [r, s], [r, r]) == 1
    gather = CommStep(Layout(HOSTS, [s, s], SHAPE), Layout(HOSTS, [r, r], SHAPE), "all_gather")
    assert CROSSING.of("all_gather", (0, 1, 2, 3), (0, 1, 2, 3), 4 * gather.received.busiest) == 0.75 * MB
    assert crossing(HOSTS, [s, s], [r, r]) < 0.75  # half of the tensor crosses, then ranks of a host exchange it
    assert crossing(HOSTS, [s, c], [c, s]) == pytest.approx(1 / 3)  # as if all ranks exchanged as much


def test_inside_a_host_nothing_crosses() -> None:
    assert crossing(HOSTS, [Shard(0), Partial()], [Shard(0), Replicate()], [Shard(0), Shard(1)]) == 0
    assert crossing(OTHER_WAY, [Partial(), Shard(0)], [Replicate(), Shard(0)]) == 0
    assert crossing(OTHER_WAY, [Shard(0), Partial()], [Shard(0), Replicate()]) == 1


@pytest.mark.parametrize("mesh", [HOSTS, OTHER_WAY], ids=str)
def test_sums_are_scattered_inside_a_host_before_they_cross_a_slow_link(mesh: Mesh) -> None:
    src: list[Placement] = [Partial()] * 2
    dst: list[Placement] = [Replicate()] * 2
    assert steps(mesh, src, dst) == ("all_reduce of (0, 1, 2, 3)",)
    with using_costs(SLOW_LINK):
        found = steps(mesh, src, dst)
        plan = alternatives(Layout(mesh, src, SHAPE), Layout(mesh, dst, SHAPE))[0]
    first, *between, last = [name.split(" of ")[1] for name in found]
    assert (first, last) == ("(0, 1)", "(0, 1)")
    assert set(between) == {"(0, 2)"}
    assert sum(step.received.busiest for step in plan.comm_steps[1:-1]) == 512 * 1024  # of half of the tensor


def test_a_group_that_is_larger_costs_more_for_each_rank() -> None:
    assert NCCL.of("all_gather", range(4096), range(4096), 0) > 100 * NCCL.of("all_gather", range(8), range(8), 0)
    hosts = replace(NCCL, ranks_per_host=8)
    gather = {axis: hosts.of("all_gather", group, range(64), 2**30) for axis, group in
              (("local", range(8)), ("host", range(0, 64, 8)), ("both", range(64)))}  # fmt: skip
    assert gather["local"] < gather["both"] < gather["host"]


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_by_default_all_ranks_are_on_one_host(device_type: str) -> None:
    assert costs_of(device_type, None, None) is {"cpu": GLOO, "cuda": NCCL}[device_type]
    assert costs_of(device_type, None, 8).ranks_per_host == 8
    assert collectives.costs("cpu") is GLOO


@pytest.mark.parametrize(("local", "found"), [("2", 2), ("4", None), ("3", None), ("0", None), ("two", None)])
def test_ranks_per_host_are_those_of_the_launcher(monkeypatch: pytest.MonkeyPatch, local: str, found: int) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert ranks_per_host_of(4) == found


INSIDE = {name: Measured(50.0, 1.5, 1000.0 + i) for i, name in enumerate(COLLECTIVES)}
FAST = {name: 1e9 * (i + 1) for i, name in enumerate(SPEEDS)}
BETWEEN = {name: Measured(200.0, 5.0, 100.0) for name in COLLECTIVES}


def test_what_was_measured_is_read_again(tmp_path: Path) -> None:
    write_costs(tmp_path / "costs.json", "cpu", "a machine", INSIDE, BETWEEN)
    device_type, found = read_costs(tmp_path / "costs.json")
    assert (device_type, found.ranks_per_host) == ("cpu", None)
    assert found.source.endswith("costs.json: a machine")
    assert found.inside["all_to_all"] == Cost(50_000, 1.0, 1500)  # in bytes of an all-to-all
    assert found.inside["broadcast"] == Cost(50_000, 1000 / 1004, 1500)
    assert found.between["all_gather"] == Cost(200_000, 10.0, 5000)
    assert costs_of("cuda", str(tmp_path / "costs.json"), None) is NCCL
    write_costs(tmp_path / "one.json", "cpu", "a machine", INSIDE, None)
    assert read_costs(tmp_path / "one.json")[1].between == read_costs(tmp_path / "one.json")[1].inside
    assert read_speeds(tmp_path / "one.json") == {}
    write_costs(tmp_path / "all.json", "cpu", "a machine", INSIDE, None, speeds=FAST)
    assert read_speeds(tmp_path / "all.json") == FAST


WRONG: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "format": (lambda x: x.update(format="shardwise costs 9"), "its format is 'shardwise costs 1'"),
    "device": (lambda x: x.pop("device_type"), "device_type is a text, got None"),
    "no table": (lambda x: x.pop("inside"), "inside.all_to_all has latency_us, per_rank_us, megabytes_per_s, got None"),
    "no row": (lambda x: x["inside"].pop("broadcast"), "inside.broadcast has .* got None"),
    "a text": (lambda x: x["between"]["broadcast"].update(latency_us="1"), "between.broadcast.latency_us .* got '1'"),
    "no speed": (lambda x: x["inside"]["all_to_all"].update(megabytes_per_s=0), "inside.all_to_all.megabytes_.* got 0"),
    "true": (lambda x: x["inside"]["all_to_all"].update(latency_us=True), "inside.all_to_all.latency_us .* got True"),
}


@pytest.mark.parametrize(("change", "text"), WRONG.values(), ids=WRONG)
def test_a_file_that_is_wrong_is_refused_by_its_key(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], text: str
) -> None:
    path = tmp_path / "costs.json"
    write_costs(path, "cpu", "a machine", INSIDE, BETWEEN)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"costs.json, .* {VARIABLE} names: {text}.*Fix: "):
        read_costs(path)


@pytest.mark.parametrize("speeds", [[1.0], {"speed": 1.0}, {"flops": 0}, {"flops": True}, {"alone": "2"}], ids=str)
def test_speeds_that_no_machine_has_are_refused(tmp_path: Path, speeds: object) -> None:
    path = tmp_path / "costs.json"
    write_costs(path, "cpu", "a machine", INSIDE, None)
    path.write_text(json.dumps({**json.loads(path.read_text()), "speeds": speeds}))
    with pytest.raises(ConfigError, match=r"names: speeds.* got .*Fix: "):
        read_speeds(path)


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"format": NaN}'])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(ConfigError, match="Fix: write it by shardwise doctor"):
        read_costs(tmp_path / "costs.json")
    with pytest.raises(ConfigError, match="it cannot be read"):
        read_costs(tmp_path / "none.json")


def timings(latency: float, per_rank: float, speed: float, sizes: Sequence[int] = (2, 4)) -> list[Timing]:
    found = [(n, num_bytes) for n in sizes for num_bytes in (1e3, 1e5, 1e7)]
    return [Timing(n, b, latency + per_rank * (n - 2) + b / speed) for n, b in found]


@pytest.mark.parametrize("figures", [(50.0, 10.0, 1000.0), (0.0, 3.0, 20.0), (80.0, 0.0, 1e4)])
def test_figures_are_found_again_in_timings(figures: tuple[float, float, float]) -> None:
    assert fit(timings(*figures)) == pytest.approx(Measured(*figures), abs=1e-6)


def test_no_figure_is_negative() -> None:
    faster_with_more_ranks = timings(100.0, -20.0, 1000.0)
    assert min(fit(faster_with_more_ranks)) >= 0
    assert fit(timings(70.0, 0.0, 500.0, sizes=(3,))).per_rank_us == 0
    assert fit([Timing(2, b, 50.0) for b in (1e3, 1e6)]).latency_us == pytest.approx(50)


def quickly(call: Callable[..., Any], *args: object) -> Any:
    """Call it, with measurements that are few and small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "KILOBYTES", (4, 16))
        patch.setattr(calibration, "ROUNDS", 2)
        for name, value in {"ROUNDS": 1, "ROUND_SECONDS": 0.0, "TABLE_BYTES": 1 << 20, "SIDE": 64}.items():
            patch.setattr(measured_speeds, name, value)
        return call(*args)


def measured() -> list[list[object]]:
    inside, between = quickly(measure, "cpu")
    assert between is None
    assert set(inside) == set(COLLECTIVES)
    assert all(m.megabytes_per_s > 0 and m.latency_us >= 0 for m in inside.values())
    return [list(m) for m in inside.values()]


@pytest.mark.processes
def test_all_ranks_measure_the_same() -> None:
    by_rank = world(4, real=True).run(measured)
    assert all(found == by_rank[0] for found in by_rank)


def with_other_costs(path: str) -> str:
    """Rank 1 has a file that the others have not."""
    collectives.owner().costs.clear()
    if collectives.rank() == 1:
        os.environ[VARIABLE] = path
    try:
        with pytest.raises(MismatchError) as error:
            distribute_tensor(torch.ones(4, 2), Mesh((2,)), [Shard(0)])
        return str(error.value)
    finally:
        os.environ.pop(VARIABLE, None)
        collectives.owner().costs.clear()


@pytest.mark.processes
def test_ranks_that_plan_by_other_costs_raise_the_same_error(tmp_path: Path) -> None:
    write_costs(tmp_path / "costs.json", "cpu", "a machine", INSIDE, BETWEEN)
    texts = world(2, real=True).run(with_other_costs, str(tmp_path / "costs.json"))
    for text in texts:
        assert "the costs of collectives" in text
        assert "must be the same on all ranks" in text
        assert f"Fix: set {VARIABLE} to the same file on all hosts" in text
