"""Strides of the global tensor: which reshapes are views is the same as in one process, on every rank."""

from collections.abc import Callable
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from shardwise import Boxes, DTensor, Mesh, OnRanks, Partial, Placement, Replicate, Shard, distribute_tensor, rank
from shardwise._layout import Box, Layout
from shardwise.errors import LayoutError, RuleError
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from shardwise.testing.local_shards import dtensor_from_full

Step = Callable[[Any], Any]
VALUES = torch.arange(1.0, 25).view(4, 3, 2)
CHANGES: dict[str, Step] = {  # of a 3-D tensor, into one
    "transpose(0, 1)": lambda x: x.transpose(0, 1),
    "transpose(1, 2)": lambda x: x.transpose(1, 2),
    "permute(2, 0, 1)": lambda x: x.permute(2, 0, 1),
    "[:, 1:]": lambda x: x[:, 1:],
    "[:1]": lambda x: x[:1],
    "[::2]": lambda x: x[::2],
    "narrow(2, 0, 1)": lambda x: x.narrow(2, 0, 1),
    "[None, 0]": lambda x: x[None, 0],
    "flatten, unflatten": lambda x: x.reshape(-1, 1, 1),
    "* 2": lambda x: x * 2,
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.contiguous(),
    "detach": lambda x: x.detach(),
    "sum(0)": lambda x: x.sum(0, keepdim=True),
    "expand": lambda x: x[:1].expand(2, *x.shape[1:]),
    "cat": lambda x: torch.cat([x, x], 1),
    "empty_like": lambda x: torch.zeros_like(x) + x,
    "conversion": lambda x: x.double(),
}
LAST: dict[str, Step] = {
    "nothing": lambda x: x,
    "view(-1)": lambda x: x.view(-1),
    "reshape(-1)": lambda x: x.reshape(-1),
    "flatten(1)": lambda x: x.flatten(1),
    "ravel": lambda x: x.ravel(),
    "contiguous": lambda x: x.contiguous(),
    "view of last dims": lambda x: x.view(x.shape[0], -1),
    "channels_last": lambda x: x[None].contiguous(memory_format=torch.channels_last),
}
LAYOUTS: list[tuple[tuple[int, ...], list[Placement]]] = [
    ((3,), [Shard(0)]),
    ((2,), [Shard(1)]),
    ((4,), [Shard(0, [0, 3, 1, 0])]),
    ((2,), [Shard(2)]),
    ((2,), [Replicate()]),
    ((3,), [OnRanks(1)]),
    ((2,), [Partial()]),
    ((2, 2), [Shard(0), Shard(1)]),
]


def outcome(x: Any, chain: list[Step], last: Step) -> tuple[object, ...]:
    """Strides of the result, and what an in-place change of it changes in the original; or the error."""
    x = x.clone()
    out = x
    for step in chain:
        out = step(out)
    try:
        out = last(out)
    except RuntimeError as error:
        return (str(error).splitlines()[0],)
    seen = [n for n, size in zip(out.stride(), out.shape, strict=True) if size > 1]
    try:
        out.add_(1)
        changed: object = (x.full_tensor() if isinstance(x, DTensor) else x).tolist() or "on other ranks"
    except RuntimeError as error:  # RuleError among them
        changed = "refused" if isinstance(error, RuleError) else str(error)
    return tuple(out.shape), seen, out.is_contiguous(), changed


def chains(count: int) -> list[list[str]]:
    random = Random(0)
    return [random.choices(list(CHANGES), k=random.randint(1, 4)) for _ in range(count)]


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("mesh", "placements"), LAYOUTS, ids=str)
def test_views_copies_and_strides_are_those_of_one_process(
    mesh: tuple[int, ...], placements: list[Placement], every: int
) -> None:
    """Also on a rank outside the mesh."""
    cases = list(product(chains(40), LAST))[::every]

    def body() -> list[tuple[object, ...]]:
        x = distribute_tensor(VALUES, Mesh(mesh), placements)
        return [outcome(x, [CHANGES[name] for name in names], LAST[last]) for names, last in cases]

    by_rank = world(Mesh(mesh).size() + 1).run(body)
    for (names, last), *gots in zip(cases, *by_rank, strict=True):
        want = outcome(VALUES, [CHANGES[name] for name in names], LAST[last])
        if gots[0][-1] == "refused":  # a view that needed a redistribution, or torch's error
            want = (*want[:-1], "refused")
        assert gots[:-1] == [want] * Mesh(mesh).size(), (names, last)
        if gots[-1][-1] == "on other ranks":  # which hold the original
            gots[-1] = (*gots[-1][:-1], want[-1])
        assert gots[-1] == want, (names, last, "outside the mesh")


