"""`embedding_bags` on DTensors: each lookup gets its recipe, then those over the same ranks run together."""

from collections.abc import Callable, Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from shardwise.lookups import lookup
from shardwise.lookups.bad_ids import StraddlingError
from shardwise.lookups.grouped import embedding_bags
from shardwise.lookups.requests import Lookup, exchange_axes
from shardwise.rules.registry import handler
from shardwise.rules.row import Args, Kwargs, arguments
from shardwise.tensor.dispatch import run_op
from shardwise.tensor.dispatch.local_calls import PreparedCall
from shardwise.tensor.dispatch.resolve import NoRowError, SeveralMeshesError
from shardwise.tensor.dtensor import DTensor, tag

Member = tuple[int, Lookup, Callable[[], Tensor]]  # position, lookup, the lookup with an exchange of its own


@handler(embedding_bags, is_op=True)
def _embedding_bags(func: object, args: Args, kwargs: Kwargs) -> list[Tensor]:
    inputs, weights, starts, mode, sparse = arguments(embedding_bags, args, kwargs).values()
    results: dict[int, Tensor] = {}
    shared: dict[object, list[Member]] = {}
    for index, (ids, weight, start) in enumerate(zip(inputs, weights, starts, strict=True)):
        with DisableTorchFunctionSubclass():
            prepared = _prepared(ids, weight, start, {"mode": mode, "sparse": sparse})
            if prepared is not None:
                recipe, ctx, locals_, named = prepared
                assert recipe.local_impl is not None
                alone = partial(recipe.local_impl, ctx, *locals_, **named)
                axes = exchange_axes(ctx)
                if axes and recipe.local_impl is lookup.embedding_bag:
                    call = arguments(F.embedding_bag, tuple(locals_), named)
                    one = Lookup(ctx, call["input"], call["weight"], lookup.bags_of(ctx, call), sparse, axes)
                    shared.setdefault((ctx.ranks(axes), weight.dtype), []).append((index, one, alone))
                else:
                    results[index] = tag(alone(), ctx.output)
        if prepared is None:
            results[index] = F.embedding_bag(ids, weight, start, mode=mode, sparse=sparse)
    with DisableTorchFunctionSubclass():
        for members in shared.values():
            for (index, one, _), out in zip(members, _together(members), strict=True):
                results[index] = tag(out, one.ctx.output)
    return [results[index] for index in range(len(inputs))]


def _together(members: Sequence[Member]) -> list[Tensor]:
    try:
        return lookup.exchange_lookups([one for _, one, _ in members])
    except StraddlingError:  # each lookup sends its ids to their bags first
        return [alone() for _, _, alone in members]


def _prepared(ids: Tensor, weight: Tensor, start: Tensor | None, kwargs: Kwargs) -> PreparedCall | None:
    """A lookup's recipe and local arguments; None if it shares nothing: plain tensors, several meshes, no row."""
    if type(weight) is not DTensor and type(ids) is not DTensor:
        return None
    try:
        return run_op.prepared(F.embedding_bag, (ids, weight, start), kwargs)
    except (NoRowError, SeveralMeshesError):
        return None
