"""The bytes that `explain` names for other layouts are those that a program sends which has these layouts."""

import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import (
    DTensor,
    Mesh,
    Partial,
    Placement,
    Replicate,
    Shard,
    count_comms,
    distribute_tensor,
    shard_module,
)
from shardwise.debug import Explanation, explain
from shardwise.debug.alternatives import OperandCall, Times
from shardwise.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module
from shardwise.testing import world

S0, S1, R = Shard(0), Shard(1), Replicate()


ONCE = Times(forward=1, backward=1, read=1)
PLACEMENTS: dict[str, Placement] = {f"[{p}]": p for p in (S0, S1, R)}


def number(text: str) -> int:
    return int(text.replace(",", ""))


def advice_of(report: Explanation[Any], op: str) -> str:
    """The advice for the entry of an op's forward; empty if there is none."""
    lines = str(report).splitlines()
    at = next(i for i, line in enumerate(lines) if f": {op}, " in line)
    advice = next((line for line in lines[at + 1 : at + 4] if "avoid:" in line), "avoid: ")
    return advice.split("avoid: ")[1]


def explained(ranks: int, make: Callable[[], Callable[[], object]], op: str) -> str:
    """The advice for an op in the call of what `make` returns."""
    texts = set(world(ranks).run(lambda: advice_of(explain(make()), op)))
    (text,) = texts
    return text


def sent(ranks: int, make: Callable[[], Callable[[], object]]) -> int:
    """Bytes that all ranks send in the call of what `make` returns."""

    def counted() -> int:
        step = make()
        with count_comms() as counts:
            step()
        return counts.total_bytes

    return sum(world(ranks).run(counted))


class Scaled(nn.Module):
    def __init__(self, rows: int, columns: int, times: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(rows, columns))
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = x.sin() * self.scale
        return x


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize(
    ("ranks", "shape", "times"), [(2, (4, 6), 1), (3, (7, 5), 3), (4, (300, 512), 2), (4, (5, 3), 1)]
)
def test_each_placement_of_a_parameter_sends_what_is_said(
    ranks: int, shape: tuple[int, int], times: int, backward: bool
) -> None:
    def make(placement: Placement) -> Callable[[], object]:
        mesh = Mesh((ranks,))
        model = shard_module(Scaled(*shape, times), {"scale": placement}, mesh=mesh)
        x = distribute_tensor(torch.ones(shape), mesh, [S0])

        def step() -> None:
            with torch.set_grad_enabled(backward):
                out = model(x).sum()
            if backward:
                out.backward()
                assert model.scale.grad is not None

        return step

    text = explained(ranks, lambda: make(S1), "mul")
    assert number(text.rpartition("in place of ")[2].split(", ")[0]) == sent(ranks, lambda: make(S1))
    named = re.findall(r"(\[[^]]*\]) in the plan: ([\d,]+) bytes", text)
    assert ("[Shard(0)]", "0") in named
    for placement, promised in named:
        assert number(promised) == sent(ranks, lambda p=placement: make(PLACEMENTS[p]))  # type: ignore[misc]
    assert ("gradients included" in text) == backward


@pytest.mark.filterwarnings("ignore:linear. .*is sharded on mesh axis:UserWarning")
@pytest.mark.parametrize(("ranks", "op"), [(2, "linear"), (3, "mul"), (4, "linear"), (4, "mul")])
def test_a_parameter_that_no_layout_helps_is_replicated_or_fully_sharded_in_fewer_collectives(
    ranks: int, op: str
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(361, 361, bias=False) for _ in range(3)])
            self.scale = nn.Parameter(torch.ones(361), requires_grad=op == "mul")  # beside large ones

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x * self.scale

    def make(how: str) -> Callable[[], object]:
        mesh, model = Mesh((ranks,)), Net()
        if how == "units":
            fully_shard(model, mesh=mesh)
        else:
            names = "layers.*.weight" if op == "linear" else "scale"
            shard_module(model, {names: S0 if how == "now" else R}, mesh=mesh)
        x = distribute_tensor(torch.ones(2400, 361), mesh, [S0])

        def step() -> None:
            model(x).sum().backward()
            for p in model.parameters():
                assert p.grad is not None or not p.requires_grad

        return step

    def calls(how: str) -> int:
        def counted() -> int:
            step = make(how)
            with count_comms() as counts:
                step()
            return counts.total_calls

        return world(ranks).run(counted)[0]

    text = explained(ranks, lambda: make("now"), op)
    units = "; or fully_shard(module), which keeps it sharded" if op == "linear" else ""
    assert text == f"[Replicate()] in the plan, which sends as much in fewer collectives{units}"
    assert sent(ranks, lambda: make("R")) == sent(ranks, lambda: make("now"))
    assert calls("R") < calls("now")
    if units:
        assert calls("units") < calls("now")


