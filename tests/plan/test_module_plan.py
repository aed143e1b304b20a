"""Plans of modules: they are those that people write, they compute what one process does, and what they cost holds."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils import _pytree as pytree

from shardwise import Mesh, Partial, Placement, Replicate, Shard
from shardwise import _collectives as collectives
from shardwise._models import ModelArgs, Transformer
from shardwise.errors import PlanError
from shardwise.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from shardwise.plan import Link, ModulePlan, Topology, module_search, plan_module, price_module
from shardwise.plan.module_search import Found, Search, step_of
from shardwise.plan.module_styles import as_globs
from shardwise.simulation.api import simulate_rank, training
from shardwise.testing import world
from tests.parallel.one_process import full

GPUS = Topology.preset("H100", ranks_per_host=4)
LINK = Link(1e9, 1e-7)
# So slow that sharding pays for tiny modules.
SLOW = Topology(1, 4, 1 << 30, LINK, LINK, flops=1e9, memory_bandwidth=1e10, lookup_bandwidth=1e9, device_type="cpu")
LARGE = ModelArgs(n_layers=2, dim=4096, n_heads=32, n_kv_heads=8, vocab_size=64_000, max_seq_len=512, dropout_p=0.0)
SMALL = ModelArgs(n_layers=2, vocab_size=32, dropout_p=0.0)
HEADS = ModelArgs(n_layers=1, dim=20, n_heads=10, n_kv_heads=5, vocab_size=11, hidden_dim=7, dropout_p=0.0)


class Perceptron(nn.Module):
    def __init__(self, dim: int, hidden: int, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden, bias), nn.Linear(hidden, dim, bias)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.gelu(self.up(x)))
        return result


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def on_meta(args: ModelArgs) -> Transformer:
    with torch.device("meta"):
        return Transformer(args)


def meta_batch(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.empty(shape, dtype=torch.long, device="meta"), torch.empty(shape, dtype=torch.long, device="meta")


@cache
def large_plan() -> ModulePlan:
    return plan_module(on_meta(LARGE), GPUS, meta_batch(1, 512), forward=loss_of, mesh=Mesh((4,)))


@cache
def small_plan() -> ModulePlan:
    mesh = Mesh((2, 2), names=("dp", "tp"))
    return plan_module(on_meta(SMALL), SLOW, meta_batch(4, 16), forward=loss_of, mesh=mesh)


# ---- what is found ------------------------------------------------------------------------------------------------


def test_a_perceptron_is_column_parallel_then_row_parallel() -> None:
    with torch.device("meta"):
        model, x = Perceptron(4096, 16384), torch.empty(2048, 4096)
    plan = plan_module(model, GPUS, (x,), mesh=Mesh((4,)))
    assert plan.styles == {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    assert plan.gap < 1e-6
    assert plan.seconds == pytest.approx(price_module(model, plan, GPUS, (x,)).seconds, rel=0.1)


def test_a_plan_by_hand_is_timed_by_what_it_computes_and_sends() -> None:
    with torch.device("meta"):
        model, x = Perceptron(4096, 16384, bias=False), torch.empty(2048, 4096)
    price = price_module(
        model, ModulePlan(Mesh((4,)), {"up": ColwiseParallel(), "down": RowwiseParallel()}), GPUS, (x,)
    )
    assert price.memory["parameters"] == 4 * 4096 * 16384 * 2 // 4
    # An all-reduce of the output, of which a rank receives three quarters twice.
    sums = GPUS.costs.seconds("all_reduce", range(4), range(4), 1.5 * 2048 * 4096 * 4)
    assert price.communication == pytest.approx(sums)
    # The input needs no gradient, so of six products five run.
    assert price.compute >= 5 * 2 * 2048 * 4096 * 16384 / 4 / GPUS.flops


@pytest.mark.parametrize("reshard", [False, True])
def test_a_plan_is_timed_by_its_second_step(reshard: bool) -> None:
    """`price_module` makes the states of AdamW without a first step; here there is one."""
    model, batch = on_meta(SMALL), meta_batch(4, 16)
    plan = replace(small_plan(), reshard=reshard)
    build = training(model, lambda model, _: plan.apply(model, src_data_rank=None), step_of(batch, loss_of, 2))
    second, _ = simulate_rank(build, plan.mesh, SLOW, 0)
    price = price_module(model, plan, SLOW, batch, forward=loss_of)
    assert (price.memory, price.sent_bytes) == (second.memory, second.sent_bytes)
    assert price.seconds == pytest.approx(second.compute + second.communication, rel=1e-4)


def test_a_transformer_gets_the_plan_of_megatron() -> None:
    plan = large_plan()
    column = ColwiseParallel(use_local_output=False)
    for layer in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1"):
        assert plan.styles[f"layers.*.{layer}"] == column
    for layer in ("attention.wo", "feed_forward.w2"):
        assert isinstance(plan.styles[f"layers.*.{layer}"], RowwiseParallel)
    assert isinstance(plan.styles["tok_embeddings"], RowwiseParallel)  # vocabulary-parallel, tied to the output
    assert plan.styles["output"] == column  # as are the logits, of which the loss is computed
    assert plan.gap < 1e-6


def test_heads_that_share_a_key_stay_on_one_rank() -> None:
    args = replace(LARGE, dim=2560, n_heads=10, n_kv_heads=5)
    plan = plan_module(on_meta(args), GPUS, meta_batch(1, 128), forward=loss_of, mesh=Mesh((4,)))
    assert plan.styles["layers.*.attention.wq"] == ColwiseParallel(use_local_output=False, unit=512)
    assert plan.styles["layers.*.attention.wk"] == ColwiseParallel(use_local_output=False, unit=256)


@pytest.mark.parametrize("sequence", [False, True])
def test_a_step_takes_no_longer_than_under_the_plan_by_hand(sequence: bool) -> None:
    model, batch, plan = on_meta(LARGE), meta_batch(1, 512), large_plan()
    tokens, targets = (torch.zeros(x.shape, dtype=x.dtype) for x in batch)

    def by_hand(model: nn.Module, _: Mesh) -> None:
        assert isinstance(model, Transformer)
        Transformer.parallelize(model, Mesh((4,)), sequence, gather_output=False, src_data_rank=None)

    build = training(model, by_hand, lambda model: loss_of(model, tokens, targets), first_step=False)
    hand, _ = simulate_rank(build, Mesh((4,)), GPUS, 0)
    ours = price_module(model, plan, GPUS, batch, forward=loss_of)
    assert ours.seconds < 1.001 * hand.seconds
    assert plan.seconds == pytest.approx(ours.seconds, rel=0.15)


# ---- what it computes -----------------------------------------------------------------------------------------------


def learnt(model: nn.Module, tokens: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = loss_of(model, tokens, targets)
    loss.backward()
    return full(loss.detach()), {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("args", "mesh"),
    [
        pytest.param(SMALL, Mesh((4, 1)), id="dense-data"),
        pytest.param(SMALL, Mesh((2, 2), names=("dp", "tp")), id="dense-both"),
        pytest.param(HEADS, Mesh((3,)), id="heads-tensor"),
        pytest.param(HEADS, Mesh((2, 2), names=("dp", "tp")), id="heads-both"),
        pytest.param(replace(SMALL, num_experts=4), Mesh((4,)), id="experts-tensor"),
    ],
)
def test_a_step_under_the_plan_is_that_of_one_process(args: ModelArgs, mesh: Mesh) -> None:
    torch.manual_seed(0)
    model = Transformer(args).double()
    tokens, targets = torch.randint(args.vocab_size, (2, 4, 12))
    machine = replace(SLOW, ranks_per_host=mesh.size())
    plan = plan_module(model, machine, (tokens, targets), forward=loss_of, mesh=mesh)
    parts = mesh.shape[0] if mesh.ndim > 1 else 1
    assert plan.step is not None
    assert plan.step.seconds == pytest.approx(plan.seconds, rel=0.12)  # dispatch does what was planned

    def body() -> tuple[Tensor, dict[str, Tensor]]:
        part = collectives.rank() // (mesh.size() // parts)
        return learnt(plan.apply(copy.deepcopy(model)), tokens.chunk(parts)[part], targets.chunk(parts)[part])

    found = world(mesh.size()).run(body)
    loss, gradients = learnt(copy.deepcopy(model), tokens, targets)
    assert len(gradients) == len(list(model.parameters()))
    assert_close(torch.stack([one[0] for one in found]).mean(), loss, rtol=1e-6, atol=0.0)  # logits are float32
    for _, own in found:
        assert_close(own, gradients, rtol=1e-6, atol=1e-9)
    if parts < mesh.size():
        assert any(isinstance(reason.placement, Shard) for reason in plan.reasons)


class Block(nn.Module):
    """A residual block, which returns no output of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Perceptron(32, 128)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.inner(x)
        return result


