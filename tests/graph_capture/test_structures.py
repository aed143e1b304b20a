"""Arguments and results of captured functions: the same types at every call, with the tensors of that call."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils import _pytree as pytree

import shardwise as sw
from shardwise.embedding import (
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
)
from shardwise.errors import CaptureError


class Color(Enum):
    RED = 1


@dataclass(frozen=True)
class Inner:
    y: Tensor
    name: str = "inner"


@dataclass
class Outer:
    inner: Inner
    more: dict[str, Any] = field(default_factory=dict)
    size: Any = None

    def __post_init__(self) -> None:
        self.size = self.inner.y.shape


@dataclass(slots=True)
class Slotted:
    y: Tensor


class Named(NamedTuple):
    y: Tensor
    n: int


KINDS: dict[str, Callable[[Tensor], Any]] = {
    "a tuple of a list": lambda y: (y, [y + 1, 2, None]),
    "named tuple": lambda y: Named(y, 3),
    "ordered dict": lambda y: OrderedDict(a=y, b=y + 1),
    "default dict": lambda y: defaultdict(list, a=y),
    "nested dataclasses": lambda y: Outer(Inner(y), {"a": Inner(y + 1, "a"), "b": [y]}),
    "dataclasses with slots": lambda y: [Slotted(y), Slotted(y + 1)],
    "size": lambda y: (y, y.shape),
    "constants": lambda y: (y, Color.RED, torch.float16, torch.channels_last, "text", b"bytes", 1j, sw.Shard(0), int),
    "KeyedTensor": lambda y: KeyedTensor(["a", "b"], [1, 2], y[None]),
    "JaggedTensor": lambda y: JaggedTensor(y, lengths=torch.tensor([1, 0, 2])),
    "KeyedJaggedTensor": lambda y: KeyedJaggedTensor(["a"], y, weights=y + 1, lengths=torch.tensor([1, 2])),
}


def leaves(x: Any) -> list[Any]:
    """What is in it, in the order of its names."""
    if hasattr(x, "__dataclass_fields__") and not isinstance(x, sw.Shard):
        return [type(x), *(leaf for name in x.__dataclass_fields__ for leaf in leaves(getattr(x, name)))]
    flat, spec = pytree.tree_flatten(x)
    if spec.is_leaf():
        return flat
    return [type(x), *(y for leaf in flat for y in leaves(leaf))]


@pytest.mark.parametrize("name", KINDS)
def test_results_have_the_types_of_the_function_and_the_tensors_of_the_call(name: str) -> None:
    def function(x: Tensor) -> Any:
        return KINDS[name](x * 2)

    step = sw.capture(function)
    for number in range(3):
        x = torch.full((3,), float(number))
        found, expected = step(x), function(x)
        assert type(found) is type(expected)
        assert repr(found) == repr(expected)
        for a, b in zip(leaves(found), leaves(expected), strict=True):
            assert_close(a, b) if isinstance(b, Tensor) else None
            assert isinstance(b, Tensor) or a == b
    assert len(step.graphs()) == 1


@pytest.mark.parametrize("name", sorted({*KINDS} - {"constants"}))
def test_arguments_may_be_of_the_same_types(name: str) -> None:
    def function(given: Any) -> Any:
        return [x * 2 for x in leaves(given) if isinstance(x, Tensor) and x.is_floating_point()], given

    step = sw.capture(function)
    for number in range(3):
        given = KINDS[name](torch.full((3,), float(number)))
        found, expected = step(given), function(given)
        assert_close(found[0], expected[0])
        assert repr(found[1]) == repr(expected[1])
    assert len(step.graphs()) == 1


def test_constants_of_dataclasses_are_part_of_the_kind_of_call_and_gradients_flow_through() -> None:
    step = sw.capture(lambda inner: inner.y * len(inner.name))
    for name in ("a", "abc", "a"):
        assert torch.equal(step(Inner(torch.ones(2), name)), torch.full((2,), float(len(name))))
    assert len(step.graphs()) == 2
    step = sw.capture(lambda outer: Inner(outer.inner.y * outer.more["w"]))
    for _ in range(3):
        x, w = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
        step(Outer(Inner(x), {"w": w})).y.sum().backward()
        assert_close((x.grad, w.grad), (w.detach(), x.detach()))


@pytest.mark.parametrize("name", ["KeyedTensor", "KeyedJaggedTensor"])
def test_results_do_not_share_their_keys(name: str) -> None:
    step = sw.capture(lambda x: KINDS[name](x * 2))
    for _ in range(3):
        found = step(torch.ones(3))
        assert found.keys()[0] == "a"
        found.keys()[0] = "changed"


class Config:
    """No container that capture knows."""


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda x: Config(), "Config"),
        (lambda x: {1}, "set"),
        (lambda x: (y for y in [x]), "generator"),
        (lambda x: [x, {"a": lambda: x}], "function"),
        (lambda x: Outer(Inner(x), {"a": Config()}), "Config"),
    ],
)
def test_results_that_a_replay_could_not_make_anew_are_refused(function: Callable[[Tensor], Any], kind: str) -> None:
    with pytest.raises(CaptureError, match=rf"the function returns a {kind}, which a replay cannot make anew"):
        sw.capture(function)(torch.ones(2))
