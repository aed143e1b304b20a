"""Specs of one's own, and functions implemented for them: who is asked, with what, and who is left alone."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import DTensor, Mesh, Partial, Shard, distribute_tensor, rank
from shardwise import _collectives as collectives
from shardwise import shard_module as sw_shard_module
from shardwise._layout import Layout
from shardwise.debug import CommDebugMode
from shardwise.errors import LayoutError, MismatchError, PlanError
from shardwise.sharded_tensor import (
    ChunkShardingSpec,
    ShardedTensorMetadata,
    ShardingPlan,
    ShardingSpec,
    ShardMetadata,
    custom_sharding_spec_op,
    ones,
    shard_module,
    shard_parameter,
)
from shardwise.sharded_tensor.custom_ops import _implemented, forget_implementations
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor

TABLE = torch.arange(28.0).view(7, 4)


class Dealt(ShardingSpec):
    """Rows dealt one by one to `ranks` ranks, like cards."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def __repr__(self) -> str:
        return f"Dealt({self.ranks})"

    def build_metadata(self, tensor_sizes: Sequence[int], tensor_properties: Any = None) -> ShardedTensorMetadata:
        rows, *rest = tensor_sizes
        shards = [ShardMetadata((i, *[0] * len(rest)), (1, *rest), f"rank:{i % self.ranks}") for i in range(rows)]
        return ShardedTensorMetadata(shards, tensor_sizes, tensor_properties)


class DealtBackwards(Dealt):
    pass


class FromTheLast(ShardingSpec):
    """The first rows on the last rank; it cuts by itself, without anybody's values but this rank's own."""

    def build_metadata(self, tensor_sizes: Sequence[int], tensor_properties: Any = None) -> ShardedTensorMetadata:
        ranks = reversed(range(collectives.world_size()))
        return ChunkShardingSpec(0, [f"rank:{r}" for r in ranks]).build_metadata(tensor_sizes, tensor_properties)

    def shard(self, tensor: Tensor, src_rank: int = 0, process_group: Any = None) -> DTensor:
        mesh = Mesh((collectives.world_size(),), tuple(reversed(range(collectives.world_size()))))
        return distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)


class Gapped(Dealt):
    """Forgets the last row."""

    def build_metadata(self, tensor_sizes: Sequence[int], tensor_properties: Any = None) -> ShardedTensorMetadata:
        full = super().build_metadata(tensor_sizes, tensor_properties)
        return ShardedTensorMetadata(full.shards_metadata[:-1], tensor_sizes, tensor_properties)


@pytest.fixture(autouse=True)
def forget_what_was_registered() -> Iterator[None]:
    assert not _implemented, "the package itself implements no function for a spec"
    yield
    forget_implementations()


# ---- specs of one's own ----


@world(3)
def test_metadata_are_all_that_a_spec_needs() -> None:
    x = Dealt(2).shard(TABLE, src_rank=1)
    assert_close(x.full_tensor(), TABLE)
    assert [s.metadata.shard_offsets[0] for s in x.local_shards()] == {0: [0, 2, 4, 6], 1: [1, 3, 5], 2: []}[rank()]
    for mine in x.local_shards():
        assert_close(mine.tensor, TABLE[mine.metadata.shard_offsets[0]][None])
    chunks = ChunkShardingSpec(1, ["rank:2", "rank:0"])
    assert_close(x.reshard(chunks).reshard(Dealt(3)).full_tensor(), TABLE)
    assert ones(Dealt(3), 4, 2).full_tensor().tolist() == torch.ones(4, 2).tolist()
    assert x.sharding_spec().ranks == 2
    with pytest.raises(LayoutError, match="nobody holds"):
        Gapped(2).shard(TABLE)


class Halves(ShardingSpec):
    """Says nothing of itself but its shards; its repr is an address, which differs between ranks."""

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def build_metadata(self, tensor_sizes: Sequence[int], tensor_properties: Any = None) -> ShardedTensorMetadata:
        return ChunkShardingSpec(self.dim, ["rank:0", "rank:1"]).build_metadata(tensor_sizes, tensor_properties)


