"""Products that sum over shared indices: one einsum says all there is to know about each."""

from string import ascii_lowercase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.placement import REPLICATE, Partial, Placement, Shard
from shardwise.rules.row import Meta, Row, op_rule

aten = torch.ops.aten
STRETCHED = "?"  # stands for the index of a dim of length 1 that is repeated


def einsum_rows(inputs: list[str], output: str, added: list[str] | None = None) -> list[Row]:
    """Rows of `out[output] = sum of in_0[inputs_0] in_1[inputs_1] … (+ added terms)`.

    An index of the output may be cut wherever it occurs; a summed index may be cut if all operands have it
    cut, which leaves summands; and the product is linear in each operand. Terms that are added to the sum
    (a bias) are then summands themselves: one rank contributes them, the others zeros.
    """
    terms = added or []
    rows = []
    for letter in dict.fromkeys("".join(inputs).replace(STRETCHED, "")):
        places = tuple(_at(letter, subscript) for subscript in inputs)
        if letter in output:
            extra = tuple(_at(letter, term) for term in terms)
            why = f"each rank computes its own part of index {letter}"
            rows.append(Row((*places, *extra), Shard(output.index(letter)), why))
        else:
            extra = (Partial(),) * len(terms)
            rows.append(Row((*places, *extra), Partial(), f"each rank sums its own part of index {letter}"))
    for index in range(len(inputs)):
        places = tuple(Partial() if i == index else REPLICATE for i in range(len(inputs)))
        rows.append(Row((*places, *(Partial(),) * len(terms)), Partial(), f"linear in operand {index}"))
    return rows


def _at(letter: str, subscript: str) -> Placement:
    return Shard(subscript.index(letter)) if letter in subscript else REPLICATE


def _linear_shape(input: Meta, weight: Meta, bias: Meta | None = None) -> tuple[int, ...]:
    return (*input.shape[:-1], *weight.shape[:-1])


@op_rule(F.linear, aten.linear.default, shape=_linear_shape, sizeless=True)
def linear(input: Meta, weight: Meta, bias: Meta | None = None) -> list[Row]:
    """out[..., o] = sum_i input[..., i] weight[o, i] + bias[o]."""
    batch = ascii_lowercase[: input.ndim - 1]
    weight_index = "zy" if weight.ndim == 2 else "y"
    out = batch + weight_index[:-1]
    return einsum_rows([batch + "y", weight_index], out, None if bias is None else [weight_index[:-1]])


@op_rule(
    torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm, torch.mv, Tensor.mv,
    torch.dot, Tensor.dot, aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default, aten.matmul.default,
)  # fmt: skip
def matmul(input: Meta, other: Meta) -> list[Row]:
    """out[..., m, n] = sum_k input[..., m, k] other[..., k, n], 1-D operands as torch has them."""
    left, right = _matmul_indices(input, other)
    batch = max(len(left) - 2, len(right) - 2, 0)
    out = ascii_lowercase[:batch] + left[-2:-1] * (input.ndim > 1) + right[-1] * (other.ndim > 1)
    return einsum_rows([_unstretched(left, input, out), _unstretched(right, other, out)], out)


def _matmul_indices(input: Meta, other: Meta) -> tuple[str, str]:
    batch = max(input.ndim, other.ndim, 2) - 2
    left = ascii_lowercase[:batch][max(0, batch - (input.ndim - 2)) :] + "xy" if input.ndim > 1 else "y"
    right = ascii_lowercase[:batch][max(0, batch - (other.ndim - 2)) :] + "yz" if other.ndim > 1 else "y"
    return left, right


def _unstretched(subscript: str, operand: Meta, out: str) -> str:
    """Batch dims of length 1 are stretched, not cut."""
    batch = max(operand.ndim - 2, 0)
    return "".join(STRETCHED if i < batch and operand.shape[i] == 1 else letter for i, letter in enumerate(subscript))


@op_rule(torch.addmm, Tensor.addmm, aten.addmm.default)
def addmm(input: Meta, mat1: Meta, mat2: Meta, *, beta: float = 1, alpha: float = 1) -> list[Row]:
    """out[m, n] = beta input[m, n] + alpha sum_k mat1[m, k] mat2[k, n]."""
    term = "mn"[2 - input.ndim :]
    if any(size == 1 for size in input.shape):
        return []
    return [
        Row((row.inputs[-1], *row.inputs[:-1]), row.output, row.why) for row in einsum_rows(["mk", "kn"], "mn", [term])
    ]


@op_rule(torch.einsum)
def einsum(equation: str, *operands: Any) -> list[Row]:
    """Whatever the equation says, where every index is a letter and no operand repeats one."""
    tensors = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], list | tuple) else list(operands)
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    plain = bool(arrow) and "." not in equation and all(len(set(term)) == len(term) for term in terms)
    if not plain or any(size == 1 for x in tensors for size in x.shape):
        return []
    return einsum_rows(terms, output)
