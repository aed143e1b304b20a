"""Products that sum over shared indices: the letters of an einsum say all there is to know about each."""

from collections.abc import Callable, Sequence
from operator import mul
from string import ascii_letters, ascii_lowercase, ascii_uppercase
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.errors import RuleError
from shardwise.placement import REPLICATE, Partial, Placement, Shard
from shardwise.rules.row import RULES, LocalFunction, Meta, OpRule, Row, Site, local_with

aten = torch.ops.aten
STRETCHED = "?"  # stands for the index of a dim of length 1 that is repeated


class Indexed(NamedTuple):
    """A tensor operand and a letter for each of its dims; a term is added to the sum."""

    operand: Meta
    letters: str
    term: bool = False


Product = tuple[list[Indexed], str]  # the operands in the order of the arguments; the letters of the result


def product_rows(operands: Sequence[Indexed], output: str, local: LocalFunction | None) -> list[Row]:
    """Rows of `out[output] = sum of the product of the factors (+ terms)`.

    An index of the output may be cut wherever it occurs; a summed index may be cut if all factors have it
    cut, which leaves summands; and the product is linear in each factor. Terms that are added to the sum
    (a bias) are then summands themselves: one rank contributes them, the others zeros.
    """
    rows = []
    factors = [i for i, x in enumerate(operands) if not x.term]
    for letter in dict.fromkeys("".join(operands[i].letters for i in factors).replace(STRETCHED, "")):
        if any(x.letters.count(letter) > 1 for x in operands):
            continue  # a diagonal
        summed = letter not in output
        places = tuple(Partial() if x.term and summed else _at(letter, x.letters) for x in operands)
        why = f"each rank {'sums' if summed else 'computes'} its own part of index {letter}"
        rows.append(Row(places, Partial() if summed else Shard(output.index(letter)), why, local))
    for index in factors:
        places = tuple(Partial() if x.term or i == index else REPLICATE for i, x in enumerate(operands))
        rows.append(Row(places, Partial(), f"linear in operand {index}", local))
    return rows


def _at(letter: str, letters: str) -> Placement:
    return Shard(letters.index(letter)) if letter in letters else REPLICATE


def _indexed(
    operands: Sequence[Meta], letters: Sequence[str], stretch: str = "", terms: Sequence[int] = ()
) -> list[Indexed]:
    """The operands with their letters, the dims marked that are 1 long where others of that letter are longer.

    Args:
        stretch: letters whose dims of length 1 are repeated; those of terms always are.

    Raises:
        RuleError: dims that do not fit.
    """
    try:
        pairs = [list(zip(row, x.shape, strict=True)) for x, row in zip(operands, letters, strict=True)]
        factors = {pair for i, row in enumerate(pairs) if i not in terms for pair in row}
        sizes = dict(sorted(factors, key=lambda pair: pair[1] != 1))
        fits = all(n == sizes[a] or (n == 1 and a in stretch) for a, n in factors) and all(
            n in (1, sizes[a]) for i, row in enumerate(pairs) if i in terms for a, n in row
        )
    except (ValueError, KeyError):
        fits = False
    if not fits:
        shapes = ", ".join(str(x.shape) for x in operands)
        raise RuleError(f"The shapes {shapes} do not fit a product of dims ({', '.join(letters)}).")
    return [
        Indexed(x, "".join(a if n == sizes[a] else STRETCHED for a, n in row), i in terms)
        for i, (x, row) in enumerate(zip(operands, pairs, strict=True))
    ]


def register(
    indices: Callable[..., Product], *ops: Any, in_place: bool = False, local: LocalFunction | None = None
) -> None:
    """Give ops the rows that `indices`, a function of their arguments, implies."""

    def rows(*args: Any, **kwargs: Any) -> list[Row]:
        return product_rows(*indices(*args, **kwargs), local)

    def shape(*args: Any, **kwargs: Any) -> tuple[int, ...]:
        operands, output = indices(*args, **kwargs)
        sizes = {a: n for x in operands for a, n in zip(x.letters, x.operand.shape, strict=True)}
        return tuple(sizes[a] for a in output)

    for op in ops:
        RULES[op] = OpRule(rows, in_place, shape, sizeless=True)


