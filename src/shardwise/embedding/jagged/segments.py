"""Lengths and offsets of bags, compared with the values that they divide."""

from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.errors import JaggedError
from shardwise.tensor import DTensor

INTEGERS = (torch.int32, torch.int64)


def check_keys(what: str, keys: Sequence[str]) -> None:
    """Each key once.

    Raises:
        JaggedError: one is there twice.
    """
    if len(set(keys)) != len(keys):
        twice = next(key for key, count in Counter(keys).items() if count > 1)
        raise JaggedError(f"{what} has the key {twice!r} twice. Fix: one name for each feature.")


def checked_lengths(
    what: str, values: Tensor, weights: Tensor | None, lengths: Tensor | None, offsets: Tensor | None
) -> Tensor:
    """The lengths of bags of `values`, given as lengths, offsets or both.

    Raises:
        JaggedError: they do not fit the values, or weights do not.
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


class Bags:
    """What jagged tensors with and without keys have in common."""

    _values: Tensor
    _weights: Tensor | None
    _lengths: Tensor

    def values(self) -> Tensor:
        """Of all bags: [values, ...], or [ids] if there are keys."""
        return self._values

    def weights(self) -> Tensor:
        """Of each value.

        Raises:
            JaggedError: there are none.
        """
        if self._weights is None:
            raise JaggedError(f"This {type(self).__name__} has no weights. Fix: weights_or_none().")
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        """Of each value, or None."""
        return self._weights

    def lengths(self) -> Tensor:
        """Of each bag, by key if there are keys: [bags]."""
        return self._lengths

    def offsets(self) -> Tensor:
        """Where each bag starts, and the number of values, [bags + 1]."""
        return self._offsets

    @cached_property
    def _offsets(self) -> Tensor:
        lengths = self._lengths
        return F.pad(lengths.cumsum(0, dtype=lengths.dtype), (1, 0))

    def device(self) -> torch.device:
        """Of the values."""
        return self._values.device


def shown(values: Tensor, lengths: Tensor, weights: Tensor | None) -> str:
    """The values of some bags, with their weights."""
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
