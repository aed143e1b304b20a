"""What the memory of a rank is for."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from shardwise.simulation.memory import Memory
from shardwise.tensor.autograd.buckets import raw_grad

PARAMETERS, GRADIENTS, OPTIMIZER, BUFFERS = "parameters", "gradients", "optimizer states", "buffers of modules"
REDISTRIBUTION, ACTIVATIONS = "redistribution", "activations"
ROLES = (PARAMETERS, GRADIENTS, OPTIMIZER, BUFFERS, REDISTRIBUTION, ACTIVATIONS)


class Roles:
    """The roles of blocks, by their number. Blocks without one are activations and temporary results."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.of: dict[int, str] = {}
        self._modules: dict[int, nn.Module] = {}
        self._optimizers: dict[int, torch.optim.Optimizer] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note the modules and optimizers that run inside, and the gradients that optimizers see."""
        hooks = [
            register_module_forward_pre_hook(self._called),
            register_optimizer_step_pre_hook(self._gradients),
            register_optimizer_step_post_hook(self._gradients),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _called(self, module: nn.Module, _: object) -> None:
        self._modules[id(module)] = module

    def _gradients(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._optimizers[id(optimizer)] = optimizer
        self._note_gradients(p for group in optimizer.param_groups for p in group["params"])

    def _note_gradients(self, parameters: Iterable[Tensor]) -> None:
        with DisableTorchFunctionSubclass():
            for p in parameters:
                self._note(GRADIENTS, [raw_grad.__get__(p), getattr(p, "_reduced_grad", None)])

    def _note(self, role: str, tensors: Iterable[object]) -> None:
        with DisableTorchFunctionSubclass():
            for x in tensors:
                block = self.memory.block_of(x) if isinstance(x, Tensor) else None
                if block is not None:
                    self.of.setdefault(block.number, role)

    def find(self) -> None:
        """Note what modules and optimizers hold now."""
        modules = {id(part): part for module in self._modules.values() for part in module.modules()}.values()
        for module in modules:
            self._note(PARAMETERS, module._parameters.values())
            self._note(BUFFERS, module._buffers.values())
        for optimizer in self._optimizers.values():
            self._note(PARAMETERS, [p for group in optimizer.param_groups for p in group["params"]])
        for module in modules:
            self._note_gradients(p for p in module._parameters.values() if p is not None)
        for optimizer in self._optimizers.values():
            self._note(OPTIMIZER, pytree.tree_leaves(list(optimizer.state.values())))
        for number in self.memory.redistributed:
            self.of.setdefault(number, REDISTRIBUTION)

    def at_peak(self, first: int) -> dict[str, int]:
        """Bytes by role when most memory is in use, from entry `first` of the log on."""
        now = dict.fromkeys(ROLES, 0)
        for number, size in self.memory.log[:first]:
            now[self.of.get(number, ACTIVATIONS)] += size
        total = most = sum(now.values())
        found = dict(now)
        for number, size in self.memory.log[first:]:
            now[self.of.get(number, ACTIVATIONS)] += size
            total += size
            if total > most:
                most, found = total, dict(now)
        return found
