"""Bucketed all-reduce of the gradients of replicated parameters.

    loss.backward()   # gradients are Partial
    parameter.grad    # the first read all-reduces the gradients of all parameters

Several backwards before a read cost one reduction. If the same leaves were last reduced after exactly one backward,
each bucket is sent during backward, as soon as it is complete, and waited for when a gradient is read. That guess
decides when a bucket is sent, never the result: what was reduced is stored apart from what accumulates later.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from shardwise import collectives
from shardwise.collectives import Finish
from shardwise.errors import RuleError
from shardwise.layout import Layout, Mesh, Partial
from shardwise.redistribute.plan import plan_redistribute
from shardwise.redistribute.run_plan import redistribute_local, start_redistribute
from shardwise.redistribute.transfers import all_to_all_no_grad
from shardwise.tensor.dtensor import DTensor, plain, tag
from shardwise.trace import comm_trace
from shardwise.trace.comm_trace import Cause

raw_grad: Any = torch._C.TensorBase.grad
READ = Cause("gradient", ".grad", "gradients", "partial sums on Replicate axes are all-reduced when a gradient is read")
KEPT_PLANS = 64
FIX = "let every rank use the same parameters in each step; one that does not apply can be multiplied by 0"

Kind = tuple[Mesh, tuple[int, ...], torch.dtype, torch.device]  # what one buffer can hold, and where it is reduced


@dataclass(frozen=True)
class Options:
    """How one rank reduces gradients."""

    max_bytes: int = 25 << 20
    overlap: bool | None = None

    def overlaps(self, device: torch.device) -> bool:
        return device.type != "cpu" if self.overlap is None else self.overlap


@dataclass
class Plan:
    """Which leaves, by their numbers, share a bucket, in the order in which all ranks send the buckets."""

    buckets: tuple[tuple[int, ...], ...]
    options: Options
    read_once: bool = False  # the last gradients were read after exactly one backward
    changed_later: bool = False  # other code changes gradients after backward, as DistributedDataParallel does


@dataclass(frozen=True)
class Started:
    """A bucket that was sent, and the gradients that it contains."""

    leaves: tuple[DTensor, ...]
    raws: tuple[Tensor, ...]
    versions: tuple[int, ...]
    finish: Finish

    def unchanged(self) -> list[bool]:
        """For each leaf, whether its gradient is still the one that was sent: not accumulated, cleared or replaced."""
        now = [raw_grad.__get__(leaf) for leaf in self.leaves]
        return [a is b and a._version == v for a, b, v in zip(now, self.raws, self.versions, strict=True)]


@dataclass
class _Rank:
    """State of one rank; each simulated rank has its own."""

    options: Options = field(default_factory=Options)
    numbers: "count[int]" = field(default_factory=lambda: count(1))
    numbers_of: dict[tuple[int, ...], "count[int]"] = field(default_factory=dict)  # by ranks
    plans: dict[tuple[int, ...], Plan] = field(default_factory=dict)  # by the numbers of all leaves
    latest: tuple[int, ...] = ()  # the leaves that were reduced last
    agreed: dict[tuple[int, ...], dict[str, str]] = field(default_factory=dict)  # by ranks: what they reduced last
    batch: "Batch | None" = None  # of the current or the last backward


_ranks: "WeakKeyDictionary[Any, _Rank]" = WeakKeyDictionary()


def _rank() -> _Rank:
    here = collectives.transport()
    found = _ranks.get(here)
    if found is None:
        found = _ranks[here] = _Rank()
    return found


def gradient_buckets(max_bytes: int = Options.max_bytes, *, overlap: bool | None = None) -> None:
    """Set how gradients of replicated parameters are reduced from now on; the same on all ranks.

    Args:
        max_bytes: gradients share a collective up to this size; a larger one has its own.
        overlap: send a bucket during backward, as soon as it is complete, if the last gradients of the same leaves were
            read after exactly one backward. False sends nothing before a gradient is read. None is False on the
            CPU, where communication takes the cores that backward needs, and True elsewhere.

    Raises:
        RuleError: `max_bytes` is not positive.
    """
    if max_bytes < 1:
        raise RuleError(f"gradient_buckets: max_bytes is a positive number of bytes, got {max_bytes}.")
    here = _rank()
    here.options = Options(int(max_bytes), overlap)
    here.plans.clear()
    here.latest = ()


def next_numbers(mesh: Mesh) -> tuple[int, int]:
    """The number of a new leaf in program order, and in its mesh, where all ranks count alike."""
    here, ranks = _rank(), tuple(sorted(mesh.ranks))
    return next(here.numbers), next(here.numbers_of.setdefault(ranks, count(1)))


# ---- during backward ----------------------------------------------------------------------------------------


class Batch:
    """Leaves whose gradients were not read since their backward."""

    def __init__(self) -> None:
        self.leaves: dict[int, DTensor] = {}  # by number
        self.arrivals: dict[int, int] = {}
        self.started: list[Started] = []
        self.plan: Plan | None = None
        self.next = 0  # the next bucket of the plan to send

    def forget(self, leaf: DTensor) -> None:
        """The gradient of `leaf` was cleared or replaced."""
        self.leaves.pop(leaf._watched, None)
        self.arrivals.pop(leaf._watched, None)
        if not self.leaves:
            here = _rank()
            here.batch = None if here.batch is self else here.batch
            for started in self.started:
                started.finish()

    def send_complete_buckets(self, plan: Plan) -> None:
        while self.next < len(plan.buckets):
            members = [self.leaves.get(number) for number in plan.buckets[self.next]]
            if any(leaf is None or _is_sparse(leaf) for leaf in members):
                return
            self.started.append(_start([leaf for leaf in members if leaf is not None]))
            self.next += 1


def joined(leaf: Tensor) -> None:
    """The post-accumulate hook of a leaf: its gradient joins the batch of this backward."""
    assert isinstance(leaf, DTensor)
    here, number = _rank(), leaf._watched
    if leaf._grad_batch is None:
        with DisableTorchFunctionSubclass():
            if raw_grad.__get__(leaf) is None:  # a custom Function returned no gradient for it
                return
        if here.batch is None:
            here.batch = Batch()
            last: Plan | None = leaf._grad_plan
            here.batch.plan = last if last is not None and last.options is here.options else None
        here.batch.leaves[number] = leaf
        leaf._grad_batch = here.batch
    batch: Batch = leaf._grad_batch
    batch.arrivals[number] = batch.arrivals.get(number, 0) + 1
    plan = batch.plan
    if plan is None or not plan.read_once or plan.changed_later:
        return
    if batch.arrivals[number] > 1:
        plan.read_once = False  # gradients accumulate: nothing more is sent before one is read
    elif not torch.is_grad_enabled():
        with DisableTorchFunctionSubclass():
            if here.options.overlaps(leaf.device):
                batch.send_complete_buckets(plan)


# ---- when a gradient is read --------------------------------------------------------------------------------


def reduce_batch(batch: Batch) -> None:
    """Reduce the gradients that were not sent yet, and wait for the buckets that were."""
    here = _rank()
    if here.batch is batch:
        here.batch = None
    for leaf in batch.leaves.values():
        leaf._grad_batch = None
    plan = _plan_of(batch.leaves, here)
    plan.read_once = all(n == 1 for n in batch.arrivals.values())
    for leaf in batch.leaves.values():
        leaf._grad_plan = plan
    unchanged = {leaf._watched: same for s in batch.started for leaf, same in zip(s.leaves, s.unchanged(), strict=True)}
    sent = {n for n in batch.leaves if unchanged.get(n)}
    waiting = {n: leaf for n, leaf in batch.leaves.items() if n not in sent}
    plan.changed_later |= plan.read_once and not all(unchanged.get(n, True) for n in batch.leaves)
    buckets = plan.buckets
    if sent:
        ordered = [n for bucket in plan.buckets for n in bucket if n in waiting]
        buckets = _buckets(ordered, waiting, here.options)
    _reduce_buckets(batch.started, [[waiting[n] for n in bucket] for bucket in buckets])


def reduce_alone(leaf: DTensor) -> None:
    """Reduce the gradient of a leaf that is in no batch."""
    _reduce_buckets([], [[leaf]])


def _plan_of(leaves: dict[int, DTensor], here: _Rank) -> Plan:
    """The bucket plan of these leaves. If they are not those of the last plan, the ranks compare them first."""
    # Not in the order of backward: kernels of empty shards may reach leaves in another order.
    numbers = sorted(leaves, reverse=True)
    key = tuple(-n if _is_sparse(leaves[n]) else n for n in numbers)
    if key != here.latest:
        _agree([leaves[n] for n in numbers], here)
        here.latest = key
    if key not in here.plans:
        if len(here.plans) >= KEPT_PLANS:
            here.plans.clear()
        here.plans[key] = Plan(_buckets(numbers, leaves, here.options), here.options)
    return here.plans[key]


def _is_sparse(leaf: DTensor) -> bool:
    raw = raw_grad.__get__(leaf)
    return raw is not None and raw.is_sparse


def _agree(leaves: Sequence[DTensor], here: _Rank) -> None:
    """Compare between the ranks of each mesh which leaves they reduce, unless these are the last ones.

    Buckets of different leaves may have equal sizes and would be added silently. The communication trace does not show
    this small exchange.
    """
    facts_by_ranks: dict[tuple[int, ...], dict[str, str]] = {}
    for leaf in leaves:
        ranks, name = tuple(sorted(leaf._layout.mesh.ranks)), f"{leaf._name or 'leaf'} (number {leaf._watched_here})"
        what = f"{'sparse ' if _is_sparse(leaf) else ''}{leaf.dtype} {leaf._layout}"
        facts_by_ranks.setdefault(ranks, {"buckets": str(here.options)})[name] = what
    for ranks, facts in facts_by_ranks.items():
        if collectives.rank() in ranks and here.agreed.get(ranks) != facts:
            with comm_trace.separate_rank():
                collectives.agree("the gradients that are reduced together", facts, ranks, FIX)
            here.agreed[ranks] = facts


def _buckets(numbers: Sequence[int], leaves: Mapping[int, DTensor], options: Options) -> tuple[tuple[int, ...], ...]:
    """Leaves of one kind share a bucket while there is room. Buckets are ordered by when they are complete.

    Ranks that share two buckets share their sizes, so they also agree on which of the two comes first.
    """
    filling: dict[Kind | int, tuple[list[int], int]] = {}
    done: list[tuple[int, ...]] = []
    for number in numbers:
        leaf = leaves[number]
        kind, nbytes = _kind(leaf), leaf._layout.local_numel(collectives.rank()) * leaf.element_size()
        members, held = filling.pop(kind, ([], 0))
        if members and held + nbytes > options.max_bytes:
            done.append(tuple(members))
            members, held = [], 0
        filling[kind] = [*members, number], held + nbytes
    return (*done, *(tuple(members) for members, _ in filling.values()))


def _kind(leaf: DTensor) -> Kind | int:
    """Gradients of one kind fit one buffer; a sparse gradient, and one without elements here, has its own."""
    raw = raw_grad.__get__(leaf)
    if leaf._layout.mesh.coordinate(collectives.rank()) is None or (raw is not None and raw.is_sparse):
        return leaf._watched
    like = leaf if raw is None else raw
    return leaf._layout.mesh, axes_to_reduce(leaf._layout), like.dtype, like.device


# ---- one bucket ---------------------------------------------------------------------------------------------


def _reduce_buckets(started: Sequence[Started], buckets: Iterable[Sequence[DTensor]]) -> None:
    """Send the buckets, finishing each after the next one was sent."""
    in_flight = deque(started)
    for leaves in buckets:
        in_flight.append(_start(leaves))
        while len(in_flight) > 1:
            _finish(in_flight.popleft())
    while in_flight:
        _finish(in_flight.popleft())


def _start(leaves: Sequence[DTensor]) -> Started:
    """Send a copy of the gradients of a bucket. Until it is finished other code may change them."""
    raws = [raw_grad.__get__(leaf) for leaf in leaves]
    versions = [raw._version for raw in raws]
    if leaves[0]._layout.mesh.coordinate(collectives.rank()) is None:  # this rank is outside the mesh
        finish = _known(plain(raws[0]))
    elif raws[0].is_sparse:
        finish = _known(_sum_sparse(plain(raws[0]), leaves[0]._layout))
    else:
        flat = torch.cat([plain(raw).reshape(-1) for raw in raws]) if len(raws) > 1 else plain(raws[0]).reshape(-1)
        finish = _start_sum(flat, leaves)
    return Started(tuple(leaves), tuple(raws), tuple(versions), finish)


def _known(total: Tensor) -> Finish:
    return lambda: total


def _start_sum(flat: Tensor, leaves: Sequence[DTensor]) -> Finish:
    mesh, axes = leaves[0]._layout.mesh, axes_to_reduce(leaves[0]._layout)
    line = mesh.submesh(axes, collectives.rank())
    src = Layout(line, [Partial()] * line.ndim, flat.shape)
    cause = _cause_of(mesh, axes, leaves, flat) if comm_trace.listening() else READ
    if torch.is_grad_enabled() and flat.requires_grad:
        return _known(redistribute_local(flat, src, src.replicated(), cause))
    return start_redistribute(flat.detach(), src, src.replicated(), cause)


def _finish(started: Started) -> None:
    total, rank = started.finish(), collectives.rank()
    totals = total.split([raw.numel() for raw in started.raws]) if len(started.leaves) > 1 else (total,)
    for leaf, reduced, unchanged in zip(started.leaves, totals, started.unchanged(), strict=True):
        if not unchanged:
            continue
        raw_grad.__set__(leaf, None)
        if not reduced.is_sparse and leaf._layout.mesh.coordinate(rank) is not None:
            shape = leaf._layout.local_shape(rank)
            alone = len(started.leaves) == 1 and not reduced.requires_grad  # nothing shares its memory: no view
            reduced = torch.ops.aten._unsafe_view.default(reduced, shape) if alone else reduced.view(shape)
        _add_reduced(leaf, reduced)


def _cause_of(mesh: Mesh, axes: tuple[int, ...], leaves: Sequence[DTensor], flat: Tensor) -> Cause:
    """The cause for the communication trace: whose gradients, and what all ranks of the mesh send."""
    elements = 0
    for line in {mesh.submesh(axes, rank) for rank in mesh.ranks}:
        src = Layout(line, [Partial()] * line.ndim, (sum(leaf._layout.local_numel(line.ranks[0]) for leaf in leaves),))
        elements += plan_redistribute(src, src.replicated()).total_elements
    names = [leaf._name or "a leaf" for leaf in leaves]
    short = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    together = tuple(sorted(mesh.ranks)), elements * flat.element_size()
    return READ._replace(operand=f"the gradient of {short}", group_total=together)


def _add_reduced(leaf: DTensor, total: Tensor) -> None:
    if leaf._reduced_grad is None:
        leaf._reduced_grad = tag(total.clone() if total._base is not None else total, readable(leaf._layout))
    elif torch.is_grad_enabled() and total.requires_grad:
        leaf._reduced_grad = tag(plain(leaf._reduced_grad) + total, readable(leaf._layout))
    else:
        with torch.no_grad():
            leaf._reduced_grad.add_(total)


def _sum_sparse(raw: Tensor, layout: Layout) -> Tensor:
    """The sum of row-sparse gradients over the ranks: indices and values are exchanged, never the dense table."""
    own = raw.coalesce()
    line = layout.mesh.submesh(axes_to_reduce(layout), collectives.rank())
    ranks = tuple(sorted(line.ranks))
    count = own.indices().shape[1]
    ones = [1] * len(ranks)
    counts = all_to_all_no_grad(torch.tensor([count] * len(ranks)), ones, ones, ranks, READ).tolist()

    def gathered(x: Tensor) -> list[Tensor]:
        width = prod(x.shape[1:])
        flat = x.reshape(-1).repeat(len(ranks))
        every = all_to_all_no_grad(flat, [x.numel()] * len(ranks), [n * width for n in counts], ranks, READ)
        return [rows.view(-1, *x.shape[1:]) for rows in every.split([n * width for n in counts])]

    indices = torch.cat(gathered(own.indices().t().contiguous())).t()
    values = torch.cat(gathered(own.values()))
    return torch.sparse_coo_tensor(indices, values, raw.shape, check_invariants=False).coalesce()


# ---- layouts ------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def axes_to_reduce(layout: Layout) -> tuple[int, ...]:
    """The axes on which the gradient of a tensor with this layout is Partial."""
    return tuple(axis for axis in layout.dual().partial_axes if layout.mesh.shape[axis] > 1)


@lru_cache(maxsize=4096)
def readable(layout: Layout) -> Layout:
    """The layout of `.grad`: that of the tensor, with Partial read as Replicate."""
    if not layout.partial_axes:
        return layout
    return layout.reduced()
