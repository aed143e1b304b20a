"""The page of a simulation shows its numbers, stays small, and treats every name as text."""

import re
import xml.etree.ElementTree as ET  # what is parsed was made here
from collections import Counter

import pytest
import torch
from torch import nn

from shardwise import Mesh, Shard
from shardwise.collectives.cost_tables import costs_of
from shardwise.models import ModelArgs
from shardwise.pictures.labels import bytes_text
from shardwise.simulation import Collective, RankClass, Simulation, simulate
from shardwise.simulation.page import SHOWN_BARS, Bar, page, patterns
from shardwise.simulation.shapes import Options, transformer
from tests.pictures.test_page import check_page

SVG = "{http://www.w3.org/2000/svg}"
COSTS = costs_of("cpu", None, None)
MESH = Mesh((4, 2), names=("dp", "tp"))
ROWS, COLUMNS = (0, 2, 4, 6), (0, 1)


def made(*collectives: Collective, **memory: int) -> Simulation:
    return Simulation(MESH, (RankClass(tuple(range(8)), memory, collectives),), COSTS)


def drawings(text: str) -> list[ET.Element]:
    return [ET.fromstring(svg) for svg in re.findall("<svg.*?</svg>", text)]  # noqa: S314 - not from elsewhere


def bars(drawing: ET.Element) -> list[tuple[float, float, str]]:
    """Of each bar: y, width, and what it says."""
    found = [
        (float(r.get("y", "")), float(r.get("width", "")), r.findtext(f"{SVG}title"))
        for r in drawing.iter(f"{SVG}rect")
    ]
    return [(y, width, said) for y, width, said in found if said and " B" in said]


def rows(text: str) -> list[list[str]]:
    (table,) = re.findall("<tbody>(.*?)</tbody>", text)
    return [re.findall("<td[^>]*>(.*?)</td>", row) for row in table.split("</tr>") if row]


@pytest.fixture(scope="module")
def trained() -> Simulation:
    args = ModelArgs(n_layers=3, vocab_size=64, dim=16, n_heads=4, dropout_p=0.0, weight_tying=False)
    options = Options(context=8, sequence_parallel=True, fully_shard=True)
    return simulate(lambda mesh: transformer(args, options, mesh), mesh=MESH)


def test_the_numbers_are_those_of_the_simulation(trained: Simulation) -> None:
    text = page(trained)
    check_page(text)
    memory, timeline = drawings(text)
    (one,) = trained.classes
    assert {
        said.split(":")[0]: int(re.findall(r"([\d,]+) B", said)[-1].replace(",", "")) for _, _, said in bars(memory)
    } == {role: size for role, size in one.memory.items() if size}
    widths = [width for _, width, _ in bars(memory)]
    assert widths == pytest.approx([920 * size / one.peak_bytes for size in one.memory.values() if size], abs=0.1)

    calls, sent = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for x in one.collectives:
        for key in ((trained.axes(x), "backward" if x.backward else "forward, update"), ("all", "")):
            calls[key] += 1
            sent[key] += x.sent_bytes
    shown = {(axes, name): (calls, sent) for axes, name, calls, sent, _ in rows(text)}
    assert shown == {key: (f"{calls[key]:,}", bytes_text(sent[key])) for key in calls}
    assert rows(text)[-1][:4] == ["all", "", str(len(one.collectives)), bytes_text(one.sent_bytes)]

    said = " ".join(text for _, _, text in bars(timeline))
    assert {x.kind for x in one.collectives} == {text.split()[0] for _, _, text in bars(timeline)}
    assert "layers.*: attention_norm.weight" in said
    assert "layers.0" not in said


