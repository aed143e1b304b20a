"""What to change so that an op sends less for an operand, with the bytes of each choice."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from math import gcd
from typing import NamedTuple
from weakref import ref

from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise.debug.alternatives import OperandCall, Times, tensors_of
from shardwise.debug.balance import Balance
from shardwise.layout import Layout, Partial, Shard
from shardwise.rules import RULES
from shardwise.rules.row import Args, Kwargs, Op
from shardwise.tensor import DTensor
from shardwise.tensor.dispatch.hooks import Proceed
from shardwise.tensor.dispatch.names import name_of
from shardwise.trace.comm_trace import CommEvent
from shardwise.trace.user_stack import call_site

SHOWN = 2  # alternatives
_numbers = count()


class Use(NamedTuple):
    """An operand that an op redistributed.

    Args:
        position: which operand of the call it is.
        tensor: a number of the tensor, to see whether two ops redistributed the same one.
        maker: the op whose result it is, with its line; empty for parameters and inputs.
        is_read: it is a leaf that requires a gradient, which is reduced when it is read.
    """

    call: OperandCall
    position: int
    tensor: int
    maker: str
    is_read: bool


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
        self._known: dict[int, tuple[ref[Tensor], int, str]] = {}  # of tensors by id: a number, and what made it

    def run(self, proceed: Proceed, op: Op, args: Args, kwargs: Kwargs, balance: Balance) -> object:
        """Run an op, and note its result and its work."""
        if self._running:
            self._running[-1].runs_others = True
        running = _Running(op, args, kwargs)
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
        for x in results:
            self._known[id(x)] = ref(x), next(_numbers), maker
        return out

    def _tensors(self, running: _Running, results: Sequence[DTensor]) -> list[tuple[str, Layout, bool]]:
        """Of operands and results a name, the layout in which the op ran, and whether it is no result of an op.

        Redistributed operands are last: their layouts are not what the user chose.
        """
        operands = [(i, x) for i, x in enumerate(tensors_of(running.args, running.kwargs)) if type(x) is DTensor]
        found = [
            (x._name or f"operand {i}", running.needed.get(i, x._layout), not self._number(x)[1]) for i, x in operands
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
                return Use(call, position, *self._number(x), x.is_leaf and x.requires_grad)
        return None

    def _number(self, x: Tensor) -> tuple[int, str]:
        """A number of the tensor, and what made it."""
        known = self._known.get(id(x))
        if known is None or known[0]() is not x:  # another tensor may have had its id
            known = self._known[id(x)] = ref(x), next(_numbers), ""
        return known[1:]


def advice(uses: Sequence[Use], event: CommEvent, backward: int) -> str:
    """Other layouts of the operand, each with what all ranks would send for it in place of what they send now.

    Args:
        uses: one for each time that the operand, or that of an equal module, was redistributed.
        event: of the first of them.
        backward: how often its gradient was redistributed.
    """
    use, dst, name = uses[0], event.dst, event.cause.operand
    assert dst is not None
    call, at = use.call, use.position
    tensors = len({other.tensor for other in uses})
    read = tensors if use.is_read and backward else 0
    times, src, is_named, choices = Times(len(uses), backward, read), call.operands[at].layout, " " not in name, []
    now = call.sent_bytes(at, src, dst, times)
    if len(uses) > tensors and not is_named:
        once = call.sent_bytes(at, src, dst, Times(tensors, min(tensors, backward), read))
        choices.append(f".redistribute(placements={list(dst.placements)}) of {name} once before: {once:,} bytes")
    of_what = f"in place of {now:,}{', gradients included' if backward else ''}"
    unit = _unit(src, dst)
    if unit > 1:
        choices.append(
            f"shard sizes in multiples of {unit}, as by unit={unit} of ColwiseParallel or RowwiseParallel: 0 bytes"
        )
    elif any(isinstance(p, Partial) for p in src.placements):
        sharded = [other for other in call.sharded_sums(at, dst, times) if other.sent_bytes < now]
        choices += [f".redistribute(placements={list(x.placements)}) of {name}: {n:,} bytes" for x, n in sharded[:1]]
    else:
        found = call.alternatives(at, dst, times)
        where = "in the plan" if is_named else f"from {use.maker}" if use.maker else "where it is made"
        better = [other for other in found if other.sent_bytes < now]
        better = better[: SHOWN if better and better[0].sent_bytes else 1]
        choices += [f"{list(x.placements)} {where}: {n:,} bytes" for x, n in better]
        if is_named and not choices:
            least = (
                f"; {list(found[0].layout.placements)} sends {found[0].sent_bytes:,} bytes {of_what}" if found else ""
            )
            return f"fully_shard, or ColwiseParallel and RowwiseParallel{least}"
    return f"{'; or '.join(choices)}, {of_what}" if choices else ""


def _unit(src: Layout, dst: Layout) -> int:
    """The unit in which shards of `dst` differ from those of `src` that are no multiples of it; 1 if that is not it."""
    units = [
        gcd(*(size for size in dst.shard_sizes(axis) or () if isinstance(size, int)))
        for axis, (p, q) in enumerate(zip(src.placements, dst.placements, strict=True))
        if p != q and isinstance(p, Shard) and isinstance(q, Shard) and p.dim == q.dim
    ]
    return max(units, default=1)
