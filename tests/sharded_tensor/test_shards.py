"""The shards of a tensor one by one: looked at, gathered, cut anew, and made into a tensor."""

from collections.abc import Callable
from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from shardwise import DTensor, Mesh, Partial, Replicate, Shard, count_comms, distribute_tensor, rank, sharded_tensor
from shardwise._layout import Box
from shardwise.errors import LayoutError, MismatchError
from shardwise.sharded_tensor import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    LocalShard,
    ShardMetadata,
    collect_local_shard,
    init_from_local_shards,
    shard_parameter,
)
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.sharded_tensor.test_sharding import SPECS, VALUE, boxes, chunks

WHOLE = Box((0, 0), (10, 4))


# ---- reshard ----


@pytest.mark.parametrize("source", SPECS)
@world(4)
def test_any_spec_becomes_any_other_and_only_what_a_rank_lacks_is_sent(source: str) -> None:
    x = SPECS[source].shard(VALUE)
    for name, target in SPECS.items():
        with count_comms() as comms:
            y = x.reshard(target)
        assert_close(y.full_tensor(), VALUE, msg=name)
        assert y.sharding_spec() is target
        before, after = x.layout_.boxes(rank()), y.layout_.boxes(rank())
        kept = sum(common.numel for a, b in product(before, after) if (common := a.intersect(b)))
        sent = sum(box.numel for box in before) - kept
        assert comms.total_bytes == sent * 4, name


@world(4)
def test_gradients_go_back_the_way_they_came() -> None:
    for source, target in product(SPECS.values(), repeat=2):
        x = source.shard(VALUE).requires_grad_()
        weights = distribute_tensor(VALUE.cos(), Mesh((4,)), [Shard(0)])
        (x.reshard(target).reshard(chunks(0, 0, 1, 2, 3)) * weights).sum().backward()
        assert x.grad is not None
        assert x.grad.layout_ == x.layout_
        assert_close(x.grad.full_tensor(), VALUE.cos())


@world(4)
def test_replicated_partial_and_sharded_tensors_can_be_resharded_and_no_longer_have_their_specs() -> None:
    copies = distribute_tensor(VALUE, Mesh((4,)), [Replicate()])
    partial = DTensor.from_local(VALUE, Mesh((4,)), [Partial()])
    for target in SPECS.values():
        assert_close(copies.reshard(target).full_tensor(), VALUE)
        assert_close(partial.reshard(target).full_tensor(), VALUE * 4)
    x = SPECS["uneven"].shard(SPECS["rows"].shard(VALUE))
    assert x.sharding_spec() is SPECS["uneven"]
    assert_close(x.full_tensor(), VALUE)
    x = SPECS["uneven"].shard(VALUE)
    y = x.redistribute(placements=[Shard(1)])
    assert isinstance(y.sharding_spec(), ChunkShardingSpec)
    assert [m.shard_sizes for m in (x * 2).metadata() if m.shard_sizes[0]] == [(1, 4), (7, 4), (2, 4)]


# ---- looked at ----


@pytest.mark.parametrize("name", SPECS)
@world(4)
def test_every_shard_is_where_its_metadata_say(name: str) -> None:
    x = SPECS[name].shard(VALUE)
    meta = x.metadata()
    assert meta.size == (10, 4)
    assert meta == SPECS[name].build_metadata((10, 4), meta.tensor_properties)
    mine = x.local_shards()
    assert [s.metadata for s in mine] == [m for m in meta if m.rank == rank()]
    for shard in mine:
        assert_close(shard.tensor, VALUE[shard.metadata.box.relative_to(WHOLE)])
        shard.tensor.mul_(2)  # it is the memory of the tensor
    assert_close(x.full_tensor(), VALUE * 2)


