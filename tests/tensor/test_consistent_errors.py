"""Errors that only values tell, or sizes of plain tensors: the same on every rank, as in torch."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import DTensor, Mesh, Placement, Replicate, Shard, distribute_tensor, rank
from shardwise.errors import EmptyError, PlaceError, ShapeError
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


torch.manual_seed(0)
S0, S1, R = Shard(0), Shard(1), Replicate()
LOGITS, PROBABILITIES, CLASSES = torch.randn(8, 6), torch.rand(8, 6), torch.randint(0, 6, (8,))
SIGNS, FEATURES = torch.ones(8), torch.randn(8, 6)
IDS, ROWS = torch.randint(0, 6, (8, 2)), torch.randn(8, 2)

Op = Callable[..., Tensor]
OPS: dict[str, tuple[Op, Sequence[Tensor]]] = {  # the first operand is a DTensor, the others are plain
    "add": (torch.add, (LOGITS, PROBABILITIES)),
    "add_": (Tensor.add_, (LOGITS, PROBABILITIES)),
    "where": (lambda x, y: torch.where(y > 0.5, x, y), (LOGITS, PROBABILITIES)),
    "cat": (lambda x, y: torch.cat([x, y], 1), (LOGITS, PROBABILITIES)),
    "stack": (lambda x, y: torch.stack([x, y]), (LOGITS, PROBABILITIES)),
    "cross_entropy": (F.cross_entropy, (LOGITS, CLASSES)),
    "cross_entropy of probabilities": (F.cross_entropy, (LOGITS, PROBABILITIES)),
    "nll_loss": (F.nll_loss, (LOGITS, CLASSES)),
    "binary_cross_entropy": (F.binary_cross_entropy, (PROBABILITIES, PROBABILITIES)),
    "binary_cross_entropy_with_logits": (F.binary_cross_entropy_with_logits, (LOGITS, PROBABILITIES)),
    "l1_loss": (F.l1_loss, (LOGITS, PROBABILITIES)),
    "kl_div": (lambda x, y: F.kl_div(x, y, reduction="sum"), (LOGITS, PROBABILITIES)),
    "cosine_embedding_loss": (F.cosine_embedding_loss, (LOGITS, FEATURES, SIGNS)),
    "triplet_margin_loss": (F.triplet_margin_loss, (LOGITS, FEATURES, PROBABILITIES)),
    "bilinear": (F.bilinear, (LOGITS, FEATURES, torch.randn(3, 6, 6))),
    "layer_norm": (lambda x, w: F.layer_norm(x, (6,), w), (LOGITS, torch.rand(6))),
    "linear": (F.linear, (LOGITS, torch.randn(5, 6))),
    "scatter_add": (lambda x, index, y: x.scatter_add(1, index, y), (LOGITS, IDS, ROWS)),
    "attention": (F.scaled_dot_product_attention, (torch.randn(8, 4, 6), torch.randn(8, 4, 6), torch.randn(8, 4, 6))),
    "attention with a mask": (
        lambda q, mask: F.scaled_dot_product_attention(q, q, q, mask),
        (torch.randn(8, 4, 6), torch.zeros(4, 4)),
    ),
}


def _result(op: Op, operands: Sequence[Any]) -> Tensor | Exception:
    try:
        out = op(*operands)
        return out.full_tensor() if isinstance(out, DTensor) else out
    except Exception as error:  # noqa: BLE001 - the test compares it
        return error


def _shorter(operands: Sequence[Tensor]) -> list[list[Tensor]]:
    """The operands with one of them shorter along one dim, in all ways; in one way to a size of 1."""
    found = []
    for which, x in enumerate(operands):
        for dim, size in enumerate(x.shape):
            for length in {1, size // 2} - {0, size}:
                short = x.narrow(dim, 0, length).contiguous()
                found.append([short if i == which else y for i, y in enumerate(operands)])
    return found


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("placement", [R, S0, S1, Shard(2)], ids=str)
@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("name", OPS)
def test_sizes_are_refused_where_one_process_refuses_them_and_else_have_its_result(
    name: str, part: int, placement: Placement
) -> None:
    op, operands = OPS[name]
    if isinstance(placement, Shard) and placement.dim >= operands[0].ndim:
        placement = S0
    for cut in _shorter(operands)[part::3]:
        expected = _result(op, [x.clone() for x in cut])

        def body(cut: list[Tensor] = cut) -> Tensor | Exception:
            first = distribute_tensor(cut[0], Mesh((2,)), [placement])
            return _result(op, [first, *(x.clone() for x in cut[1:])])

        shapes = [tuple(x.shape) for x in cut], placement
        for got in world(2).run(body):
            if isinstance(expected, Exception):
                assert isinstance(got, RuntimeError | ValueError | IndexError), (shapes, expected, got)
            else:
                assert isinstance(got, Tensor), (shapes, got)
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


TARGETS = [name for name in OPS if OPS[name][1][1].shape[0] == len(LOGITS) and name not in ("attention", "scatter_add")]


@pytest.mark.parametrize("name", TARGETS)
def test_a_part_of_a_tensor_is_an_error_whose_fix_is_right(name: str) -> None:
    op, operands = OPS[name]
    wanted = op(operands[0].clone(), *operands[1:])

    def result(fixed: bool) -> Tensor:
        x: Tensor = distribute_tensor(operands[0], Mesh((3,)), [S0]).clone()
        own = [y.chunk(3)[rank()] if len(y) == len(LOGITS) else y for y in operands[1:]]
        if fixed:
            own = [
                y if y is z else DTensor.from_local(y, Mesh((3,)), [S0]) for y, z in zip(own, operands[1:], strict=True)
            ]
        out = op(x, *own)
        assert isinstance(out, DTensor)
        return out.full_tensor()

    def refused() -> str:
        with pytest.raises(ShapeError) as caught:
            result(fixed=False)
        return str(caught.value)

    for part, text in enumerate(world(3).run(refused)):
        assert ": a plain tensor beside DTensors must have the global shape. Here are DTensors of " in text
        assert str(tuple(operands[1].chunk(3)[part].shape)) in text
        assert "Fix: if each rank has its own part, DTensor.from_local(x, mesh, placements);" in text
    for out in world(3).run(result, True):
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)


@world(2)
def test_other_errors_of_a_call_with_plain_tensors_are_those_of_torch() -> None:
    x = distribute_tensor(LOGITS, Mesh((2,)), [S0])
    with pytest.raises(IndexError) as caught:
        torch.cat([x, LOGITS], 2)
    assert not isinstance(caught.value, ShapeError)
    with pytest.raises(RuntimeError) as caught_too:
        torch.bilinear(x, LOGITS, torch.ones(3, 6, 6).long())
    assert not isinstance(caught_too.value, ShapeError)
