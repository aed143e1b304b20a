"""Views that needed a redistribution never show old values: once the original changes, every use is an error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from shardwise import DTensor, Mesh, OnRanks, Placement, Replicate, Shard, distribute_tensor
from shardwise.errors import RuleError
from shardwise.testing import world

OLD = "the copy has the old values"
VALUES = torch.arange(12.0, dtype=torch.float64).reshape(4, 3)


def with_data(x: Any, value: Any) -> Any:
    x.data = value
    return x


def relocated(x: Any) -> Any:
    return DTensor.from_local(x.to_local(), x.device_mesh, x.placements) if isinstance(x, DTensor) else x


def through_hooked_module(x: Tensor) -> Tensor:
    module = torch.nn.Identity()
    module.register_full_backward_hook(lambda *_: None)
    return module(x)  # type: ignore[no-any-return]


class SecondOperand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return y.view(3, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, grads[0].view(3)


REDISTRIBUTED: dict[str, Callable[[Any], Any]] = {
    "index": lambda x: x[1],
    "select": lambda x: x.select(0, -1),
    "view": lambda x: x.view(3, 4),
    "unbind": lambda x: x.unbind()[2],
    "unfold": lambda x: x.unfold(0, 2, 1),
    "as_strided": lambda x: x.as_strided((2,), (1,)),
    "view of it": lambda x: x[0][1:],
    "copy of it": lambda x: x.view(2, 6)[1],
    "detached": lambda x: x[3].detach(),
    "data": lambda x: x[3].data,
    "alias of an alias": lambda x: x[3].detach().view(3, 1).unbind()[0],
    "set_": lambda x: x.new_zeros(x[3].shape).set_(x[3]),
    "data set": lambda x: with_data(x.new_zeros(x[3].shape), x[3]),
    "from_local": lambda x: relocated(x[3]),
    "custom Function": lambda x: SecondOperand.apply(x.new_zeros(2), x[3]),  # type: ignore[no-untyped-call]
    "backward hook": lambda x: through_hooked_module(x[3].detach().requires_grad_()).detach(),
    "second operand": lambda x: torch.broadcast_tensors(x.new_zeros(2, 3), x[3])[1],
    "meshgrid": lambda x: torch.meshgrid(x.new_zeros(2), x[3], indexing="ij")[1],
    "atleast": lambda x: torch.atleast_2d(x.new_zeros(2), x[3])[1],
}
CHANGES: dict[str, Callable[[Any], Any]] = {
    "add_": lambda x: x.add_(1),
    "view": lambda x: x[1:].mul_(2),
    "brackets": lambda x: x.__setitem__((slice(0, 2), 1), torch.ones(2, dtype=torch.float64)),
    "number": lambda x: x.__setitem__((0, 0), 5.0),
    "list": lambda x: torch._foreach_add_([x], 1.0),
    "out": lambda x: torch.mul(x, 3, out=x),
    "whole": lambda x: torch.ops.aten.fill_.Scalar(x, 2.0),
    "requires_grad_": lambda x: x.requires_grad_(),
}


def sharded(placement: Placement | None = None, mesh: Mesh | None = None) -> Any:
    return distribute_tensor(VALUES, mesh or Mesh((3,)), [placement or Shard(0)])


@pytest.mark.parametrize(
    ("view", "change"), [*((view, "add_") for view in REDISTRIBUTED), *(("index", change) for change in CHANGES)]
)
@world(3)
def test_a_redistributed_view_is_invalidated_once_its_original_changes(view: str, change: str) -> None:
    x = sharded(Shard(0, [0, 3, 1]))
    v = REDISTRIBUTED[view](x)
    assert_close(v.full_tensor(), REDISTRIBUTED[view](VALUES))
    CHANGES[change](x)
    for use in (lambda: v + 1, v.sum, v.full_tensor, v.to_local, lambda: v[0], v.tolist, v.clone, lambda: v.shape):
        with pytest.raises(RuleError, match=OLD):
            use()
    assert "changed in place" in repr(v)
    with pytest.raises(RuleError, match=OLD):
        torch.cat([x, v])
    expected = VALUES.clone()
    CHANGES[change](expected)
    assert_close(REDISTRIBUTED[view](x).full_tensor(), REDISTRIBUTED[view](expected))


@world(3)
def test_views_and_copies_of_a_redistributed_view_are_invalidated_with_it_though_that_is_gone() -> None:
    x = sharded(Shard(0, [0, 3, 1]))
    tail, again = x.view(2, 6)[:, 1:], x.view(3, 4).view(2, 6)[1]
    x.mul_(2)
    for v in (tail, again):
        with pytest.raises(RuleError, match=OLD):
            v.sum()


@world(3)
def test_what_torch_copies_keeps_its_values() -> None:
    x = sharded()
    kept = [x.roll(1, 0), x[1].clone(), x.flip(0), x[torch.tensor([2, 0])], x @ x.t(), torch.cat([x, x[:1]]), x[1] + 0]
    values = [y.full_tensor() for y in kept]
    x.zero_()
    for y, value in zip(kept, values, strict=True):
        assert_close(y.full_tensor(), value)
        y.add_(1)
    assert not bool(x.any())


@world(3)
def test_views_that_share_memory_show_the_change() -> None:
    x = sharded(Shard(1))
    views = x[1], x.t(), x[:, 1:], x.view(2, 2, 3), x.unsqueeze(0)
    x.add_(1)
    for v, expected in zip(
        views, (VALUES[1], VALUES.t(), VALUES[:, 1:], VALUES.view(2, 2, 3), VALUES[None]), strict=True
    ):
        assert_close(v.full_tensor(), expected + 1)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@world(2)
def test_steps_of_optimizers_invalidate_living_views_and_leave_training_alone(optimizer: Any) -> None:
    weight: Any = torch.nn.Parameter(sharded(mesh=Mesh((2,))))
    plain = torch.nn.Parameter(VALUES.clone())
    both = [(w, optimizer([w], lr=0.1)) for w in (weight, plain)]
    for _ in range(3):
        for w, steps in both:
            (w.view(3, 4) ** 2).sum().backward()
            steps.step()
            steps.zero_grad()
    assert_close(weight.full_tensor(), plain.detach())
    v, alone = weight.detach()[0], weight.detach()[0].clone()
    (weight**2).sum().backward()
    both[0][1].step()
    with pytest.raises(RuleError, match=OLD):
        v.sum()
    assert bool((alone != weight[0]).any())


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        (Mesh((2, 3)), [Shard(1), Shard(0)]),  # only one line of ranks has anything to send
        (Mesh((2,), (3, 1)), [Shard(1)]),  # the others are outside
        (Mesh((2,), (3, 1)), [OnRanks(1)]),
    ],
)
@pytest.mark.parametrize("change", ["mul_", "copy", "unsqueeze_"])
def test_every_rank_refuses_to_change_a_copy(mesh: Mesh, placements: list[Placement], change: str) -> None:
    def body() -> str:
        x = distribute_tensor(torch.ones(1, 6), mesh, placements)
        v = x.roll(2, 1).select(-1, 2)
        try:
            if change == "mul_":
                v.mul_(2)
            elif change == "copy":
                v.clone().mul_(2)
                v = x.roll(2, 1)
                v.mul_(2)
            else:
                v = x.select(-1, 2).unsqueeze(0)
                v.unsqueeze_(-1)
        except RuleError as error:
            return str(error)
        return f"{tuple(v.shape)}"

    assert len(set(world(6).run(body))) == 1


@world(4)
def test_ranks_outside_the_mesh_know_what_is_invalidated() -> None:
    x = sharded(mesh=Mesh((2,), (3, 1)))
    v, of_slice = x[1], x[:3][1]
    x.zero_()
    for old in (v, of_slice):
        with pytest.raises(RuleError, match=OLD):
            old.sum()
    assert type(x[1]) is DTensor


@world(1)
def test_one_rank_has_views_as_torch_has() -> None:
    x: Tensor = distribute_tensor(VALUES, Mesh((1,)), [Shard(0)])
    v, w = x[1], x.view(2, 6)
    x.add_(1)
    v.mul_(2)
    w[0].mul_(2)
    assert_close(x.sum(), distribute_tensor((VALUES + 1)[:2].sum() * 2 + (VALUES + 1)[1].sum() * 2 +
                                            (VALUES + 1)[2:].sum(), Mesh((1,)), [Replicate()]))  # fmt: skip


@world(3)
def test_a_redistributed_view_may_be_what_its_original_is_changed_with() -> None:
    x = sharded()
    expected = VALUES.clone()
    for y in (x, expected):
        y[1] = y[3]
        y.sub_(y[2].clone())
        y.copy_(y.view(2, 6)[:, :3].repeat(2, 1))
    assert_close(x.full_tensor(), expected)
    torch._foreach_add_([x], [x.view(3, 4).view(4, 3)])
    v = x[0]
    x.addcmul_(v, v)
    with pytest.raises(RuleError, match=OLD):
        v.sum()
