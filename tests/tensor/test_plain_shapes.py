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
@pytest.mark.parametrize("name", OPS)
def test_sizes_are_refused_where_one_process_refuses_them_and_else_have_its_result(name: str) -> None:
    op, operands = OPS[name]
    for cut in _shorter(operands):
        expected = _result(op, [x.clone() for x in cut])
        for placement in (R, *map(Shard, range(cut[0].ndim))):

            def body(cut: list[Tensor] = cut, placement: Placement = placement) -> Tensor | Exception:
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
def test_a_part_of_a_tensor_is_one_error_on_all_ranks_and_its_fix_is_right(name: str) -> None:
    op, operands = OPS[name]
    mesh, wanted = Mesh((3,)), op(operands[0].clone(), *operands[1:])
    batch = [len(y) == len(LOGITS) for y in operands[1:]]

    def parts() -> tuple[DTensor, list[Tensor]]:
        own = [y.chunk(3)[rank()] if is_batch else y for is_batch, y in zip(batch, operands[1:], strict=True)]
        return distribute_tensor(operands[0], mesh, [S0]).clone(), own

    def refused() -> str:
        x, own = parts()
        with pytest.raises(ShapeError) as caught:
            op(x, *own)
        return str(caught.value)

    def fixed() -> None:
        x, own = parts()
        for i, y in enumerate(own):
            own[i] = DTensor.from_local(y, mesh, [S0]) if batch[i] else y
        out = op(x, *own)
        assert isinstance(out, DTensor)
        torch.testing.assert_close(out.full_tensor(), wanted, rtol=1e-4, atol=1e-5)

    (text,) = set(world(3).run(refused))
    assert f"expected {tuple(operands[1].shape)}, got {tuple(operands[1][:3].shape)} or " in text
    assert "Fix: if each rank has its own part, DTensor.from_local(x, mesh, [Shard(0)]);" in text
    world(3).run(fixed)


def test_a_part_of_the_targets_beside_logits_that_are_sharded_along_classes() -> None:
    def body() -> str:
        mesh = Mesh((2,))
        x = distribute_tensor(LOGITS[:6], mesh, [S1])
        with pytest.raises(ShapeError) as caught:
            F.cross_entropy(x, CLASSES[:6].chunk(2)[rank()])
        return str(caught.value)

    (text,) = set(world(2).run(body))
    assert text == (
        "cross_entropy: a plain tensor beside DTensors must have the global shape: expected (6,), got (3,). Fix: if "
        "each rank has its own part, DTensor.from_local(x, mesh, [Shard(0)]); else pass the full tensor, the same on "
        "every rank."
    )


def test_the_fix_names_the_axis_along_which_the_part_is_one() -> None:
    def body() -> str:
        mesh = Mesh((2, 2), names=("dp", "tp"))
        x = distribute_tensor(LOGITS[:6], mesh, [S0, S1])
        with pytest.raises(ShapeError) as caught:
            F.cross_entropy(x, CLASSES[:3])
        return str(caught.value)

    (text,) = set(world(4).run(body))
    assert "DTensor.from_local(x, mesh, [Shard(0), Replicate()])" in text


@world(2)
def test_other_errors_of_a_call_with_plain_tensors_are_those_of_torch() -> None:
    x = distribute_tensor(LOGITS, Mesh((2,)), [S0])
    with pytest.raises(IndexError) as caught:
        torch.cat([x, LOGITS], 2)
    assert not isinstance(caught.value, ShapeError)
    with pytest.raises(RuntimeError) as unfit:
        x + torch.ones(5, 5)
    assert not isinstance(unfit.value, ShapeError)
