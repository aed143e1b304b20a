"""What autocast does to ops whose local implementation calls other ops than the op itself."""

import torch
from torch import Tensor


def autocast_to_float(x: Tensor, *device_types: str) -> Tensor:
    """`x`, or a float32 copy under autocast: for an op that torch then computes in float32, such as a loss.

    Args:
        device_types: where torch does; all by default.
    """
    kind = x.device.type
    half = x.dtype in (torch.bfloat16, torch.float16) and kind in (device_types or (kind,))
    return x.float() if half and torch.is_autocast_enabled(kind) else x
