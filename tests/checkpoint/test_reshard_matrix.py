"""What any number of ranks saved in any kind of layout goes on in any other, to the bit, optimizers included."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adagrad, Adam, Optimizer

from shardwise import collectives
from shardwise.checkpoint import read_manifest, restore, save, state_of
from shardwise.layout import Box, Boxes, Layout, Mesh, OnRanks, Replicate, Shard
from shardwise.tensor import DTensor
from shardwise.testing import world
from shardwise.testing.local_shards import local_tensor
from tests.checkpoint.states import bits, distributed

SHAPE = (11, 6)
BEFORE, AFTER = 3, 10  # steps before the checkpoint and from there on
UNEVEN = {1: (11,), 2: (9, 2), 3: (2, 0, 9), 4: (1, 0, 7, 3)}
GRIDS = {1: (1, 1), 2: (1, 2), 3: (3, 1), 4: (2, 2)}


def tiles(size: int) -> Boxes:
    """Boxes of four rows and four columns or what is left of them, in turn, from the last rank to the first."""
    hands: list[list[Box]] = [[] for _ in range(size)]
    corners = [(i, j) for i in range(0, SHAPE[0], 4) for j in range(0, SHAPE[1], 4)]
    for number, (i, j) in enumerate(corners):
        hands[-1 - number % size].append(Box((i, j), (min(4, SHAPE[0] - i), min(4, SHAPE[1] - j))))
    return Boxes(hands)


@cache
def layouts(size: int) -> dict[str, Layout]:
    """One of each kind."""
    flat = Mesh((size,))
    return {
        "rows": Layout(flat, [Shard(0)], SHAPE),
        "columns": Layout(flat, [Shard(1)], SHAPE),
        "grid": Layout(Mesh(GRIDS[size]), [Shard(0), Shard(1)], SHAPE),
        "replicated": Layout(flat, [Replicate()], SHAPE),
        "uneven": Layout(flat, [Shard(0, sizes=UNEVEN[size])], SHAPE),
        "one rank": Layout(flat, [OnRanks(size - 1)], SHAPE),
        "boxes": Layout(flat, [tiles(size)], SHAPE),
    }


KINDS = list(layouts(1))
OPTIMIZERS: dict[str, Any] = {
    "adam": lambda p: Adam(p, lr=0.1, foreach=False),
    "adagrad": lambda p: Adagrad(p, lr=0.1, lr_decay=0.1, foreach=False),
}


def first_values(number: int) -> Tensor:
    return torch.linspace(-1, 1, 66).view(SHAPE) * (number + 1)


def placed(full: Tensor, layout: Layout | None) -> Tensor:
    return full.clone() if layout is None else distributed(full, layout)


class Training:
    """A parameter for each kind of layout and each optimizer.

    Args:
        chosen: the layout of the parameter called after each kind; none, if all of them are plain tensors.
        start: whether parameters have their first values; else zeros.
    """

    def __init__(self, chosen: dict[str, Layout], start: bool) -> None:
        self.chosen = chosen
        self.module = nn.Module()
        for name in OPTIMIZERS:
            of_optimizer = nn.ParameterDict()
            for number, kind in enumerate(KINDS):
                full = first_values(number) if start else torch.zeros(SHAPE)
                of_optimizer[kind] = nn.Parameter(placed(full, chosen.get(kind)))
            self.module.add_module(name, of_optimizer)
        self.optimizers: dict[str, Optimizer] = {
            name: make(self.module.get_submodule(name).parameters()) for name, make in OPTIMIZERS.items()
        }

    def take_steps(self, first: int, stop: int) -> None:
        for step in range(first, stop):
            goal = torch.sin(torch.arange(66.0).view(SHAPE) + step)
            goals = {kind: placed(goal, self.chosen.get(kind)) for kind in KINDS}
            for name, x in self.module.named_parameters():
                # As of a sum of squares. Autograd would add a third of it on each of three ranks, which rounds.
                x.grad = (x.detach() - goals[name.rpartition(".")[2]]) * 2
            for optimizer in self.optimizers.values():
                optimizer.step()

    def state(self) -> dict[str, Any]:
        return state_of(self.module, self.optimizers)


@cache
def uninterrupted() -> tuple[dict[str, Any], dict[str, Any]]:
    """The states of one process: where the checkpoint is saved, and at the end."""
    training, states = Training({}, start=True), []
    for first, stop in ((0, BEFORE), (BEFORE, BEFORE + AFTER)):
        training.take_steps(first, stop)
        states.append({name: x.clone() if isinstance(x, Tensor) else x for name, x in training.state().items()})
    return states[0], states[1]


def assert_same(state: dict[str, Any], expected: dict[str, Any], where: str) -> None:
    assert state.keys() == expected.keys()
    for name, x in state.items():
        if isinstance(x, Tensor):
            full = expected[name].detach()
            here = local_tensor(full, x._layout, collectives.rank()) if isinstance(x, DTensor) else full
            assert bits(x) == bits(here), f"{name}, {where}"
        else:
            assert x == expected[name]


@pytest.mark.parametrize("saved_by", [1, 2, 3, 4])
def test_training_goes_on_from_any_layout_in_any_other(tmp_path: Path, saved_by: int) -> None:
    """Each kind is loaded as each kind: the layouts of the parameters are rotated."""

    def train() -> None:
        training = Training(layouts(saved_by), start=True)
        training.take_steps(0, BEFORE)
        save(tmp_path, training.state(), step=BEFORE)

    def go_on() -> None:
        of_kind = layouts(collectives.world_size())
        for shift in range(len(KINDS)):
            rotated = KINDS[shift:] + KINDS[:shift]
            training = Training({kind: of_kind[new] for kind, new in zip(KINDS, rotated, strict=True)}, start=False)
            restore(tmp_path, training.module, training.optimizers)
            assert_same(training.state(), at_checkpoint, f"rotated by {shift}")
            training.take_steps(BEFORE, BEFORE + AFTER)
            assert_same(training.state(), at_end, f"rotated by {shift}, at the end")

    at_checkpoint, at_end = uninterrupted()
    world(saved_by).run(train)
    stored = read_manifest(tmp_path / f"step-{BEFORE:08d}").tensors
    for kind, layout in layouts(saved_by).items():
        boxes = {box for rank in range(saved_by) for box in layout.boxes(rank) if box.numel}
        assert {chunk.box for chunk in stored[f"optimizer.adam.{kind}.exp_avg_sq"].chunks} == boxes
    for size in (1, 2, 3, 4):
        world(size).run(go_on)
