"""Reasons of plans: other choices cost what a plan with them costs, a step does what its plan says, and files of other
models are refused."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import Mesh, Replicate, Shard, rank
from shardwise.embedding import (
    SGD,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    shard_embeddings,
)
from shardwise.errors import IdError, MeshError, PlanError, ShardwiseError
from shardwise.parallel import ColwiseParallel, RowwiseParallel
from shardwise.plan import BatchShape, ModulePlan, TablePlan, Topology, plan_module, plan_tables, price_module
from shardwise.plan.comparisons import PlanCheck
from shardwise.testing import world
from tests.plan.test_module_plan import SLOW, Perceptron
from tests.plan.test_tables import TABLES, batch, cpu, plan

CPU = Topology.preset("cpu")


class Residual(nn.Module):
    """Layers in a list, with a norm: a unit of `fully_shard` for each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Perceptron(256, 1024) for _ in range(2))
        self.norm = nn.LayerNorm(256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        result: torch.Tensor = self.norm(x)
        return result


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    return loss


@cache
def residual_plan(mesh: Mesh, topology: Topology = CPU) -> ModulePlan:
    return plan_module(Residual(), topology, (torch.empty(64, 256),), forward=loss_of, mesh=mesh)


# ---- other choices ---------------------------------------------------------------------------------------------------


@cache
def perceptron_plan() -> ModulePlan:
    """Pinned to what Megatron does; with slow links the plan would be another one."""
    return plan_module(Perceptron(64, 256), SLOW, (torch.empty(64, 64),), mesh=Mesh((4,)), head_room=0.0)


def test_a_pinned_parameter_stays_and_the_next_best_is_the_best_of_all_others() -> None:
    planned = perceptron_plan()
    for reason in planned.reasons:
        found = {}
        for placement in (Replicate(), Shard(0), *[Shard(1)] * reason.names[0].endswith("weight")):
            change, other = planned.what_if(pinned={reason.names[0]: placement})
            (same,) = [x for x in other.reasons if x.names == reason.names]
            assert same.placement == placement
            assert same.why == "it is pinned"
            assert other.step is not None
            assert planned.step is not None
            assert change.milliseconds == pytest.approx(1e3 * (other.step.seconds - planned.step.seconds))
            assert change.sent_bytes == other.step.sent_bytes - planned.step.sent_bytes
            assert change.memory == other.step.peak_bytes - planned.step.peak_bytes
            found[placement] = other.seconds
        assert found.pop(reason.placement) == pytest.approx(planned.seconds)
        assert min(found.values()) == pytest.approx(planned.seconds + reason.more_seconds)
        assert found[reason.next_best] == min(found.values())  # type: ignore[index]


def test_pinned_globs_add_up_and_what_if_changes_nothing_else() -> None:
    x = torch.empty(64, 256)
    again = plan_module(
        Residual(), CPU, (x,), forward=loss_of, mesh=Mesh((4,)), pinned={"layers.*.up.weight": Shard(1)}
    )
    _, other = residual_plan(Mesh((4,))).what_if(pinned={"layers.*.up.weight": Shard(1)})
    assert other == again
    _, both = other.what_if(pinned={"norm.weight": Replicate()})
    assert both.explain("layers.0.up.weight").startswith("layers.0.up.weight is Shard(1): it is pinned.")
    change, same = other.what_if()
    assert (change[1:], same) == ((0.0, 0, 0), other)


def test_a_change_by_hand_is_priced_as_it_is() -> None:
    planned = residual_plan(Mesh((2, 2)))
    assert planned.units == ("layers.0", "layers.1", "")
    cases: list[dict[str, Any]] = [
        {"units": ("layers.1", "")}, {"reshard": not planned.reshard}, {"styles": {"norm.weight": Shard(0)}},
    ]  # fmt: skip
    for changes in cases:
        change, other = planned.what_if(**changes)
        by_hand = replace(planned, **{**changes, "styles": other.styles})
        price = price_module(Residual(), by_hand, CPU, (torch.empty(64, 256),), forward=loss_of)
        assert price == other.step
        assert planned.step is not None
        assert change.memory == price.peak_bytes - planned.step.peak_bytes
        assert other != planned


def test_styles_are_added_to_those_that_follow_the_other_changes() -> None:
    planned = perceptron_plan()
    _, pinned = planned.what_if(pinned={"up.weight": Replicate(), "down.weight": Replicate()})
    assert pinned.styles != planned.styles
    _, both = planned.what_if(
        pinned={"up.weight": Replicate(), "down.weight": Replicate()}, styles={"up.weight": Replicate()}
    )
    assert both.styles == {**pinned.styles, "up.weight": Replicate()}


def test_a_change_by_hand_is_not_said_to_fit_or_to_be_at_the_bound() -> None:
    planned = perceptron_plan()
    assert "at the bound." in str(planned) or "above the bound." in str(planned)
    assert planned.step is not None
    _, other = replace(planned, memory=planned.step.peak_bytes - 1).what_if(reshard=not planned.reshard)
    assert str(other).startswith("Does not fit: ")
    assert "bound" not in str(other)


# ---- a step beside its plan ------------------------------------------------------------------------------------------


def checked_plan(planned: ModulePlan, extra: bool = False, price: Any = None) -> PlanCheck:
    """What a rank finds."""
    model = planned.apply(Residual())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    rows = 64 // (planned.mesh.shape[0] if planned.mesh.ndim > 1 else 1)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, torch.ones(rows, 256)).backward()
        if extra:
            next(iter(model.parameters())).full_tensor()  # type: ignore[attr-defined]
        optimizer.step()

    return planned.check(step, price)


MESHES = [Mesh((4,)), Mesh((2, 2)), Mesh((4, 1))]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_step_sends_the_bytes_of_its_plan_and_takes_its_memory(mesh: Mesh) -> None:
    planned = residual_plan(mesh)
    found = world(4).run(checked_plan, planned)
    assert all(one == found[0] for one in found)
    assert found[0].ok
    assert planned.step is not None
    assert sum(x.measured for x in found[0].sent_bytes.values()) == planned.step.sent_bytes > 0
    assert mesh.ndim > 1 or abs(found[0].memory.difference) < 0.05  # of units it depends on the transport
    assert str(found[0]).startswith("The bytes sent are those of the plan.\n")


def test_bytes_that_differ_name_their_cause() -> None:
    planned = residual_plan(Mesh((2, 2)))
    found = world(4).run(checked_plan, planned, True)[0]
    (cause,) = found.different
    assert cause.startswith("full_tensor, ")
    assert found.different[cause].predicted == 0 < found.different[cause].measured
    assert cause in str(found)
    other = world(4).run(checked_plan, residual_plan(Mesh((4,)), SLOW))[0]
    assert not other.ok
    assert "Ranks plan redistributions by other costs (" in str(other)


def test_a_plan_that_was_read_is_checked_beside_a_price(tmp_path: Path) -> None:
    planned = residual_plan(Mesh((2, 2)))
    planned.save(tmp_path / "plan.toml")
    loaded = ModulePlan.load(tmp_path / "plan.toml")
    price = price_module(Residual(), loaded, CPU, (torch.empty(64, 256),), forward=loss_of)
    assert world(4).run(checked_plan, loaded, False, price)[0].ok
    with pytest.raises(PlanError, match=r"The plan has no modelled step\. Fix: price=price_module\("):
        loaded.check(lambda: None)


@pytest.mark.parametrize("case", ["rows", "weighted"])
def test_a_step_of_tables_sends_the_bytes_of_its_plan(case: str) -> None:
    weighted, cls = case == "weighted", EmbeddingConfig if case == "rows" else EmbeddingBagConfig
    tables: Any = [cls(n, 16, f"t{i}", feature_names=[f"f{i}"]) for i, n in enumerate((90_000, 90, 1))]
    kind: Any = EmbeddingCollection if case == "rows" else EmbeddingBagCollection
    options = {} if case == "rows" else {"is_weighted": weighted}
    batches = [batch(tables, seed, bags=8 + seed, weighted=weighted) for seed in range(4)]
    planned = plan_tables(kind(tables, **options), cpu(), BatchShape.of(batches[0]), optimizer=SGD(lr=0.1))

    def body() -> tuple[PlanCheck, PlanCheck]:
        sharded = shard_embeddings(kind(tables, **options), planned, planned.mesh, SGD(lr=0.1))
        torch.manual_seed(0)

        def step() -> None:
            out = sharded(batches[rank()])
            parts = [x.values().sum() for x in out.values()] if case == "rows" else [out.values().sum()]
            torch.stack(parts).sum().backward()

        return planned.check(step, batches[rank()]), planned.check(step, batches[0])

    found, other = world(4).run(body)[3]
    assert found.ok, found
    assert abs(found.memory.difference) < 0.05
    assert not other.ok
    assert any(cause.startswith("results, rank ") for cause in other.different)


def test_a_bad_batch_is_the_error_of_a_step() -> None:
    batches = [batch(TABLES, seed) for seed in range(4)]
    for at, id_ in ((2, 4000), (1, -1)):
        batches[at].values()[3] = id_

    def step() -> None:
        planned = plan(TABLES)
        tables: Any = TABLES
        shard_embeddings(EmbeddingBagCollection(tables), planned, planned.mesh, SGD(lr=0.1))(batches[rank()])

    with pytest.raises(IdError) as real:
        world(4).run(step)
    with pytest.raises(IdError) as predicted:
        plan(TABLES).sent_bytes(batches)
    assert str(predicted.value) in str(real.value)
    assert "id -1 at position" in str(predicted.value)
    assert "of rank 1" in str(predicted.value)
    short = KeyedJaggedTensor(["f0"], torch.tensor([1]), lengths=torch.tensor([1]))
    with pytest.raises(Exception, match="f1"):
        plan(TABLES).sent_bytes([short] * 4)


# ---- what is wrong ---------------------------------------------------------------------------------------------------


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "unknown parameter": (
        lambda: perceptron_plan().what_if(pinned={"up.wieght": Shard(0)}), "Did you mean 'up.weight'?"
    ),
    "a module": (lambda: perceptron_plan().what_if(pinned={"up": Shard(0)}), "'up' is a module, but a placement "),
    "no such dim": (
        lambda: perceptron_plan().what_if(pinned={"up.weight": Shard(2)}),
        "up.weight of shape (256, 64) is pinned to Shard(2). Fix: one of Replicate(), Shard(0), Shard(1).",
    ),
    "change": (
        lambda: perceptron_plan().what_if(units=(), pined={}),  # type: ignore[call-arg]
        "no change 'pined'. Did you mean 'pinned'?",
    ),
    "unit": (lambda: perceptron_plan().what_if(units=("up.x",)), "units: 'up.x' matches no module. "),
    "by hand": (lambda: ModulePlan(Mesh((4,)), {}).what_if(reshard=False), "has no module to try changes on. "),
    "no reason": (lambda: ModulePlan(Mesh((4,)), {}).explain("up"), "no reason for 'up'. "),
    "table": (lambda: TablePlan(TABLES, {}, Mesh((4,)), 0.0).check(lambda: None, batch(TABLES, 0)), "placements only"),
}  # fmt: skip


