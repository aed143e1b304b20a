"""Several tables in one exchange: latency is paid once, not once a table."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from shardwise.errors import LayoutError
from shardwise.rules import lookup
from shardwise.tensor import dispatch
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
    shared: dict[object, list[tuple[int, lookup.Call]]] = {}
    for index, (ids, weight, start) in enumerate(zip(inputs, weights, starts, strict=True)):
        kwargs = {"mode": mode, "sparse": sparse}
        if type(weight) is not DTensor and type(ids) is not DTensor:
            results[index] = F.embedding_bag(ids, weight, start, **kwargs)  # type: ignore[arg-type]
            continue
        with DisableTorchFunctionSubclass():
            recipe, site, args, named = dispatch.prepared(F.embedding_bag, (ids, weight, start), kwargs)
            axes = lookup.travelling_axes(site)
            if axes and recipe.local is lookup.embedding_bag:
                members = shared.setdefault((site.ranks(axes), weight.dtype), [])
                members.append((index, lookup.bag_call(site, args, named)))
            else:
                assert recipe.local is not None
                assert recipe.output is not None
                results[index] = tag(recipe.local(site, *args, **named), site.output)
    with DisableTorchFunctionSubclass():
        for members in shared.values():
            for (index, call), out in zip(members, lookup.lookup_together([c for _, c in members]), strict=True):
                results[index] = tag(out, call[0].output)
    return [out for out in results if out is not None]
