"""`JaggedTensor`: bags of one feature."""

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise.embedding.jagged.segments import Bags, checked_lengths, shown
from shardwise.errors import JaggedError
from shardwise.layout import checked_init


class _Nested(Protocol):
    """What torch's annotations of nested tensors leave out."""

    def offsets(self) -> Tensor: ...


@checked_init
class JaggedTensor(Bags):
    """Bags of different lengths, one after another.

        JaggedTensor(torch.tensor([7, 9, 7]), lengths=torch.tensor([2, 0, 1]))  # [7, 9], [], [7]

    Args:
        values: of all bags, [values, ...].
        weights: one of each value, or None.
        lengths: of each bag, [bags], int32 or int64.
        offsets: where each bag starts, and the number of values, [bags + 1]; instead of lengths.

    Raises:
        JaggedError: lengths, offsets or weights that do not fit the values. On an accelerator, this check waits for
            the lengths.
    """

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        self._lengths = checked_lengths("JaggedTensor", values, weights, lengths, offsets)
        self._values, self._weights = values, weights

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "JaggedTensor":
        """The same bags on another device."""
        return made(
            self._values.to(device, non_blocking=non_blocking),
            None if self._weights is None else self._weights.to(device, non_blocking=non_blocking),
            self._lengths.to(device, non_blocking=non_blocking),
        )

    @staticmethod
    def from_dense(values: Sequence[Tensor], weights: Sequence[Tensor] | None = None) -> "JaggedTensor":
        """The bags of a sequence of tensors, one of each bag."""
        if not values:
            raise JaggedError("JaggedTensor.from_dense needs a bag. Fix: a tensor of each bag; it may be empty.")
        lengths = torch.tensor([len(bag) for bag in values], device=values[0].device)
        return JaggedTensor(torch.cat(list(values)), None if weights is None else torch.cat(list(weights)), lengths)

    def to_dense(self) -> list[Tensor]:
        """The values of each bag, as views."""
        return list(self._values.split(self._lengths.tolist()))

    def to_dense_weights(self) -> list[Tensor]:
        """The weights of each bag, as views."""
        return list(self.weights().split(self._lengths.tolist()))

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """[bags, desired_length, ...]: longer bags lose their last values, shorter ones end with `padding_value`.

        `desired_length` None is the longest bag.
        """
        longest = int(self._lengths.max()) if self._lengths.numel() else 0
        length = longest if desired_length is None else desired_length
        position = torch.arange(length, device=self.device())
        inside = position < self._lengths[:, None]
        where = self._offsets[:-1, None] + position
        padded = self._values.new_full((*inside.shape, *self._values.shape[1:]), padding_value)
        return padded.index_put(tuple(inside.nonzero().T), self._values[where[inside]])

    @staticmethod
    def from_nested(nested: Tensor) -> "JaggedTensor":
        """The bags of a nested tensor with `layout=torch.jagged`, without a copy.

        Raises:
            JaggedError: another tensor, or one whose bags do not follow each other.
        """
        if not nested.is_nested or nested.layout != torch.jagged:
            raise JaggedError(
                f"from_nested takes a tensor with layout torch.jagged, got {type(nested).__name__}. "
                f"Fix: torch.nested.nested_tensor(bags, layout=torch.jagged)."
            )
        if not nested.is_contiguous():
            raise JaggedError("from_nested takes bags that follow each other. Fix: nested.contiguous().")
        return JaggedTensor(nested.values(), offsets=cast(_Nested, nested).offsets())

    def to_nested(self) -> Tensor:
        """A nested tensor with `layout=torch.jagged` of the same values, without a copy; weights are left out."""
        nested: Tensor = torch.nested.nested_tensor_from_jagged(self._values, offsets=self._offsets)
        return nested

    def __repr__(self) -> str:
        if self._values.is_meta:
            return f"JaggedTensor({self._values.shape[0]} values of {self._lengths.numel()} bags on meta)"
        return f"JaggedTensor({shown(self._values, self._lengths, self._weights)})"


def made(values: Tensor, weights: Tensor | None, lengths: Tensor) -> JaggedTensor:
    """Of parts that fit."""
    jagged = JaggedTensor.__new__(JaggedTensor)
    jagged._values, jagged._weights, jagged._lengths = values, weights, lengths
    return jagged


pytree.register_pytree_node(
    JaggedTensor, lambda x: ([x._values, x._weights, x._lengths], None), lambda tensors, _: made(*tensors)
)
