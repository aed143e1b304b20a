"""How far results and gradients on ranks are from float64, beside how far those of plain torch are.

    (10001, 10002, 10003).var() is 1: a rank that subtracts two squares gets 0 or 2 in float32

Inputs are those of torch's own tests, and the same at scales at which sums cancel, overflow or vanish.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from shardwise.testing.local_shards import SEED
from tools.op_judge import Layouts, Observed, OpJudge, Outcome, Sample, Verdict, plain_run
from tools.opinfo import Case, calls_of, layouts_of

FACTOR = 4.0  # how much farther from float64 than plain torch a result may be
PARTIAL_SIZE = 3.0  # of the local values of a Partial operand, beside the operand
FLOOR_ULPS = 2.0  # of the largest element: torch's own error counts as at least that
NEIGHBOURS = 3  # inputs an ulp away at which torch's error is measured too: at one of them it is often 0 by chance
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FAMILIES = ("one", "sizes", "partial", "grid")


def _alternating(x: Tensor) -> Tensor:
    return (x + 1e4) * (1 - 2 * (torch.arange(x.numel()).view(x.shape) % 2))


SCALES = {
    "as they are": lambda x: x,
    "beside 1e4": lambda x: x + 1e4,
    "of 1e-30": lambda x: x * 1e-30,
    "of 1e30": lambda x: x * 1e30,
    "of alternating signs beside 1e4": _alternating,
}


# ---- cases -------------------------------------------------------------------------------------------------------


def scaled_cases_of(name: str, samples: int, families: Sequence[str]) -> Iterator[Case]:
    """The float calls of an op: at all scales in float32, as they are in shorter dtypes."""
    calls = [(number, call) for _, number, call in calls_of(name, samples, ("function",)) if _is_float(call)]
    for dtype in DTYPES:
        for scale, change in SCALES.items() if dtype == torch.float32 else islice(SCALES.items(), 1):
            for number, call in calls:
                changed = [change(x.detach()).to(dtype) if x.is_floating_point() else x for x in call.tensors()]
                variant = f"{str(dtype).removeprefix('torch.')} {scale}"
                # Local values of Partial operands are larger than these: at other scales their digits are lost before.
                wanted = [f for f in families if f != "partial" or scale == "as they are"]
                for label, layouts in layouts_of(changed, wanted).items():
                    yield Case(name, variant, number, label, call.on(changed), layouts)


def _is_float(call: Sample) -> bool:
    tensors = call.tensors()
    return any(x.is_floating_point() for x in tensors) and all(x.layout == torch.strided for x in tensors)


def in_double(sample: Sample) -> Sample:
    """The same call in float64."""

    def wide(a: object) -> object:
        return torch.float64 if a in DTYPES else a

    wider = sample.on([x.detach().double() if x.is_floating_point() else x for x in sample.tensors()])
    args = tuple(wide(a) if isinstance(a, torch.dtype) else a for a in wider.args)
    return replace(wider, args=args, kwargs={k: wide(a) if k == "dtype" else a for k, a in wider.kwargs.items()})


def neighbour(sample: Sample, generator: torch.Generator) -> Sample:
    """The same call with each element of its float tensors moved by an ulp, up or down."""

    def moved(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        signs = torch.randint(0, 2, x.shape, generator=generator) * 2 - 1
        return (x.detach().double() * (1 + signs * torch.finfo(x.dtype).eps)).to(x.dtype)

    return sample.on([moved(x) for x in sample.tensors()])


# ---- judging -----------------------------------------------------------------------------------------------------


class AccuracyJudge(OpJudge):
    """Compares the errors of ranks with those of one process, both against one process in float64."""

    def __init__(self, sample: Sample, timeout: float = 20.0) -> None:
        super().__init__(sample, timeout)
        generator = torch.Generator().manual_seed(SEED)
        calls = [sample, *(neighbour(sample, generator) for _ in range(NEIGHBOURS))]
        self.exact = [plain_run(in_double(call)) for call in calls]
        self.torchs = [self.plain, *map(plain_run, calls[1:])]

    def verdict(self, layouts: Layouts, size: int = 4) -> Verdict:
        if self.is_random or not self.sample.initialized or any(x.error for x in (*self.exact, *self.torchs)):
            return Verdict(Outcome.RIGHT, "not compared")
        return super().verdict(layouts, size)

    def _judged(self, ranks: Sequence[Observed], layouts: Layouts) -> tuple[Outcome, str]:
        if any(seen.error for seen in ranks):
            return super()._judged(ranks, layouts)
        ratio, text = max(map(self.ratio, ranks))
        partial = any(layout is not None and layout.partial_axes for layout in layouts)
        if ratio <= FACTOR * (PARTIAL_SIZE if partial else 1):
            return Outcome.RIGHT, ""
        return Outcome.WRONG_GRADIENT if text.startswith("gradient") else Outcome.WRONG_VALUE, text

    def ratio(self, seen: Observed) -> tuple[float, str]:
        """The largest ratio of a rank's errors to those of one process, and where it is."""
        found = [(0.0, "")]
        named = [list(_named_results(run)) for run in (seen, *self.torchs, *self.exact)]
        if len({len(results) for results in named}) > 1:
            return found[0]
        for number, results in enumerate(zip(*named, strict=True)):
            (what, ours), *others = results
            if not all(isinstance(x, Tensor) for _, x in results) or not others[0][1].is_floating_point():
                continue
            torchs, exact = ([x for _, x in part] for part in (others[: len(self.torchs)], others[len(self.torchs) :]))
            ratio, error, own = error_ratio(ours, torchs, exact)
            found.append((ratio, f"{what} {number}: {ratio:.3g} times torch's error ({error:.2g}, torch {own:.2g})"))
        return max(found)


def _named_results(run: Observed) -> Iterator[tuple[str, Any]]:
    yield from (("result", x) for x in run.values)
    yield from (("gradient", x) for x in run.grads or [])


def error_ratio(ours: Tensor, torchs: Sequence[Tensor], exact: Sequence[Tensor]) -> tuple[float, float, float]:
    """The error of `ours` in that of plain torch, and both; 0 where torch itself has no digit right.

    Args:
        torchs, exact: at this input and at its neighbours.
    """
    error, size = largest_error(ours, torchs[0], exact[0])
    own = max(largest_error(a, a, b)[0] for a, b in zip(torchs, exact, strict=True))
    if own > size / 2:
        return 0.0, error, own
    info = torch.finfo(torchs[0].dtype)
    own = max(own, FLOOR_ULPS * info.eps * size, info.tiny)
    return error / own, error, own


def largest_error(x: Tensor, torchs: Tensor, exact: Tensor) -> tuple[float, float]:
    """The largest error of `x`, and the largest element, where torch's result is finite."""
    x, torchs, exact = (t.detach().to_dense() if t.layout != torch.strided else t.detach() for t in (x, torchs, exact))
    if x.shape != exact.shape or torchs.shape != exact.shape:
        return 0.0, 0.0
    counts = torchs.isfinite() & exact.isfinite()
    if not counts.any():
        return 0.0, 0.0
    wanted = exact[counts].double()
    error = (x[counts].double() - wanted).abs().nan_to_num(nan=torch.inf, posinf=torch.inf).max().item()
    return error, wanted.abs().max().item()
