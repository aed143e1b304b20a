"""Local tensors become distributed ones and come back: every layout, every disagreement, every leak."""

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import as_masked_tensor
from torch.testing import assert_close

import shardwise as sw
from shardwise import Boxes, DTensor, Mesh, OnRanks, Placement, Shard, count_comms, distribute_tensor
from shardwise import _collectives as collectives
from shardwise._layout import Layout
from shardwise.errors import LayoutError, MeshError, MismatchError, RuleError
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from shardwise.testing.local_shards import local_tensor

R, S0, S1, P = sw.Replicate(), Shard(0), Shard(1), sw.Partial()
FULL = torch.arange(35.0).view(7, 5)
BOXES = Boxes([[((0, 0), (2, 5)), ((5, 3), (2, 2))], [], [((2, 0), (5, 3)), ((2, 3), (3, 2))]])
ON_THREE: list[Placement] = [R, S0, S1, Shard(-1), Shard(0, [5, 0, 2]), Shard(1, [0, 0, 5]), OnRanks(1), BOXES]
GRID = Mesh((2, 2))
ON_GRID: list[tuple[list[Placement], tuple[int, ...] | None]] = [
    ([S0, S1], None),
    ([S0, S0], None),
    ([S0, S0], (1, 0)),
    ([R, Shard(0, [1, 6])], None),
    ([OnRanks(1), S0], None),
    ([Shard(0, [3, 4]), Shard(0, [[3, 0], [1, 3]])], None),
]


def rank() -> int:
    return collectives.rank()


def same_error(size: int, kind: type[Exception], body: Callable[[], object]) -> str:
    """The text of the error that every rank must raise alike."""

    def caught() -> str:
        with pytest.raises(kind) as error:
            body()
        return str(error.value)

    (text,) = set(world(size).run(caught))
    return text


# ---- distribute_tensor, to_local, full_tensor, redistribute ----------------------------------------------------


@pytest.mark.parametrize("source", [0, 2, None])
@world(3)
def test_each_rank_gets_its_boxes_of_the_source_ranks_values(source: int | None) -> None:
    mesh = Mesh((3,), (2, 0, 1))
    mine = FULL if source is None or rank() == mesh.ranks[source] else FULL * 0 - 1
    for placement in ON_THREE:
        x = distribute_tensor(mine, mesh, [placement], src_data_rank=source)
        assert x.shape == (7, 5)
        assert torch.equal(x.to_local(), local_tensor(FULL, x.layout_, rank())), placement
        assert torch.equal(x.full_tensor(), FULL), placement
        assert torch.equal(x.full_tensor(), FULL), placement


@world(4)
def test_grids_hold_what_nested_cuts_say() -> None:
    for placements, order in ON_GRID:
        x = distribute_tensor(FULL, GRID, placements, shard_order=order)
        assert torch.equal(x.to_local(), local_tensor(FULL, Layout(GRID, placements, (7, 5), order), rank()))
        assert torch.equal(x.full_tensor(), FULL), (placements, order)
        if order is None and not any(isinstance(p, OnRanks) for p in placements):  # which need more than the parts
            bare = [Shard(p.dim) if isinstance(p, Shard) else p for p in placements]
            found = DTensor.from_local(x.to_local(), GRID, bare)
            assert found.layout_ == x.layout_
            assert torch.equal(found.full_tensor(), FULL)


@world(3)
def test_any_number_of_dims_any_emptiness_and_from_any_layout_to_any_other() -> None:
    for shape in [(), (1,), (0, 3), (2, 1, 3, 2), (5, 0)]:
        full = torch.arange(torch.Size(shape).numel()).view(shape)
        for placement in [R, OnRanks(2), *(Shard(dim) for dim in range(len(shape)))]:
            x = distribute_tensor(full, Mesh((3,)), [placement])
            assert (x.shape, x.numel(), x.stride()) == (full.shape, full.numel(), full.stride())
            assert torch.equal(x.full_tensor(), full), (shape, placement)
            assert x.tolist() == full.tolist()
    mesh = Mesh((3,))
    for src, dst in product(ON_THREE, ON_THREE):
        x = distribute_tensor(FULL, mesh, [src], src_data_rank=None).redistribute(placements=[dst])
        assert torch.equal(x.to_local(), local_tensor(FULL, Layout(mesh, [dst], (7, 5)), rank())), (src, dst)


