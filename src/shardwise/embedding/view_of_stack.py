"""The parameter of a sharded table: a view of the memory of a stack."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from shardwise.embedding.collections import TableWeight
from shardwise.errors import PlanError
from shardwise.tensor import DTensor
from shardwise.tensor.handlers.attributes import replace_value


class ViewOfStack(TableWeight):
    """A parameter that stays in the memory of its stack."""

    copies_state = True

    def __init__(self, name: str, weight: DTensor, requires_grad: bool) -> None:
        super().__init__(weight, requires_grad)
        self.name = name
        self._note_place()

    def _note_place(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self.first_place = self.place()

    def place(self) -> tuple[int, torch.dtype] | None:
        """The address of this rank's elements, and their dtype; call it where DTensors are plain tensors."""
        weight = self._parameters.get("weight")  # a parametrization takes it away
        return None if weight is None else (torch._C.TensorBase.data_ptr(weight), weight.dtype)

    def move(self, value: DTensor) -> None:
        """Let the parameter be a view of another stack."""
        weight: Tensor = self.weight
        assert isinstance(weight, DTensor)
        replace_value(weight, value)
        self._note_place()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What `to`, `half`, `cuda` and `to_empty` of any module around it call.

        Raises:
            PlanError: `fn` would replace the memory; nothing has changed then.
        """
        probe = torch.empty(0, dtype=self.weight.dtype, device=self.weight.device)
        if fn(probe) is not probe:
            raise PlanError(
                f"Table {self.name} cannot be moved or converted (to(), half(), to_empty()): "
                f"a sharded collection looks up rows in memory of its own.\n"
                f"Nothing of the collection has changed; modules before it in the model may be converted already.\n"
                f"  Fix: convert before shard_embeddings, and then the other modules one by one. "
                f"Exports convert: export_hugging_face(…, dtype=torch.bfloat16)."
            )
        apply: Callable[..., Self] = super()._apply
        return apply(fn, recurse)

    def check_place(self) -> None:
        """Whether it is still a view of the stack; call it where DTensors are plain tensors.

        Raises:
            PlanError: it was replaced.
        """
        if self.place() != self.first_place:
            raise PlanError(
                f"Table {self.name} was replaced (.data =, setattr, a parametrization), "
                f"but a sharded collection looks up rows in memory of its own.\n"
                f"  Fix: change values by copy_() or load_state_dict(); convert before shard_embeddings."
            )