@world(4)
def test_a_tensor_that_no_spec_made_has_shards_all_the_same() -> None:
    x = distribute_tensor(VALUE, Mesh((2, 2)), [Shard(0), Replicate()])
    assert [m.rank for m in x.metadata()] == [0, 2]  # of the replicas the first
    assert len(x.local_shards()) == (rank() in (0, 2))
    with pytest.raises(LayoutError, match="expresses replication"):
        x.sharding_spec()
    y = distribute_tensor(VALUE, Mesh((4,)), [Shard(0)])
    assert y.sharding_spec() == chunks(0, 0, 1, 2, 3)
    with pytest.raises(LayoutError, match="is Partial"):
        DTensor.from_local(VALUE, Mesh((4,)), [Partial()]).metadata()


@world(4)
def test_the_only_shard_is_given_with_its_gradient() -> None:
    x = SPECS["rows"].shard(VALUE)
    assert not x.local_shards()[0].tensor.requires_grad
    x.requires_grad_()
    for count, read in enumerate((x.local_tensor, lambda: x.local_shards()[0].tensor), 1):
        read().sum().backward()
        assert_close(as_dtensor(x.grad).full_tensor(), torch.full((10, 4), float(count)))
    several = SPECS["boxes"].shard(VALUE)
    if rank() in (2, 3):
        with pytest.raises(NotImplementedError, match=f"rank {rank()} has {2 if rank() == 2 else 0} of"):
            several.local_tensor()


# ---- gathered ----


@pytest.mark.parametrize("name", SPECS)
@world(4)
def test_gather_returns_the_full_tensor_on_one_rank_and_none_on_the_others(name: str) -> None:
    x = SPECS[name].shard(VALUE)
    with count_comms() as comms:
        plain = x.gather(dst=2)
    held = sum(box.numel for box in x.layout_.boxes(rank()))
    assert comms.total_bytes == (0 if rank() == 2 else held * 4)
    assert (plain is None) == (rank() != 2)
    if plain is not None:
        assert_close(plain, VALUE)
    out = torch.empty(10, 4, dtype=torch.float64) if rank() == 1 else None
    x.gather(1, out=out)
    if out is not None:
        assert_close(out, VALUE.double())


@world(4)
def test_gather_with_an_index_is_torchs() -> None:
    x = SPECS["rows"].shard(VALUE)
    index = torch.tensor([[3, 0], [1, 1]])
    got = x.gather(1, distribute_tensor(index, Mesh((4,)), [Replicate()]))
    assert isinstance(got, DTensor)
    assert_close(got.full_tensor(), VALUE.gather(1, index))


@world(2)
def test_a_gather_that_cannot_be_is_refused() -> None:
    x = chunks(0, 0, 1).shard(VALUE)
    with pytest.raises(LayoutError, match="rank 5 holds nothing"):
        x.gather(5)
    if rank() == 0:
        with pytest.raises(LayoutError, match=r"out has shape \(3,\)"):
            x.gather(0, out=torch.empty(3))
    else:
        assert x.gather(0) is None  # and does not wait for ever
    with pytest.raises(LayoutError, match="second positional argument is an index"):
        x.gather(0, torch.empty(10, 4))
    assert (x.gather(0, None) is None) == (rank() == 1)  # no tensor to fill


@world(2)
def test_resharding_leaves_the_tensor_what_its_own_spec_made_it() -> None:
    first = chunks(0, 0, 1)
    same = EnumerableShardingSpec(first.build_metadata((10, 4)).shards_metadata)
    x = first.shard(VALUE.clone().requires_grad_())
    y = x.reshard(same)
    assert x.sharding_spec() is first
    assert y.sharding_spec() is same
    y.sum().backward()
    assert_close(as_dtensor(x.grad).full_tensor(), torch.ones(10, 4))


@world(4)
def test_ranks_that_leave_the_group_give_what_they_have() -> None:
    x = chunks(0, 3, 1, 2, 0).shard(VALUE.clone().requires_grad_())
    y = x.reshard(chunks(1, 2, 0), (0, 2))
    assert y.layout_.mesh.ranks == (2, 0)
    assert len(y.local_shards()) == (rank() in (0, 2))
    if rank() in (0, 2):
        assert_close(y.full_tensor(), VALUE)
    (y * 2).sum().backward()
    assert_close(as_dtensor(x.grad).full_tensor(), torch.full((10, 4), 2.0))
    layer = torch.nn.Linear(4, 10)
    shard_parameter(layer, "weight", chunks(0, 0, 1, 2, 3))
    shard_parameter(layer, "weight", chunks(0, 2, 0), process_group=(0, 2))
    assert as_dtensor(layer.weight).layout_.mesh.ranks == (0, 2)[::-1]