@pytest.mark.parametrize(
    "changes", [{"reshard": "no"}, {"units": 3}, {"pinned": {"up.weight": "S(0)"}}, {"mesh": 4}, {"head_room": "0.1"}],
    ids=str,
)  # fmt: skip
def test_a_change_of_another_type_is_one_sentence(changes: dict[str, Any]) -> None:
    with pytest.raises(ShardwiseError, match=rf"what_if\(\): .*{next(iter(changes))}.*Fix: "):
        perceptron_plan().what_if(**changes)


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_sentence(case: str) -> None:
    call, text = WRONG[case]
    with pytest.raises(PlanError) as error:
        call()
    assert text in str(error.value)
    assert str(error.value).count("Fix: ") == 1
    assert len(str(error.value).splitlines()) == 1


def applied(planned: ModulePlan) -> str:
    try:
        planned.apply(Perceptron(4, 8))
    except (PlanError, MeshError) as error:
        return str(error)
    return ""


def test_a_plan_of_another_model_or_world_changes_nothing() -> None:
    planned = ModulePlan(Mesh((2, 2)), {"up": ColwiseParallel(), "down": RowwiseParallel()}, ("",))
    for other, ranks, text in (
        (replace(planned, units=("layers.0", "")), 4, "units: 'layers.0' matches no module. "),
        (replace(planned, styles={"upp": ColwiseParallel()}), 4, "'upp' matches no module. Did you mean 'up'?"),
        (replace(planned, styles={"up.weight": Shard(0, (3, 4))}), 4, "sizes (3, 4) add up to 7, but dim 0 has 8 "),
        (planned, 2, "but this world has 2 ranks. Fix: "),
        (planned, 5, "Rank 4 is not part of Mesh(0=2, 1=2). Fix: "),
    ):
        found = world(ranks).run(applied, other)
        assert text in found[-1]
        assert ranks != 4 or set(found) == {found[0]}


