"""Bucketed all-reduce of the gradients of replicated parameters.

    loss.backward()   # gradients are Partial
    parameter.grad    # the first read all-reduces the gradients of all parameters on the same ranks

Several backwards before a read cost one all-reduce. A plan may send buckets during backward (`SendTime`); a read of a
gradient waits for them. Sending early never changes a value: a gradient that changed after it was sent is reduced
again, and reduced values are stored apart from later ones.

    max_bytes=10    # gradients of 4, 4, 4 and 12 bytes make the buckets (4, 4), (4) and (12)
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from shardwise import _collectives as collectives
from shardwise._collectives import Wait
from shardwise._layout import PARTIAL, Layout, Mesh, Partial, checked
from shardwise._redistribute.packing import packed, unpacked
from shardwise._redistribute.plan import plan_redistribute
from shardwise._redistribute.run_plan import redistribute_local, start_redistribute
from shardwise._redistribute.transfers import Exchange
from shardwise._tensor.dtensor import DTensor, plain, tag
from shardwise._trace import comm_trace
from shardwise._trace.comm_trace import Cause
from shardwise.errors import RuleError

# ---- which gradients share a collective, and when it is sent ----------------------------------------------------

Buckets = tuple[tuple[int, ...], ...]  # numbers of leaves, in the order in which all ranks send the buckets


@dataclass(frozen=True)
class BucketOptions:
    """The reduction of gradients on one rank; see `gradient_buckets`."""

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
        """Choose the send time of the next backward.

        Args:
            read_once: gradients are read after exactly one backward.
            unchanged: no gradient has changed since it was sent in backward.
        """
        if self.send_time is SendTime.ALWAYS_ON_READ:
            return
        if not read_once:
            self.send_time = SendTime.ON_READ
        else:
            self.send_time = SendTime.IN_BACKWARD if unchanged else SendTime.ALWAYS_ON_READ


@lru_cache(maxsize=4096)
def axes_to_reduce(layout: Layout) -> tuple[int, ...]:
    """The axes on which the gradient of a tensor with this layout is Partial."""
    partial = local_gradient(layout).partial_axes
    return tuple(axis for axis, n in enumerate(layout.mesh.shape) if n > 1 and axis in partial)


@lru_cache(maxsize=4096)
def local_gradient(layout: Layout) -> Layout:
    """The layout of the local gradients of a tensor with this layout: the dual.

    Each of the n terms of an average has 1/n of its gradient. For a maximum or minimum only the chosen values have
    gradients, so these are partial sums.

    Raises:
        RuleError: a product of several ranks' values: gradients of its factors are not those of the product.
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
    """The layout of `.grad`: the layout of the tensor, with Replicate for Partial."""
    return layout.reduced() if layout.partial_axes else layout.unowned


# ---- state ------------------------------------------------------------------------------------------------------

raw_grad: Any = torch._C.TensorBase.grad
READ = Cause("gradient", ".grad", "gradients", "partial sums on Replicate axes are all-reduced when a gradient is read")
KEPT_PLANS = 64
FIX = "let every rank use the same parameters in each step; one that does not apply can be multiplied by 0"


@dataclass(frozen=True)
class SentBucket:
    """A bucket that was sent, and the gradients that it contains."""

    leaves: tuple[DTensor, ...]
    gradients: tuple[Tensor, ...]
    versions: tuple[int, ...]
    finish: Wait

    def unchanged(self) -> list[bool]:
        """For each leaf, whether its gradient is still the sent one: not accumulated, cleared or replaced."""
        present = [raw_grad.__get__(leaf) for leaf in self.leaves]
        return [a is b and a._version == v for a, b, v in zip(present, self.gradients, self.versions, strict=True)]


@dataclass
class _Group:
    """State of one rank for the leaves on some ranks; equal on all of them."""

    ranks: tuple[int, ...]
    leaf_numbers: "count[int]" = field(default_factory=lambda: count(1))
    plans: dict[tuple[int, ...], BucketPlan] = field(default_factory=dict)  # by the numbers of all leaves
    last_leaves: tuple[int, ...] = ()  # the key of the plan that was used last
    agreed: dict[str, str] = field(default_factory=dict)  # the last reduced leaves
    # Of the current or the last backward. It keeps the leaves: those that are reduced together must not depend on when
    # the garbage collector of a rank frees a model.
    pending: "PendingGradients | None" = None


@dataclass
class _Rank:
    """State of one rank in one world."""

    options: BucketOptions = field(default_factory=BucketOptions)
    groups: dict[tuple[int, ...], _Group] = field(default_factory=dict)  # by the ranks of the mesh of a leaf

    def group_of(self, leaf: DTensor) -> _Group:
        ranks = leaf._layout.mesh.sorted_ranks
        if ranks not in self.groups:
            self.groups[ranks] = _Group(ranks)
        return self.groups[ranks]


