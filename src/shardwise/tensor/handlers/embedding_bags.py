"""Several tables in one exchange: latency is paid once, not once a table."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from shardwise.embedding import lookup, requests
from shardwise.embedding.bad_ids import StraddlingError
from shardwise.errors import LayoutError
from shardwise.tensor.dispatch import run
from shardwise.tensor.dispatch.resolve import NoRowError, SeveralMeshesError
from shardwise.tensor.dtensor import DTensor, tag


def embedding_bags(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    offsets: Sequence[Tensor | None] | None = None,
    *,
    mode: str = "mean",
    sparse: bool = False,
) -> list[Tensor]:
    """`F.embedding_bag` of every input in its table, with the lookups whose ids travel sharing their exchanges.

    Two collectives forward and one backward serve all tables of a mesh, whether they are cut by rows or by
    columns or live on one rank each.

    Args:
        inputs: ids of each lookup, as for `F.embedding_bag`.
        weights: the table of each; one table may occur several times.
        offsets: of each; None where the ids have two dims.
        mode: "sum", "mean", or "max", which shares no exchange.
        sparse: row-sparse gradients.

    Returns:
        One tensor a lookup, laid out as `F.embedding_bag` would have it.

    Raises:
        LayoutError: the lists have different lengths.
        IdError: an id outside its table, the same on every rank.
    """
    starts = [None] * len(inputs) if offsets is None else list(offsets)
    if not len(inputs) == len(weights) == len(starts):
        raise LayoutError(f"embedding_bags: {len(inputs)} inputs, {len(weights)} weights, {len(starts)} offsets.")
    results: list[Tensor | None] = [None] * len(inputs)
    shared: dict[object, list[tuple[int, lookup.UsualCall, Callable[[], Tensor]]]] = {}
    for index, (ids, weight, start) in enumerate(zip(inputs, weights, starts, strict=True)):
        kwargs = {"mode": mode, "sparse": sparse}
        with DisableTorchFunctionSubclass():
            prepared = _prepared(ids, weight, start, kwargs)
            if prepared is not None:
                recipe, ctx, args, named = prepared
                assert recipe.local_impl is not None
                alone = partial(recipe.local_impl, ctx, *args, **named)
                axes = requests.travelling_axes(ctx)
                if axes and recipe.local_impl is lookup.embedding_bag:
                    members = shared.setdefault((ctx.ranks(axes), weight.dtype), [])
                    members.append((index, lookup.bag_call(ctx, args, named), alone))
                else:
                    results[index] = tag(alone(), ctx.output)
        if prepared is None:
            results[index] = F.embedding_bag(ids, weight, start, **kwargs)  # type: ignore[arg-type]
    with DisableTorchFunctionSubclass():
        for members in shared.values():
            try:
                outs = lookup.lookup_together([call for _, call, _ in members])
            except StraddlingError:  # each brings its ids to their bags first
                outs = [alone() for _, _, alone in members]
            for (index, call, _), out in zip(members, outs, strict=True):
                results[index] = tag(out, call[0].output)
    return [out for out in results if out is not None]


def _prepared(ids: Tensor, weight: Tensor, start: Tensor | None, kwargs: dict[str, Any]) -> Any:
    """The lookup laid out, or None if there is nothing to share: plain tensors, several meshes, what torch refuses."""
    if type(weight) is not DTensor and type(ids) is not DTensor:
        return None
    try:
        return run.prepared(F.embedding_bag, (ids, weight, start), kwargs)
    except (NoRowError, SeveralMeshesError):
        return None