def test_specs_without_a_repr_are_compared_by_their_shards() -> None:
    @world(2)
    def body() -> None:
        assert_close(Halves(0).shard(TABLE).full_tensor(), TABLE)
        for table in (nn.Embedding(7, 4), nn.Embedding(7, 4)):
            shard_module(table, ShardingPlan({"weight": Halves(0)}, {"": Halves(0)}))
            sw_shard_module(table, {"weight": Halves(1)})
            assert as_dtensor(table.weight).placements == (Shard(1),)

    body()

    def another_dim_on_rank_1() -> None:
        Halves(rank()).shard(TABLE)

    def a_dim_that_is_not_there() -> None:
        Halves(2 * rank()).shard(TABLE)

    for wrong in (another_dim_on_rank_1, a_dim_that_is_not_there):
        with pytest.raises(MismatchError, match=r"rank 1: .*Halves"):
            world(2).run(wrong)


@world(3)
def test_a_spec_may_shard_by_itself() -> None:
    table = nn.Embedding(7, 4)
    with torch.no_grad():
        table.weight.copy_(TABLE)
    spec = FromTheLast()
    shard_parameter(table, "weight", spec)
    weight = as_dtensor(table.weight)
    assert weight.layout_ == spec.layout((7, 4), (0, 1, 2)) == Layout(Mesh((3,), (2, 1, 0)), [Shard(0)], (7, 4))
    assert weight.sharding_spec() is spec
    assert_close(as_dtensor(table(torch.tensor([6, 0]))).full_tensor(), TABLE[[6, 0]])


# ---- functions of one's own ----


