"""`input_reshard` shards what a module saves of its replicated inputs, and changes no value."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing import assert_close

from shardwise import DTensor, Mesh, Replicate, Shard, count_comms, distribute_tensor
from shardwise import _collectives as collectives
from shardwise.errors import MeshError, MismatchError
from shardwise.parallel import ColwiseParallel, RowwiseParallel, input_reshard, parallelize_module
from shardwise.testing import world

X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(6), dtype=torch.float64)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        out: Tensor = self.down(self.up(x).relu()) * scale
        return out


def mlp() -> MLP:
    torch.manual_seed(0)
    return MLP().double()


def sharded(mesh: Mesh, dim: int | None) -> nn.Module:
    module = parallelize_module(mlp(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return input_reshard(module, mesh, dim)


def results(module: nn.Module, x: Any) -> list[Any]:
    x.requires_grad_()
    loss = module(x * 1, scale=2.0).square().sum()
    loss.backward()
    grads = [p.grad for p in module.parameters()]
    return [y.full_tensor() if isinstance(y, DTensor) else y for y in (loss.detach(), x.grad, *grads)]


@pytest.mark.parametrize("dim", [0, 1, -1, None])
@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("ranks", [2, 4])
def test_values_and_gradients_equal_one_process(ranks: int, plain: bool, dim: int | None) -> None:
    expected = results(mlp(), X.clone())

    def body() -> list[Any]:
        mesh = Mesh((ranks,))
        x = X.clone() if plain else distribute_tensor(X, mesh, [Replicate()])
        return results(sharded(mesh, dim), x)

    for found in world(ranks).run(body):
        for got, want in zip(found, expected, strict=True):
            assert_close(got, want)


def test_a_rank_keeps_a_shard_of_the_input_and_gathers_it_in_backward() -> None:
    def body(dim: int | None) -> tuple[bool, int]:
        module, leaf = sharded(Mesh((2,)), dim), X[:2].clone().requires_grad_()
        x = leaf * 1
        memory = StorageWeakRef(x.untyped_storage())
        out = module(x).sum()
        del x
        is_kept = not memory.expired()
        with count_comms() as comms:
            out.backward()
        return is_kept, comms.total_bytes

    before, after = (world(2).run(body, dim) for dim in (None, 0))
    assert [kept for kept, _ in (*before, *after)] == [True, True, False, False]
    half = 5 * 8 * 8  # bytes of the input's shard
    assert [b - a for (_, a), (_, b) in zip(before, after, strict=True)] == [half, half]


@world(2)
def test_an_input_that_the_module_changes_is_kept_as_it_is() -> None:
    """It may be another one on each rank then."""

    class Changing(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return x.add_(collectives.rank()) * w

    module, w = input_reshard(Changing(), Mesh((2,)), 0), torch.ones(2, 2, requires_grad=True)
    module(torch.ones(2, 2), w).sum().backward()
    assert_close(w.grad, torch.full((2, 2), 1.0 + collectives.rank()))


@world(2)
def test_inputs_that_are_sharded_are_kept_and_a_forward_that_raises_leaves_no_hooks() -> None:
    mesh = Mesh((2,))
    module = input_reshard(mlp(), mesh, 0)
    x = distribute_tensor(X, mesh, [Shard(0)]).requires_grad_()
    expected = results(mlp(), X.clone())
    found = results(module, x)
    assert_close(found[0], expected[0])
    assert_close(found[1], expected[1])
    module = input_reshard(mlp(), Mesh((2,)), 0)
    with pytest.raises(RuntimeError):
        module(X[..., :3])
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert results(deepcopy(module), X.clone())


@world(2)
def test_plain_inputs_that_differ_between_ranks_are_refused() -> None:
    module = sharded(Mesh((2,)), 0)
    with pytest.raises(MismatchError):
        results(module, X + collectives.rank())


def test_a_mesh_of_several_axes_is_refused() -> None:
    def body() -> str:
        with pytest.raises(MeshError) as error:
            input_reshard(mlp(), Mesh((2, 1)), 0)
        return str(error.value)

    (text,) = set(world(2).run(body))
    assert "mesh['tp']" in text
