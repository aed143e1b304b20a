"""`loss_parallel`: scores that are cut along the classes stay so. Rules of cross entropy do it; here it is promised."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwise import collectives
from shardwise.errors import RuleError
from shardwise.layout import Layout, Mesh, Shard
from shardwise.tensor import DTensor
from shardwise.trace.comm_trace import CommEvent, Listener, listening_with

LOSSES: dict[Callable[..., Any], str] = {F.cross_entropy: "cross_entropy", F.nll_loss: "nll_loss"}
_FIX = "Fix: output_layouts=Shard(-1) and use_local_output=False in the style of the layer that makes them."


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Inside, no rank ever holds the scores of all classes, forward or backward.

    `F.cross_entropy` and `nn.CrossEntropyLoss` (also `nll_loss`) take scores that are a DTensor cut along the classes,
    evenly or not, on one axis of the mesh or several, with every option that torch has: ignored targets, weights, label
    smoothing, all reductions, probabilities for targets. Each rank sends a few numbers an example.

    Targets are whole along the axes that cut the classes (a plain one is) and cut as the scores are along the others.

    Raises:
        RuleError: scores that are plain or not cut along the classes; a move that would bring all classes to a rank.
    """
    guard = _Guard()
    with listening_with(guard), _Checked(guard):
        yield


class _Guard(Listener):
    """Refuses moves that take the cut along the classes away from scores that a loss was made of."""

    def __init__(self) -> None:
        self.scores: set[tuple[Mesh, int, int, int]] = set()  # mesh, axis, number of classes, number of elements

    def add(self, layout: Layout, dim: int) -> None:
        for axis, placement in enumerate(layout.placements):
            if placement.is_shard(dim) and 0 not in layout.shape:  # of no example, all classes are nothing
                self.scores.add((layout.mesh, axis, layout.shape[dim], prod(layout.shape)))

    def check(self, move: CommEvent) -> None:
        if move.src is None or move.dst is None or not self.scores:
            return
        src, dst = move.src, move.dst
        for axis, placement in enumerate(src.placements):
            if not isinstance(placement, Shard) or src.mesh.shape[axis] == 1:
                continue
            classes = src.shape[placement.dim]
            if (src.mesh, axis, classes, prod(src.shape)) not in self.scores:
                continue
            if dst.mesh != src.mesh or not dst.placements[axis].is_shard(placement.dim):
                raise RuleError(
                    f"{move.cause} inside loss_parallel() would bring all {classes} classes to a rank: "
                    f"scores move from {src} to {dst}. Fix: use F.cross_entropy on the cut scores, or do it after "
                    f"the block."
                )


class _Checked(TorchFunctionMode):
    """Looks at the scores before a loss is taken of them."""

    def __init__(self, guard: _Guard) -> None:
        super().__init__()
        self.guard = guard

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = LOSSES.get(func)
        if name is not None:
            scores = args[0] if args else kwargs.get("input")
            if isinstance(scores, Tensor):
                _check(name, scores, self.guard)
        return func(*args, **kwargs)


def _check(name: str, scores: Tensor, guard: _Guard) -> None:
    if not isinstance(scores, DTensor):
        if collectives.world_size() > 1:
            raise RuleError(
                f"{name} inside loss_parallel(): the scores, of shape {tuple(scores.shape)}, are a plain tensor: all "
                f"classes, or this rank's taken for all. {_FIX}"
            )
        return
    layout = scores._layout
    dim = min(1, len(layout.shape) - 1)
    if layout.mesh.size() > 1 and not any(p.is_shard(dim) for p in layout.placements):
        raise RuleError(
            f"{name} inside loss_parallel(): the scores are {layout}, not cut along dim {dim}, the classes: every rank "
            f"holds all of them. {_FIX}"
        )
    guard.add(layout, dim)
