"""Several shards of a rank as one local tensor: shared memory, ops, gradients, what is refused."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.testing import assert_close

from shardwise.errors import LayoutError, RuleError
from shardwise.sharded_tensor import LocalShardsWrapper

Offsets = list[tuple[int, ...]]

FULL = torch.arange(60.0).view(6, 10)
# Boxes of FULL that are one box together, in an order that is not always the natural one.
TILINGS: dict[str, list[tuple[slice, ...]]] = {
    "one": [(slice(1, 4), slice(2, 7))],
    "rows": [(slice(2, 3), slice(0, 10)), (slice(3, 6), slice(0, 10))],
    "columns": [(slice(1, 5), slice(4, 6)), (slice(1, 5), slice(6, 9)), (slice(1, 5), slice(9, 10))],
    "columns the other way": [(slice(0, 6), slice(5, 10)), (slice(0, 6), slice(0, 5))],
    "grid": [
        (slice(4, 6), slice(0, 3)), (slice(1, 4), slice(3, 5)), (slice(1, 4), slice(0, 3)), (slice(4, 6), slice(3, 5))
    ],
    "wheel": [
        (slice(0, 1), slice(0, 3)), (slice(0, 3), slice(3, 4)), (slice(3, 4), slice(1, 4)), (slice(1, 4), slice(0, 1)),
        (slice(1, 3), slice(1, 3)),
    ],
    "one of them empty": [(slice(0, 2), slice(0, 10)), (slice(2, 2), slice(0, 10)), (slice(2, 6), slice(0, 10))],
}  # fmt: skip


def taken(name: str) -> tuple[list[Tensor], Offsets, Tensor]:
    """Shards with memory of their own, their offsets, and the box that they are together."""
    boxes = TILINGS[name]
    shards = [FULL[box].clone() for box in boxes]
    full = [box for box in boxes if box[0].start < box[0].stop]
    full_value = tuple(slice(min(b[d].start for b in full), max(b[d].stop for b in full)) for d in (0, 1))
    return shards, [tuple(part.start for part in box) for box in boxes], FULL[full_value].clone()


def same_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


# ---- its value and its memory ----


@pytest.mark.parametrize("name", TILINGS)
def test_shards_are_arranged_as_in_the_global_tensor(name: str) -> None:
    shards, offsets, full_value = taken(name)
    before = [shard.clone() for shard in shards]
    wrapper = LocalShardsWrapper(shards, offsets)
    assert type(wrapper + 0) is LocalShardsWrapper
    assert_close(torch.Tensor(wrapper + 0), full_value)
    assert wrapper.shape == full_value.shape
    assert wrapper.local_offsets() == wrapper.shard_offsets == [torch.Size(at) for at in offsets]
    assert wrapper.local_sizes() == wrapper.shard_sizes == [shard.shape for shard in before]
    assert all(map(torch.equal, wrapper.local_shards(), before))
    assert all(a is b for a, b in zip(wrapper.shards, shards, strict=True))
    wrapper.mul_(2)  # writes on either side are seen on the other
    assert_close(LocalShardsWrapper([s.clone() for s in shards], offsets).sum(), full_value.sum() * 2)
    for shard in shards:
        shard.fill_(7)
    assert (wrapper == 7).all()


def test_a_single_shard_and_adjacent_views_of_one_tensor_are_not_copied() -> None:
    table = torch.randn(4, 6)
    for parts, offsets in (
        ([table], [(5, 0)]),
        (table.split([1, 3]), [(0, 0), (1, 0)]),
        (table.split([2, 4], 1), [(0, 0), (0, 2)]),
    ):
        wrapper = LocalShardsWrapper(parts, offsets)
        assert wrapper.data_ptr() == table.data_ptr()
        assert_close(wrapper.sum(), table.sum())
        wrapper.add_(1)
        assert_close(wrapper.sum(), table.sum())


def test_views_of_one_tensor_in_another_order_are_rearranged() -> None:
    table = torch.arange(8.0).view(2, 4)
    swapped = LocalShardsWrapper([table[:, :2], table[:, 2:]], [(0, 2), (0, 0)])
    assert swapped.tolist() == [[2, 3, 0, 1], [6, 7, 4, 5]]
    rows = LocalShardsWrapper([table[:, :2], table[:, 2:]], [(0, 0), (2, 0)])
    assert rows.tolist() == [[0, 1], [4, 5], [2, 3], [6, 7]]
    wide = torch.arange(16.0).view(2, 8)
    apart = LocalShardsWrapper([wide[:, 1:3], wide[:, 5:7]], [(0, 0), (0, 2)])  # nearer to each other than they lie
    assert apart.tolist() == [[1, 2, 5, 6], [9, 10, 13, 14]]
    halves = torch.arange(8.0)
    folded = LocalShardsWrapper([halves[:4].view(2, 2), halves[4:].view(2, 2)], [(2, 0), (4, 0)])
    assert folded.data_ptr() == halves.data_ptr()
    assert folded.flatten().tolist() == halves.tolist()


def test_shards_of_one_dim_and_a_number_of_no_dims() -> None:
    a, b = torch.arange(3.0), torch.arange(3.0, 8.0)
    line = LocalShardsWrapper([b, a], [(13,), (10,)])
    assert line.tolist() == list(range(8))
    line.add_(1)
    assert a.tolist() == [1, 2, 3]
    number = torch.tensor(3.0)
    wrapper = LocalShardsWrapper([number], [()])
    wrapper.add_(1)
    assert (wrapper.item(), number.item()) == (4, 4)
    view = wrapper.detach()
    assert isinstance(view, LocalShardsWrapper)
    assert [shard.item() for shard in view.local_shards()] == [4]
    wrapper.data = torch.tensor(7.0)
    assert number.item() == 7


def test_a_rank_may_have_no_shards() -> None:
    wrapper = LocalShardsWrapper([], [])
    assert wrapper.shape == (0, 0)
    assert wrapper.is_empty_shard()
    assert wrapper.local_shards() == wrapper.local_sizes() == wrapper.local_offsets() == wrapper.local_chunks == []
    empty = LocalShardsWrapper([torch.empty(0, 16)], [(8, 0)])
    assert empty.is_empty_shard()
    assert empty.shape == (0, 16)
    assert not LocalShardsWrapper([torch.empty(1)], [(0,)]).is_empty_shard()


def test_offsets_have_two_names() -> None:
    a = torch.ones(2, 3)
    assert LocalShardsWrapper(local_shards=[a], offsets=[(3, 0)]).local_offsets() == [torch.Size((3, 0))]
    for both_or_none in ({}, {"local_offsets": [(3, 0)], "offsets": [(3, 0)]}):
        with pytest.raises(LayoutError, match="either local_offsets or offsets"):
            LocalShardsWrapper([a], **both_or_none)


# ---- ops ----

KEEPING: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": torch.clone,
    "detach": Tensor.detach,
    "data": lambda x: x.data,
    "to": lambda x: x.to(torch.float64),
    "mul": lambda x: x * 3,
    "the other way": lambda x: 3 - x,
    "with a plain tensor": lambda x: torch.zeros(x.shape[1]) + x,
    "addcdiv": lambda x: torch.addcdiv(x, x, x + 1),
    "where": lambda x: torch.where(x > 3, x, 0.0),
    "zeros_like": torch.zeros_like,
    "full_like": lambda x: torch.full_like(x, 3.0),
    "view": lambda x: x.view(x.shape),
    "truth": lambda x: x == 3,
}
GIVING_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": torch.sum,
    "row": lambda x: x[0],
    "flat": lambda x: x.view(-1),
    "transposed": Tensor.t,
    "product": lambda x: x @ x.t(),
    "flipped": lambda x: x.flip(0),
    "stretched": lambda x: x + torch.zeros(2, 1, 1),
}


@pytest.mark.parametrize("name", KEEPING)
def test_what_leaves_elements_in_place_gives_a_wrapper(name: str) -> None:
    shards, offsets, full_value = taken("columns")
    out = KEEPING[name](LocalShardsWrapper(shards, offsets))
    want = KEEPING[name](full_value)
    assert isinstance(out, LocalShardsWrapper)
    assert out.dtype == want.dtype
    assert out.local_offsets() == [torch.Size(at) for at in offsets]
    got = LocalShardsWrapper(out.local_shards(), offsets)
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", GIVING_PLAIN)
def test_anything_else_gives_a_plain_tensor(name: str) -> None:
    square = [FULL[:4, :3].clone(), FULL[:4, 3:4].clone()]  # where a transpose has the shape of its operand
    out = GIVING_PLAIN[name](LocalShardsWrapper(square, [(0, 0), (0, 3)]))
    assert type(out) is Tensor
    assert_close(out, GIVING_PLAIN[name](FULL[:4, :4].contiguous()))


def test_what_changes_nothing_gives_itself_and_views_share_memory() -> None:
    shards, offsets, _ = taken("grid")
    wrapper = LocalShardsWrapper(shards, offsets)
    for same in (wrapper.to(torch.float32), wrapper.add_(1), wrapper.contiguous(), wrapper.requires_grad_()):
        assert same is wrapper
    shards, offsets, _ = taken("rows")
    wrapper = LocalShardsWrapper(shards, offsets)
    for view in (wrapper.detach(), wrapper.data, wrapper.view(wrapper.shape)):
        assert isinstance(view, LocalShardsWrapper)
        view.local_shards()[0].fill_(5)
        assert (shards[0] == 5).all()
        shards[0].zero_()


def test_copies_come_from_wrappers_and_plain_tensors() -> None:
    shards, offsets, full_value = taken("grid")
    wrapper = LocalShardsWrapper(shards, offsets)
    assert wrapper.copy_(full_value + 1) is wrapper
    assert_close(shards[0], FULL[TILINGS["grid"][0]] + 1)
    wrapper.copy_(LocalShardsWrapper([full_value * 3], [(40, 40)]))  # the same shape at another offset
    assert wrapper.local_offsets() == [torch.Size(at) for at in offsets]
    assert_close(shards[0], FULL[TILINGS["grid"][0]] * 3)
    plain = torch.zeros(full_value.shape)
    assert plain.copy_(wrapper) is plain
    assert_close(plain, full_value * 3)


def test_wrappers_with_other_offsets_are_not_equal_and_combine_to_plain_tensors() -> None:
    a, b = torch.ones(2, 3), torch.ones(2, 3)
    here, there = LocalShardsWrapper([a], [(0, 0)]), LocalShardsWrapper([b], [(2, 0)])
    assert not torch.equal(here, there)
    assert torch.equal(here, a)
    assert here.equal(LocalShardsWrapper([b], [(0, 0)]))
    assert not here.equal(LocalShardsWrapper([b + 1], [(0, 0)]))
    assert type(here + there) is Tensor


def test_functions_that_would_detach_the_shards_are_refused() -> None:
    wrapper = LocalShardsWrapper([torch.ones(2, 2)], [(0, 0)])
    refused: dict[str, tuple[Any, ...]] = {
        "t_": (), "resize_": (4,), "transpose_": (0, 1), "squeeze_": (), "set_": (torch.ones(2),)
    }  # fmt: skip
    for name, arguments in refused.items():
        with pytest.raises(RuleError, match="detach"):
            getattr(wrapper, name)(*arguments)


def test_data_is_replaced_with_the_shards() -> None:
    shards, offsets, full_value = taken("columns")
    wrapper = LocalShardsWrapper(shards, offsets)
    wrapper.data = full_value.double() + 1
    assert wrapper.dtype == torch.float64
    assert_close(shards[1], FULL[TILINGS["columns"][1]].double() + 1)
    wrapper.zero_()
    assert not shards[1].any()
    with pytest.raises(LayoutError, match="shape"):
        wrapper.data = torch.ones(3)


# ---- gradients and training ----


def test_gradients_reach_shards_and_come_from_them() -> None:
    for name in ("one", "columns", "grid"):
        given, offsets, full_value = taken(name)
        leaves = [shard.requires_grad_() for shard in given]
        wrapper = LocalShardsWrapper(leaves, offsets)
        (wrapper * full_value).sum().backward()
        for shard, box in zip(leaves, TILINGS[name], strict=True):
            assert_close(shard.grad, FULL[box])
            assert same_memory(shard, wrapper)
    given, offsets, _ = taken("columns")
    source = [shard.requires_grad_() for shard in given]
    shards = [s * 2 for s in source]
    wrapper = LocalShardsWrapper(shards, offsets)
    assert not same_memory(shards[0], wrapper)
    wrapper.square().sum().backward()
    for given_shard in source:
        assert_close(given_shard.grad, given_shard.detach() * 8)
    shards, offsets, _ = taken("rows")
    leaf = LocalShardsWrapper(shards, offsets).requires_grad_()
    assert isinstance(leaf, LocalShardsWrapper)
    leaf.local_shards()[1].sum().backward()
    assert_close(leaf.grad, torch.tensor([[0.0], [1.0], [1.0], [1.0]]).expand(4, 10))


OPTIMIZERS: list[Callable[[list[Tensor]], torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    lambda p: torch.optim.Adagrad(p, 0.1),
    lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
    lambda p: torch.optim.Adam(p, 0.1, foreach=False),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_it_trains_as_a_plain_parameter_does(make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> None:
    shards, offsets, full_value = taken("columns")
    mine, reference = nn.Parameter(LocalShardsWrapper(shards, offsets)), nn.Parameter(full_value)
    assert isinstance(mine, nn.Parameter)
    assert isinstance(mine, LocalShardsWrapper)
    for parameter in (mine, reference):
        optimizer = make([parameter])
        for _ in range(3):
            optimizer.zero_grad()
            (parameter.sin() * parameter).sum().backward()
            optimizer.step()
    assert_close(mine.detach().sum(), reference.detach().sum())
    assert_close(shards[1], reference.detach()[:, 2:5])


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_it_is_a_table_with_sparse_gradients(make: Callable[..., torch.optim.Optimizer]) -> None:
    shards, offsets, full_value = taken("columns")
    mine, reference = nn.Parameter(LocalShardsWrapper(shards, offsets)), nn.Parameter(full_value)
    for table in (mine, reference):
        optimizer = make([table], lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            nn.functional.embedding(torch.tensor([1, 1, 3]), table, sparse=True).square().sum().backward()
            optimizer.step()
    assert_close(shards[1], reference.detach()[:, 2:5])


def test_a_module_holds_it_saves_it_and_converts_it() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shards, offsets, _ = taken("columns")
            self.weight = nn.Parameter(LocalShardsWrapper(shards, offsets))

    module, other = Table(), Table()
    with torch.no_grad():
        module.weight.mul_(3)
    state = module.state_dict()
    assert isinstance(state["weight"], LocalShardsWrapper)
    other.load_state_dict(state)
    assert torch.equal(other.weight, module.weight)
    module.double()
    assert isinstance(module.weight, LocalShardsWrapper)
    assert [s.dtype for s in module.weight.local_shards()] == [torch.float64] * 3


def test_copies_and_pickles_are_wrappers_with_memory_of_their_own() -> None:
    shards, offsets, _ = taken("columns")
    parameter = nn.Parameter(LocalShardsWrapper(shards, offsets))
    parameter.sum().backward()
    for other in (copy.deepcopy(parameter), pickle.loads(pickle.dumps(parameter))):  # noqa: S301
        assert isinstance(other, LocalShardsWrapper)
        assert isinstance(other, nn.Parameter)
        assert other.requires_grad
        assert torch.equal(other, parameter)
        assert not same_memory(other, parameter)
        assert all(same_memory(other, shard) for shard in other.local_shards())
    assert copy.deepcopy(parameter).grad is None  # as in torch
    leaf = LocalShardsWrapper(*taken("rows")[:2]).requires_grad_()
    leaf.sum().backward()
    assert_close(copy.deepcopy(leaf).grad, leaf.grad)


A, B = torch.ones(2, 3), torch.zeros(2, 3)
WRONG: dict[str, tuple[list[Any], list[Any], str]] = {
    "too few offsets": ([A, B], [(0, 0)], "2 shards and 1 offsets"),
    "too many offsets": ([], [(0, 0)], "0 shards and 1 offsets"),
    "a dim missing": ([A], [(0,)], r"shard 0 of shape \(2, 3\) needs 2 offsets"),
    "negative": ([A, B], [(0, 0), (-2, 0)], r"shard 1 .* none negative, got \(-2, 0\)"),
    "overlap": ([A, B], [(4, 4), (5, 4)], r"overlap: .*shard 0 at \[4:6, 4:7\].*shard 1"),
    "apart": ([A, B], [(0, 0), (0, 5)], r"nobody holds \[0:2, 3:5\].*init_from_local_shards"),
    "corner": ([A, B], [(0, 0), (2, 3)], "gap"),
    "a stair": ([A, B], [(0, 0), (2, 1)], r"gap: nobody holds .*shard 0.*shard 1"),
    "dtypes": ([A, B.double()], [(0, 0), (2, 0)], "one dtype, got torch.float32, torch.float64"),
    "devices": ([A, B.to("meta")], [(0, 0), (2, 0)], "one device"),
    "dims": ([A, B[0]], [(0, 0), (2,)], "one ndim, got 2, 1"),
    "twice": ([A, A], [(0, 0), (2, 0)], "passed before"),
    "a list": ([A, [1.0]], [(0, 0), (2, 0)], "local_shards must be a sequence, each a tensor"),
    "a wrapper": ([LocalShardsWrapper([A], [(0, 0)])], [(0, 0)], "got LocalShardsWrapper"),
    "sparse": ([A.to_sparse()], [(0, 0)], "dense"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_makes_no_local_tensor_is_refused_in_words(name: str) -> None:
    shards, offsets, said = WRONG[name]
    with pytest.raises(LayoutError, match=said):
        LocalShardsWrapper(shards, offsets)


def test_it_tells_torch_where_its_shards_are() -> None:
    shards, offsets, full_value = taken("columns")
    wrapper = LocalShardsWrapper(shards, offsets)
    expected = wrapper.storage_metadata()
    assert isinstance(expected, TensorStorageMetadata)
    assert expected == wrapper.storage_meta
    assert expected.size == full_value.shape
    assert expected.properties.dtype == torch.float32
    assert expected.chunks == wrapper.local_chunks
    for chunk, at, shard in zip(expected.chunks, offsets, shards, strict=True):
        assert chunk == ChunkStorageMetadata(torch.Size(at), shard.shape)
    assert [end.offsets[1] for _, end in pairwise(expected.chunks)] == [6, 9]


@pytest.mark.processes
def test_importing_the_package_does_not_import_torchs_checkpoints() -> None:
    program = (
        "import shardwise, sys; assert 'torch' not in sys.modules;"
        "shardwise.DTensor; assert 'torch.distributed.checkpoint' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
