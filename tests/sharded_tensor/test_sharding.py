"""Tensors and parameters cut by specs: who sends what, in which group, and what is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close

from shardwise import DTensor, Mesh, count_comms, rank
from shardwise._layout import Box
from shardwise.errors import GroupError, LayoutError, MismatchError, PlanError
from shardwise.sharded_tensor import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardingSpec,
    ShardMetadata,
    load_with_process_group,
    shard_parameter,
)
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from shardwise.testing.failures import DeadlockError

VALUE = torch.arange(40.0).reshape(10, 4)


def chunks(dim: int, *ranks: int) -> ChunkShardingSpec:
    return ChunkShardingSpec(dim, [f"rank:{r}/cpu" for r in ranks])


def boxes(*rows: tuple[tuple[int, ...], tuple[int, ...], int]) -> EnumerableShardingSpec:
    return EnumerableShardingSpec([ShardMetadata(o, s, f"rank:{r}") for o, s, r in rows])


SPECS: dict[str, ShardingSpec] = {
    "rows": chunks(0, 0, 1, 2, 3),
    "rows in another order": chunks(0, 2, 0, 3, 1),
    "columns": chunks(-1, 3, 2, 1, 0),
    "few ranks": chunks(0, 2, 1),
    "a rank twice": chunks(0, 1, 0, 1),
    "one rank": chunks(1, 3),
    "uneven": boxes(((0, 0), (1, 4), 1), ((1, 0), (7, 4), 0), ((8, 0), (2, 4), 3)),
    "grid": boxes(((0, 0), (3, 1), 0), ((0, 1), (3, 3), 1), ((3, 0), (7, 1), 2), ((3, 1), (7, 3), 3)),
    "boxes": boxes(((0, 0), (10, 1), 2), ((0, 1), (4, 3), 0), ((4, 1), (6, 2), 2), ((4, 3), (6, 1), 1)),
}


# ---- one tensor ----


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("src", [0, 3])
@world(4)
def test_the_values_of_the_source_arrive_and_nobody_else_needs_them(name: str, src: int) -> None:
    given = VALUE if rank() == src else torch.empty(10, 4, device="meta")
    with count_comms() as comms:
        x = SPECS[name].shard(given, src_rank=src)
    held = sum(box.numel for box in x.layout_.boxes(src))
    assert comms.total_bytes <= (40 - held) * 4 + 4 * 4 * 8  # what the source does not keep, and the agreement
    assert_close(x.full_tensor(), VALUE)
    assert x.sharding_spec() is SPECS[name]
    for mine in x.local_shards():
        assert_close(mine.tensor, VALUE[mine.metadata.box.relative_to(Box((0, 0), (10, 4)))])


@world(4)
def test_the_source_is_in_the_group_and_not_connected_to_what_is_made_of_it() -> None:
    given = VALUE.clone()
    x = chunks(0, 0).shard(given)
    x.fill_(7)
    assert_close(given, VALUE)
    with pytest.raises(LayoutError, match="0 to 3, got 4"):
        chunks(0, 0, 1).shard(VALUE, src_rank=4)


@world(2)
def test_no_rank_waits_for_one_that_lacks_the_device() -> None:
    with pytest.raises(RuntimeError) as error:
        ChunkShardingSpec(0, ["rank:0/mps", "rank:1/mps"]).shard(VALUE)
    assert not isinstance(error.value, DeadlockError)


def test_ranks_that_disagree_are_named() -> None:
    def on_three(tensor: object, **options: int) -> object:
        return chunks(0, 0, 1, 2).shard(tensor, **options)  # type: ignore[arg-type]

    wrong: dict[str, Callable[[], object]] = {
        "rank 2: .*src_rank": lambda: on_three(VALUE, src_rank=1 if rank() == 2 else 0),
        "rank 0, 1: ": lambda: chunks(rank() // 2, 0, 1, 2).shard(VALUE),
        "shape": lambda: on_three(VALUE if rank() else VALUE[:3]),
        "rank 0: .*requires_grad": lambda: on_three(VALUE.clone().requires_grad_(rank() == 0)),
        "rank 1: .*has no values": lambda: on_three(torch.empty(10, 4, device="meta"), src_rank=1),
        "rank 0: .*only a dense tensor": lambda: on_three(VALUE if rank() else VALUE.to_sparse()),
        "rank 0: .*only a plain tensor can be sharded, got": lambda: on_three(VALUE if rank() else VALUE.tolist()),
    }
    for said, job in wrong.items():
        with pytest.raises(MismatchError, match=said):
            world(3).run(job)


# ---- groups ----


@world(4)
def test_a_group_of_some_ranks_works_for_itself() -> None:
    mine = (1, 3) if rank() % 2 else (0, 2)
    x = ChunkShardingSpec(0, [f"rank:{r}" for r in reversed(mine)]).shard(
        VALUE + rank(), src_rank=1, process_group=mine
    )
    assert_close(x.full_tensor(), VALUE + mine[1])
    with pytest.raises(LayoutError, match="not of the group"):
        chunks(0, 0, 1).shard(VALUE, process_group=mine)
    with pytest.raises(GroupError, match="of 4 cannot use"):
        chunks(0, 0, 1).shard(VALUE, process_group=tuple({0, 1, 2, 3} - set(mine)))


@world(3)
def test_the_order_of_a_group_does_not_change_what_a_spec_makes() -> None:
    for spec in (boxes(((0, 0), (10, 4), 1)), boxes(((0, 0), (10, 1), 2), ((0, 1), (4, 3), 0), ((4, 1), (6, 3), 2))):
        x = spec.shard(VALUE + rank(), src_rank=0, process_group=(2, 0, 1))
        assert x.sharding_spec() is spec
        assert x.layout_ == spec.layout((10, 4), (0, 1, 2))
        assert_close(x.full_tensor(), VALUE + 2)


@world(3)
def test_what_is_no_group_is_refused_in_words() -> None:
    for group, said in (
        ((0, 0, 1, 2), "each once"),
        ((-1, 0, 1, 2), "each once"),
        ((0, 1, 2, 3), "each once"),
        ((), "is one of torch's, a mesh, or ranks"),
        (2, "is one of torch's, a mesh, or ranks"),
    ):
        with pytest.raises(GroupError, match=said):
            chunks(0, 0, 1).shard(VALUE, process_group=group)


@pytest.mark.processes
@world(2, real=True)
def test_a_mesh_of_torch_is_a_group() -> None:
    mesh = init_device_mesh("cpu", (2,))
    assert_close(chunks(0, 1, 0).shard(VALUE + rank(), 1, mesh).full_tensor(), VALUE + 1)


@world(4)
def test_a_group_may_be_set_for_a_while_but_not_inside_another() -> None:
    mine = Mesh((2,), (1, 3) if rank() % 2 else (0, 2))
    spec = ChunkShardingSpec(1, [f"rank:{r}" for r in mine.ranks])
    with load_with_process_group(mine):
        with pytest.raises(GroupError, match="already"), load_with_process_group(mine):
            pass
        assert_close(spec.shard(VALUE + rank()).full_tensor(), VALUE + mine.ranks[0])
    with pytest.raises(ZeroDivisionError), load_with_process_group(mine):
        raise ZeroDivisionError
    with load_with_process_group(mine):
        pass
    with pytest.raises(MismatchError):  # everybody again, and everybody says another spec
        spec.shard(VALUE)


@pytest.mark.processes
@world(4, real=True)
def test_torchs_own_groups_are_used() -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[rank() % 2]
    ranks = dist.get_process_group_ranks(group)
    x = ChunkShardingSpec(0, [f"rank:{r}/cpu" for r in ranks]).shard(VALUE + rank(), 1, group)
    assert_close(x.full_tensor(), VALUE + ranks[1])


# ---- parameters ----


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(10, 4)
        self.inner = nn.Sequential(nn.Linear(4, 6), nn.ReLU())
        self.head = nn.Linear(6, 4)
        self.register_buffer("scale", torch.arange(1.0, 5.0))

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.inner(self.table(ids))) * self.scale
        return found


@world(4)
def test_a_parameter_becomes_one_that_trains_as_before() -> None:
    mine, reference = Model(), Model()
    if rank() != 2:
        nn.init.zeros_(mine.table.weight)  # only the source's values count
    shard_parameter(mine.table, "weight", SPECS["uneven"], src_rank=2)
    weight = mine.table.weight
    assert isinstance(weight, nn.Parameter)
    assert isinstance(weight, DTensor)
    assert "table.weight" in dict(mine.named_parameters())
    ids = torch.tensor([1, 9, 9, 0])
    for model in (mine, reference):
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(ids).square().sum().backward()
            optimizer.step()
    assert_close(as_dtensor(weight.detach()).full_tensor(), reference.table.weight.detach())


@world(4)
def test_buffers_frozen_parameters_and_plain_attributes_stay_what_they_are() -> None:
    model = Model()
    model.head.bias.requires_grad_(False)
    shard_parameter(model, "scale", chunks(0, 0, 1, 2, 3))
    shard_parameter(model.head, "bias", chunks(0, 0, 1, 2, 3))
    assert isinstance(dict(model.named_buffers())["scale"], DTensor)
    assert isinstance(model.head.bias, DTensor)
    assert not model.head.bias.requires_grad
    model = Model()
    model.extra = VALUE.clone()
    shard_parameter(model, "extra", chunks(0, 0, 1))
    assert isinstance(model.extra, DTensor)
    assert "extra" not in model.state_dict()


def test_what_cannot_be_sharded_on_one_rank_is_the_same_error_on_all() -> None:
    def missing() -> None:
        shard_parameter(nn.Linear(4, 4, bias=rank() != 1), "bias", chunks(0, 0, 1))

    def strided() -> None:
        layer = nn.Linear(4, 4)
        layer.weight = nn.Parameter(torch.ones(4, 4).t() if rank() == 1 else torch.ones(4, 4))
        shard_parameter(layer, "weight", chunks(0, 0, 1))

    def sharded() -> None:
        layer = nn.Linear(4, 4)
        if rank() < 2:
            shard_parameter(layer, "weight", chunks(0, 0, 1), process_group=(0, 1))
            shard_parameter(layer, "weight", chunks(0, 1, 0))  # among its own ranks
        shard_parameter(layer, "weight", chunks(0, 0, 1), process_group=(0, 1, 2))

    for wrong, said in (
        (missing, "rank 1: .*must be a Tensor, got NoneType"),
        (strided, "rank 1: .*weight is not contiguous"),
        (sharded, "rank 2: .*is sharded"),
    ):
        with pytest.raises(MismatchError, match=said) as error:
            world(3).run(wrong)
        assert "ranks 0, 1, 2 raised the same" in error.value.__notes__


@world(2)
def test_what_cannot_be_sharded_is_refused() -> None:
    model = Model()
    spec = chunks(0, 0, 1)
    with pytest.raises(AttributeError, match="Embedding has no attribute 'wait'"):
        shard_parameter(model.table, "wait", spec)
    with pytest.raises(PlanError, match="must be a Tensor, got int"):
        shard_parameter(model.table, "num_embeddings", spec)
    model.head.weight = nn.Parameter(model.head.weight.detach().t())
    with pytest.raises(PlanError, match="not contiguous"):
        shard_parameter(model.head, "weight", spec)


ROWS, DIM = 1 << 20, 64  # 256 MB of floats


def peak() -> int:
    """Bytes that this process held at most since `forget`."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])


def forget() -> int:
    """Begin anew; bytes that are held now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return peak()


@pytest.mark.processes
@world(4, real=True)
def test_a_rank_that_is_not_the_source_never_holds_more_than_its_shard() -> None:
    table = torch.ones(ROWS, DIM) if rank() == 1 else torch.empty(ROWS, DIM, device="meta")
    before = forget()
    x = ChunkShardingSpec(0, ["rank:2", "rank:0", "rank:1", "rank:3"]).shard(table, src_rank=1)
    grown = peak() - before
    shard = x.to_local().nbytes
    assert shard == ROWS * DIM
    if rank() != 1:
        assert grown < shard + (64 << 20)
    assert bool((x.to_local() == 1).all())
