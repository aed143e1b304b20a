"""Arguments and results, by position, by name and nested, are laid out as a plan says, and moved as it wants."""

import copy
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import DTensor, Mesh, Partial, Replicate, Shard
from shardwise import _collectives as collectives
from shardwise.errors import LayoutError, PlanError
from shardwise.parallel import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput, parallelize_module
from shardwise.testing import world
from tests.parallel.one_process import full, local_shard_of

R, S0, S1 = Replicate(), Shard(0), Shard(1)
X = torch.arange(30.0, dtype=torch.float64).view(5, 6) / 10
RANKS = 3


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


class Echo(nn.Module):
    """Keeps what it was called with, and returns `result` of it."""

    def __init__(self, result: Any = None) -> None:
        super().__init__()
        self.result = result
        self.seen: Any = None

    def forward(self, x: Any, y: Any = None, *, scale: Any = 1, bag: Any = None) -> Any:
        self.seen = {"x": x, "y": y, "scale": scale, "bag": bag}
        return x if self.result is None else self.result(x, y)


def part(dim: int = 0) -> Tensor:
    return local_shard_of(X, dim, RANKS).clone().requires_grad_()


@world(RANKS)
def test_one_placement_is_for_the_only_argument_and_its_gradient_comes_back() -> None:
    style = PrepareModuleInput(input_layouts=S0, desired_input_layouts=R)
    module, x = parallelize_module(Echo(), None, style), part()
    out = module(x)
    assert isinstance(out, DTensor)
    assert out.placements == (R,)
    assert_close(full(out), X)
    (out * X).sum().backward()
    assert_close(x.grad, local_shard_of(X, 0, RANKS))


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("desired", [R, S1, None])
@pytest.mark.parametrize("how", ["position", "name"])
@world(RANKS)
def test_arguments_come_by_position_or_by_name(how: str, desired: Any, local: bool) -> None:
    styles = {
        "position": PrepareModuleInput(
            input_layouts=(None, S0), desired_input_layouts=(None, desired), use_local_output=local
        ),
        "name": PrepareModuleInput(
            input_kwarg_layouts={"y": S0}, desired_input_kwarg_layouts={"y": desired}, use_local_output=local
        ),
    }
    module = Echo()
    parallelize_module(module, None, styles[how])
    for args, kwargs in (((7, part()), {}), ((7,), {"y": part(), "scale": 2}), ((), {"x": 7, "y": part()})):
        module(*args, **kwargs)
        assert module.seen["x"] == 7
        y, dim = module.seen["y"], 0 if desired is None else None if desired == R else 1
        assert isinstance(y, DTensor) != local
        if local:
            assert_close(y, local_shard_of(X, dim, RANKS))
        else:
            assert y.placements[0].is_shard(dim) if dim is not None else y.placements == (R,)
            assert_close(full(y), X)


@world(RANKS)
def test_nested_arguments_have_nested_layouts_or_one_for_all() -> None:
    style = PrepareModuleInput(
        input_layouts=((S0, None), R),
        desired_input_layouts=((R, None), S0),
        input_kwarg_layouts={"bag": {"q": S0, "k": [S1]}},
        desired_input_kwarg_layouts={"bag": {"q": S1, "k": [R]}},
    )
    module = Echo()
    parallelize_module(module, None, style)
    bag = OrderedDict(q=part(), rest="untouched", k=[part(1)])
    module(Pair(part(), X), {"a": X, "b": (X, 3)}, scale=None, bag=bag)
    x, y, got = module.seen["x"], module.seen["y"], module.seen["bag"]
    assert isinstance(x, Pair)
    assert (x.a.placements, x.b is X) == ((R,), True)  # type: ignore[attr-defined]
    assert y["a"].placements == y["b"][0].placements == (S0,)
    assert y["b"][1] == 3
    assert isinstance(got, OrderedDict)
    assert got is not bag
    assert (list(got), got["rest"]) == (["q", "rest", "k"], "untouched")
    assert got["q"].placements[0].is_shard(1)
    assert got["k"][0].placements == (R,)
    for tensor in (x.a, y["a"], y["b"][0], got["q"], got["k"][0]):
        assert_close(full(tensor), X)


@world(RANKS)
def test_arguments_may_be_left_out_or_distributed_and_the_module_copied() -> None:
    style = PrepareModuleInput(input_layouts=(S0, R), desired_input_layouts=(S0, R), input_kwarg_layouts={"bag": R})
    module = Echo()
    parallelize_module(module, None, style)
    module(part())
    assert module.seen["y"] is None
    module(part(), None, bag=None)
    assert module.seen["bag"] is None
    style = PrepareModuleInput(input_layouts=(S0, None), desired_input_layouts=(R, S0))
    module = Echo()
    parallelize_module(module, None, style)
    mine = DTensor.from_local(part(1), Mesh((RANKS,)), [S1])
    module(mine, mine)
    assert module.seen["x"].placements == (R,)
    assert module.seen["y"].placements[0].is_shard(0)
    assert_close(full(module.seen["y"]), X)
    module = parallelize_module(Echo(), None, PrepareModuleInput(input_layouts=S0, desired_input_layouts=R))
    assert_close(full(copy.deepcopy(module)(part())), X)


