"""Calls of every op that torch lists for its own tests, and the layouts to judge them under.

The list is torch's `op_db`. It is internal to torch, so its names may move with the version, and importing it takes
seconds, needs `expecttest` and turns off the global flags of `torch.backends`: do it in a process of its own.
"""

import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise._layout import REPLICATE, Mesh, Partial, Placement, Shard
from shardwise.testing.local_shards import SEED
from tools.op_judge import Layouts, OpJudge, Sample, Verdict, layout_of

FAMILIES = ("replicated", "one", "all", "sizes", "empty", "partial", "grid", "nested")
SHORT_FAMILIES = ("all", "sizes", "partial")  # for a method, which mostly shares its function's rule
LINE, SQUARE = Mesh((4,)), Mesh((2, 2))
DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64)
ROUGH = frozenset({"logcumsumexp"})  # gradients of which torch itself rounds to three digits in float32
LARGEST = 20_000  # elements of an operand; larger samples are taken only where an op has no others
MAX_ONE = 10  # layouts that shard one operand along one dim

# What these return is memory that nobody wrote.
UNWRITTEN = frozenset(
    "empty empty_like empty_permuted empty_strided new_empty new_empty_strided resize_ resize_as_".split()
)
UNORDERED = frozenset(["topk"])  # torch leaves open which of equal elements they name


@dataclass(frozen=True)
class Case:
    """One call under one combination of layouts."""

    op: str
    variant: str  # "function", "method" or "in place"
    sample: int
    label: str
    call: Sample
    layouts: Layouts

    def __str__(self) -> str:
        return f"{self.op} as {self.variant}, sample {self.sample} ({self.call.arguments}), {self.label}"


# ---- ops and samples -------------------------------------------------------------------------------------------


@cache
def operators() -> dict[str, Any]:
    """Torch's descriptions of ops, by name and variant of the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return {op.formatted_name: op for op in op_db}


def elementwise_names() -> set[str]:
    """The ops that torch describes as elementwise functions of one or two operands."""
    from torch.testing._internal.opinfo.core import BinaryUfuncInfo, UnaryUfuncInfo

    return {name for name, op in operators().items() if isinstance(op, BinaryUfuncInfo | UnaryUfuncInfo)}


def dtypes_of(op: Any, device: str) -> list[torch.dtype]:
    """The dtype to try an op with, then integers and truth values where it takes them; [] without any on the device."""
    supported = op.supported_dtypes(device)
    first = [dtype for dtype in DTYPES[op.name in ROUGH :] if dtype in supported][:1]
    return first + [dtype for dtype in (torch.int64, torch.bool) if dtype in supported and dtype not in first]


def samples_of(op: Any, count: int, device: str) -> list[Any]:
    """`count` samples of the first dtype, and one of each other."""
    return [
        sample
        for number, dtype in enumerate(dtypes_of(op, device))
        for sample in _chosen(op, dtype, 1 if number else count, device)
    ]


def _chosen(op: Any, dtype: torch.dtype, count: int, device: str) -> list[Any]:
    """Samples that show the most kinds of arguments, in torch's order where they show as many."""
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)  # noqa: NPY002 - what torch's samples draw from
    differentiable = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    left = list(op.sample_inputs(device, dtype, requires_grad=differentiable))
    left = [s for s in left if _largest(s) <= LARGEST] or left
    with_dims = [s for s in left if any(x.ndim and x.numel() for x in _tensors(s))]
    left = with_dims or [s for s in left if _tensors(s)]
    chosen: list[Any] = []
    shown: set[object] = set()
    while left and len(chosen) < count:
        best = max(left, key=lambda s: len(_features(s) - shown))
        left = [s for s in left if s is not best]
        shown |= _features(best)
        chosen.append(best)
    return chosen


