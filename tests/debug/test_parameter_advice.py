"""The layout of another parameter of an op that `explain` names sends what is said, and computes the same."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise import DTensor, Mesh, Placement, Replicate, Shard, count_comms, distribute_tensor, shard_module
from shardwise.debug import Explanation, explain
from shardwise.testing import world

S0, S1, R = Shard(0), Shard(1), Replicate()
Placements = Sequence[Placement]
BY_NAME: dict[str, Placement] = {str(p): p for p in (S0, S1, R)}


class MLP(nn.Module):
    def __init__(
        self, narrow: int, wide: int, act: Callable[[Tensor], Tensor], after: Mapping[str, Placements]
    ) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(narrow, wide), nn.Linear(wide, narrow)
        self.act, self.after = act, after

    def forward(self, x: Tensor) -> Tensor:
        return self._layer("down", self.act(self._layer("up", x)))

    def _layer(self, name: str, x: Tensor) -> Tensor:
        y = getattr(self, name)(x)
        out: Tensor = y.redistribute(placements=self.after[name]) if name in self.after else y
        return out


@dataclass(frozen=True)
class Program:
    """Attributes:
    reruns: forward is run again in backward (activation checkpointing).
    after: to what the results of layers are redistributed.
    """

    mesh: tuple[int, ...]
    batch: Placements
    plan: Mapping[str, Placements]
    sizes: tuple[int, int, int]  # of the batch, of what is narrow, and of what is wide
    act: Callable[[Tensor], Tensor] = F.gelu
    backward: bool = True
    reruns: bool = False
    after: Mapping[str, Placements] = field(default_factory=dict)

    def make(self) -> Callable[[], DTensor]:
        torch.manual_seed(0)
        mesh, (rows, narrow, wide) = Mesh(self.mesh), self.sizes
        model = shard_module(MLP(narrow, wide, self.act, self.after), self.plan, mesh=mesh)
        x = distribute_tensor(torch.linspace(-1, 1, rows * narrow).view(rows, narrow), mesh, self.batch)

        def step() -> DTensor:
            with torch.set_grad_enabled(self.backward):
                out = x.tanh() + checkpoint(model, x, use_reentrant=False) if self.reruns else model(x)
                if self.backward:
                    out.sum().backward()
                    assert all(p.grad is not None for p in model.parameters())
            assert type(out) is DTensor
            return out

        return step

    def run(self) -> tuple[int, Tensor]:
        """Bytes that all ranks send, and the result."""

        def body() -> tuple[int, Tensor]:
            step = self.make()
            with count_comms() as counts:
                out = step()
            return counts.total_bytes, out.full_tensor()

        found = world(torch.Size(self.mesh).numel()).run(body)
        return sum(sent for sent, _ in found), found[0][1]

    def report(self) -> Explanation[Any]:
        return world(torch.Size(self.mesh).numel()).run(lambda: explain(self.make()))[0]

    def advised(self) -> list["Advice"]:
        texts = {event.avoid for event in self.report().events if "the step sends" in event.avoid}
        found = [ADVICE.search(text) for text in texts]
        return [Advice(*match.groups()) for match in found if match is not None]


ADVICE = re.compile(
    r"(\[[^]]*\]) for (\S+) in the plan(?: and \.redistribute\(placements=(\[[^]]*\])\) of the result|, whose result "
    r"is then (\[[^]]*\]))?: the step sends ([\d,]+) bytes less"
)


@dataclass(frozen=True)
class Advice:
    placements: str
    name: str
    redistributed: str | None
    changed: str | None
    less: str

    def followed(self, program: Program) -> Program:
        after = {**program.after}
        if self.redistributed:
            after[self.name.partition(".")[0]] = parsed(self.redistributed)
        return replace(program, plan={**program.plan, self.name: parsed(self.placements)}, after=after)

    @property
    def saved(self) -> int:
        return int(self.less.replace(",", ""))


def parsed(text: str) -> list[Placement]:
    return [BY_NAME[name] for name in text.strip("[]").split(", ")]


WRONG = {"up.weight": [S0], "up.bias": [S0], "down.weight": [S0]}
ALL = {"up.weight": [S0], "up.bias": [S0], "down.weight": [S0], "down.bias": [S0]}
ON_TP = {name: [R, *placements] for name, placements in WRONG.items()}


@pytest.mark.parametrize(
    "program",
    [
        Program((2,), [R], WRONG, (100, 16, 64)),
        Program((2,), [R], WRONG, (5, 16, 64), torch.relu, backward=False),
        Program((3,), [R], WRONG, (7, 5, 13), torch.relu),
        Program((3,), [R], ALL, (11, 4, 31)),
        Program((4,), [R], WRONG, (60, 40, 161)),
        Program((2, 2), [S0, R], ON_TP, (13, 6, 25)),
        Program((2, 2), [R, R], ON_TP, (13, 6, 25), torch.tanh),
        Program((2, 3), [S0, R], ON_TP, (40, 5, 100), backward=False),
    ],
)
def test_a_wrong_dim_of_a_weight_is_advised_at_that_weight(program: Program) -> None:
    (advice,) = program.advised()
    axes = len(program.mesh)
    assert (advice.name, parsed(advice.placements)) == ("down.weight", [R, S1][-axes:])
    assert advice.redistributed is not None
    assert parsed(advice.redistributed)[-1] == S1, "as the result is laid out now"
    (sent, out), (less, same) = program.run(), advice.followed(program).run()
    assert sent - less == advice.saved > 0
    torch.testing.assert_close(same, out)


@pytest.mark.parametrize(
    "program",
    [
        Program((3,), [S0], {"up.weight": [S0], "down.weight": [S1], "down.bias": [S0]}, (40, 300, 40)),
        Program((2, 2), [S0, R], {"up.weight": [S1, S1], "up.bias": [S0, S0], "down.weight": [S1, R]}, (40, 5, 13)),
        Program((4,), [S1], {"down.weight": [S1], "up.bias": [S0], "down.bias": [S0]}, (5, 5, 100)),
        Program((2, 2), [R, R], {"up.weight": [S1, S0], "up.bias": [R, S0], "down.weight": [S1, R]}, (5, 8, 13)),
        Program((3, 2), [S0, S0], {"up.weight": [S0, S1], "down.weight": [R, S1], "down.bias": [R, S0]}, (40, 30, 13)),
    ],
)
def test_any_layout_that_is_advised_for_a_parameter_sends_what_is_said(program: Program) -> None:
    advised = [advice for advice in program.advised() if advice.changed is None]
    assert advised
    sent, out = program.run()
    for advice in advised:
        less, same = advice.followed(program).run()
        assert sent - less == advice.saved > 0
        torch.testing.assert_close(same, out)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("down", [[R], [S0], [S1]], ids=str)
def test_what_is_advised_with_activation_checkpointing_sends_what_is_said(down: Placements, ranks: int) -> None:
    """Forward runs again only up to the last tensor that backward needs; that op redistributes, and has no result."""
    program = Program((ranks,), [S0], {"up.bias": [S0], "down.weight": down}, (6, 10, 24), reruns=True)
    (sent, out), advised = program.run(), program.advised()
    assert advised
    for advice in advised:
        less, same = advice.followed(program).run()
        assert sent - less == advice.saved > 0
        torch.testing.assert_close(same, out)


@pytest.mark.parametrize(("ranks", "rows", "backward"), [(2, 100, True), (2, 71, True), (3, 70, False), (4, 61, False)])
def test_a_weight_that_is_sharded_as_the_batch_is_replicated_if_that_sends_less(
    ranks: int, rows: int, backward: bool
) -> None:
    plan: dict[str, Placements] = {"up.weight": [S0], "up.bias": [S0]}

    def make(plan: Mapping[str, Placements]) -> Callable[[], object]:
        model = shard_module(nn.ModuleDict({"up": nn.Linear(16, 64)}), plan, mesh=Mesh((ranks,)))
        x = distribute_tensor(torch.ones(rows, 16), Mesh((ranks,)), [S0]).requires_grad_()

        def step() -> None:
            with torch.set_grad_enabled(backward):
                out = model["up"](x)
            if backward:
                out.sum().backward()
                assert all(p.grad is not None for p in model.parameters())

        return step

    def sent(plan: Mapping[str, Placements]) -> int:
        def body() -> int:
            step = make(plan)
            with count_comms() as counts:
                step()
            return counts.total_bytes

        return sum(world(ranks).run(body))

    report = world(ranks).run(lambda: explain(make(plan)))[0]
    found = [ADVICE.search(event.avoid) for event in report.events]
    (advice,) = {Advice(*match.groups()) for match in found if match is not None}
    assert (advice.name, advice.placements, advice.changed) == ("up.weight", "[Replicate()]", "[Shard(0)]")
    assert sent(plan) - sent({**plan, "up.weight": [R]}) == advice.saved > 0


@pytest.mark.parametrize("batch", [[R], [S0], [S1]], ids=str)
@pytest.mark.parametrize("down", [[R], [S0], [S1]], ids=str)
@pytest.mark.parametrize("up", [[R], [S0], [S1]], ids=str)
def test_no_advice_repeats_what_is_sent_now_or_makes_partial_sums(up: Placements, down: Placements, batch: Any) -> None:
    report = Program((3,), batch, {"up.weight": up, "down.weight": down}, (19, 6, 20)).report()
    for event in report.events:
        assert "placements=[Partial" not in event.avoid
        for sent, now in re.findall(r"([\d,]+) bytes[^;]*, in place of ([\d,]+)", event.avoid):
            assert int(sent.replace(",", "")) < int(now.replace(",", "")), event.avoid


def test_layers_that_are_right_get_no_advice() -> None:
    program = Program((2,), [R], {"up.weight": [S0], "up.bias": [S0], "down.weight": [S1]}, (9, 6, 20))
    assert not [event for event in program.report().events if event.cause.op == "linear" and event.avoid]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_gradients_are_reduced_once_for_each_update(accumulated: int, optimizer: Any) -> None:
    def body(weight: Placement) -> tuple[int, list[str]]:
        plan: dict[str, Placements] = {"up.weight": [weight], "up.bias": [S0]}
        model = shard_module(nn.ModuleDict({"up": nn.Linear(16, 64)}), plan, mesh=Mesh((2,)))
        x = distribute_tensor(torch.ones(71, 16), Mesh((2,)), [S0]).requires_grad_()
        update = optimizer(model.parameters(), lr=0.1)
        with count_comms() as counts, explain() as report:
            for _ in range(3):
                for _ in range(accumulated):
                    model["up"](x).sum().backward()
                update.step()
                update.zero_grad()
        return counts.total_bytes, [event.avoid for event in report.events]

    now, then = world(2).run(body, S0), world(2).run(body, R)
    found = {Advice(*match.groups()) for text in now[0][1] if (match := ADVICE.search(text)) is not None}
    (advice,) = (own for own in found if own.name == "up.weight")
    assert advice.placements == "[Replicate()]"
    assert sum(sent for sent, _ in now) - sum(sent for sent, _ in then) == advice.saved > 0


def test_a_layer_that_several_blocks_have_is_advised_once_for_all() -> None:
    class Blocks(nn.Module):
        def __init__(self, after: Mapping[str, Placements]) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([MLP(6, 20, F.gelu, after) for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + block(x).redistribute(placements=[R])
            return x

    def make(plan: Mapping[str, Placement], after: Mapping[str, Placements]) -> Callable[[], object]:
        model = shard_module(Blocks(after), plan, mesh=Mesh((2,)))
        x = distribute_tensor(torch.ones(9, 6), Mesh((2,)), [R])
        return lambda: (model(x).sum().backward(), [p.grad for p in model.parameters()])

    def body(plan: Mapping[str, Placement], after: Mapping[str, Placements]) -> tuple[int, list[str]]:
        step = make(plan, after)
        with count_comms() as counts, explain() as report:
            step()
        return counts.total_bytes, [event.avoid for event in report.events]

    plan = {"blocks.*.up.weight": S0, "blocks.*.up.bias": S0, "blocks.*.down.weight": S0}
    now = world(2).run(body, plan, {})
    then = world(2).run(body, {**plan, "blocks.*.down.weight": S1}, {"down": [S1]})
    found = {match.groups() for text in now[0][1] if (match := ADVICE.search(text)) is not None}
    (advice,) = (Advice(*groups) for groups in found)
    assert (advice.name, advice.placements) == ("blocks.*.down.weight", "[Shard(1)]")
    assert sum(sent for sent, _ in now) - sum(sent for sent, _ in then) == advice.saved > 0


@pytest.mark.parametrize("batch", [[R], [S0], [S1]], ids=str)
@pytest.mark.parametrize("down", [[R], [S0], [S1]], ids=str)
def test_batches_of_several_sizes_are_explained(down: Placements, batch: Placements) -> None:
    """One layout of a result is not that of all, and nothing is said then, or what is said is of them all."""

    def body(plan: Mapping[str, Placements]) -> tuple[int, list[str]]:
        model = shard_module(MLP(8, 12, torch.relu, {}), plan, mesh=Mesh((2,)))
        inputs = [distribute_tensor(torch.ones(rows, 8), Mesh((2,)), batch) for rows in (5, 9)]
        with count_comms() as counts, explain() as report:
            for x in inputs:
                model(x).sum().backward()
            assert all(p.grad is not None for p in model.parameters())
        return counts.total_bytes, [event.avoid for event in report.events]

    plan: dict[str, Placements] = {"up.bias": [S0], "down.weight": down}
    now = world(2).run(body, plan)
    for advice in {Advice(*match.groups()) for text in now[0][1] if (match := ADVICE.search(text)) is not None}:
        assert advice.redistributed is None
        then = world(2).run(body, {**plan, advice.name: parsed(advice.placements)})
        assert sum(sent for sent, _ in now) - sum(sent for sent, _ in then) == advice.saved > 0


def test_a_result_is_not_to_be_redistributed_to_partial_sums() -> None:
    plan: dict[str, Placements] = {"up.weight": [S1, R], "down.weight": [S1, S1], "down.bias": [R, S0]}
    program = Program((2, 2), [R, S0], plan, (2, 4, 25), backward=False)
    assert not any("placements=[Partial" in event.avoid for event in program.report().events)
