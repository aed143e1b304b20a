"""An op that will never have a rule: it runs on whole copies."""

from typing import Any

import torch
from torch import Tensor

# Not torch.library.custom_op, which imports torch's compiler when it is first called.
_library = torch.library.Library("shardwise_tests", "DEF")
_library.define("halved(Tensor x) -> Tensor")
_library.impl("halved", lambda x: x / 2, "CompositeExplicitAutograd")


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    return grad / 2


torch.library.register_autograd("shardwise_tests::halved", _backward, lib=_library)

halved: Any = torch.ops.shardwise_tests.halved
