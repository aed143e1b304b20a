"""What every way of sharding a module keeps of its parameters and buffers, or refuses to lose."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import DTensor, Mesh, Shard, distribute_module, rank, shard_module
from shardwise.embedding import EmbeddingBagCollection, EmbeddingBagConfig, shard_embeddings
from shardwise.errors import MismatchError, PlanError
from shardwise.parallel import ColwiseParallel, fully_shard, local_parameters, parallelize_module
from shardwise.sharded_tensor import ChunkShardingSpec, shard_parameter
from shardwise.testing import world
from tests.parallel.one_process import full, raised

M2 = Mesh((2,))
Way = Callable[[Any], object]
WAYS: dict[str, Way] = {
    "rows": lambda m: shard_module(m, {"weight": Shard(0)}),
    "replicated": lambda m: shard_module(m, {}),
    "parallelize_module": lambda m: parallelize_module(m, M2, ColwiseParallel()),
    "distribute_module": lambda m: distribute_module(m, M2),
    "shard_parameter": lambda m: shard_parameter(m, "weight", ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])),
    "fully_shard": lambda m: fully_shard(m, mesh=M2),
    "fully_shard of a DTensor": lambda m: fully_shard(shard_module(m, {}, mesh=Mesh((1,), (rank(),))), mesh=M2),
}
each_way = pytest.mark.parametrize("way", WAYS)


def unsynchronized(module: Any) -> None:
    """Gradients of all backwards but the last are kept and reduced with it."""
    fully_shard(module, mesh=M2).set_requires_gradient_sync(False)


def accumulated(module: Any) -> Tensor:
    """The sum of three gradients, which bfloat16 would round."""
    for number in (256.0, 1.0, -255.0):
        if number < 0 and hasattr(module, "set_requires_gradient_sync"):
            module.set_requires_gradient_sync(True)
        module(torch.full((1, 1), number, dtype=torch.bfloat16)).float().sum().backward()
    gradient: Tensor = module.weight.grad
    return gradient


@pytest.mark.parametrize("way", [*WAYS, "unsynchronized"])
@world(2)
def test_gradients_are_added_in_the_grad_dtype_of_the_parameter(way: str) -> None:
    module: Any = nn.Linear(1, 3, bias=False, dtype=torch.bfloat16)
    module.weight.grad_dtype = torch.float32
    module.weight.of_user = 1
    want = accumulated(copied(module))
    (unsynchronized if way == "unsynchronized" else WAYS[way])(module)
    assert module.weight.grad_dtype == torch.float32
    assert module.weight.of_user == 1
    found = accumulated(module)
    assert (found.dtype, full(found).tolist()) == (want.dtype, want.tolist())


def copied(module: Any) -> Any:
    """A copy. torch's own loses the `grad_dtype`."""
    twin = copy.deepcopy(module)
    twin.weight.grad_dtype = module.weight.grad_dtype
    return twin


@world(2)
def test_the_grad_dtype_of_a_distributed_parameter_can_be_set() -> None:
    module: Any = shard_module(nn.Linear(1, 3, bias=False, dtype=torch.bfloat16), {"weight": Shard(0)})
    assert module.weight.grad_dtype == torch.bfloat16
    module.weight.grad_dtype = torch.float32
    assert full(accumulated(module)).tolist() == [[2.0]] * 3


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("way", [*WAYS, "fully_shard later", "local_parameters"])
def test_hooks_of_a_parameter_that_is_replaced_are_refused(way: str, register: str) -> None:
    def run() -> None:
        module: Any = nn.Linear(2, 4)
        if way in WAYS:
            getattr(module.weight, register)(lambda x: None)
            WAYS[way](module)
        parallelize_module(module, Mesh((1,), (rank(),)), ColwiseParallel())
        getattr(module.weight, register)(lambda x: None)
        if way == "local_parameters":
            local_parameters(module)
        fully_shard(module, mesh=M2)

    assert "weight: its hooks would not run. Fix: register them afterwards" in raised(PlanError, run)


@world(2)
def test_hooks_of_a_table_of_a_collection_are_refused() -> None:
    tables = EmbeddingBagCollection([EmbeddingBagConfig(4, 3, "items", feature_names=["clicks"])])
    next(tables.parameters()).register_hook(lambda x: None)
    with pytest.raises(PlanError, match=r"items\.weight: its hooks would not run"):
        shard_embeddings(tables, {}, M2)


