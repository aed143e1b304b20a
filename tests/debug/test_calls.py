"""What is said of the calls that follow a change is what a program with that change sends."""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import Mesh, Placement, Replicate, Shard, count_comms, distribute_tensor, shard_module
from shardwise.debug import explain
from shardwise.debug.calls import Calls, Change
from shardwise.testing import world
from tests.debug.ops import halved

S0, S1, R = Shard(0), Shard(1), Replicate()
Placements = Sequence[Placement]


class Block(nn.Module):
    """A residual, a norm, and a result that several ops take."""

    def __init__(self, narrow: int, wide: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(narrow), nn.Linear(narrow, wide), nn.Linear(wide, narrow)
        self.gate = nn.Linear(narrow, wide)
        self.moves = dict[str, Placements]()  # to what the input of the norm and the result of `down` are redistributed

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self._moved("norm", x))
        y = self.down(F.gelu(self.up(y)) * self.gate(y).sigmoid())
        return x + F.dropout(self._moved("down", y), 0.0)

    def _moved(self, what: str, x: Any) -> Any:
        return x.redistribute(placements=self.moves[what]) if what in self.moves else x


class Heads(nn.Module):
    """Reshapes, a product of two results of one op, and a softmax."""

    def __init__(self, narrow: int, wide: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(narrow, 2 * wide), nn.Linear(wide, narrow)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.up(x).unflatten(-1, (2, -1)).unbind(1)
        out: Tensor = x * 2 + self.down(a.softmax(-1) * b.relu())
        return out


class Net(nn.Module):
    def __init__(self, block: Callable[[int, int], nn.Module], narrow: int, wide: int, after: Any) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([block(narrow, wide) for _ in range(2)]), nn.Linear(narrow, 5)
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.after(block(x))
        out: Tensor = self.head(x)
        return out


def as_it_is(x: Tensor) -> Tensor:
    return x


def replicated(x: Any) -> Any:
    return x.redistribute(placements=[R] * len(x.placements))


def read(x: Any) -> Any:
    x.detach().abs().mean().item()
    return x


def kept(x: Any) -> Any:
    x.full_tensor().sum()
    return x[:, : x.shape[1]]


@dataclass(frozen=True)
class Program:
    """Attributes:
    plan: the others are replicated.
    after: what is done with the result of each block.
    """

    mesh: tuple[int, ...]
    batch: Placements
    plan: Mapping[str, Placements]
    sizes: tuple[int, int, int] = (11, 6, 13)  # of the batch, of what is narrow, and of what is wide
    block: Callable[[int, int], nn.Module] = Block
    after: Callable[[Tensor], Tensor] = as_it_is
    backward: bool = True
    updates: bool = False
    moves: Mapping[str, Placements] = field(default_factory=dict)

    def make(self) -> tuple[Callable[[], None], nn.Module]:
        torch.manual_seed(0)
        mesh, (rows, narrow, wide) = Mesh(self.mesh), self.sizes
        plan = {f"blocks.*.{name}": placements for name, placements in self.plan.items()}
        model = shard_module(Net(self.block, narrow, wide, self.after), plan, mesh=mesh)
        for block in model.blocks:
            block.moves = dict(self.moves)  # type: ignore[assignment]
        x = distribute_tensor(torch.linspace(-1, 1, rows * narrow).view(rows, narrow), mesh, self.batch)
        y = distribute_tensor(torch.arange(rows) % 5, mesh, [p if p == S0 else R for p in self.batch])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            with torch.set_grad_enabled(self.backward):
                loss = F.cross_entropy(model(x), y)
            if self.backward:
                loss.backward()
                assert all(p.grad is not None for p in model.parameters())
            if self.updates:
                optimizer.step()

        return step, model

    def sent(self) -> int:
        def body() -> int:
            step, _ = self.make()
            with count_comms() as counts:
                step()
            return counts.total_bytes

        return sum(world(torch.Size(self.mesh).numel()).run(body))

    def changed(self, name: str, placements: Placements) -> "Program":
        return replace(self, plan={**self.plan, name: placements})

    def said(self) -> dict[tuple[str, Placements], int | None]:
        """What is said for each layout of each parameter of the blocks."""

        def body() -> Any:
            step, model = self.make()
            calls = calls_of(step)
            names: dict[str, Any] = {
                name.split(".", 2)[2]: p for name, p in model.named_parameters() if name.startswith("blocks.0")
            }
            return {
                (name, placements): of_parameter(calls, name, placements)
                for name, p in names.items()
                for placements in product([R, *map(Shard, range(p.ndim))], repeat=len(self.mesh))
                if sum(a != b for a, b in zip(placements, p._layout.placements, strict=True)) == 1
            }

        found: dict[tuple[str, Placements], int | None] = world(torch.Size(self.mesh).numel()).run(body)[0]
        return found


def calls_of(step: Callable[[], object]) -> Calls:
    with explain() as report:
        uses = report._uses
        step()
    return uses.calls


def of_parameter(calls: Calls, name: str, placements: Placements) -> int | None:
    tensors = calls.parameters(f"blocks.*.{name}")
    return calls.saved_bytes(Change({n: layout.replace(placements) for n, layout in tensors.items()}))


UP: dict[str, Placements] = {"up.weight": [S0], "up.bias": [S0], "gate.weight": [S0], "gate.bias": [S0]}
RIGHT, WRONG = UP | {"down.weight": [S1]}, UP | {"down.weight": [S0]}
UP_ON_TP = {name: [R, *placements] for name, placements in UP.items()}
ON_TP = {name: [R, *placements] for name, placements in WRONG.items()}


@pytest.mark.parametrize(
    ("program", "known"),
    [
        (Program((2,), [R], WRONG), 5),
        (Program((3,), [R], RIGHT, (8, 5, 12)), 10),
        (Program((2,), [S0], {}, backward=False), 11),
        (Program((2,), [R], WRONG, after=replicated), 11),
        (Program((2,), [R], WRONG | {"norm.weight": [S0]}), 3),  # the norm of later blocks exchanges moments
        (Program((3,), [R], RIGHT, after=read), 10),
        (Program((2,), [R], WRONG, after=kept), 1),
        (Program((2,), [R], WRONG, updates=True), 5),
        (Program((2,), [R], {"up.weight": [S0], "down.weight": [S1]}, block=Heads), 1),
        (Program((2, 2), [S0, R], ON_TP), 12),
        (Program((2, 2), [R, R], ON_TP, backward=False), 12),
    ],
)
def test_each_layout_of_each_parameter_saves_what_is_said(program: Program, known: int) -> None:
    now, said = program.sent(), program.said()
    found = {change: saved for change, saved in said.items() if saved is not None}
    wrong = {
        change: (saved, measured)
        for change, saved in found.items()
        if (measured := now - program.changed(*change).sent()) != saved
    }
    assert wrong == {}
    assert len(found) >= known, said


@pytest.mark.parametrize("plan", [RIGHT, WRONG], ids=["right", "wrong"])
@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_redistribution_that_is_added_saves_what_is_said(ranks: int, backward: bool, plan: Any) -> None:
    program = Program((ranks,), [R], plan, backward=backward)

    def said(what: str, placement: Placement) -> int | None:
        calls = calls_of(program.make()[0])
        if what == "norm":
            steps = [step for step in calls.steps if step.place.startswith("layer_norm")]
            layout = steps[0].layouts[0].replace([placement])
            return calls.saved_bytes(Change(operands={step.number: {0: layout} for step in steps}))
        steps = [step for step in calls.steps if any(x.name.endswith("down.weight") for x in step.operands)]
        layout = steps[0].made[0].replace([placement])
        return calls.saved_bytes(Change(results={step.number: layout for step in steps if step.call}))

    now, known = program.sent(), 0
    for what, placement in product(("norm", "down"), (R, S0, S1)):
        saved = world(ranks).run(said, what, placement)[0]
        if saved is not None:
            known += 1
            assert saved == now - replace(program, moves={what: [placement]}).sent(), (what, placement)
    assert known >= 3


def advised(program: Program) -> dict[str, str]:
    """The advice of forward by op."""
    report = world(torch.Size(program.mesh).numel()).run(lambda: explain(program.make()[0]))[0]
    return {event.cause.op: event.avoid for event in report.events if event.avoid and not event.cause.backward}


@pytest.mark.parametrize(("mesh", "backward"), [((2, 2), True), ((2, 3), True), ((2, 2), False)])
def test_partial_sums_are_left_to_the_ops_after_it_where_that_sends_least(mesh: Any, backward: bool) -> None:
    """A residual and a norm reduce them; so `.redistribute` of the result of `down` would send more."""
    wrong = Program(mesh, [S0, R], ON_TP, (44, 52, 198), backward=backward)
    right = wrong.changed("down.weight", [R, S1])
    gradients = ", gradients included" if backward else ""
    assert advised(wrong)["linear"] == (
        f"[Replicate(), Shard(1)] for blocks.*.down.weight in the plan, whose result is then [Shard(0), "
        f"Partial('sum')]: the step sends {wrong.sent() - right.sent():,} bytes less{gradients}"
    )
    sharded = replace(right, moves={"down": [S0, S1]})
    assert right.sent() < sharded.sent() < wrong.sent()


def test_sums_are_not_to_be_reduced_to_shards_that_the_ops_after_it_gather() -> None:
    right = Program((2, 2), [S0, R], UP_ON_TP | {"down.weight": [R, S1]}, (44, 52, 198))
    assert right.sent() < replace(right, moves={"norm": [S0, S0]}).sent()
    assert "layer_norm" not in advised(right)


@pytest.mark.parametrize("use", ["returned", "local", "gathered", "ruled"])
def test_nothing_is_said_of_a_tensor_that_leaves_the_block(use: str) -> None:
    def body() -> tuple[int | None, int | None]:
        x = distribute_tensor(torch.ones(6, 8), Mesh((2,)), [S0])
        with explain() as report:
            y = x.cos()
            z = y.sin()
            if use == "local":
                y.to_local()  # type: ignore[attr-defined]
            elif use == "gathered":
                halved(y)
            uses = report._uses
            del z
            if use != "returned":
                del y
        number = next(step.operands[0].number for step in uses.calls.steps)
        return tuple(uses.calls.saved_bytes(Change({number: x._layout.replace([p])})) for p in (S0, S1))  # type: ignore[return-value]

    assert world(2).run(body)[0] == ((0, 0) if use == "ruled" else (0, None))


def test_what_is_noted_of_calls_keeps_no_tensor() -> None:
    def body() -> tuple[bool, int]:
        x = distribute_tensor(torch.ones(6, 8), Mesh((2,)), [S0])
        with explain() as report:
            y = torch.stack([x.cos(), x.redistribute(placements=[S1])])
            z = y[:, 1:].split([2, 3], 1)[0]
            held = [ref(y), ref(z), ref(x)]
            del x, y, z
            gc.collect()
            return all(own() is None for own in held), len(report._uses.calls.steps)

    assert all(gone and steps >= 4 for gone, steps in world(2).run(body))
