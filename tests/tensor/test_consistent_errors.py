"""Errors that only values tell are the same on every rank, also on those that hold none of the values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise import Mesh, Placement, Replicate, Shard, distribute_tensor
from shardwise.errors import EmptyError, PlaceError
from shardwise.testing import world

LAYOUTS: list[tuple[Mesh, list[Placement]]] = [
    (Mesh((4,)), [Shard(1)]),
    (Mesh((4,)), [Shard(0, [0, 3, 0, 1])]),
    (Mesh((2, 2)), [Shard(1), Shard(0, [4, 0])]),
    (Mesh((2, 2)), [Replicate(), Shard(1, [0, 3])]),
    (Mesh((4,)), [Replicate()]),
]
VALUES = torch.arange(12.0).reshape(4, 3)
NINE, NINETY = torch.tensor([1, 9]), torch.tensor([2, 90])
ALONG = torch.tensor([[1, 0, 2], [1, 9, 11]])
BAD_PLACES: dict[str, Callable[[Any], Any]] = {
    "x[i]": lambda x: x[NINE],
    "x[i, j]": lambda x: x[NINE % 4, NINE],
    "x[i] = v": lambda x: x.__setitem__(NINE, 1.0),
    "index_select": lambda x: x.index_select(0, NINE),
    "index_select of 1": lambda x: x.index_select(1, NINE),
    "negative": lambda x: x.index_select(0, -NINE),
    "index_add": lambda x: x.index_add(0, NINE, x[:2]),
    "index_copy": lambda x: x.index_copy(0, NINE, x[:2]),
    "index_fill": lambda x: x.index_fill(0, NINE, 1.0),
    "index_put": lambda x: x.index_put((NINE,), torch.tensor(1.0)),
    "gather": lambda x: x.gather(0, ALONG),
    "gather of 1": lambda x: x.gather(1, ALONG),
    "scatter": lambda x: x.scatter(0, ALONG, 1.0),
    "scatter_add_": lambda x: x.scatter_add_(0, ALONG, x[:2].clone()),
    "take": lambda x: x.take(NINETY),
    "put": lambda x: x.put(NINETY, torch.ones(2)),
}
BY_ZERO: dict[str, Callable[[Any], Any]] = {
    "%": lambda x: x.long() % 0,
    "//": lambda x: x.long() // 0,
    "fmod": lambda x: x.long().fmod(0),
    "div": lambda x: x.long().div(0, rounding_mode="trunc"),
    "tensor": lambda x: torch.remainder(x.long(), torch.tensor(0)),
    "in place": lambda x: x.long().remainder_(0),
}


def said(what: Callable[[Any], Any], mesh: Mesh, placements: list[Placement]) -> str:
    with pytest.raises((IndexError, RuntimeError)) as caught:
        what(distribute_tensor(VALUES, mesh, placements))
    return f"{type(caught.value).__name__} {caught.value}"


@pytest.mark.parametrize("name", BAD_PLACES)
def test_a_bad_index_is_the_same_error_on_every_rank(name: str) -> None:
    what = BAD_PLACES[name]
    with pytest.raises((IndexError, RuntimeError)) as caught:
        what(VALUES.clone())
    assert issubclass(PlaceError, caught.type)
    for layout in LAYOUTS:
        texts = set(world(4).run(said, what, *layout))
        assert len(texts) == 1, layout
        assert any(number in str(texts) for number in ("index 9 ", "index 90 ", "index -1 ", "index -9 ")), layout


def of_nothing(mesh: Mesh) -> tuple[int, ...]:
    return tuple((distribute_tensor(VALUES.long()[:, :0], mesh, [Shard(0)] * mesh.ndim) % 0).shape)


def test_integers_are_divided_by_zero_on_no_rank_and_nothing_is() -> None:
    for layout in LAYOUTS:
        for name, what in BY_ZERO.items():
            assert set(world(4).run(said, what, *layout)) == {"RuntimeError ZeroDivisionError"}, (name, layout)
        assert world(4).run(of_nothing, layout[0]) == [(4, 0)] * 4


def test_the_largest_of_nothing_is_the_kind_of_error_that_torch_raises() -> None:
    ops: list[Callable[[Any], Any]] = [
        lambda x: x.max(),
        lambda x: x.max(1),
        lambda x: x.amin(1),
        lambda x: x.aminmax(),
        lambda x: torch.linalg.vector_norm(x, float("inf")),
        lambda x: torch.linalg.vector_norm(x, float("-inf"), 1),
        lambda x: x @ torch.ones(3, 2),
    ]

    def text(op: Callable[[Any], Any], kind: type[BaseException], placement: Placement) -> str:
        with pytest.raises(kind) as caught:
            op(distribute_tensor(torch.ones(4, 0), Mesh((2,)), [placement]))
        return str(caught.value)

    for op in ops:
        with pytest.raises((IndexError, RuntimeError)) as caught:
            op(torch.ones(4, 0))
        for placement in (Shard(0), Shard(1), Replicate()):
            assert len(set(world(2).run(text, op, caught.type, placement))) == 1
    assert issubclass(EmptyError, IndexError)


@world(2)
def test_no_places_are_written_from_a_tensor_of_no_dims() -> None:
    x = distribute_tensor(VALUES, Mesh((2,)), [Shard(0)])
    none = torch.zeros(0, 3, dtype=torch.int64)
    outs: list[Any] = [x.scatter_add(0, none, torch.tensor(1.0)), x.scatter_reduce(0, none, torch.tensor(1.0), "sum")]
    assert all(torch.equal(out.full_tensor(), VALUES) for out in outs)


KEEPING: dict[str, Callable[[Any], Any]] = {
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "instance_norm": F.instance_norm,
    "layer_norm": lambda x: F.layer_norm(x, (2, 3)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "rms_norm": lambda x: F.rms_norm(x, (2, 3)),
    "nll_loss": lambda x: F.nll_loss(x, torch.zeros(4, 3, dtype=torch.int64)),
}


@pytest.mark.parametrize("name", KEEPING)
def test_backward_finds_on_every_rank_or_on_none_that_an_operand_was_changed(name: str) -> None:
    def went_backward(leaf: Any, changed: bool) -> str:
        x = leaf.requires_grad_() * 1
        out = KEEPING[name](x)
        if changed:
            x.mul_(2)
        try:
            (out * out.detach().sin()).sum().backward()
        except RuntimeError as error:
            return str(error).split(":")[0]
        return "right"

    values = torch.arange(24.0).sin().reshape(4, 2, 3)
    for changed in (False, True):
        wanted = went_backward(values.clone(), changed)
        for placement in (Shard(0, [0, 3, 0, 1]), Shard(1), Shard(2)):

            def body(placement: Placement = placement, changed: bool = changed) -> str:
                return went_backward(distribute_tensor(values, Mesh((4,)), [placement]), changed)

            assert world(4).run(body) == [wanted] * 4, placement
