"""No result or gradient on ranks is much farther from float64 than that of plain torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise._layout import Shard
from tools.accuracy import FACTOR, SCALES, AccuracyJudge, error_ratio
from tools.op_judge import Outcome, Sample, layout_of
from tools.opinfo import LINE, SQUARE

GENERATOR = torch.Generator().manual_seed(3)
WIDE, LONG, IMAGES = (torch.randn(shape, generator=GENERATOR) for shape in ((6, 50), (20_000,), (5, 6, 7)))
PIXELS = torch.randn((2, 8, 8, 8), generator=GENERATOR)
CLASSES = torch.arange(6) * 7
ALL, OFFSET = tuple(SCALES), ("as they are", "beside 1e4")
Function = Callable[[Tensor], Any]
CALLS: dict[str, tuple[Function, Tensor, tuple[str, ...]]] = {
    "mean": (lambda x: x.mean(-1), WIDE, ALL),
    "var": (lambda x: x.var(-1), WIDE, ALL),
    "std": (lambda x: x.std(-1), WIDE, ALL),
    "norm": (lambda x: torch.linalg.vector_norm(x, 2, -1), WIDE, ALL),
    "cumprod": (lambda x: x[..., :40].cumprod(-1), WIDE, ALL),
    "logcumsumexp": (lambda x: x.logcumsumexp(-1), WIDE, OFFSET),
    "logsumexp": (lambda x: x.logsumexp(-1), WIDE, ALL),
    "softmax": (lambda x: x.softmax(-1), WIDE, ALL),
    "cross_entropy": (lambda x: F.cross_entropy(x, CLASSES), WIDE, ALL),
    "cross_entropy, smoothed": (lambda x: F.cross_entropy(x, CLASSES, label_smoothing=0.1), WIDE, OFFSET),
    "layer_norm": (lambda x: F.layer_norm(x, x.shape[-1:]), WIDE, ALL),
    "rms_norm": (lambda x: F.rms_norm(x, x.shape[-1:]), WIDE, OFFSET),
    "cosine_similarity": (lambda x: F.cosine_similarity(x[:3], x[3:], -1), WIDE, OFFSET),
    "cdist": (lambda x: torch.cdist(x[:3], x[3:]), WIDE, OFFSET),
    "centred": (lambda x: x - x.mean(-1, keepdim=True), WIDE, OFFSET),
    "cov": (torch.cov, WIDE, OFFSET),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), IMAGES, OFFSET),
    "group_norm": (lambda x: F.group_norm(x, 2), IMAGES, OFFSET),
    "pooled over unequal bins": (lambda x: F.adaptive_avg_pool2d(x, (5, 7)), PIXELS, ALL),
    "long sum": (lambda x: x.sum(), LONG, ALL),
    "long var": (lambda x: x.var(), LONG, ALL),
    "long cumsum": (lambda x: x.cumsum(-1), LONG, ALL),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scale"), [(name, scale) for name, (*_, scales) in CALLS.items() for scale in scales])
def test_ranks_are_as_close_to_float64_as_plain_torch(name: str, scale: str) -> None:
    function, values, _ = CALLS[name]
    x = SCALES[scale](values)
    judge, last = AccuracyJudge(Sample(function, (x,))), x.ndim - 1
    uneven = Shard(last, (1, 3, 0, x.shape[last] - 4))
    for mesh, placements in ((LINE, [uneven]), (SQUARE, [Shard(0), Shard(last)])):
        found = judge.verdict([layout_of(x, mesh, placements)])
        assert found.outcome is Outcome.RIGHT, (placements, found.message)


def test_an_error_counts_in_that_of_torch_and_in_at_least_two_ulps() -> None:
    exact = torch.tensor([1.0, 3.0], dtype=torch.float64)
    torchs, ulp = exact.float(), torch.finfo(torch.float32).eps
    off = torchs + torch.tensor([0.0, 2 * ulp])
    assert error_ratio(torchs, [torchs], [exact])[0] == 0
    assert error_ratio(off, [torchs], [exact])[0] == pytest.approx(2 / (2 * 3))
    assert error_ratio(torchs + 1e-3, [torchs], [exact])[0] > FACTOR
    assert error_ratio(torchs / 0, [torchs], [exact])[0] == torch.inf


def test_elements_that_torch_gets_wrong_or_infinite_do_not_count() -> None:
    exact = torch.tensor([1.0, 1e60], dtype=torch.float64)
    assert error_ratio(torch.tensor([1.0, 0.0]), [exact.float()], [exact])[0] == 0
    assert error_ratio(torch.tensor([9.0]), [torch.tensor([0.0])], [exact[:1]])[0] == 0
