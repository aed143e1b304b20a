"""Record calls of ops and replay them with other operands: is what comes back what the calls themselves give?

    python -m tools.captures                        # every row of every rule: about half an hour on two cores
    python -m tools.captures --part 3 12            # a twelfth of them
    python -m tools.captures --keys 'softmax|_norm'

A call may be refused (`CaptureError`) or equal, bit for bit, in values, layouts and gradients. The exit status is 1 if
anything else happened.
"""

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from shardwise import Layout, Mesh, capture, collectives
from shardwise.errors import CaptureError
from shardwise.tensor import DTensor, tag
from shardwise.testing import world
from shardwise.testing.pieces import contribution, local_of
from shardwise.testing.truth import Operands, Sample, cotangent, layouts_for, parts_of, results_of

MESHES = (Mesh((2,)), Mesh((3,)), Mesh((2, 2)))
# Listened to, autograd takes another formula for these, whose last bits differ.
ROUNDED = ("prod", "cholesky")
Found = list[tuple[Layout | None, Tensor] | None]


def cases(sample: Sample, mesh: Mesh, seed: int, count: int = 2) -> Iterator[tuple[Operands, Operands]]:
    """Operands to record with, and others of the same layouts to replay with: the same elements turned round."""
    generator = torch.Generator().manual_seed(seed)
    tensors = sample.tensors()
    turned = [x if x.is_sparse or not x.ndim else x.flip(list(range(x.ndim))) for x in tensors]
    for layouts in layouts_for(sample, mesh, count, seed):
        first, second = (
            [(layout, parts_of(x, layout, generator)) for layout, x in zip(layouts, xs, strict=True)]
            for xs in (tensors, turned)
        )
        yield first, second


def said(sample: Sample, first: Operands, second: Operands) -> str:
    """What came of it on this rank: "ok", "refused", "not a case", or what differs."""

    def function(*tensors: Tensor) -> Any:
        return sample.call([tensors[0].clone(), *tensors[1:]] if sample.in_place else list(tensors))

    if isinstance(_outcome(function, sample, first), str):
        return "not a case"
    step = capture(function)
    try:
        _outcome(step, sample, first)
        found = _outcome(step, sample, second)
    except CaptureError:
        return "refused"
    if len(step.graphs()) != 1:
        return f"{len(step.graphs())} recordings"
    return _difference(sample, found, _outcome(function, sample, second))


def _outcome(function: Callable[..., Any], sample: Sample, operands: Operands) -> Found | str:
    """Layouts and local values of results and of gradients; the kind of an error."""
    torch.default_generator.manual_seed(5)
    leaves = []
    for number, (layout, parts) in enumerate(operands):
        x = tag(local_of(parts[contribution(layout, collectives.rank())], layout, collectives.rank()), layout)
        differentiable = x.is_floating_point() or x.is_complex()
        leaves.append(x.requires_grad_(sample.gradients and differentiable and number not in sample.constant))
    try:
        values = results_of(function(*leaves))
        graded = [x for x in values if x.requires_grad] if sample.gradients else []
        if graded:
            torch.autograd.backward(graded, [cotangent(torch.empty(x.shape, dtype=x.dtype)) for x in graded])
    except CaptureError:
        raise
    except Exception as error:  # noqa: BLE001 - an op may refuse what it is given
        return type(error).__name__
    return [*map(_held, values), *(None if x.grad is None else _held(x.grad) for x in leaves)]


def _held(x: Tensor) -> tuple[Layout | None, Tensor]:
    return (x.layout_, x.to_local().detach().clone()) if isinstance(x, DTensor) else (None, x.detach().clone())


def _difference(sample: Sample, found: Found | str, expected: Found | str) -> str:
    if isinstance(found, str) or isinstance(expected, str):
        return "ok" if found == expected else f"{found} instead of {expected}"
    if len(found) != len(expected):
        return f"{len(found)} tensors instead of {len(expected)}"
    for number, (got, wanted) in enumerate(zip(found, expected, strict=True)):
        if got is None or wanted is None:
            if got is not wanted:
                return f"tensor {number}: {got} instead of {wanted}"
        elif got[0] is not wanted[0]:
            return f"tensor {number}: laid out as {got[0]} instead of {wanted[0]}"
        elif sample.valued and not _same(got[1], wanted[1], any(name in str(sample.op) for name in ROUNDED)):
            return f"tensor {number}: {got[1].flatten()[:4].tolist()} instead of {wanted[1].flatten()[:4].tolist()}"
    return "ok"


def _same(a: Tensor, b: Tensor, rounded: bool) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.is_sparse or not a.numel():
        return True
    if rounded:
        return torch.allclose(a, b, equal_nan=True)
    return bool(((a == b) | ((a != a) & (b != b))).all())  # noqa: PLR0124 - not a number


def tried(samples: Sequence[Sample], seed: int = 0) -> tuple[Counter[str], list[str]]:
    """How often each thing came of it, and what was wrong."""
    rng, tally, wrong = random.Random(seed), Counter[str](), []
    for number, sample in enumerate(samples):
        mesh = rng.choice(MESHES)
        for first, second in cases(sample, mesh, number):
            for verdict in set(world(mesh.size()).run(said, sample, first, second)):
                tally["wrong" if verdict not in ("ok", "refused", "not a case") else verdict] += 1
                if verdict not in ("ok", "refused", "not a case"):
                    wrong.append(f"{sample} of {[layout.placements for layout, _ in first]} on {mesh}: {verdict}")
    return tally, wrong


def main(arguments: Sequence[str] | None = None) -> int:
    from tools.rows import PLANS, prepare

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", default="", help="only keys whose names match this pattern")
    parser.add_argument("--part", nargs=2, type=int, default=(0, 1), metavar=("I", "N"), help="part I of N")
    options = parser.parse_args(arguments)
    with TemporaryDirectory() as notes:
        prepare(options.keys, False, Path(notes))
        part, parts = options.part
        tally, wrong = tried([check.sample for check in PLANS[0].checks][part::parts], part)
    print(*wrong, sep="\n")
    print(", ".join(f"{count} {kind}" for kind, count in tally.most_common()))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
