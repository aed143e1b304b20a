"""Borders of parallel modules: how a tensor, plain or distributed, comes in and goes out.

What a border does to a tensor is worked out once for every shape (of plain tensors) or layout (of DTensors); a warm
one is a dictionary look-up and, where a gradient is wanted, one autograd node for the move there and the move back.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from shardwise import collectives
from shardwise.errors import LayoutError, MismatchError, PlanError
from shardwise.layout import PARTIAL, REPLICATE, Layout, Mesh, Placement, Shard
from shardwise.redistribute.plan import same_parts
from shardwise.redistribute.run import move
from shardwise.tensor import DTensor, moved, plain, tag
from shardwise.tensor.autograd.gradients import as_cotangent, given, taken
from shardwise.tensor.conversion import fitted
from shardwise.trace.capture_hooks import not_capturable
from shardwise.trace.comm_trace import Cause

Axes = tuple[Placement | None, ...]  # one an axis of the mesh; None is the default there, or what a DTensor has
MOST_DIMS = 16  # of a tensor whose parts' shapes are asked for


class Way(NamedTuple):
    """From `src` to `dst` over a border, one side of which is plain; the gradient there is laid out as `border`.

    Args:
        free: nothing is sent or scaled, there or back: the tensor is an alias.
    """

    src: Layout
    dst: Layout
    border: Layout
    free: bool


def _crossed(ctx: Any, local: Tensor, way: Way, cause: Cause) -> Tensor:
    """The forward of both borders: a new tensor, for a Function that returns its operand is none to autograd."""
    ctx.way, ctx.cause = way, cause
    found = move(local, way.src, way.dst, cause)
    return local.view_as(local) if found is local else found


class _Enter(torch.autograd.Function):
    """A plain tensor becomes the part of a DTensor, moved on the way; its gradient leaves as the way says."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, way: Way, cause: Cause) -> Tensor:
        return _crossed(ctx, local, way, cause)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        found = move(grads[0], ctx.way.dst.dual(), ctx.way.border, ctx.cause.for_backward())
        return given(found, ctx.way.border), None, None


class _Leave(torch.autograd.Function):
    """The part of a DTensor becomes a plain tensor, moved on the way.

    Moving and leaving in one node keeps a gradient whole that is: that of summands which were added needs no
    communication.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, way: Way, cause: Cause) -> Tensor:
        return _crossed(ctx, local, way, cause)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        gradient = taken(grads[0], ctx.way.border)
        return as_cotangent(gradient, ctx.way.border, ctx.way.src, ctx.cause.for_backward()), None, None


def enter(x: Tensor, way: Way, cause: Cause) -> DTensor:
    """The DTensor of which the plain `x` is this rank's part."""
    if way.free:
        return tag(plain(x), way.dst)
    with DisableTorchFunctionSubclass():
        if torch.is_grad_enabled() and x.requires_grad:
            return tag(_Enter.apply(x, way, cause), way.dst)  # type: ignore[no-untyped-call]
        found = move(x, way.src, way.dst, cause)
        return tag(plain(found) if found is x else found, way.dst)


def leave(x: DTensor, way: Way, cause: Cause) -> Tensor:
    """This rank's part of `x`, moved, as a plain tensor."""
    local = plain(x)
    if way.free:
        return local
    with DisableTorchFunctionSubclass():
        if torch.is_grad_enabled() and local.requires_grad:
            return _Leave.apply(local, way, cause)  # type: ignore[no-any-return, no-untyped-call]
        return move(local, way.src, way.dst, cause)


class Scope:
    """The forward of a module, while which a tensor that several of its children take crosses the border once.

    Queries, keys and values of one input then send one gradient back, and a cut input is gathered once.
    """

    __slots__ = ("depth", "key", "result", "source")

    def __init__(self) -> None:
        self.depth = 0
        self._forget()

    def _forget(self) -> None:
        self.source: Tensor | None = None
        self.key: Any = None
        self.result: DTensor | None = None

    def open(self, *_: Any) -> None:
        """A forward pre-hook."""
        self.depth += 1

    def close(self, *_: Any) -> None:
        """A forward hook, called also where forward raised: what was shared is let go."""
        self.depth = max(self.depth - 1, 0)
        self._forget()

    def find(self, x: Tensor, key: Any) -> DTensor | None:
        """What `x`, unchanged since, became by `key` a moment ago."""
        return self.result if self.source is x and self.key == key else None

    def keep(self, x: Tensor, key: Any, result: DTensor) -> DTensor:
        """Remember what `x` became; only the last is."""
        if self.depth:
            self.source, self.key, self.result = x, key, result
        return result


