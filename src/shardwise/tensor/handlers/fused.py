"""Functions that torch may run as one fused kernel, decomposed into ops with rules."""

import torch.nn.functional as F

from shardwise.rules.registry import handler
from shardwise.rules.row import Args, Kwargs, Op


@handler(F.linear_cross_entropy)
def _linear_cross_entropy(func: Op, args: Args, kwargs: Kwargs) -> object:
    """`options` are for the fused kernel, which works in chunks."""
    named = {k: v for k, v in kwargs.items() if k not in ("linear_bias", "options")}
    x, linear_weight, target = args
    bias, (classes, *rest) = kwargs["linear_bias"], linear_weight.shape[:-1]
    if rest:
        linear_weight, bias = linear_weight.flatten(0, -2), None if bias is None else bias.flatten()
    if named["ignore_index"] is None:
        named["ignore_index"] = -100
    logits = F.linear(x, linear_weight, bias)
    return F.cross_entropy(logits.unflatten(-1, (classes, *rest)) if rest else logits, target, **named)
