"""Ids of bags of different lengths, with the names of TorchRec: `JaggedTensor` and `KeyedJaggedTensor`."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Protocol, Self, cast, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise._layout import checked, checked_init
from shardwise._tensor import DTensor
from shardwise.errors import JaggedError

if TYPE_CHECKING:
    import torchrec

INTEGERS = (torch.int32, torch.int64)


class Bags:
    """The parts of jagged tensors with and without keys."""

    _values: Tensor
    _weights: Tensor | None

    @property
    def _lengths(self) -> Tensor:
        """The lengths, which were checked once, and from which other values are derived.

        Raises:
            JaggedError: they were changed in place since the check.
        """
        lengths, version = self._checked
        if version != version_of(lengths):
            raise JaggedError(
                f"The lengths of this {type(self).__name__} were changed in place after it was made. "
                f"Fix: make a new one: {type(self).__name__}(…, lengths=lengths)."
            )
        return lengths

    @_lengths.setter
    def _lengths(self, lengths: Tensor) -> None:
        self._checked = lengths, version_of(lengths)

    def values(self) -> Tensor:
        """The values of all bags: [values, ...], or [ids] if there are keys."""
        return self._values

    def weights(self) -> Tensor:
        """The weight of each value.

        Raises:
            JaggedError: the tensor has no weights.
        """
        if self._weights is None:
            raise JaggedError(f"This {type(self).__name__} has no weights. Fix: weights_or_none().")
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        """The weight of each value, or None."""
        return self._weights

    def lengths(self) -> Tensor:
        """The length of each bag, by key if there are keys: [bags]. They must not be changed in place."""
        return self._lengths

    def offsets(self) -> Tensor:
        """The start of each bag, and the number of values, [bags + 1]."""
        self.lengths()  # refuses lengths that were changed since
        return self._offsets

    @cached_property
    def _offsets(self) -> Tensor:
        lengths = self._lengths
        return F.pad(lengths.cumsum(0, dtype=lengths.dtype), (1, 0))

    def device(self) -> torch.device:
        """The device of the values."""
        return self._values.device

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """The bags on another device."""
        return self._each(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """The bags in pinned memory, as for a DataLoader with `pin_memory=True`."""
        return self._each(Tensor.pin_memory)

    def _each(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """The bags with `fn` applied to each tensor, without validation."""
        made = copy(self)
        made._values, made._lengths = fn(self._values), fn(self._lengths)
        made._weights = None if self._weights is None else fn(self._weights)
        return made


def version_of(x: object) -> int:
    """The number of in-place changes of a tensor; 0 if torch does not count them, or for a pytree's placeholder."""
    return x._version if isinstance(x, Tensor) and not x.is_inference() else 0


class _Nested(Protocol):
    """The methods of nested tensors that torch's annotations lack."""

    def offsets(self) -> Tensor: ...