def _this_rank() -> _Rank:
    return collectives.owner().state(_Rank)


@checked
def gradient_buckets(max_bytes: int = BucketOptions.max_bytes, *, overlap: bool | None = None) -> None:
    """Set how gradients of replicated parameters are reduced from now on in this world; equal on all ranks.

    Args:
        max_bytes: gradients share a collective up to this size; a larger one has its own.
        overlap: send a bucket during backward, as soon as it is complete, if the last gradients of its leaves were read
            after exactly one backward. False sends nothing before a gradient is read. None is False on the CPU, where
            communication takes the cores that backward needs, and True elsewhere.

    Raises:
        RuleError: `max_bytes` is not positive.
    """
    if max_bytes < 1:
        raise RuleError(
            f"gradient_buckets: max_bytes is a positive number of bytes, got {max_bytes}. "
            f"Fix: such as {BucketOptions.max_bytes}, the default; 1 sends each gradient alone."
        )
    state = _this_rank()
    state.options = BucketOptions(int(max_bytes), overlap)
    for group in state.groups.values():
        group.plans.clear()
        group.last_leaves = ()


def enable_bucketing(leaf: DTensor) -> None:
    """Reduce the gradients of a leaf with a Replicate axis in buckets."""
    with DisableTorchFunctionSubclass():
        if leaf._leaf_number or not leaf.requires_grad or not leaf.is_leaf or not axes_to_reduce(leaf._layout):
            return
        leaf._leaf_number = next(_this_rank().group_of(leaf).leaf_numbers)
        leaf.register_post_accumulate_grad_hook(add_to_pending)  # type: ignore[no-untyped-call]


# ---- during backward --------------------------------------------------------------------------------------------


class PendingGradients:
    """Leaves of a group whose gradients were not read since their backward."""

    def __init__(self, group: _Group, plan: BucketPlan | None) -> None:
        self.group = group
        self.plan = plan  # the expected one, by which buckets are sent early
        self.leaves: dict[int, DTensor] = {}  # by number
        self.backwards: dict[int, int] = {}  # by number: gradients added to the leaf's
        self.sent: list[SentBucket] = []  # the first buckets of the plan

    def remove(self, leaf: DTensor) -> None:
        """Remove `leaf`, whose gradient was cleared or replaced."""
        self.leaves.pop(leaf._leaf_number, None)
        self.backwards.pop(leaf._leaf_number, None)
        if not self.leaves:
            self.group.pending = None if self.group.pending is self else self.group.pending
            for bucket in self.sent:
                bucket.finish()

    def send_complete_buckets(self, buckets: Buckets) -> None:
        while len(self.sent) < len(buckets):
            members = [self.leaves.get(number) for number in buckets[len(self.sent)]]
            if any(leaf is None or _is_sparse(leaf) for leaf in members):
                return
            self.sent.append(_send_bucket([leaf for leaf in members if leaf is not None]))


def add_to_pending(leaf: Tensor) -> None:
    """The post-accumulate hook of a leaf: its gradient is pending until one is read."""
    assert isinstance(leaf, DTensor)
    state, number = _this_rank(), leaf._leaf_number
    if leaf._pending_gradients is None:
        with DisableTorchFunctionSubclass():
            if raw_grad.__get__(leaf) is None:  # a custom Function returned no gradient for it
                return
        group = state.group_of(leaf)
        if group.pending is None:
            last: BucketPlan | None = leaf._bucket_plan
            expected = last if last is not None and last.options is state.options else None
            group.pending = PendingGradients(group, expected)
        group.pending.leaves[number] = leaf
        leaf._pending_gradients = group.pending
    pending: PendingGradients = leaf._pending_gradients
    pending.backwards[number] = pending.backwards.get(number, 0) + 1
    plan = pending.plan
    if plan is None or plan.send_time is not SendTime.IN_BACKWARD:
        return
    if pending.backwards[number] > 1:
        plan.send_time = SendTime.ON_READ  # gradients accumulate
    elif not torch.is_grad_enabled():
        with DisableTorchFunctionSubclass():
            if state.options.overlaps(leaf.device):
                pending.send_complete_buckets(plan.buckets)


# ---- when a gradient is read ------------------------------------------------------------------------------------


