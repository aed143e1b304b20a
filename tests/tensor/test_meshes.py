"""Operands on different meshes, ranks outside the mesh of an op, and tensors of other ranks and worlds."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.testing import assert_close

import shardwise as sw
import shardwise.checkpoint
from shardwise import DTensor, Mesh, OnRanks, Partial, Placement, Replicate, Shard, distribute_tensor, rank, strict
from shardwise import _collectives as collectives
from shardwise.errors import MeshError, MismatchError, RuleError
from shardwise.experimental import local_map
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.collectives.real_ranks import run_script

S0, S1, R = Shard(0), Shard(1), Replicate()
A, B = torch.randn(7, 3, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
LINE, GRID = Mesh((4,)), Mesh((2, 2))
PAIR, OTHER_PAIR = Mesh((2,), (0, 1)), Mesh((2,), (3, 2))

CASES: list[tuple[Mesh, list[Placement], Mesh, list[Placement]]] = [
    (LINE, [S0], GRID, [S0, R]),
    (LINE, [Shard(0, [1, 0, 5, 1])], GRID, [S1, S0]),
    (GRID, [Partial(), S0], LINE, [S1]),
    (PAIR, [S0], OTHER_PAIR, [S0]),
    (PAIR, [Partial()], OTHER_PAIR, [OnRanks(1)]),
    (LINE, [R], PAIR, [S1]),
]


def laid_out(x: Tensor, mesh: Mesh, placements: list[Placement]) -> DTensor:
    return as_dtensor(distribute_tensor(x, LINE, [R]).redistribute(mesh, placements).detach().requires_grad_())


def everywhere(x: Tensor | None) -> Tensor:
    return as_dtensor(x).redistribute(LINE, [R]).to_local()


@world(4)
def test_operands_of_different_meshes_are_brought_to_one() -> None:
    x, y = A.clone().requires_grad_(), B.clone().requires_grad_()
    (x * y).sin().sum().backward()
    for mesh_a, placed_a, mesh_b, placed_b in CASES:
        a, b = laid_out(A, mesh_a, placed_a), laid_out(B, mesh_b, placed_b)
        out = as_dtensor((a * b).sin())
        assert out.layout_.mesh in (mesh_a, mesh_b)
        out.sum().backward()
        for got, want in ((out, (A * B).sin()), (a.grad, x.grad), (b.grad, y.grad)):
            assert_close(everywhere(got), want)


def test_a_rank_outside_a_mesh_runs_no_call_that_was_cached_in_a_smaller_world() -> None:
    def local_shapes() -> list[tuple[int, ...]]:
        x: Any = distribute_tensor(A, PAIR, [S0])
        results: list[Any] = [x.sum(), x.sum(0), x.sum(1), x.T, x + x, x.exp_()]
        return [tuple(out.to_local().shape) for out in results]

    outside = [(0,), (0,), (0,), (0, 7), (0, 3), (0, 3)]
    for size in (4, 2, 4):
        assert world(size).run(local_shapes)[2:] == [outside] * (size - 2)


@world(4)
def test_the_largest_operand_stays_and_ops_in_place_keep_their_mesh() -> None:
    big, small = distribute_tensor(A, LINE, [S0]), distribute_tensor(A[0], GRID, [S0, R])
    with sw.count_comms() as comms:
        assert as_dtensor(big + small).placements == (S0,)
    assert comms.implicit
    assert comms.total_bytes <= 3 * 3 * 8 * 4
    small.add_(as_dtensor(big.sum(0)))
    assert small.layout_.mesh == GRID
    assert_close(small.full_tensor(), A[0] + A.sum(0))


@world(4)
def test_an_op_without_a_rule_takes_operands_of_different_meshes_but_not_in_strict_mode() -> None:
    a, b = distribute_tensor(A, LINE, [S0]), distribute_tensor(B, GRID, [S0, S1])
    assert_close(everywhere(torch.cdist(a, b)), torch.cdist(A, B))
    with strict(), pytest.raises(RuleError) as caught:
        torch.add(a, b)
    assert str(caught.value) == (
        "add: operands live on different meshes, Mesh(0=4) and Mesh(0=2, 1=2), which strict mode refuses. "
        "Fix: redistribute one of them to the other's device_mesh."
    )


NAMED = Mesh((2, 3), tuple(range(5, -1, -1)), names=("dp", "tp"))


@pytest.mark.parametrize("axis", ["dp", "tp"])
@pytest.mark.parametrize("placements", [[R, R], [S0, R], [R, S1], [S1, S0], [Partial(), S0]], ids=str)
@pytest.mark.parametrize("own", [R, S0, S1, Partial()], ids=str)
def test_a_tensor_on_the_own_slice_of_each_rank_counts_as_replicated_along_the_other_axes(
    own: Placement, placements: list[Placement], axis: str
) -> None:
    """Ranks took it for one on their slice only, and made different collectives."""

    def outcome(x: Any, y: Any, op: Callable[[Any, Any], Any]) -> list[Any]:
        out = op(x, y)
        (slope,) = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
        (out.square().sum() + slope.square().sum()).backward()
        return [out, x.grad, y.grad]

    @world(6)
    def body() -> None:
        for op in (torch.mul, torch.rsub):
            a: Any = distribute_tensor(A[:1], NAMED[axis], [R]).redistribute(placements=[own])
            b: Any = distribute_tensor(B, Mesh((6,)), [R]).redistribute(NAMED, placements)
            found = outcome(a.detach().requires_grad_(), b.detach().requires_grad_(), op)
            expected = outcome(A[:1].clone().requires_grad_(), B.clone().requires_grad_(), op)
            for got, want, mesh in zip(found, expected, (NAMED, NAMED[axis], NAMED), strict=True):
                assert got.layout_.mesh == mesh
                assert_close(got.full_tensor(), want)

    body()


ACROSS: dict[str, Callable[[Any, Any], Any]] = {
    "add": torch.add,
    "vstack": lambda x, y: torch.vstack((x, y)),
    "matmul": lambda x, y: x.T @ y,
    "foreach": lambda x, y: torch._foreach_mul([x], [y])[0],
    "redistribute": lambda x, y: y + (x.redistribute(y.device_mesh, [S0]) if isinstance(x, DTensor) else x),
}


@pytest.mark.parametrize("placements", [(S0, S0), (R, S1), (Partial(), Shard(0, (0, 7)))], ids=str)
@pytest.mark.parametrize("op", ACROSS)
@world(4)
def test_tensors_on_slices_of_one_mesh_along_different_axes(op: str, placements: tuple[Placement, Placement]) -> None:
    """Each rank has slices of its own, so no rank may wait for ranks outside of these."""
    mesh = Mesh((2, 2), names=("dp", "tp"))
    pairs = zip((A, B), ("dp", "tp"), placements, strict=True)
    x, y = (distribute_tensor(v, mesh[axis], [R]).redistribute(placements=[p]).detach() for v, axis, p in pairs)
    want: list[Tensor] = [A.clone().requires_grad_(), B.clone().requires_grad_()]
    for a, b in ((x.requires_grad_(), y.requires_grad_()), want):
        ACROSS[op](a, b).sin().sum().backward()
    for got, leaf in zip((x, y), want, strict=True):
        assert_close(as_dtensor(got.grad).full_tensor(), leaf.grad)


def test_ranks_compare_once_whether_each_passes_a_slice_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    gather = collectives.gather_json

    def counting(value: Any, ranks: tuple[int, ...]) -> list[Any]:
        compared.append(rank())
        return gather(value, ranks)

    monkeypatch.setattr(collectives, "gather_json", counting)

    @world(4)
    def body() -> None:
        mesh = Mesh((2, 2), names=("dp", "tp"))
        a, b, c = (distribute_tensor(A, m, [S0, R][: m.ndim]) for m in (mesh, mesh["tp"], mesh["dp"]))
        before = len(compared)
        for _ in range(3):
            for out, want in ((a + b, A + A), (a * b, A * A), (b.T @ a, A.T @ A), (c * b, A * A)):
                assert_close(as_dtensor(out).full_tensor(), want)
        assert len(compared) - before <= 8  # all ranks for the pair on mesh and mesh["tp"], and for that on its slices

    body()


@world(4)
def test_a_tensor_on_one_slice_where_each_rank_passed_its_own_is_an_error_on_ranks_outside() -> None:
    mesh = Mesh((2, 2), names=("dp", "tp"))
    a, b = distribute_tensor(A, mesh, [S0, R]), distribute_tensor(B, mesh["tp"], [S0])
    assert_close(as_dtensor(a + b).full_tensor(), A + B)
    on_one = distribute_tensor(B, LINE, [R]).redistribute(Mesh((2,), (0, 1)), [S0])
    if rank() < 2:
        a + on_one
    else:
        with pytest.raises(MeshError, match="Earlier each rank passed a tensor on a mesh of its own"):
            a + on_one


@world(4)
def test_values_that_differ_between_slices_are_an_error() -> None:
    mesh = Mesh((2, 2), names=("dp", "tp"))
    a = distribute_tensor(A + mesh.get_local_rank("tp"), mesh["dp"], [S0])
    with pytest.raises(MismatchError, match="add: the tensor on its axes 'dp' beside one on"):
        as_dtensor(a + distribute_tensor(B, mesh, [S0, S1])).redistribute(placements=[S0, R])
    a = distribute_tensor(A + mesh.get_local_rank("dp"), mesh["tp"], [S0])
    with pytest.raises(MismatchError, match="add: the tensor on another slice"):
        as_dtensor(distribute_tensor(B, mesh["dp"], [S0]) + a).full_tensor()


@world(4)
def test_a_tensor_on_one_slice_is_redistributed_to_the_mesh() -> None:
    a = laid_out(A, Mesh((2,), (0, 2)), [S0])
    assert_close(everywhere(distribute_tensor(B, GRID, [S0, S1]) * a), A * B)


@world(4)
def test_a_model_on_some_ranks_trains_while_the_others_hold_nothing() -> None:
    def trained(model: nn.Module, x: Any) -> list[Any]:
        out = model(x)
        loss = F.mse_loss(out, torch.ones_like(out)) + out.max() + out.softmax(1).amax(0).prod()
        loss.backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 2)).double()
    for p in plain.parameters():
        nn.init.normal_(p)
    sharded = copy.deepcopy(plain)
    for child in sharded:
        for name, p in list(child.named_parameters()):
            child.register_parameter(
                name, nn.Parameter(distribute_tensor(p, LINE, [R]).redistribute(PAIR, [R]).detach())
            )
    expected = trained(plain, A.clone().requires_grad_())
    for placement in (S0, S1, R, Shard(0, [5, 2]), OnRanks(0)):
        sharded.zero_grad()
        for got, want in zip(trained(sharded, laid_out(A, PAIR, [placement])), expected, strict=True):
            assert_close(everywhere(got), want)


@world(3)
def test_ranks_outside_the_mesh_hold_results_without_elements() -> None:
    x = distribute_tensor(A, Mesh((3,)), [R]).redistribute(Mesh((2,), (2, 0)), [S0])
    for out in (x.amax(0), x @ x.mT, x.max(), torch.sort(x, 0)[0], x[2:4]):
        assert tuple(as_dtensor(out).to_local().shape) == as_dtensor(out).layout_.local_shape(rank())


PAIR, ALL = Mesh((2,), (1, 0)), Mesh((5,))


@world(5)
def test_values_on_another_mesh_are_fetched_and_gradients_come_back_to_ranks_outside_it() -> None:
    plain = torch.arange(4.0)
    x, y = distribute_tensor(plain.clone(), PAIR, [S0]), distribute_tensor(plain.clone(), ALL, [S0])
    x[distribute_tensor(plain > 1, ALL, [S0])] = 3
    y[distribute_tensor(plain > 2, PAIR, [S0])] = 7
    y[:2] = x[2:]
    rows = y[distribute_tensor(torch.tensor([0, 3]), PAIR, [S0])]
    assert y.tolist() == [3, 3, 2, 7]
    assert rows.tolist() == [3, 7]
    if rank() in PAIR.ranks:
        assert x.tolist() == [0, 1, 3, 3]
    mine = torch.ones(3, requires_grad=True)
    x = DTensor.from_local(mine, PAIR, [R], run_check=False, shape=(3,))
    (x.redistribute(ALL, [S0]) * 2).sum().backward()
    assert mine.grad is not None
    assert mine.grad.tolist() == ([2.0] * 3 if rank() in PAIR.ranks else [0.0] * 3)
    table = torch.ones(3, 4, requires_grad=True)
    F.embedding(distribute_tensor(torch.tensor([0, 1]), PAIR, [R]), table).sum().backward()
    assert table.grad is not None
    assert table.grad[:, 0].tolist() == ([1, 1, 0] if rank() in PAIR.ranks else [0, 0, 0])
    # Its last op, _unsafe_view, shares memory and is not a view.
    leaf = distribute_tensor(plain, ALL, [S0]).requires_grad_()
    torch.kron(distribute_tensor(torch.ones(9), PAIR, [R]), leaf).sum().backward()
    assert as_dtensor(leaf.grad).tolist() == [9] * 4


@world(3)
def test_what_only_the_ranks_of_the_mesh_know_is_a_clear_error_outside_it() -> None:
    asks: list[Callable[[Any], object]] = [lambda x: x.sum().item(), lambda x: F.one_hot(x.long().abs()), torch.nonzero]
    x = distribute_tensor(torch.ones(3), Mesh((1,), (1,)), [R]).requires_grad_()
    for ask in asks:
        if rank() == 1:
            ask(x.detach())
        else:
            with pytest.raises(RuleError, match="is outside Mesh"):
                ask(x.detach())
    F.cross_entropy(x, torch.full((3,), 1 / 3)).msort().mul_(2).backward()  # a result may be changed in place


MESH, X = Mesh((2,)), torch.arange(8.0).view(4, 2)


def sharded() -> DTensor:
    return distribute_tensor(X, MESH, [Shard(0)])


def replicated() -> DTensor:
    return distribute_tensor(X, MESH, [Replicate()])


def step(x: DTensor) -> None:
    parameter = nn.Parameter(x)
    parameter.grad = x
    optim.AdamW([parameter]).step()


def write(x: DTensor) -> None:
    x[0] = 1.0


def set_data(x: DTensor) -> None:
    nn.Parameter(sharded()).data = x


def into(x: DTensor) -> None:
    sharded().copy_(x)


USES: dict[str, Callable[[DTensor], object]] = {
    "a warm op": lambda x: x + 1,
    "redistribution": lambda x: x.redistribute(placements=[Shard(1)]),
    "asynchronous redistribution": lambda x: x.redistribute(placements=[Shard(1)], async_op=True),
    "full_tensor": lambda x: x.full_tensor(),
    "to_local": lambda x: x.to_local(),
    "item": lambda x: x.sum().item(),
    "operand": lambda x: sharded() * x,
    "beside a plain tensor": lambda x: X + x,
    "view": lambda x: x.view(8),
    "index": lambda x: x[:, 1],
    "list of tensors": lambda x: torch.cat([sharded(), x]),
    "foreach": lambda x: torch._foreach_add_([x], 1.0),
    "norm": lambda x: nn.utils.get_total_norm([x]),
    "lookup": lambda x: F.embedding(torch.tensor([0, 3]), x),
    "local_map": local_map(lambda local: local + 1, out_placements=[Shard(0)]),
    "backward": lambda x: (x.detach().requires_grad_() * 2).sum().backward(),
    "copy_": into,
    "assignment": write,
    "data": set_data,
    "optimizer": step,
}


def text_of(use: Callable[[DTensor], object], x: DTensor) -> str:
    with pytest.raises(MeshError) as caught:
        use(x)
    return str(caught.value)


def twice(make: Callable[[], DTensor]) -> DTensor:
    return (make(), make() + 1)[0]


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_tensor_of_another_world_is_refused_alike_on_all_ranks(use: Callable[[DTensor], object]) -> None:
    for make in (sharded, replicated):
        theirs = world(2).run(twice, make)[1]

        def run(make: Callable[[], DTensor] = make, theirs: DTensor = theirs) -> str:
            use(make().clone())  # what runs is warm
            return text_of(use, theirs)

        (text,) = set(world(2).run(run))
        assert "the DTensor of shape (4, 2) has the local tensor of rank 1 of another world, of 2 ranks. Fix: " in text


@pytest.mark.processes
def test_the_counts_of_a_world_end_with_it(tmp_path: Path) -> None:
    """Of seeds and leaves, and captured graphs: in the next world the ranks have other numbers."""
    found = run_script(
        f"""
        from shardwise import DTensor, Replicate, capture

        @capture
        def own_element(x):
            x = DTensor.from_local(x, Mesh((3,)), [Replicate()], run_check=False)
            return x.redistribute(placements=[Shard(0)]).to_local() * 1.0

        def gradient():
            torch.manual_seed(0)
            mesh = Mesh((2,))
            for _ in range(2):
                w = distribute_tensor(torch.ones(3), mesh, [Replicate()]).requires_grad_()
                (w * torch.rand_like(w) + w).sum().backward()
            return w.grad.full_tensor() if dist.get_rank() < 2 else None

        expected = gradient()
        assert own_element(torch.arange(3.0)).tolist() == [rank]
        dist.destroy_process_group()
        now = (rank + 1) % 3
        dist.init_process_group(
            "gloo", init_method="file://{tmp_path}/world", rank=now, world_size=3, timeout=timedelta(seconds=60)
        )
        torch.manual_seed(0)
        gradients = gradient()
        assert now == 2 or gradients.shape == (3,)
        assert own_element(torch.arange(3.0)).tolist() == [now]
        assert rank == 2 or now == 2 or torch.equal(gradients, expected)
        """,
        size=3,
    )
    assert found == [(0, "")] * 3


def test_a_tensor_of_another_rank_is_refused() -> None:
    made: dict[int, DTensor] = {}

    def run(name: str) -> str:
        made[rank()] = sharded()
        USES[name](made[rank()].clone())
        sw.collectives.barrier((0, 1))
        mine = sharded()  # which both ranks make together
        return text_of((lambda x: mine * x) if name == "operand" else USES[name], made[1 - rank()])

    for name in ("a warm op", "full_tensor", "operand", "assignment", "foreach"):
        for other, text in enumerate(reversed(world(2).run(run, name))):
            assert f"has the local tensor of rank {other} of this world. Fix: " in text


def test_results_of_another_world_may_be_read_and_are_not_saved(tmp_path: Path) -> None:
    first, second = world(2).run(sharded)
    assert torch.equal(torch.cat([first.to_local(), second.to_local()]), X)
    assert first.layout_ == second.layout_
    assert {first.layout_: 1}[second.layout_] == 1
    with pytest.raises(Exception, match="rank 0 of another world"):
        world(2).run(lambda: sw.checkpoint.save(tmp_path / "saved", {"x": first}, step=1))


KEPT: list[DTensor] = []


def keep() -> None:
    KEPT.append(sharded())
    _ = KEPT[0] + 1


def use_kept() -> str:
    x = sharded()
    _ = x + 1
    return text_of(lambda kept: kept + 1, KEPT[0])


def fail() -> None:
    raise ZeroDivisionError


@pytest.mark.processes
def test_a_process_that_joined_another_world_refuses_tensors_of_the_first() -> None:
    ranks = world(2, real=True)
    ranks.run(keep)
    with pytest.raises(ZeroDivisionError):  # after which the pool joins a new world
        ranks.run(fail)
    assert ["of another world, of 2 ranks" in text for text in ranks.run(use_kept)] == [True, True]
