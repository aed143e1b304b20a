"""t_, unsqueeze_ and the like give what they give in one process, and so do gradients through them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from shardwise import Mesh, OnRanks, Placement, Replicate, Shard, distribute_tensor
from shardwise.errors import RuleError
from shardwise.layout import Layout
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.rules.random_ops import PARTIAL_LAYOUTS, SHARDED_LAYOUTS, VALUES, on, sharded_values

VIEWS: dict[str, Callable[[Any], Any]] = {
    "t_": lambda x: x[0].clone().t_(),
    "transpose_": lambda x: x.transpose_(0, -1),
    "swapaxes_": lambda x: x.swapaxes_(1, 2),
    "unsqueeze_": lambda x: x.unsqueeze_(1),
    "squeeze_": lambda x: x.unsqueeze(0).squeeze_(),
    "two": lambda x: x.unsqueeze_(0).transpose_(0, 2),
}


@pytest.mark.parametrize("name", VIEWS)
def test_values_and_gradients_equal_one_process(name: str) -> None:
    view = VIEWS[name]

    def outcome(leaf: Any) -> tuple[Tensor, Tensor]:
        x = leaf.requires_grad_() * 2
        out = view(x)
        weights = torch.arange(float(out.numel()), dtype=torch.float64).view(out.shape)
        (out * weights).sum().backward()
        return out.detach(), leaf.grad

    def body(layout: Layout) -> tuple[Tensor, Tensor]:
        value, grad = map(as_dtensor, outcome(sharded_values(layout)))
        return value.full_tensor(), grad.full_tensor()

    expected = outcome(VALUES.clone())
    for layout in (*(x for x in SHARDED_LAYOUTS if "Boxes" not in str(x)), PARTIAL_LAYOUTS[0]):
        for got in world(layout.mesh.size()).run(body, layout):
            assert_close(got, expected, msg=str(layout))


def test_it_is_the_tensor_itself_that_changes() -> None:
    def body() -> None:
        x = sharded_values(on(Mesh((3,)), [Shard(0, [0, 5, 1])]))
        assert x.transpose_(0, 1) is x
        assert x.layout_ == Layout(Mesh((3,)), [Shard(1, [0, 5, 1])], (5, 6, 3), strides=(3, 15, 1))
        assert x.stride() == (3, 15, 1)
        x.unsqueeze_(-1).add_(1)
        assert_close(x.full_tensor(), VALUES.transpose(0, 1).unsqueeze(-1) + 1)

    world(3).run(body)


def test_what_must_be_redistributed_to_be_seen_that_way_becomes_a_copy_that_cannot_be_changed() -> None:
    layout = Layout(Mesh((2,)), [Shard(0)], (1, 4))

    def body() -> str:
        x = sharded_values(layout, torch.arange(4.0).view(1, 4))
        x.squeeze_()
        assert x.full_tensor().tolist() == [0, 1, 2, 3]
        with pytest.raises(RuleError, match="mul_ works in place on a view"):
            x.mul_(2)
        for alias in (Tensor.detach, lambda x: x.data, lambda x: x.narrow(1, 1, 2)):
            shared = sharded_values(layout, torch.arange(4.0).view(1, 4))
            other = alias(shared)
            shared.squeeze_()
            other.mul_(2)
            with pytest.raises(RuleError, match="has the old values"):
                shared.full_tensor()
        watched = sharded_values(layout, torch.arange(4.0).view(1, 4)).requires_grad_() * 1
        with pytest.raises(RuleError) as caught:
            watched.squeeze_()
        return str(caught.value)

    (text,) = set(world(2).run(body))
    assert text.startswith(
        "squeeze_ works in place, but Layout((1, 4) as [Shard(0)] on Mesh(0=2)) needs a redistribution"
    )


def test_a_leaf_is_torchs_error() -> None:
    def body() -> str:
        with pytest.raises(RuntimeError) as caught:
            sharded_values(on(Mesh((2,)), [Shard(0)])).requires_grad_().transpose_(0, 1)
        return str(caught.value)

    (text,) = set(world(2).run(body))
    assert "a leaf Variable that requires grad" in text


@pytest.mark.parametrize("alias", [lambda x: x, lambda x: x.detach(), lambda x: x.data, lambda x: x[0].detach()])
@world(4)
def test_a_copy_that_stands_for_a_view_is_not_changed_in_place_under_another_name(alias: Callable[[Any], Any]) -> None:
    x = distribute_tensor(torch.zeros(4, 4), Mesh((4,)), [Shard(0)])
    with pytest.raises(RuleError, match="that needed a redistribution"):
        alias(x.unfold(0, 2, 2)).add_(1)


@pytest.mark.parametrize("placement", [Shard(0), Replicate(), OnRanks(1)], ids=str)
@world(4)
def test_elements_that_share_memory_are_not_changed_in_place_on_any_rank(placement: Placement) -> None:
    """Torch's kernels refuse that too, but a rank with one row or none sees no elements that share memory."""
    x = distribute_tensor(torch.zeros(3, 1), Mesh((4,)), [placement])
    for shared in (x.expand(3, 2), x.unfold(0, 2, 1), x.expand(3, 2).t()):
        with pytest.raises(RuleError, match="share one memory location, as those of an expanded or unfolded tensor do"):
            shared.add_(1)
    x.expand(3, 2).fill_(2)
    assert bool((x == 2).all())


