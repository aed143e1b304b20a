"""Wrappers of local shards become DTensors and come back: places, holes, training, torch's own checkpoints."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper as WrapperOfTorch
from torch.testing import assert_close

from shardwise import (
    Boxes,
    DTensor,
    Mesh,
    OnRanks,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    rank,
)
from shardwise import _collectives as collectives
from shardwise._layout import Box, Layout
from shardwise.errors import LayoutError, MismatchError
from shardwise.sharded_tensor import LocalShardsWrapper, pre_load_state_dict_hook, state_dict_hook
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.parallel.one_process import raised

FULL = torch.arange(7 * 12.0).view(7, 12)
WHOLE = Box((0, 0), (7, 12))

LAYOUTS = {
    "rows": Layout(Mesh((4,)), [Shard(0)], (7, 12)),
    "uneven rows": Layout(Mesh((4,)), [Shard(0, [1, 3, 0, 3])], (7, 12)),
    "columns": Layout(Mesh((4,)), [Shard(1)], (7, 12)),
    "uneven columns, ranks in another order": Layout(Mesh((4,), (2, 0, 3, 1)), [Shard(1, [2, 2, 5, 3])], (7, 12)),
    "grid": Layout(Mesh((2, 2)), [Shard(0, [3, 4]), Shard(1, [5, 7])], (7, 12)),
    "rows in copies": Layout(Mesh((2, 2)), [Replicate(), Shard(0)], (7, 12)),
    "cut twice": Layout(Mesh((2, 2)), [Shard(0), Shard(0)], (7, 12)),
    "one rank": Layout(Mesh((4,)), [OnRanks(2)], (7, 12)),
    "boxes": Layout(Mesh((4,)), [Boxes([[((0, 0), (7, 2))], [((0, 2), (3, 10))], [], [((3, 2), (4, 10))]])], (7, 12)),
}


def sharded(box: Box, dim: int, count: int) -> list[Box]:
    """A box in `count` shards along `dim`, as a rank may hold it."""
    parts = torch.arange(box.sizes[dim]).tensor_split(count)
    return [box.along(dim, box.offsets[dim] + int(part[0]), len(part)) for part in parts if len(part)]


def wrapped(boxes: list[Box]) -> LocalShardsWrapper:
    return LocalShardsWrapper([FULL[b.relative_to(WHOLE)].clone() for b in boxes], [b.offsets for b in boxes])


def mine(layout: Layout, dim: int = 1, count: int = 2) -> LocalShardsWrapper:
    """What this rank holds of FULL, in several shards; a wrapper of none where it holds nothing."""
    return wrapped([part for box in layout.boxes(rank()) for part in sharded(box, dim, count)])


# ---- there and back ----


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", LAYOUTS)
@world(4)
def test_shards_make_a_tensor_and_come_back_as_they_were(name: str, dim: int, count: int) -> None:
    layout = LAYOUTS[name]
    wrapper = mine(layout, dim, count)
    given = wrapper.local_shards()
    x = DTensor.from_local(wrapper, layout.mesh, layout.placements, shape=(7, 12))
    assert x.layout_ == layout
    assert_close(x.full_tensor(), FULL)
    assert type(x.full_tensor()) is Tensor
    back = x.to_local()
    assert back.shape == layout.local_shape(rank())
    if not given:
        assert type(back) is Tensor
        assert not back.numel()
        return
    assert isinstance(back, LocalShardsWrapper)
    assert back.shard_offsets == wrapper.shard_offsets
    assert back.shard_sizes == wrapper.shard_sizes
    assert torch.equal(back, wrapper)
    for shard, original in zip(back.shards, given, strict=True):
        assert torch.equal(shard, original)
        assert shard.data_ptr() == original.data_ptr()


@pytest.mark.parametrize("count", [1, 2])
@world(4)
def test_a_wrapper_of_torch_is_taken_as_one_of_shardwise(count: int) -> None:
    layout = LAYOUTS["uneven rows"]
    wrapper = mine(layout, 1, count)
    shards = wrapper.local_shards()
    x = DTensor.from_local(WrapperOfTorch(shards, list(wrapper.local_offsets())), Mesh((4,)), [Shard(0)])
    assert x.layout_ == layout
    assert_close(x.full_tensor(), FULL)
    back = x.to_local()
    for shard, given in zip(back.local_shards() if isinstance(back, LocalShardsWrapper) else [], shards, strict=True):
        assert shard.data_ptr() == given.data_ptr()


@world(4)
def test_uneven_sizes_are_inferred_from_the_shards() -> None:
    for dim, sizes in ((0, (1, 3, 0, 3)), (1, (0, 0, 11, 1))):
        layout = Layout(Mesh((4,)), [Shard(dim, sizes)], (7, 12))
        x = DTensor.from_local(mine(layout), Mesh((4,)), [Shard(dim)])
        assert x.layout_ == layout
        assert_close(x.full_tensor(), FULL)


@world(3)
def test_a_rank_without_shards_learns_dtype_and_shape_from_the_others() -> None:
    nothing = LocalShardsWrapper([], [])
    given = LocalShardsWrapper([FULL.double()], [(0, 0)]) if rank() == 1 else nothing
    x = DTensor.from_local(given, Mesh((3,)), [Shard(1)])
    assert x.dtype == torch.float64
    assert x.placements == (Shard(1, [0, 12, 0]),)
    assert x.to_local().shape == (7, 12 if rank() == 1 else 0)
    assert_close(as_dtensor(x * 2).full_tensor(), FULL.double() * 2)
    line = LocalShardsWrapper([torch.arange(3)], [(0,)]) if rank() == 1 else nothing
    assert DTensor.from_local(line, Mesh((3,)), [Shard(0)]).tolist() == [0, 1, 2]


@world(3)
def test_a_table_on_one_rank_leaves_the_others_empty_handed() -> None:
    here = rank() == 2
    given = LocalShardsWrapper([FULL.clone()], [(0, 0)]) if here else torch.empty(0)
    alone = DTensor.from_local(given, Mesh((1,), (2,)), [Replicate()], shape=(7, 12), stride=(12, 1), run_check=False)
    among = DTensor.from_local(given, Mesh((3,)), [OnRanks(2)], shape=(7, 12))
    for x in (alone, among):
        assert x.shape == (7, 12)
        assert x.stride() == (12, 1)
        assert isinstance(x.to_local(), LocalShardsWrapper) == here
        assert x.to_local().numel() == 84 * here


@world(2)
def test_without_a_check_the_shape_is_taken_at_its_word() -> None:
    sizes = [2, 5]
    layout = Layout(Mesh((2,)), [Shard(0, sizes)], (7, 12))
    x = DTensor.from_local(mine(layout), Mesh((2,)), [Shard(0, sizes)], run_check=False, shape=(7, 12))
    assert_close(x.full_tensor(), FULL)
    even = Layout(Mesh((2,)), [Shard(1)], (7, 12))
    assert DTensor.from_local(mine(even), Mesh((2,)), [Shard(1)], run_check=False).shape == (7, 12)
    with pytest.raises(LayoutError, match="leave run_check on"):
        DTensor.from_local(mine(layout), Mesh((2,)), [Shard(0)], run_check=False, shape=(7, 12))


# ---- shards at wrong places ----


def given(*shards: Tensor, at: list[tuple[int, ...]], **options: Any) -> object:
    return DTensor.from_local(LocalShardsWrapper(shards, at), Mesh((2,)), [Shard(0)], **options)


def test_shards_with_wrong_offsets_are_the_same_error_on_every_rank() -> None:
    def body() -> None:
        row, col = 2 * rank(), 3 * rank()
        given(torch.ones(2, 3), torch.ones(2, 1), at=[(row, col), (row, col + 3)])

    said = raised(MismatchError, body, 2)
    assert "rank 1: expected [2:4, 0:4], got [2:4, 3:7]" in said
    assert "rank 0" not in said
    with pytest.raises(LayoutError, match=r"rank 1: expected \[2:4, 0:4\], got \[0:2, 0:4\]"):
        world(2).run(lambda: given(torch.ones(2, 4), at=[(0, 0)], run_check=False))  # the rank itself reports


def test_other_disagreements_are_reported_as_for_plain_local_tensors() -> None:
    dtypes = torch.half, torch.float
    disagreements: dict[str, Callable[[], object]] = {
        "disagree on the dtype": lambda: given(torch.ones(2, 4, dtype=dtypes[rank()]), at=[(2 * rank(), 0)]),
        "rank 1: expected": lambda: given(torch.ones(2, 4 + rank()), at=[(2 * rank(), 0)]),
        # One of two that should hold copies has none.
        "rank 0": lambda: DTensor.from_local(LocalShardsWrapper([FULL][: rank()], [(0, 0)][: rank()]), Mesh((2,))),
    }
    for said, wrong in disagreements.items():
        with pytest.raises(MismatchError, match=said):
            world(2).run(wrong)


class Model(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


@pytest.mark.parametrize("name", ["rows", "columns", "grid", "rows in copies"])
@world(4)
def test_a_parameter_of_shards_trains_and_its_shards_see_it(name: str) -> None:
    layout = LAYOUTS[name]
    wrapper = mine(layout)
    shards = wrapper.local_shards()
    model = Model(DTensor.from_local(wrapper, layout.mesh, layout.placements))
    reference = Model(FULL.clone())
    for m in (model, reference):
        optimizer = torch.optim.Adagrad(m.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            (m.weight.sin() * m.weight).sum().backward()
            optimizer.step()
    assert isinstance(as_dtensor(model.weight).to_local(), LocalShardsWrapper)
    for shard, at in zip(shards, wrapper.local_offsets(), strict=True):
        box = Box(tuple(at), tuple(shard.shape))
        assert_close(shard, reference.weight.detach()[box.relative_to(WHOLE)])


@world(2)
def test_state_dicts_and_deep_copies_keep_the_shards() -> None:
    layout = Layout(Mesh((2,)), [Shard(1)], (7, 12))
    model = Model(DTensor.from_local(mine(layout, 1, 2), Mesh((2,)), [Shard(1)]))
    state = model.state_dict()
    assert isinstance(state["weight"].to_local(), LocalShardsWrapper)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.weight.zero_()
    assert isinstance(as_dtensor(twin.weight).to_local(), LocalShardsWrapper)
    twin.load_state_dict(state)
    assert_close(as_dtensor(twin.weight.detach()).full_tensor(), FULL)


@world(2)
def test_a_tensor_that_becomes_a_view_of_itself_forgets_the_shards() -> None:
    layout = Layout(Mesh((2,)), [Shard(1)], (7, 12))
    x = DTensor.from_local(mine(layout), Mesh((2,)), [Shard(1)])
    assert isinstance(x.detach().to_local(), LocalShardsWrapper)
    assert isinstance(as_dtensor(x.data).to_local(), LocalShardsWrapper)
    x.t_()
    assert type(x.to_local()) is Tensor
    assert_close(x.full_tensor(), FULL.t())
    assert [chunk.offsets for chunk in x.__create_chunk_list__()] == [(6 * rank(), 0)]  # type: ignore[attr-defined]


@world(2)
def test_gradients_flow_through_from_local_and_to_local() -> None:
    layout = Layout(Mesh((2,)), [Shard(0, [2, 5])], (7, 12))
    shards = [shard.requires_grad_() for shard in mine(layout).local_shards()]
    wrapper = LocalShardsWrapper(shards, mine(layout).local_offsets())
    x = DTensor.from_local(wrapper, Mesh((2,)), [Shard(0)])
    local = (
        as_dtensor(x * 3).redistribute(placements=[Replicate()]).redistribute(placements=[Shard(0, [2, 5])]).to_local()
    )
    local.sum().backward()
    for shard in shards:
        assert_close(shard.grad, torch.full_like(shard, 3.0))
    back = DTensor.from_local(wrapper.detach(), Mesh((2,)), [Shard(0)]).requires_grad_()
    found = as_dtensor(back).to_local()
    assert isinstance(found, LocalShardsWrapper)
    found.local_shards()[0].sum().backward()
    assert as_dtensor(back.grad).full_tensor().sum() == 7 * 6


@world(2)
def test_plain_attributes_enter_the_state_dict_and_come_back() -> None:
    class Holder(nn.Module):
        def __init__(self, fill: float) -> None:
            super().__init__()
            self.inner = nn.Module()
            self.linear = nn.Linear(2, 2)
            self.table: Any = distribute_tensor(torch.full((3, 4), fill), Mesh((2,)), [Shard(0)])
            self.inner.deep: Any = distribute_tensor(torch.full((4,), fill), Mesh((2,)), [Shard(0)])  # type: ignore[misc]
            self._register_state_dict_hook(state_dict_hook)  # type: ignore[no-untyped-call]
            self.register_load_state_dict_pre_hook(pre_load_state_dict_hook)  # type: ignore[no-untyped-call]

    outer, other = nn.ModuleDict({"a": Holder(1.0)}), nn.ModuleDict({"a": Holder(2.0)})
    state = outer.state_dict()
    assert {"a.table", "a.inner.deep", "a.linear.weight"} < set(state)
    other.load_state_dict(state)
    holder: Any = other["a"]
    assert_close(holder.table.full_tensor(), torch.ones(3, 4))
    assert_close(holder.inner.deep.full_tensor(), torch.ones(4))
    single = Holder(3.0)
    assert "table" in single.state_dict()
    del state["a.table"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"a.table"'):
        other.load_state_dict(state)
    other.load_state_dict(state, strict=False)
    state["a.table"] = distribute_tensor(torch.ones(2), Mesh((2,)), [Shard(0)])
    with pytest.raises(RuntimeError, match=r"a.table: the module has shape \(3, 4\), got \(2,\)"):
        other.load_state_dict(state)


# ---- torch's own checkpoints ----

PLACES: list[tuple[tuple[int, ...], list[Placement]]] = [
    ((2,), [Shard(0, [2, 5])]), ((2,), [Shard(1)]), ((2,), [Replicate()]), ((2,), [OnRanks(1)]),
    ((2,), [Boxes([[((0, 0), (7, 1)), ((0, 5), (7, 7))], [((0, 1), (7, 4))]])]),
]  # fmt: skip


@pytest.mark.processes
@pytest.mark.parametrize("src", [0, 1, 3])
@world(2, real=True)
def test_torch_saves_and_loads_into_any_other_sharding(tmp_path: Path, src: int) -> None:
    mesh_shape, placements = PLACES[src]
    layout = Layout(Mesh(mesh_shape), placements, (7, 12))
    x = DTensor.from_local(mine(layout, 1, 3), Mesh(mesh_shape), placements, shape=(7, 12))
    folder = str(collectives.gather_json(str(tmp_path), (0, 1))[0])
    save({"model": {"x": x}}, checkpoint_id=folder)
    for _, target in PLACES:
        into = distribute_tensor(torch.zeros(7, 12), Mesh((2,)), target)
        load({"model": {"x": into}}, checkpoint_id=folder)
        assert_close(into.full_tensor(), FULL)
    plain = torch.zeros(7, 12)
    wrapper = wrapped([Box((0, 0), (7, 5)), Box((0, 5), (7, 7))]).zero_()
    assert isinstance(wrapper, LocalShardsWrapper)
    shards = LocalShardsWrapper([torch.zeros(3 + rank(), 12)], [(3 * rank(), 0)])
    some = DTensor.from_local(shards, Mesh((2,)), [Shard(0)])
    load({"model": {"x": plain}}, checkpoint_id=folder)
    load({"model": {"x": wrapper}}, checkpoint_id=folder)
    load({"model": {"x": some}}, checkpoint_id=folder)
    assert_close(plain, FULL)
    assert_close(wrapper.local_shards()[1], FULL[:, 5:])
    assert_close(shards.local_shards()[0], FULL[3 * rank() : 3 + 4 * rank()])
    theirs = TorchDTensor.from_local(torch.zeros(7, 6), init_device_mesh("cpu", (2,)), [TorchShard(1)])
    load({"model": {"x": theirs}}, checkpoint_id=folder)
    assert_close(theirs.redistribute(placements=[TorchReplicate()]).to_local(), FULL)


@pytest.mark.processes
@world(2, real=True)
def test_tables_of_single_ranks_go_through_torchs_checkpoint(tmp_path: Path) -> None:
    folder = str(collectives.gather_json(str(tmp_path), (0, 1))[0])

    def tables(filled: bool, swapped: bool) -> dict[str, DTensor]:
        found = {}
        for number in (0, 1):
            owner = 1 - number if swapped else number
            rows = FULL + 100 * number if filled else torch.zeros(7, 12)
            given = LocalShardsWrapper([rows], [(0, 0)]) if rank() == owner else torch.empty(0)
            found[f"table {number}"] = DTensor.from_local(given, Mesh((1,), (owner,)), [Replicate()], shape=(7, 12))
        return found

    save(tables(True, False), checkpoint_id=folder)
    into = tables(False, True)
    load(into, checkpoint_id=folder)
    assert_close(into[f"table {1 - rank()}"].to_local() + 0, LocalShardsWrapper([FULL + 100 * (1 - rank())], [(0, 0)]))


@pytest.mark.parametrize("name", LAYOUTS)
@world(4)
def test_torch_checkpoints_get_the_shards_and_their_memory(name: str) -> None:
    layout = LAYOUTS[name]
    wrapper = mine(layout, 1, 2)
    x = DTensor.from_local(wrapper, layout.mesh, layout.placements, shape=(7, 12))
    full = [chunk for chunk in wrapper.local_chunks if 0 not in chunk.sizes]
    assert x.__create_chunk_list__() == full  # type: ignore[attr-defined]
    items = x.__create_write_items__("x", x)  # type: ignore[attr-defined]
    assert [item.tensor_data.chunk for item in items] == full
    assert all(item.tensor_data.size == (7, 12) for item in items)
    for item in items:
        x.__get_tensor_shard__(item.index).neg_()  # type: ignore[attr-defined]
    assert_close(x.full_tensor(), -FULL)
    if items:
        elsewhere = items[0].index.__class__("x", torch.Size((6, 11)))
        with pytest.raises(LayoutError, match=r"x: no shard of this rank begins at .*6, 11"):
            x.__get_tensor_shard__(elsewhere)  # type: ignore[attr-defined]


@world(2)
def test_what_a_checkpoint_cannot_hold_is_refused() -> None:
    partial = DTensor.from_local(torch.ones(3), Mesh((2,)), [Partial()])
    with pytest.raises(LayoutError, match="is Partial; checkpoints store reduced values only"):
        partial.__create_chunk_list__()  # type: ignore[attr-defined]
    shard = LocalShardsWrapper([torch.ones(2, 2)], [(2, 0)])
    with pytest.raises(LayoutError, match=r"x: .*are at \[2:4, 0:2\].*Fix: save DTensor"):
        shard.__create_write_items__("x", shard)
