"""Which tensors ops use, where these come from, and which of them are redistributed."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise.debug.alternatives import OperandCall, tensors_of
from shardwise.debug.balance import Balance
from shardwise.debug.calls import Calls, Source, Step
from shardwise.debug.repeated import NotedTensor, Repeated
from shardwise.layout import REPLICATE, Layout
from shardwise.rules.registry import RULES, no_rows
from shardwise.rules.row import Args, Kwargs, Op
from shardwise.tensor import DTensor
from shardwise.tensor.dispatch.hooks import Proceed
from shardwise.tensor.dispatch.names import name_of
from shardwise.trace.comm_trace import EXPLICIT, Cause, CommEvent
from shardwise.trace.user_stack import call_site

_numbers = count()


class Use(NamedTuple):
    """An operand that an op redistributed.

    Args:
        step: the number of the call.
        position: which operand of it it is.
        operands: the sources of all.
        has_gradient: of the result.
    """

    call: OperandCall
    step: int
    position: int
    operands: tuple[Source, ...]
    has_gradient: bool

    @property
    def source(self) -> Source:
        """Of the operand."""
        return self.operands[self.position]


@dataclass
class _Running:
    """An op that runs.

    Attributes:
        needed: operands that it redistributed, by position: in which layout it needs them.
        runs_others: it is decomposed into other ops.
        exchanges: it communicates inside the op.
        number: of the step.
    """

    op: Op
    args: Args
    kwargs: Kwargs
    needed: dict[int, Layout] = field(default_factory=dict)
    runs_others: bool = False
    exchanges: bool = False
    number: int = field(default_factory=lambda: next(_numbers))


class Uses:
    """Follows the tensors of ops: what made them, and which operands are redistributed.

    Attributes:
        calls: all steps. They hold layouts, no tensors.
    """

    def __init__(self) -> None:
        self.calls = Calls()
        self._running: list[_Running] = []  # the innermost last
        self._known: dict[int, tuple[ref[Tensor], Source]] = {}  # of tensors by id

    def run(self, proceed: Proceed, op: Op, args: Args, kwargs: Kwargs, balance: Balance, repeated: Repeated) -> object:
        """Run an op, and note its results and its work."""
        if self._running:
            self._running[-1].runs_others = True
        running = _Running(op, args, kwargs)
        operands = self._sources(args, kwargs)  # before an op in place makes another tensor of one
        self._running.append(running)
        try:
            out = proceed()
        except BaseException:  # what checkpoint() runs again ends so, in the last op of which it needs something
            self._note(running, name_of(op), operands, [], [], None)
            raise
        finally:
            self._running.pop()
        results = [x for x in pytree.tree_leaves(out) if type(x) is DTensor]
        if not running.runs_others:
            balance.note(name_of(op), self._tensors(running, results))
        site = call_site()
        maker = name_of(op) + (f" ({site})" if site else "")
        has_rows = op in RULES and RULES[op].rows is not no_rows and DTensor in map(type, tensors_of(args, kwargs))
        call = OperandCall.of(op, args, kwargs) if results and has_rows else None
        made, is_known = list[Source](), True
        for i, x in enumerate(results):
            known = self._known.get(id(x))
            if running.runs_others and known is not None and known[0]() is x:
                source = replace(known[1], maker=maker)
            else:
                is_known = not running.runs_others
                source = Source(next(_numbers), "", x.requires_grad, False, maker, call, operands, i)
            self._known[id(x)] = ref(x), source
            made.append(source)
        if not running.runs_others or not is_known:
            self._note(running, maker, operands, results, made, None if running.runs_others else call)
        if results:
            own_call = None if running.runs_others else call
            repeated.note(name_of(op), site, own_call, *self._noted(running, operands, results))
        return out

    def _note(
        self,
        running: _Running,
        place: str,
        operands: tuple[Source, ...],
        results: Sequence[DTensor],
        made: Sequence[Source],
        call: OperandCall | None,
    ) -> None:
        """Note a step that has run; without a call, that something is done with its operands."""
        is_recorded = torch.is_grad_enabled()
        step = Step(running.number, place, operands, results=tuple(made), is_recorded=is_recorded)
        if call is not None:
            step = replace(
                step,
                layouts=tuple(x.layout for x in call.operands),
                made=tuple(x._layout.unowned for x in results),
                itemsizes=(*(x.dtype.itemsize for x in call.operands), *(x.dtype.itemsize for x in results)),
                exchanges=running.exchanges,
                call=call,
            )
        self.calls.steps.append(replace(step, is_update=self.calls.runs_backward and not is_recorded))

    def note_conversion(self, x: DTensor, layout: Layout | None, out: object, cause: Cause) -> None:
        """Note a redistribution, or that a local tensor is read."""
        source, src = self._source(x), x._layout.unowned
        if layout is None:
            self.calls.local.add(source.number)
            return
        results: tuple[Source, ...] = ()
        if isinstance(out, DTensor) and (out is not x or cause is EXPLICIT):
            site = call_site()
            maker = f"{cause.op or 'redistribute'}{f' ({site})' if site else ''}"
            made = source if out is x else Source(next(_numbers), "", out.requires_grad, False, maker)
            self._known[id(out)] = ref(out), made
            results = (made,)
        made_layouts = (layout.unowned,) * len(results)
        sizes = (x.dtype.itemsize,) * (1 + len(results))
        step = Step(next(_numbers), cause.op, (source,), (src,), results, made_layouts, sizes)
        self.calls.steps.append(replace(step, is_recorded=torch.is_grad_enabled(), target=layout.unowned))

    def note_backward(self, x: object) -> None:
        """Note that backward starts at a tensor."""
        self.calls.runs_backward = True
        if isinstance(x, DTensor):
            self.calls.started.add(self._source(x).number)

    def note_exchange(self) -> None:
        """Note that the op that runs communicates inside."""
        if self._running:
            self._running[-1].exchanges = True

    def end(self) -> Calls:
        """The steps, when the block has ended, and which tensors are still there."""
        self.calls.kept = {source.number for held, source in self._known.values() if held() is not None}
        return self.calls

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

    def _noted(
        self, running: _Running, operands: Sequence[Source], results: Sequence[DTensor]
    ) -> tuple[list[NotedTensor], list[NotedTensor]]:
        """Operands and results, with the layouts in which the op ran."""
        mesh, found = results[0]._layout.mesh, []
        for i, (x, source) in enumerate(zip(tensors_of(running.args, running.kwargs), operands, strict=True)):
            own = x._layout if type(x) is DTensor else Layout(mesh, [REPLICATE] * mesh.ndim, x.shape)
            is_parameter, what = bool(source.name) or source.is_read, source.name or f"operand {i}"
            layout = running.needed.get(i, own)
            found.append(NotedTensor(source.number, what, is_parameter, source.maker, own, layout))
        made = [(self._known[id(x)][1].number, x._layout) for x in results]
        return found, [NotedTensor(number, "the result", False, "", own, own) for number, own in made]

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
                has_gradient = torch.is_grad_enabled() and any(y.has_gradient for y in operands)
                return Use(call, running.number, position, operands, has_gradient)
        return None

    def _source(self, x: Tensor) -> Source:
        known = self._known.get(id(x))
        if known is None or known[0]() is not x:  # another tensor may have had its id
            cause = getattr(x.grad_fn, "cause", None)  # of an explicit redistribution
            maker = "" if cause is None else f"{cause.operand or 'redistribute'} ({cause.call_site})"
            known = self._known[id(x)] = ref(x), Source(next(_numbers), "", x.requires_grad, False, maker)
        name, is_read = (type(x) is DTensor and x._name) or "", x.is_leaf and x.requires_grad
        return Source(known[1].number, name, x.requires_grad, is_read) if name or is_read else known[1]