@world(3)
def test_values_in_order_are_no_views_of_several_results() -> None:
    """Torch refuses to change in place what unbind gave, and so what was made with it."""
    x = distribute_tensor(torch.arange(3.0), Mesh((3,)), [Shard(0)]).requires_grad_()
    for value in (x.kthvalue(2, 0).values, x.median(0).values, x.msort(), x.sort().values, x.topk(2).values):
        value.mul_(2)
    assert x.kthvalue(2, 0).values.mul_(2).item() == 2


@world(4)
def test_ranks_that_hold_nothing_know_what_is_a_view() -> None:
    x = distribute_tensor(torch.zeros(4, 3), Mesh((4,)), [OnRanks(1)])
    x.contiguous().add_(1)
    x.reshape(-1).add_(1)
    assert bool((x == 2).all())
    x.t().contiguous().add_(1)
    x.t().reshape(-1).add_(1)
    assert bool((x == 2).all())


@pytest.mark.parametrize("placement", [Shard(0), Shard(0, [0, 1, 1, 2])], ids=str)
@world(4)
def test_what_torch_copies_is_no_alias_of_a_part_that_happens_to_be_contiguous(placement: Placement) -> None:
    """A part of one row is contiguous after a transpose; adding to the copy changed the original on some ranks."""
    copies: list[Callable[[Any], Any]] = [
        lambda x: x.t().contiguous(),
        lambda x: x[::2].contiguous(),
        lambda x: x[:, ::2].reshape(-1),
    ]
    for copy in copies:
        x = distribute_tensor(torch.zeros(4, 3), Mesh((4,)), [placement])
        copy(x).add_(1)
        assert not bool(x.any())
    x = distribute_tensor(torch.zeros(4, 3), Mesh((4,)), [placement])
    x.contiguous().add_(1)
    x.reshape(-1).add_(1)
    assert bool((x == 2).all())


@pytest.mark.parametrize(
    "op",
    [
        lambda x: x.quantile(0.4, 0),
        lambda x: x.quantile(0.4, 1),
        lambda x: x.cumsum(0),
        lambda x: x.scatter_reduce(0, torch.tensor([[0, 1, 2]]), x[:1], "sum"),
    ],
)
@world(3)
def test_new_results_are_no_views_of_something_inside(op: Callable[[Any], Any]) -> None:
    x = sharded_values(on(Mesh((3,)), [Shard(0, [0, 5, 1])]))[:, :, 0].requires_grad_()
    plain = VALUES[:, :, 0].clone().requires_grad_()
    with torch.no_grad():
        kept = op(x)
    assert_close((kept.mul_(x.sum())).full_tensor(), op(plain) * plain.sum())
    assert op(x).detach_().is_leaf
