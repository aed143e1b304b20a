"""Rows of `F.embedding` and `F.embedding_bag`, and `embedding_bags`, which looks up in several tables.

If ids are replicated on an axis, each rank looks up its own rows, and ids of other rows add zero. If ids and table are
both sharded, an all-to-all sends ids to the ranks with their rows, and another one sends rows or pooled sums back
(`shardwise._lookups.lookup`). The table is never gathered.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from shardwise._layout import PARTIAL, REPLICATE, Boxes, Kind, OnRanks, Placement, Shard, checked, without_sizes
from shardwise._lookups import bad_ids, lookup, options
from shardwise._lookups.requests import exchange_axes
from shardwise._rules.local_context import LocalContext, specialized
from shardwise._rules.registry import OpRule, register
from shardwise._rules.row import Align, LocalFunction, Meta, Row, arguments
from shardwise.errors import IdTypeError, LayoutError

aten = torch.ops.aten

Mode = Annotated[str, Kind("'sum', 'mean' or 'max'", lambda value: isinstance(value, str) and value in MODES)]
MODES = ("sum", "mean", "max")


def _check_ids(ids: Meta, dims: tuple[int, ...], op: str, what: str = "ids") -> None:
    if ids.dtype not in (torch.int32, torch.int64):
        raise IdTypeError(f"{op} takes {what} of dtype int32 or int64, got {ids.dtype}. Fix: {what}.long().")
    if dims and ids.ndim not in dims:
        raise IdTypeError(
            f"{op} takes ids with {' or '.join(map(str, dims))} dims, got shape {ids.shape}. "
            f"Fix: 2-D ids with a row for each bag, or 1-D ids with offsets."
        )


def _embedding_shape(input: Meta, weight: Meta, *args: object, **kwargs: object) -> tuple[int, ...]:
    return (*input.shape, weight.shape[1])


def _torch_lookup(ctx: LocalContext) -> LocalFunction | None:
    """Torch's own lookup, if this rank holds all rows and the ids of all ranks, on CPUs.

    It refuses ids outside the table; the local implementation then raises the same error on every rank."""
    (ids, table), num_rows = ctx.layouts, ctx.layouts[1].shape[0]
    if any(isinstance(placement, Boxes) for placement in table.placements):
        return None
    if bad_ids.id_axes(ctx) or exchange_axes(ctx) or ids.mesh.device_type != "cpu":
        return None
    if not any(box.numel and box.sizes[0] == num_rows for box in table.boxes(ctx.rank)):
        return None

    def look_up(
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> object:
        has_option = max_norm is not None or scale_grad_by_freq
        if has_option or not input.numel() or not -num_rows <= (padding_idx or 0) < num_rows:
            return NotImplemented
        padding = -1 if padding_idx is None else padding_idx % num_rows
        try:
            return torch.embedding(weight, input, padding, False, sparse)
        except (IndexError, RuntimeError):
            return NotImplemented

    return look_up


_look_up = specialized(_torch_lookup)(options.embedding_with_options)


def embedding_rows(*args: object, **kwargs: object) -> list[Row]:
    """out[..., c] = weight[input[...], c]."""
    named = arguments(F.embedding, args, kwargs)
    ids, weight = named["input"], named["weight"]
    _check_ids(ids, (), "embedding")
    if weight.ndim != 2:
        raise RuntimeError("'weight' must be 2-D")  # torch's text, which a rank without ids would not raise
    return _keeping_the_table(_lookup_rows(weight, range(ids.ndim), ids.ndim, _look_up), named)


def _keeping_the_table(rows: list[Row], named: dict[str, Any]) -> list[Row]:
    """Keep only rows that keep the layout of the table if there is a `max_norm`, which changes it in place."""
    if named["max_norm"] is None:
        return rows
    rows = [row for row in rows if row.inputs[1] == without_sizes(named["weight"].placement)]
    if not rows or named["norm_type"] <= 0:
        raise NotImplementedError("a table that is Partial is renormalised as a full tensor")
    return rows


def _bag_shape(
    input: Meta, weight: Meta, offsets: Meta | None = None, *args: object, **kwargs: object
) -> tuple[int, ...]:
    if input.ndim == 2 or offsets is None:
        return (input.shape[0], weight.shape[1])
    return (offsets.shape[0] - bool(kwargs.get("include_last_offset")), weight.shape[1])


def embedding_bag_rows(*args: object, **kwargs: object) -> list[Row]:
    """out[b, c] = the sum or mean over the ids i of bag b of weight[i, c].

    Bags are the rows of a 2-D input, or runs of a 1-D input that start at `offsets`. Offsets count from the
    first id of the global input.
    """
    named = arguments(F.embedding_bag, args, kwargs)
    ids, offsets, mode, factors = (named[name] for name in ("input", "offsets", "mode", "per_sample_weights"))
    _check_ids(ids, (1, 2), "embedding_bag")
    if offsets is not None:
        _check_ids(offsets, (), "embedding_bag", "offsets")
    by_frequency = named["scale_grad_by_freq"]
    special = by_frequency or any(named[x] is not None for x in ("max_norm", "per_sample_weights", "padding_idx"))
    weighted_wrong = factors is not None and (mode != "sum" or factors.shape != ids.shape)
    if mode not in ("sum", "mean", "max") or weighted_wrong or (mode == "max" and (named["sparse"] or by_frequency)):
        raise NotImplementedError("torch says what is wrong with the options")
    if (ids.ndim == 1) == (offsets is None):
        raise LayoutError(
            "embedding_bag: 1-D ids, and no others, need offsets that say where each bag starts. "
            f"Fix: {'leave offsets out' if ids.ndim == 2 else 'offsets=lengths.cumsum(0) - lengths'}."
        )
    # With the last offset there is one offset more than bags, so they cannot be sharded alike; and ids are
    # not sharded where offsets are not, since shards would seldom end between bags.
    replicated = offsets is not None and not (ids.placement.is_shard() and offsets.placement.is_shard())
    dims = range(0 if named["include_last_offset"] or replicated else 1)
    local = options.embedding_bag_with_options if special or mode == "max" else lookup.look_up_bags
    rows = _lookup_rows(named["weight"], dims, 1, local, offsets is not None, factors, mode == "max")
    return _keeping_the_table(rows, named)


def _lookup_rows(
    weight: Meta,
    id_dims: range,
    column_dim: int,
    local: Any,
    offsets: bool = False,
    factors: Meta | None = None,
    maxima: bool = False,
) -> list[Row]:
    pooled = REPLICATE if maxima else PARTIAL  # maxima need all rows

    def row(ids: Placement, table: Placement, output: Placement, why: str) -> Row:
        layout_from = 1 if ids == REPLICATE else 2 if offsets else 0
        weights = () if factors is None else (REPLICATE,) if factors.placement == REPLICATE else (ids,)
        inputs = (ids, table, *((ids,) if offsets else ()), *weights)
        return Row(inputs, output, why, local, Align.FREE, layout_from)

    rows = [
        row(REPLICATE, REPLICATE, REPLICATE, "every rank has all ids and the full table"),
        row(REPLICATE, Shard(1), Shard(column_dim), "each rank holds some columns"),
        row(REPLICATE, Shard(0), pooled, "each rank holds some rows; ids of other rows add zero"),
    ]
    for d in id_dims:
        rows.append(row(Shard(d), REPLICATE, Shard(d), "each rank has some ids and the full table"))
        rows.append(row(Shard(d), Shard(0), Shard(d), "all-to-all of ids to row owners, then of embeddings"))
        rows.append(row(Shard(d), Shard(1), Shard(d), "all-to-all of ids to column owners, then of embeddings"))
    if isinstance(weight.placement, OnRanks | Boxes):
        rows.append(row(REPLICATE, weight.placement, pooled, "ranks without the rows or columns add zero"))
        rows += [
            row(Shard(d), weight.placement, Shard(d), "all-to-all of ids to table owners, then of embeddings")
            for d in id_dims
        ]
    return rows


def _embedding_of_table(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Tensor:
    """out[..., c] = weight[indices[..., c]], with -1 for no padding."""
    padding = None if padding_idx < 0 else padding_idx
    return F.embedding(indices, weight, padding, None, 2.0, scale_grad_by_freq, sparse)


for _op, _rows, _shape, _local in (
    (F.embedding, embedding_rows, _embedding_shape, _look_up),
    (F.embedding_bag, embedding_bag_rows, _bag_shape, options.embedding_bag_with_options),
):
    register(OpRule(_rows, shape=_shape, shape_independent=True, replicated_impl=_local, kept_operand=1), _op)
register(OpRule(decomposition=_embedding_of_table), torch.embedding, aten.embedding.default)


# ---- several tables at once: latency is paid once, not once a table ---------------------------------------------


@checked
def embedding_bags(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    offsets: Sequence[Tensor | None] | None = None,
    *,
    mode: Mode = "mean",
    sparse: bool = False,
) -> list[Tensor]:
    """`F.embedding_bag` of every input in its table; lookups that exchange ids share their exchanges.

    Two collectives forward and one backward serve all tables of a mesh: row-wise, column-wise or table-wise sharded.

    Args:
        inputs: ids of each lookup, as for `F.embedding_bag`.
        weights: the table of each lookup; a table may occur several times.
        offsets: of each lookup; None for ids with two dims.
        mode: "sum", "mean", or "max", which shares no exchange.
        sparse: row-sparse gradients.

    Returns:
        One tensor a lookup, with the layout of `F.embedding_bag`'s result.

    Raises:
        LayoutError: the lists have different lengths.
        IdError: an id outside its table, the same on every rank.
    """
    starts = [None] * len(inputs) if offsets is None else list(offsets)
    if not len(inputs) == len(weights) == len(starts):
        raise LayoutError(
            f"embedding_bags: {len(inputs)} inputs, {len(weights)} weights, {len(starts)} offsets. "
            f"Fix: in each list one entry for each lookup; None where 2-D ids need no offsets."
        )
    operands = tuple(x for x in (*inputs, *weights, *starts) if x is not None)
    if has_torch_function(operands):
        return handle_torch_function(embedding_bags, operands, inputs, weights, starts, mode=mode, sparse=sparse)
    lookups = zip(inputs, weights, starts, strict=True)
    return [F.embedding_bag(ids, weight, start, mode=mode, sparse=sparse) for ids, weight, start in lookups]