@pytest.mark.parametrize(("ranks", "times"), [(2, 2), (3, 2), (4, 3)])
def test_a_tensor_that_several_ops_redistribute_is_redistributed_once_for_what_is_said(ranks: int, times: int) -> None:
    def make(how: str) -> Callable[[], object]:
        x = distribute_tensor(torch.ones(600, 8), Mesh((ranks,)), [S0])
        w = distribute_tensor(torch.ones(8, 4), Mesh((ranks,)), [R if how == "made" else S0]).requires_grad_()

        def step() -> None:
            used = w.redistribute(placements=[R]) if how == "once" else w
            torch.stack([(x @ used).sum() for _ in range(times)]).sum().backward()
            assert w.grad is not None

        return step

    text = explained(ranks, lambda: make("now"), "matmul")
    assert number(text.rpartition("in place of ")[2].split(", ")[0]) == sent(ranks, lambda: make("now"))
    once = re.search(r"redistribute\(placements=\[Replicate\(\)\]\) of operand 1 once before: ([\d,]+) bytes", text)
    assert once is not None
    assert number(once[1]) == sent(ranks, lambda: make("once"))
    made = re.search(r"\[Replicate\(\)\] where it is made: ([\d,]+) bytes", text)
    assert made is not None
    assert number(made[1]) == sent(ranks, lambda: make("made"))


def test_a_tensor_that_one_op_redistributes_is_not_to_be_redistributed_before() -> None:
    def make() -> Callable[[], object]:
        x, y = (distribute_tensor(torch.ones(6, 4), Mesh((2,)), [p]) for p in (S0, S1))
        return lambda: (x * y, x * y.cos())

    assert explained(2, make, "mul") == "[Shard(0)] where it is made: 0 bytes, in place of 96"


@pytest.mark.parametrize(("rows", "columns"), [(9, 12), (900, 12), (9, 1200)])
@pytest.mark.parametrize(("left", "right"), [(S0, S0), (S1, S1), (S0, S1), (S1, R)], ids=str)
def test_every_alternative_runs_as_now_and_sends_what_is_said(
    rows: int, columns: int, left: Placement, right: Placement
) -> None:
    def make(*placements: Placement) -> tuple[Callable[[], Any], DTensor, DTensor]:
        x, y = (
            distribute_tensor(torch.ones(shape), Mesh((3,)), [p]).requires_grad_()
            for shape, p in zip(((rows, 6), (6, columns)), placements, strict=True)
        )
        return lambda: x @ y, x, y

    def outcome(*placements: Placement) -> tuple[int, Any, tuple[Any, ...]]:
        """What is sent, the layout of the result, and those in which the op needs its operands."""
        product, x, y = make(*placements)
        with explain() as report, count_comms() as counts:
            out = product()
            out.sum().backward()
            assert [x.grad, y.grad]
        needed = {e.cause.operand: e.dst for e in report.events if e.cause.op == "matmul" and not e.cause.backward}
        layouts = tuple(needed.get(f"operand {i}", t.layout_) for i, t in enumerate((x, y)))
        return counts.total_bytes, out.layout_, layouts

    def alternatives() -> list[tuple[int, Placement, int]]:
        product, x, y = make(left, right)
        with explain() as report:
            product()
        call = OperandCall.of(torch.matmul, (x, y), {})
        moved = [(e, e.dst) for e in report.events if e.cause.op == "matmul" and e.dst is not None]
        at = {int(e.cause.operand.removeprefix("operand ")): dst for e, dst in moved}
        return [
            (i, other.layout.placements[0], other.sent_bytes - call.sent_bytes(i, call.operands[i].layout, dst, ONCE))
            for i, dst in at.items()
            for other in call.alternatives(i, dst, ONCE)
        ]

    def total(*placements: Placement) -> tuple[int, Any, tuple[Any, ...]]:
        found = world(3).run(lambda: outcome(*placements))
        return sum(sent for sent, *_ in found), *found[0][1:]

    now, *layouts = total(left, right)
    for i, placement, difference in world(3).run(alternatives)[0]:
        sent, *others = total(*(placement if i == j else p for j, p in enumerate((left, right))))
        assert (others, sent) == (layouts, now + difference), (i, placement)


@pytest.mark.parametrize("shape", [(8, 6), (5, 7), (512, 600)])
def test_a_sum_is_reduced_to_shards_for_what_is_said(shape: tuple[int, int]) -> None:
    def make(placement: Placement | None) -> Callable[[], object]:
        mesh = Mesh((4,))
        x = DTensor.from_local(torch.ones(shape), mesh, [Partial()], run_check=False).requires_grad_()

        def step() -> None:
            used = x if placement is None else x.redistribute(placements=[placement])
            used.sin().sum().backward()

        return step

    text = explained(4, lambda: make(None), "sin")
    found = re.fullmatch(
        r"\.redistribute\(placements=(\[.*\])\) of operand 0: the step sends ([\d,]+) bytes less, gradients included",
        text,
    )
    assert found is not None
    assert sent(4, lambda: make(None)) - sent(4, lambda: make(PLACEMENTS[found[1]])) == number(found[2]) > 0


