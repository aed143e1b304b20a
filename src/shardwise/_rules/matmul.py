"""Matrix products and other contractions: their rows follow from the letters of an einsum."""

from collections.abc import Callable, Sequence
from string import ascii_letters, ascii_lowercase, ascii_uppercase
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise._layout import REPLICATE, Partial, Placement, Shard
from shardwise._rules.registry import OpRule, register
from shardwise._rules.row import Meta, Op, Row
from shardwise.errors import RuleError

aten = torch.ops.aten
BROADCAST = "?"  # the letter of a dim of size 1 that is broadcast


class Product(NamedTuple):
    """out[output] = the sum over all other letters of the product of the operands, plus the term.

    Args:
        operands, letters: the tensors in the order of the arguments, and a letter for each of their dims.
        broadcast: letters whose dims of size 1 are broadcast; those of the term always are.
        term: index of the operand that is added instead of multiplied.
    """

    operands: Sequence[Meta]
    letters: Sequence[str]
    output: str
    broadcast: str = ""
    term: int = -1

    def sizes(self) -> dict[str, int]:
        """The size of each letter's dims."""
        found: dict[str, int] = {}
        for x, letters in zip(self.operands, self.letters, strict=True):
            for letter, n in zip(letters, x.shape, strict=True):
                if n != 1 or letter not in found:
                    found[letter] = n
        return found

    def check(self, sizes: dict[str, int]) -> None:
        """Raise RuleError unless each dim has the size of its letter, or is broadcast."""
        for i, (x, letters) in enumerate(zip(self.operands, self.letters, strict=True)):
            for a, n in zip(letters, x.shape, strict=True):
                if n != sizes[a] and (n != 1 or (i != self.term and a not in self.broadcast)):
                    raise RuleError(
                        f"Dims {letters} of shape {x.shape} do not match the sizes of the product, {sizes}. "
                        f"Fix: one size for each letter in all operands, or 1 to broadcast."
                    )

    def sharded_letters(self) -> list[str]:
        """The letters, without those of broadcast dims, which are not sharded.

        Raises:
            RuleError: sizes of dims do not match.
        """
        sizes = self.sizes()
        self.check(sizes)
        pairs = zip(self.letters, self.operands, strict=True)
        return [
            "".join([a if n == sizes[a] else BROADCAST for a, n in zip(own, x.shape, strict=True)]) for own, x in pairs
        ]


def product_rows(product: Product) -> list[Row]:
    """Rows of a product.

    A sharded index of the output is sharded wherever it occurs. A sharded contracted index is sharded in all factors
    and gives partial sums. The product is linear in each factor. A term added to partial sums (a bias) is Partial too.
    """
    rows, letters, output = [], product.sharded_letters(), product.output
    factors = [i for i in range(len(letters)) if i != product.term]
    for letter in dict.fromkeys("".join(letters[i] for i in factors).replace(BROADCAST, "")):
        if any(own.count(letter) > 1 for own in letters):
            continue  # a diagonal
        summed = letter not in output
        placements = tuple(Partial() if i == product.term and summed else _at(letter, x) for i, x in enumerate(letters))
        dims = [f"dim {own.index(letter)} of operand {i}" for i, own in enumerate(letters) if letter in own]
        why = f"{' and '.join(dims)} {'are' if dims[1:] else 'is'} sharded{': partial sums' if summed else ''}"
        rows.append(Row(placements, Partial() if summed else Shard(output.index(letter)), why))
    for index in factors:
        placements = tuple(Partial() if i in (index, product.term) else REPLICATE for i in range(len(letters)))
        rows.append(Row(placements, Partial(), f"operand {index} is Partial, the product is linear in it"))
    return rows


def _at(letter: str, letters: str) -> Placement:
    return Shard(letters.index(letter)) if letter in letters else REPLICATE


def register_product(indices: Callable[..., Product], *ops: Op, in_place: bool = False, typed: bool = False) -> None:
    """Register ops with the rows of the product that `indices` returns for their arguments."""

    def rows(*args: object, **kwargs: object) -> list[Row]:
        try:
            return product_rows(indices(*args, **kwargs))
        except ValueError as error:
            fix = "as many dims as the op takes in plain torch"
            raise RuleError(f"The operands do not have the numbers of dims of the product. Fix: {fix}.") from error

    def shape(*args: object, **kwargs: object) -> tuple[int, ...]:
        product = indices(*args, **kwargs)
        sizes = product.sizes()
        product.check(sizes)
        return tuple([sizes[letter] for letter in product.output])

    register(OpRule(rows, in_place, shape, checks_sizes=True, shape_independent=True, typed=typed), *ops)


# ---- the ops ------------------------------------------------------------------------------------------------


def linear(input: Meta, weight: Meta, bias: Meta | None = None) -> Product:
    """out[..., o] = sum_i input[..., i] weight[o, i] + bias[o]."""
    batch, row = ascii_lowercase[: input.ndim - 1], "ZY" if weight.ndim == 2 else "Y"
    operands, letters = [input, weight], [batch + "Y", row]
    if bias is not None:
        operands, letters = [*operands, bias], [*letters, row[:-1][-bias.ndim :] if bias.ndim else ""]
    return Product(operands, letters, batch + row[:-1], term=2)


