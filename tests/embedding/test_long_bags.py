"""Sums of bags of which some are long, as GPUs add up the gradients of frequent rows."""

import pytest
import torch
import torch.nn.functional as F

from shardwise.embedding.kernels.plain import LEVELS, MOST_AT_ONCE, _long_bags

LENGTHS = {
    "one": [1],
    "short": [1, 5, 2],
    "to a part": [MOST_AT_ONCE - 1, MOST_AT_ONCE, MOST_AT_ONCE + 1],
    "of parts of parts": [3, MOST_AT_ONCE**2 - 1, 1, MOST_AT_ONCE**2, MOST_AT_ONCE**2 + 1],
    "several levels": [MOST_AT_ONCE**3 + 1, 1],
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_are_those_of_index_add(lengths: list[int], dtype: torch.dtype, weighted: bool) -> None:
    total = sum(lengths)
    weight = torch.randint(-9, 9, (50, 3)).double()  # integers: every order of additions has the same sum
    rows = torch.randint(0, 50, (total,), dtype=dtype)
    offsets = F.pad(torch.tensor(lengths, dtype=dtype).cumsum(0, dtype=dtype), (1, 0))
    scale = torch.randint(-3, 3, (total,)).double() if weighted else None
    bags = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    of_ids = weight[rows.long()] if scale is None else weight[rows.long()] * scale[:, None]
    expected = torch.zeros(len(lengths), 3).double().index_add_(0, bags, of_ids)
    assert torch.equal(_long_bags(weight, rows, offsets, scale), expected)


def test_there_are_levels_for_any_batch() -> None:
    assert MOST_AT_ONCE**LEVELS > 1 << 23