@world(4)
def test_redistribute_goes_to_other_meshes_and_back_and_keeps_the_order_of_cutting_unless_asked() -> None:
    pair, line, grid = Mesh((2,), (3, 1)), Mesh((4,)), Mesh((2, 2))
    x = distribute_tensor(FULL, line, [S0])
    y = x.redistribute(pair, [S1])
    assert y.to_local().shape == {3: (7, 3), 1: (7, 2)}.get(rank(), (0, 5))
    z = y.redistribute(grid, [S0, S0], shard_order=(1, 0))
    assert z.layout_.shard_order == (1, 0)
    for redistributed in (z, y.redistribute(line, [S0]), x.redistribute(grid, [S0, R])):
        assert torch.equal(redistributed.full_tensor(), FULL)
    x = distribute_tensor(FULL, GRID, [S0, S0], shard_order=(1, 0))
    assert x.redistribute(placements=[S0, S0]).layout_ == x.layout_
    y = x.redistribute(shard_order=(0, 1))
    assert y.layout_.shard_order == (0, 1)
    for moved in (y, distribute_tensor(x, Mesh((4,)), [S1])):
        assert torch.equal(moved.full_tensor(), FULL)


@world(3)
def test_a_move_may_convert_what_travels_forward_and_backward() -> None:
    x = as_dtensor(distribute_tensor(torch.full((5, 3), 1 / 3), Mesh((3,)), [S0]).requires_grad_())
    rows = 2 if collectives.rank() < 2 else 1
    seen: list[torch.dtype] = []
    with count_comms() as comms:
        y = x.redistribute(placements=[R], forward_dtype=torch.bfloat16, backward_dtype=torch.float64)
    assert comms.total_bytes == 2 * rows * 3 * 2
    assert y.dtype == torch.bfloat16
    y.register_hook(lambda g: seen.append(g.dtype))  # type: ignore[no-untyped-call]
    with count_comms() as comms:
        (y.float() * 1.5).sum().backward()
    assert comms.total_bytes == (5 - rows) * 3 * 8
    assert seen == [torch.bfloat16]
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert x.grad.full_tensor().tolist() == [[1.5] * 3] * 5


def test_ranks_that_distribute_different_things_get_one_error() -> None:
    texts = {
        "shape": same_error(3, MismatchError, lambda: distribute_tensor(torch.ones(3 + rank()), None, [S0])),
        "dtype": same_error(
            3, MismatchError, lambda: distribute_tensor(torch.ones(3).to([torch.int32, torch.int64][rank() % 2]))
        ),
        "placement": same_error(3, MismatchError, lambda: distribute_tensor(FULL, None, [Shard(rank() % 2)])),
        "mesh": same_error(
            3, MismatchError, lambda: distribute_tensor(FULL, Mesh((3,), [(0, 1, 2), (2, 1, 0)][rank() % 2]), [S0])
        ),
        "source": same_error(3, MismatchError, lambda: distribute_tensor(FULL, None, [S0], src_data_rank=rank())),
    }
    assert texts["placement"] == (
        "Ranks disagree on the tensor to distribute:\n"
        '  rank 0, 2: {"layout": "Layout((7, 5) as [Shard(0)] on Mesh(0=3))"}\n'
        '  rank 1: {"layout": "Layout((7, 5) as [Shard(1)] on Mesh(0=3))"}\n'
        "  Fix: pass the same shape, dtype, kind of device, requires_grad, mesh and placements on every rank."
    )
    for text in texts.values():
        assert text.startswith("Ranks disagree on the tensor to distribute:\n  rank 0")