@checked_init
class JaggedTensor(Bags):
    """Bags of different lengths, one after another.

        JaggedTensor(torch.tensor([7, 9, 7]), lengths=torch.tensor([2, 0, 1]))  # [7, 9], [], [7]

    Args:
        values: of all bags, [values, ...].
        weights: one of each value, or None.
        lengths: of each bag, [bags], int32 or int64.
        offsets: start of each bag, and the number of values, [bags + 1]; instead of lengths.

    Raises:
        JaggedError: lengths, offsets or weights that do not fit the values. On an accelerator, this check waits for the
            lengths.
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

    def __reduce__(self) -> tuple[object, ...]:  # a copy counts its own versions
        return from_parts, (self._values, self._weights, self._lengths)

    @staticmethod
    def from_dense(values: Sequence[Tensor], weights: Sequence[Tensor] | None = None) -> "JaggedTensor":
        """The bags of a sequence of tensors, one for each bag."""
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

        `desired_length` None: the longest bag.
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
            JaggedError: another tensor, or one with gaps between bags.
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
        """A nested tensor with `layout=torch.jagged` of these values, without a copy; weights are left out."""
        nested: Tensor = torch.nested.nested_tensor_from_jagged(self._values, offsets=self._offsets)
        return nested

    def __repr__(self) -> str:
        if self._values.is_meta:
            return f"JaggedTensor({self._values.shape[0]} values of {self._lengths.numel()} bags on meta)"
        return f"JaggedTensor({format_bags(self._values, self._lengths, self._weights)})"


def from_parts(values: Tensor, weights: Tensor | None, lengths: Tensor) -> JaggedTensor:
    """Create a tensor from its parts, without validation."""
    jagged = JaggedTensor.__new__(JaggedTensor)
    jagged._values, jagged._weights, jagged._lengths = values, weights, lengths
    return jagged


pytree.register_pytree_node(
    JaggedTensor, lambda x: ([x._values, x._weights, x._lengths], None), lambda tensors, _: from_parts(*tensors)
)


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
        offsets: start of each bag, and the number of ids; instead of lengths.
        stride_per_key: bags of each feature; None: an equal number for all.

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
                    f"KeyedJaggedTensor: {bags} bags cannot be divided evenly among {features} features. "
                    f"Fix: a length for each bag of each feature, or stride_per_key."
                )
            return [bags // features] * features if features else []
        if len(strides) != features or sum(strides) != bags or any(n < 0 for n in strides):
            raise JaggedError(
                f"KeyedJaggedTensor: stride_per_key is {list(strides)}, expected length {features} and sum {bags}. "
                f"Fix: the number of bags of each feature."
            )
        return list(strides)

    def __reduce__(self) -> tuple[object, ...]:  # a copy counts its own versions
        return self._from_parts, (self._keys, self._values, self._weights, self._lengths, self._strides)

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
        self.lengths()  # refuses lengths that were changed since
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
        return {key: from_parts(*of_key) for key, *of_key in zip(self._keys, values, weights, lengths, strict=True)}

    def split(self, segments: Sequence[int]) -> list["KeyedJaggedTensor"]:
        """Views of the first `segments[0]` features, the next `segments[1]`, …"""
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
            found.append(
                self._from_parts(self._keys[start:stop], self._values[ids], weights, self._lengths[bags], strides)
            )
        return found

    def permute(self, indices: Sequence[int]) -> "KeyedJaggedTensor":
        """The features at `indices`, in this order.

        Raises:
            JaggedError: an index that does not exist, or is repeated.
        """
        known = range(len(self._keys))
        if len(set(indices)) != len(indices) or any(i not in known for i in indices):
            raise JaggedError(
                f"permute: {list(indices)} are not distinct indices of {len(self._keys)} keys. "
                f"Fix: each once, from 0 to {len(self._keys) - 1}."
            )
        return self.of_features([self._keys[i] for i in indices])

    def of_features(self, names: Sequence[str]) -> "KeyedJaggedTensor":
        """The bags of features `names`, in this order."""
        if list(names) == self._keys:
            return self
        features = self.to_dict()
        parts = [features[name] for name in names]
        return self._from_parts(
            list(names),
            torch.cat([part.values() for part in parts]) if parts else self._values[:0],
            None if self._weights is None else torch.cat([part.weights() for part in parts]),
            torch.cat([part.lengths() for part in parts]) if parts else self._lengths[:0],
            [part.lengths().numel() for part in parts],
        )

    @staticmethod
    @checked
    def concat(kjt_list: Sequence["KeyedJaggedTensor"]) -> "KeyedJaggedTensor":
        """The features of all tensors, in order."""
        weighted = {kjt.weights_or_none() is not None for kjt in kjt_list}
        if len(weighted) != 1:
            what = "some KeyedJaggedTensors have weights and others have none" if weighted else "the list is empty"
            fix = "weights=torch.ones(…) for the others" if weighted else "one KeyedJaggedTensor or more"
            raise JaggedError(f"concat: {what}. Fix: {fix}.")
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
        """A tensor with one feature for each JaggedTensor."""
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
        """A TorchRec KeyedJaggedTensor of these bags, without a copy. TorchRec has to be installed."""
        import torchrec

        strides = None if len(set(self._strides)) <= 1 else [[n] for n in self._strides]
        return torchrec.KeyedJaggedTensor(
            self._keys, self._values, self._weights, self._lengths, stride_per_key_per_rank=strides
        )

    @staticmethod
    def _from_parts(
        keys: list[str], values: Tensor, weights: Tensor | None, lengths: Tensor, strides: list[int]
    ) -> "KeyedJaggedTensor":
        """Create a tensor from its parts, without validation."""
        jagged = KeyedJaggedTensor.__new__(KeyedJaggedTensor)
        jagged._keys, jagged._values, jagged._weights = keys, values, weights
        jagged._lengths, jagged._strides = lengths, strides
        return jagged

    def __repr__(self) -> str:
        if self._values.is_meta:
            return f"KeyedJaggedTensor({', '.join(self._keys)}; {self._values.shape[0]} values on meta)"
        parts = (
            f"{key}: {format_bags(jt.values(), jt.lengths(), jt.weights_or_none())}"
            for key, jt in self.to_dict().items()
        )
        return "KeyedJaggedTensor(" + ", ".join(parts) + ")"


_Tensors = tuple[Tensor, Tensor | None, Tensor]  # values, weights, lengths

pytree.register_pytree_node(
    KeyedJaggedTensor,
    lambda x: ([x._values, x._weights, x._lengths], (tuple(x._keys), tuple(x._strides))),
    lambda tensors, context: KeyedJaggedTensor._from_parts(
        list(context[0]), *cast(_Tensors, tensors), list(context[1])
    ),
)


# ---- checks and texts ----------------------------------------------------------------------------------------


def check_keys(what: str, keys: Sequence[str]) -> None:
    """Check that each key occurs once.

    Raises:
        JaggedError: a key is repeated.
    """
    if len(set(keys)) != len(keys):
        twice = next(key for key, count in Counter(keys).items() if count > 1)
        raise JaggedError(f"{what} has the key {twice!r} twice. Fix: one name for each feature.")


def checked_lengths(
    what: str, values: Tensor, weights: Tensor | None, lengths: Tensor | None, offsets: Tensor | None
) -> Tensor:
    """The lengths of bags of `values`, given as lengths, offsets or both.

    Raises:
        JaggedError: lengths or weights do not fit the values.
    """
    for name, tensor in (("values", values), ("weights", weights), ("lengths", lengths), ("offsets", offsets)):
        if isinstance(tensor, DTensor):
            raise JaggedError(f"{what}: {name} are this rank's own, got a DTensor. Fix: {name}.to_local().")
    if values.ndim == 0:
        raise JaggedError(
            f"{what}: values have no dim to divide, got the scalar {values.item()}. Fix: values.unsqueeze(0)."
        )
    if weights is not None and weights.shape != values.shape[:1]:
        raise JaggedError(
            f"{what}: {values.shape[0]} values need as many weights, got weights of shape {tuple(weights.shape)}. "
            f"Fix: one weight for each value, 1-D."
        )
    if lengths is None and offsets is None:
        raise JaggedError(f"{what} needs lengths or offsets. Fix: lengths=torch.tensor([...]), one of each bag.")
    if lengths is None:
        assert offsets is not None
        lengths = _of_offsets(what, offsets)
    elif offsets is not None and not torch.equal(_of_offsets(what, offsets), lengths.to(offsets.dtype)):
        raise JaggedError(f"{what}: lengths are not the differences of offsets. Fix: give one of them.")
    _check(what, values, lengths)
    return lengths


def _of_offsets(what: str, offsets: Tensor) -> Tensor:
    _check_integers(what, "offsets", offsets)
    if not offsets.numel() or int(offsets[0]) != 0:
        first = int(offsets[0]) if offsets.numel() else "none"
        raise JaggedError(f"{what}: offsets start with 0, got {first}. Fix: F.pad(lengths.cumsum(0), (1, 0)).")
    return offsets.diff()


def _check_integers(what: str, name: str, tensor: Tensor) -> None:
    if tensor.ndim != 1 or tensor.dtype not in INTEGERS:
        raise JaggedError(
            f"{what}: {name} are 1-D and int32 or int64, got {tensor.ndim}-D {tensor.dtype}. "
            f"Fix: {name}{'.flatten()' * (tensor.ndim != 1)}{'.long()' * (tensor.dtype not in INTEGERS)}."
        )


def _check(what: str, values: Tensor, lengths: Tensor) -> None:
    _check_integers(what, "lengths", lengths)
    if lengths.device != values.device:
        raise JaggedError(f"{what}: values are on {values.device}, lengths on {lengths.device}. Fix: one device.")
    if lengths.is_meta:
        return
    if lengths.numel() and int(lengths.min()) < 0:
        bag = int((lengths < 0).nonzero()[0])
        raise JaggedError(f"{what}: bag {bag} has length {int(lengths[bag])}. Fix: lengths of 0 or more.")
    total = int(lengths.sum())
    if total != values.shape[0]:
        raise JaggedError(
            f"{what}: the lengths of {lengths.numel()} bags sum to {total}, but there are {values.shape[0]} values. "
            f"Fix: one length for each bag, or the values of all bags."
        )


def format_bags(values: Tensor, lengths: Tensor, weights: Tensor | None) -> str:
    """The values and weights of some bags, as text."""
    most = 6
    parts = values.detach().split(lengths.tolist())
    texts = [_row(part) for part in parts[:most]]
    if weights is not None:
        of_bags = weights.detach().split(lengths.tolist())
        texts = [f"{text} × {_row(w)}" for text, w in zip(texts, of_bags, strict=False)]
    return "[" + ", ".join(texts) + (f", … {len(parts)} bags]" if len(parts) > most else "]")


def _row(values: Tensor) -> str:
    most = 8
    if values.ndim > 1:
        return f"[{values.shape[0]} of shape {tuple(values.shape[1:])}]"
    texts = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values[:most].tolist()]
    return "[" + ", ".join(texts) + (f", … {len(values)}]" if len(values) > most else "]")
