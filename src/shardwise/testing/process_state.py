"""Torch's state per process, of which each simulated rank has its own: generators and settings.

Context managers such as `sdpa_kernel` restore the previous value. Ranks that take turns inside would mix theirs.
"""

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (  # how each is read, and set
    (torch.get_default_dtype, torch._C._set_default_dtype),
    (
        lambda: (torch._C._get_deterministic_algorithms(), torch._C._get_deterministic_algorithms_warn_only()),
        lambda mode: torch._C._set_deterministic_algorithms(mode[0], warn_only=mode[1]),
    ),
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    (torch._C._get_overrideable_sdp_enabled, torch._C._set_sdp_use_overrideable),
    (torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order),
)
States = tuple[Tensor, ...]  # of the CPU, then of the accelerator's current device if the process uses one


def settings() -> tuple[Any, ...]:
    """The values of SETTINGS."""
    return tuple(read() for read, _ in SETTINGS)


def generator_states() -> States:
    accelerator = _accelerator()
    if accelerator is None or not accelerator.is_initialized():
        return (torch.get_rng_state(),)
    return torch.get_rng_state(), accelerator.get_rng_state()


@cache
def _accelerator() -> ModuleType | None:
    """The module of the accelerator, such as `torch.cuda`; None without one that has generators."""
    device = torch.accelerator.current_accelerator(check_available=True)
    module = None if device is None else torch.get_device_module(device)
    return module if hasattr(module, "is_initialized") else None


def process_state() -> tuple[States, tuple[Any, ...]]:
    return generator_states(), settings()


def set_process_state(state: tuple[States, tuple[Any, ...]]) -> None:
    """Restore `state`. An accelerator that was not in use then starts from the seed, as at its first use."""
    (cpu, *others), accelerator = state[0], _accelerator()
    torch.set_rng_state(cpu)
    if accelerator is not None and accelerator.is_initialized():
        accelerator.set_rng_state(others[0]) if others else accelerator.manual_seed(torch.initial_seed())
    for (read, write), value in zip(SETTINGS, state[1], strict=True):
        if read() != value:
            write(value)