def own_lookup(types: Any, args: Any, kwargs: Any, process_group: Any) -> DTensor:
    """Every rank looks up the rows that it was dealt; the sum has them all."""
    ids, table = args[:2]
    group = collectives.group_ranks(process_group)
    local = table.to_local().view(-1, table.shape[1])
    mine = ids % len(group) == rank()
    found = local[torch.where(mine, ids // len(group), 0)] * mine[:, None]
    return DTensor.from_local(found, Mesh((len(group),), group), [Partial()])


def test_the_function_of_the_spec_runs_and_its_result_is_the_result() -> None:
    calls = []

    @custom_sharding_spec_op(Dealt, F.embedding)
    def lookup(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        calls.append((types, kwargs))
        return own_lookup(types, args, kwargs, process_group)

    @world(3)
    def body() -> None:
        table = Dealt(3).shard(TABLE).requires_grad_()
        ids = torch.tensor([5, 0, 6, 5])
        found = as_dtensor(F.embedding(ids, table))
        assert found.placements == (Partial(),)
        assert_close(found.full_tensor(), TABLE[ids])
        found.sum().backward()
        want = torch.zeros(7, 4).index_add_(0, ids, torch.ones(4, 4))
        assert_close(as_dtensor(table.grad).full_tensor(), want)

    body()
    assert [types for types, _ in calls] == [(DTensor,)] * 3


@world(2)
def test_only_tensors_of_exactly_that_class_of_specs_are_affected() -> None:
    @custom_sharding_spec_op(Dealt, torch.add)
    def add(types: Any, args: Any, kwargs: Any, process_group: Any) -> str:
        return "mine"

    dealt, other = Dealt(2).shard(TABLE), DealtBackwards(2).shard(TABLE)
    chunks = ChunkShardingSpec(0, ["rank:0", "rank:1"]).shard(TABLE)
    assert torch.add(dealt, 1) == torch.add(1, dealt) == torch.add(chunks, dealt) == torch.add(1, other=dealt) == "mine"
    for usual in (
        torch.add(other, 1),  # of a subclass
        torch.add(chunks, 1),
        torch.add(dealt * 1, 1),  # a result, which no spec has made
        dealt + 1,  # another function
        torch.add(distribute_tensor(TABLE, Mesh((2,)), [Shard(0)]), 1),
    ):
        assert_close(as_dtensor(usual).full_tensor(), TABLE + 1)
    assert torch.add(dealt.detach(), 1) == torch.add(nn.Parameter(dealt), 1) == "mine"


@world(2)
def test_inside_the_function_goes_the_usual_way() -> None:
    @custom_sharding_spec_op(Dealt, torch.mul)
    def doubled(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        if args[1] == 0:
            raise ZeroDivisionError
        return torch.mul(*args, **kwargs) * 2

    x = Dealt(2).shard(TABLE)
    assert_close(as_dtensor(torch.mul(x, 3)).full_tensor(), TABLE * 6)
    with pytest.raises(ZeroDivisionError):
        torch.mul(x, 0)
    assert_close(as_dtensor(torch.mul(x, 3)).full_tensor(), TABLE * 6)  # an error leaves nothing behind


@world(2)
def test_operands_in_lists_and_aten_ops_and_attributes_are_found() -> None:
    @custom_sharding_spec_op(Dealt, torch.cat)
    @custom_sharding_spec_op(Dealt, torch.ops.aten.native_dropout.default)
    @custom_sharding_spec_op(Dealt, Tensor.T.__get__)  # type: ignore[attr-defined]
    def answer(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        return torch.zeros(3), torch.zeros(3)

    x = Dealt(2).shard(TABLE)
    plain = torch.ones(1, 4)
    for got in (torch.cat([plain, x]), torch.ops.aten.native_dropout.default(x, 0.5, True), x.T):
        assert [tuple(part.shape) for part in got] == [(3,), (3,)]


@world(2)
def test_later_registrations_replace_and_tools_see_the_call() -> None:
    for answer in (1, 2):

        @custom_sharding_spec_op(Dealt, torch.sum)
        def total(types: Any, args: Any, kwargs: Any, process_group: Any, /) -> int:
            return answer  # noqa: B023

    x = Dealt(2).shard(TABLE)
    with CommDebugMode():
        assert torch.sum(x) == 2


def test_optimizers_ask_for_every_op_of_such_a_parameter() -> None:
    seen = []

    @custom_sharding_spec_op(Dealt, Tensor.add_)
    def add(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        seen.append(kwargs)
        return args[0].add_(*args[1:], **kwargs)

    @world(2)
    def body() -> None:
        mine, reference = nn.Parameter(Dealt(2).shard(TABLE)), nn.Parameter(TABLE.clone())
        for p in (mine, reference):
            optimizer = torch.optim.SGD([p], lr=0.01)
            for _ in range(3):
                optimizer.zero_grad()
                (p * p).sum().backward()
                optimizer.step()
        assert_close(as_dtensor(mine.detach()).full_tensor(), reference.detach())

    body()
    assert seen == [{"alpha": -0.01}] * 3 * 2


def all_together(types: Any, args: Any, kwargs: Any, process_group: Any) -> Tensor:
    total: Tensor = args[0].to_local().sum()
    dist.all_reduce(total, group=process_group)
    return total


@pytest.mark.processes
@world(3, real=True)
def test_torchs_own_collectives_take_the_group() -> None:
    pair = dist.new_group([0, 2])
    custom_sharding_spec_op(ChunkShardingSpec, torch.sum)(all_together)
    try:
        everybody = ChunkShardingSpec(0, ["rank:2", "rank:1", "rank:0"]).shard(TABLE)
        assert torch.sum(everybody) == TABLE.sum()
        if rank() != 1:
            some = ChunkShardingSpec(1, ["rank:2", "rank:0"]).shard(TABLE + rank(), 1, pair)
            assert torch.sum(some) == (TABLE + 2).sum()
    finally:
        forget_implementations()


def two(args: Any, kwargs: Any) -> None: ...


def test_what_cannot_be_registered_is_refused() -> None:
    with pytest.raises(PlanError, match="a class of sharding specs, got the class int"):
        custom_sharding_spec_op(int, torch.add)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="a class of sharding specs"):
        custom_sharding_spec_op(Dealt(2), torch.add)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="a function of torch, got 'add'"):
        custom_sharding_spec_op(Dealt, "add")
    with pytest.raises(PlanError, match=r"two is called with .* but takes 2 arguments"):
        custom_sharding_spec_op(Dealt, torch.add)(two)
    with pytest.raises(PlanError, match=r"Tensor.size is defined by DTensor itself"):
        custom_sharding_spec_op(Dealt, Tensor.size)
    assert not _implemented
