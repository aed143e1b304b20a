"""Samples written in this folder: values and gradients in many layouts, what results say of themselves, and dtypes."""

from collections.abc import Callable
from typing import Any
from zlib import crc32

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise import Mesh, Placement, Replicate, Shard, distribute_tensor
from shardwise._rules.registry import rule_of
from shardwise._rules.row import Meta
from shardwise.errors import RuleError
from shardwise.testing import world
from tools.op_judge import Sample, contiguous_copy
from tools.rows import written
from tools.rule_checks import assert_equals_one_process

MESH = Mesh((2,))
LINES = (Mesh((1,)), MESH, Mesh((4,)))
DTYPES = (torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool)
OTHERWISE = {
    torch.dropout: "with train=False, an alias instead of the operand itself; F.dropout returns the operand",
}
OTHER_STRIDES = {
    torch.linalg.svd: "row-major on the meta device; column-major on others",
}
Facts = dict[str, object]


def samples(count: int) -> list[Sample]:
    """So many of each function that has a rule."""
    by_op: dict[Any, list[Sample]] = {}
    for sample in written():
        dense = all(x.layout == torch.strided for x in sample.tensors())
        if isinstance(sample.op, torch._ops.OpOverload) or sample.op in OTHERWISE:  # users call functions
            continue
        if sample.tensors() and dense and rule_of(sample.op) is not None:
            by_op.setdefault(sample.op, []).append(sample)
    return [sample for found in by_op.values() for sample in found[:count]]


def facts(x: object) -> Facts:
    if not isinstance(x, Tensor):
        return {"type": type(x).__name__}
    return {
        "shape": tuple(x.shape),
        "numel": x.numel(),
        "dtype": x.dtype,
        "layout": x.layout,
        "device": x.device.type,
        "requires_grad": x.requires_grad,
        "is_leaf": x.is_leaf,
        "has grad_fn": x.grad_fn is not None,
        "is_conj": x.is_conj(),
        "is_neg": x.is_neg(),
        "is_inference": x.is_inference(),
        "itemsize": x.element_size(),
        "strides": [stride for stride, n in zip(x.stride(), x.shape, strict=True) if n > 1] if x.numel() else [],
        "is_contiguous": x.is_contiguous(),
        **({} if one_of_several(x) else {"autograd lets it change in place": True}),
    }


def one_of_several(x: Tensor) -> bool:
    """Whether autograd refuses to change `x` in place because it was made together with others."""
    with torch._C.DisableTorchFunctionSubclass():
        if not x._is_view():
            return False
        return bool(torch._C._autograd._get_creation_meta(x) == torch._C._autograd.CreationMeta.MULTI_OUTPUT_NODE)


def observed(sample: Sample, gradients: bool, make: Callable[[Tensor], Tensor]) -> list[Facts]:
    """What the results of a call say, and how often each operand was changed."""
    leaves = [make(contiguous_copy(x)) for x in sample.tensors()]
    if gradients:
        leaves = [sample.leaf(x, i) for i, x in enumerate(leaves)]
    if sample.in_place:
        leaves[0] = leaves[0].clone()
    before = [x._version for x in leaves]
    flat = pytree.tree_leaves(sample.call(leaves))
    same: list[Facts] = [{"is operand": [x is y for y in leaves]} for x in flat if sample.in_place]
    said = [facts(x) | ({"strides": "", "is_contiguous": ""} if sample.op in OTHER_STRIDES else {}) for x in flat]
    return [*said, *same, {"changed": [x._version - n for x, n in zip(leaves, before, strict=True)]}]


def differences(sample: Sample, gradients: bool, placement: Placement) -> list[str]:
    try:
        want = observed(sample, gradients, lambda x: x)
    except (RuntimeError, TypeError, ValueError, IndexError):  # torch refuses the sample with these gradients
        return []

    def on_rank() -> list[Facts]:
        def make(x: Tensor) -> Tensor:
            return distribute_tensor(x, MESH, [placement if x.ndim else Replicate()])

        try:
            return observed(sample, gradients, make)
        except RuleError:  # such as a write to a view that is a copy
            return want

    return [
        f"{sample} as {placement}, gradients {gradients}: {key} is {got.get(key)}, expected {value}"
        for by_rank in world(2).run(on_rank)
        for got, expected in zip(by_rank, want, strict=True)
        for key, value in expected.items()
        if got.get(key) != value
    ]


def check(count: int, placement: Placement, gradients: bool) -> None:
    found = samples(count)
    assert len({sample.op for sample in found}) > 100
    assert [line for sample in found for line in differences(sample, gradients, placement)] == []


@pytest.mark.filterwarnings("ignore:non-inplace resize")
def test_results_say_what_they_say_in_one_process() -> None:
    check(1, Shard(0), True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:non-inplace resize")
@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
@pytest.mark.parametrize("gradients", [True, False])
def test_results_of_more_calls_say_what_they_say_in_one_process(placement: Placement, gradients: bool) -> None:
    check(2, placement, gradients)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")  # torch's word on a rank without elements
@pytest.mark.filterwarnings("ignore:Using padding='same'")  # about memory
@pytest.mark.parametrize("sample", list(written("test_*.py")), ids=str)
def test_a_sample_equals_one_process(sample: Sample) -> None:
    """On 3 and 5 ranks, on a 2 x 2 mesh, and on one of 1, 2 and 4 ranks, which its text chooses."""
    meshes = Mesh((3,)), Mesh((5,)), Mesh((2, 2)), LINES[crc32(str(sample).encode()) % len(LINES)]
    tally = assert_equals_one_process([sample], meshes, limit=6)
    assert tally.cases > tally.refused
    assert sample.in_place or not tally.refused


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
    try:
        sample.call([x.to(dtype) if i == changed else x.clone() for i, x in enumerate(sample.tensors())])
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False
    return True


def test_rows_depend_on_dtypes_only_where_the_rule_says_so() -> None:
    """Otherwise the rows found for the first dtype would serve all others."""
    found: dict[str, Any] = {}
    for sample in written():
        rule = rule_of(sample.op)
        if rule is None or not rule.has_rule or rule.typed or rule.random:
            continue
        for changed, x in enumerate(sample.tensors()):
            own = rows_of(sample, changed, x.dtype)
            for dtype in DTYPES if x.layout == torch.strided else ():
                if rows_of(sample, changed, dtype) != own and is_accepted(sample, changed, dtype):
                    found[f"{sample}"] = (changed, dtype)
    assert not found, "\n".join(f"{k}: {v}" for k, v in found.items())