def _state(x: Tensor) -> Any:
    """What changes when `x` does; of tensors that do not count their changes, a value equal to none."""
    with DisableTorchFunctionSubclass():
        return object() if x.is_inference() else (x._version, x.requires_grad, torch.is_grad_enabled())


def _is_met(wanted: Placement, have: Placement, ndim: int) -> bool:
    """Whether nothing has to move on this axis."""
    if isinstance(wanted, Shard) and wanted.sizes is None and ndim:
        return have.is_shard(wanted.dim % ndim)
    return wanted == have


class Crossing:
    """What becomes of one tensor at the border of a module.

    Args:
        mesh: of the module.
        axis: along which ranks share the work. They compute one loss, so gradients of plain tensors that are whole
            along it are whole. Along the other axes the loss is the sum of those of the ranks.
        given: how a plain tensor is laid out: this rank's part of what. None where plain tensors may not come.
        wanted: the placements to move to; None keeps those of an axis.
        local: whether it goes on as a plain tensor.
        what: which tensor of which module this is, for errors and reports.
        scope: where several crossings of one tensor are one.
    """

    __slots__ = (
        "_targets", "_ways_in", "_ways_out", "axis", "cause", "given", "local", "mesh", "scope", "wanted", "what",
    )  # fmt: skip

    def __init__(
        self,
        mesh: Mesh,
        axis: int,
        given: Axes | None,
        wanted: Axes,
        local: bool,
        what: str,
        scope: Scope | None = None,
    ) -> None:
        self.mesh, self.axis, self.given, self.wanted, self.local, self.what = mesh, axis, given, wanted, local, what
        self.scope = scope if scope is not None else Scope()
        self.cause = Cause("explicit", "parallelize_module", what)
        self._ways_in: dict[torch.Size, Way] = {}
        self._ways_out: dict[Layout, Way] = {}
        self._targets: dict[Layout, tuple[Layout, bool]] = {}

    def __call__(self, x: Tensor) -> Tensor:
        if type(x) is DTensor:
            if self.local:
                return self._left(x)
            layout = x._layout
            target, alike = self._targets.get(layout) or self._target(layout)
            if alike:
                return x if target is layout else tag(plain(x), target)
            return self._shared(x, target, lambda: moved(x, target, self.cause))
        way = self._ways_in.get(x.shape) or self._way_in(x)
        found = self._shared(x, way, lambda: enter(x, way, self.cause))
        return self._left(found) if self.local else found

    def _left(self, x: DTensor) -> Tensor:
        return leave(x, self._ways_out.get(x._layout) or self._way_out(x._layout), self.cause)

    def _shared(self, x: Tensor, key: Any, cross: Callable[[], DTensor]) -> DTensor:
        scope = self.scope
        if not scope.depth:
            return cross()
        full = key, _state(x)
        found = scope.find(x, full)
        return scope.keep(x, full, cross()) if found is None else found

    def _target(self, layout: Layout) -> tuple[Layout, bool]:
        """Where a DTensor of this layout moves, and whether every rank has there what it has here."""
        if layout.mesh != self.mesh:
            raise LayoutError(
                f"{self.what} is a DTensor on {layout.mesh}, but the module was parallelised on {self.mesh}. "
                f"Fix: make it on that mesh, or redistribute(mesh, placements) it before."
            )
        target = self._wanted(layout)
        found = self._targets[layout] = target, same_parts(layout, target)
        return found

    def _way_out(self, layout: Layout) -> Way:
        """How a DTensor of this layout becomes plain."""
        target, alike = self._target(layout)
        reduced = target.reduced().placements
        summed = [PARTIAL if p == REPLICATE and axis != self.axis else p for axis, p in enumerate(reduced)]
        border = target.replace(summed)
        free = alike and same_parts(border, layout.dual())
        way = self._ways_out[layout] = Way(layout, target, border, free)
        return way

    def _wanted(self, layout: Layout) -> Layout:
        """`layout` as the module wants it. A cut without sizes is any cut of that dim; new ones are inside others."""
        placements, new = list(layout.placements), []
        for axis, wanted in enumerate(self.wanted):
            if wanted is not None and not _is_met(wanted, placements[axis], len(layout.shape)):
                placements[axis] = wanted
                new.append(axis)
        order = [*(axis for axis in layout.shard_order if axis not in new), *new]
        # Sizes that an axis had inside of a cut that is gone fit nothing.
        fresh = [Shard(p.dim) if isinstance(p, Shard) and axis not in new else p for axis, p in enumerate(placements)]
        told = None
        for candidate in (placements, fresh):
            try:
                return Layout(self.mesh, candidate, layout.shape, order)
            except LayoutError as error:
                told = told or error
        raise LayoutError(f"{self.what}: {told}") from None

    def _way_in(self, x: Any) -> Way:
        """How a plain tensor of this shape comes in. Kept, unless other ranks had to be asked for its sizes."""
        if not isinstance(x, Tensor):
            raise PlanError(
                f"{self.what} must be a tensor, got {type(x).__name__}. Fix: None in the layouts of the plan."
            )
        if self.given is None:
            raise LayoutError(
                f"{self.what} is a plain tensor, and the plan does not say how it is laid out. "
                f"Fix: pass a DTensor, or say its layout in the style."
            )
        src, known = self._layout_of_part(x, [p or (Shard(0) if x.ndim else REPLICATE) for p in self.given])
        dst, border = self._wanted(src), src.reduced()
        way = Way(src, dst, border, same_parts(src, dst) and same_parts(dst.dual(), border))
        if known:
            self._ways_in[x.shape] = way
        return way

    def _layout_of_part(self, x: Tensor, placements: list[Placement]) -> tuple[Layout, bool]:
        """The whole of which `x` is this rank's part, and whether it follows from the plan alone."""
        shape, told = list(x.shape), list(placements)
        cuts = [(axis, p) for axis, p in enumerate(placements) if isinstance(p, Shard)]
        dims = [p.dim % max(x.ndim, 1) for _, p in cuts]
        if any(not -x.ndim <= p.dim < x.ndim for _, p in cuts):
            raise LayoutError(f"{self.what}: a tensor of shape {tuple(x.shape)} cannot be laid out as {placements}.")
        known = len(set(dims)) == len(dims)
        for (axis, p), dim in zip(cuts, dims, strict=True):
            if p.sizes is None and self.mesh.shape[axis] == 1:
                told[axis] = p = Shard(dim, (shape[dim],))
            if p.sizes is None or not isinstance(p.sizes[0], int):
                known = False
            elif known:
                shape[dim] = sum(p.sizes)
        try:
            if not known:
                return self._asked(x, told), False
            layout = Layout(self.mesh, told, shape)
        except (LayoutError, MismatchError) as error:
            raise type(error)(f"{self.what}: {error}") from None
        expected = layout.local_shape(collectives.rank())
        if expected != tuple(x.shape):
            raise LayoutError(
                f"{self.what}: a plain tensor laid out as {list(layout.placements)} on {self.mesh} is a part of shape "
                f"{expected} on rank {collectives.rank()}, got {tuple(x.shape)}. Fix: pass that part, say in the style "
                f"how the tensor is laid out, or pass a DTensor."
            )
        return layout, True

    def _asked(self, x: Tensor, placements: list[Placement]) -> Layout:
        """The whole of which `x` is a part, from the shapes of all parts: one small exchange."""
        not_capturable(
            f"asking other ranks for the shapes of {self.what} there; a DTensor or sizes in its layout avoid it"
        )
        ranks = tuple(sorted(self.mesh.ranks))
        said = [x.ndim, *x.shape, *[0] * (MOST_DIMS - x.ndim)]
        sent = torch.tensor(said * len(ranks))
        heard = collectives.all_to_all(sent, [len(said)] * len(ranks), [len(said)] * len(ranks), ranks)
        answers = heard.view(len(ranks), len(said)).tolist()
        shapes = {rank: tuple(shape[:ndim]) for rank, (ndim, *shape) in zip(ranks, answers, strict=True)}
        layout = fitted(self.mesh, placements, shapes, None)
        wrong = {rank: shape for rank, shape in shapes.items() if shape != layout.local_shape(rank)}
        if wrong:
            lines = [
                f"  rank {rank}: expected {layout.local_shape(rank)}, got {shape}" for rank, shape in wrong.items()
            ]
            raise MismatchError(
                f"plain tensors laid out as {placements} on {self.mesh} are parts of one whole, but these do not fit:\n"
                + "\n".join(lines)
                + "\n  Fix: pass parts of the expected shapes, or say in the style how the tensor is laid out."
            )
        return layout