PARTIAL_AND_SHARDED: list[list[Placement]] = [
    [Partial(), Shard(1)],
    [Shard(1), Partial()],
    [Partial("avg"), Shard(1, [0, 3])],
    [Partial("max"), Shard(2)],
    [Partial(), Shard(0)],
]


@pytest.mark.parametrize("placements", PARTIAL_AND_SHARDED, ids=str)
@pytest.mark.parametrize("shape", [(-1,), (6, 4), (3, 8), (4, 2, 3)])
def test_a_reshape_that_copies_mixes_no_partial_values_of_several_ranks(
    placements: list[Placement], shape: tuple[int, ...]
) -> None:
    def body() -> tuple[Tensor, Tensor]:
        x: Any = dtensor_from_full(VALUES, Layout(Mesh((2, 2)), placements, VALUES.shape)).requires_grad_()
        out = x.transpose(0, 2).reshape(shape)
        (out.full_tensor() * torch.arange(24).view(shape)).sum().backward()
        return out.detach().full_tensor(), x.grad.full_tensor()

    want = VALUES.transpose(0, 2).reshape(shape)
    gradient = torch.arange(24.0).view(2, 3, 4).transpose(0, 2)
    for out, grad in world(4).run(body):
        assert_close(out, want)
        if not placements[0].is_partial("max"):  # of equal maxima each rank has a share
            assert_close(grad, gradient)


@world(3)
def test_local_tensors_that_are_not_row_major_or_of_which_some_are_empty() -> None:
    local = torch.arange(6.0).view(3, 2).t()  # (2, 3), as one of three shards
    x: Any = DTensor.from_local(local, Mesh((3,)), [Shard(1)])
    assert x.stride() == (1, 2)
    assert not x.is_contiguous()
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        x.view(-1)
    x.t().view(-1).add_(1)
    assert local[0, 0] == 1
    assert DTensor.from_local(local, Mesh((3,)), [Shard(0)], run_check=False).stride() == (1, 6)
    given = DTensor.from_local(local, Mesh((3,)), [Shard(0)], shape=(6, 3), stride=(1, 6))
    assert given.stride() == (1, 6)
    for wrong in ((6, 2), (1,), (3, 6)):
        with pytest.raises(LayoutError, match=r"describes no tensor of shape \(6, 3\) without gaps"):
            DTensor.from_local(local, Mesh((3,)), [Shard(0)], shape=(6, 3), stride=wrong)
    y = DTensor.from_local(torch.zeros(0, 3).t(), Mesh((3,)), [Shard(1)])
    assert y.stride() == torch.zeros(3, 0).stride()
    x = distribute_tensor(torch.arange(168.0).view(4, 3, 14), Mesh((3,)), [Shard(0)]).mT
    y = DTensor.from_local(x.to_local(), Mesh((3,)), [Shard(0)], run_check=False, shape=x.shape)
    assert y.stride() == x.stride()
    assert y.full_tensor().equal(x.full_tensor())
    local = torch.zeros(2, 3) if rank() else torch.zeros(3, 2).t()  # ranks see other strides
    z = DTensor.from_local(local, Mesh((3,)), [Shard(0)], run_check=False)
    assert z.full_tensor().shape == (6, 3)


