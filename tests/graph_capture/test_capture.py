"""A replay gives what the function gives, bit for bit, forward and backward, and sends what it sends."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise import _collectives as collectives
from shardwise._graph_capture import Captured
from shardwise._models import ModelArgs, Transformer
from shardwise.testing import world

PLAN: dict[str, Any] = {
    "**.wq.weight": sw.Shard(0), "**.wk.weight": sw.Shard(0), "**.wv.weight": sw.Shard(0), "**.wo.weight": sw.Shard(1),
    "**.w1.*": sw.Shard(0), "**.w2.weight": sw.Shard(1), "tok_embeddings.weight": sw.Shard(0),
    "output.weight": sw.Shard(0),
}  # fmt: skip


def full_value(x: Any) -> Tensor:
    found: Tensor = x.full_tensor() if isinstance(x, sw.DTensor) else x
    return found.detach().clone()


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def step_of(function: Callable[..., Any], inputs: list[Tensor], parameters: list[Tensor]) -> list[Tensor]:
    """The loss and all gradients, which are cleared again."""
    loss = function(*inputs)
    loss.backward()
    leaves = [*parameters, *(x for x in inputs if x.requires_grad)]
    found = [full_value(loss), *(full_value(p.grad) for p in leaves if p.grad is not None)]
    for p in leaves:
        p.grad = None
    return found


def agrees(step: Captured, batches: list[list[Tensor]], parameters: list[Tensor]) -> None:
    """Every batch gives the same through `step`, recording or replaying, as through what it captured."""
    for inputs in batches:
        state = torch.get_rng_state()
        expected = step_of(step.function, inputs, parameters)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        found = step_of(step, inputs, parameters)
        assert len(found) == len(expected)
        assert all(map(same, found, expected))
        assert torch.equal(torch.get_rng_state(), after)


def batches(mesh: sw.Mesh, placements: list[sw.Placement], count: int = 3) -> list[list[Tensor]]:
    numbers = [torch.randint(0, 13, (5, 8)) for _ in range(2 * count)]
    sharded = [sw.distribute_tensor(x, mesh, placements) for x in numbers]
    return [list(pair) for pair in zip(sharded[::2], sharded[1::2], strict=True)]


@pytest.mark.parametrize(
    ("ranks", "dropout", "checkpointed"),
    [(1, 0.1, False), (3, 0.1, True), *(pytest.param(n, 0.0, True, marks=pytest.mark.slow) for n in (2, 4))],
)
def test_a_tensor_parallel_transformer_replays_bit_for_bit(ranks: int, dropout: float, checkpointed: bool) -> None:
    args = ModelArgs(n_layers=1, vocab_size=13, dropout_p=dropout, checkpoint_activations=checkpointed)

    def check() -> None:
        torch.manual_seed(0)
        mesh = sw.Mesh((ranks,))
        model = sw.shard_module(Transformer(args), PLAN, mesh=mesh)
        step = sw.capture(lambda x, y: F.cross_entropy(model(x).flatten(0, 1), y.flatten()))
        agrees(step, batches(mesh, [sw.Replicate()]), list(model.parameters()))
        assert len(step.graphs()) == 1

    world(ranks).run(check)


@world(4)
def test_each_layout_of_uneven_batches_on_a_grid_has_its_own_graph() -> None:
    torch.manual_seed(0)
    mesh = sw.Mesh((2, 2))
    model = sw.shard_module(Transformer(ModelArgs(n_layers=1, vocab_size=13, dropout_p=0.0)), {
        name: [sw.Replicate(), sharded] for name, sharded in PLAN.items()
    }, mesh=mesh)  # fmt: skip
    step = sw.capture(lambda x, y: F.cross_entropy(model(x).flatten(0, 1), y.flatten()))
    for rows in 2 * [sw.Shard(0), sw.Shard(0, [1, 4])]:
        agrees(step, batches(mesh, [rows, sw.Replicate()], 1), list(model.parameters()))
    assert len(step.graphs()) == 2


def test_a_replay_sends_as_much_in_as_many_collectives_and_runs_no_rules() -> None:
    def check() -> tuple[int, int, set[str]]:
        torch.manual_seed(0)
        mesh = sw.Mesh((2,))
        model = sw.shard_module(Transformer(ModelArgs(vocab_size=13, n_layers=1, dropout_p=0.0)), PLAN, mesh=mesh)
        step = sw.capture(lambda x, y: F.cross_entropy(model(x).flatten(0, 1), y.flatten()))
        data = batches(mesh, [sw.Replicate()], 2)
        agrees(step, data[:1], list(model.parameters()))
        calls = collectives.transport().ledger
        counts = []
        for function in (step.function, step):
            before = calls.num_calls
            function(*data[1]).backward()
            counts.append(calls.num_calls - before)
        ran = set()

        def note(frame: Any, event: str, _: Any) -> None:
            path = frame.f_code.co_filename.replace("\\", "/")
            if event == "call" and "/shardwise/" in path:
                ran.add(path.rsplit("/")[-1])

        sys.setprofile(note)
        try:
            step(*data[1])
        finally:
            sys.setprofile(None)
        return counts[0], counts[1], ran

    for eager, replayed, ran in world(2).run(check):
        assert eager == replayed > 0
        assert "api.py" in ran  # its collectives
        assert not ran & {
            "dispatcher.py",
            "recipes.py",
            "resolve.py",
            "local_calls.py",
            "row.py",
            "transformer.py",
        }


@world(2)
def test_every_kind_of_output_is_returned_unchanged() -> None:
    mesh = sw.Mesh((2,))
    weight = sw.distribute_tensor(torch.randn(4, 3), mesh, [sw.Shard(0)]).requires_grad_()
    offset = torch.ones(4, 1)

    def function(x: Tensor, flags: dict[str, Any]) -> dict[str, Any]:
        y = weight * x + offset * flags["times"]
        return {"y": y, "again": y, "x": x, "flags": ("kept", 3, None), "where": y.argmax(), "list": [y.sum()]}

    step = sw.capture(function)
    for times in (1, 2, 1, 2):
        x = sw.distribute_tensor(torch.randn(4, 3), mesh, [sw.Shard(0)]).requires_grad_()
        expected, found = function(x, {"times": times}), step(x, {"times": times})
        assert found["flags"] == ("kept", 3, None)
        assert found["x"] is x
        assert torch.equal(full_value(found["y"]), full_value(expected["y"]))
        assert torch.equal(full_value(found["again"]), full_value(expected["y"]))
        assert torch.equal(full_value(found["where"]), full_value(expected["where"]))
        assert found["y"].placements == expected["y"].placements
        assert not found["where"].requires_grad
        (found["list"][0] * 2 + found["y"].sum()).backward()
        assert torch.equal(full_value(x.grad), 3 * full_value(weight))
        assert step(x, {"times": times})["list"][0].requires_grad
    assert len(step.graphs()) == 2


def test_plain_tensors_and_modules_of_plain_torch_are_captured_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4))
    twin = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4))
    twin.load_state_dict(model.state_dict())
    step = sw.capture(twin)
    for _ in range(3):
        x = torch.randn(5, 2, 6, 6)
        a, b = model(x), step(x)
        a.square().sum().backward()
        b.square().sum().backward()
        assert torch.equal(a, b)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
    for a, b in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(a, b)  # the running statistics moved on


def test_backward_may_run_twice_over_a_trace_and_over_a_replay() -> None:
    weight = nn.Parameter(torch.randn(3))
    step = sw.capture(lambda x: (x * weight).exp().sum())
    for _ in range(2):
        x = torch.randn(3)
        loss = step(x)
        loss.backward(retain_graph=True)
        once = weight.grad.clone()  # type: ignore[union-attr]
        loss.backward()
        assert torch.equal(weight.grad, 2 * once)  # type: ignore[arg-type]
        weight.grad = None


def test_a_weight_that_changed_before_backward_is_an_error_in_a_replay_as_ever() -> None:
    weight = nn.Parameter(torch.randn(3))
    step = sw.capture(lambda x: (x * weight).exp().sum())
    step(torch.randn(3)).backward()
    loss = step(torch.randn(3).requires_grad_())
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("sharded", [sw.Shard(0), sw.Shard(1), sw.OnRanks(1)])
@world(2)
def test_lookups_go_where_the_ids_of_this_call_are(sharded: sw.Placement) -> None:
    torch.manual_seed(0)
    mesh = sw.Mesh((2,))
    model = sw.shard_module(nn.EmbeddingBag(9, 4, sparse=True), {"weight": sharded}, mesh=mesh)
    (weight,) = model.parameters()
    step = sw.capture(lambda ids: model(ids).square().sum())
    data = [[sw.distribute_tensor(torch.randint(0, 9, (5, 3)), mesh, [sw.Shard(0)])] for _ in range(4)]
    for inputs in data:
        parts = []
        for function in (step.function, step):
            function(*inputs).backward()
            grad: Any = weight.grad
            parts.append(grad.to_local()._values() if grad.is_sparse else full_value(grad).to_dense())
            weight.grad = None
        assert torch.equal(*parts)
    with pytest.raises(IndexError, match="id 9 at position"):
        step(sw.distribute_tensor(torch.full((5, 3), 9), mesh, [sw.Shard(0)]))


@pytest.mark.processes
def test_real_processes_replay_as_simulated_ranks_do() -> None:
    assert all(world(2, real=True).run(_trained))


def _trained() -> bool:
    torch.manual_seed(0)
    mesh = sw.Mesh((2,))
    model = sw.shard_module(Transformer(ModelArgs(n_layers=1, vocab_size=13, dropout_p=0.1)), PLAN, mesh=mesh)
    step = sw.capture(lambda x, y: F.cross_entropy(model(x).flatten(0, 1), y.flatten()))
    agrees(step, batches(mesh, [sw.Replicate()]), list(model.parameters()))
    return len(step.graphs()) == 1


@pytest.mark.parametrize("ranks", [1, 3, pytest.param(5, marks=pytest.mark.slow)])
def test_batches_and_tables_shorter_than_the_ranks_and_none_at_all_are_replayed(ranks: int) -> None:
    plan = {"0.weight": sw.Shard(0), "1.*": sw.Shard(0), "3.weight": sw.Shard(1)}

    def check() -> None:
        torch.manual_seed(0)
        mesh = sw.Mesh((ranks,))
        layers = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 2), nn.GELU(), nn.Linear(2, 3))
        model = sw.shard_module(layers, plan, mesh=mesh)
        step = sw.capture(lambda x, y: F.cross_entropy(model(x), y, reduction="sum"))
        for rows in (7, 2, 0):
            ids = [torch.randint(0, 3, (rows,)) for _ in range(6)]
            sharded: list[Tensor] = [sw.distribute_tensor(x, mesh, [sw.Shard(0)]) for x in ids]
            agrees(step, [sharded[:2], sharded[2:4], sharded[4:]], list(model.parameters()))
        assert len(step.graphs()) == 3

    world(ranks).run(check)


def test_a_rank_that_fails_between_replays_is_named_to_those_that_replay() -> None:
    received: list[BaseException] = []

    def check() -> None:
        mesh = sw.Mesh((2,))
        weight = sw.distribute_tensor(torch.randn(4, 4), mesh, [sw.Shard(0)])
        step = sw.capture(lambda x: (weight @ x).sum().redistribute(placements=[sw.Replicate()]))
        x = sw.distribute_tensor(torch.randn(4, 4), mesh, [sw.Replicate()])
        assert torch.equal(full_value(step(x)), full_value(step(x)))
        if sw.rank() == 1:
            raise ValueError("out of memory")
        try:
            step(x)
        except sw.ShardwiseError as error:
            received.append(error)
            raise

    with pytest.raises(ValueError, match="out of memory"):
        world(2).run(check)
    assert "ValueError: out of memory" in str(received[0])


@world(4)
def test_broadcasts_and_all_gathers_are_replayed() -> None:
    mesh = sw.Mesh((4,))
    on_one = sw.distribute_tensor(torch.arange(6.0), mesh, [sw.OnRanks(1)]).requires_grad_()
    rows = sw.distribute_tensor(torch.ones(2048, 1024), mesh, [sw.Shard(0)]).requires_grad_()

    def step(x: sw.DTensor, y: sw.DTensor) -> Tensor:
        full = (z.redistribute(placements=[sw.Replicate()]) for z in (x, y))
        loss = sum(z.sum() for z in full)
        assert isinstance(loss, Tensor)
        loss.backward()
        return loss

    captured = sw.capture(step)
    with sw.count_comms() as comms:
        found = [full_value(captured(on_one, rows)).item() for _ in range(3)]
    assert found == [15.0 + 2048 * 1024] * 3
    assert (comms.calls["broadcast"], comms.calls["all_gather"]) == (3, 3)
    assert full_value(on_one.grad).tolist() == [3.0] * 6
