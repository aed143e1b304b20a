"""What `fully_shard` takes: parameters, options and modules of all kinds, and what it refuses."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.testing import assert_close

from shardwise import DTensor, Mesh, Replicate, Shard, count_comms, distribute_tensor, shard_module
from shardwise import _collectives as collectives
from shardwise.errors import MismatchError, PlanError
from shardwise.parallel import (
    ColwiseParallel,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    parallelize_module,
)
from shardwise.parallel.fully_sharded.policy import converted_policy
from shardwise.testing import world
from tests.parallel.one_process import Tied, full, raised
from tests.parallel.units import as_units, assert_same_gradients, check_gradients, copied, squares, two_layers


def test_modules_of_the_meta_device_are_the_same_on_any_number_of_ranks() -> None:
    def run() -> list[Tensor]:
        torch.manual_seed(7)
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5))
        for layer in (*model, model):
            fully_shard(layer)
        return [full(p.detach()) for p in model.parameters()]

    assert_close(world(2).run(run)[0], world(3).run(run)[1])


@world(2)
def test_mixed_precision() -> None:
    want, x, mesh = nn.Linear(8, 8), torch.randn(4, 8), Mesh((2,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    model = fully_shard(copied(want), mesh=mesh, mp_policy=policy)
    batch = distribute_tensor(x, mesh, [Shard(0)])
    with count_comms() as comms:
        out = model(batch)
    assert comms.total_bytes == (4 * 8 + 4) * 2
    assert out.dtype == torch.float32
    with count_comms() as comms:
        out.square().sum().backward()
    assert comms.calls == {"all_to_all": 1}
    assert comms.total_bytes == (4 * 8 + 4) * 4
    half = F.linear(x.bfloat16(), want.weight.bfloat16(), want.bias.bfloat16())
    half.float().square().sum().backward()
    assert_close(full(out.detach()), half.float())
    assert model.weight.grad.dtype == torch.float32
    assert_close(full(model.weight.grad), want.weight.grad, rtol=0.02, atol=0.05)


@world(3)
def test_another_dim_and_ignored_parameters() -> None:
    plain, x, mesh = nn.Linear(5, 7), torch.randn(4, 5), Mesh((3,))
    model = copied(plain)
    bias = model.bias
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1), ignored_params=[bias])
    assert model.weight.placements == (Shard(1),)
    assert model.bias is bias
    squares(model, distribute_tensor(x, mesh, [Shard(0)])).backward()
    squares(plain, x).backward()
    assert_same_gradients(model, plain)


@world(3)
def test_shards_of_given_sizes() -> None:
    placement = Shard(0, sizes=(1, 0, 3))
    model = check_gradients(nn.Linear(5, 4), torch.randn(4, 5), shard_placement_fn=lambda p: placement)
    assert model.weight.to_local().shape == ((1, 0, 3)[collectives.rank()], 5)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert model.weight.placements == (placement,)


@world(2)
def test_a_refused_module_is_as_before() -> None:
    mesh = Mesh((2,))
    model = two_layers()
    model[2].scale = nn.Parameter(torch.tensor(1.0))
    before = dict(model.named_parameters())
    with pytest.raises(PlanError, match=r"2\.scale: a parameter without dims"):
        fully_shard(model, mesh=mesh, ignored_params=[model[0].bias])
    assert type(model) is nn.Sequential
    assert all(p is before[name] for name, p in model.named_parameters())
    fully_shard(model, mesh=mesh, ignored_params=[model[2].scale])
    assert all(isinstance(p, DTensor) for name, p in model.named_parameters() if "scale" not in name)


@world(2)
def test_parameters_that_are_sharded_on_the_axis_already_stay() -> None:
    mesh = Mesh((2,))
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 3))
    shard_module(model[0], {"weight": Shard(1)}, mesh=mesh)
    table = model[0].weight
    fully_shard(model, mesh=mesh)
    assert model[0].weight is table
    ids = distribute_tensor(torch.tensor([1, 5, 2]), mesh, [Shard(0)])
    model(ids).sum().backward()
    assert isinstance(table.grad, DTensor)


@world(2)
def test_units_may_be_made_in_any_order_and_tied_parameters_stay_tied() -> None:
    plain, ids, mesh = Tied(), torch.tensor([1, 2, 6, 6, 0]), Mesh((2,))
    want = copied(plain)
    squares(want, ids).backward()
    for order in (["", "table", "out"], ["table", "out", ""], ["middle", ""]):
        model = copied(plain)
        for path in order:
            fully_shard(model.get_submodule(path), mesh=mesh)
        assert model.out.weight is model.table.weight
        squares(model, distribute_tensor(ids, mesh, [Shard(0)])).backward()
        assert_same_gradients(model, want)


@world(2)
def test_a_copy_of_a_module_is_a_module_of_its_own() -> None:
    plain, x, mesh = two_layers(), torch.randn(4, 4), Mesh((2,))
    model, batch = as_units(plain, mesh), distribute_tensor(x, mesh, [Shard(0)])
    out = model(batch)
    twin = copied(model)
    with torch.no_grad():
        twin[0].weight.zero_()
    out.sum().backward()
    assert_close(full(out.detach()), plain(x).detach())
    assert twin[0].weight.grad is None
    twin(batch).sum().backward()
    assert not full(twin[2].weight.grad).eq(full(model[2].weight.grad)).all()


@world(4)
def test_wrong_uses_are_refused() -> None:
    mesh = Mesh((2, 2), names=("dp", "tp"))
    dp = mesh.submesh("dp", collectives.rank())
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=dp)
    with pytest.raises(PlanError, match="called on this FullyShardedLinear before"):
        fully_shard(model, mesh=dp)
    odd = nn.Module()
    odd.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(PlanError, match=r"scale: a parameter without dims .* Fix: make it 1-D, such as"):
        fully_shard(odd, mesh=dp)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(plain[1], mesh=dp)
    fully_shard(plain, mesh=mesh)
    with pytest.raises(
        PlanError, match=r"ranks \[0, 1, 2, 3\] and divided by 4, but those of weight of 1 .*\[\d, \d\]"
    ):
        plain(torch.ones(2, 4))
    same_batch = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))  # on the ranks of tp
    parallelize_module(same_batch, mesh.submesh("tp", collectives.rank()), {"0": ColwiseParallel()})
    fully_shard(same_batch[0], mesh=dp)
    fully_shard(same_batch, mesh=mesh)
    with pytest.raises(PlanError, match=r"divided by 4, but those of weight of 0 .* and divided by 2"):
        same_batch(torch.ones(2, 4))
    mixed = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shard_module(mixed[0], {"weight": [Replicate(), Shard(0)]}, mesh=mesh)
    fully_shard(mixed, mesh=dp)
    with pytest.raises(PlanError, match=r"over ranks \[\d, \d\] and divided by 1, but those of .* by 2"):
        mixed(torch.ones(2, 4))
    model.weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(PlanError, match="weight of FullyShardedLinear was replaced after fully_shard"):
        model(torch.ones(2, 4))


@pytest.mark.parametrize("reshard", [True, 2])
@world(4)
def test_changes_between_forward_and_backward_are_errors(reshard: bool | int) -> None:
    mesh = Mesh((4,))
    model = as_units(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh, reshard_after_forward=reshard)
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    out = model(x).sum()
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="weight of 0 changed between forward and backward"):
        out.backward()

    @torch.no_grad()
    def double(module: nn.Linear, args: object) -> None:
        module.weight.mul_(2)

    model[1].register_forward_pre_hook(double)
    with pytest.raises(RuntimeError, match="weight of 1 changed in place in forward"):
        model(x)


def test_models_of_different_seeds_that_were_parallelised_before_are_an_error_that_names_the_seed() -> None:
    def body(seeds: tuple[int, ...]) -> str:
        mesh = Mesh((2, 2), names=("dp", "tp"))
        torch.manual_seed(seeds[collectives.rank()])
        model = parallelize_module(nn.Linear(4, 6), mesh["tp"], ColwiseParallel())
        try:
            fully_shard(model, mesh=mesh["dp"])(torch.ones(2, 4))
        except MismatchError as error:
            return str(error)
        return ""

    assert set(world(4).run(body, (3, 4, 3, 4))) == {""}  # values of one mesh of tp are those of its first rank
    for text in world(4).run(body, (3, 4, 5, 6)):
        assert "fully_shard: weight of shape (3, 4), float32, must be the same on all ranks" in text
        assert "Fix: torch.manual_seed(0) on all ranks before the model is made, or load one checkpoint on all" in text
        assert "from_local" not in text


@world(2)
def test_policies_of_torch_are_taken_with_all_their_fields() -> None:
    of_torch = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float64, False)
    ours = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float64, False)
    assert {field.name for field in fields(of_torch)} == {field.name for field in fields(ours)}
    assert converted_policy(of_torch) == ours
    assert converted_policy(fsdp.CPUOffloadPolicy(pin_memory=False)) == CPUOffloadPolicy(pin_memory=False)
    assert type(converted_policy(fsdp.OffloadPolicy())) is OffloadPolicy
    assert converted_policy(ours) is ours
    model = nn.Linear(4, 4)
    fully_shard(model, mp_policy=cast(Any, of_torch), offload_policy=cast(Any, fsdp.CPUOffloadPolicy()))
    assert model(torch.ones(2, 4, dtype=torch.bfloat16)).dtype == torch.float64
    wrong: list[dict[str, Any]] = [{"mp_policy": fsdp.OffloadPolicy()}, {"offload_policy": of_torch}]
    for options in [*wrong, {"mp_policy": fsdp.MixedPrecision()}]:
        with pytest.raises(PlanError, match=r"_policy must be an? .*Policy or None, got an? torch\.distributed\.fsdp"):
            fully_shard(nn.Linear(4, 4), **options)


@world(2)
def test_methods_of_torch_that_are_not_here_name_what_is() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(4, 4)))
    here = {name for name in dir(model) if name.startswith("set_")}
    for name in {name for name in vars(fsdp.FSDPModule) if name.startswith("set_")} - here:
        assert not hasattr(model, name)
    for name in ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"):
        with pytest.raises(AttributeError, match=rf"no {name}\. Fix: fully_shard\(…, prefetch=1\)"):
            getattr(model, name)
    with pytest.raises(AttributeError, match="Fix: scale the loss"):
        model.set_gradient_divide_factor  # noqa: B018
    with pytest.raises(AttributeError, match=r"has no attribute 'other'$"):
        model.other  # noqa: B018


def test_a_tied_parameter_that_does_not_fit_is_one_line_with_both_names() -> None:
    def hooked() -> Tied:
        model = Tied()
        model.table.weight.register_hook(lambda grad: grad)
        return model

    doors: list[Callable[[], object]] = [
        lambda: fully_shard(hooked()),
        lambda: shard_module(Tied(), {"[to]*.weight": Shard(5)}),
        lambda: parallelize_module(Tied(), None, {"[to]*.weight": Shard(5)}),
    ]
    for door in doors:
        _, line = raised(PlanError, door).split("\n")
        assert line.startswith("  table.weight and out.weight: ")
