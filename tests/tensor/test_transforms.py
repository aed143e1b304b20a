"""`torch.func` and forward-mode autograd beside DTensors: refused on all ranks, or as in plain torch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.testing import assert_close

from shardwise import DTensor, Mesh, Replicate, Shard, distribute_tensor, rank
from shardwise.errors import RuleError
from shardwise.experimental import local_map
from shardwise.parallel import ColwiseParallel, parallelize_module
from shardwise.sharded_tensor import LocalShard, ShardMetadata, init_from_local_shards
from shardwise.testing import world
from tests.tensor.test_conversion import same_error

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script")  # of torch's own jvp

FULL = torch.arange(4.0)
TANGENT = torch.full((4,), 2.0)
ROWS = torch.ones(3, 4)


def distributed(requires_grad: bool = False) -> DTensor:
    return distribute_tensor(FULL, Mesh((2,)), [Shard(0)]).requires_grad_(requires_grad)


def from_local(dual: Tensor, run_check: bool) -> DTensor:
    return DTensor.from_local(dual, Mesh((2,)), [Replicate()], run_check=run_check)


def loaded(x: Any, dual: Tensor) -> None:
    module = nn.Module()
    module.w = nn.Parameter(x)
    module.load_state_dict({"w": dual}, assign=True)


def hooked(x: Any, dual: Tensor) -> None:
    x.requires_grad_()
    x.register_hook(lambda grad: dual)
    x.sum().backward()


def of_local_shards(dual: Tensor) -> object:
    metadata = ShardMetadata([4 * rank()], [4], f"rank:{rank()}/cpu")
    return init_from_local_shards([LocalShard(dual, metadata)], 8)


LOSES_THE_TANGENT: dict[str, Callable[[Any, Tensor], object]] = {
    "mul": lambda x, dual: dual * x,
    "mul by a number": lambda x, dual: x * dual[1],
    "cat": lambda x, dual: torch.cat([x, dual]),
    "matmul": lambda x, dual: dual @ x,
    "index": lambda x, dual: dual[x.long()],
    "index of another": lambda x, dual: x.index_add(0, torch.arange(4), dual),
    "scatter": lambda x, dual: dual.scatter(0, torch.arange(4), x),
    "decomposed": torch.kron,
    "out": lambda x, dual: torch.mul(x, dual, out=torch.ones(4)),
    "mul_": lambda x, dual: x.mul_(dual),
    "copy_": lambda x, dual: x.copy_(dual),
    "x[0] =": lambda x, dual: x.__setitem__(0, dual[0]),
    "fill_": lambda x, dual: x.fill_(dual[0]),
    "a list op": lambda x, dual: torch._foreach_mul([x], [dual]),
    "data =": lambda x, dual: setattr(x, "data", dual),
    "grad =": lambda x, dual: setattr(x, "grad", dual),
    "gradient": lambda x, dual: x.requires_grad_().sin().backward(dual),
    "gradient of a hook": hooked,
    "load_state_dict": loaded,
    "new_tensor": lambda x, dual: x.new_tensor(dual),
    "from_local": lambda x, dual: from_local(dual, True),
    "from_local without a check": lambda x, dual: from_local(dual, False),
    "distribute_tensor": lambda x, dual: distribute_tensor(dual, Mesh((2,)), [Shard(0)]),
    "init_from_local_shards": lambda x, dual: of_local_shards(dual),
    "input of a parallel style": lambda x, dual: parallelize_module(nn.Linear(4, 4), Mesh((2,)), ColwiseParallel())(
        dual[None]
    ),
    "result of local_map": lambda x, dual: local_map(lambda local: local * dual[:2], out_placements=[Shard(0)])(x),
    "make_dual": lambda x, dual: forward_ad.make_dual(x, FULL),
    "make_dual with a tangent": lambda x, dual: forward_ad.make_dual(torch.ones(4), x),
    "unpack_dual": lambda x, dual: forward_ad.unpack_dual(x),
}


@pytest.mark.parametrize("name", LOSES_THE_TANGENT)
def test_a_plain_tensor_with_a_tangent_does_not_become_a_dtensor(name: str) -> None:
    with forward_ad.dual_level():  # one for all ranks: torch has one in a process
        text = same_error(
            2, RuleError, lambda: LOSES_THE_TANGENT[name](distributed(), forward_ad.make_dual(torch.ones(4), TANGENT))
        )
    assert "forward-mode autograd" in text
    assert "local_map" in text


def test_plain_tensors_keep_their_tangents_and_those_without_may_be_beside_dtensors() -> None:
    def run() -> tuple[Any, ...]:
        x, dual = distributed(), forward_ad.make_dual(torch.ones(4), TANGENT)
        plain = dual * x.full_tensor(), dual.clone().mul_(x)
        product: Any = x * torch.ones(4)
        return *(forward_ad.unpack_dual(y).tangent for y in plain), product.full_tensor()

    with forward_ad.dual_level():
        for found in world(2).run(run):
            assert_close(found, (TANGENT * FULL, TANGENT * FULL, FULL))


Function = Callable[[Any], Any]
TRANSFORMS: dict[str, Callable[[Function], object]] = {
    "vmap": lambda f: torch.func.vmap(f)(ROWS),
    "grad": lambda f: torch.func.grad(lambda v: f(v).sum())(FULL),
    "vjp": lambda f: torch.func.vjp(f, FULL),
    "jvp": lambda f: torch.func.jvp(f, (FULL,), (TANGENT,)),
    "jacrev": lambda f: torch.func.jacrev(f)(FULL),
    "jacfwd": lambda f: torch.func.jacfwd(f)(FULL),
    "hessian": lambda f: torch.func.hessian(lambda v: f(v).sum())(FULL),
    "functionalize": lambda f: torch.func.functionalize(f)(FULL),
}
CLOSES_OVER: dict[str, Callable[[Any, Any], Any]] = {
    "mul": lambda v, x: v * x,
    "cat": lambda v, x: torch.cat([v, x]),
    "mul_": lambda v, x: x.clone().mul_(v),
    "mul_ of a plain tensor": lambda v, x: v.clone().mul_(x),
    "full_tensor": lambda v, x: v * x.full_tensor(),
    "to_local": lambda v, x: v.sum() * x.to_local(),
    "from_local": lambda v, x: from_local(v, True),
    "local shards": lambda v, x: of_local_shards(v),
    "distribute_tensor": lambda v, x: distribute_tensor(v, Mesh((2,)), [Shard(0)]),
}


@pytest.mark.parametrize("use", CLOSES_OVER)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transformed_function_that_uses_or_returns_a_dtensor_is_refused(name: str, use: str) -> None:
    def run(function: Callable[[Any, Any], Any], requires_grad: bool = False) -> object:
        x = distributed(requires_grad)
        return TRANSFORMS[name](lambda v: function(v, x))

    for requires_grad in (False, True):
        text = same_error(2, RuleError, partial(run, CLOSES_OVER[use], requires_grad))
        assert "torch.func" in text
        assert "local_map" in text
    if name in ("vmap", "vjp", "jvp", "jacrev", "jacfwd"):
        assert "local_map" in same_error(2, RuleError, partial(run, lambda v, x: x * 2))


def test_transforms_with_respect_to_a_dtensor_and_linearize_are_refused() -> None:
    uses: list[Callable[[Any], object]] = [
        torch.func.vmap(lambda row: row * 2),
        torch.func.grad(lambda t: (t * 2).sum()),
        torch.func.jacrev(lambda t: t * 2),
        lambda x: torch.func.jvp(lambda t: t * 2, (x,), (x,)),
    ]
    for use in uses:
        one = partial(lambda use: use(distribute_tensor(FULL, Mesh((1,)), [Shard(0)])), use)
        assert "local_map" in same_error(1, RuleError, one)
    traced = same_error(
        1, RuleError, lambda: torch.func.linearize(lambda v: v * distribute_tensor(FULL, Mesh((1,))), FULL)
    )
    assert "would record" in traced


@world(2)
def test_gathered_values_and_functions_of_local_tensors_may_be_transformed() -> None:
    for placement in (Shard(0), Replicate()):
        x = distribute_tensor(FULL, Mesh((2,)), [placement]).requires_grad_()
        gathered = x.full_tensor()
        torch.func.grad(lambda v, full=gathered: (v * full**2).sum())(torch.ones(4)).sum().backward()
        assert x.grad is not None
        assert_close(x.grad.full_tensor(), 2 * FULL)
    x = distributed(requires_grad=True)

    def scaled(v: Tensor) -> Tensor:
        with torch.no_grad():
            return v * x.full_tensor()

    assert_close(torch.func.vmap(scaled)(ROWS), ROWS * FULL)
    normal: Callable[[Tensor], Tensor] = lambda row: row / row.sum()  # noqa: E731
    rows = distribute_tensor(ROWS.cumsum(0), Mesh((2,)), [Shard(0)])
    normalized = local_map(torch.func.vmap(normal), out_placements=[Shard(0)])(rows)
    assert_close(normalized.full_tensor(), ROWS / 4)
