"""What is worked out at a first call serves later ones, for each rank by itself."""

import gc
from collections.abc import Callable
from itertools import product
from typing import Any
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from shardwise import Mesh, Partial, Replicate, Shard, count_comms, distribute_tensor
from shardwise import _collectives as collectives
from shardwise._layout import Layout, Placement
from shardwise._rules import RULES
from shardwise._tensor.dispatch import resolve
from shardwise.errors import IdError
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor

R, S0, S1 = Replicate(), Shard(0), Shard(1)
UNEVEN = Shard(0, (1, 3, 2))
IDS = torch.tensor([[4, 0], [1, 4], [2, 3]])
X, Y, TABLE = (torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in range(3))

# name: (op, operands, their placements on a mesh of three ranks)
CALLS: dict[str, tuple[Callable[..., Any], list[Tensor], list[Placement]]] = {
    "view": (lambda x: x.view(-1, 2, 2), [X], [UNEVEN]),
    "reshape to one dim": (lambda x: x.reshape(-1), [X], [UNEVEN]),
    "reshape of a cut that is not in one piece": (lambda x: x.reshape(8, 3), [X], [Shard(1, (1, 0, 3))]),
    "expand": (lambda x: x.unsqueeze(1).expand(6, 3, 4), [X], [UNEVEN]),
    "squeeze": (lambda x: x.view(6, 1, 4).squeeze(), [X], [UNEVEN]),
    "split": (lambda x: torch.cat([2 * part for part in x.split([1, 3], 1)], 1), [X], [UNEVEN]),
    "split of a cut dim": (lambda x: x.split([1, 5])[1], [X], [UNEVEN]),
    "x[:, -1]": (lambda x: x[:, -1], [X], [UNEVEN]),
    "x[4]": (lambda x: x[4], [X], [UNEVEN]),
    "mse_loss": (F.mse_loss, [X, Y], [UNEVEN, UNEVEN]),
    "kl_div": (lambda x, y: F.kl_div(x, y, reduction="batchmean"), [X, Y.exp()], [UNEVEN, UNEVEN]),
    "cosine_embedding_loss": (lambda x, y: F.cosine_embedding_loss(x, y, y[:, 0]), [X, Y], [UNEVEN, UNEVEN]),
    "cross_entropy": (F.cross_entropy, [X, IDS.view(-1) % 4], [UNEVEN, UNEVEN]),
    "embedding, whole table": (F.embedding, [IDS, TABLE], [R, R]),
    "embedding, cut ids": (F.embedding, [IDS, TABLE], [S0, R]),
    "embedding, columns": (F.embedding, [IDS, TABLE], [R, Shard(1, (1, 0, 3))]),
    "embedding, rows": (F.embedding, [IDS, TABLE], [R, UNEVEN]),
    "embedding, one rank has all rows": (F.embedding, [IDS, TABLE], [R, Shard(0, (0, 6, 0))]),
    "embedding with padding": (lambda i, w: F.embedding(i, w, padding_idx=-2), [IDS, TABLE], [R, S1]),
}


def _gradients(op: Callable[..., Any], operands: list[Tensor]) -> list[Any]:
    """The value, and the gradients of its sum of squares."""
    leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in operands]
    out = op(*leaves)
    out.square().sum().backward()
    return [out, *(x.grad for x in leaves if x.requires_grad)]


@pytest.mark.parametrize("name", CALLS)
@world(3)
def test_each_of_three_calls_equals_one_process_on_every_rank(name: str) -> None:
    op, operands, placements = CALLS[name]
    expected = _gradients(op, operands)
    for _ in range(3):
        mine = [distribute_tensor(x, Mesh((3,)), [p]) for x, p in zip(operands, placements, strict=True)]
        for found, wanted in zip(_gradients(op, list(mine)), expected, strict=True):
            assert_close(as_dtensor(found).full_tensor().detach(), wanted.detach())


@world(3)
def test_warm_views_share_memory_and_send_nothing() -> None:
    views: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.view(-1, 2, 2), lambda x: x.view_as(torch.empty(6, 2, 2)), lambda x: x.flatten(),
        lambda x: x.chunk(2, 1)[1], lambda x: x[:, -1], lambda x: x.unsqueeze(1).squeeze(1),
    ]  # fmt: skip
    for make, number in product(views, (7, 8, 9)):
        x = distribute_tensor(X, Mesh((3,)), [UNEVEN])
        with count_comms() as comms:
            view = make(x)
        assert comms.total_bytes == 0
        view.fill_(number)
        assert (make(x.full_tensor()) == number).all()


@world(3)
def test_what_is_assigned_to_a_part_is_what_the_same_rank_holds_each_time() -> None:
    x, full = distribute_tensor(X, Mesh((3,)), [UNEVEN]), X.clone()
    for number in range(3):
        for brackets in ((slice(None), -1), 4, (slice(2, 6), slice(0, 2)), (slice(None, None, 4), None, 1)):
            x[brackets] = full[brackets] = float(number)
            assert_close(x.full_tensor(), full)


@world(2)
def test_a_warm_lookup_refuses_ids_that_the_table_has_not() -> None:
    table = distribute_tensor(TABLE, Mesh((2,)), [S1])
    good, bad = (distribute_tensor(ids, Mesh((2,)), [R]) for ids in (IDS, IDS + 2))
    for _ in range(2):
        assert_close(as_dtensor(F.embedding(good, table)).full_tensor(), F.embedding(IDS, TABLE))
        with pytest.raises(IdError, match="id 6 at position"):
            F.embedding(bad, table)
        with pytest.raises(IdError, match="padding_idx 6"):
            F.embedding(good, table, padding_idx=6)


