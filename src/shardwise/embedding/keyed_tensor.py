"""`KeyedTensor`: the pooled rows of several features."""

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise._layout import checked, checked_init
from shardwise.embedding.jagged import check_keys
from shardwise.errors import JaggedError


@checked_init
class KeyedTensor:
    """Columns of several features side by side.

        pooled = KeyedTensor(["user", "item"], [2, 3], torch.ones(4, 5))
        pooled["item"]  # [4, 3]

    Args:
        keys: the features.
        length_per_key: columns of each feature.
        values: [bags, columns of all features]; flat, by feature, if features have different numbers of bags.
        stride_per_key: bags of each feature, if they differ.

    Raises:
        JaggedError: columns or bags that do not fit the values, or a feature twice.
    """

    def __init__(
        self,
        keys: Sequence[str],
        length_per_key: Sequence[int],
        values: Tensor,
        stride_per_key: Sequence[int] | None = None,
    ) -> None:
        self._keys, self._dims, self._values = list(keys), list(length_per_key), values
        self._strides = None if stride_per_key is None else list(stride_per_key)
        check_keys("KeyedTensor", self._keys)
        bags = [1] * len(self._keys) if self._strides is None else self._strides
        if not len(self._keys) == len(self._dims) == len(bags):
            raise JaggedError(
                f"KeyedTensor: {len(self._keys)} keys, {len(self._dims)} lengths, {len(bags)} strides. "
                f"Fix: for each key its columns in length_per_key, and its bags in stride_per_key if that is given."
            )
        columns = sum(n * dim for n, dim in zip(bags, self._dims, strict=True))
        if values.ndim != (2 if self._strides is None else 1) or values.shape[-1] != columns:
            expected = f"(bags, {columns})" if self._strides is None else f"({columns},)"
            raise JaggedError(
                f"KeyedTensor: values have shape {tuple(values.shape)}, expected {expected}. "
                f"Fix: length_per_key with the columns of each key in values."
            )

    def keys(self) -> list[str]:
        """The features."""
        return self._keys

    def values(self) -> Tensor:
        """[bags, columns of all features]; flat, by feature, if features have different numbers of bags."""
        return self._values

    def length_per_key(self) -> list[int]:
        """Columns of each feature."""
        return self._dims

    def offset_per_key(self) -> list[int]:
        """The first column of each feature, and the number of columns."""
        return [0, *accumulate(self._dims)]

    def stride_per_key(self) -> list[int]:
        """Bags of each feature."""
        return [len(self._values)] * len(self._keys) if self._strides is None else self._strides

    def __getitem__(self, key: str) -> Tensor:
        """[bags, columns] of a feature, as a view."""
        if key not in self._keys:
            known = ", ".join(map(repr, self._keys))
            raise KeyError(f"KeyedTensor has no key {key!r}; it has {known}. Fix: one of its keys.")
        return self.to_dict()[key]

    def to_dict(self) -> dict[str, Tensor]:
        """[bags, columns] of each feature, as views."""
        if self._strides is None:
            return dict(zip(self._keys, self._values.split(self._dims, 1), strict=True))
        sizes = [n * dim for n, dim in zip(self._strides, self._dims, strict=True)]
        parts = self._values.split(sizes)
        return {
            key: part.view(n, dim)
            for key, part, n, dim in zip(self._keys, parts, self._strides, self._dims, strict=True)
        }

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "KeyedTensor":
        """The tensor on another device."""
        return KeyedTensor(self._keys, self._dims, self._values.to(device, non_blocking=non_blocking), self._strides)

    @staticmethod
    @checked
    def regroup(keyed_tensors: Sequence["KeyedTensor"], groups: Sequence[Sequence[str]]) -> list[Tensor]:
        """The features of each group side by side: [bags, columns of the group]."""
        found: dict[str, Tensor] = {}
        for keyed in keyed_tensors:
            for key, value in keyed.to_dict().items():
                if key in found:
                    raise JaggedError(f"regroup: the key {key!r} is in two KeyedTensors. Fix: one name a feature.")
                found[key] = value
        unknown = [key for group in groups for key in group if key not in found]
        if unknown:
            raise JaggedError(
                f"regroup: no key {unknown[0]!r} among {', '.join(map(repr, found))}. "
                f"Fix: groups of these, or add the KeyedTensor that has it."
            )
        return [torch.cat([found[key] for key in group], 1) for group in groups]

    def __repr__(self) -> str:
        parts = ", ".join(
            f"{key}: ({n}, {last - first})"
            for key, n, (first, last) in zip(
                self._keys, self.stride_per_key(), pairwise(self.offset_per_key()), strict=True
            )
        )
        return f"KeyedTensor({parts})"


_Context = tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...] | None]  # keys, columns and bags of each


def _without_values(keyed: KeyedTensor) -> _Context:
    # Not the lists: all tensors made of one context would share them.
    return tuple(keyed._keys), tuple(keyed._dims), None if keyed._strides is None else tuple(keyed._strides)


def _with_values(values: Iterable[Tensor], context: _Context) -> KeyedTensor:
    keyed, (keys, dims, strides) = KeyedTensor.__new__(KeyedTensor), context
    (keyed._values,) = values
    keyed._keys, keyed._dims, keyed._strides = list(keys), list(dims), None if strides is None else list(strides)
    return keyed


pytree.register_pytree_node(
    KeyedTensor, lambda x: ([x._values], _without_values(x)), cast(pytree.UnflattenFunc, _with_values)
)
