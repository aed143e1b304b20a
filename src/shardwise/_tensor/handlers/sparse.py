"""Row-sparse gradients, which `torch.optim` takes from a sparse tensor and puts into a new one.

An optimizer reads `_indices()`, `_values()` and `size()` of a sparse gradient, computes with the values, makes sparse
tensors of them with `torch.sparse_coo_tensor` (which no subclass can intercept) and adds those to dense state. For a
sparse DTensor all three therefore return there what belongs to the local shard, and a plain sparse tensor of the local
shape beside a DTensor counts as its local shard (`operands.all_promoted`). Other code gets the global size, and an
error for the others: it would take a norm of the local values for that of the gradient.
"""

from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from shardwise._rules.registry import handler
from shardwise._rules.row import Args, Kwargs, Op
from shardwise._tensor.dtensor import DTensor, plain, tag
from shardwise._trace.user_stack import is_called_by
from shardwise.errors import RuleError


@handler(Tensor._indices, Tensor._values, Tensor.indices, Tensor.values, Tensor._nnz)
def _of_local_shard(func: Op, args: Args, kwargs: Kwargs) -> Tensor:
    """`_indices()` and `_values()` of the local shard, as plain tensors, where `torch.optim` asks for them."""
    name = func.__name__
    if name in ("_indices", "_values") and is_called_by("torch.optim"):
        with DisableTorchFunctionSubclass():
            return func(args[0]).detach()  # type: ignore[no-any-return]
    raise RuleError(
        f"{name}() of a sparse DTensor would show only local rows. Fix: to_dense(), or to_local().{name}()."
    )


@handler(Tensor.to_dense)
def to_dense(func: Op, args: Args, kwargs: Kwargs) -> Tensor:
    """A dense DTensor of the same layout."""
    x = args[0]
    with DisableTorchFunctionSubclass():
        return tag(func(plain(x), *args[1:], **kwargs), x._layout)


@handler(Tensor.coalesce)
def coalesce(func: Op, args: Args, kwargs: Kwargs) -> DTensor:
    """Duplicate rows are on one rank, which adds them up: ranks hold different rows."""
    x = args[0]
    if x._layout.partial_axes:
        raise RuleError(f"coalesce: {x._layout} has rows on several ranks that add up. Fix: redistribute it first.")
    with DisableTorchFunctionSubclass():
        local = plain(x)
        rows = local._indices()
        if rows.shape[0] == 1 and bool((rows.diff() > 0).all()):  # as lookups make them; a check is cheaper
            local._coalesced_(True)
        return tag(func(local), x._layout)


@handler(Tensor.sparse_mask)
def sparse_mask(func: Op, args: Args, kwargs: Kwargs) -> DTensor:
    """The rows of a dense DTensor that a sparse one has."""
    dense, mask = args[:2]
    if type(dense) is not DTensor or type(mask) is not DTensor or dense._layout != mask._layout:
        raise RuleError("sparse_mask needs two DTensors of one layout. Fix: redistribute the dense one.")
    with DisableTorchFunctionSubclass():
        return tag(func(plain(dense), plain(mask)), dense._layout)


@handler(Tensor.new)
def new(func: Any, args: Args, kwargs: Kwargs) -> DTensor:
    """`grad.new(indices, values, size)`, by which sparse optimizers make a sparse tensor."""
    like, *rest = args
    with DisableTorchFunctionSubclass():
        sparse_parts = like.is_sparse and len(rest) == 3
    if not sparse_parts:
        raise RuleError("DTensor.new() makes only sparse parts. Fix: use torch.empty_like or shardwise.empty.")
    return tag(torch.sparse_coo_tensor(*rest, check_invariants=False), like._layout)
