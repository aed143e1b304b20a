"""The all-gathered parameters of one forward: their memory, which is freed and filled again, and their gradients.

Ops save all-gathered parameters, and views of them, for backward. Their memory is freed meanwhile, and filled again
before backward needs it. In between their version differs from the saved one, so reading them is torch's error about
variables that were modified in place.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol, cast
from weakref import ref

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch._C._autograd import _unsafe_set_version_counter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise import _collectives as collectives
from shardwise._redistribute.batched import Batched
from shardwise._tensor.dtensor import DTensor, plain
from shardwise._tensor.transforms import FUNC, refuse_transform
from shardwise._trace import comm_trace
from shardwise._trace.autograd_function import TensorFunction
from shardwise._trace.capture_hooks import not_capturable, tracing_paused
from shardwise._trace.comm_trace import Cause, CommEvent, Purpose
from shardwise.errors import RuleError

UNREDUCED = "_unit_of_unreduced"  # of a parameter with gradients that were not reduced
NO_BACKWARD = -1  # torch's number of the backward that runs, if none does
Fill = Callable[[Sequence[Tensor | None]], list[Tensor]]


@dataclass(frozen=True)
class Message:
    """Parameters that share a collective.

    Args:
        members: which of the parameters of the unit.
        names: theirs.
        moves: what is sent.
        device: of the all-gathered parameters.
        dtype: of them.
        reduce_dtype: in which gradients are added.
        terms: for each, of how many ranks gradients are averaged; 1: they are added.
        resharded: how they are divided from forward to backward among fewer ranks, which all-gather them again.
    """

    members: tuple[int, ...]
    names: tuple[str, ...]
    moves: Batched
    device: str
    dtype: torch.dtype
    reduce_dtype: torch.dtype
    terms: tuple[int, ...]
    resharded: Batched | None = None


class OfUnit(Protocol):
    """What is known of a unit here."""

    number: str  # the same on all ranks
    name: str  # for communication traces and errors
    requires_gradient_sync: bool
    unreduced: dict[int, Tensor]  # full gradients of earlier backwards, by parameter

    def end_backward(self, gathered: "Gathered") -> None: ...


class Gathered:
    """The all-gathered parameters of one forward of a unit.

    Args:
        unit: whose parameters these are.
        parameters: as stored.
        messages: all of them together have each parameter once.
        as_dtensors: a forward of the batch of all ranks.
    """

    def __init__(
        self, unit: OfUnit, parameters: Sequence[DTensor], messages: Sequence[Message], as_dtensors: bool
    ) -> None:
        self.unit, self.parameters, self.messages = unit, list(parameters), messages
        self.as_dtensors = as_dtensors
        self.is_pinned = False  # its memory is kept: it is part of an output
        self.full: list[Tensor] = []  # without history; those that a forward uses share their versions
        self.filled = False
        self._ahead: list[Fill] | None = None
        self._resharded: list[tuple[Batched, list[Tensor]]] = []  # shards of each message among fewer ranks
        self._seen = [_state(p) for p in parameters]
        self.before: Sequence[ref[Gathered]] = ()  # of the same forward, this one is `number`
        self.number = 0
        self.backward = NO_BACKWARD  # torch's number of the one that needs it

    # ---- memory -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the all-gathers, unless they are."""
        if self._ahead is not None or self.filled:
            return
        self._check_unchanged()
        with torch.inference_mode(False), torch.no_grad(), DisableTorchFunctionSubclass():
            stored = [(m.moves, [_on(plain(self.parameters[i]), m.device) for i in m.members]) for m in self.messages]
            sources = zip(self.messages, self._resharded or stored, strict=True)
            self._ahead = [self._start(message, *source) for message, source in sources]

    def _start(self, message: Message, moves: Batched, shards: Sequence[Tensor]) -> Fill:
        backward = torch._C._current_graph_task_id() != NO_BACKWARD
        with self._sending("all-gather", moves.gathered_elements * message.dtype.itemsize, message, moves, backward):
            return moves.start_gather(shards, message.dtype)

    def start_earlier(self, count: int) -> None:
        """Start those of the units that ran before, which backward needs next."""
        for number in range(self.number - 1, max(-1, self.number - 1 - count), -1):
            earlier = self.before[number]()
            if earlier is not None and earlier.full and not earlier.filled:
                earlier.start()

    def fill(self) -> None:
        """Wait for the all-gathers."""
        if self.filled:
            return
        self.start()
        assert self._ahead is not None
        first = not self.full
        with torch.inference_mode(False), torch.no_grad(), DisableTorchFunctionSubclass():
            by_parameter: list[Tensor | None] = [None] * len(self.parameters)
            for message, finish in zip(self.messages, self._ahead, strict=True):
                outs = [None if first or self.is_pinned else _allocated(self.full[i]) for i in message.members]
                for i, x in zip(message.members, finish(outs), strict=True):
                    by_parameter[i] = x
        if first:
            self.full = cast("list[Tensor]", by_parameter)
        elif not self.is_pinned:
            _set_versions(self.full, 0)
        self.filled, self._ahead = True, None

    def free(self, among_fewer: bool = False) -> None:
        """Free the memory; what refers to it can be read again after `fill`.

        Args:
            among_fewer: keep shards of it, so that fewer ranks can all-gather it again.
        """
        self._ahead, self._resharded = None, []
        if not self.filled:
            return
        if among_fewer:
            self._resharded = [
                (m.resharded, m.resharded.own_shards([self.full[i] for i in m.members], collectives.rank()))
                for m in self.messages
                if m.resharded is not None
            ]
        self.filled = False
        if self.is_pinned:  # on this rank: all ranks must go on with the same collectives
            return
        _set_versions(self.full, 1)
        for x in self.full:
            x.untyped_storage().resize_(0)

    def check_dense(self, gradients: Sequence[Tensor | None]) -> None:
        """Raise the same error on all ranks if a gradient is sparse."""
        for p, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None and gradient.is_sparse:
                raise RuleError(
                    f"{p._name} of {self.unit.name} has a sparse gradient, which a fully sharded parameter cannot "
                    f"have. Fix: sparse=False, or list it in ignored_params and shard the table with shard_module."
                )

    def check_not_changed(self) -> None:
        """Raise if a forward changed an all-gathered parameter in place: the change would be lost."""
        changed = [
            p._name or f"number {i}"
            for i, (p, x) in enumerate(zip(self.parameters, self.full, strict=True))
            if x._version
        ]
        if changed:
            raise RuntimeError(
                f"{', '.join(changed)} of {self.unit.name} changed in place in forward, where it is an all-gathered "
                f"copy of its shards: the change would be lost. Fix: change the parameter before or after the forward."
            )

    def _check_unchanged(self) -> None:
        if self._changed:
            names = ", ".join(p._name or "a parameter" for p in self._changed)
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{names} of {self.unit.name} changed between forward and backward, which would all-gather other "
                f"values. Fix: change parameters after backward."
            )

    @property
    def _changed(self) -> list[DTensor]:
        """The parameters that are no longer those that were all-gathered."""
        return [p for p, seen in zip(self.parameters, self._seen, strict=True) if _state(p) != seen]

    @property
    def is_current(self) -> bool:
        """Whether the parameters are those that were all-gathered."""
        return not self._changed

    # ---- gradients --------------------------------------------------------------------------------------------

    def outputs(self) -> tuple[Tensor, ...]:
        """The all-gathered parameters, whose gradients are reduced to those of the stored ones."""
        if torch._C._are_functorch_transforms_active():
            refuse_transform(f"the forward of {self.unit.name}, a unit of fully_shard: {FUNC}")
        with DisableTorchFunctionSubclass():
            if not torch.is_grad_enabled() or not any(p.requires_grad for p in self.parameters):
                return tuple(x.detach() for x in self.full)
            return cast("tuple[Tensor, ...]", _AllGathered.apply(self, *self.parameters))

    def reduce(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the stored parameters."""
        self.check_dense(gradients)
        gradients = self._accumulated(gradients)
        reduced: list[Tensor | None] = [None] * len(gradients)
        for message in self.messages:
            present = [k for k, i in enumerate(message.members) if gradients[i] is not None]
            if not present:
                continue
            part = message if len(present) == len(message.members) else _some(message, present)
            wanted = cast("list[Tensor]", [gradients[i] for i in part.members])
            if torch.is_grad_enabled() and any(g.requires_grad for g in wanted):
                found = cast("list[Tensor]", _Reduced.apply(self, part, *wanted))
            else:
                found = self.reduce_now(part, wanted)
            with DisableTorchFunctionSubclass():
                for i, x, terms in zip(part.members, found, part.terms, strict=True):
                    p = self.parameters[i]
                    reduced[i] = (x / terms if terms > 1 else x).to(p.device, _gradient_dtype(p))
        return reduced

    def _accumulated(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Add the gradients that were not reduced before; none are left if these are not reduced either."""
        kept, found = self.unit.unreduced, list(gradients)
        if self.unit.requires_gradient_sync and not kept:
            return found
        not_capturable("gradients of fully_shard that are not reduced")
        dtypes = {i: _kept_dtype(self.parameters[i], m.reduce_dtype) for m in self.messages for i in m.members}
        for i, parameter in enumerate(self.parameters):
            before, now = kept.pop(id(parameter), None), found[i]
            if before is not None:
                found[i] = before if now is None else before + now.to(dtypes[i])
        if self.unit.requires_gradient_sync:
            return found
        for i, (parameter, gradient) in enumerate(zip(self.parameters, found, strict=True)):
            if gradient is not None:
                kept[id(parameter)] = gradient.to(dtypes[i])
                vars(parameter)[UNREDUCED] = self.unit
        return [None] * len(found)

    def reduce_now(self, message: Message, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The sums over ranks, without history."""
        with (
            torch.no_grad(),
            self._sending(
                "reduce-scatter",
                message.moves.reduced_elements * message.reduce_dtype.itemsize,
                message,
                message.moves,
                backward=True,
            ),
        ):
            return message.moves.reduce(gradients, message.reduce_dtype)

    @contextmanager
    def _sending(
        self, what: str, num_bytes: int, message: Message, moves: Batched, backward: bool = False
    ) -> Iterator[None]:
        """Say to listeners of the communication trace, and in errors, what is sent."""
        cause = Cause(
            "explicit",
            "fully_shard",
            f"{self.unit.name}: {', '.join(message.names)} (unit {self.unit.number})",  # ranks compare it
            what,
            backward=backward,
        )
        before = comm_trace.set_purpose(Purpose(cause))
        try:
            if not comm_trace.listening():
                yield
                return
            with comm_trace.emitting(CommEvent(cause, None, None, moves.ranks, num_bytes, None)):
                yield
        finally:
            comm_trace.set_purpose(before)


@cache
def check_steps() -> None:
    """Let steps of all optimizers refuse parameters with gradients that were not reduced."""
    register_optimizer_step_pre_hook(_check_reduced)


def _check_reduced(optimizer: Optimizer, args: object, kwargs: object) -> None:
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        unit: OfUnit | None = vars(parameter).get(UNREDUCED)
        if unit is not None and id(parameter) in unit.unreduced:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step: gradients of {unit.name} were not reduced over the ranks. Fix: "
                f"set_requires_gradient_sync(True) before the last backward, and let that one use {unit.name}."
            )


def _gradient_dtype(parameter: DTensor) -> torch.dtype | None:
    return parameter.grad_dtype if parameter.is_leaf else parameter.dtype


def _kept_dtype(parameter: DTensor, reduce_dtype: torch.dtype) -> torch.dtype:
    """In which gradients are added before they are reduced: where the user chose a dtype of gradients, not below it."""
    chosen = _gradient_dtype(parameter)
    return reduce_dtype if chosen in (None, parameter.dtype) else torch.promote_types(reduce_dtype, chosen)


def _on(x: Tensor, device: str) -> Tensor:
    return x.detach() if x.device.type == device else x.detach().to(device, non_blocking=True)


def _set_versions(tensors: Sequence[Tensor], version: int) -> None:
    _unsafe_set_version_counter(tuple(tensors), (version,) * len(tensors))


def _state(parameter: DTensor) -> tuple[int, int]:
    """Differs after a parameter was changed."""
    with DisableTorchFunctionSubclass(), tracing_paused():
        return parameter._version, torch._C.TensorBase.data_ptr(parameter)


def _allocated(x: Tensor) -> Tensor:
    """The freed memory of `x`, allocated again, as a tensor whose changes `x` does not count."""
    storage = x.untyped_storage()
    storage.resize_(x.numel() * x.element_size())
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(storage, 0, x.shape, x.stride())


def _some(message: Message, present: Sequence[int]) -> Message:
    """The message without parameters that have no gradient."""
    members, names = tuple(message.members[k] for k in present), tuple(message.names[k] for k in present)
    terms = tuple(message.terms[k] for k in present)
    return replace(message, members=members, names=names, moves=message.moves.some(present), terms=terms)


class _Context(Protocol):
    """torch's, with what the functions below keep in it."""

    gathered: Gathered
    message: Message
    dtypes: list[torch.dtype]

    def set_materialize_grads(self, value: bool) -> None: ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...


class _AllGathered(TensorFunction):
    """All-gathers stored parameters; its backward reduces their gradients."""

    @staticmethod
    def forward(ctx: _Context, gathered: Gathered, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.gathered = gathered
        ctx.set_materialize_grads(False)
        outs = tuple(x.detach() for x in gathered.full)
        ctx.mark_non_differentiable(*[x for x, p in zip(outs, gathered.parameters, strict=True) if not p.requires_grad])
        return outs

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.gathered.unit.end_backward(ctx.gathered)
        return None, *ctx.gathered.reduce(grads)


class _Reduced(TensorFunction):
    """The sums over ranks of gradients; its backward all-gathers."""

    @staticmethod
    def forward(ctx: _Context, gathered: Gathered, message: Message, *gradients: Tensor) -> tuple[Tensor, ...]:
        ctx.message, ctx.dtypes = message, [g.dtype for g in gradients]
        return tuple(gathered.reduce_now(message, gradients))

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = _GatheredGradients.apply(ctx.message, *grads)
        return None, None, *(x.to(dtype) for x, dtype in zip(found, ctx.dtypes, strict=True))


class _GatheredGradients(TensorFunction):
    """All-gathers; its backward adds over ranks."""

    @staticmethod
    def forward(ctx: _Context, message: Message, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.message = message
        return tuple(message.moves.start_gather(shards, message.reduce_dtype)([None] * len(shards)))

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        message = ctx.message
        return None, *message.moves.reduce(grads, message.reduce_dtype)