def reduce_pending(pending: PendingGradients) -> None:
    """Reduce the gradients that were not sent yet, and wait for the sent buckets."""
    group, options = pending.group, _this_rank().options
    if group.pending is pending:
        group.pending = None
    for leaf in pending.leaves.values():
        leaf._pending_gradients = None
    plan = _plan_of(pending.leaves, group, options)
    for leaf in pending.leaves.values():
        leaf._bucket_plan = plan
    unchanged = {
        leaf._leaf_number: same
        for bucket in pending.sent
        for leaf, same in zip(bucket.leaves, bucket.unchanged(), strict=True)
    }
    read_once = all(n == 1 for n in pending.backwards.values())
    all_unchanged = all(unchanged.get(n, True) for n in pending.leaves)
    plan.update_send_time(read_once, all_unchanged)
    waiting = {n: leaf for n, leaf in pending.leaves.items() if not unchanged.get(n)}
    buckets = plan.buckets
    if len(waiting) < len(pending.leaves):
        ordered = [waiting[n] for bucket in plan.buckets for n in bucket if n in waiting]
        buckets = _buckets_of(ordered, options)
    _reduce_buckets(pending.sent, [[waiting[n] for n in bucket] for bucket in buckets])


def reduce_alone(leaf: DTensor) -> None:
    """Reduce the gradient of a leaf that is not pending."""
    _reduce_buckets([], [[leaf]])


def _plan_of(leaves: dict[int, DTensor], group: _Group, options: BucketOptions) -> BucketPlan:
    """The bucket plan of these leaves. If they differ from those of the last plan, the ranks compare them first."""
    # Not in the order of backward: kernels of empty shards may reach leaves in another order.
    numbers = sorted(leaves, reverse=True)
    ordered = [leaves[n] for n in numbers]
    key = tuple(-n if _is_sparse(leaves[n]) else n for n in numbers)
    if key != group.last_leaves:
        _agree(ordered, group, options)
        group.last_leaves = key
    if key not in group.plans:
        if len(group.plans) >= KEPT_PLANS:
            group.plans.clear()
        group.plans[key] = BucketPlan(_buckets_of(ordered, options), options)
    return group.plans[key]


def _is_sparse(leaf: DTensor) -> bool:
    raw = raw_grad.__get__(leaf)
    return raw is not None and raw.is_sparse


def _agree(leaves: Sequence[DTensor], group: _Group, options: BucketOptions) -> None:
    """Compare between the ranks of the group which leaves they reduce, unless these are the last ones.

    Buckets of different leaves may have equal sizes and would be added silently. The communication trace does not show
    this small exchange.
    """
    facts = {"buckets": str(options)}
    for leaf in leaves:
        name = f"{leaf._name or 'leaf'} (number {leaf._leaf_number})"
        facts[name] = f"{'sparse ' if _is_sparse(leaf) else ''}{leaf.dtype} {leaf._layout}"
    if collectives.rank() in group.ranks and group.agreed != facts:
        with comm_trace.separate_rank():
            collectives.agree("the gradients that are reduced together", facts, group.ranks, FIX)
        group.agreed = facts


def _buckets_of(leaves: Iterable[DTensor], options: BucketOptions) -> Buckets:
    """Gradients of one kind share a bucket while there is room. Buckets are in the order of their completion.

    Ranks that share two buckets share their sizes, so they also agree on which of the two comes first.
    """
    filling: dict[object, tuple[list[int], int]] = {}
    complete: list[tuple[int, ...]] = []
    rank = collectives.rank()
    for leaf in leaves:
        kind, nbytes = _kind_of(leaf, rank), leaf._layout.local_numel(rank) * leaf.element_size()
        members, held = filling.pop(kind, ([], 0))
        if members and held + nbytes > options.max_bytes:
            complete.append(tuple(members))
            members, held = [], 0
        filling[kind] = [*members, leaf._leaf_number], held + nbytes
    return (*complete, *(tuple(members) for members, _ in filling.values()))


def _kind_of(leaf: DTensor, rank: int) -> object:
    """The kind of a gradient: equal kinds share a buffer. A sparse one, or one outside the mesh, has its own bucket."""
    layout, raw = leaf._layout, raw_grad.__get__(leaf)
    if layout.mesh.coordinate(rank) is None or (raw is not None and raw.is_sparse):
        return leaf._leaf_number
    like = leaf if raw is None else raw
    return layout.mesh, axes_to_reduce(layout), like.dtype, like.device


# ---- one bucket -------------------------------------------------------------------------------------------------


def _reduce_buckets(sent: Sequence[SentBucket], buckets: Iterable[Sequence[DTensor]]) -> None:
    """Send the buckets, finishing each after the next one was sent."""
    in_flight = deque(sent)
    for leaves in buckets:
        in_flight.append(_send_bucket(leaves))
        while len(in_flight) > 1:
            _finish_bucket(in_flight.popleft())
    while in_flight:
        _finish_bucket(in_flight.popleft())