def test_memory_is_relative_to_the_highest_peak() -> None:
    model, plan = nn.Linear(3, 10), {"weight": Shard(0), "bias": Shard(0)}
    found = simulate(model, torch.ones(2, 3), mesh=Mesh((4,)), plan=plan)
    assert len(found.classes) == 2
    text = page(found)
    check_page(text)
    tops: dict[float, float] = {}
    for y, width, _ in bars(drawings(text)[0]):
        tops[y] = tops.get(y, 0) + width
    few, many = sorted(one.peak_bytes for one in found.classes)
    assert sorted(tops.values()) == pytest.approx([920 * few / many, 920], abs=0.5)


def test_forward_is_apart_from_backward_in_order_and_in_proportion() -> None:
    sizes = [1 << 20, 3 << 20, 2 << 20]
    one, two, three = (
        Collective("all_gather", ranks, f"op {i}", size, size, backward=i == 1)
        for i, (ranks, size) in enumerate(zip((ROWS, COLUMNS, ROWS), sizes, strict=True))
    )
    simulation = made(one, two, three)
    found = bars(drawings(page(simulation))[1])
    assert [said.split(";")[0] for _, _, said in found] == [
        "all_gather on dp: op 0",
        "all_gather on tp: op 1",
        "all_gather on dp: op 2",
    ]
    assert found[0][0] == found[2][0] < found[1][0]
    costs = [simulation.cost(x) for x in (one, two, three)]
    assert [width for _, width, _ in found] == pytest.approx([920 * cost / sum(costs) for cost in costs], abs=0.1)


def bar(cause: str) -> Bar:
    return Bar("dp", "all_gather", cause, 1, False, 1.0)


@pytest.mark.parametrize(
    ("causes", "folded"),
    [
        ("", []),
        ("a", [("a", 1)]),
        ("aaaa", [("a", 4)]),
        ("xabcabcabcy", [("x", 1), ("abc", 3), ("y", 1)]),
        ("aabaab", [("aab", 2)]),
        ("abcd", [("a", 1), ("b", 1), ("c", 1), ("d", 1)]),
        ("abababa", [("ab", 3), ("a", 1)]),
    ],
)
def test_what_repeats_is_a_pattern(causes: str, folded: list[tuple[str, int]]) -> None:
    found = list(patterns([bar(x) for x in causes]))
    assert [("".join(x.cause for x in one.bars), one.times) for one in found] == folded


def test_layers_do_not_make_a_page_longer() -> None:
    def with_layers(count: int) -> str:
        forward = [Collective("all_gather", ROWS, f"layers.{i}", 1 << 20) for i in range(count)]
        backward = [Collective("reduce_scatter", ROWS, f"layers.{i}", 1 << 20, backward=True) for i in range(count)]
        return page(made(*forward, *backward))

    few, many = with_layers(8), with_layers(800)
    assert abs(len(many) - len(few)) < 40
    assert many.count(">× 800<") == 2


def test_a_long_timeline_ends_somewhere_and_says_so() -> None:
    steps = [Collective("all_gather", ROWS, f"op {i}", i) for i in range(SHOWN_BARS + 5)]
    text = page(made(*steps))
    check_page(text)
    assert len(bars(drawings(text)[1])) == SHOWN_BARS
    assert "5 later collectives of the step are not drawn" in text
    assert "not drawn" not in page(made(*steps[:-5]))


def test_many_classes_end_somewhere_and_say_so() -> None:
    classes = tuple(RankClass((rank,), {"parameters": rank}, ()) for rank in range(20))
    text = page(Simulation(Mesh((20,)), classes, COSTS))
    assert "Of 20 classes the 16 with the highest peaks are shown" in text
    assert text.count("<h2>Communication of rank ") == 16
    assert "of rank 19<" in text
    assert "of rank 3<" not in text


def test_names_are_text_whatever_they_contain() -> None:
    evil = "</title><script>document.title='broken'</script>"
    text = page(made(Collective("all_gather", ROWS, evil, 1)))
    check_page(text)
    assert "<script" not in text


def test_nothing_sent_and_nothing_held() -> None:
    text = page(made())
    check_page(text)
    assert "Nothing is sent." in text