# ---- the ops ------------------------------------------------------------------------------------------------


def linear(input: Meta, weight: Meta, bias: Meta | None = None) -> Product:
    """out[..., o] = sum_i input[..., i] weight[o, i] + bias[o]."""
    batch, row = ascii_lowercase[: input.ndim - 1], "ZY" if weight.ndim == 2 else "Y"
    operands, letters = [input, weight], [batch + "Y", row]
    if bias is not None:
        operands, letters = [*operands, bias], [*letters, row[:-1][-bias.ndim :] if bias.ndim else ""]
    return _indexed(operands, letters, terms=(2,)), batch + row[:-1]


def bilinear(input1: Meta, input2: Meta, weight: Meta, bias: Meta | None = None) -> Product:
    """out[..., o] = sum_ij input1[..., i] weight[o, i, j] input2[..., j] + bias[o]."""
    batch = ascii_lowercase[: input1.ndim - 1]
    operands, letters = [input1, input2, weight], [batch + "X", batch + "Y", "ZXY"]
    if bias is not None:
        operands, letters = [*operands, bias], [*letters, "Z"]
    return _indexed(operands, letters, terms=(3,)), batch + "Z"


def _bilinear(site: Site, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Torch's own cannot do without a dim of `input2`."""
    out = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
    return out if bias is None else out + bias


def matmul(input: Meta, other: Meta) -> Product:
    """out[..., m, n] = sum_k input[..., m, k] other[..., k, n], 1-D operands as torch has them."""
    batch = ascii_lowercase[: max(input.ndim, other.ndim, 2) - 2]
    left = batch[len(batch) - (input.ndim - 2) :] + "XY" if input.ndim > 1 else "Y"
    right = batch[len(batch) - (other.ndim - 2) :] + "YZ" if other.ndim > 1 else "Y"
    return _indexed([input, other], [left, right], batch), batch + "X" * (input.ndim > 1) + "Z" * (other.ndim > 1)


def reversed_matmul(input: Meta, other: Meta) -> Product:
    """other @ input."""
    (left, right), output = matmul(other, input)
    return [right, left], output


def inner(input: Meta, other: Meta) -> Product:
    """out[…, …'] = sum_k input[…, k] other[…', k]."""
    if not input.ndim or not other.ndim:
        raise NotImplementedError("a number is multiplied")
    left, right = ascii_lowercase[: input.ndim - 1], ascii_uppercase[: other.ndim - 1]
    return _indexed([input, other], [left + "Z", right + "Z"]), left + right


def outer(input: Meta, vec2: Meta) -> Product:
    """out[a, b] = input[a] vec2[b]."""
    return _indexed([input, vec2], ["a", "b"]), "ab"


def dot(input: Meta, other: Meta) -> Product:
    """out = sum_a input[a] other[a], conjugated or not."""
    return _indexed([input, other], ["a", "a"]), ""


def vecdot(x: Meta, y: Meta, *, dim: int = -1) -> Product:
    """out[…] = sum over dim of conj(x) y."""
    letters = ascii_lowercase[: max(x.ndim, y.ndim)]
    at = letters[dim % len(letters)]
    kept = letters.replace(at, "")
    return _indexed([x, y], [letters[len(letters) - x.ndim :], letters[len(letters) - y.ndim :]], kept), kept


def tensordot(a: Meta, b: Meta, dims: Any = 2, out: None = None) -> Product:
    """The sum over pairs of dims of `a` and `b`."""
    if isinstance(dims, int):
        dims = range(a.ndim - dims, a.ndim), range(dims)
    if isinstance(dims, Meta):
        raise NotImplementedError("dims are given by a tensor")
    left, right = list(ascii_lowercase[: a.ndim]), list(ascii_uppercase[: b.ndim])
    mine, theirs = ([d] if isinstance(d, int) else list(d) for d in dims)
    summed = [left[d] for d in mine]
    for d, letter in zip(theirs, summed, strict=True):
        right[d] = letter
    kept = "".join(c for c in left + right if c not in summed)
    return _indexed([a, b], ["".join(left), "".join(right)], "".join(summed)), kept


def chain(tensors: Sequence[Meta]) -> Product:
    """A product of matrices; the first and the last one may be vectors."""
    pairs = [ascii_letters[i : i + 2] for i in range(len(tensors))]
    letters = [pairs[0][2 - tensors[0].ndim :], *pairs[1:-1], pairs[-1][: tensors[-1].ndim]]
    return _indexed(tensors, letters), letters[0][:-1] + letters[-1][1:]


def einsum(equation: str, *operands: Any) -> Product:
    """Whatever the equation says. Letters that an operand repeats are its diagonal."""
    tensors: list[Meta] = list(operands if isinstance(operands[0], Meta) else operands[0])
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
    return _indexed(tensors, letters, ascii_letters), output.replace("...", dots)


def added(term: str, left: str, right: str, output: str) -> Callable[..., Product]:
    """out[output] = beta input[output] + alpha sum of left[…] right[…], for the letters given."""

    def indices(input: Meta, *factors: Any, **named: Any) -> Product:
        tensors = [input, *(x for x in (*factors, *named.values()) if isinstance(x, Meta))]
        if term == "m" and input.shape != tensors[1].shape[:1]:
            raise NotImplementedError("torch does not stretch the term for an empty matrix")
        return _indexed(tensors, [term[len(term) - input.ndim :], left, right], terms=(0,)), output

    return indices


def kron(input: Meta, other: Meta) -> list[Row]:
    """out[i n + j] = input[i] other[j] in every dim, n the length of that dim of `other`."""
    ndim = max(input.ndim, other.ndim)
    first, second = ((1,) * (ndim - x.ndim) + x.shape for x in (input, other))
    rows = [Row((Partial(), REPLICATE), Partial(), "linear"), Row((REPLICATE, Partial()), Partial(), "linear")]
    for d in range(ndim):
        own, others = d - (ndim - input.ndim), d - (ndim - other.ndim)
        if own >= 0:
            boundary = local_with(mul, second[d])
            rows.append(
                Row((Shard(own), REPLICATE), Shard(d), "a copy of the other factor an element", boundary=boundary)
            )
        if others >= 0 and first[d] == 1:
            rows.append(Row((REPLICATE, Shard(others)), Shard(d), "one copy of the cut factor"))
    return rows


register(linear, F.linear, aten.linear.default)
register(bilinear, F.bilinear, local=_bilinear)
register(
    matmul, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.linalg.matmul, torch.mm, Tensor.mm, torch.bmm,
    Tensor.bmm, torch.mv, Tensor.mv, aten.mm.default, aten.bmm.default, aten.mv.default, aten.matmul.default,
)  # fmt: skip
register(reversed_matmul, Tensor.__rmatmul__)
register(dot, torch.dot, Tensor.dot, aten.dot.default, torch.vdot, Tensor.vdot, aten.vdot.default)
register(inner, torch.inner, Tensor.inner)
register(outer, torch.outer, Tensor.outer, torch.ger, Tensor.ger)
register(vecdot, torch.linalg.vecdot)
register(tensordot, torch.tensordot)
register(chain, torch.linalg.multi_dot)
register(einsum, torch.einsum)
for _name, _letters in {
    "addmm": ("mn", "mk", "kn", "mn"), "addmv": ("m", "mk", "k", "m"), "addr": ("mn", "m", "n", "mn"),
    "addbmm": ("mn", "bmk", "bkn", "mn"), "baddbmm": ("bmn", "bmk", "bkn", "bmn"),
}.items():  # fmt: skip
    register(added(*_letters), getattr(torch, _name), getattr(Tensor, _name), getattr(aten, _name).default)
    _in_place = getattr(Tensor, f"{_name}_"), getattr(aten, f"{_name}_").default
    register(added(*_letters), *_in_place, in_place=True)
RULES.update(dict.fromkeys((torch.kron, Tensor.kron), OpRule(kron)))