def test_what_does_not_fit_is_refused_on_every_rank_alike() -> None:
    cases: list[tuple[str, type[Exception], Callable[[], object]]] = [
        ("has no dim 2", LayoutError, lambda: distribute_tensor(FULL, None, [Shard(2)])),
        ("add up to 6", LayoutError, lambda: distribute_tensor(FULL, None, [Shard(0, [3, 3])])),
        ("One placement per mesh axis", LayoutError, lambda: distribute_tensor(FULL, None, [S0, S0])),
        ("got 2", LayoutError, lambda: distribute_tensor(FULL, None, [S0], src_data_rank=2)),
        ("needs rank 2", MeshError, lambda: distribute_tensor(FULL, Mesh((3,)), [S0])),
        ("positions are 0 to 1", LayoutError, lambda: distribute_tensor(FULL, None, [OnRanks(2)])),
        ("got a DTensor", LayoutError, lambda: DTensor.from_local(distribute_tensor(FULL, None, [S0]))),
        ("One placement per mesh axis", LayoutError, lambda: DTensor.from_local(FULL, None, [S0, S0])),
        ("needs the global shape too", LayoutError, lambda: DTensor.from_local(FULL, stride=(5, 1))),
        ("describes no tensor of shape (7, 5) without gaps", LayoutError,
         lambda: DTensor.from_local(FULL, None, [R], shape=(7, 5), stride=(1, 6))),
        ("shards dim 2, but the local tensors have 2 dims", LayoutError,
         lambda: DTensor.from_local(FULL, None, [Shard(2)])),
        ("Fix: pass shape=", LayoutError,
         lambda: DTensor.from_local(FULL, None, [Shard(0, [7, 7])], run_check=False)),
        ("needs the global shape", LayoutError,
         lambda: DTensor.from_local(FULL, None, [Boxes([[((0, 0), (7, 5))], []])])),
    ]  # fmt: skip
    for text, kind, body in cases:
        assert text in same_error(2, kind, body)

    def other_orders() -> object:
        return distribute_tensor(FULL, GRID, [S0, S0], shard_order=[(0, 1), (1, 0)][rank() % 2])

    assert "shard_order=(1, 0)" in same_error(4, MismatchError, other_orders)


# ---- from_local --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checked", [True, False])
@world(3)
def test_parts_make_the_tensor_they_were_cut_from(checked: bool) -> None:
    for placement in ON_THREE:
        layout = Layout(Mesh((3,)), [placement], (7, 5))
        part = local_tensor(FULL, layout, rank())
        x = DTensor.from_local(part, layout.mesh, [placement], shape=(7, 5), run_check=checked)
        assert x.layout_ == layout
        assert torch.equal(x.full_tensor(), FULL), placement
        x.add_(1)
        assert torch.equal(part, local_tensor(FULL + 1, layout, rank())), "the storage is shared"


@world(3)
def test_the_sizes_of_uneven_parts_are_found_and_partial_ones_are_reduced_when_read() -> None:
    for sizes in [(1, 2, 4), (0, 7, 0), (3, 3, 1), (0, 0, 7)]:
        x = DTensor.from_local(FULL.split(sizes)[rank()], Mesh((3,)), [S0])
        assert x.layout_ == Layout(Mesh((3,)), [Shard(0, sizes)], (7, 5))
        assert torch.equal(x.full_tensor(), FULL)
    part = torch.tensor([1.0, 2.0, 4.0])[rank()].expand(2)
    for reduce_op, value in {"sum": 7.0, "avg": 7 / 3, "max": 4.0, "min": 1.0, "product": 8.0}.items():
        x = DTensor.from_local(part.clone(), Mesh((3,)), [sw.Partial(reduce_op)])
        assert_close(x.full_tensor(), torch.full((2,), value))