class Heads(nn.Module):
    def __init__(self, heads: int, size: int) -> None:
        super().__init__()
        self.heads, self.size = heads, size
        self.up, self.down = nn.Linear(6, heads * size), nn.Linear(heads * size, 6)

    def forward(self, x: Tensor) -> Tensor:
        by_head = self.up(x).view(len(x), self.heads, self.size).softmax(-1)
        out: Tensor = self.down(by_head.flatten(1))
        return out


def test_heads_that_are_split_are_not_redistributed_in_the_units_that_are_said() -> None:
    def step(unit: int = 1) -> None:
        mesh = Mesh((4,))
        plan = {"up": ColwiseParallel(use_local_output=False, unit=unit), "down": RowwiseParallel(unit=unit)}
        model = parallelize_module(Heads(3, 4), mesh, plan)
        model(torch.ones(2, 6)).sum().backward()

    def outcome(unit: int = 1) -> tuple[str, int]:
        report = explain(step, unit)
        moved = [event for event in report.events if event.cause.op in ("view", "linear") and event.total_bytes]
        return (advice_of(report, "view") if moved else "", len(moved))

    text, moved = world(4).run(outcome)[0]
    assert moved
    assert text.startswith("shard sizes in multiples of 4, as by unit=4 of ColwiseParallel or RowwiseParallel: 0 bytes")
    assert world(4).run(lambda: outcome(4))[0] == ("", 0)


def laid_out(placement: Placement, *shape: int) -> DTensor:
    values = torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape)
    return distribute_tensor(values, Mesh((3,)), [placement]).requires_grad_()


def of_input(right: bool) -> Any:
    return laid_out(S0 if right else S1, 8, 31).cos().relu()


def of_parameter(right: bool) -> Any:
    scale = laid_out(S1 if right else S0, 31, 8)
    scale._name = "scale"
    return scale.cos().t()


def of_linear(right: bool) -> Any:
    y: Any = F.linear(laid_out(S0, 31, 6), laid_out(R, 8, 6))
    return (y.redistribute(placements=[S1]) if right else y).relu().unsqueeze(1).transpose(0, 2).squeeze(1)


def of_redistribute(right: bool) -> Any:
    return laid_out(R, 31, 8).redistribute(placements=[S1 if right else S0]).cos().t()


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (of_input, r"\[Shard\(0\)\] where operand 0 of cos \(.* in of_input\) is made"),
        (of_parameter, r"\[Shard\(1\)\] for scale in the plan"),
        (of_linear, r"have linear \(.* in of_linear\) give \[Shard\(1\)\]"),
        (of_redistribute, r"have redistribute \(.* in of_redistribute\) give \[Shard\(1\)\]"),
    ],
)
def test_the_place_where_the_layout_is_chosen_is_named(made: Callable[[bool], Any], text: str) -> None:
    """Behind elementwise ops and reshapes, with the placement that is needed there."""

    def body(right: bool) -> tuple[str, int]:
        with explain() as report:
            (made(right) * laid_out(S0, 8, 31)).sum().backward()
        events = [event for event in report.events if event.cause.op == "mul"]
        return next((event.avoid for event in events), ""), sum(event.total_bytes or 0 for event in events)

    (advised, sent), (_, then) = world(3).run(body, False)[0], world(3).run(body, True)[0]
    found = re.fullmatch(text + r": 0 bytes, in place of ([\d,]+), gradients included", advised)
    assert found is not None, advised
    assert number(found[1]) == sent > then == 0


def test_what_would_only_be_replicated_elsewhere_is_not_advised_nor_referred_to() -> None:
    def body() -> list[str]:
        x, w = (distribute_tensor(torch.ones(shape), Mesh((2,)), [p]) for shape, p in ((6, R), ((8, 6), S0)))
        with explain() as report:
            y = F.linear(x, w.requires_grad_()).relu()
            torch.outer(y, y).sum().backward()
        return [event.avoid for event in report.events if event.cause.op == "mul.Tensor" and event.total_bytes]

    assert world(2).run(body)[0] == ["", ""]


def test_backward_refers_to_the_advice_of_its_forward() -> None:
    def body() -> str:
        mesh = Mesh((2,))
        x, y = (distribute_tensor(torch.ones(4, 6), mesh, [p]).requires_grad_() for p in (S0, S1))
        with explain() as report:
            (x * y).sum().backward()
        return str(report)

    lines = [line.strip() for line in world(2).run(body)[0].splitlines() if "avoid:" in line]
    assert len(lines) == 2
    assert "where it is made: 0 bytes" in lines[0]
    assert lines[1] == "avoid: as in forward"


def test_a_report_can_be_sent_to_another_process_and_says_the_same() -> None:
    def body() -> tuple[str, bytes]:
        mesh = Mesh((4,))
        x, y = (distribute_tensor(torch.ones(5, 6), mesh, [p]) for p in (S0, S1))
        with explain() as report:
            x * y
        return str(report), pickle.dumps(report)

    text, stored = world(4).run(body)[0]
    assert "where it is made: 0 bytes" in text
    assert "Unbalanced" in text
    assert str(pickle.loads(stored)).partition("\n")[2] == text.partition("\n")[2]  # noqa: S301 - made above
