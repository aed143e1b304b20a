"""The bytes that `explain` names for another parallel style are those of a program with that style."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import DTensor, Mesh, Replicate, Shard, count_comms, distribute_tensor
from shardwise.debug import Explanation, explain
from shardwise.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from shardwise.testing import world

R = Replicate()
COL, COL_D = ColwiseParallel(), ColwiseParallel(use_local_output=False)
ROW, ROW_R, ROW_D = RowwiseParallel(), RowwiseParallel(input_layouts=R), RowwiseParallel(use_local_output=False)


class Block(nn.Module):
    def __init__(self, wide: int, classes: int) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(16, wide), nn.Linear(wide, 16), nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x + self.down(F.gelu(self.up(x))))
        return out


def number(text: str) -> int:
    return int(text.replace(",", ""))


def explained(plan: dict[str, ParallelStyle], module: str, sizes: tuple[int, int, int]) -> tuple[str, int]:
    """The advice for a module, and what all ranks send for its input and output."""
    ranks, wide, classes = sizes

    def body() -> Explanation[Any]:
        model = parallelize_module(Block(wide, classes), Mesh((ranks,), names=("tp",)), plan)
        with explain() as report:
            model(torch.ones(9, 16, requires_grad=True)).square().sum().backward()
        return report

    reports = world(ranks).run(body)
    events = [e for e in reports[0].events if e.cause.operand.endswith(f" of {module}")]
    texts = {e.avoid for e in events if e.total_bytes} - {"", "as in forward"}
    assert len(texts) <= 1
    assert all(f"avoid: {text}" in str(reports[0]) for text in texts)
    return next(iter(texts), ""), sum(e.total_bytes or 0 for e in events)


@pytest.mark.parametrize("sizes", [(4, 64, 96), (2, 48, 32), (3, 49, 50)], ids=str)
@pytest.mark.parametrize(
    ("module", "styles", "advised", "better"),
    [
        ("up", (ROW_R, ROW_R, COL), "ColwiseParallel for up", (COL, ROW, COL)),
        ("head", (COL, ROW, ROW_R), "ColwiseParallel for head", (COL, ROW, COL)),
        ("down", (COL_D, COL_D, COL_D), "RowwiseParallel for down", (COL_D, ROW, COL_D)),
        (
            "head",
            (COL, ROW, ColwiseParallel(output_layouts=R)),
            "ColwiseParallel(use_local_output=False)",
            (COL, ROW, COL),
        ),
        (
            "head",
            (COL, ROW, ColwiseParallel(output_layouts=R, use_local_output=False)),
            "ColwiseParallel(use_local_output=False)",
            (COL, ROW, COL_D),
        ),
        ("down", (COL, ROW, COL), "", (COL, ROW, COL)),
        ("up", (COL, ROW, COL), "", (COL, ROW, COL)),
        ("head", (COL, ROW, COL), "", (COL, ROW, COL)),
    ],
)
def test_the_style_that_is_advised_sends_what_is_said(
    module: str, styles: tuple[ParallelStyle, ...], advised: str, better: tuple[ParallelStyle, ...], sizes: Any
) -> None:
    names = "up", "down", "head"
    text, now = explained(dict(zip(names, styles, strict=True)), module, sizes)
    again, then = explained(dict(zip(names, better, strict=True)), module, sizes)
    assert text.startswith(advised)
    assert bool(text) == bool(advised)
    assert again == "", "the advice leads to a style of which nothing is said"
    if advised:
        found = re.search(r"([\d,]+) bytes for the input and the output of \w+, in place of ([\d,]+)", text)
        assert found is not None
        assert (number(found[1]), number(found[2])) == (then, now)
        assert then < now


def test_the_step_sends_what_is_said_but_for_the_gradient_of_a_bias() -> None:
    def body(bias: bool, down: ParallelStyle) -> tuple[Explanation[Any], int]:
        layers = nn.Sequential(nn.Linear(16, 49), nn.GELU(), nn.Linear(49, 16, bias=bias))
        model = parallelize_module(layers, Mesh((3,), names=("tp",)), {"0": COL_D, "2": down})
        with explain() as report, count_comms() as counts:
            model(torch.ones(9, 16, requires_grad=True)).square().sum().backward()
            assert all(p.grad is not None for p in model.parameters())
        return report, counts.total_bytes

    for bias in (True, False):
        now, then = (world(3).run(body, bias, down) for down in (ColwiseParallel(output_layouts=R), ROW))
        (text,) = {e.avoid for e in now[0][0].events if e.avoid.startswith("RowwiseParallel")}
        assert text.endswith("its output is then replicated, and so is a bias, whose gradient is all-reduced")
        found = re.search(r"([\d,]+) bytes for .*, in place of ([\d,]+)", text)
        assert found is not None
        of_bias = sum(e.total_bytes or 0 for e in then[0][0].events if e.cause.kind == "gradient")
        assert (of_bias > 0) == bias
        less = sum(sent for _, sent in now) - sum(sent for _, sent in then)
        assert less == number(found[2]) - number(found[1]) - of_bias


def test_a_style_that_sends_as_much_is_not_advised() -> None:
    """A square layer with a sharded input: the gathers of the input are as large as the all-reduce of the output."""
    text, sent = explained({"up": COL_D, "down": COL_D, "head": COL_D}, "down", (2, 16, 32))
    assert text == ""
    assert sent == explained({"up": COL_D, "down": ROW, "head": COL_D}, "down", (2, 16, 32))[1] > 0


def test_equal_layers_of_several_blocks_are_one_entry() -> None:
    def body() -> str:
        layers = nn.ModuleDict({str(i): nn.ModuleDict({"up": nn.Linear(16, 16)}) for i in range(2)})
        parallelize_module(layers, Mesh((2,)), {"*.up": ROW_R})
        with explain() as report:
            for layer in layers.values():
                layer["up"](torch.ones(9, 16)).sum()  # type: ignore[index]
        return str(report)

    text = world(2).run(body)[0]
    (entry,) = [line.split() for line in text.splitlines() if "parallelize_module, the output of *.up" in line]
    assert entry[2] == "2"
    assert text.count("avoid: ColwiseParallel for *.up, ") == 1


def test_layers_of_a_sequential_are_advised_apart() -> None:
    """Their paths differ by a number only, as those of equal blocks do."""

    def body(plan: dict[str, ParallelStyle]) -> dict[str, list[int]]:
        layers = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
        with explain() as report:
            parallelize_module(layers, Mesh((2,)), plan)(torch.ones(9, 16, requires_grad=True)).sum().backward()
        texts = {event.avoid for event in report.events} - {"", "as in forward"}
        return {text.partition(" for ")[0]: [number(n) for n in re.findall(r"[\d,]*\d", text)] for text in texts}

    first, last = world(2).run(body, {"0": ROW_R})[0], world(2).run(body, {"2": ColwiseParallel(output_layouts=R)})[0]
    assert first.keys() == {"ColwiseParallel"}
    assert last.keys() == {"ColwiseParallel(use_local_output=False) without output_layouts"}
    assert world(2).run(body, {"0": ROW_R, "2": ColwiseParallel(output_layouts=R)})[0] == {**first, **last}


def test_full_tensor_is_named_with_its_parameter() -> None:
    def body() -> tuple[str, int, int]:
        w = distribute_tensor(torch.arange(12.0).view(4, 3), Mesh((2,)), [Shard(0)])
        model = parallelize_module(nn.Sequential(nn.Linear(4, 6)), Mesh((2,)), {"0": COL})
        with explain() as report:
            model[0].weight.full_tensor()  # type: ignore[operator, union-attr]
            w.sum().item()
            w.full_tensor()
        with count_comms() as full:
            w.full_tensor().sum()
        with count_comms() as shards:
            total = w.sum()
            assert type(total) is DTensor
            assert total.item() == 66
        return str(report), full.total_bytes, shards.total_bytes

    text, full, shards = world(2).run(body)[0]
    assert ": full_tensor, 0.weight\n" in text
    assert ": full_tensor\n" in text
    assert ": item or tolist\n" in text
    assert text.count("avoid: sums and norms work on the shards, without full_tensor(); clip_grad_norm_ for norms") == 2
    assert shards < full