@world(1)
def test_torchs_own_lookup_refuses_bad_ids_of_every_dtype_of_tables() -> None:
    dtypes = (torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.int32)
    for dtype, bad in product(dtypes, (-1, 6, 2**40)):
        for table in (TABLE.to(dtype), TABLE.to(dtype)[:, :1], TABLE.t().contiguous().t().to(dtype)):
            for ids in (torch.tensor([0, bad]), torch.tensor(bad)):
                with pytest.raises(IdError):
                    F.embedding(distribute_tensor(ids, Mesh((1,)), [R]), distribute_tensor(table, Mesh((1,)), [R]))


def test_a_rank_alone_on_an_axis_runs_the_op_itself() -> None:
    layout = Layout(Mesh((2, 1)), [S0, S1], (5, 4))
    for op in (torch.mean, torch.amax, torch.var):
        rows = resolve.choose("", RULES[op], [resolve.Operand(layout, torch.float32)], (resolve.Slot(0),), {})
        assert [row.local_impl is None for row in rows] == [False, True]


@world(2)
def test_beside_an_axis_of_one_rank_another_axis_is_still_cut() -> None:
    ops: list[Any] = [torch.mean, torch.amax, torch.var, torch.argmax, torch.Tensor.flatten]
    for op, shape in product(ops, ((2, 1), (1, 2))):
        for placements in ([S0, S1], [S1, S0], [S0, S0], [Partial(), S0]):
            x = distribute_tensor(X, Mesh(shape), placements)
            assert_close(as_dtensor(op(x)).full_tensor(), op(X))


def test_operands_are_freed_when_their_last_user_is() -> None:
    """By reference counts: until the garbage collector runs, a cycle would keep the activations of a step."""

    def redistributed(op: Any) -> bool:
        for _ in range(2):
            x, y = (distribute_tensor(torch.ones(4, 6), Mesh((2,)), [p]).sin() for p in (S0, S1))
            out = op(x, y)
            held = [ref(tensor) for tensor in (x, y, out)]
            del x, y, out
        return all(tensor() is None for tensor in held)

    def under_hooks(op: Any) -> bool:
        mesh = Mesh((collectives.world_size(),))
        for _ in range(2):
            w = distribute_tensor(torch.ones(6, 6), mesh, [R]).requires_grad_()
            x = distribute_tensor(torch.ones(6, 6), mesh, [S0])
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                out = op(x, w)
            held = ref(x)
            del x, out
        return held() is None

    joined = lambda x, y: torch.cat([x, y])  # noqa: E731
    beside_plain = lambda x, y: torch.ones(6) * x + y  # noqa: E731
    gc.disable()
    try:
        for op in (torch.add, torch.maximum, joined, beside_plain):
            assert world(2).run(redistributed, op) == [True] * 2
        for other, ranks in product((torch.mul, F.linear, joined), (1, 2)):
            assert world(ranks).run(under_hooks, other) == [True] * ranks
    finally:
        gc.enable()


@world(3)
def test_masks_and_ids_of_one_layout_are_calls_of_their_own() -> None:
    x, mask = X.clone(), torch.tensor([1, 0, 1, 1, 0, 1]).bool()
    for index in (mask, mask.long(), mask):
        at = distribute_tensor(index, Mesh((3,)), [UNEVEN])
        found = torch.ops.aten.index.Tensor(distribute_tensor(x, Mesh((3,)), [S0]), [at])
        assert as_dtensor(found).full_tensor().equal(x[index])
        written = distribute_tensor(x, Mesh((3,)), [S0]).index_put_((at,), torch.tensor(2.0, dtype=x.dtype))
        assert as_dtensor(written).full_tensor().equal(x.index_put((index,), torch.tensor(2.0, dtype=x.dtype)))


@world(3)
def test_an_op_without_rows_writes_to_distributed_and_plain_tensors() -> None:
    for placement in (UNEVEN, R, Partial()):
        values = distribute_tensor(torch.zeros_like(X), Mesh((3,)), [placement])
        indices = torch.zeros(X.shape, dtype=torch.long)
        torch.ops.aten.sort.values(distribute_tensor(X, Mesh((3,)), [S0]), 1, values=values, indices=indices)
        assert_close((values.full_tensor(), indices), tuple(X.sort(1)))
        assert values.placements == (placement,)


@world(3)
def test_floats_of_replicated_calls_are_no_calls_of_their_own() -> None:
    x, calls = distribute_tensor(X, Mesh((3,)), [UNEVEN]), collectives.owner().calls
    torch.ops.aten.renorm.default(x, 2, 0, 1.5)
    before = len(calls)
    for norm in (0.5, 0.25):
        assert_close(as_dtensor(torch.ops.aten.renorm.default(x, 2, 0, norm)).full_tensor(), X.renorm(2, 0, norm))
    assert len(calls) == before


@world(4)
def test_an_aten_op_with_a_kernel_beside_its_decomposition_runs_replicated() -> None:
    image = X.view(2, 3, 2, 2)
    x = distribute_tensor(image, Mesh((4,)), [S0])
    found = torch.ops.aten.upsample_nearest2d.default(x, [4, 4])
    assert as_dtensor(found).full_tensor().equal(torch.ops.aten.upsample_nearest2d.default(image, [4, 4]))


@pytest.mark.parametrize("op", [torch.bmm, torch.matmul, torch.mm], ids=lambda op: op.__name__)
@world(4)
def test_dtypes_that_differ_are_refused_on_ranks_without_elements_too(op: Any) -> None:
    x, w = (X.view(2, 3, 4), X.view(2, 4, 3)) if op is torch.bmm else (X, Y.T.contiguous())
    operands = distribute_tensor(x.bfloat16(), Mesh((4,)), [S0]), w.float()
    with pytest.raises(RuntimeError, match=r"dtype|type"):
        op(*operands)
