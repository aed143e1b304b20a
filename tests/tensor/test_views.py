"""Views: in place, and copies where torch gives views, which never show old values."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from shardwise import DTensor, Mesh, OnRanks, Placement, Replicate, Shard, distribute_tensor
from shardwise._layout import Layout
from shardwise.errors import RuleError
from shardwise.testing import world
from tests.rules.test_random import PARTIAL_LAYOUTS, SHARDED_LAYOUTS, VALUES, on, sharded_values

OLD = "the copy has the old values"
ROWS = torch.arange(12.0, dtype=torch.float64).reshape(4, 3)


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
    return distribute_tensor(ROWS, mesh or Mesh((3,)), [placement or Shard(0)])


@pytest.mark.parametrize(
    ("view", "change"), [*((view, "add_") for view in REDISTRIBUTED), *(("index", change) for change in CHANGES)]
)
@world(3)
def test_a_redistributed_view_is_invalidated_once_its_original_changes(view: str, change: str) -> None:
    x = sharded(Shard(0, [0, 3, 1]))
    v = REDISTRIBUTED[view](x)
    assert_close(v.full_tensor(), REDISTRIBUTED[view](ROWS))
    CHANGES[change](x)
    for use in (lambda: v + 1, v.sum, v.full_tensor, v.to_local, lambda: v[0], v.tolist, v.clone, lambda: v.shape):
        with pytest.raises(RuleError, match=OLD):
            use()
    assert "changed in place" in repr(v)
    with pytest.raises(RuleError, match=OLD):
        torch.cat([x, v])
    expected = ROWS.clone()
    CHANGES[change](expected)
    assert_close(REDISTRIBUTED[view](x).full_tensor(), REDISTRIBUTED[view](expected))


@world(4)
def test_views_and_copies_of_a_redistributed_view_are_invalidated_with_it_though_that_is_gone() -> None:
    """Ranks outside the mesh know of it too."""
    for mesh, placement in ((Mesh((4,)), Shard(0, [0, 3, 1, 0])), (Mesh((2,), (3, 1)), Shard(0))):
        x = sharded(placement, mesh)
        old = x.view(2, 6)[:, 1:], x.view(3, 4).view(2, 6)[1], x[1], x[:3][1]
        x.mul_(2)
        for v in old[0 if mesh.size() == 4 else 1 :]:  # two rows on each of two ranks are viewed as one
            with pytest.raises(RuleError, match=OLD):
                v.sum()
        assert type(x[1]) is DTensor


@world(3)
def test_what_torch_copies_keeps_its_values_and_views_that_share_memory_show_the_change() -> None:
    x = sharded()
    kept = [x.roll(1, 0), x[1].clone(), x.flip(0), x[torch.tensor([2, 0])], x @ x.t(), torch.cat([x, x[:1]]), x[1] + 0]
    values = [y.full_tensor() for y in kept]
    x.zero_()
    for y, value in zip(kept, values, strict=True):
        assert_close(y.full_tensor(), value)
        y.add_(1)
    assert not bool(x.any())
    views: list[Callable[[Any], Any]] = [
        lambda x: x[1], lambda x: x.t(), lambda x: x[:, 1:], lambda x: x.view(2, 2, 3), lambda x: x.unsqueeze(0)
    ]  # fmt: skip
    x = sharded(Shard(1))
    made = [view(x) for view in views]
    x.add_(1)
    for v, view in zip(made, views, strict=True):
        assert_close(v.full_tensor(), view(ROWS + 1))


@world(2)
def test_steps_of_optimizers_invalidate_living_views_and_leave_training_alone() -> None:
    makers: tuple[Any, ...] = torch.optim.SGD, torch.optim.Adam
    for make in makers:
        weight: Any = torch.nn.Parameter(sharded(mesh=Mesh((2,))))
        plain = torch.nn.Parameter(ROWS.clone())
        both = [(w, make([w], lr=0.1)) for w in (weight, plain)]
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


def test_every_rank_refuses_to_change_a_copy() -> None:
    def body(mesh: Mesh, placement: list[Placement], change: str) -> str:
        x = distribute_tensor(torch.ones(1, 6), mesh, placement)
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

    layouts: list[tuple[Mesh, list[Placement]]] = [
        (Mesh((2, 3)), [Shard(1), Shard(0)]),  # only one line of ranks has anything to send
        (Mesh((2,), (3, 1)), [Shard(1)]),  # the others are outside
        (Mesh((2,), (3, 1)), [OnRanks(1)]),
    ]
    for (mesh, placements), change in product(layouts, ("mul_", "copy", "unsqueeze_")):
        assert len(set(world(6).run(body, mesh, placements, change))) == 1, (mesh, placements, change)


@world(3)
def test_a_redistributed_view_may_be_what_its_original_is_changed_with() -> None:
    x = sharded()
    expected = ROWS.clone()
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


VIEWS: dict[str, Callable[[Any], Any]] = {
    "t_": lambda x: x[0].clone().t_(),
    "transpose_": lambda x: x.transpose_(0, -1),
    "swapaxes_": lambda x: x.swapaxes_(1, 2),
    "swapdims_": lambda x: x.swapdims_(1, 0),
    "unsqueeze_": lambda x: x.unsqueeze_(1),
    "squeeze_": lambda x: x.unsqueeze(0).squeeze_(),
    "squeeze_ one": lambda x: x.unsqueeze_(0).squeeze_(0),
    "two": lambda x: x.unsqueeze_(0).transpose_(0, 2),
}


@pytest.mark.parametrize("name", VIEWS)
def test_values_and_gradients_equal_one_process(name: str) -> None:
    view = VIEWS[name]

    def outcome(leaf: Any) -> tuple[Any, Any]:
        out = view(leaf.requires_grad_() * 2)
        weights = torch.arange(float(out.numel()), dtype=torch.float64).view(out.shape)
        (out * weights).sum().backward()
        return out.detach(), leaf.grad

    def body(layout: Layout) -> tuple[Tensor, Tensor]:
        value, grad = outcome(sharded_values(layout))
        return value.full_tensor(), grad.full_tensor()

    expected = outcome(VALUES.clone())
    for layout in (*(x for x in SHARDED_LAYOUTS if "Boxes" not in str(x)), PARTIAL_LAYOUTS[0]):
        for got in world(layout.mesh.size()).run(body, layout):
            assert_close(got, expected, msg=str(layout))


@world(3)
def test_it_is_the_tensor_itself_that_changes() -> None:
    x = sharded_values(on(Mesh((3,)), [Shard(0, [0, 5, 1])]))
    assert x.transpose_(0, 1) is x
    assert x.layout_ == Layout(Mesh((3,)), [Shard(1, [0, 5, 1])], (5, 6, 3), strides=(3, 15, 1))
    assert x.stride() == (3, 15, 1)
    x.unsqueeze_(-1).add_(1)
    assert_close(x.full_tensor(), VALUES.transpose(0, 1).unsqueeze(-1) + 1)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        sharded_values(on(Mesh((3,)), [Shard(0)])).requires_grad_().transpose_(0, 1)


@world(2)
def test_what_must_be_redistributed_to_be_seen_that_way_becomes_a_copy_that_cannot_be_changed() -> None:
    def row() -> Any:
        return distribute_tensor(torch.arange(4.0).view(1, 4), Mesh((2,)), [Shard(0)])

    x = row()
    x.squeeze_()
    assert x.full_tensor().tolist() == [0, 1, 2, 3]
    with pytest.raises(RuleError, match="mul_ works in place on a view"):
        x.mul_(2)
    for alias in (Tensor.detach, lambda x: x.data, lambda x: x.narrow(1, 1, 2)):
        shared = row()
        other = alias(shared)
        shared.squeeze_()
        other.mul_(2)
        with pytest.raises(RuleError, match="has the old values"):
            shared.full_tensor()
    with pytest.raises(RuleError, match=r"^squeeze_ works in place, but Layout\(\(1, 4\) .* needs a redistribution"):
        (row().requires_grad_() * 1).squeeze_()


@world(4)
def test_elements_that_share_memory_are_not_changed_in_place_on_any_rank() -> None:
    """Torch's kernels refuse that too, but a rank with one row or none sees no elements that share memory."""
    for placement in (Shard(0), Replicate(), OnRanks(1)):
        x = distribute_tensor(torch.zeros(3, 1), Mesh((4,)), [placement])
        for shared in (x.expand(3, 2), x.unfold(0, 2, 1), x.expand(3, 2).t()):
            with pytest.raises(RuleError, match="share one memory location, as those of an expanded or unfolded"):
                shared.add_(1)
        x.expand(3, 2).fill_(2)
        assert bool((x == 2).all())


@world(3)
def test_new_results_are_no_views_of_something_inside() -> None:
    ops: list[Callable[[Any], Any]] = [
        lambda x: x.quantile(0.4, 0),
        lambda x: x.quantile(0.4, 1),
        lambda x: x.cumsum(0),
        lambda x: x.scatter_reduce(0, torch.tensor([[0, 1, 2]]), x[:1], "sum"),
    ]
    for op in ops:
        x = sharded_values(on(Mesh((3,)), [Shard(0, [0, 5, 1])]))[:, :, 0].requires_grad_()
        plain = VALUES[:, :, 0].clone().requires_grad_()
        with torch.no_grad():
            kept = op(x)
        assert_close((kept.mul_(x.sum())).full_tensor(), op(plain) * plain.sum())
        assert op(x).detach_().is_leaf
