"""`embedding` and `embedding_bag`: which ids go where, and what comes back.

Where every rank of an axis has all ids, each looks up what it holds and a foreign id adds zero. Where ids
and table are both cut on an axis, ids travel to the ranks that hold their rows, and rows or pooled sums
travel back (`shardwise.rules.lookup`); nothing is gathered.
"""

from typing import Any

import torch
import torch.nn.functional as F

from shardwise.errors import IdTypeError
from shardwise.placement import PARTIAL, REPLICATE, OnRanks, Placement, Shard
from shardwise.rules import lookup
from shardwise.rules.row import Meta, Row, op_rule


def _check_ids(ids: Meta, dims: tuple[int, ...], op: str) -> None:
    if ids.dtype not in (torch.int32, torch.int64):
        raise IdTypeError(f"{op} takes ids of dtype int32 or int64, got {ids.dtype}. Fix: ids.long().")
    if dims and ids.ndim not in dims:
        raise IdTypeError(f"{op} takes ids with {' or '.join(map(str, dims))} dims, got shape {ids.shape}.")


def _embedding_shape(input: Meta, weight: Meta, *args: Any, **kwargs: Any) -> tuple[int, ...]:
    return (*input.shape, weight.shape[1])


@op_rule(F.embedding, shape=_embedding_shape, sizeless=True)
def embedding(
    input: Meta,
    weight: Meta,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> list[Row]:
    """out[..., c] = weight[input[...], c]."""
    _check_ids(input, (), "embedding")
    if padding_idx is not None or max_norm is not None or scale_grad_by_freq:
        raise NotImplementedError(
            "padding_idx, max_norm and scale_grad_by_freq are not supported on sharded tables yet"
        )
    return _lookup_rows(weight, range(input.ndim), input.ndim, lookup.embedding)


def _bag_shape(input: Meta, weight: Meta, offsets: Meta | None = None, *args: Any, **kwargs: Any) -> tuple[int, ...]:
    if input.ndim == 2 or offsets is None:
        return (input.shape[0], weight.shape[1])
    return (offsets.shape[0] - bool(kwargs.get("include_last_offset")), weight.shape[1])


@op_rule(F.embedding_bag, shape=_bag_shape, sizeless=True)
def embedding_bag(
    input: Meta,
    weight: Meta,
    offsets: Meta | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Meta | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> list[Row]:
    """out[b, c] = the sum or mean over the ids i of bag b of weight[i, c].

    Bags are the rows of a 2-D input, or runs of a 1-D input that start at `offsets`. Offsets count from the
    first id of the whole input; where input and offsets are cut, they must be cut between the same bags.
    """
    _check_ids(input, (1, 2), "embedding_bag")
    unsupported = (
        max_norm is not None or scale_grad_by_freq or per_sample_weights is not None or padding_idx is not None
    )
    if unsupported or mode not in ("sum", "mean"):
        raise NotImplementedError(
            "only modes sum and mean, without max_norm, scale_grad_by_freq, per_sample_weights and "
            "padding_idx, are supported on sharded tables yet"
        )
    if input.ndim == 1 and offsets is None:
        raise ValueError("embedding_bag: 1-D ids need offsets that say where each bag starts")
    # With the last offset there is one offset more than bags, so bags and offsets cannot be cut alike.
    return _lookup_rows(weight, range(0 if include_last_offset else 1), 1, lookup.embedding_bag, offsets is not None)


def _lookup_rows(weight: Meta, id_dims: range, column_dim: int, local: Any, offsets: bool = False) -> list[Row]:
    def row(ids: Placement, table: Placement, output: Placement, why: str, aligned: bool = False) -> Row:
        follow = 1 if ids == REPLICATE else 2 if offsets else 0
        return Row((ids, table, *((ids,) if offsets else ())), output, why, local, aligned, follow=follow)

    rows = [
        row(REPLICATE, REPLICATE, REPLICATE, "every rank has all ids and the whole table"),
        row(REPLICATE, Shard(1), Shard(column_dim), "each rank holds some columns", aligned=True),
        row(REPLICATE, Shard(0), PARTIAL, "each rank holds some rows; a foreign id adds zero"),
    ]
    for d in id_dims:
        rows.append(row(Shard(d), REPLICATE, Shard(d), "each rank has some ids and the whole table"))
        rows.append(row(Shard(d), Shard(0), Shard(d), "ids travel to the rows and back"))
        rows.append(row(Shard(d), Shard(1), Shard(d), "ids travel to the columns and back"))
    if isinstance(weight.placement, OnRanks):
        rows.append(row(REPLICATE, weight.placement, PARTIAL, "one rank holds the table; the others add zero"))
        rows += [row(Shard(d), weight.placement, Shard(d), "ids travel to the table and back") for d in id_dims]
    return rows