@world(2)
def test_where_a_view_begins_and_that_it_depends_on_dtype_and_value_not_on_the_calls_before() -> None:
    full = distribute_tensor(torch.arange(12.0).view(4, 3), Mesh((2,)), [Replicate()])
    assert full[2:].storage_offset() == 6
    x = distribute_tensor(torch.arange(12.0).view(4, 3), Mesh((2,)), [Shard(0)])
    assert x.storage_offset() == x.t().storage_offset() == x.view(-1).detach().storage_offset() == 0
    with pytest.raises(RuleError, match="a sharded tensor has no memory of its own"):
        x[2:].storage_offset()
    for view in (x.t(), x[2:], full[2:]):
        with pytest.raises(RuleError, match="reads memory by position"):
            view.as_strided((2,), (1,))
    assert as_dtensor(x.as_strided((2,), (3,))).full_tensor().tolist() == [0, 3]
    x = distribute_tensor(torch.zeros(4, 3), Mesh((2,)), [Shard(0)])
    value = distribute_tensor(torch.arange(12.0).view(3, 4), Mesh((2,)), [Shard(1)]).t()
    x.data = value
    assert x.stride() == (1, 4)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        x.view(-1)
    assert x.tolist() == value.tolist()
    assert x.redistribute(placements=[Shard(1)]).is_contiguous()
    for dtype, columns in ((torch.float64, 8), (torch.float32, 4), (torch.float16, 2)):
        x = distribute_tensor(torch.ones(4, 4, dtype=dtype), placements=[Shard(0)])
        assert x.view(torch.int32).shape == (4, columns)
    for dtype, part in ((torch.float32, torch.float32), (torch.complex64, torch.float32)):
        x = distribute_tensor(torch.ones(4, dtype=dtype), placements=[Shard(0)])
        assert torch.real(x).dtype == part
        assert torch.conj(x).is_conj() == dtype.is_complex


@world(3)
def test_flattening_one_dim_is_the_tensor_itself() -> None:
    boxes = Boxes([[Box((0,), (3,))], [], [Box((3,), (2,))]])
    for placement in (Shard(0), boxes, OnRanks(1), Replicate()):
        x = distribute_tensor(torch.zeros(5), Mesh((3,)), [placement]).requires_grad_()
        assert x.flatten() is x
        assert torch.flatten(x, 0, 0) is x
        assert x.contiguous() is x


@world(2)
def test_results_in_the_memory_order_of_an_expanded_operand_are_row_major() -> None:
    full = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0))
    for placement in (Replicate(), Shard(0)):
        x = distribute_tensor(full, Mesh((2,)), [placement]).expand(2, 3, 4, 4)
        expanded = full.expand(2, 3, 4, 4)
        expected = torch.nn.functional.scaled_dot_product_attention(expanded, expanded, expanded)
        found: Any = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        assert found.stride() == expected.stride()
        if placement.is_replicate():  # else the view needs a redistribution
            found.view(-1).add_(1)
            expected.view(-1).add_(1)
        torch.testing.assert_close(found.full_tensor(), expected)


NORMALIZATIONS: dict[str, Step] = {
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "batch_norm, statistics": lambda x: F.batch_norm(x, torch.zeros(x.shape[1]), torch.ones(x.shape[1])),
    "group_norm": lambda x: F.group_norm(x, 2),
    "instance_norm": F.instance_norm,
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
}
ORDERS: dict[str, Step] = {
    "row-major": lambda x: x,
    "reversed": lambda x: x.permute(*reversed(range(x.ndim))).contiguous().permute(*reversed(range(x.ndim))),
    "channels last": lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
}


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("op", NORMALIZATIONS)
def test_normalizations_order_memory_as_kernels_do(op: str, order: str, placement: Placement) -> None:
    """The meta device orders results of batch_norm and group_norm in other ways."""
    values = ORDERS[order](torch.randn(3, 4, 3, 2))
    want = NORMALIZATIONS[op](values)

    def body() -> tuple[tuple[int, ...], Tensor]:
        out = NORMALIZATIONS[op](ORDERS[order](distribute_tensor(values, Mesh((2,)), [placement])))
        out.reshape(-1).add_(1)
        return out.stride(), out.full_tensor()

    changed = want.clone()
    changed.reshape(-1).add_(1)
    for stride, got in world(2).run(body):
        assert stride == want.stride()
        assert_close(got, changed)