VALUES = ('"x"', "[]", "-1", "1.5", "true", "{}", "[[1]]", '["a"]')


@pytest.mark.parametrize("kind", ["tables", "module"])
def test_a_corrupted_file_is_refused_in_a_sentence_or_says_the_same(kind: str, tmp_path: Path) -> None:
    """Each value is replaced by values of other types, each key is misspelt, and each line left out."""
    path = tmp_path / "plan.toml"
    if kind == "tables":
        plan(TABLES, pinned={"t0": Shard(1, (8, 0, 0, 8)), "t2": Shard(0)}).save(path)
    else:
        styles: dict[str, Any] = {
            "a": ColwiseParallel(unit=4),
            "b.*": RowwiseParallel(sizes=(1, 2)),
            "w": Shard(1, (3, 4)),
        }
        ModulePlan(Mesh((4, 2), names=("dp", "tp")), styles, ("layers.0", "")).save(path)
    text = path.read_text()
    changed = [text[: m.start(1)] + new + text[m.end(1) :]
               for m in re.finditer(r'= ("[^"]*"|[\d.]+|\[[^]]*\]|true)', text) for new in VALUES]  # fmt: skip
    changed += [text[: m.start(1)] + "misspelt" + text[m.end(1) :] for m in re.finditer(r"\"?(\w+)\"? =", text)]
    changed += [text.replace(line, "", 1) for line in text.splitlines() if line]
    refused = 0
    for content in changed:
        path.write_text(content)
        if (error := refusal(path, kind)) is not None:
            refused += 1
            assert error.startswith(f"{path}: ")
            assert error.count("Fix: ") == 1
            assert len(error.splitlines()) == 1
    assert refused > 0.8 * len(changed)


def refusal(path: Path, kind: str) -> str | None:
    """Why a file is not read; None: it is."""
    try:
        TablePlan.load(path, TABLES) if kind == "tables" else ModulePlan.load(path)
    except PlanError as error:
        return str(error)
    return None
