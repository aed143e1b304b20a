"""Which gradients of replicated parameters share one all-reduce, and when it is sent. Pure.

max_bytes=10: gradients of 4, 4, 4 and 12 bytes make the buckets (4, 4), (4) and (12)
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

import torch

from shardwise.errors import RuleError
from shardwise.layout import PARTIAL, Layout, Mesh, Partial

Buckets = tuple[tuple[int, ...], ...]  # numbers of leaves, in the order in which all ranks send the buckets


@dataclass(frozen=True)
class BucketOptions:
    """How one rank reduces gradients; see `gradient_buckets`."""

    max_bytes: int = 25 << 20
    overlap: bool | None = None

    def overlaps(self, device: torch.device) -> bool:
        return device.type != "cpu" if self.overlap is None else self.overlap


class SendTime(Enum):
    """When the buckets of a plan are sent."""

    ON_READ = "when a gradient is read"
    IN_BACKWARD = "as soon as a bucket is complete: the last gradients were read after exactly one backward"
    ALWAYS_ON_READ = "other code changes gradients after backward, as DistributedDataParallel does: never early again"


@dataclass
class BucketPlan:
    """The buckets of a set of leaves."""

    buckets: Buckets
    options: BucketOptions
    send_time: SendTime = SendTime.ON_READ

    def update_send_time(self, read_once: bool, unchanged: bool) -> None:
        """Decide for the next backward.

        Args:
            read_once: gradients are read after exactly one backward.
            unchanged: all gradients that were sent in backward are still as they were sent.
        """
        if self.send_time is SendTime.ALWAYS_ON_READ:
            return
        if not read_once:
            self.send_time = SendTime.ON_READ
        else:
            self.send_time = SendTime.IN_BACKWARD if unchanged else SendTime.ALWAYS_ON_READ


class Gradient(NamedTuple):
    """What a plan has to know about the gradient of a leaf on this rank."""

    leaf_number: int
    kind: tuple[Mesh, tuple[int, ...], torch.dtype, torch.device] | None  # equal kinds fit one buffer; None: alone
    nbytes: int


def split_into_buckets(gradients: Iterable[Gradient], max_bytes: int) -> Buckets:
    """Gradients of one kind share a bucket while there is room. Buckets are ordered by when they are complete.

    Ranks that share two buckets share their sizes, so they also agree on which of the two comes first.
    """
    filling: dict[object, tuple[list[int], int]] = {}
    complete: list[tuple[int, ...]] = []
    for number, kind, nbytes in gradients:
        key = number if kind is None else kind
        members, held = filling.pop(key, ([], 0))
        if members and held + nbytes > max_bytes:
            complete.append(tuple(members))
            members, held = [], 0
        filling[key] = [*members, number], held + nbytes
    return (*complete, *(tuple(members) for members, _ in filling.values()))


@lru_cache(maxsize=4096)
def axes_to_reduce(layout: Layout) -> tuple[int, ...]:
    """The axes on which the gradient of a tensor with this layout is Partial."""
    partial = local_gradient(layout).partial_axes
    return tuple(axis for axis, n in enumerate(layout.mesh.shape) if n > 1 and axis in partial)


@lru_cache(maxsize=4096)
def local_gradient(layout: Layout) -> Layout:
    """The layout of the local gradients of a tensor with this layout: the dual.

    Each of the n terms of an average has 1/n of its gradient, and of the values of which a maximum or minimum is chosen
    only the chosen ones have gradients, so these are partial sums.

    Raises:
        RuleError: a product of several ranks' values: the gradients of its factors are not those of the product.
    """
    if any(p == Partial("product") and n > 1 for n, p in zip(layout.mesh.shape, layout.placements, strict=True)):
        raise RuleError(
            f"A tensor as {layout} has no gradient of its own: each rank would have that of its factor. "
            f"Fix: redistribute it to Replicate() before it requires grad."
        )
    duals = [
        PARTIAL if isinstance(p, Partial) and p.reduce_op != "sum" else q
        for p, q in zip(layout.placements, layout.dual().placements, strict=True)
    ]
    return layout.dual().replace(duals)


@lru_cache(maxsize=4096)
def readable(layout: Layout) -> Layout:
    """The layout of `.grad`: that of the tensor, with Partial read as Replicate."""
    return layout.reduced() if layout.partial_axes else layout.unowned
