"""Options of lookups: padding_idx, max_norm, scale_grad_by_freq, per_sample_weights and mode="max".

An option is a step before or after the lookup of every id's row. Only this lookup depends on the table's sharding.

    max_norm             before: all-gather the ids; owners scale their rows of these in place
    scale_grad_by_freq   after: all-gather the ids; multiply the gradient of each row by 1 / count of its id
    padding_idx          after: no gradient for rows of that id; in bags, such ids are left out
    per_sample_weights   after: a weighted `F.embedding_bag` of the rows
    mode="max"           after: `F.embedding_bag` of full rows

No option gathers the table. For `max_norm` of a column-wise table, ranks also exchange norms of the rows looked up.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise._layout import Boxes, Shard
from shardwise._lookups import bad_ids, lookup
from shardwise._lookups.ids import pool
from shardwise._lookups.requests import table_boxes
from shardwise._rules.local_context import LocalContext
from shardwise._rules.local_tensors import as_accumulator
from shardwise._rules.row import Kwargs, arguments
from shardwise.errors import IdError


def embedding_with_options(ctx: LocalContext, *args: object, **kwargs: object) -> Tensor:
    """The local implementation of `F.embedding`."""
    named = arguments(F.embedding, args, kwargs)
    ids, padding_idx = named["input"], named["padding_idx"]
    rows = _rows(ctx, named, lookup.look_up)
    factor = by_frequency(ctx, ids) if named["scale_grad_by_freq"] else None
    if factor is not None and named["sparse"]:
        rows = _ungraded(rows)
    if padding_idx is not None:
        factor = torch.ones_like(ids, dtype=rows.dtype) if factor is None else factor
        factor = factor.masked_fill(ids == _padding_row(ctx, padding_idx), 0)
    return rows if factor is None else _graded(rows, factor)


@lookup.with_aligned_bags
def embedding_bag_with_options(ctx: LocalContext, named: Kwargs) -> Tensor:
    """The local implementation of `F.embedding_bag` with any option: looks up the row of every id, then pools."""
    ids, offsets, mode = (named[name] for name in ("input", "offsets", "mode"))
    weights, padding_idx = (named[name] for name in ("per_sample_weights", "padding_idx"))
    bags = lookup.bags_of(ctx, named)
    bad_ids.refuse_bad_ids(ctx, ids, bags)
    look_up = lookup.look_up_full_rows if mode == "max" else lookup.look_up  # sums and means may pool Partial rows
    rows = _rows(ctx, named, look_up).flatten(0, -2)
    if named["scale_grad_by_freq"]:
        rows = _ungraded(rows) if named["sparse"] else _graded(rows, by_frequency(ctx, ids.reshape(-1)))
    positions = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
    if padding_idx is not None:
        positions = positions.masked_fill(ids == _padding_row(ctx, padding_idx), ids.numel())
    if weights is not None:
        weights = ctx.fetch(weights, 2 + (offsets is not None), lambda rank: ctx.layouts[0].boxes(rank)[0])
    positions, bags = bags.without_end(positions)
    return pool(
        positions,
        F.pad(rows, (0, 0, 0, 1)),  # the last row is that of padded positions
        None if bags.offsets is None else bags.offsets.long(),
        mode,
        None if weights is None else weights[: len(positions)],
        padding_idx=ids.numel(),
    )


def _padding_row(ctx: LocalContext, padding_idx: int) -> int:
    num_rows = ctx.layouts[1].shape[0]
    if not -num_rows <= padding_idx < num_rows:
        raise IdError(
            f"{ctx.name_of(1)}: padding_idx {padding_idx} is not one of its {num_rows} rows. "
            f"Fix: 0 to {num_rows - 1}, or None for no padding."
        )
    return padding_idx % num_rows


def _graded(rows: Tensor, factor: Tensor) -> Tensor:
    """`rows` with gradients multiplied by `factor`; a factor of 0 makes even an infinite gradient 0."""
    if rows.requires_grad:
        factor = factor.unsqueeze(-1).to(rows.dtype)
        rows.register_hook(lambda grad: (grad * factor).masked_fill(factor == 0, 0))
    return rows.view_as(rows)  # a new tensor: hooks of the result see its gradient before it is scaled


def _ungraded(rows: Tensor) -> Tensor:
    """`rows`, whose backward raises torch's error."""

    def refuse(_: Tensor) -> None:
        raise RuntimeError("embedding_backward: scale_grad_by_freq not supported with sparse gradients")

    if rows.requires_grad:
        rows.register_hook(refuse)
    return rows


# ---- the ids of all ranks ---------------------------------------------------------------------------------


def every_id(ctx: LocalContext, ids: Tensor) -> Tensor:
    """The ids of all ranks, once for all replicas."""
    layout = ctx.layouts[0]
    ranks = ctx.ranks([axis for axis, placement in enumerate(layout.placements) if isinstance(placement, Shard)])
    if len(ranks) == 1:
        return ids.reshape(-1)
    return ctx.exchange(ranks).gather(ids.reshape(-1), [layout.local_numel(rank) for rank in ranks])


def by_frequency(ctx: LocalContext, ids: Tensor) -> Tensor:
    """For each id, one divided by the number of its lookups on all ranks."""
    values, counts = torch.unique(every_id(ctx, ids), return_counts=True)
    frequencies: Tensor = counts[torch.searchsorted(values, ids)]
    return frequencies.double().reciprocal()


def _rows(ctx: LocalContext, named: Kwargs, look_up: Callable[..., Tensor]) -> Tensor:
    """The row of every id. First, rows that any rank looks up are scaled in place to a norm of at most `max_norm`.

    The version of the table is incremented only after the lookup: for autograd it is a view, and a changed view has no
    sparse gradients.
    """
    ids, weight, max_norm = named["input"], named["weight"], named["max_norm"]
    if max_norm is not None:
        bad_ids.refuse_bad_ids(ctx, ids, None)
        _renormalise(ctx, weight.detach().data, every_id(ctx, ids).unique().long(), max_norm, named["norm_type"])
    rows = look_up(ctx, ids, weight, named["sparse"])
    if max_norm is not None:
        torch.autograd.graph.increment_version(weight)
    return rows


def _renormalise(ctx: LocalContext, table: Tensor, ids: Tensor, max_norm: float, norm_type: float) -> None:
    """Scale this rank's columns of the rows `ids`, which are distinct and equal on all ranks."""
    norms, own = [], []
    axes = [a for a, p in enumerate(ctx.layouts[1].placements) if p.is_shard(1) or isinstance(p, Boxes)]
    for box, view in table_boxes(ctx, table):
        here = (ids >= box.offsets[0]) & (ids < box.offsets[0] + box.sizes[0])
        rows = ids[here] - box.offsets[0]
        if not axes:
            torch.embedding_renorm_(view, rows, max_norm, norm_type)
            return
        of_rows = torch.linalg.vector_norm(view[rows], norm_type, 1) if view.numel() else view.new_zeros(rows.shape)
        norms.append(view.new_zeros(ids.shape).masked_scatter_(here, of_rows))
        own.append((view, here, rows))
    every = ctx.all_gather(torch.stack(norms), ctx.ranks(axes)).flatten(0, 1)
    norm = torch.linalg.vector_norm(every, norm_type, 0).double()
    scale = torch.where(norm > max_norm, max_norm / (norm + 1e-7), 1.0).unsqueeze(1)  # torch adds 1e-7 too
    for view, here, rows in own:
        found = as_accumulator(view[rows])
        view.index_copy_(0, rows, (found * scale[here].to(found.dtype)).to(view.dtype))
