"""Running totals along a cut dim: a rank scans its piece behind what each of the pieces before it comes to."""

from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor

from shardwise.placement import Shard
from shardwise.rules.pointwise import SUMS, shape_of_first
from shardwise.rules.reduce import carried, given, log_of_sum, over, own_dim, own_part, register, seat, worst
from shardwise.rules.row import Meta, Row, Site


def scan(name: str, input: Meta, dim: int, dtype: torch.dtype | None = None) -> list[Row]:
    """out[i] = the sum (product, …) of input[0] to input[i] along dim."""
    dim = own_dim(input, dim)
    rows = over(input, (dim,), True, Shard(dim), given(_scanned, name, dim, dtype))
    exact = name == "cumsum" and (dtype is None or dtype.is_floating_point or dtype.is_complex)
    return rows + [Row((p,), p, "running sums of summands") for p in SUMS if exact]


def _scanned(site: Site, x: Tensor, name: str, dim: int, dtype: torch.dtype | None) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    if name == "logcumsumexp":
        total = log_of_sum(*own_part(site, x, (dim,), -inf, True), False)
    else:
        total = x.sum(dim) if name == "cumsum" else x.prod(dim)
    before = _before(site, dim, total).movedim(0, dim)
    scanned: Tensor = getattr(torch, name)(torch.cat([before, x], dim), dim)
    return scanned.narrow(dim, before.shape[dim], x.shape[dim]).to(dtype or scanned.dtype)


def _before(site: Site, dim: int, own: Tensor) -> Tensor:
    """What each piece before this rank's comes to, in the order of the pieces along a new first dim."""
    boxes = site.boxes(0)
    here = boxes[seat(site)].offsets[dim]
    earlier = [i for i, box in enumerate(boxes) if box.offsets[dim] < here]
    return site.stack(own)[sorted(earlier, key=lambda i: boxes[i].offsets[dim])]


def scan_of_extremes(largest: bool, input: Meta, dim: int) -> list[Row]:
    """out[i] = the largest (smallest) of input[0] to input[i] along dim, and where the last of its equals is."""
    dim = own_dim(input, dim)
    return over(input, (dim,), True, Shard(dim), given(_scanned_extremes, largest, dim))


def _scanned_extremes(site: Site, x: Tensor, largest: bool, dim: int) -> Any:
    part, _ = own_part(site, x, (dim,), worst(largest, x.dtype), True)
    values, at = part.flip(dim).max(dim) if largest else part.flip(dim).min(dim)
    length, start = x.shape[dim], site.boxes(0)[seat(site)].offsets[dim]
    heads, places = _before(site, dim, carried(values, start + length - 1 - at)).movedim(0, dim + 1)
    behind = torch.cat([heads.to(x.dtype), x], dim)
    scanned = behind.cummax(dim) if largest else behind.cummin(dim)
    own = torch.arange(start, start + length, device=x.device).view(-1, *[1] * (x.ndim - 1 - dim))
    table = torch.cat([places.long(), own.expand_as(x)], dim)
    values, at = (found.narrow(dim, heads.shape[dim], length) for found in scanned)
    return type(scanned)((values, table.gather(dim, at)))


for _name in ("cumsum", "cumprod", "logcumsumexp"):
    register(partial(scan, _name), shape_of_first, _name)
for _largest, _name in ((True, "cummax"), (False, "cummin")):
    register(partial(scan_of_extremes, _largest), lambda input, dim: [input.shape] * 2, _name)