@world(2)
def test_a_partial_tensor_has_no_shards_and_a_copy_keeps_name_and_spec() -> None:
    x = DTensor.from_local(VALUE, Mesh((2,)), [Partial()])
    with pytest.raises(LayoutError, match="is Partial, it has no shards"):
        x.local_tensor()
    with pytest.raises(LayoutError, match="is Partial, it has no shards"):
        collect_local_shard(torch.nn.Identity())(x)
    module = torch.nn.Linear(4, 4)
    shard_parameter(module, "weight", chunks(0, 0, 1))
    weight, copy = (as_dtensor(m.weight) for m in (module, deepcopy(module)))
    assert copy._name == weight._name == "weight"
    assert copy.sharding_spec() is weight.sharding_spec()


# ---- made of shards ----


def shards(name: str) -> list[LocalShard]:
    """This rank's shards of VALUE under a spec, in an order of their own."""
    mine = [m for m in SPECS[name].build_metadata((10, 4)) if m.rank == rank()]
    return [LocalShard(VALUE[m.box.relative_to(WHOLE)].clone(), m) for m in reversed(mine)]


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("expected", [True, False])
@world(4)
def test_shards_become_the_tensor_that_they_are_of(name: str, expected: bool) -> None:
    mine = shards(name)
    x = init_from_local_shards(mine, *((10, 4) if expected else ()))
    assert_close(x.full_tensor(), VALUE)
    if len(mine) == 1 and mine[0].tensor.numel():
        mine[0].tensor.add_(1)  # its memory is that of the tensor
        assert_close(x.local_shards()[0].tensor, mine[0].tensor)


@world(3)
def test_shards_without_a_placement_are_on_the_rank_that_passes_them() -> None:
    x = init_from_local_shards([LocalShard(VALUE[rank() :: 3][:3], ShardMetadata([3 * rank(), 0], [3, 4]))], [9, 4])
    assert [m.rank for m in x.metadata()] == [0, 1, 2]
    made = LocalShard.from_tensor_and_offsets(torch.ones(2), [2 * rank()], rank())
    assert_close(init_from_local_shards([made]).full_tensor(), torch.ones(6))


def row_shard(**changes: Any) -> LocalShard:
    """Three rows of VALUE on each rank; on rank 1 something else."""
    given: dict[str, Any] = {"rows": VALUE[:3], "start": 3 * rank(), "where": rank(), "device": "cpu"}
    given |= changes if rank() == 1 else {}
    sizes = list(given["rows"].shape)
    return LocalShard(
        given["rows"],
        ShardMetadata([given["start"], 0][: len(sizes)], sizes, f"rank:{given['where']}/{given['device']}"),
    )


make = init_from_local_shards
MISFITS: dict[str, Callable[[], object]] = {
    "overlap.*rank 0.*rank 1": lambda: make([row_shard(start=2)]),
    r"nobody holds \[5:6, 0:4\]": lambda: make([row_shard(rows=VALUE[:2])], 9, 4),
    r"nobody holds \[9:10, 0:4\]": lambda: make([row_shard()], 10, 4),
    "no rank passed any shard": lambda: make([]),
}
DIFFERENCES: dict[str, Callable[[], object]] = {
    "rank 1: dtype .*float64": lambda: make([row_shard(rows=VALUE[:3].double())]),
    r"rank 2: global size \[10, 4\]": lambda: make([row_shard()], 9 + (rank() == 2), 4),
    "rank 1: passes a shard placed on rank:0/cpu": lambda: make([row_shard(where=0)]),
    "number": lambda: make([row_shard(rows=torch.ones(3))]),
    "rank 1: requires_grad .*True": lambda: make([row_shard(rows=VALUE[:3].clone().requires_grad_())]),
    "rank 1: passes a shard placed on rank:1/cuda:0 that is on cpu": lambda: make([row_shard(device="cuda:0")]),
    "rank 2: passes a Tensor instead of a LocalShard": lambda: make([VALUE[:3] if rank() == 2 else row_shard()]),  # type: ignore[list-item]
}