@world(2)
def test_a_parameter_that_stays_keeps_its_hooks() -> None:
    module: Any = shard_module(nn.Linear(2, 4), {"weight": Shard(0)})
    calls: list[tuple[int, ...]] = []
    module.weight.register_hook(lambda grad: calls.append(tuple(grad.shape)))
    shard_module(module, {"bias": Shard(0)})
    full(module(torch.ones(2, 2)).sum()).backward()
    assert calls == [(4, 2)]


class Normed(nn.Module):
    """Buffers of a module with parameters, of one without, of a shared one, and one that is a view."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.free, self.shared = nn.BatchNorm1d(2, affine=False), nn.Module()
        self.shared.register_buffer("mean", self.free.running_mean)
        self.register_buffer("rows", torch.arange(3).add(int(value)).expand(2, 3))
        for b in (self.norm.running_mean, self.free.running_var, self.free.running_mean, self.norm.num_batches_tracked):
            assert b is not None
            b.fill_(value)


BUFFERS: dict[str, Way] = {
    "shard_module": lambda m: shard_module(m, {"layer.weight": Shard(0)}),
    "fully_shard": lambda m: fully_shard([m.norm, m], mesh=M2),
    "distribute_module": lambda m: distribute_module(m, M2),
}


@pytest.mark.parametrize("way", BUFFERS)
@world(2)
def test_buffers_have_the_values_of_the_first_rank(way: str) -> None:
    module: Any = Normed(rank() + 1)
    BUFFERS[way](module)
    want = dict(Normed(1).named_buffers(remove_duplicate=False))
    for name, b in module.named_buffers():
        assert full(b).tolist() == want[name].tolist(), name
    assert module.shared.mean is module.free.running_mean


@world(2)
def test_a_plan_shares_the_buffers_beside_its_parameters_only_and_none_without_a_source() -> None:
    module: Any = Normed(rank() + 1)
    parallelize_module(module, M2, {"norm.weight": Shard(0)})
    assert [b[0].item() for b in (module.norm.running_mean, module.free.running_mean)] == [1, rank() + 1]
    module = Normed(rank() + 1)
    module.load_state_dict({name: torch.ones_like(p) for name, p in module.named_parameters()}, strict=False)
    shard_module(module, {}, src_rank=None)
    assert module.norm.num_batches_tracked == rank() + 1


STATE = nn.Sequential(
    *[nn.Linear(2, 2) for _ in range(70)], nn.Linear(2, 1)
).state_dict()  # more than a hundred tensors


@pytest.mark.parametrize("name", ["0.weight", "1.bias", "40.weight", "70.bias"])
@pytest.mark.parametrize("way", ["rows", "fully_shard"])
def test_the_one_tensor_of_a_state_that_differs_is_named(name: str, way: str) -> None:
    def run() -> None:
        module: Any = nn.Sequential(*[nn.Linear(2, 2) for _ in range(70)], nn.Linear(2, 1))
        if way == "rows":
            shard_module(module, {"**": Shard(0)})
        else:
            fully_shard(module, mesh=M2)
        module.load_state_dict({**STATE, name: STATE[name] + rank()})
        full(module[0].weight)

    assert raised(MismatchError, run).startswith(f"load_state_dict: {name} of shape {tuple(STATE[name].shape)}")


@world(2)
def test_a_meta_module_of_buffers_alone_is_left_to_the_program() -> None:
    ways: list[Way] = [lambda m: parallelize_module(m, M2, {"0": ColwiseParallel()}), lambda m: fully_shard(m, mesh=M2)]
    for shard in ways:
        with torch.device("meta"):
            module: Any = nn.Sequential(nn.Linear(3, 5))
            module.register_buffer("table", torch.ones(3))
        shard(module)
        assert module.table.is_meta and isinstance(module[0].weight, DTensor)  # noqa: PT018
        module.to_empty(device="cpu")
        assert module.table.fill_(1).tolist() == [1.0] * 3


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("way", ["rows", "fully_shard"])
@world(3)
def test_a_table_with_a_padding_row_can_be_initialised_again(way: str, kind: Any) -> None:
    with torch.device("meta"):
        module = kind(4, 3, padding_idx=2)  # the last rank has no rows
    if way == "rows":
        shard_module(module, {"weight": Shard(0)})
    else:
        fully_shard(module, mesh=Mesh((3,)))
    module.to_empty(device="cpu")
    torch.manual_seed(0)
    module.reset_parameters()
    torch.manual_seed(0)
    want = kind(4, 3, padding_idx=2).weight
    assert full(module.weight.detach())[2].tolist() == want[2].tolist() == [0.0] * 3
    assert full(module.weight.detach())[[0, 1, 3]].abs().min() > 0
