"""Lookups that do more: padding, rows of bounded norm, gradients by frequency, weights and maxima of bags.

Each is a step before or after the plain lookup of every id's row, which alone knows how the table is cut. None
gathers it: what travels besides is at most the ids, and a norm for each looked-up row of a table cut by columns.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.boxes import Box
from shardwise.errors import IdError
from shardwise.ids import Bags
from shardwise.placement import Shard
from shardwise.rules import bad_ids, lookup
from shardwise.rules.row import Site, arguments


def embedding(site: Site, *args: Any, **kwargs: Any) -> Tensor:
    """The local function of `F.embedding` with any option."""
    named = arguments(F.embedding, args, kwargs)
    ids, padding_idx = named["input"], named["padding_idx"]
    with _bounded(site, named["weight"], ids, named["max_norm"], named["norm_type"]):
        rows = lookup.embedding(site, ids, named["weight"], sparse=named["sparse"])
    factor = by_frequency(site, ids) if named["scale_grad_by_freq"] else None
    if padding_idx is not None:
        factor = torch.ones_like(ids, dtype=rows.dtype) if factor is None else factor
        factor = factor.masked_fill(ids == _padding_row(site, padding_idx), 0)
    return rows if factor is None else _graded(rows, factor)


def embedding_bag(site: Site, *args: Any, **kwargs: Any) -> Tensor:
    """The local function of `F.embedding_bag` with any option: rows come to the ranks that have the ids."""
    named = arguments(F.embedding_bag, args, kwargs)
    bags, weight, mode, last = (named[name] for name in ("input", "weight", "mode", "include_last_offset"))
    offsets, weights, padding_idx = (named[name] for name in ("offsets", "per_sample_weights", "padding_idx"))
    starts = lookup.from_own_first_id(site, offsets)
    bad_ids.refuse_bad_ids(site, bags, Bags(mode, starts, last))
    find = lookup.whole_rows if mode == "max" else lookup.embedding  # all but maxima is linear in the rows
    with _bounded(site, weight, bags, named["max_norm"], named["norm_type"]):
        rows, ids = find(site, bags, weight, sparse=named["sparse"]).flatten(0, -2), bags.reshape(-1)
    if named["scale_grad_by_freq"]:
        rows = _graded(rows, by_frequency(site, ids))
    places = torch.arange(ids.numel(), device=ids.device)
    if padding_idx is not None:
        places = places.masked_fill(ids == _padding_row(site, padding_idx), ids.numel())
    if weights is not None:
        weights = site.fetch(weights, 2 + (offsets is not None), lambda rank: site.layouts[0].boxes(rank)[0])
    return F.embedding_bag(
        places.view(bags.shape),
        F.pad(rows, (0, 0, 0, 1)),  # and the row that padded places stand for
        starts if starts is None else starts.long(),
        mode=mode,
        per_sample_weights=weights,
        include_last_offset=last,
        padding_idx=ids.numel(),
    )


def _padding_row(site: Site, padding_idx: int) -> int:
    num_rows = site.layouts[1].shape[0]
    if not -num_rows <= padding_idx < num_rows:
        raise IdError(f"{site.name_of(1)}: padding_idx {padding_idx} is not one of its {num_rows} rows.")
    return padding_idx % num_rows


def _graded(rows: Tensor, factor: Tensor) -> Tensor:
    """Rows as they are, with a factor for the gradient of each; a factor of zero stops even an infinite one."""
    if rows.requires_grad:
        factor = factor.unsqueeze(-1).to(rows.dtype)
        rows.register_hook(lambda grad: (grad * factor).masked_fill(factor == 0, 0))
    return rows.view_as(rows)  # another tensor, whose own hooks see the gradient before


# ---- what all ranks look up ---------------------------------------------------------------------------------


def every_id(site: Site, ids: Tensor, operand: int = 0) -> Tensor:
    """The ids of all ranks, each once."""
    layout = site.layouts[operand]
    ranks = site.ranks([axis for axis, placement in enumerate(layout.placements) if isinstance(placement, Shard)])
    if len(ranks) == 1:
        return ids.reshape(-1)
    own = ids.reshape(-1).repeat(len(ranks))
    return site.exchange(own, [ids.numel()] * len(ranks), [layout.local_numel(rank) for rank in ranks], ranks)


def by_frequency(site: Site, ids: Tensor, operand: int = 0) -> Tensor:
    """One over how often all ranks together look up each id."""
    values, counts = torch.unique(every_id(site, ids, operand), return_counts=True)
    frequencies: Tensor = counts[torch.searchsorted(values, ids)]
    return 1 / frequencies


@contextmanager
def _bounded(site: Site, weight: Tensor, ids: Tensor, max_norm: float | None, norm_type: float) -> Iterator[None]:
    """Inside, the rows that any rank looks up have a norm of at most `max_norm`; they change on their owners, for good.

    Autograd hears of the change afterwards: to it `weight` is a view, and a changed view has no sparse gradients.
    """
    if max_norm is None:
        yield
        return
    bad_ids.refuse_bad_ids(site, ids, None)
    table, layout = weight.detach().data, site.layouts[1]
    box = (*layout.boxes(site.rank), Box((0, 0), (0, 0)))[0]
    rows = every_id(site, ids).unique().long() - box.offsets[0]
    rows = rows[(rows >= 0) & (rows < box.sizes[0])]
    norms = torch.linalg.vector_norm(table[rows], norm_type, 1) if table.shape[1] else table.new_zeros(rows.shape)
    axes = [axis for axis, placement in enumerate(layout.placements) if placement.is_shard(1)]
    norms = torch.linalg.vector_norm(site.stack(norms, site.ranks(axes)), norm_type, 0)
    long = norms > max_norm
    rows, scale = rows[long], max_norm / (norms[long] + 1e-7)  # the little more is torch's
    table.index_copy_(0, rows, table[rows] * scale.unsqueeze(1).to(table.dtype))
    yield
    torch.autograd.graph.increment_version(weight)


# ---- ops that take the table, or a gradient, before the ids -------------------------------------------------


class _IdsFirst:
    """The site of an op whose first operand is the table, for functions that expect the ids there."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.layouts = site.layouts[::-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.site, name)

    def name_of(self, operand: int) -> str:
        return self.site.name_of(1 - operand)


def embedding_of_table(
    site: Site,
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """The local function of `torch.embedding`."""
    padding = None if padding_idx < 0 else padding_idx
    return embedding(_IdsFirst(site), indices, weight, padding, None, 2.0, scale_grad_by_freq, sparse)


def embedding_renorm(site: Site, weight: Tensor, indices: Tensor, max_norm: float, norm_type: float) -> Tensor:
    """The local function of `torch.embedding_renorm_`."""
    with _bounded(_IdsFirst(site), weight, indices, max_norm, norm_type):
        return weight


def dense_backward(
    site: Site, grad: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool, *rest: Any
) -> Tensor:
    """The local function of `aten.embedding_dense_backward` with frequencies of all ranks."""
    scaled = grad * by_frequency(site, indices, 1).unsqueeze(-1).to(grad.dtype)
    return site.call(scaled, indices, num_weights, padding_idx, False, *rest)  # type: ignore[no-any-return]
