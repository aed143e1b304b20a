"""Borders: parts that fit or do not, uneven parts of which nobody told, and inputs that several layers share."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from shardwise import DTensor, Mesh, Replicate, Shard, count_comms, distribute_tensor, init_device_mesh
from shardwise import _collectives as collectives
from shardwise._models import RMSNormPython
from shardwise.errors import LayoutError, MismatchError
from shardwise.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    fully_shard,
    parallelize_module,
)
from shardwise.parallel.boundary import SharedInput
from shardwise.testing import world
from tests.parallel.one_process import assert_same_parameters, compare, full, leaf_copy, local_shard_of, raised

R, S0, S1 = Replicate(), Shard(0), Shard(1)


class Heads(nn.Module):
    """Three projections of one input and one back, as in attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wq, self.wk, self.wv = (nn.Linear(6, 10, bias=False) for _ in range(3))
        self.wo = nn.Linear(10, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.wo(torch.tanh(self.wq(x)) * self.wk(x) + self.wv(x))
        return result


class Block(nn.Module):
    """Heads after a norm, added to the input."""

    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm = norm(6)
        self.heads = Heads()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.heads(self.norm(x))
        return result


X = torch.linspace(-1, 1, 60, dtype=torch.float64).view(2, 5, 6)
WHOLE = {"heads.w[qkv]": ColwiseParallel(), "heads.wo": RowwiseParallel()}
SEQUENCE = {
    "norm": SequenceParallel(),
    "heads.w[qkv]": ColwiseParallel(input_layouts=S1),
    "heads.wo": RowwiseParallel(output_layouts=S1),
}


def counted(plan: dict[str, Any], run: Any = lambda module, x: module(x), sharded: int | None = None) -> list[int]:
    """Collectives of forward and backward of a block, after its values were compared with those of one process."""
    plain = Block().double()
    module = parallelize_module(copy.deepcopy(plain), None, plan)
    x, y = leaf_copy(local_shard_of(X, sharded, collectives.world_size())), leaf_copy(X)
    counts = []
    with count_comms() as comms:
        out = run(module, x)
    counts.append(comms.total_calls)
    want = plain(y)
    assert_close(full(out), local_shard_of(want, sharded, collectives.world_size()))
    with count_comms() as comms:
        out.square().sum().backward()
    counts.append(comms.total_calls)
    want.square().sum().backward()
    assert_close(x.grad, local_shard_of(y.grad, sharded, collectives.world_size()))
    assert_same_parameters(module, plain)
    return counts


@pytest.mark.parametrize("ranks", [2, 4])
def test_layers_that_share_a_plain_input_send_one_gradient_back(ranks: int) -> None:
    assert world(ranks).run(counted, WHOLE) == [[1, 1]] * ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_layers_that_share_a_sharded_input_gather_it_once(ranks: int) -> None:
    """One exchange asks for the sizes of the parts; then a gather and a scatter each way."""
    assert world(ranks).run(counted, SEQUENCE, sharded=1) == [[1 + 2, 2]] * ranks


def test_a_copy_of_a_parallel_module_shares_as_the_module_does() -> None:
    def body() -> int:
        module = copy.deepcopy(parallelize_module(Block().double(), None, WHOLE))
        out = module(leaf_copy(X))
        with count_comms() as comms:
            out.square().sum().backward()
        return comms.total_calls

    assert world(2).run(body) == [1, 1]


def test_recomputation_shares_as_the_first_run_did() -> None:
    def run(module: nn.Module, x: Tensor) -> Any:
        return checkpoint(module, x, use_reentrant=False)

    # The sum after the last layer is not needed to recompute what backward wants, or is done again.
    for forward, backward in world(3).run(counted, WHOLE, run):
        assert (forward, backward <= 2) == (1, True)


@world(2)
def test_what_is_shared_ends_with_the_forward_of_the_parent_even_if_it_fails() -> None:
    class Failing(Heads):
        def forward(self, x: Tensor) -> Tensor:
            self.wq(x)
            raise ZeroDivisionError

    def shared_of(module: nn.Module) -> SharedInput:
        """Its hook is bound to it."""
        (hook,) = module._forward_pre_hooks.values()
        found = hook.__self__  # type: ignore[attr-defined]
        assert isinstance(found, SharedInput)
        return found

    module = Failing()
    parallelize_module(module, None, {"w[qkv]": ColwiseParallel()})
    shared = shared_of(module)
    x = torch.ones(2, 6, requires_grad=True)
    with pytest.raises(ZeroDivisionError):
        module(x)
    assert (shared.depth, shared.source, shared.result) == (0, None, None)
    module.wq(x)
    assert shared.source is None


@world(2)
def test_an_input_that_changed_in_place_is_taken_anew() -> None:
    class Changing(Heads):
        def forward(self, x: Tensor) -> Tensor:
            first = self.wq(x)
            x.mul_(2)
            result: Tensor = self.wk(x) + first
            return result

    plain = Changing().double()
    sharded = ColwiseParallel(input_layouts=S0, output_layouts=R)
    module = parallelize_module(copy.deepcopy(plain), None, {"w[qk]": sharded})
    with torch.no_grad():
        assert_close(module(local_shard_of(X[0], 0, 2).clone()), plain(X[0].clone()))


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, RMSNormPython, lambda n: nn.Dropout(0.0)])
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("dim", [0, 1, -2])
@pytest.mark.parametrize("ranks", [1, 4])  # five places on four ranks; two examples on four ranks
def test_norms_on_shards_of_a_sequence(norm: Any, local: bool, dim: int, ranks: int) -> None:
    def body() -> None:
        plain = nn.Sequential(norm(6)).double()
        module = parallelize_module(
            copy.deepcopy(plain), None, {"0": SequenceParallel(sequence_dim=dim, use_local_output=local)}
        )
        for x in (local_shard_of(X, dim, ranks), distribute_tensor(X, Mesh((ranks,)), [R])):
            module.zero_grad()
            plain.zero_grad()

            def shard(t: Tensor) -> Tensor:
                return local_shard_of(t, dim, ranks)

            part, part_of_input = shard if local else lambda t: t, shard if type(x) is Tensor else lambda t: t
            assert isinstance(compare(module, plain, x, X, part, part_of_input), DTensor) != local

    world(ranks).run(body)


