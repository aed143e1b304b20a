"""Capture calls of ops, replay them with other operands, and compare with the calls themselves.

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

from shardwise import Layout, Mesh, capture
from shardwise._tensor import DTensor
from shardwise.errors import CaptureError
from shardwise.testing import world
from shardwise.testing.local_shards import dtensor_from_full
from tools.op_judge import Sample, cotangent, tensors_in
from tools.rule_checks import layouts_for

MESHES = (Mesh((2,)), Mesh((3,)), Mesh((2, 2)))
# While they are traced, autograd uses another formula for these, whose last bits differ.
ROUNDED = ("prod", "cholesky")
State = list[tuple[Layout | None, Tensor] | None]  # layout and local tensor of results and gradients


def cases(sample: Sample, mesh: Mesh, seed: int, count: int = 2) -> Iterator[tuple[Sample, Sequence[Layout]]]:
    """The sample with its elements in reverse, to replay with, and layouts for both."""
    reversed_ = [x if x.is_sparse or not x.ndim else x.flip(list(range(x.ndim))) for x in sample.tensors()]
    for layouts in layouts_for(sample, mesh, count, seed):
        yield sample.on(reversed_), layouts


def outcome(sample: Sample, other: Sample, layouts: Sequence[Layout]) -> str:
    """What this rank sees of a capture of `sample` and a replay of `other`: "ok", "refused", or what differs."""

    def function(*tensors: Tensor) -> Any:
        return sample.call([tensors[0].clone(), *tensors[1:]] if sample.in_place else list(tensors))

    if isinstance(_state(function, sample, layouts), str):
        return "not a case"
    step = capture(function)
    try:
        traced = _state(step, sample, layouts)
        found = _state(step, other, layouts)
    except CaptureError:
        return "refused"
    if isinstance(traced, str):  # another rank is refused
        return f"{traced} in the trace"
    if len(graphs := step.graphs()) == 2:  # the function reads other values of `other`
        found = _state(step, other, layouts)
    if len(graphs) not in (1, 2) or len(step.graphs()) != len(graphs):
        return f"{len(step.graphs())} graphs"
    return _difference(sample, found, _state(function, other, layouts))


def _state(function: Callable[..., Any], sample: Sample, layouts: Sequence[Layout]) -> State | str:
    """Layouts and local tensors of results and of gradients; the kind of an error."""
    torch.default_generator.manual_seed(5)
    pairs = zip(sample.tensors(), layouts, strict=True)
    leaves = [sample.leaf(dtensor_from_full(x, layout), number) for number, (x, layout) in enumerate(pairs)]
    try:
        values = tensors_in(function(*leaves))
        graded = [x for x in values if x.requires_grad] if sample.gradients else []
        if graded:
            torch.autograd.backward(graded, list(map(cotangent, graded)))
    except CaptureError:
        raise
    except Exception as error:  # noqa: BLE001 - an op may refuse what it is given
        return type(error).__name__
    return [*map(_local, values), *(_local(x.grad) if x.is_leaf and x.grad is not None else None for x in leaves)]


def _local(x: Tensor) -> tuple[Layout | None, Tensor]:
    return (x.layout_, x.to_local().detach().clone()) if isinstance(x, DTensor) else (None, x.detach().clone())


def _difference(sample: Sample, found: State | str, expected: State | str) -> str:
    if isinstance(found, str) or isinstance(expected, str):
        return "ok" if found == expected else f"{found} instead of {expected}"
    if len(found) != len(expected):
        return f"{len(found)} tensors instead of {len(expected)}"
    for number, (got, wanted) in enumerate(zip(found, expected, strict=True)):
        if got is None or wanted is None:
            if got is not wanted:
                return f"tensor {number}: {got} instead of {wanted}"
        elif got[0] is not wanted[0]:
            return f"tensor {number}: layout {got[0]} instead of {wanted[0]}"
        elif sample.initialized and not _same(got[1], wanted[1], any(name in str(sample.op) for name in ROUNDED)):
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
    """How often each outcome was seen, and what was wrong."""
    rng, tally, wrong = random.Random(seed), Counter[str](), []
    for number, sample in enumerate(samples):
        mesh = rng.choice(MESHES)
        for other, layouts in cases(sample, mesh, number):
            for verdict in set(world(mesh.size()).run(outcome, sample, other, layouts)):
                tally["wrong" if verdict not in ("ok", "refused", "not a case") else verdict] += 1
                if verdict not in ("ok", "refused", "not a case"):
                    wrong.append(f"{sample} of {[layout.placements for layout in layouts]} on {mesh}: {verdict}")
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
