"""Strides of tensors without gaps, and the order of dims in memory."""

from collections.abc import Sequence
from math import prod


def dims_by_stride(strides: Sequence[int]) -> list[int]:
    """The dims from the one with the largest stride to that with the smallest: the order of an element in memory."""
    return sorted(range(len(strides)), key=strides.__getitem__, reverse=True)


def strides_in_order(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor of `shape` without gaps whose dims are in this order in memory, such as (1, 0)."""
    by_dim = dict(zip(order, contiguous_strides([shape[d] for d in order]), strict=True))
    return tuple([by_dim[d] for d in range(len(order))])


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a row-major tensor of `shape`, in elements."""
    return tuple(prod(max(n, 1) for n in shape[dim + 1 :]) for dim in range(len(shape)))
