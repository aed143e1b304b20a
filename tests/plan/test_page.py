"""Pages of plans: what they show is what the plan says, they load nothing, and names are text."""

from collections.abc import Sequence
from functools import cache
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shardwise import Mesh, Replicate, Shard
from shardwise._pictures.labels import bytes_text
from shardwise._pictures.page import MOST_BARS, WIDTH, Column, heat_map, shown_ranks, sortable
from shardwise.embedding import SGD, EmbeddingBagConfig
from shardwise.errors import PlanError
from shardwise.plan import BatchShape, Link, ModulePlan, TablePlan, Topology, plan_module, plan_tables
from shardwise.plan.page import traffic
from shardwise.plan.table_costs import PHASES
from shardwise.simulation import Simulation, simulate

EVIL = "<script>alert('&quot;')</script>\x1b[31m"
NOT_CLOSED = {"meta"}


class Parsed(HTMLParser):
    """The elements of a page; every element has to be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.texts: list[tuple[str, str]] = []
        self.bars: list[list[tuple[str, float, float]]] = []  # of each bar the name, start and end of its segments
        self.rows: list[list[tuple[str, str | None]]] = []  # of each row of a table the text and the value of its cells
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.seen.append((tag, given))
        self.open += [] if tag in NOT_CLOSED else [tag]
        if given.get("role") == "img":
            self.bars.append([])
        if tag == "rect" and "x" in given:
            self.bars[-1].append(("", float(given["x"]), float(given["x"]) + float(given["width"])))
        if tag == "tr":
            self.rows.append([])
        if tag in {"td", "th"}:
            self.rows[-1].append(("", given.get("data-value")))

    def handle_startendtag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))
        if "rect" in self.open:
            self.bars[-1][-1] = (data, *self.bars[-1][-1][1:])
        elif {"td", "th"} & set(self.open):
            self.rows[-1][-1] = (data, self.rows[-1][-1][1])

    def row(self, name: str) -> dict[str, tuple[str, str | None]]:
        """The row of a sortable table that begins with a name, by the names of its columns."""
        (at,) = [number for number, cells in enumerate(self.rows) if cells[0][0] == name and len(cells) > 3]
        head = next(cells for cells in self.rows[at::-1] if cells[0][0] in {"table", "parameter"})
        return {column: cell for (column, _), cell in zip(head, self.rows[at], strict=True)}


def tables(count: int) -> list[EmbeddingBagConfig]:
    return [EmbeddingBagConfig(50 + 37 * i**2, 8 << i % 3, f"t{i}", feature_names=[f"f{i}"]) for i in range(count)]


def plan(count: int, hosts: int = 1, ranks: int = 4, **options: Any) -> TablePlan:
    machine = Topology.preset("cpu", hosts=hosts, ranks_per_host=ranks // hosts)
    return plan_tables(tables(count), machine, BatchShape(64, 3.0), **{"optimizer": SGD(lr=0.1), **options})


@cache
def default_plan() -> TablePlan:
    return plan(9, allowed={f"t{i}": ["table"] if i == 1 else ["table", "row"] for i in range(9)})


@cache
def module_plan() -> ModulePlan:
    link = Link(1e9, 1e-7)
    slow = Topology(
        1, 4, 1 << 30, link, link, flops=1e9, memory_bandwidth=1e10, lookup_bandwidth=1e9, device_type="cpu"
    )
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        return plan_module(model, slow, (torch.empty(32, 64),))


# ---- any page --------------------------------------------------------------------------------------------------------


@cache
def simulation() -> Simulation:
    plan = {"weight": Shard(0, sizes=[2, 2, 1, 0])}
    return simulate(nn.Linear(7, 5), torch.ones(3, 7), mesh=Mesh((4,)), plan=plan)


@pytest.mark.parametrize("make", [default_plan, module_plan, simulation])
def test_a_notebook_shows_the_page(make: Any) -> None:
    (frame,) = Parsed(make()._repr_html_()).seen
    assert frame[0] == "iframe"
    assert frame[1]["srcdoc"] == make().to_html()


def test_the_page_of_a_simulation_has_the_memory_of_its_classes() -> None:
    page, by_peak = Parsed(simulation().to_html()), sorted(simulation().classes, key=lambda one: -one.peak_bytes)
    assert [[title for title, *_ in bar] for bar in page.bars[: len(by_peak)]] == [
        [f"{role} {bytes_text(n)}" for role, n in one.memory.items() if n] for one in by_peak
    ]
    sent = [float(cells[4][1]) for cells in page.rows if len(cells) == 6 and cells[4][1]]
    assert sum(sent) == by_peak[0].sent_bytes > 0


@pytest.mark.parametrize("make", [default_plan, module_plan, simulation])
def test_a_page_is_one_file_that_loads_nothing(make: Any) -> None:
    text = make().to_html()
    page = Parsed(text)
    assert text == make().to_html()
    assert not {tag for tag, _ in page.seen} & {"link", "img", "iframe", "object", "embed", "base", "form"}
    assert not {name for _, attributes in page.seen for name in attributes} & {"src", "href", "srcset", "onclick"}
    assert "url(" not in text
    assert "@import" not in text
    for tag, attributes in page.seen:
        assert tag != "svg" or attributes.get("aria-label") or attributes.get("aria-hidden")
    assert sum(tag == "h1" for tag, _ in page.seen) == 1


def test_names_are_text_whatever_they_contain() -> None:
    names = [EVIL, "</td></table>", "a" * 300]
    found = [EmbeddingBagConfig(100, 8, name, feature_names=[name]) for name in names]
    page = Parsed(plan_tables(found, Topology.preset("cpu"), BatchShape(8), optimizer=SGD(lr=0.1)).to_html())
    assert sum(tag == "script" for tag, _ in page.seen) == 1
    assert {r"<script>alert('&quot;')</script>\x1b[31m", *names[1:]} <= {cells[0][0] for cells in page.rows if cells}
    html = sortable(Column(EVIL, [EVIL, ""])) + heat_map([EVIL], np.ones((1, 1)), bytes_text, EVIL)
    assert {tag for tag, _ in Parsed(html).seen} & {"script"} == set()


def test_of_many_ranks_the_most_the_least_and_given_ones_are_shown() -> None:
    amounts = np.random.default_rng(0).random((4096, 5))
    note, shown = shown_ranks(amounts, [7, 8])
    sums = amounts.sum(1)
    assert MOST_BARS <= len(shown) <= MOST_BARS + 2
    assert {int(sums.argmax()), int(sums.argmin()), 7, 8} <= set(shown)
    assert (np.diff(sums[shown]) <= 0).all()
    assert note == f" {len(shown)} of 4,096 ranks are shown, from the most to the least."
    assert shown_ranks(amounts[:MOST_BARS]) == ("", list(range(MOST_BARS)))


# ---- tables ----------------------------------------------------------------------------------------------------------


def test_bars_are_the_memory_and_the_phases_of_ranks() -> None:
    planned = default_plan()
    page = Parsed(planned.to_html())
    bars, (largest, *_, last) = page.bars, [text for tag, text in page.texts if tag == "li"][:8]
    assert largest.startswith("t8: ")
    assert last.startswith("2 other tables: ")
    memory, steps = np.array(bars[:4], object), bars[4:]
    ends = np.array([bar[-1][2] for bar in memory.tolist()])
    assert ends / WIDTH == pytest.approx(planned.memory / planned.memory.max(), abs=1e-3)
    for bar in memory.tolist():
        assert [one[2] for one in bar[:-1]] == pytest.approx([one[1] for one in bar[1:]], abs=0.11)
    times = np.array([*planned.phases.values()])
    starts = np.cumsum([0, *times.max(1)])
    for rank, bar in enumerate(steps):
        expected = [(a, a + time) for a, time in zip(starts, times[:, rank], strict=False) if time]
        assert [one[1:] for one in bar] == [pytest.approx(np.array(x) / starts[-1] * WIDTH, abs=0.11) for x in expected]
    assert len(steps) == 4


def test_each_table_has_its_sharding_and_its_runner_up() -> None:
    planned = default_plan()
    page = Parsed(planned.to_html())
    for config in tables(9):
        row, other = page.row(config.name), planned.runner_up(config.name)
        assert row["rows"] == (f"{config.num_embeddings:,}", str(config.num_embeddings))
        assert row["bytes"][1] == str(config.num_embeddings * config.embedding_dim * 4)
        assert row["sharding"][0] == planned.sharding(config.name)
        if other is None:
            assert config.name == "t1"
            assert row["runner-up"] == ("", None)
            assert row["more time"] == ("", "")
        else:
            assert row["runner-up"][0] == other.sharding
            assert float(row["more time"][1] or "") == pytest.approx(other.milliseconds, rel=1e-6, abs=1e-12)
            assert row["more memory"][1] == str(other.memory)


@pytest.mark.parametrize(
    "options", [{"allowed": ["table"]}, {"pinned": {"t0": Replicate()}, "allowed": ["row"]}], ids=["table", "row"]
)
def test_traffic_is_what_ranks_receive_and_what_hosts_exchange(options: Any) -> None:
    planned = plan(3, hosts=3, ranks=6, **options)._planned
    assert planned is not None
    names, amounts = traffic(planned)
    loads = planned.assignment.loads[:, 1:]
    ids, results, gradients = (loads[:, PHASES.index(name)] for name in ("ids", "results", "gradients"))
    assert names == [f"rank {rank}" for rank in range(6)]
    assert (amounts.diagonal() == 0).all()
    # An owner receives ids and gradients, and its results are received by others.
    assert amounts.sum() == pytest.approx(float((ids + results + gradients).sum()))
    for owner in range(6):
        others = np.delete(results, owner).sum() / 5
        assert amounts[:, owner].sum() == pytest.approx(ids[owner] + gradients[owner] + others)
    names, of_hosts = traffic(planned, most=3)
    assert names == ["rank 0-1", "rank 2-3", "rank 4-5"]
    assert of_hosts == pytest.approx(amounts.reshape(3, 2, 3, 2).sum((1, 3)))
    assert traffic(planned, most=2)[0] == ["rank 0-3", "rank 4-5"]


def test_one_rank_and_groups_of_tables_have_a_page() -> None:
    page = Parsed(plan(2, ranks=1).to_html())
    assert len(page.bars) == 2
    grouped = Parsed(plan(3, groups=[["t0", "t2"]]).to_html())
    assert any(name.startswith("t0 + t2 ") for bar in grouped.bars for name, *_ in bar)
    assert grouped.row("t0")["sharding"] == grouped.row("t2")["sharding"]


# ---- modules ---------------------------------------------------------------------------------------------------------


def test_a_module_has_its_memory_its_step_and_the_reasons_of_its_parameters() -> None:
    planned = module_plan()
    assert planned.step is not None
    page = Parsed(planned.to_html())
    memory, step = page.bars
    sizes = [size for size in planned.step.memory.values() if size]
    assert [b - a for _, a, b in memory] == pytest.approx(np.array(sizes) / sum(sizes) * WIDTH, abs=0.11)
    assert step[0][2] / WIDTH == pytest.approx(planned.step.compute / planned.step.seconds, abs=1e-3)
    for reason in planned.reasons:
        row = page.row(reason.names[0])
        assert row["placement"][0] == str(reason.placement)
        assert float(row["more time"][1] or "") == pytest.approx(1e3 * reason.more_seconds, rel=1e-6)
    assert {cells[0][0] for cells in page.rows} >= {f"{a} x {b}" for (a, b), *_ in planned.tried}
    # Equal shares of dim 0 or 1 on the ranks of both axes; replicated ones are divided along the data axis.
    data = planned.mesh.shape[0] if planned.mesh.ndim > 1 else 1
    size = {"0.weight": 65536, "0.bias": 1024, "2.weight": 65536, "2.bias": 256}
    for reason in planned.reasons:
        parts = data if reason.placement == Replicate() else 4
        assert reason.bytes == size[reason.names[0]] / parts


def test_a_plan_without_times_has_no_page(tmp_path: Any) -> None:
    planned = plan(2)
    planned.save(tmp_path / "plan.toml")
    with pytest.raises(PlanError, match="has placements only"):
        TablePlan.load(tmp_path / "plan.toml", tables(2)).to_html()
    with pytest.raises(PlanError, match=r"has no times and no reasons. Fix: plan_module\(…\)\.$"):
        ModulePlan(Mesh((4,)), {}).to_html()