def test_parts_that_do_not_fit_together_get_one_error_with_all_ranks() -> None:
    mesh = Mesh((3,))

    def parts(*shapes: tuple[int, ...], placement: Placement = S0, **kwargs: Any) -> str:
        return same_error(
            3, MismatchError, lambda: DTensor.from_local(torch.ones(shapes[rank()]), mesh, [placement], **kwargs)
        )

    assert parts((2, 3), (2, 4), (2, 3)) == (
        "from_local: the local tensors do not form a tensor of shape (6, 3) under [Shard(0)]:\n"
        "  rank 1: expected (2, 3), got (2, 4)\n"
        "  Fix: pass local tensors of the expected shapes, or other placements."
    )
    assert "different numbers of dims" in parts((2, 3), (2,), (2, 3))
    assert "rank 1: expected (2,), got (3,)" in parts((2,), (3,), (2,), placement=R)
    assert "the global shape was given as (7, 3)" in parts((2, 3), (2, 3), (2, 3), shape=(7, 3))
    assert "rank 0: expected (1,), got (2,)" in parts((2,), (2,), (2,), placement=Shard(0, [1, 3, 2]))
    assert "rank 0: expected (0, 3)" in parts((2, 3), (2, 3), (0, 3), placement=OnRanks(1))


def test_ranks_that_disagree_in_from_local_get_one_error() -> None:
    dtypes = (torch.float32, torch.float64)
    assert same_error(2, MismatchError, lambda: DTensor.from_local(torch.ones(2, dtype=dtypes[rank()]))) == (
        "from_local: ranks disagree on the dtype:\n  rank 0: torch.float32\n  rank 1: torch.float64\n"
        "  Fix: pass the same on every rank."
    )
    text = same_error(2, MismatchError, lambda: DTensor.from_local(torch.ones(2, 2), None, [Shard(rank())]))
    assert "disagree on the placements:\n  rank 0: ['Shard(0)']" in text
    text = same_error(2, MismatchError, lambda: DTensor.from_local(torch.ones(2), None, [S0], shape=(4 + rank(),)))
    assert "disagree on the global shape" in text
    ranks = ((0, 1), (1, 0))
    text = same_error(2, MismatchError, lambda: DTensor.from_local(torch.ones(2), Mesh((2,), ranks[rank()]), [S0]))
    assert "disagree on the mesh:\n  rank 0: Mesh(0=2)\n  rank 1: Mesh(0=2, ranks=(1, 0))" in text


@world(2)
def test_a_leaf_gives_a_leaf_and_a_part_of_the_wrong_shape_is_refused_without_a_check() -> None:
    mesh = Mesh((2,))
    with pytest.raises(LayoutError, match=r"Fix: give the sizes, Shard\(dim, sizes=...\), or leave run_check on"):
        DTensor.from_local(torch.ones(5), mesh, [S0], run_check=False, shape=(5,))
    assert DTensor.from_local(torch.ones(2), mesh, [S0], run_check=False).shape == (4,)
    leaf = FULL.clone().requires_grad_()
    x = distribute_tensor(leaf, Mesh((2,)), [S0])
    assert x.requires_grad
    assert x.is_leaf
    x.sum().backward()
    assert leaf.grad is None
    parameter = distribute_tensor(nn.Parameter(FULL.clone(), requires_grad=False), Mesh((2,)), [S0])
    assert isinstance(parameter, nn.Parameter)
    assert not parameter.requires_grad
    assert not distribute_tensor(FULL, Mesh((2,)), [S0]).requires_grad


@world(4)
def test_ranks_outside_a_mesh_hold_nothing() -> None:
    mesh = Mesh((2,), (3, 1))
    part = FULL.split([3, 4])[{3: 0, 1: 1}.get(rank(), 0)]
    x = DTensor.from_local(part, mesh, [S0], shape=(7, 5), run_check=rank() in mesh.ranks)
    assert x.shape == (7, 5)
    if rank() not in mesh.ranks:
        assert x.to_local().shape == (0, 5)
        assert "holds nothing" in repr(x)
        with pytest.raises(LayoutError, match=r"outside .* needs the global shape"):
            DTensor.from_local(part, mesh, [S0])
    else:
        assert torch.equal(x.full_tensor(), FULL)


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors:UserWarning")
@world(2)
def test_what_has_no_memory_of_its_own_is_not_a_local_tensor() -> None:
    mesh = Mesh((2,))
    with FakeTensorMode():
        fake = torch.ones(2, 2)
    for local in (as_masked_tensor(FULL, FULL > 0), fake):
        with pytest.raises(LayoutError, match=rf"a dense tensor, got a {type(local).__name__} one\. Fix: pass a plain"):
            DTensor.from_local(local, mesh, [S0])
    with pytest.raises(RuleError, match="add: a FakeTensor tensor beside DTensors is not supported"):
        distribute_tensor(torch.ones(2, 2), mesh, [S0]) + fake
    with pytest.raises(RuntimeError, match="from_local takes a plain local tensor"):  # as torch raises
        DTensor.from_local(distribute_tensor(FULL, mesh, [S0]), mesh, [S0])


