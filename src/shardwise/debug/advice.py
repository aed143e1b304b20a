"""What to change so that an op sends less for an operand, with the bytes of each choice."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count, groupby
from math import gcd
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise.debug.alternatives import OperandCall, Times, differing, tensors_of
from shardwise.debug.balance import Balance
from shardwise.layout import REPLICATE, Layout, Partial, Shard
from shardwise.rules.registry import RULES, no_rows
from shardwise.rules.row import Args, Kwargs, Op
from shardwise.tensor import DTensor
from shardwise.tensor.dispatch.hooks import Proceed
from shardwise.tensor.dispatch.names import name_of
from shardwise.trace.comm_trace import CommEvent
from shardwise.trace.user_stack import call_site

SHOWN = 2  # alternatives
_numbers = count()


@dataclass(frozen=True, eq=False)
class Source:
    """Where a tensor comes from.

    Attributes:
        number: another one for each tensor.
        name: of a parameter of a sharded module.
        has_gradient: it requires one.
        is_read: it is a leaf with a gradient, which is reduced when it is read.
        maker: the op whose result it is, with its line; empty for parameters and inputs.
        call, operands, result: of that op, if it has rows: the sources of its operands, and which result this is.
    """

    number: int
    name: str
    has_gradient: bool
    is_read: bool
    maker: str = ""
    call: OperandCall | None = None
    operands: "tuple[Source, ...]" = ()
    result: int = 0


class Use(NamedTuple):
    """An operand that an op redistributed.

    Args:
        position: which operand of the call it is.
        operands: the sources of all.
        has_gradient: of the result.
    """

    call: OperandCall
    position: int
    operands: tuple[Source, ...]
    has_gradient: bool

    @property
    def source(self) -> Source:
        """Of the operand."""
        return self.operands[self.position]


class Choice(NamedTuple):
    """What to change, and what all ranks send then and now for the operand, or of more."""

    text: str
    sent_bytes: int
    now: int
    of: str = ""


@dataclass
class _Running:
    """An op that runs.

    Attributes:
        needed: operands that it redistributed, by position: in which layout it needs them.
        runs_others: it is decomposed into other ops.
    """

    op: Op
    args: Args
    kwargs: Kwargs
    needed: dict[int, Layout] = field(default_factory=dict)
    runs_others: bool = False


class Uses:
    """Follows the tensors of ops: what made them, and which operands are redistributed."""

    def __init__(self) -> None:
        self._running: list[_Running] = []  # the innermost last
        self._known: dict[int, tuple[ref[Tensor], Source]] = {}  # of tensors by id

    def run(self, proceed: Proceed, op: Op, args: Args, kwargs: Kwargs, balance: Balance) -> object:
        """Run an op, and note its results and its work."""
        if self._running:
            self._running[-1].runs_others = True
        running = _Running(op, args, kwargs)
        operands = self._sources(args, kwargs)  # before an op in place makes another tensor of one
        self._running.append(running)
        try:
            out = proceed()
        finally:
            self._running.pop()
        results = [x for x in pytree.tree_leaves(out) if type(x) is DTensor]
        if not running.runs_others:
            balance.note(name_of(op), self._tensors(running, results))
        site = call_site()
        maker = name_of(op) + (f" ({site})" if site else "")
        has_rows = op in RULES and RULES[op].rows is not no_rows and DTensor in map(type, tensors_of(args, kwargs))
        call = OperandCall.of(op, args, kwargs) if results and has_rows else None
        for i, x in enumerate(results):
            known = self._known.get(id(x))
            if running.runs_others and known is not None and known[0]() is x:
                made = replace(known[1], maker=maker)
            else:
                made = Source(next(_numbers), "", x.requires_grad, False, maker, call, operands, i)
            self._known[id(x)] = ref(x), made
        return out

    def _sources(self, args: Args, kwargs: Kwargs) -> tuple[Source, ...]:
        return tuple(map(self._source, tensors_of(args, kwargs)))

    def _tensors(self, running: _Running, results: Sequence[DTensor]) -> list[tuple[str, Layout, bool]]:
        """Of operands and results a name, the layout in which the op ran, and whether it is no result of an op.

        Redistributed operands are last: their layouts are not what the user chose.
        """
        operands = [(i, x) for i, x in enumerate(tensors_of(running.args, running.kwargs)) if type(x) is DTensor]
        found = [
            (x._name or f"operand {i}", running.needed.get(i, x._layout), not self._source(x).maker)
            for i, x in operands
        ]
        kept = [own for (i, _), own in zip(operands, found, strict=True) if i not in running.needed]
        moved = [own for (i, _), own in zip(operands, found, strict=True) if i in running.needed]
        return [*kept, *(("the result", x._layout, False) for x in results), *moved]

    def of(self, event: CommEvent) -> Use | None:
        """The operand that an event is about, if it is one of the op that runs, which has rows."""
        dst = event.dst
        if event.cause.kind != "operand" or event.cause.backward or not self._running or dst is None:
            return None
        running = self._running[-1]
        for position, x in enumerate(tensors_of(running.args, running.kwargs)):
            name = (type(x) is DTensor and x._name) or f"operand {position}"
            if type(x) is DTensor and x._layout == event.src and event.cause.operand == name:
                running.needed[position] = dst
                if running.op not in RULES or x._layout.mesh != dst.mesh:
                    return None
                call = OperandCall.of(running.op, running.args, running.kwargs)
                operands = self._sources(running.args, running.kwargs)
                return Use(call, position, operands, torch.is_grad_enabled() and any(y.has_gradient for y in operands))
        return None

    def _source(self, x: Tensor) -> Source:
        known = self._known.get(id(x))
        if known is None or known[0]() is not x:  # another tensor may have had its id
            cause = getattr(x.grad_fn, "cause", None)  # of an explicit redistribution
            maker = "" if cause is None else f"{cause.operand or 'redistribute'} ({cause.call_site})"
            known = self._known[id(x)] = ref(x), Source(next(_numbers), "", x.requires_grad, False, maker)
        name, is_read = (type(x) is DTensor and x._name) or "", x.is_leaf and x.requires_grad
        return Source(known[1].number, name, x.requires_grad, is_read) if name or is_read else known[1]


def advice(uses: Sequence[Use], event: CommEvent, backward: int, any_backward: bool) -> str:
    """Other layouts of the operands, each with what all ranks would send in place of what they send now.

    Args:
        uses: one for each time that the operand, or that of an equal module, was redistributed.
        event: of the first of them.
        backward: how often its gradient was redistributed.
        any_backward: some backward ran.
    """
    use, src, dst, name = uses[0], event.src, event.dst, event.cause.operand
    assert src is not None
    assert dst is not None
    call, at, is_named = use.call, use.position, " " not in name
    tensors = len({other.source.number for other in uses})
    times = Times(len(uses), backward, tensors if use.source.is_read and backward else 0)
    now, choices = call.sent_bytes(at, src, dst, times), list[Choice]()
    if len(uses) > tensors and not is_named and not dst.partial_axes:
        once = call.sent_bytes(at, src, dst, Times(tensors, min(tensors, backward), times.read))
        choices.append(Choice(f".redistribute(placements={list(dst.placements)}) of {name} once before", once, now))
    unit = _unit(src, dst) if len(call.operands) == 1 else 1  # others are aligned with one another
    if unit > 1:
        text = f"shard sizes in multiples of {unit}, as by unit={unit} of ColwiseParallel or RowwiseParallel"
        return _text([*choices, Choice(text, 0, now)], backward)
    if any(isinstance(p, Partial) for p in src.placements):
        sums = call.sharded_sums(at, dst, times)[:1]
        choices += [Choice(f".redistribute(placements={list(x.placements)}) of {name}", n, now) for x, n in sums]
        return _text(choices, backward)
    found = call.alternatives(at, dst, times)
    better = [Choice(text, n, now) for x, n in found if n < now and (text := _where(use, x))]
    choices += better[: SHOWN if better and better[0].sent_bytes else 1]
    in_call = backward if use.source.has_gradient else len(uses) * (any_backward and use.has_gradient)
    axes = differing(src, dst)
    choices += _of_parameter(uses, axes, in_call)
    replicated = next((x for x, _ in found if all(x.placements[axis] == REPLICATE for axis in axes)), None)
    if is_named and times.read and not choices and replicated and call.bucket_bytes(at, replicated, times) == now:
        units = "; or fully_shard(module), which keeps it sharded" if len(src.shape) > 1 else ""
        return f"{list(replicated.placements)} in the plan, which sends as much in fewer collectives{units}"
    return _text(choices, in_call)


def _text(choices: Sequence[Choice], backward: int) -> str:
    """Those that send less, with the same bytes now together."""
    parts = []
    for now, group in groupby((x for x in choices if x.sent_bytes < x.now), key=lambda choice: choice.now):
        parts.append(f"{'; or '.join(f'{x.text}: {x.sent_bytes:,} bytes{x.of}' for x in group)}, in place of {now:,}")
    return "; or ".join(parts) + (", gradients included" if parts and backward else "")


def _where(use: Use, layout: Layout) -> str:
    """Where the user chooses the layout of an operand that is to have this one, and what to choose there.

    Ops that follow the layout of an operand, such as elementwise ones and reshapes, are passed. Empty if what ops make
    would have to be replicated there, which costs elsewhere.
    """
    source, now, own, via = use.source, use.call.operands[use.position].layout, layout, ""
    while source.call is not None and (found := source.call.followed(source.result, own)) is not None:
        index, own = found
        via, now = f"operand {index} of {source.maker}", source.call.operands[index].layout
        source = source.operands[index]
    moved = zip(now.placements, own.placements, strict=True)
    if (via or source.maker) and any(isinstance(p, Shard) and q == REPLICATE for p, q in moved):
        return ""
    if source.name:
        return f"{list(own.placements)} {f'for {source.name} ' if via else ''}in the plan"
    return f"{list(own.placements)} " + (f"from {source.maker}" if source.maker else f"where {via or 'it'} is made")


def _of_parameter(uses: Sequence[Use], axes: Sequence[int], backward: int) -> list[Choice]:
    """The layout of another parameter of the op with which the call sends least, if it sends less than now."""
    call, at, operands = uses[0].call, uses[0].position, uses[0].operands
    if any(use.call != call for use in uses):
        return []
    numbers = [{use.operands[i].number for use in uses} for i in range(len(operands))]
    times = [
        Times(len(uses), backward * x.has_gradient, len(own) * (x.is_read and backward > 0))
        for x, own in zip(operands, numbers, strict=True)
    ]
    times.append(Times(len(uses), backward, 0))
    found = []
    for index, x in enumerate(operands):
        if x.name and index != at and (choice := call.parameter_choice(index, axes, times)) is not None:
            name = x.name if len(numbers[index]) == 1 else folded(x.name)
            text = f"{list(choice.layout.placements)} for {name} in the plan{choice.then}"
            found.append(Choice(text, choice.sent_bytes, choice.now, " for all operands and the result"))
    return sorted(found, key=lambda choice: choice.sent_bytes)[:1]


def folded(name: str) -> str:
    """`blocks.*.up.weight` of `blocks.0.up.weight`."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _unit(src: Layout, dst: Layout) -> int:
    """The unit in which shards of `dst` differ from those of `src` that are no multiples of it; 1 if that is not it."""
    units = [
        gcd(*(size for size in dst.shard_sizes(axis) or () if isinstance(size, int)))
        for axis, (p, q) in enumerate(zip(src.placements, dst.placements, strict=True))
        if p != q and isinstance(p, Shard) and isinstance(q, Shard) and p.dim == q.dim
    ]
    return max(units, default=1)
