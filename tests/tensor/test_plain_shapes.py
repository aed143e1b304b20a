"""Sizes that do not fit are refused as in torch; beside DTensors the error has the global shape and a fix."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import DTensor, Mesh, Placement, Replicate, Shard, distribute_tensor, rank
from shardwise.errors import ShapeError
from shardwise.testing import world

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
    "multi_margin_loss": (F.multi_margin_loss, (LOGITS, CLASSES)),
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