# ---- borders to plain tensors -------------------------------------------------------------------------------------


@world(2)
def test_gradients_reach_the_parts_and_come_back_from_them_as_asked() -> None:
    part = torch.ones(2).requires_grad_()
    (DTensor.from_local(part, Mesh((2,)), [S0]) * torch.arange(4.0)).sum().backward()
    assert part.grad is not None
    assert part.grad.tolist() == [[0.0, 1.0], [2.0, 3.0]][rank()]
    for placements, own, total in ((None, 2.0, 4.0), ([R], 2.0, 4.0), ([P], 1.0, 2.0)):  # the default is replicated
        part = torch.ones(2).requires_grad_()
        (2 * DTensor.from_local(part, Mesh((2,)), [R], grad_placements=placements)).sum().backward()
        assert part.grad is not None
        assert part.grad.tolist() == [own] * 2, placements
        assert collectives.all_reduce(part.grad, "sum", (0, 1)).tolist() == [total] * 2, placements
    # By default, and with Replicate, the loss is the same everywhere; with Partial losses add up.
    for placements, expected in ((None, 1.0), ([R], 1.0), ([P], 2.0)):
        x = as_dtensor(distribute_tensor(torch.ones(3), Mesh((2,)), [R]).requires_grad_())
        x.to_local(grad_placements=placements).sum().backward()
        assert as_dtensor(x.grad).full_tensor().tolist() == [expected] * 3
    x = as_dtensor(distribute_tensor(torch.ones(3), Mesh((2,)), [S0]).requires_grad_())
    (x.to_local() * (1 + rank())).sum().backward()
    assert as_dtensor(x.grad).full_tensor().tolist() == [1.0, 1.0, 2.0]
    x.grad = None
    (x.full_tensor() * torch.arange(3.0)).sum().backward()
    assert as_dtensor(x.grad).full_tensor().tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("placement", [R, S0], ids=str)
@world(2)
def test_a_local_tensor_shares_memory_and_versions_and_is_no_view_of_a_dtensor(placement: Placement) -> None:
    """The compiler, which traces no DTensor, follows views to their base."""
    x = as_dtensor(distribute_tensor(FULL, Mesh((2,)), [placement]))
    read = x.to_local(), x.to_local().detach(), x.full_tensor(), x.requires_grad_().to_local(), x.full_tensor()
    assert not any(type(local._base) is DTensor for local in read)
    with torch.no_grad():
        version = read[0]._version
        x.add_(1)
    assert read[0]._version > version
    assert torch.equal(read[0], x.to_local())


@world(3)
def test_a_plain_tensor_in_an_op_receives_its_whole_gradient_but_in_strict_mode() -> None:
    bias, x = torch.zeros(5).requires_grad_(), distribute_tensor(FULL, Mesh((3,)), [S0])
    (as_dtensor(x + bias) * x).sum().backward()
    assert type(bias.grad) is Tensor
    assert_close(bias.grad, FULL.sum(0))
    with sw.strict():
        with pytest.raises(RuleError, match=r"add: a plain tensor of shape \(5,\) .* refused in strict mode"):
            x + torch.ones(5)
        with pytest.raises(RuleError, match="strict mode"):
            torch.stack([x, FULL])
        assert torch.equal(as_dtensor(x + 1 + torch.tensor(2.0)).full_tensor(), FULL + 3)
    x + torch.ones(5)


# ---- what it says of itself, and what it keeps to itself ------------------------------------------------------------