def test_shards_that_do_not_make_a_tensor_are_the_same_error_everywhere() -> None:
    for said, wrong in {**MISFITS, **DIFFERENCES}.items():
        with pytest.raises(LayoutError if said in MISFITS else MismatchError, match=said) as error:
            world(3).run(wrong)
        assert "ranks 0, 1, 2 raised the same" in "".join(getattr(error.value, "__notes__", [str(error.value)])), said


def test_a_shard_has_the_shape_that_its_metadata_say() -> None:
    with pytest.raises(LayoutError, match=r"shape \(3, 4\), got a tensor of shape \(2, 4\)"):
        LocalShard(VALUE[:2], ShardMetadata([0, 0], [3, 4], "rank:0"))


# ---- filled, computed with ----


@pytest.mark.parametrize("name", SPECS)
@world(4)
def test_tensors_are_filled_by_spec(name: str) -> None:
    by = SPECS[name]
    assert_close(sharded_tensor.zeros(by, 10, 4).full_tensor(), torch.zeros(10, 4))
    assert_close(
        sharded_tensor.ones(by, (10, 4), dtype=torch.int32).full_tensor(), torch.ones(10, 4, dtype=torch.int32)
    )
    for filled in (sharded_tensor.full(by, (10, 4), 3.0), sharded_tensor.full(by, size=[10, 4], fill_value=3.0)):
        assert_close(filled.full_tensor(), torch.full((10, 4), 3.0))
    torch.manual_seed(0)
    drawn = sharded_tensor.rand(by, 10, 4, requires_grad=True)
    torch.manual_seed(0)
    assert_close(drawn.detach().full_tensor(), sharded_tensor.rand(SPECS["rows"], 10, 4).full_tensor())
    assert drawn.requires_grad
    assert sharded_tensor.empty(by, 10, 4).sharding_spec() is by
    torch.manual_seed(1)
    assert sharded_tensor.randn(by, 10, 4).full_tensor().std() > 0.5


@pytest.mark.parametrize("name", SPECS)
@world(4)
def test_elementwise_ops_and_views_equal_one_process(name: str) -> None:
    x = SPECS[name].shard(VALUE)
    for op in (
        lambda t: t * 2 + 1,
        torch.relu,
        lambda t: t.sum(),
        lambda t: t.mean(0),
        lambda t: t.view(5, 8),
        lambda t: t.t(),
        lambda t: t[3:7],
        lambda t: torch.softmax(t, 1),
        lambda t: t @ t.t(),
        lambda t: torch.cat([t, t], 1),
    ):
        assert_close(as_dtensor(op(x)).full_tensor(), op(VALUE))


@world(1)
def test_a_rank_alone_has_all_shards() -> None:
    for by in (chunks(0, 0), chunks(1, 0, 0, 0), boxes(((0, 0), (4, 4), 0), ((4, 0), (6, 4), 0))):
        x = by.shard(VALUE)
        assert sum(s.tensor.numel() for s in x.local_shards()) == 40
        assert_close(as_dtensor(x.reshard(chunks(1, 0))).full_tensor(), VALUE)
        assert_close(x.gather(0), VALUE)
        assert_close(init_from_local_shards(x.local_shards(), 10, 4).full_tensor(), VALUE)


@world(5)
def test_more_ranks_than_rows_leave_some_with_nothing() -> None:
    few = VALUE[:2]
    x = chunks(0, 4, 3, 2, 1, 0).shard(few, src_rank=2)
    assert len([s for s in x.local_shards() if s.tensor.numel()]) == (rank() in (3, 4))
    assert_close(x.reshard(chunks(1, 0, 1, 2, 3, 4)).full_tensor(), few)
    plain = x.gather(0)
    assert (plain is None) == (rank() != 0)
    again = init_from_local_shards([s for s in x.local_shards() if s.tensor.numel()], 2, 4)
    assert_close(again.full_tensor(), few)
