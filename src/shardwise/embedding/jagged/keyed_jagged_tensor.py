"""`KeyedJaggedTensor`: bags of several features, the input of a collection."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise.embedding.jagged.jagged_tensor import JaggedTensor, made
from shardwise.embedding.jagged.segments import Bags, check_keys, checked_lengths, shown
from shardwise.errors import JaggedError
from shardwise.layout import checked, checked_init

if TYPE_CHECKING:
    import torchrec


@runtime_checkable
class JaggedFeatures(Protocol):
    """A batch of ids of several features: a KeyedJaggedTensor of this package or of TorchRec."""

    def keys(self) -> Sequence[str]: ...
    def values(self) -> Tensor: ...
    def lengths(self) -> Tensor: ...
    def weights_or_none(self) -> Tensor | None: ...
    def stride_per_key(self) -> Sequence[int]: ...


@checked_init
class KeyedJaggedTensor(Bags):
    """Bags of several features: first all bags of the first feature, then those of the second.

        KeyedJaggedTensor(
            ["user", "item"],
            torch.tensor([7, 9, 7, 0]),
            lengths=torch.tensor([2, 0, 1, 1]),
        )  # user: [7, 9], []; item: [7], [0]

    Each rank has its own batch; ranks may have different numbers of bags.

    Args:
        keys: the features.
        values: ids of all bags, [ids].
        weights: one of each id, or None.
        lengths: of each bag, [features × bags], int32 or int64.
        offsets: where each bag starts, and the number of ids; instead of lengths.
        stride_per_key: bags of each feature; None: all have as many.

    Raises:
        JaggedError: lengths, offsets, weights or strides that do not fit, or a key twice. On an accelerator, this check
            waits for the lengths.
    """

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride_per_key: Sequence[int] | None = None,
    ) -> None:
        self._keys, self._values, self._weights = list(keys), values, weights
        check_keys("KeyedJaggedTensor", self._keys)
        if values.ndim != 1:
            raise JaggedError(
                f"KeyedJaggedTensor: values are 1-D, got shape {tuple(values.shape)}. "
                f"Fix: values.flatten(), with the ids of all bags after each other."
            )
        self._lengths = checked_lengths("KeyedJaggedTensor", values, weights, lengths, offsets)
        self._strides = self._checked_strides(stride_per_key)

    def _checked_strides(self, strides: Sequence[int] | None) -> list[int]:
        features, bags = len(self._keys), self._lengths.numel()
        if strides is None:
            if bags % max(features, 1) or (bags and not features):
                raise JaggedError(
                    f"KeyedJaggedTensor: {bags} bags are not as many for each of {features} features. "
                    f"Fix: a length for each bag of each feature, or stride_per_key."
                )
            return [bags // features] * features if features else []
        if len(strides) != features or sum(strides) != bags or any(n < 0 for n in strides):
            raise JaggedError(
                f"KeyedJaggedTensor: stride_per_key {list(strides)} are not the bags of {features} features, "
                f"whose sum is {bags}. Fix: the number of bags of each feature."
            )
        return list(strides)

    def keys(self) -> list[str]:
        """The features."""
        return self._keys

    def stride(self) -> int:
        """Bags of each feature.

        Raises:
            JaggedError: features have different numbers of bags.
        """
        if len(set(self._strides)) > 1:
            raise JaggedError(f"Features have different numbers of bags, {self._strides}. Fix: stride_per_key().")
        return self._strides[0] if self._strides else 0

    def stride_per_key(self) -> list[int]:
        """Bags of each feature."""
        return self._strides

    def length_per_key(self) -> list[int]:
        """Ids of each feature."""
        return self._length_per_key

    @cached_property
    def _length_per_key(self) -> list[int]:
        if self._lengths.is_meta:
            raise JaggedError("A KeyedJaggedTensor on meta has no lengths. Fix: make it on a device.")
        ends = [0, *accumulate(self._strides)]
        at = self._offsets[torch.tensor(ends, device=self._offsets.device)].tolist()
        return [stop - start for start, stop in pairwise(at)]

    def offset_per_key(self) -> list[int]:
        """The first id of each feature, and the number of ids."""
        return [0, *accumulate(self._length_per_key)]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "KeyedJaggedTensor":
        """The same bags on another device."""
        return self._with(
            self._keys,
            self._values.to(device, non_blocking=non_blocking),
            None if self._weights is None else self._weights.to(device, non_blocking=non_blocking),
            self._lengths.to(device, non_blocking=non_blocking),
            self._strides,
        )

    def pin_memory(self) -> "KeyedJaggedTensor":
        """The same bags in pinned memory, as a DataLoader with `pin_memory=True` asks for."""
        weights = None if self._weights is None else self._weights.pin_memory()
        return self._with(self._keys, self._values.pin_memory(), weights, self._lengths.pin_memory(), self._strides)

    def __getitem__(self, key: str) -> JaggedTensor:
        """The bags of a feature, as views."""
        if key not in self._keys:
            known = ", ".join(map(repr, self._keys))
            raise KeyError(f"KeyedJaggedTensor has no key {key!r}; it has {known}. Fix: one of its keys.")
        return self.to_dict()[key]

    def to_dict(self) -> dict[str, JaggedTensor]:
        """The bags of each feature, as views."""
        values, lengths = self._values.split(self._length_per_key), self._lengths.split(self._strides)
        weights = [None] * len(values) if self._weights is None else self._weights.split(self._length_per_key)
        return {key: made(*of_key) for key, *of_key in zip(self._keys, values, weights, lengths, strict=True)}

    def split(self, segments: Sequence[int]) -> list["KeyedJaggedTensor"]:
        """As views: the first `segments[0]` features, the next `segments[1]`, …"""
        if sum(segments) != len(self._keys) or any(n < 0 for n in segments):
            raise JaggedError(
                f"split: segments {list(segments)} do not sum to {len(self._keys)} keys. "
                f"Fix: how many features each part has, which are all together."
            )
        found, ends = [], [0, *accumulate(segments)]
        first_bag, first_id = [0, *accumulate(self._strides)], self.offset_per_key()
        for start, stop in pairwise(ends):
            ids = slice(first_id[start], first_id[stop])
            bags = slice(first_bag[start], first_bag[stop])
            weights = None if self._weights is None else self._weights[ids]
            strides = self._strides[start:stop]
            found.append(self._with(self._keys[start:stop], self._values[ids], weights, self._lengths[bags], strides))
        return found

    def permute(self, indices: Sequence[int]) -> "KeyedJaggedTensor":
        """The features at `indices`, in their order.

        Raises:
            JaggedError: an index that is not there, or twice.
        """
        known = range(len(self._keys))
        if len(set(indices)) != len(indices) or any(i not in known for i in indices):
            raise JaggedError(
                f"permute: {list(indices)} are not distinct indices of {len(self._keys)} keys. "
                f"Fix: each once, from 0 to {len(self._keys) - 1}."
            )
        return self.of_features([self._keys[i] for i in indices])

    def of_features(self, names: Sequence[str]) -> "KeyedJaggedTensor":
        """The bags of `names`, in their order."""
        if list(names) == self._keys:
            return self
        features = self.to_dict()
        parts = [features[name] for name in names]
        return self._with(
            list(names),
            torch.cat([part.values() for part in parts]) if parts else self._values[:0],
            None if self._weights is None else torch.cat([part.weights() for part in parts]),
            torch.cat([part.lengths() for part in parts]) if parts else self._lengths[:0],
            [part.lengths().numel() for part in parts],
        )

    @staticmethod
    @checked
    def concat(kjt_list: Sequence["KeyedJaggedTensor"]) -> "KeyedJaggedTensor":
        """The features of all, in their order."""
        weighted = {kjt.weights_or_none() is not None for kjt in kjt_list}
        if len(weighted) != 1:
            what = "some have weights and others have none" if weighted else "there is none"
            fix = "weights=torch.ones(…) for the others" if weighted else "one or more"
            raise JaggedError(f"concat takes KeyedJaggedTensors alike, but {what}. Fix: {fix}.")
        return KeyedJaggedTensor(
            [key for kjt in kjt_list for key in kjt._keys],
            torch.cat([kjt.values() for kjt in kjt_list]),
            torch.cat([kjt.weights() for kjt in kjt_list]) if True in weighted else None,
            torch.cat([kjt.lengths() for kjt in kjt_list]),
            stride_per_key=[n for kjt in kjt_list for n in kjt.stride_per_key()],
        )

    @staticmethod
    @checked
    def from_jt_dict(jt_dict: Mapping[str, JaggedTensor]) -> "KeyedJaggedTensor":
        """One feature of each JaggedTensor."""
        if not jt_dict:
            raise JaggedError("from_jt_dict needs a feature. Fix: {name: JaggedTensor(values, lengths=lengths)}.")
        return KeyedJaggedTensor.concat([
            KeyedJaggedTensor([key], jt.values(), jt.weights_or_none(), jt.lengths()) for key, jt in jt_dict.items()
        ])  # fmt: skip

    @staticmethod
    def from_torchrec(features: JaggedFeatures) -> "KeyedJaggedTensor":
        """The bags of a TorchRec KeyedJaggedTensor, without a copy.

        Raises:
            JaggedError: it has inverse indices, by which TorchRec repeats the results of bags.
        """
        if getattr(features, "inverse_indices_or_none", lambda: None)() is not None:
            raise JaggedError(
                "from_torchrec: this KeyedJaggedTensor has inverse_indices, which would be lost. "
                "Fix: leave them out, and index the results: pooled[key][inverse]."
            )
        return KeyedJaggedTensor(
            list(features.keys()),
            features.values(),
            features.weights_or_none(),
            features.lengths(),
            stride_per_key=list(features.stride_per_key()),
        )

    def to_torchrec(self) -> "torchrec.KeyedJaggedTensor":
        """A TorchRec KeyedJaggedTensor of the same bags, without a copy. TorchRec has to be installed."""
        import torchrec

        strides = None if len(set(self._strides)) <= 1 else [[n] for n in self._strides]
        return torchrec.KeyedJaggedTensor(
            self._keys, self._values, self._weights, self._lengths, stride_per_key_per_rank=strides
        )

    @staticmethod
    def _with(
        keys: list[str], values: Tensor, weights: Tensor | None, lengths: Tensor, strides: list[int]
    ) -> "KeyedJaggedTensor":
        """Of parts that fit."""
        jagged = KeyedJaggedTensor.__new__(KeyedJaggedTensor)
        jagged._keys, jagged._values, jagged._weights = keys, values, weights
        jagged._lengths, jagged._strides = lengths, strides
        return jagged

    def __repr__(self) -> str:
        if self._values.is_meta:
            return f"KeyedJaggedTensor({', '.join(self._keys)}; {self._values.shape[0]} values on meta)"
        parts = (
            f"{key}: {shown(jt.values(), jt.lengths(), jt.weights_or_none())}" for key, jt in self.to_dict().items()
        )
        return "KeyedJaggedTensor(" + ", ".join(parts) + ")"


_Tensors = tuple[Tensor, Tensor | None, Tensor]  # values, weights, lengths

pytree.register_pytree_node(
    KeyedJaggedTensor,
    lambda x: ([x._values, x._weights, x._lengths], (tuple(x._keys), tuple(x._strides))),
    lambda tensors, context: KeyedJaggedTensor._with(list(context[0]), *cast(_Tensors, tensors), list(context[1])),
)