@pytest.mark.parametrize("ranks", [3, 4])
def test_without_a_loss_every_rank_gets_the_full_plain_result(ranks: int) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Block(), Block()).double(), torch.randn(5, 32, dtype=torch.double)
    plan = plan_module(model, replace(SLOW, ranks_per_host=ranks), (x,), mesh=Mesh((ranks,)))
    assert any(isinstance(reason.placement, Shard) for reason in plan.reasons)

    def body() -> Tensor:
        found: Tensor = plan.apply(copy.deepcopy(model))(x)
        assert type(found) is Tensor
        return found

    for found in world(ranks).run(body):
        assert_close(found, model(x))


class Twice(nn.Module):
    """A layer that runs twice, and one of another width; the first call of `layer` has a plain input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(32, 32), nn.Linear(32, 20)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(F.gelu(self.layer(x)))
        return y, self.last(y)


def same_as_one_process(
    model: nn.Module, x: Tensor, mesh: Mesh, full_result: bool, **pinned: Placement
) -> None:  # fmt: skip
    plan = plan_module(model, replace(SLOW, ranks_per_host=mesh.size()), (x,), mesh=mesh, pinned=pinned)
    parts = mesh.shape[0] if mesh.ndim > 1 else 1

    def body() -> list[Tensor]:
        part = x.chunk(parts)[collectives.rank() // (mesh.size() // parts)]
        found = pytree.tree_leaves(plan.apply(copy.deepcopy(model))(part))
        assert not full_result or {type(y) for y in found} == {Tensor}
        return [full(y.detach()) for y in found]

    for rank, found in enumerate(world(mesh.size()).run(body)):
        own = x.chunk(parts)[rank // (mesh.size() // parts)]
        assert_close(found, [y.detach() for y in pytree.tree_leaves(model(own))])


@pytest.mark.parametrize(("mesh", "shard"), [(Mesh((3,)), Shard(0)), (Mesh((2, 2)), Shard(1))], ids=str)
def test_a_layer_whose_output_is_the_result_returns_all_of_it(mesh: Mesh, shard: Shard) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 32, dtype=torch.double)
    same_as_one_process(nn.Linear(32, 20).double(), x, mesh, True, weight=shard)
    pinned: dict[str, Placement] = {"0.weight": Replicate(), "1.weight": shard}
    same_as_one_process(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 20)).double(), x, mesh, True, **pinned)


@pytest.mark.parametrize(
    ("mesh", "placement"), [(Mesh((3,)), Shard(1)), (Mesh((2, 2)), Shard(0)), (Mesh((2, 2)), Replicate())], ids=str
)
def test_a_module_that_runs_twice_computes_what_one_process_does(mesh: Mesh, placement: Placement) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 32, dtype=torch.double)
    same_as_one_process(Twice().double(), x, mesh, False, **{"layer.weight": placement, "last.weight": Shard(0)})
    again = nn.Sequential(block := Block(), block).double()
    same_as_one_process(again, x, mesh, True, **{"0.inner.up.weight": placement})


# ---- meshes and memory ----------------------------------------------------------------------------------------------


def test_all_shapes_of_the_mesh_are_tried_and_the_best_is_taken() -> None:
    with torch.device("meta"):
        model, x = Perceptron(256, 512), torch.empty(65536, 256)
    plan = plan_module(model, GPUS, (x,))
    assert {tried.shape for tried in plan.tried} == {(1, 4), (2, 2), (4, 1)}
    assert plan.mesh == Mesh((4, 1), names=("dp", "tp"))  # few weights, many rows: data parallel
    assert plan.styles == {}
    assert plan.units == ("",)
    for tried in plan.tried:
        assert tried.seconds is not None
        assert tried.seconds >= plan.seconds >= plan.bound
        one = plan_module(model, GPUS, (x,), mesh=Mesh(tried.shape))
        assert one.seconds == pytest.approx(tried.seconds) or (tried.is_bound and one.seconds >= tried.seconds)


def test_of_close_shapes_the_shorter_simulated_step_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model, x = Perceptron(256, 512), torch.empty(65536, 256)
    true_costs = Search._on

    def wrong_costs(search: Search, shape: tuple[int, int], *rest: Any) -> Found | None:
        found = true_costs(search, shape, *rest)
        return found and found._replace(seconds=found.seconds * (50 if shape == (4, 1) else 1))

    monkeypatch.setattr(Search, "_on", wrong_costs)
    assert plan_module(model, GPUS, (x,)).mesh.shape != (4, 1)
    monkeypatch.setattr(module_search, "CLOSE", 100)
    assert plan_module(model, GPUS, (x,)).mesh.shape == (4, 1)


def test_a_few_rows_on_many_ranks_take_the_seconds_and_bytes_of_the_fullest_rank() -> None:
    with torch.device("meta"):
        model, x = Perceptron(9, 1 << 16), torch.empty(64, 9)
    plan = plan_module(model, replace(GPUS, hosts=4), (x,), mesh=Mesh((16, 1)))
    assert plan.step is not None
    assert plan.seconds == pytest.approx(plan.step.seconds, rel=0.1)


def test_less_memory_takes_a_plan_that_fits_or_says_how_much_is_missing() -> None:
    model, batch = on_meta(SMALL), meta_batch(4, 16)
    plan = plan_module(model, SLOW, batch, forward=loss_of, head_room=0.0)
    assert plan.step is not None
    less = replace(SLOW, memory=int(0.9 * plan.step.peak_bytes))
    other = plan_module(model, less, batch, forward=loss_of, head_room=0.0)
    assert other.step is not None
    assert other.step.peak_bytes <= less.memory
    assert other.step == price_module(model, other, less, batch, forward=loss_of)
    assert plan.seconds < other.seconds
    assert other.bound <= other.seconds
    with pytest.raises(PlanError, match=r"Does not fit on 4 ranks: a rank has 1000 B and needs .*\. Fix: more ranks"):
        plan_module(model, replace(SLOW, memory=1000), batch, forward=loss_of, head_room=0.0)


def test_inputs_that_the_module_or_the_function_does_not_take_are_refused() -> None:
    batch = (torch.zeros(4, 4),)
    with pytest.raises(PlanError, match=r"Perceptron.forward does not take the inputs: .*'x'.* Fix: inputs that it"):
        plan_module(Perceptron(4, 4), SLOW, {"y": batch[0]})

    def loss(model: nn.Module) -> None: ...

    with pytest.raises(PlanError, match=r"loss does not take the module and the inputs: .* Fix: a function from the"):
        plan_module(Perceptron(4, 4), SLOW, batch, forward=loss)


def test_without_a_tensor_or_with_another_mesh_there_is_no_plan() -> None:
    with pytest.raises(PlanError, match="no input is a tensor"):
        plan_module(Perceptron(4, 4), SLOW, (3,))
    for mesh in (Mesh((2, 2, 1)), Mesh((3,))):
        with pytest.raises(PlanError, match="a mesh of 4 ranks, those of the topology, and of one or two axes"):
            plan_module(Perceptron(4, 4), SLOW, (torch.zeros(4, 4),), mesh=mesh)


# ---- reasons and files ----------------------------------------------------------------------------------------------


def test_each_parameter_has_a_reason_and_what_the_next_best_costs() -> None:
    with torch.device("meta"):
        model, x = Perceptron(4096, 16384), torch.empty(2048, 4096)
    plan = plan_module(model, GPUS, (x,), mesh=Mesh((4,)))
    assert {name for reason in plan.reasons for name in reason.names} == dict(model.named_parameters()).keys()
    assert all(reason.more_seconds > 0 for reason in plan.reasons)
    text = plan.explain("up.weight")
    assert text.startswith("up.weight is Shard(0): dim 0 of operand 1")
    assert " The next best is " in text
    assert all(name in str(plan) for name in ("up.weight", "ColwiseParallel", "next best"))
    with pytest.raises(PlanError, match=r"no reason for 'up\.wieght'\. Did you mean 'up\.weight'"):
        plan.explain("up.wieght")


STYLES: dict[str, Any] = {
    "a": ColwiseParallel(output_layouts=Shard(1), unit=4),
    "b.*": RowwiseParallel(sizes=(1, 2), output_layouts=Partial()),
    "c": SequenceParallel(sequence_dim=0),
    "d": PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate()),
    "e": PrepareModuleInput(input_kwarg_layouts={"x": Shard(1)}, desired_input_kwarg_layouts={"x": Replicate()}),
    "f": PrepareModuleInputOutput(output_layouts=(Shard(0), None), desired_output_layouts=(Replicate(), None)),
    "g.weight": Shard(1, sizes=(3, 4)),
}


@pytest.mark.parametrize("mesh", [Mesh((2,)), Mesh((4, 2), names=("dp", "tp"))], ids=str)
def test_a_plan_is_read_from_the_file_that_it_writes(mesh: Mesh, tmp_path: Path) -> None:
    styles = {key: style for key, style in STYLES.items() if key != "f"}  # TOML has no None
    plan = ModulePlan(mesh, styles, ("layers.0", ""), reshard=False)
    plan.save(tmp_path / "plan.toml")
    assert ModulePlan.load(tmp_path / "plan.toml") == plan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("module plan 1", "module plan 9"), "format is 'shardwise module plan 9'"),
        (lambda text: text.replace("SequenceParallel", "SequenceParalel"), "Did you mean 'SequenceParallel'"),
        (lambda text: text.replace("sequence_dim", "dim"), "SequenceParallel has no option 'dim'"),
        (lambda text: text.replace("Shard(1,", "Sharp(1,"), "Sharp"),
        (lambda text: text.replace("units", "unit"), "units"),
        (lambda text: text.replace('"2"', '"x"'), "x"),
    ],
)
def test_a_wrong_file_is_refused_in_a_sentence(change: Callable[[str], str], message: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    styles = {key: STYLES[key] for key in ("c", "g.weight")}
    file.write_text(change(ModulePlan(Mesh((2,)), styles).as_toml()))
    with pytest.raises((PlanError, ValueError), match=message):
        ModulePlan.load(file)


def test_the_code_of_a_plan_applies_it() -> None:
    torch.manual_seed(0)
    model, plan = Transformer(SMALL), small_plan()

    def body() -> None:
        applied, executed = copy.deepcopy(model), copy.deepcopy(model)
        plan.apply(applied)
        exec(plan.as_code(), {"model": executed})  # noqa: S102 - the code of a plan is what is tested
        assert [str(p) for p in applied.parameters()] == [str(p) for p in executed.parameters()]

    assert "fully_shard" in plan.as_code()
    world(4).run(body)


def test_blocks_that_differ_are_named_one_by_one() -> None:
    a, b = ColwiseParallel(), RowwiseParallel()
    paths = ["layers.0.w", "layers.1.w", "layers.0.v", "layers.1.v"]
    entries: dict[str, Any] = {"layers.0.w": [a], "layers.1.w": [a], "layers.0.v": [a], "layers.1.v": [b]}
    assert as_globs(entries, paths) == {"layers.*.w": a, "layers.0.v": a, "layers.1.v": b}
    del entries["layers.1.w"]
    assert "layers.0.w" in as_globs(entries, paths)
