"""States of torch's default generators, as simulated ranks share them: of the CPU, and of an accelerator in use."""

from functools import cache
from typing import Protocol, cast

import torch
from torch import Tensor


class Accelerator(Protocol):
    """What is used of modules such as `torch.cuda`."""

    def is_initialized(self) -> bool: ...
    def get_rng_state(self) -> Tensor: ...
    def set_rng_state(self, state: Tensor) -> None: ...
    def manual_seed(self, seed: int) -> None: ...


States = tuple[Tensor, ...]  # of the CPU, then of the accelerator's current device if the process uses one


def generator_states() -> States:
    accelerator = _accelerator()
    if accelerator is None or not accelerator.is_initialized():
        return (torch.get_rng_state(),)
    return torch.get_rng_state(), accelerator.get_rng_state()


def set_generator_states(states: States) -> None:
    """Go on from `states`. An accelerator that was not in use then starts from the seed, as in its first use."""
    torch.set_rng_state(states[0])
    accelerator = _accelerator()
    if accelerator is None or not accelerator.is_initialized():
        return
    if len(states) > 1:
        accelerator.set_rng_state(states[1])
    else:
        accelerator.manual_seed(torch.initial_seed())


def seed_generators(seed: int) -> None:
    """What `torch.manual_seed` does, in a hundredth of the time where there is no accelerator.

    That notes the stack for each kind of accelerator, in case one is there later.
    """
    if _accelerator() is None:
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


@cache
def _accelerator() -> Accelerator | None:
    device = torch.accelerator.current_accelerator(check_available=True)
    module = None if device is None else torch.get_device_module(device)
    return cast(Accelerator, module) if hasattr(module, "is_initialized") else None
