"""`loss_parallel`: cross entropy on logits sharded along the classes, which are never gathered."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwise import _collectives as collectives
from shardwise._layout import Layout, Mesh, Shard
from shardwise._rules.row import Args, Kwargs, Op
from shardwise._tensor import DTensor
from shardwise._trace.comm_trace import CommEvent, Listener, listening_with
from shardwise.errors import LayoutError, RuleError

LOSSES: dict[object, str] = {F.cross_entropy: "cross_entropy", F.nll_loss: "nll_loss"}
_FIX = "Fix: output_layouts=Shard(-1) and use_local_output=False in the style of the layer that makes them."


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Inside, no rank ever holds the logits of all classes, forward or backward, unless it asks for them.

    `F.cross_entropy` and `nn.CrossEntropyLoss` (also `nll_loss`) take logits that are a DTensor sharded along the
    classes, evenly or not, on one mesh axis or several, with all options of torch: ignored targets, weights, label
    smoothing, all reductions, probabilities as targets. Each rank sends a few numbers per example.

    Targets are replicated along the axes that shard the classes (a plain tensor is) and sharded like the logits along
    the others.

    Raises:
        LayoutError: logits that are plain or not sharded along the classes.
        RuleError: a redistribution that nobody called, as `full_tensor()` is, and that would give a rank all classes.
    """
    guard = _Guard()
    with listening_with(guard), _CheckLosses(guard):
        yield


class _Guard(Listener):
    """Refuses to gather the classes of logits that a loss was computed from."""

    def __init__(self) -> None:
        self.logits: set[tuple[Mesh, int, int, int]] = set()  # mesh, axis, number of classes, number of elements

    def add(self, layout: Layout, dim: int) -> None:
        for axis, placement in enumerate(layout.placements):
            if placement.is_shard(dim) and 0 not in layout.shape:  # without examples there is nothing to gather
                self.logits.add((layout.mesh, axis, layout.shape[dim], prod(layout.shape)))

    def check(self, move: CommEvent) -> None:
        called = move.cause.kind == "explicit" and not move.cause.backward
        if move.src is None or move.dst is None or called or not self.logits:
            return
        src, dst = move.src, move.dst
        for axis, placement in enumerate(src.placements):
            if not isinstance(placement, Shard) or src.mesh.shape[axis] == 1:
                continue
            classes = src.shape[placement.dim]
            if (src.mesh, axis, classes, prod(src.shape)) not in self.logits:
                continue
            if dst.mesh != src.mesh or not dst.placements[axis].is_shard(placement.dim):
                raise RuleError(
                    f"{move.cause} inside loss_parallel() would gather all {classes} classes: logits are redistributed "
                    f"from {src} to {dst}. Fix: use F.cross_entropy on the sharded logits, or do it after the block."
                )


class _CheckLosses(TorchFunctionMode):
    """Checks the logits before a loss is computed from them."""

    def __init__(self, guard: _Guard) -> None:
        super().__init__()
        self.guard = guard

    def __torch_function__(self, func: Op, types: object, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        name = LOSSES.get(func)
        if name is not None:
            logits = args[0] if args else kwargs.get("input")
            if isinstance(logits, Tensor):
                _check(name, logits, self.guard)
        return func(*args, **kwargs)


def _check(name: str, logits: Tensor, guard: _Guard) -> None:
    if not isinstance(logits, DTensor):
        if collectives.world_size() > 1:
            raise LayoutError(
                f"{name} inside loss_parallel(): the logits, of shape {tuple(logits.shape)}, are a plain tensor, which "
                f"has all classes or is a local shard read as all of them. {_FIX}"
            )
        return
    layout = logits._layout
    dim = min(1, len(layout.shape) - 1)
    if layout.mesh.size() > 1 and not any(p.is_shard(dim) for p in layout.placements):
        raise LayoutError(
            f"{name} inside loss_parallel(): the logits are {layout}, not sharded along dim {dim}, the classes: every "
            f"rank holds all of them. {_FIX}"
        )
    guard.add(layout, dim)
