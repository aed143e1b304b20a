"""Storage of a unit's parameters, and the collectives that all-gather them and reduce their gradients.

    (message,) = messages_of(Slots(module).find(), MixedPrecisionPolicy(), None, data_ranks, as_dtensors=False)
    full = message.start_gather(shards, message.moves, "0 (unit 1)")([None] * len(shards))
    gradients = message.reduce(gradients_of_full, "0 (unit 1)")

Units are above this file, which knows only the attribute that a module has if it is one.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass

from shardwise import _collectives as collectives
from shardwise._layout import Layout, Mesh, checked_init
from shardwise._redistribute.batched import Batched, batched
from shardwise._tensor.dtensor import DTensor
from shardwise._trace import comm_trace
from shardwise._trace.autograd_function import Context, TensorFunction
from shardwise._trace.comm_trace import Cause, CommEvent, Purpose
from shardwise.errors import PlanError

T = TypeVar("T")
Finish = Callable[[Sequence[Tensor | None]], list[Tensor]]
"""Waits for an all-gather and returns the full tensors; writes them to the given tensors, if any."""
NO_BACKWARD = -1
backward_task = torch._C._current_graph_task_id  # torch's number of the backward that runs, or `NO_BACKWARD`
UNIT = "_fully_sharded_unit"  # attribute of a module
STORED = "_fully_sharded_parameters"  # attribute of a module: how its own parameters are stored, by name
IGNORED = "_fully_shard_ignores"  # attribute of a parameter


@checked_init
@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of a unit, as in torch's `MixedPrecisionPolicy`.

    Args:
        param_dtype: dtype in which parameters are all-gathered and used; None: their own.
        reduce_dtype: dtype in which gradients are added over ranks; None: `param_dtype`.
        output_dtype: dtype of floating-point outputs; None: unchanged.
        cast_forward_inputs: convert floating-point inputs to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True, eq=False)
class Stored:
    """The storage and use of one parameter.

    Args:
        at_rest: the layout of the parameter between steps, sharded along `axis`; if offloaded, on a CPU mesh.
        axis: of the mesh of `at_rest`.
        gathered: the layout of the all-gathered parameter, on the same ranks.
        shown: the layout of the DTensor that a forward of plain inputs gets; None: a plain tensor.
        terms: number of ranks over which such a forward averages gradients; 1: they are added.
        shards_batch: the ranks of other axes may also have parts of the batch; then gradients are averaged over them.
    """

    at_rest: Layout
    axis: int
    gathered: Layout
    shown: Layout | None
    terms: int
    shards_batch: bool = False

    @property
    def sharded(self) -> Layout:
        """`at_rest` on the device where parameters are used."""
        return _on_mesh(self.at_rest, self.gathered.mesh)

    def reduction(self, data_ranks: frozenset[int], as_dtensors: bool) -> tuple[frozenset[int], int]:
        """The ranks with a part of the batch over which gradients are added, and the divisor."""
        ranks = data_ranks.intersection(self.at_rest.mesh.ranks)
        if as_dtensors and self.shown is None:
            return ranks, 1
        return ranks, len(ranks) if self.shards_batch else self.terms

    def offloaded(self) -> "Stored":
        """Stored on the CPU."""
        mesh = self.at_rest.mesh
        return replace(self, at_rest=_on_mesh(self.at_rest, Mesh(mesh.shape, mesh.ranks, mesh.names)))


def _on_mesh(layout: Layout, mesh: Mesh) -> Layout:
    return Layout(mesh, layout.placements, layout.shape, layout.shard_order)


class Slot(NamedTuple):
    """A parameter of a unit, and the modules that own it."""

    parameter: DTensor
    stored: Stored
    owners: list[tuple[nn.Module, str]]


def axes_along(of: Mesh, mesh: Mesh) -> list[int] | None:
    """The axes of a mesh that have the ranks of each axis of `mesh`; None if one has no such axis."""
    rank = collectives.rank()
    ranks = [of.axis_ranks(rank, axis) for axis in range(of.ndim)]
    wanted = [mesh.axis_ranks(rank, axis) for axis in range(mesh.ndim)]
    return [ranks.index(group) for group in wanted] if set(wanted) <= set(ranks) else None


def check_all_stored(path: str, module: nn.Module) -> None:
    """Raise for a parameter that was set on this module after `fully_shard`: nothing reduces its gradients.

    Raises:
        PlanError: a parameter is neither a DTensor nor ignored.
    """
    stored = vars(module).get(STORED, {})
    for name, p in module._parameters.items():
        if p is not None and name not in stored and not isinstance(p, DTensor) and not hasattr(p, IGNORED):
            full_name = f"{path}.{name}" if path else name
            raise PlanError(
                f"{full_name} was added after fully_shard: its gradients would not be reduced over the ranks. "
                f"Fix: call fully_shard on {path.rpartition('.')[0] or 'the module'} afterwards, or on {path!r}; or, "
                f"if you reduce its gradients yourself, list it in ignored_params."
            )


class Slots:
    """The parameters of a unit, without those of units inside it.

    Attributes:
        owned: parameter names, each with the module that owns it. Set to None after modules change: unknown.
        messages: messages of the parameters, by the values that they depend on.
    """

    def __init__(self, module: nn.Module) -> None:
        self.owned: list[tuple[nn.Module, str, Stored]] | None = None
        self.messages: dict[object, list[Message]] = {}
        self._module = module
        self._found: list[Slot] = []
        self._seen: list[object] = []  # the parameters that modules had at the last search

    def find(self) -> list[Slot]:
        """The parameters; found again if a module has another one, or if one has another dtype or layout."""
        if self.owned is None:
            self.owned = list(_owned(self._module))
        with DisableTorchFunctionSubclass():
            seen: list[object] = [
                (id(owner), name, stored, id(p), getattr(p, "dtype", None), getattr(p, "_layout", None))
                for owner, name, stored in self.owned
                for p in (owner._parameters.get(name),)
            ]
        if seen != self._seen:
            self._found, self._seen, self.messages = _slots(self.owned), seen, {}
        return self._found


def _owned(module: nn.Module) -> Iterator[tuple[nn.Module, str, Stored]]:
    for name, stored in vars(module).get(STORED, {}).items():
        yield module, name, stored
    for child in module._modules.values():
        if child is not None and UNIT not in vars(child):
            yield from _owned(child)


def _slots(owned: Iterable[tuple[nn.Module, str, Stored]]) -> list[Slot]:
    found: dict[int, Slot] = {}
    for owner, name, stored in owned:
        if name not in owner._parameters:
            raise PlanError(
                f"{name} of {type(owner).__name__} was taken away after fully_shard, as by a parametrization. "
                f"Fix: register it before fully_shard."
            )
        p = cast("Tensor | None", owner._parameters[name])
        if p is None:
            continue
        if not isinstance(p, DTensor) or p._layout != stored.at_rest:
            held = p._layout if isinstance(p, DTensor) else f"a plain tensor of shape {tuple(p.shape)}"
            raise PlanError(
                f"{name} of {type(owner).__name__} was replaced after fully_shard: expected a DTensor of "
                f"{stored.at_rest}, got {held}. Fix: copy values into it, such as load_state_dict(assign=False)."
            )
        slot = found.setdefault(id(p), Slot(p, stored, []))
        if (owner, name) not in slot.owners:
            slot.owners.append((owner, name))
    return list(found.values())


@dataclass(frozen=True)
class Message:
    """Parameters that share a collective.

    Args:
        members: indices of its parameters in the unit.
        names: their names.
        moves: the layout changes of the all-gather.
        device: of the all-gathered parameters.
        dtype: of the all-gathered parameters.
        reduce_dtype: dtype in which gradients are added.
        terms: for each parameter, number of ranks over which gradients are averaged; 1: they are added.
        resharded: layout changes among fewer ranks, which hold the parameters from forward to backward.
    """

    members: tuple[int, ...]
    names: tuple[str, ...]
    moves: Batched
    device: str
    dtype: torch.dtype
    reduce_dtype: torch.dtype
    terms: tuple[int, ...]
    resharded: Batched | None = None

    def start_gather(self, shards: Sequence[Tensor], moves: Batched, unit: str) -> Finish:
        """Start the all-gather of this rank's shards, divided as `moves` or `resharded` says."""
        num_bytes, backward = moves.gathered_elements * self.dtype.itemsize, backward_task() != NO_BACKWARD
        return self._send(
            "all-gather", num_bytes, moves, unit, backward, lambda: moves.start_gather(shards, self.dtype)
        )

    def reduce(self, gradients: Sequence[Tensor | None], unit: str) -> list[Tensor | None]:
        """The shards of the gradients, added over ranks or averaged. None stays None, on all ranks.

        Args:
            gradients: of the full parameters.
        """
        present = [k for k, gradient in enumerate(gradients) if gradient is not None]
        if not present:
            return list(gradients)
        part = self if len(present) == len(gradients) else self._some(present)
        wanted = cast("list[Tensor]", [gradients[k] for k in present])
        with_history = torch.is_grad_enabled() and any(g.requires_grad for g in wanted)
        found = _Reduced.apply(part, unit, *wanted) if with_history else part.reduce_now(wanted, unit)
        reduced: list[Tensor | None] = [None] * len(gradients)
        for k, x in zip(present, found, strict=True):
            reduced[k] = x
        return reduced

    def reduce_now(self, gradients: Sequence[Tensor], unit: str) -> list[Tensor]:
        """The shards of the sums or averages over ranks, without history."""
        num_bytes, moves = self.moves.reduced_elements * self.reduce_dtype.itemsize, self.moves
        with torch.no_grad():
            found = self._send(
                "reduce-scatter", num_bytes, moves, unit, True, lambda: moves.reduce(gradients, self.reduce_dtype)
            )
            for x, terms in zip(found, self.terms, strict=True):
                if terms > 1:
                    x.div_(terms)  # new memory would cost page faults
        return found

    def _some(self, present: Sequence[int]) -> "Message":
        """The message without parameters that have no gradient."""
        members, names = tuple([self.members[k] for k in present]), tuple([self.names[k] for k in present])
        terms = tuple([self.terms[k] for k in present])
        return replace(self, members=members, names=names, terms=terms, moves=self.moves.some(present))

    def _send(self, what: str, num_bytes: int, moves: Batched, unit: str, backward: bool, run: Callable[[], T]) -> T:
        """Report the message to the communication trace and to errors. Ranks compare it."""
        cause = Cause("explicit", "fully_shard", f"{unit}: {', '.join(self.names)}", what, backward=backward)
        return comm_trace.send(Purpose(cause), lambda: CommEvent(cause, None, None, moves.ranks, num_bytes, None), run)


