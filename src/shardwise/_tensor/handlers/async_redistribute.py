"""The result of an asynchronous redistribution: its first use, which reads `_layout`, waits for it."""

from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from shardwise import _collectives as collectives
from shardwise._collectives import Wait
from shardwise._layout import PARTIAL, REPLICATE, Layout, Partial
from shardwise._redistribute.run_plan import redistribute_local, start_redistribute
from shardwise._tensor.dtensor import DTensor, check_owners, plain, tag, to_layout
from shardwise._trace.autograd_function import TensorFunction
from shardwise._trace.comm_trace import EXPLICIT

_data: Any = torch._C.TensorBase.data


class _Pending:
    """A redistribution that is running; called with the `DTensor` that it makes, it waits and returns the layout."""

    def __init__(self, target: Layout, finish: Wait) -> None:
        self._target, self._finish = target, finish
        self._waiting = Lock()  # several threads may use the tensor

    def __call__(self, x: DTensor) -> Layout:
        own = vars(x)
        with self._waiting:
            if "_layout" not in own:  # else another thread waited
                layout, local = collectives.owner().layout(self._target), self._finish()
                with DisableTorchFunctionSubclass():
                    _data.__set__(x, local)
                own["_layout"] = layout  # first: other threads do not take the lock any more once it is there
                del own["_settle"]
        return own["_layout"]  # type: ignore[no-any-return]


class _Redistribute(TensorFunction):
    """A redistribution whose gradient is sent in a dtype of its own, and which may be asynchronous."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, src: Layout, dst: Layout, dtype: torch.dtype, later: list[Wait] | None
    ) -> Tensor:
        ctx.src, ctx.dst, ctx.dtype = src, dst, dtype
        if later is not None:
            later.append(start_redistribute(local, src, dst))
            return local.new_empty(dst.local_shape(collectives.rank()))
        out = redistribute_local(local, src, dst)
        return out.view_as(out) if out is local else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        back = redistribute_local(grads[0].to(ctx.dtype), ctx.dst.dual(), ctx.src.dual(), EXPLICIT.for_backward())
        return back.to(grads[0].dtype), None, None, None, None


def async_redistribute(x: DTensor, target: Layout, backward_dtype: torch.dtype, async_op: bool) -> DTensor:
    """`x` in another layout; its gradient is converted to `backward_dtype` before it is redistributed back.

    The gradient of an average, maximum, minimum or product is more than the dual redistribution: these are reduced
    before, or made after.
    """
    check_owners("redistribute", (x._layout,))
    between = _without_others(target)
    if x.requires_grad and torch.is_grad_enabled() and (x._layout != _without_others(x._layout) or target != between):
        reduced = to_layout(x, _without_others(x._layout))
        return to_layout(async_redistribute(reduced, between, backward_dtype, async_op), target)
    later: list[Wait] | None = [] if async_op else None
    with DisableTorchFunctionSubclass():
        out: Any = _Redistribute.apply(plain(x), x._layout, target, backward_dtype, later)
        if later is None:
            return tag(out, target)
        out.__class__ = DTensor
        out._settle = _Pending(target, *later)
        return out  # type: ignore[no-any-return]


def _without_others(layout: Layout) -> Layout:
    """`layout` with Replicate for Partial averages, maxima, minima and products."""
    return layout.replace([REPLICATE if isinstance(p, Partial) and p != PARTIAL else p for p in layout.placements])
