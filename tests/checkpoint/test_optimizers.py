"""Optimizers are restored exactly, or refused with the difference; nothing is changed then."""

import json
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from shardwise import _collectives as collectives
from shardwise._layout import Mesh, OnRanks, Placement, Shard
from shardwise._tensor import DTensor
from shardwise.checkpoint import read_manifest, restore, save, state_of
from shardwise.checkpoint.manifest import Manifest, StoredTensor
from shardwise.checkpoint.optimizers import fitting_state
from shardwise.embedding import Adam as FusedAdam
from shardwise.embedding import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    RowWiseAdam,
    shard_embeddings,
)
from shardwise.embedding.fused import FusedOptimizer
from shardwise.embedding.optimizers import RowOptimizer
from shardwise.embedding.sharded import ShardedEmbeddingBagCollection
from shardwise.errors import CheckpointError
from shardwise.testing import world
from tests.checkpoint.states import bits, failed, full

ROWS: dict[str, Placement] = {"t0": Shard(0), "t1": Shard(0, (5, 2))}


class Model(nn.Module):
    """Two tables, 9 and 7 rows, and a layer on every rank."""

    def __init__(
        self, optimizer: RowOptimizer | None = None, plan: dict[str, Placement] = ROWS, rows: Sequence[int] = (9, 7)
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        configs = [EmbeddingBagConfig(n, 6, f"t{i}", feature_names=[f"f{i}"]) for i, n in enumerate(rows)]
        mesh = Mesh((collectives.world_size(),))
        tables = shard_embeddings(EmbeddingBagCollection(configs), plan, mesh, optimizer)
        assert isinstance(tables, ShardedEmbeddingBagCollection)
        self.tables, self.layer = tables, nn.Linear(12, 1)

    def take_step(self, step: int) -> None:
        self.zero_grad()
        ids = torch.tensor([step % 9, 3, 8, step % 7, 6, 6])
        out = self.tables(KeyedJaggedTensor(["f0", "f1"], ids, lengths=torch.tensor([2, 1, 0, 3])))
        self.layer(out.values()).square().sum().backward()


Made = tuple[nn.Module, Optimizer]
Make = Callable[[nn.Module], Optimizer]

KINDS: dict[str, Make] = {
    "SGD": lambda module: SGD(module.parameters(), lr=0.01),
    "SGD, momentum": lambda module: SGD(module.parameters(), lr=0.01, momentum=0.9),
    "Adagrad": lambda module: Adagrad(module.parameters(), lr=0.01, lr_decay=0.1),
    "Adam": lambda module: Adam(module.parameters(), lr=0.01),
    "AdamW": lambda module: AdamW(module.parameters(), lr=0.01),
    "Adam, amsgrad": lambda module: Adam(module.parameters(), lr=0.01, amsgrad=True),
    "RMSprop": lambda module: RMSprop(module.parameters(), lr=0.01),
    "RMSprop, centered, momentum": lambda module: RMSprop(module.parameters(), lr=0.01, centered=True, momentum=0.5),
}


def made(kind: str) -> Made:
    """A model of tables and its optimizer, on a rank."""
    if kind == "fused":  # of tables alone: the layer stays as it is
        model = Model(RowWiseAdagrad(lr=0.1))
        return model, fused_of(model)
    model = Model()
    return model, KINDS[kind](model)


def fused_of(model: Model) -> FusedOptimizer:
    assert model.tables.fused_optimizer is not None
    return model.tables.fused_optimizer


def train(made: Made, steps: range) -> None:
    model, optimizer = made
    assert isinstance(model, Model)
    for step in steps:
        model.take_step(step)
        optimizer.step()


def values_of(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """What this rank holds, to the bit."""
    return {name: bits(x) if isinstance(x, Tensor) else x for name, x in state_of(module, optimizer).items()}


def test_an_optimizer_goes_on_as_if_it_had_not_been_interrupted(tmp_path: Path) -> None:
    def body() -> None:
        for kind in [*KINDS, "fused"]:
            first, second = made(kind), made(kind)
            train(first, range(5))
            save(tmp_path / kind, state_of(*first), step=5)
            restored = restore(tmp_path / kind, *second)
            assert (restored.step, restored.dropped) == (5, ()), kind
            for one in (first, second):
                train(one, range(5, 15))
            assert values_of(*first) == values_of(*second), kind

    world(2).run(body)


def test_another_optimizer_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    def body() -> None:
        for before, after in pairwise([*KINDS, "fused"]):
            folder, first, second = tmp_path / before, made(before), made(after)
            train(first, range(5))
            save(folder, state_of(*first), step=5)
            train(second, range(2))
            was = values_of(*second)
            with pytest.raises(CheckpointError, match="strict=False loads what fits"):
                restore(folder, *second)
            assert values_of(*second) == was, (before, after)
            other = made(after)
            assert restore(folder, *other, strict=False).dropped, (before, after)
            train(other, range(5, 8))

    world(2).run(body)


def manifest_of(state: dict[str, Any]) -> Manifest:
    """What a checkpoint says of a state, without its data."""
    tensors = {name: StoredTensor(x.dtype, tuple(x.shape), ()) for name, x in state.items() if isinstance(x, Tensor)}
    others = {name: json.loads(json.dumps(x)) for name, x in state.items() if name not in tensors}
    return Manifest(5, 1, tensors, others, {}, {})


def test_of_two_optimizers_classes_and_names_of_states_are_compared() -> None:
    for before, after in product(KINDS, KINDS):
        module = nn.Linear(3, 2)
        first, second = KINDS[before](module), KINDS[after](module)
        for optimizer in (first, second):
            module(torch.ones(3)).sum().backward()
            optimizer.step()
        fit = fitting_state(manifest_of(state_of(module, first)), module, {"0": second}, subset=False)
        text = "\n".join(fit.differences)
        assert bool(text) == (before != after)
        there, here = type(first).__name__, type(second).__name__
        assert (f"class {there} in the checkpoint, {here} here" in text) == (there != here)
        names = [{*optimizer.state[module.weight]} for optimizer in (first, second)]
        assert there != here or all(name in text for name in names[0] ^ names[1]), (before, after)


def plain() -> tuple[nn.Linear, Adam]:
    layer = nn.Linear(3, 2)
    optimizer = Adam(layer.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        layer(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()
    return layer, optimizer


def differences(folder: Path, module: nn.Module, *args: Any, **kwargs: Any) -> list[str]:
    """The lines of the error, which are those that `strict=False` returns."""
    with pytest.raises(CheckpointError) as caught:
        restore(folder, module, *args, **kwargs)
    first, *lines, fix = str(caught.value).splitlines()
    assert first == f"Loading {folder} failed: the checkpoint does not fit the state:"
    assert fix.startswith("  Fix: make optimizers and schedulers as those that were saved")
    found = [line.strip() for line in lines]
    assert list(restore(folder, module, *args, **kwargs, strict=False).dropped) == found
    return found


def test_a_state_of_another_shape_is_refused_with_its_parameter(tmp_path: Path) -> None:
    layer, optimizer = plain()
    state = state_of(layer, optimizer)
    save(tmp_path, state | {"optimizer.weight.exp_avg": torch.zeros(7, 1)}, step=1)
    fresh = nn.Linear(3, 2)
    another = Adam(fresh.parameters())
    assert differences(tmp_path, fresh, another) == [
        "optimizer '0' (Adam): state 'exp_avg' of weight: shape (7, 1) in the checkpoint, expected (2, 3)"
    ]
    assert [*another.state] == [fresh.bias]
    assert torch.equal(fresh.weight, layer.weight)


def test_the_differences_are_listed(tmp_path: Path) -> None:
    layer, _ = plain()
    adagrad = Adagrad(layer.parameters())
    save(tmp_path, state_of(layer, adagrad), step=1)
    assert differences(tmp_path, layer, Adam(layer.parameters())) == [
        "optimizer '0' (Adam): class Adagrad in the checkpoint, Adam here",
        (
            "optimizer '0' (Adam): hyper-parameters initial_accumulator_value, lr_decay only in the checkpoint; "
            "hyper-parameters amsgrad, betas, decoupled_weight_decay missing in the checkpoint"
        ),
        (
            "optimizer '0' (Adam): states of weight, bias: sum only in the checkpoint; "
            "exp_avg, exp_avg_sq missing in the checkpoint (lr 0.01 in the checkpoint, 0.001 here; "
            "eps 1e-10 in the checkpoint, 1e-08 here)"
        ),
    ]
    save(tmp_path, state_of(layer, SGD(layer.parameters(), lr=0.1)), step=2)  # before the first step
    (line,) = differences(tmp_path, layer, SGD(layer.parameters(), lr=0.1, momentum=0.9))
    assert line == (
        "optimizer '0' (SGD): states of weight, bias: momentum_buffer missing in the checkpoint "
        "(momentum 0 in the checkpoint, 0.9 here)"
    )


def test_hyper_parameters_that_add_no_states_are_restored_and_names_stay_in_their_order(tmp_path: Path) -> None:
    layer, optimizer = plain()
    save(tmp_path, state_of(layer, optimizer), step=1)
    other = Adam(layer.parameters(), lr=3.0, betas=(0.1, 0.2), weight_decay=0.5, maximize=True)
    restore(tmp_path, layer, other)
    assert other.param_groups[0] | {"params": 0} == optimizer.param_groups[0] | {"params": 0}
    named = Adam([("bias", layer.bias), ("weight", layer.weight)], lr=2.0)
    restore(tmp_path, layer, named)
    assert named.param_groups[0]["param_names"] == ["bias", "weight"]
    assert named.param_groups[0]["lr"] == 0.1


def test_states_that_are_only_in_the_checkpoint_are_dropped_and_the_others_kept(tmp_path: Path) -> None:
    layer, _ = plain()
    amsgrad = Adam(layer.parameters(), lr=0.1, amsgrad=True)
    layer(torch.ones(4, 3)).square().sum().backward()
    amsgrad.step()
    save(tmp_path, state_of(layer, amsgrad), step=1)
    optimizer = Adam(layer.parameters(), lr=0.5)
    (line,) = differences(tmp_path, layer, optimizer)
    assert "states of weight, bias: max_exp_avg_sq only in the checkpoint" in line
    assert "amsgrad True in the checkpoint, False here" in line
    assert torch.equal(optimizer.state[layer.weight]["exp_avg"], amsgrad.state[layer.weight]["exp_avg"])
    assert optimizer.state[layer.weight].keys() == {"step", "exp_avg", "exp_avg_sq"}


def two(rates: Sequence[float] = (0.1, 0.2)) -> tuple[nn.Sequential, dict[str, Optimizer]]:
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    return module, {
        "first": SGD(module[0].parameters(), lr=rates[0], momentum=0.9),
        "second": Adam(module[1].parameters(), lr=rates[1]),
    }


def test_several_optimizers_have_names(tmp_path: Path) -> None:
    module, optimizers = two()
    module(torch.ones(4, 3)).sum().backward()
    for optimizer in optimizers.values():
        optimizer.step()
    path = save(tmp_path, state_of(module, optimizers), step=1)
    groups = read_manifest(path).values["optimizer.param_groups"]
    assert [(group["optimizer"], group["class"], group["params"]) for group in groups] == [
        ("first", "SGD", ["0.weight", "0.bias"]),
        ("second", "Adam", ["1.weight", "1.bias"]),
    ]
    other, others = two((3, 4))
    restore(tmp_path, other, dict(reversed(others.items())))
    assert [one.param_groups[0]["lr"] for one in others.values()] == [0.1, 0.2]
    states = (one["second"].state.values() for one in (others, optimizers))
    for restored, saved in zip(*states, strict=True):
        assert torch.equal(restored["exp_avg"], saved["exp_avg"])
    assert differences(tmp_path, other, {"first": others["first"]}) == [
        "optimizer 'second' (Adam) of 1.weight, 1.bias: only in the checkpoint"
    ]
    third, fresh = two()
    assert restore(tmp_path, third, {"first": fresh["first"]}, subset=True).dropped == ()
    assert not fresh["second"].state


def test_groups_are_found_by_their_parameters(tmp_path: Path) -> None:
    layer = nn.Linear(3, 2)
    groups: list[dict[str, Any]] = [{"params": [layer.weight], "lr": 0.1}, {"params": [layer.bias], "lr": 0.2}]
    save(tmp_path, state_of(layer, SGD(groups, lr=1.0)), step=1)
    optimizer = SGD([{"params": [p]} for p in (layer.bias, layer.weight)], lr=1.0)
    restore(tmp_path, layer, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.1]
    assert differences(tmp_path, layer, SGD(layer.parameters(), lr=1.0)) == [
        "optimizer '0' (SGD): has a group of weight, bias, the checkpoint has them in groups of weight and of bias"
    ]


def test_a_checkpoint_that_does_not_say_classes_is_compared_by_the_rest(tmp_path: Path) -> None:
    layer, optimizer = plain()
    state = state_of(layer, optimizer)
    for group in state["optimizer.param_groups"]:
        del group["class"], group["optimizer"]
    save(tmp_path, state, step=1)
    other = Adam(layer.parameters(), lr=0.7)
    restore(tmp_path, layer, other)
    assert other.param_groups[0]["lr"] == 0.1
    text = "\n".join(differences(tmp_path, layer, RMSprop(layer.parameters())))
    assert "hyper-parameters amsgrad, betas, decoupled_weight_decay only in the checkpoint" in text
    assert "square_avg missing in the checkpoint" in text


def test_states_that_torch_named_are_found_and_others_are_not_lost_in_silence(tmp_path: Path) -> None:
    layer, optimizer = plain()
    parameters, states = get_state_dict(layer, optimizer)
    save(tmp_path, {"model": parameters, "optimizer": states}, step=1)
    other = nn.Linear(3, 2)
    fresh = Adam(other.parameters(), lr=9.0)
    restore(tmp_path, other, fresh)
    assert values_of(other, fresh) == values_of(layer, optimizer)
    state = state_of(layer, optimizer)
    for name in [name for name in state if name.startswith(("optimizer.weight.", "optimizer.bias."))]:
        state[name.replace("optimizer.", "optimizer.old.")] = state.pop(name)
    save(tmp_path, state, step=2)
    with pytest.raises(CheckpointError, match=r"'optimizer\.old\.weight\.exp_avg' looks like a state of weight"):
        restore(tmp_path, other, fresh, subset=True)
    dropped = restore(tmp_path, other, fresh, strict=False, subset=True).dropped
    assert sum("looks like a state of" in line for line in dropped) == 6
    assert not fresh.state
    save(tmp_path, {"model": parameters, "opt": states}, step=3)
    text = "no optimizer in the checkpoint called 'optimizer'; there is one called 'opt': save it under 'optimizer'"
    with pytest.raises(CheckpointError, match=text):
        restore(tmp_path, layer, optimizer, subset=True)


class Counting(Optimizer):
    """An optimizer that is not torch's."""

    def __init__(self, params: Any, factor: float = 1.0) -> None:
        super().__init__(params, {"lr": 0.1, "factor": factor})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["updates"] = self.state[p].get("updates", 0) + 1


def test_an_optimizer_of_another_library_is_restored_or_refused_by_its_class(tmp_path: Path) -> None:
    layer, adam = plain()
    counting = Counting(layer.parameters())
    counting.step()
    save(tmp_path, state_of(layer, counting), step=1)
    another = Counting(layer.parameters(), factor=2.0)
    restore(tmp_path, layer, another)
    assert another.state[layer.weight] == {"updates": 1}
    assert another.param_groups[0]["factor"] == 1.0
    save(tmp_path, state_of(layer, adam), step=2)
    with pytest.raises(CheckpointError, match="class Adam in the checkpoint, Counting here"):
        restore(tmp_path, layer, another)
    assert len(restore(tmp_path, layer, another, strict=False).dropped) == 2
    assert another.state[layer.weight] == {"updates": 1}
    assert another.param_groups[0]["lr"] == 0.1


def columns(size: int) -> dict[str, Placement]:
    """By columns on so many ranks, unevenly; by rows on two ranks if it is 0."""
    uneven = {0: (), 1: (6,), 2: (4, 2), 3: (1, 0, 5)}[size]
    return {"t0": Shard(1), "t1": Shard(1, uneven)} if size else {"t0": Shard(0)}


@pytest.mark.parametrize("optimizer", [RowWiseAdagrad(lr=0.1), RowWiseAdam(lr=0.1)], ids=["adagrad", "adam"])
def test_states_of_rows_become_the_mean_of_another_number_of_shards_of_columns(
    tmp_path: Path, optimizer: RowOptimizer
) -> None:
    state = optimizer.of_rows[0]

    def first(before: int) -> list[Tensor]:
        model = Model(optimizer, columns(before))
        for step in range(3):
            model.take_step(step)
        fused = fused_of(model)
        save(tmp_path / f"{before}", state_of(model, {"tables": fused}), step=3)
        return [of[state].full_tensor() for of in fused.state.values()]

    def second(before: int, after: int) -> tuple[list[Tensor], list[Tensor]]:
        model = Model(optimizer, columns(after))
        fused = fused_of(model)
        tensors = [of[state] for of in fused.state.values()]
        restore(tmp_path / f"{before}", model, {"tables": fused})
        assert all(one is of[state] for one, of in zip(tensors, fused.state.values(), strict=True))
        found = [tensor.full_tensor().clone() for tensor in tensors]
        for step in range(3, 5):
            model.take_step(step)
        return found, [tensor.full_tensor() for tensor in tensors]

    saved = {before: world(before or 2).run(first, before)[0] for before in (0, 2, 3)}
    for before, after in [(2, 3), (3, 2), (2, 1), (3, 0), (0, 2)]:
        for found, later in world(after or 2).run(second, before, after):
            for one, other, trained in zip(saved[before], found, later, strict=True):
                same = one.shape == other.shape
                assert torch.equal(other, one if same else one.mean(1, keepdim=True).expand(other.shape))
                assert not torch.equal(trained, other)


def test_tables_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    def write() -> None:
        larger, other = Model(RowWiseAdagrad(lr=0.1), rows=(11, 7)), Model(RowWiseAdam(lr=0.1))
        save(tmp_path / "larger", state_of(larger, fused_of(larger)), step=1)
        save(tmp_path / "other", state_of(other, fused_of(other)), step=1)

    def resized() -> None:
        model, fused = made("fused")
        assert isinstance(model, Model)
        model.tables.resize_({"t0": 11})
        restore(tmp_path / "larger", model, fused)

    def dropped() -> int:
        model, fused = made("fused")
        train((model, fused), range(1))
        state = {p: of["sum"].full_tensor().clone() for p, of in fused.state.items()}
        found = restore(tmp_path / "other", model, fused, strict=False).dropped
        for parameter, value in state.items():
            now = fused.state[parameter]["sum"]
            assert isinstance(now, DTensor)
            assert torch.equal(now.full_tensor(), value)
        train((model, fused), range(1, 2))
        return len(found)

    world(2).run(write)
    text = failed(lambda: restore(tmp_path / "larger", *made("fused")))
    assert (
        "'model.tables.embedding_bags.t0.weight': shape (11, 6) in the checkpoint, (9, 6) in the state. "
        "Fix: restore(…, resize={'tables.embedding_bags.t0.weight': 9}), or "
        "collection.resize_({'t0': 11}) before restore" in text
    )
    assert "of tables.embedding_bags.t0.weight: shape (11, 1) in the checkpoint, expected (9, 1)" in text
    world(2).run(resized)
    text = failed(lambda: restore(tmp_path / "other", *made("fused")))
    assert "class fused RowWiseAdam in the checkpoint, fused RowWiseAdagrad here" in text
    assert "exp_avg, exp_avg_sq only in the checkpoint; sum missing in the checkpoint" in text
    assert world(2).run(dropped) == [3, 3]


PLANS: list[dict[str, Placement]] = [
    {"t0": Shard(0), "t1": Shard(0, (5, 0, 2))},
    {"t0": OnRanks(1), "t1": OnRanks(0)},
    {},
]


@pytest.mark.parametrize("optimizer", [RowWiseAdagrad(lr=0.1), FusedAdam(lr=0.1)], ids=["adagrad", "adam"])
def test_tables_and_layers_go_on_in_another_sharding(tmp_path: Path, optimizer: RowOptimizer) -> None:
    """With two optimizers in one checkpoint."""

    def body() -> None:
        for number, plan in enumerate(PLANS):
            models = Model(optimizer, PLANS[number - 1]), Model(optimizer, plan)
            optimizers = [[Adam(model.layer.parameters(), lr=0.1), fused_of(model)] for model in models]
            for step in range(6):
                if step == 3:
                    save(tmp_path / f"{number}", state_of(models[0], optimizers[0]), step=3)
                    assert restore(tmp_path / f"{number}", models[1], optimizers[1]).step == 3
                for model, (adam, _) in [*zip(models, optimizers, strict=True)][: 1 if step < 3 else 2]:
                    model.take_step(step)
                    adam.step()
            one, two = (state_of(model, both) for model, both in zip(models, optimizers, strict=True))
            assert one.keys() == two.keys()
            for name, x in one.items():
                if isinstance(x, Tensor):
                    torch.testing.assert_close(full(x), full(two[name]), msg=name)
                else:
                    assert x == two[name]

    world(3).run(body)