def messages_of(
    slots: Sequence[Slot],
    policy: MixedPrecisionPolicy,
    fewer: int | None,
    data_ranks: frozenset[int],
    as_dtensors: bool,
) -> list[Message]:
    """One message for each dtype and mesh axis.

    Args:
        slots: the parameters of a unit.
        policy: their dtypes.
        fewer: number of ranks that share parameters from forward to backward; None: as many as at rest.
        data_ranks: ranks with a part of the batch.
        as_dtensors: for forwards of the batch of all ranks.
    """
    groups: dict[object, list[int]] = {}
    for i, slot in enumerate(slots):
        groups.setdefault((slot.stored.at_rest.mesh, slot.stored.axis, slot.parameter.dtype), []).append(i)
    messages = []
    for members in groups.values():
        first, own = slots[members[0]].stored, slots[members[0]].parameter.dtype
        dtype = policy.param_dtype if policy.param_dtype is not None and own.is_floating_point else own
        moves = batched([slots[i].stored.sharded for i in members], first.axis, collectives.rank())
        messages.append(
            Message(
                members=tuple(members),
                names=tuple([slots[i].parameter._name or f"number {i}" for i in members]),
                moves=moves,
                device=first.gathered.mesh.device_type,
                dtype=dtype,
                reduce_dtype=policy.reduce_dtype or dtype,
                terms=tuple([slots[i].stored.reduction(data_ranks, as_dtensors)[1] for i in members]),
                resharded=None if fewer is None else moves.among(fewer, collectives.rank()),
            )
        )
    return messages


class _Reduced(TensorFunction):
    """Adds or averages gradients over ranks; its backward all-gathers.

    Where ranks average, each rank has the gradients of its own loss: `terms` times those of the average loss. The
    backward of the average returns such gradients, so it divides nothing.
    """

    @staticmethod
    def forward(ctx: Context, message: Message, unit: str, *gradients: Tensor) -> tuple[Tensor, ...]:
        ctx.args = message, unit, [g.dtype for g in gradients]
        return tuple(message.reduce_now(gradients, unit))

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        message, unit, dtypes = ctx.args
        found = _GatheredGradients.apply(message, unit, *grads)
        return None, None, *(x.to(dtype) for x, dtype in zip(found, dtypes, strict=True))


class _GatheredGradients(TensorFunction):
    """All-gathers; its backward adds or averages over ranks."""

    @staticmethod
    def forward(ctx: Context, message: Message, unit: str, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.args = message, unit
        return tuple(message.moves.start_gather(shards, message.reduce_dtype)([None] * len(shards)))

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        message, unit = ctx.args
        return None, None, *message.reduce(grads, unit)
