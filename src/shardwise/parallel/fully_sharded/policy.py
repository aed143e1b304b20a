"""The dtypes in which a unit computes and reduces."""

from dataclasses import dataclass

import torch

from shardwise.layout import checked_init


@checked_init
@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """As torch's `MixedPrecisionPolicy`.

    Args:
        param_dtype: in which parameters are all-gathered and used; None: their own.
        reduce_dtype: in which gradients are added over ranks; None: `param_dtype`.
        output_dtype: to which floating-point outputs are converted; None: they stay as they are.
        cast_forward_inputs: convert floating-point inputs to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