@world(2)
def test_questions_are_answered_for_the_whole_and_repr_has_this_ranks_box() -> None:
    x = distribute_tensor(FULL, Mesh((2,)), [S0])
    assert (x.size(), x.size(-1), x.dim(), x.ndim, x.numel(), len(x)) == (FULL.shape, 5, 2, 2, 35, 7)
    assert (x.nbytes, x.element_size(), x.dtype, x.device.type) == (140, 4, torch.float32, "cpu")
    assert [float(row.sum()) for row in x] == FULL.sum(1).tolist()
    assert 34.0 in x
    assert bool(x.equal(x.clone()))
    assert [tuple(part.shape) for part in x.chunk(3)] == [(3, 5), (3, 5), (1, 5)]
    assert isinstance(x.device_mesh, Mesh)
    text = "DTensor(shape=(3,), placements=[Shard(0)], mesh=Mesh(0=2), rank {} holds {}: {})".format(
        rank(), ["[0:2]", "[2:3]"][rank()], ["tensor([0, 1])", "tensor([2])"][rank()]
    )
    assert repr(distribute_tensor(torch.arange(3), Mesh((2,)), [S0])) == text
    assert f"{distribute_tensor(torch.tensor(1.25), Mesh((2,)), [R]):.1f}" == "1.2"


@world(3)
def test_item_reads_the_one_value_wherever_it_lies() -> None:
    for placement in (R, OnRanks(2), Boxes([[], [((), ())], []])):
        assert distribute_tensor(torch.tensor(3.5), Mesh((3,)), [placement]).item() == 3.5
    one = distribute_tensor(torch.tensor([[4]]), Mesh((3,)), [S1])
    assert (one.item(), int(one), float(one), bool(one)) == (4, 4, 4.0, True)
    assert DTensor.from_local(torch.tensor(2.0), Mesh((3,)), [P]).item() == 6.0
    with pytest.raises(RuntimeError, match="no single value"):
        distribute_tensor(FULL, Mesh((3,)), [S0]).item()


@world(2)
def test_deepcopy_of_a_parameter_copies_value_and_kind_and_no_gradient_as_in_torch() -> None:
    p = nn.Parameter(distribute_tensor(FULL, Mesh((2,)), [S0]))
    (p * p).sum().backward()
    twin = copy.deepcopy(p)
    assert isinstance(twin, nn.Parameter)
    assert as_dtensor(twin).layout_ == as_dtensor(p).layout_
    with torch.no_grad():
        p.zero_()
    assert torch.equal(as_dtensor(twin.detach()).full_tensor(), FULL)
    assert twin.grad is None
    with pytest.raises(RuntimeError, match="Only leaf tensors"):
        copy.deepcopy(twin * 2)
    leaks: list[Callable[[Any], object]] = [copy.copy, np.array, lambda x: x.resize_(8)]  # test_exits.py has others
    for leak in leaks:
        with pytest.raises(RuleError, match=r"to_local|full_tensor"):
            leak(distribute_tensor(FULL, Mesh((2,)), [S0]))


# ---- real processes ---------------------------------------------------------------------------------------------


@pytest.mark.processes
@world(4, real=True)
def test_real_grids_convert_and_move() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for placements, order in ON_GRID:
        x = distribute_tensor(FULL, mesh, placements, shard_order=order)
        assert torch.equal(x.full_tensor(), FULL)
        assert x.device_mesh is mesh
    assert distribute_tensor(FULL, mesh, {"tp": S0}).placements == (R, S0)
    pair = Mesh((2,), (3, 1))
    y = distribute_tensor(FULL, mesh, [S0, S1]).redistribute(pair, [Shard(0, [6, 1])])
    assert torch.equal(y.to_local(), {3: FULL[:6], 1: FULL[6:]}.get(rank(), FULL[:0]))
    assert torch.equal(y.redistribute(mesh, [S1, S1]).full_tensor(), FULL)
    z = DTensor.from_local(FULL[: rank()], Mesh((4,)), [S0])
    assert z.shape == (6, 5)
    assert z.placements == (Shard(0, (0, 1, 2, 3)),)
    with pytest.raises(MismatchError, match="ranks disagree on the dtype"):
        DTensor.from_local(torch.ones(2, dtype=[torch.int32, torch.int64][rank() % 2]), mesh, [R, R])
