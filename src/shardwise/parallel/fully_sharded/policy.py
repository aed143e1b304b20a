"""The dtypes in which a unit computes and reduces, and where its parameters are between uses."""

from dataclasses import dataclass, fields
from typing import Any

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


@dataclass(frozen=True)
class OffloadPolicy:
    """As torch's `OffloadPolicy`: parameters are stored on the device of the mesh."""


@checked_init
@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """As torch's `CPUOffloadPolicy`: parameters, gradients and states of the optimizer are on the CPU.

    Shards are copied to the device of the mesh for an all-gather; their gradients are copied back once they are
    reduced. On a CPU mesh this changes nothing.

    Args:
        pin_memory: the shards are in pinned memory, from which they are copied while the device computes.
    """

    pin_memory: bool = True


_BY_NAME: dict[str, type] = {cls.__name__: cls for cls in (MixedPrecisionPolicy, OffloadPolicy, CPUOffloadPolicy)}


def class_of(policy: object) -> type:
    """The class of a policy; of one of `torch.distributed.fsdp`, the class here of the same name."""
    cls = type(policy)
    is_torchs = cls.__module__.startswith("torch.distributed.fsdp")
    return _BY_NAME.get(cls.__name__, cls) if is_torchs else cls


def converted_policy(policy: Any) -> Any:
    """`policy`; one of torch with all its fields in the class of `class_of`, which raises for one that it lacks."""
    cls = class_of(policy)
    return (
        policy if cls is type(policy) else cls(**{field.name: getattr(policy, field.name) for field in fields(policy)})
    )