@pytest.mark.parametrize("local", [True, False])
@world(RANKS)
def test_results_are_moved_and_handed_on(local: bool) -> None:
    style = PrepareModuleOutput(
        output_layouts=(S0, None, Partial()), desired_output_layouts=(R, None, S0), use_local_output=local
    )
    module = parallelize_module(Echo(lambda x, y: (x, "text", y)), None, style)
    partial_sum = (X * (collectives.rank() + 1) / 6).requires_grad_()
    first, text, last = module(part(), partial_sum)
    assert text == "text"
    assert isinstance(first, DTensor) == isinstance(last, DTensor) == (not local)
    assert_close(full(first), X)
    assert_close(full(last), local_shard_of(X, 0, RANKS) if local else X)
    (last * 2).sum().backward()
    assert_close(partial_sum.grad, torch.full_like(X, 2))


@world(RANKS)
def test_a_result_that_is_a_dict_or_one_tensor() -> None:
    by_key = PrepareModuleOutput(output_layouts={"x": S0}, desired_output_layouts={"x": R})
    out = parallelize_module(Echo(lambda x, y: {"x": x, "y": y}), None, by_key)(part(), 3)
    assert_close(out["x"], X)
    assert out["y"] == 3
    alone = PrepareModuleOutput(output_layouts=(S0,), desired_output_layouts=(R,))
    assert_close(parallelize_module(Echo(), None, alone)(part()), X)
    assert_close(parallelize_module(Echo(lambda x, y: [x]), None, alone)(part())[0], X)


@world(RANKS)
def test_input_and_output_in_one_style() -> None:
    style = PrepareModuleInputOutput(
        input_layouts=S0, desired_input_layouts=S1, use_local_input=True,
        input_kwarg_layouts={"y": S0}, desired_input_kwarg_layouts={"y": R},
        output_layouts=S1, desired_output_layouts=S0, use_local_output=True,
    )  # fmt: skip
    module = Echo()
    parallelize_module(module, None, {"": style})
    x = part()
    out = module(x, y=part())
    assert_close(module.seen["x"], local_shard_of(X, 1, RANKS))
    assert_close(module.seen["y"], X)
    assert_close(out, local_shard_of(X, 0, RANKS))
    (out * out).sum().backward()
    assert_close(x.grad, 2 * x)


WRONG_PLANS: dict[str, tuple[dict[str, Any], str]] = {
    "lengths": ({"input_layouts": (S0, R), "desired_input_layouts": (S0,)}, "differ in number or names"),
    "names": (
        {"input_kwarg_layouts": {"bag": {"a": S0}}, "desired_input_kwarg_layouts": {"bag": {"b": S0}}},
        "differ in number or names",
    ),
    "structure": (
        {"input_kwarg_layouts": {"bag": {"a": S0}}, "desired_input_kwarg_layouts": {"bag": R}},
        "differ in structure",
    ),
    "too many": ({"input_layouts": (S0, R, R), "desired_input_layouts": (S0, R, R)}, "are 3, but forward takes x, y"),
    "no such name": ({"input_kwarg_layouts": {"scal": R}}, "forward has no argument 'scal'. Did you mean 'scale'?"),
    "twice": (
        {"input_layouts": (S0, R), "input_kwarg_layouts": {"y": R}},
        "the argument 'y' has layouts by position and by name",
    ),
    "by key": ({"input_layouts": {"x": R}}, "input_layouts are one entry per argument"),
    "no layout": ({"input_layouts": (7,)}, "must be placements of each argument"),
}


@pytest.mark.parametrize("name", WRONG_PLANS)
@world(2)
def test_layouts_that_do_not_fit_the_forward_are_refused(name: str) -> None:
    options, text = WRONG_PLANS[name]
    with pytest.raises(PlanError) as caught:
        parallelize_module(Echo(), None, PrepareModuleInput(**options))
    assert text in str(caught.value)


WRONG_CALLS: dict[str, tuple[Any, tuple[Any, ...], type[Exception], str]] = {
    "more tensors": ((S0,), (X, X), PlanError, "is called with 2 positional arguments, the plan has layouts for 1"),
    "no tensor": ((S0,), (3,), PlanError, "has a layout, but is int without tensors"),
    "one for several": (((S0, S0), None), (X,), PlanError, "is one tensor, the plan has layouts for 2 items"),
    "several for one": (((S0, S0), None), ([X],), PlanError, "is list of 1, the plan has layouts for 2 items"),
    "no list": (((S0, S0), None), ("ab",), PlanError, "is str, the plan has layouts for 2 items"),
    "no such key": (({"a": S0}, None), ({"b": X},), PlanError, "has the keys b, the plan has layouts for keys a"),
    "no dict": (({"a": S0}, None), (3,), PlanError, "is int, the plan has layouts for keys a"),
    "a dim it has not": ((Shard(2),), (X,), LayoutError, r"a tensor of shape (5, 6) cannot be laid out as [Shard(2)]"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_CALLS)
@world(2)
def test_calls_that_do_not_fit_the_plan_are_refused(name: str) -> None:
    layouts, args, kind, text = WRONG_CALLS[name]
    module = nn.Sequential(OrderedDict(block=Echo()))
    style = PrepareModuleInput(input_layouts=layouts, desired_input_layouts=layouts)
    parallelize_module(module, None, {"block": style})
    with pytest.raises(kind) as caught:
        module.get_submodule("block")(*args)
    assert text in str(caught.value)
    assert "block" in str(caught.value)


@world(2)
def test_a_plain_tensor_of_which_nothing_is_said_is_refused() -> None:
    module = Echo()
    parallelize_module(module, None, PrepareModuleInput(desired_input_layouts=(R,)))
    with pytest.raises(LayoutError, match="is a plain tensor, and the plan does not say how it is laid out"):
        module(X)