@world(3)
def test_shard_sizes_that_chunk_does_not_give_are_asked_unless_the_plan_has_them() -> None:
    # Without sizes in the plan the ranks are asked.
    sizes = (0, 3, 2)
    plain = nn.LayerNorm(6).double()
    module = parallelize_module(copy.deepcopy(plain), None, SequenceParallel())
    with count_comms() as comms:
        out = module(local_shard_of(X, 1, 3, sizes))
    assert comms.total_calls == 1
    assert out.layout_.shard_sizes(0) == sizes
    assert_close(full(out), plain(X))
    given = parallelize_module(nn.Linear(6, 6), None, ColwiseParallel(input_layouts=Shard(0, (0, 2, 0))))
    for _ in range(2):
        with count_comms() as comms:
            given(torch.ones([0, 2, 0][collectives.rank()], 6))
        assert comms.total_calls == 1


def refused(module: nn.Module, style: Any, x: Tensor) -> tuple[type, str]:
    parent = parallelize_module(nn.Sequential(module), None, {"0": style})
    with pytest.raises((LayoutError, MismatchError)) as caught:
        parent(x)
    return caught.type, str(caught.value)


def test_an_input_of_another_shape_or_mesh_than_planned_is_refused() -> None:
    """The whole given to a layer that wants a part: torch multiplies what does not belong together, or fails."""
    every = world(4).run(refused, nn.Linear(10, 6), RowwiseParallel(), torch.ones(2, 10))
    assert [kind for kind, _ in every] == [LayoutError] * 4
    assert every[3][1] == (
        "the input of 0: a plain tensor laid out as [Shard(1)] on Mesh(0=4) is a local shard of shape (2, 1) on rank 3"
        ", got (2, 10). Fix: pass that shard, say in the style how the tensor is laid out, or pass a DTensor."
    )

    def body() -> tuple[tuple[type, str], ...]:
        x = distribute_tensor(torch.ones(2, 6), Mesh((2,), names=("other",)), [R])
        return (
            refused(nn.LayerNorm(6), SequenceParallel(), torch.ones(2 + collectives.rank(), 3, 6)),
            refused(nn.Linear(6, 6), ColwiseParallel(), x),
        )

    (((kind, text), (_, elsewhere)),) = set(world(2).run(body))
    assert kind is MismatchError
    assert "the input of 0: plain tensors laid out as [Shard(1)]" in text
    assert "rank 1: expected (2, 3, 6), got (3, 3, 6)" in text
    assert elsewhere.startswith(
        "the input of 0 is a DTensor on Mesh(other=2), but the module was parallelised on Mesh(0"
    )


@world(2)
def test_no_gradient_is_kept_where_none_is_wanted() -> None:
    module = parallelize_module(Block().double(), None, WHOLE)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            out = module(X)
        assert not out.requires_grad
        assert out.grad_fn is None


