"""t_, unsqueeze_ and the like: a tensor becomes a view of itself, and its layout that of the view."""

from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from shardwise.errors import RuleError
from shardwise.rules.registry import handler
from shardwise.rules.row import Args, Handler, Kwargs, Op
from shardwise.tensor.dtensor import name_of, plain
from shardwise.tensor.handlers.copies import track


def _root(x: Tensor) -> Tensor | None:
    return x._base if x._is_view() else x


def _becomes(view: Op) -> Handler:
    def run(func: Op, args: Args, kwargs: Kwargs) -> Any:
        x = args[0]
        out = view(*args, **kwargs)
        with DisableTorchFunctionSubclass():
            new = plain(out.detach())
            if _root(out) is _root(x):
                torch.Tensor.as_strided_(x, new.shape, new.stride(), new.storage_offset())
            elif x._is_view() or x.requires_grad:
                raise RuleError(
                    f"{name_of(func)} works in place, but {x._layout} needs a redistribution for this view, and "
                    f"neither its views nor its gradients would follow. Fix: use the op that returns a new tensor."
                )
            else:
                torch.Tensor.data.__set__(x, new)  # type: ignore[attr-defined]
                track(x)  # a copy: `detach()` or `.data` may have made other tensors of the memory that it had
            x._layout = out._layout
            x._spec = x._tiling = None  # of the old shape
        return x

    return run


for _name in ("t", "transpose", "swapaxes", "swapdims", "squeeze", "unsqueeze"):
    handler(getattr(Tensor, f"{_name}_"))(_becomes(getattr(Tensor, _name)))
