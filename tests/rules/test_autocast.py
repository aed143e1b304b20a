"""Under autocast, results have the dtypes of one process, also where a local implementation calls other ops."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from shardwise import Mesh, Partial, Placement, Replicate, Shard, distribute_tensor
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor

FULL = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1))
OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "reflect": lambda x: F.pad(x[:, None], (1, 1), mode="reflect"),
    "replicate": lambda x: F.pad(x[:, None], (1, 1), mode="replicate"),
    "circular": lambda x: F.pad(x[:, None], (1, 1), mode="circular"),
    "constant": lambda x: F.pad(x, (1, 1)),
    "prod": lambda x: x.prod(0),
    "trace": torch.trace,
    "bilinear": lambda x: F.bilinear(x, x, WEIGHT.to(x.dtype)),
    "mse_loss": lambda x: F.mse_loss(x, x * 0.5),
    "softmax": lambda x: x.softmax(0),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "cumsum": lambda x: x.cumsum(0),
    "logsumexp": lambda x: x.logsumexp(0),
    "norm": torch.linalg.norm,
    "quantile": lambda x: x.float().quantile(0.5, 0),
    "matmul": lambda x: x @ x.mT,
    "linear": lambda x: F.linear(x, WEIGHT[0].to(x.dtype)),
    "linear of two shards": lambda x: F.linear(x, x),
    "bmm": lambda x: torch.bmm(x[None], x.mT[None]),
    "conv1d": lambda x: F.conv1d(x[None], x.mT[:, :, None]),
    "attention": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    "cdist": lambda x: torch.cdist(x, x),
    "kl_div": lambda x: F.kl_div(x, x.abs(), reduction="batchmean"),
    "avg_pool3d": lambda x: F.avg_pool3d(x[None, None, None], (1, 2, 2)),
}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Partial(), Replicate()], ids=str)
@world(2)
def test_dtypes_are_those_of_one_process(name: str, placement: Placement) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        full = FULL.to(dtype)
        with torch.autocast("cpu", torch.bfloat16):
            expected = OPS[name](full)
            found = as_dtensor(OPS[name](distribute_tensor(full, Mesh((2,)), [placement])))
        assert found.dtype == expected.dtype, dtype
        assert_close(found.full_tensor(), expected, rtol=0.05, atol=0.05)


SCORES, HALF = torch.randn(2, 4, 4), torch.randn(2, 4, 4).bfloat16()
OF_TWO_DTYPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bmm": torch.bmm,
    "matmul": lambda x, y: y @ x,
    "baddbmm": lambda x, y: torch.baddbmm(x, x, y),
    "linear": lambda x, y: F.linear(y.transpose(0, 1), x[0]),
    "weights times values": lambda x, y: (y @ y.mT).softmax(-1, dtype=torch.float32) @ y,
    "attention": lambda x, y: F.scaled_dot_product_attention(x[None], y[None], y[None]),
}


@pytest.mark.parametrize("name", OF_TWO_DTYPES)
@pytest.mark.parametrize("placement", [Shard(0, (0, 2)), Shard(1), Shard(2), Replicate()], ids=str)
@world(2)
def test_operands_of_two_dtypes_are_cast_as_in_one_process(name: str, placement: Placement) -> None:
    op, (x, y) = OF_TWO_DTYPES[name], (distribute_tensor(t, Mesh((2,)), [placement]) for t in (SCORES, HALF))
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = op(SCORES, HALF), as_dtensor(op(x, y))
    assert found.dtype == expected.dtype
    assert_close(found.full_tensor(), expected, rtol=0.05, atol=0.05)
