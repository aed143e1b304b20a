"""A rule whose rows depend on a dtype says so: otherwise the rows found for the first dtype would serve all others."""

from typing import Any

import torch

from shardwise import Replicate
from shardwise._rules.registry import rule_of
from shardwise._rules.row import Meta
from shardwise.errors import RuleError
from tools.op_judge import Sample
from tools.rows import written

DTYPES = (torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool)


def rows_of(sample: Sample, changed: int, dtype: torch.dtype) -> object:
    """The rows if tensor number `changed` has another dtype; what raises is refused or decomposed for any."""
    rule = rule_of(sample.op)
    assert rule is not None
    metas = [
        Meta(tuple(x.shape), dtype if i == changed else x.dtype, Replicate()) for i, x in enumerate(sample.tensors())
    ]
    call = sample.on(metas)
    try:
        return [(row.inputs, row.output, row.local_impl is None) for row in rule.rows(*call.args, **call.kwargs)]
    except (NotImplementedError, RuleError, TypeError):
        return "no rows"


def is_accepted(sample: Sample, changed: int, dtype: torch.dtype) -> bool:
    """Whether torch takes it."""
    tensors = [x.to(dtype) if i == changed else x for i, x in enumerate(sample.tensors())]
    try:
        sample.call([x.clone() for x in tensors])
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False
    return True


def test_rows_depend_on_dtypes_only_where_the_rule_says_so() -> None:
    found: dict[str, Any] = {}
    for sample in written():
        rule = rule_of(sample.op)
        if rule is None or not rule.has_rule or rule.typed or rule.random:
            continue
        for changed, x in enumerate(sample.tensors()):
            if x.layout != torch.strided:
                continue
            own = rows_of(sample, changed, x.dtype)
            for dtype in DTYPES:
                if rows_of(sample, changed, dtype) != own and is_accepted(sample, changed, dtype):
                    found[f"{sample}"] = (changed, dtype)
    assert not found, "\n".join(f"{k}: {v}" for k, v in found.items())