def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """out[..., o] = sum_ij input1[..., i] weight[o, i, j] input2[..., j] + bias[o]."""
    if input2.shape != (*input1.shape[:-1], weight.shape[2]) or input1.shape[-1] != weight.shape[1]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (input1, input2, weight))  # a dim of 1 is not broadcast
        raise RuntimeError(f"bilinear(): the sizes of inputs and weight do not match: {shapes}.")
    with torch.autocast(input1.device.type, enabled=False):  # autocast does not cast operands of F.bilinear
        out = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
    return out if bias is None else out + bias


def matmul(input: Meta, other: Meta) -> Product:
    """out[..., m, n] = sum_k input[..., m, k] other[..., k, n], 1-D operands as in torch."""
    batch = ascii_lowercase[: max(input.ndim, other.ndim, 2) - 2]
    left = batch[len(batch) - (input.ndim - 2) :] + "XY" if input.ndim > 1 else "Y"
    right = batch[len(batch) - (other.ndim - 2) :] + "YZ" if other.ndim > 1 else "Y"
    output = batch + "X" * (input.ndim > 1) + "Z" * (other.ndim > 1)
    return Product([input, other], [left, right], output, batch)


def _inner(input: Tensor, other: Tensor) -> Tensor:
    """out[…, …'] = sum_k input[…, k] other[…', k]; 0-D operands are multiplied."""
    return torch.tensordot(input, other, ([-1], [-1])) if input.ndim and other.ndim else input * other


def dot(input: Meta, other: Meta) -> Product:
    """out = sum_a input[a] other[a], conjugated or not."""
    return Product([input, other], ["a", "a"], "")


def tensordot(a: Meta, b: Meta, dims: Any = 2, out: None = None) -> Product:
    """The sum over pairs of dims of `a` and `b`."""
    if isinstance(dims, int):
        dims = range(a.ndim - dims, a.ndim), range(dims)
    if isinstance(dims, Meta):
        raise NotImplementedError("dims is a tensor")
    left, right = list(ascii_lowercase[: a.ndim]), list(ascii_uppercase[: b.ndim])
    of_a, of_b = ([d] if isinstance(d, int) else list(d) for d in dims)
    summed = [left[d] for d in of_a]
    for d, letter in zip(of_b, summed, strict=True):
        right[d] = letter
    kept = "".join(c for c in left + right if c not in summed)
    return Product([a, b], ["".join(left), "".join(right)], kept, "".join(summed))


def einsum(equation: str, *operands: Any) -> Product:
    """The equation's product. Letters that an operand repeats are its diagonal."""
    tensors: list[Meta] = list(operands if isinstance(operands[0], Meta) else operands[0])
    if len({x.dtype for x in tensors}) > 1:
        raise NotImplementedError("of other dtypes torch multiplies where it sums over dims of size 1, by global sizes")
    left, arrow, output = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    free = [c for c in ascii_letters if c not in equation]
    gaps = [x.ndim - len(term.replace("...", "")) for x, term in zip(tensors, terms, strict=True) if "..." in term]
    dots = "".join(free[: max(gaps, default=0)])
    if not arrow:
        output = "..." + "".join(sorted(c for c in set(left) - set(",.") if left.count(c) == 1))
    letters = []
    for x, term in zip(tensors, terms, strict=True):
        gap = x.ndim - len(term.replace("...", ""))
        letters.append(term.replace("...", dots[len(dots) - gap :]))
    return Product(tensors, letters, output.replace("...", dots), ascii_letters)


def added(term: str, left: str, right: str, output: str) -> Callable[..., Product]:
    """out[output] = beta input[output] + alpha sum of left[…] right[…], for the letters given."""

    def indices(input: Meta, *factors: object, **named: object) -> Product:
        tensors = [input, *(x for x in (*factors, *named.values()) if isinstance(x, Meta))]
        if term == "m" and input.shape != tensors[1].shape[:1]:
            raise NotImplementedError("torch does not broadcast the term for an empty matrix")
        return Product(tensors, [term[len(term) - input.ndim :], left, right], output, term=0)

    return indices


register_product(linear, F.linear, aten.linear.default)
register_product(
    matmul, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.linalg.matmul, torch.mm, Tensor.mm, torch.bmm,
    Tensor.bmm, torch.mv, Tensor.mv, aten.mm.default, aten.bmm.default, aten.mv.default, aten.matmul.default,
)  # fmt: skip
register_product(dot, torch.dot, Tensor.dot, aten.dot.default, torch.vdot, Tensor.vdot, aten.vdot.default)
register(OpRule(decomposition=_inner), torch.inner, Tensor.inner)
register_product(tensordot, torch.tensordot)
register_product(einsum, torch.einsum, typed=True)
for _name, _letters in {
    "addmm": ("mn", "mk", "kn", "mn"), "addmv": ("m", "mk", "k", "m"), "addr": ("mn", "m", "n", "mn"),
    "addbmm": ("mn", "bmk", "bkn", "mn"), "baddbmm": ("bmn", "bmk", "bkn", "bmn"),
}.items():  # fmt: skip
    register_product(added(*_letters), getattr(torch, _name), getattr(Tensor, _name), getattr(aten, _name).default)
    _in_place = getattr(Tensor, f"{_name}_"), getattr(aten, f"{_name}_").default
    register_product(added(*_letters), *_in_place, in_place=True)
register(OpRule(decomposition=_bilinear), F.bilinear)
register(OpRule(decomposition=lambda input, other: torch.matmul(other, input)), Tensor.__rmatmul__)