def _send_bucket(leaves: Sequence[DTensor]) -> SentBucket:
    """Send a copy of a bucket's gradients. Until it is finished other code may change them."""
    raws = [raw_grad.__get__(leaf) for leaf in leaves]
    versions = [raw._version for raw in raws]
    if leaves[0]._layout.mesh.coordinate(collectives.rank()) is None:  # this rank is outside the mesh
        finish = _done(plain(raws[0]))
    elif raws[0].is_sparse:
        finish = _done(_sum_sparse(plain(raws[0]), leaves[0]._layout))
    else:
        finish = _start_all_reduce(packed(list(map(plain, raws))), leaves, owned=len(raws) > 1)
    return SentBucket(tuple(leaves), tuple(raws), tuple(versions), finish)


def _done(total: Tensor) -> Wait:
    return lambda: total


def _start_all_reduce(flat: Tensor, leaves: Sequence[DTensor], owned: bool) -> Wait:
    mesh, axes = leaves[0]._layout.mesh, axes_to_reduce(leaves[0]._layout)
    src, dst = _reduction(mesh, axes, collectives.rank(), flat.numel())
    cause = _cause_of(mesh, axes, leaves, flat) if comm_trace.listening() else READ
    if torch.is_grad_enabled() and flat.requires_grad:
        return _done(redistribute_local(flat, src, dst, cause))
    return start_redistribute(flat.detach(), src, dst, cause, owned=owned)


@lru_cache(maxsize=4096)
def _reduction(mesh: Mesh, axes: tuple[int, ...], rank: int, numel: int) -> tuple[Layout, Layout]:
    """Layouts of `numel` elements before and after their reduction along these axes through `rank`."""
    submesh = mesh.submesh(axes, rank)
    src = Layout(submesh, [PARTIAL] * submesh.ndim, (numel,))
    return src, src.replicated()


def _finish_bucket(bucket: SentBucket) -> None:
    total, rank, layouts = bucket.finish(), collectives.rank(), [leaf._layout for leaf in bucket.leaves]
    totals = [total]
    if not total.is_sparse and layouts[0].mesh.coordinate(rank) is not None:
        totals = unpacked(total, [layout.local_shape(rank) for layout in layouts])
    for leaf, reduced, unchanged in zip(bucket.leaves, totals, bucket.unchanged(), strict=True):
        if unchanged:
            raw_grad.__set__(leaf, None)
            _add_reduced(leaf, reduced)


def _cause_of(mesh: Mesh, axes: tuple[int, ...], leaves: Sequence[DTensor], flat: Tensor) -> Cause:
    """The cause for the communication trace: the gradients, and, if a listener wants it, the bytes of all ranks."""
    total = _total_elements(mesh, axes, leaves) * flat.element_size() if comm_trace.wants_totals() else None
    names = [leaf._name or "a leaf" for leaf in leaves]
    short = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return READ._replace(operand=f"the gradient of {short}", group_total=(mesh.sorted_ranks, total))


def _total_elements(mesh: Mesh, axes: tuple[int, ...], leaves: Sequence[DTensor]) -> int:
    """The elements that all ranks of the mesh send together to reduce a bucket."""
    elements = 0
    for rank in [rank for rank in mesh.ranks if not any((mesh.coordinate(rank) or ())[axis] for axis in axes)]:
        numel = sum(leaf._layout.local_numel(rank) for leaf in leaves)
        elements += plan_redistribute(*_reduction(mesh, axes, rank, numel)).total_elements
    return elements


def _add_reduced(leaf: DTensor, total: Tensor) -> None:
    if leaf._reduced_grad is None:
        leaf._reduced_grad = tag(total, readable(leaf._layout))
    elif torch.is_grad_enabled() and total.requires_grad:
        leaf._reduced_grad = tag(plain(leaf._reduced_grad) + total, readable(leaf._layout))
    else:
        with torch.no_grad():
            leaf._reduced_grad.add_(total)


def _sum_sparse(raw: Tensor, layout: Layout) -> Tensor:
    """The sum of row-sparse gradients over the ranks: indices and values are exchanged, never the dense table."""
    own = raw.detach().coalesce()
    ranks = tuple(sorted(layout.mesh.submesh(axes_to_reduce(layout), collectives.rank()).ranks))
    count = own.indices().shape[1]
    exchange = Exchange(ranks, READ)
    counts = [n for (n,) in exchange.headers([[count]] * len(ranks), collectives.message_device(ranks))]
    indices = exchange.gather(own.indices().t(), counts).t()
    values = exchange.gather(own.values(), counts)
    return torch.sparse_coo_tensor(indices, values, raw.shape, check_invariants=False).coalesce()
