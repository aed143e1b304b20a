"""Bags whose weights of ids need gradients: the requesting rank gets each distinct row, and adds the rows itself.

The gradient of the weight of an id is the dot product of its row and the gradient of its bag. Autograd computes it
where both are, so a step still has three collectives.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.embedding.batch import Batch
from shardwise.embedding.exchange.requests import BatchIndex, Outgoing
from shardwise.embedding.exchange.rows import distinct_rows, request_rows


def needs_gradients(batch: Batch) -> bool:
    """Whether the weights of ids do."""
    return batch.weights is not None and batch.weights.requires_grad


def request_weighted(index: BatchIndex, batch: Batch) -> Outgoing:
    """Request the row of every id, by feature; owners of a weighted collection multiply it by 1."""
    routes, feature = index.routes, index.feature_of_bag.index_select(0, batch.bag)
    dims = routes.dims[feature]
    found = distinct_rows(routes, batch.values, feature)
    rows = request_rows(routes, found, feature, dims.cumsum(0) - dims, int(dims.sum()))
    return replace(rows, weights=torch.ones_like(rows.rows, dtype=torch.float32))


def pool_weighted(batch: Batch, flat: Tensor, dims: Sequence[int], dtypes: Sequence[torch.dtype]) -> Tensor:
    """The weighted sums of rows, in the places of `BatchIndex`: flat, float32.

    Args:
        flat: the result of `request_weighted`.
        dims: the columns of each feature.
        dtypes: of the table of each feature, to which weights are rounded, as in one process.
    """
    assert batch.weights is not None
    rows = flat.split([n * dim for n, dim in zip(batch.sizes, dims, strict=True)])
    sums = [
        F.embedding_bag(
            torch.arange(n, device=flat.device),
            of_feature.view(n, dim),
            F.pad(lengths.cumsum(0), (1, 0)),
            mode="sum",
            per_sample_weights=weights.to(dtype).float(),
            include_last_offset=True,
        )
        for n, dim, of_feature, lengths, weights, dtype in zip(
            batch.sizes, dims, rows, batch.lengths.split(batch.bags), batch.weights.split(batch.sizes), dtypes,
            strict=True,
        )
    ]  # fmt: skip
    return (torch.cat(sums, 1) if len(set(batch.bags)) == 1 else torch.cat([s.reshape(-1) for s in sums])).view(-1)
