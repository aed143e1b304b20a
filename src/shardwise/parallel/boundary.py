"""Input and output redistribution at the boundaries of parallel modules.

The plan for a boundary is computed once for every shape of a plain tensor and every layout of a DTensor. After that a
boundary costs a dictionary look-up and, if a gradient is needed, one autograd node for redistribution and its dual.
"""

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from shardwise import _collectives as collectives
from shardwise._layout import PARTIAL, REPLICATE, Layout, Mesh, Placement, Shard
from shardwise._redistribute.plan import same_local_shards
from shardwise._redistribute.run_plan import redistribute_local
from shardwise._tensor import DTensor, plain, tag, to_layout
from shardwise._tensor.arguments import check_dense
from shardwise._tensor.autograd.gradients import as_cotangent, record_from_plain, record_to_plain
from shardwise._tensor.conversion import layout_of_local_shapes
from shardwise._tensor.torch_objects import is_torch_dtensor
from shardwise._tensor.transforms import check_no_transform, check_untransformed
from shardwise._torch_bridge.torch_dtensors import from_torch_dtensor
from shardwise._trace.autograd_function import TensorFunction
from shardwise._trace.capture_hooks import not_capturable
from shardwise._trace.comm_trace import Cause
from shardwise.errors import LayoutError, MismatchError, PlanError

AxisPlacements = tuple[Placement | None, ...]
"""One placement per mesh axis; None is the default there, or keeps the placement of a DTensor."""
_BESIDE = (
    "pass this rank's part of the batch, x.to_local(), and of the labels; or parallelize_module(model, mesh) on the "
    "mesh of both axes, and the batch on it: then attention has this rank's part of the batch and of the heads, "
    "q.view(*q.shape[:2], -1, head_dim), and norms need a style too"
)
MAX_NDIM = 16  # dims of a plain tensor whose shapes are exchanged


class BoundaryPlan(NamedTuple):
    """Redistribution from `src` to `dst` at a boundary, one side of which is a plain tensor.

    Args:
        plain_grad: layout of the gradient on the plain side.
        is_alias: neither forward nor backward sends or scales anything.
    """

    src: Layout
    dst: Layout
    plain_grad: Layout
    is_alias: bool


class _Boundary(TensorFunction):
    """Redistributes a local tensor."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, plan: BoundaryPlan, cause: Cause) -> Tensor:
        """A new tensor also if nothing is sent: autograd ignores a Function that returns its operand."""
        ctx.plan, ctx.cause = plan, cause
        out = redistribute_local(local, plan.src, plan.dst, cause)
        return local.view_as(local) if out is local else out


class _FromPlain(_Boundary):
    """Reads a plain tensor as a local shard and redistributes it."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad = redistribute_local(grads[0], ctx.plan.dst.dual(), ctx.plan.plain_grad, ctx.cause.for_backward())
        return record_to_plain(grad, ctx.plan.plain_grad), None, None


class _ToPlain(_Boundary):
    """Redistributes a DTensor and returns its local tensor, in one node.

    So a replicated gradient stays replicated: the gradient of an all-reduced Partial tensor is not sent.
    """

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad = record_from_plain(grads[0], ctx.plan.plain_grad)
        return as_cotangent(grad, ctx.plan.plain_grad, ctx.plan.src, ctx.cause.for_backward()), None, None


def _from_plain(x: Tensor, plan: BoundaryPlan, cause: Cause) -> DTensor:
    if plan.is_alias:
        return tag(plain(x), plan.dst)
    with DisableTorchFunctionSubclass():
        if torch.is_grad_enabled() and x.requires_grad:
            return tag(_FromPlain.apply(x, plan, cause), plan.dst)
        out = redistribute_local(x, plan.src, plan.dst, cause)
        return tag(plain(out) if out is x else out, plan.dst)


@dataclass(slots=True, eq=False)
class SharedInput:
    """The last redistributed input of a module's children, kept while the forward of the module runs.

    Query, key and value projections of one input then share one all-gather forward and one all-reduce backward.
    """

    depth: int = 0  # running forwards
    source: Tensor | None = None
    key: object = None
    result: DTensor | None = None

    def open(self, *_: object) -> None:
        """A forward pre-hook."""
        self.depth += 1

    def close(self, *_: object) -> None:
        """A forward hook, also called if forward raised. Frees the shared input."""
        self.depth = max(self.depth - 1, 0)
        self.source = self.key = self.result = None

    def once(self, x: Tensor, key: object, redistribute: Callable[[], DTensor]) -> DTensor:
        """The result of `redistribute` for `x`; computed once in a forward, unless `x` changes."""
        if not self.depth:
            return redistribute()
        versioned = key, _version(x)
        if self.result is None or self.source is not x or self.key != versioned:
            self.source, self.key, self.result = x, versioned, redistribute()
        return self.result


def _version(x: Tensor) -> object:
    """A value that differs after `x` changed. For inference tensors, which count no changes, it equals nothing."""
    with DisableTorchFunctionSubclass():
        return object() if x.is_inference() else (x._version, x.requires_grad, torch.is_grad_enabled())