def _tensors(sample: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return [x for x in leaves if isinstance(x, Tensor)]


def _largest(sample: Any) -> int:
    return max((x.numel() for x in _tensors(sample)), default=0)


def _features(sample: Any) -> set[object]:
    """What makes a sample different: ndims and dtypes of its tensors, names and values of its other arguments."""
    found: set[object] = set()
    for name, a in [("input", sample.input), *enumerate(sample.args), *sample.kwargs.items()]:
        for x in pytree.tree_leaves(a):
            found.add((name, x.ndim, x.dtype) if isinstance(x, Tensor) else (name, repr(x)))
    return found


def calls_of(name: str, count: int, variants: Sequence[str], device: str = "cpu") -> Iterator[tuple[str, int, Sample]]:
    """Variant, number of the sample, and call."""
    op = operators()[name]
    functions = {"function": op.op, "method": op.get_method(), "in place": op.get_inplace()}
    if functions["method"] is op.op:
        functions["method"] = None
    for number, sample in enumerate(samples_of(op, count, device)):
        call = Sample(
            op.op,
            (sample.input, *sample.args),
            sample.kwargs,
            constant=tuple(i for i, x in enumerate(_tensors(sample)) if not x.requires_grad),
            initialized=op.name not in UNWRITTEN,
            differentiated=sample.output_process_fn_grad,
        )
        for variant in variants:
            if functions[variant] is None or (variant != "function" and not isinstance(sample.input, Tensor)):
                continue
            if variant == "in place" and sample.broadcasts_input:
                continue
            function = functions[variant]
            if op.name in UNORDERED:
                function = _up_to_ties(function)
            yield variant, number, replace(call, op=function, mutates=variant == "in place")


def _up_to_ties(function: Callable[..., Any]) -> Callable[..., Any]:
    """The op with the elements at its indices instead of the indices: of equal elements it may return any."""

    def call(input: Tensor, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> Any:
        values, indices = function(input, k, dim, *args, **kwargs)
        if not indices.ndim:
            return values, indices
        different = indices.sort(dim).values.diff(dim=dim).ne(0).all()
        return values, input.detach().gather(dim, indices), different, indices.dtype

    return call


# ---- layouts ---------------------------------------------------------------------------------------------------

Choose = Callable[[Tensor], Sequence[Placement]]


def uneven_sizes(length: int) -> tuple[int, int, int, int]:
    """One element, three, none, and the rest; shorter where there are not as many."""
    first = min(1, length)
    second = min(3, length - first)
    return first, second, 0, length - first - second


def layouts_of(tensors: Sequence[Tensor], families: Sequence[str]) -> dict[str, Layouts]:
    """Combinations of layouts of the operands on four ranks, by a name that says what is sharded."""
    found: dict[str, Layouts] = {}
    for family in families:
        for label, layouts in _OF_FAMILY[family](tensors):
            if layouts not in found.values():
                found[label] = layouts
    return found


Labelled = Iterator[tuple[str, Layouts]]


def _with(tensors: Sequence[Tensor], mesh: Mesh, choose: Choose) -> Layouts:
    return tuple(layout_of(x, mesh, choose(x)) for x in tensors)


def _only(tensors: Sequence[Tensor], chosen: int, mesh: Mesh, placements: Sequence[Placement]) -> Layouts:
    """One operand with `placements`, the others replicated."""
    replicated = [REPLICATE] * mesh.ndim
    return tuple(layout_of(x, mesh, placements if i == chosen else replicated) for i, x in enumerate(tensors))


def _replicated(tensors: Sequence[Tensor]) -> Labelled:
    yield "all replicated", _with(tensors, LINE, lambda x: [REPLICATE])


def _one(tensors: Sequence[Tensor]) -> Labelled:
    """Each operand sharded along each dim as by torch.chunk: even, uneven or with empty shards, as sizes fall."""
    dims = [(i, dim) for i, x in enumerate(tensors) for dim in range(x.ndim)]
    for i, dim in dims[:: -(-len(dims) // MAX_ONE)] if dims else ():
        yield f"operand {i} Shard({dim})", _only(tensors, i, LINE, [Shard(dim)])


def _all(tensors: Sequence[Tensor]) -> Labelled:
    yield "all Shard(0)", _with(tensors, LINE, lambda x: [Shard(0) if x.ndim else REPLICATE])


def _sizes(tensors: Sequence[Tensor]) -> Labelled:
    def shard(x: Tensor, dim: int) -> list[Placement]:
        return [Shard(dim, uneven_sizes(x.shape[dim])) if x.ndim else REPLICATE]

    yield "all Shard(0, 1+3+0+rest)", _with(tensors, LINE, lambda x: shard(x, 0))
    yield "all Shard(-1, 1+3+0+rest)", _with(tensors, LINE, lambda x: shard(x, -1))


def _empty(tensors: Sequence[Tensor]) -> Labelled:
    def shard(x: Tensor) -> list[Placement]:
        return [Shard(0, (0, x.shape[0], 0, 0)) if x.ndim else REPLICATE]

    yield "all Shard(0, 0+all+0+0)", _with(tensors, LINE, shard)


def _partial(tensors: Sequence[Tensor]) -> Labelled:
    i = next((i for i, x in enumerate(tensors) if x.is_floating_point() or x.is_complex()), None)
    if i is None:
        return
    yield f"operand {i} Partial(sum)", _only(tensors, i, LINE, [Partial()])
    if tensors[i].ndim:
        yield f"operand {i} Partial(sum), Shard(0) on 2x2", _only(tensors, i, SQUARE, [Partial(), Shard(0)])


def _grid(tensors: Sequence[Tensor]) -> Labelled:
    def shard(x: Tensor) -> list[Placement]:
        return [Shard(dim) if dim < x.ndim else REPLICATE for dim in (0, 1)]

    yield "all Shard(0), Shard(1) on 2x2", _with(tensors, SQUARE, shard)


def _nested(tensors: Sequence[Tensor]) -> Labelled:
    yield "all Shard(0), Shard(0) on 2x2", _with(tensors, SQUARE, lambda x: [Shard(0) if x.ndim else REPLICATE] * 2)


_OF_FAMILY: dict[str, Callable[[Sequence[Tensor]], Labelled]] = dict(
    zip(FAMILIES, (_replicated, _one, _all, _sizes, _empty, _partial, _grid, _nested), strict=True)
)


# ---- cases -----------------------------------------------------------------------------------------------------


def cases_of(name: str, samples: int, families: Sequence[str] = FAMILIES, device: str = "cpu") -> Iterator[Case]:
    """Every case of an op; none where no sample has a tensor to lay out. The same in every process."""
    for variant, number, call in calls_of(name, samples, ("function", "method", "in place"), device):
        wanted = [f for f in families if variant != "method" or f in SHORT_FAMILIES]
        if not any(x.layout == torch.strided for x in call.tensors()):
            continue
        for label, layouts in layouts_of(call.tensors(), wanted).items():
            yield Case(name, variant, number, label, call, layouts)


def few_cases_of(name: str, device: str = "cpu") -> Iterator[Case]:
    """What represents an op: its first sample, out of place and in place, with unevenly sharded dim 0."""
    seen: set[str] = set()
    for case in cases_of(name, 1, ("sizes",), device):
        if case.variant != "method" and case.variant not in seen:
            seen.add(case.variant)
            yield case


def judged(
    cases: Iterable[Case], start: int = 0, judge_of: Callable[[Sample], OpJudge] = OpJudge
) -> Iterator[tuple[int, Case, Callable[[], Verdict]]]:
    """Cases from number `start` on, each with what judges it; the plain call is made once for all layouts."""
    judge: OpJudge | None = None
    for number, case in enumerate(cases):
        if number < start:
            continue

        def verdict(case: Case = case) -> Verdict:
            nonlocal judge
            if judge is None or judge.sample is not case.call:
                judge = judge_of(case.call)
            return judge.verdict(case.layouts)

        yield number, case, verdict