@world(1)
def test_on_one_rank_the_boundary_returns_its_input() -> None:
    """No copy, and no node in the graph that is not torch's own."""

    plain = Block().double()
    module = parallelize_module(copy.deepcopy(plain), None, SEQUENCE)
    seen: list[Any] = []
    module.get_submodule("heads.wq").register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    x = X.clone().requires_grad_()
    out = module(x)
    out.sum().backward()
    plain(X).sum().backward()
    assert own_nodes(out.grad_fn) == set()
    assert seen[0].placements == (R,)
    for p, want in zip(module.parameters(), plain.parameters(), strict=True):
        assert_close(full(p.grad), want.grad)


def own_nodes(node: Any) -> set[str]:
    """The autograd functions in a graph that are written in Python."""
    found, left = {}, [node]
    while left:
        one = left.pop()
        if one is not None and id(one) not in found:
            found[id(one)] = one
            left += [edge for edge, _ in one.next_functions]
    return {type(one).__name__ for one in found.values() if isinstance(one, torch.autograd.function.BackwardCFunction)}


@pytest.mark.parametrize("plan", [WHOLE, SEQUENCE])
def test_second_derivatives_are_those_of_one_process(plan: dict[str, Any]) -> None:
    """Such as a penalty on the gradient of the input: what leaves a border backward comes in again."""

    def penalty(module: nn.Module, x: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(module(x).pow(3).sum(), x, create_graph=True)
        found.square().sum().backward()
        assert x.grad is not None
        return x.grad

    def body(ranks: int) -> None:
        alone = Block().double()
        module = parallelize_module(copy.deepcopy(alone), None, plan)
        expected = penalty(alone, X.clone().requires_grad_())
        x = local_shard_of(X, 1, ranks).clone() if plan is SEQUENCE else X.clone()
        found = penalty(module, x.requires_grad_())
        assert_close(found, local_shard_of(expected, 1, ranks) if plan is SEQUENCE else expected)
        assert_same_parameters(module, alone)

    for ranks in (2, 3):
        world(ranks).run(body, ranks)


@pytest.mark.parametrize("style", [RowwiseParallel(), ColwiseParallel(output_layouts=Replicate())])
def test_plain_inputs_that_should_be_replicated_and_differ_are_found(style: ParallelStyle) -> None:
    """As when each rank has its own batch, without an axis for it."""

    def body() -> None:
        table = parallelize_module(nn.Embedding(8, 4), None, style)
        table(torch.tensor([1, 2]) + collectives.rank())

    text = raised(MismatchError, body, 2)
    assert "the input of the module: the plain tensor of shape (2,), int64, must be the same on all ranks" in text


@world(4)
def test_the_loss_of_a_plain_output_is_the_sum_over_the_other_axes() -> None:
    """Each rank of "dp" computes a loss of its own from a DTensor that is replicated there; those of "tp" the same."""
    torch.manual_seed(0)
    layer, x = nn.Linear(3, 4).double(), torch.randn(2, 3, dtype=torch.float64)
    expected = x.clone().requires_grad_()
    sum(k * layer(expected).square().sum() for k in (1, 2)).backward()
    mesh = Mesh((2, 2), names=("dp", "tp"))
    style = ColwiseParallel(output_layouts=Replicate())
    model: Any = parallelize_module(copy.deepcopy(layer), mesh, style)
    mine: Any = distribute_tensor(x.clone(), mesh, [Replicate(), Replicate()]).requires_grad_()
    out = model(mine)
    assert type(out) is Tensor
    loss = (1 + mesh.get_local_rank("dp")) * out.square().sum()
    loss.backward()
    assert_close(full(mine.grad), expected.grad)
    assert_close(full(model.weight.grad), layer.weight.grad)


def test_a_batch_on_the_data_axis_beside_a_module_on_the_other_says_what_to_do_and_both_ways_work() -> None:
    plan, x = {"w[qkv]": ColwiseParallel(), "wo": RowwiseParallel()}, X.float()

    def run() -> str:
        mesh, expected = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), Heads()(x)
        at = mesh["dp"].get_local_rank()
        on_tp = parallelize_module(Heads(), mesh["tp"], plan)
        batch = distribute_tensor(x, mesh["dp"], [S0])
        with pytest.raises(LayoutError) as caught:
            on_tp(batch)
        assert_close(fully_shard(on_tp, mesh=mesh["dp"])(batch.to_local()), expected.chunk(2)[at])
        on_both = parallelize_module(Heads(), mesh, plan)
        fully_shard(on_both, mesh=mesh["dp"])
        assert_close(on_both(distribute_tensor(x, mesh, [S0, R])), expected.chunk(2)[at])
        return str(caught.value).partition("Fix: ")[2]

    (text,) = set(world(4).run(run))
    assert text.startswith(
        "pass this rank's part of the batch, x.to_local(), and of the labels; or parallelize_module("
    )
    assert "q.view(*q.shape[:2], -1, head_dim)" in text