def _is_met(desired: Placement, placement: Placement, ndim: int) -> bool:
    """Whether this axis needs no communication: a `Shard` without sizes accepts any sizes."""
    if isinstance(desired, Shard) and desired.sizes is None and ndim:
        return placement.is_shard(desired.dim % ndim)
    return desired == placement


@dataclass(slots=True, eq=False)
class BoundaryRedistribution:
    """Redistributes one input or output tensor of a module.

    Args:
        mesh: of the module.
        axis: the tensor-parallel axis. Its ranks compute one loss, so gradients of plain tensors that are replicated
            on it are replicated. Along the other axes the loss is the sum of those of the ranks.
        plain_layout: how a plain tensor is laid out; None refuses plain tensors.
        desired_layout: the placements to redistribute to; None keeps those of an axis.
        use_local_output: return the local tensor.
        what: the name of the tensor and its module, for errors and communication traces.
        shared: the input that sibling modules share.
        features: the global size of the last dim of a plain tensor, if known.
        style: the class of its style, for communication traces.
    """

    mesh: Mesh
    axis: int
    plain_layout: AxisPlacements | None
    desired_layout: AxisPlacements
    use_local_output: bool
    what: str
    shared: SharedInput = field(default_factory=SharedInput)
    features: int | None = None
    style: InitVar[str] = ""
    cause: Cause = field(init=False)
    _plain_plans: dict[torch.Size, BoundaryPlan] = field(init=False, default_factory=dict)
    _dtensor_plans: dict[Layout, BoundaryPlan] = field(init=False, default_factory=dict)
    _targets: dict[Layout, tuple[Layout, bool]] = field(init=False, default_factory=dict)

    def __post_init__(self, style: str) -> None:
        self.cause = Cause("explicit", "parallelize_module", self.what, f"the style is {style}" if style else "")

    def __call__(self, x: Tensor) -> Tensor:
        if type(x) is DTensor:
            if self.use_local_output:
                return self._to_local(x)
            layout = x._layout
            target, same_shards = self._targets.get(layout) or self._target(layout)
            if same_shards:
                return x if target == layout else tag(plain(x), target)
            return self.shared.once(x, target, lambda: to_layout(x, target, self.cause))
        if type(x) is not Tensor:
            if is_torch_dtensor(x):
                return self(from_torch_dtensor(x))
            if not isinstance(x, Tensor):
                got = type(x).__name__
                raise PlanError(f"{self.what} must be a tensor, got {got}. Fix: None in the layouts of the plan.")
        check_untransformed(x, self.what)
        plan = self._plain_plans.get(x.shape) or self._plan_from_plain(x)
        if plan.src.placements[self.axis] == REPLICATE:
            replicas = tuple(sorted(self.mesh.axis_ranks(collectives.rank(), self.axis)))
            collectives.expect_equal(x, replicas, f"{self.what}: the plain tensor")
        out = self.shared.once(x, plan, lambda: _from_plain(x, plan, self.cause))
        return self._to_local(out) if self.use_local_output else out

    def _to_local(self, x: DTensor) -> Tensor:
        check_no_transform(self.what)
        plan, local = self._dtensor_plans.get(x._layout) or self._plan_to_plain(x._layout), plain(x)
        if plan.is_alias:
            return local
        with DisableTorchFunctionSubclass():
            if torch.is_grad_enabled() and local.requires_grad:
                return _ToPlain.apply(local, plan, self.cause)
            return redistribute_local(local, plan.src, plan.dst, self.cause)

    def _target(self, layout: Layout) -> tuple[Layout, bool]:
        """The layout that a DTensor is redistributed to, and whether every rank keeps its local shard."""
        if layout.mesh != self.mesh:
            is_beside = set(layout.mesh.ranks) & set(self.mesh.ranks) == {
                collectives.rank()
            }  # dp beside tp, for example
            raise LayoutError(
                f"{self.what} is a DTensor on {layout.mesh}, but the module was parallelised on {self.mesh}. "
                f"Fix: {_BESIDE if is_beside else 'make it on that mesh, or redistribute(mesh, placements) it before'}."
            )
        target = self._desired(layout)
        found = self._targets[layout] = target, same_local_shards(layout, target)
        return found

    def _plan_to_plain(self, layout: Layout) -> BoundaryPlan:
        target, same_shards = self._target(layout)
        placements = target.reduced().placements
        plain_grad = target.replace(
            [PARTIAL if p == REPLICATE and axis != self.axis else p for axis, p in enumerate(placements)]
        )
        is_alias = same_shards and same_local_shards(plain_grad, layout.dual())
        plan = self._dtensor_plans[layout] = BoundaryPlan(layout, target, plain_grad, is_alias)
        return plan

    def _desired(self, layout: Layout) -> Layout:
        """`layout` with the desired placements. Axes that shard anew come last in the shard order."""
        placements, new = list(layout.placements), []
        for axis, desired in enumerate(self.desired_layout):
            if desired is not None and not _is_met(desired, placements[axis], len(layout.shape)):
                placements[axis] = desired
                new.append(axis)
        order = [*(axis for axis in layout.shard_order if axis not in new), *new]
        # Sizes inside a shard of another axis no longer fit once that axis is not sharded.
        no_sizes = [Shard(p.dim) if isinstance(p, Shard) and a not in new else p for a, p in enumerate(placements)]
        try:
            return Layout(self.mesh, placements, layout.shape, order)
        except LayoutError as error:
            try:
                return Layout(self.mesh, no_sizes, layout.shape, order)
            except LayoutError:
                raise LayoutError(f"{self.what}: {error}") from None

    def _plan_from_plain(self, x: Tensor) -> BoundaryPlan:
        """Cached, unless the shapes had to be exchanged between ranks."""
        check_dense(x, self.what)
        if self.plain_layout is None:
            raise LayoutError(
                f"{self.what} is a plain tensor, and the plan does not say how it is laid out. "
                f"Fix: pass a DTensor, or say its layout in the style."
            )
        default = Shard(0) if x.ndim else REPLICATE
        src, is_static = self._global_layout(x, [p or default for p in self.plain_layout])
        if self.features is not None and src.shape[-1:] != (self.features,):
            raise LayoutError(
                f"{self.what} must have {self.features} features in its last dim, got shape {src.shape}: a plain "
                f"tensor is laid out as {list(src.placements)} on {self.mesh}. If it is the output of a "
                f"column-parallel layer, it is a local shard. Fix: RowwiseParallel() for this layer; or "
                f"ColwiseParallel(use_local_output=False) for the layer before it, which then returns a DTensor."
            )
        dst, plain_grad = self._desired(src), src.reduced()
        is_alias = same_local_shards(src, dst) and same_local_shards(dst.dual(), plain_grad)
        plan = BoundaryPlan(src, dst, plain_grad, is_alias)
        if is_static:
            self._plain_plans[x.shape] = plan
        return plan

    def _global_layout(self, x: Tensor, placements: list[Placement]) -> tuple[Layout, bool]:
        """The layout of which `x` is a local shard, and whether it follows from the plan and the shape of `x` alone."""
        shape, sized = list(x.shape), list(placements)
        shards = [(axis, p) for axis, p in enumerate(placements) if isinstance(p, Shard)]
        if any(not -x.ndim <= p.dim < x.ndim for _, p in shards):
            raise LayoutError(
                f"{self.what}: a tensor of shape {tuple(x.shape)} cannot be laid out as {placements}. "
                f"Fix: say in the style how it is: Shard of one of its dims, or Replicate()."
            )
        dims = [p.dim % x.ndim for _, p in shards]
        is_static = len(set(dims)) == len(dims)
        for (axis, p), dim in zip(shards, dims, strict=True):
            if p.sizes is None and self.mesh.shape[axis] == 1:
                sized[axis] = p = Shard(dim, (shape[dim],))
            if p.sizes is None or not isinstance(p.sizes[0], int):
                is_static = False
            elif is_static:
                shape[dim] = sum(p.sizes)
        try:
            if not is_static:
                return self._exchange_shapes(x, sized), False
            layout = Layout(self.mesh, sized, shape)
        except (LayoutError, MismatchError) as error:
            raise type(error)(f"{self.what}: {error}") from None
        expected = layout.local_shape(collectives.rank())
        if expected != tuple(x.shape):
            raise LayoutError(
                f"{self.what}: a plain tensor laid out as {list(layout.placements)} on {self.mesh} is a local shard of "
                f"shape {expected} on rank {collectives.rank()}, got {tuple(x.shape)}. Fix: pass that shard, say in "
                f"the style how the tensor is laid out, or pass a DTensor."
            )
        return layout, True

    def _exchange_shapes(self, x: Tensor, placements: list[Placement]) -> Layout:
        """The layout of which `x` is a local shard, from the shapes on all ranks: one small all-to-all."""
        not_capturable(
            f"asking other ranks for the shapes of {self.what} there; a DTensor or sizes in its layout avoid it"
        )
        ranks = tuple(sorted(self.mesh.ranks))
        sent = [x.ndim, *x.shape, *[0] * (MAX_NDIM - x.ndim)]
        counts = [len(sent)] * len(ranks)
        received = collectives.exchange_messages(torch.tensor(sent * len(ranks), device="cpu"), counts, counts, ranks)
        rows = received.view(len(ranks), len(sent)).tolist()
        shapes = {rank: tuple(shape[:ndim]) for rank, (ndim, *shape) in zip(ranks, rows, strict=True)}
        layout = layout_of_local_shapes(self.mesh, placements, shapes)
        wrong = {rank: shape for rank, shape in shapes.items() if shape != layout.local_shape(rank)}
        if wrong:
            lines = [
                f"  rank {rank}: expected {layout.local_shape(rank)}, got {shape}" for rank, shape in wrong.items()
            ]
            raise MismatchError(
                f"plain tensors laid out as {placements} on {self.mesh} are local shards of one tensor, but these do "
                f"not fit:\n"
                + "\n".join(lines)
                + "\n  Fix: pass shards of the expected shapes, or say in the style how the tensor is laid out."
            )
        return layout
