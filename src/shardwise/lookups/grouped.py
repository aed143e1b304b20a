"""Lookups in several tables with the exchanges of one: latency is paid once, not once a table."""

from collections.abc import Sequence
from typing import Annotated

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from shardwise.errors import LayoutError
from shardwise.layout import Kind, checked

Mode = Annotated[str, Kind("'sum', 'mean' or 'max'", lambda value: isinstance(value, str) and value in MODES)]
MODES = ("sum", "mean", "max")


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

    Two collectives forward and one backward serve all tables of a mesh, whether row-wise, column-wise or table-wise
    sharded.

    Args:
        inputs: ids of each lookup, as for `F.embedding_bag`.
        weights: the table of each; one table may occur several times.
        offsets: of each; None where the ids have two dims.
        mode: "sum", "mean", or "max", which shares no exchange.
        sparse: row-sparse gradients.

    Returns:
        One tensor a lookup, with the layout that `F.embedding_bag` gives it.

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
