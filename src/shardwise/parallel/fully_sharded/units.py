"""Units: modules whose parameters are all-gathered together before forward and before backward.

    sharded → gathering → gathered → forward → gathered → sharded     a forward
    sharded → gathering → gathered → backward → gathered → sharded    its backward, which reduces gradients at its end

Ops save all-gathered parameters, and views of them, for backward. Their memory is freed after forward, and filled again
before backward needs it. In between their version differs from the saved one, so reading them raises torch's error
about variables that were modified in place.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import TypeVar, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch._C._autograd import _unsafe_set_version_counter
from torch.autograd.graph import Node
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from shardwise import _collectives as collectives
from shardwise._layout import Mesh
from shardwise._layout import shown as as_text
from shardwise._redistribute.batched import Batched, buffers_of_rank
from shardwise._rules.row import Args, Kwargs
from shardwise._tensor.dtensor import DTensor, plain, tag
from shardwise._tensor.transforms import FUNC, refuse_transform
from shardwise._torch_bridge.module_sharding import assign
from shardwise._trace.autograd_function import Context, TensorFunction
from shardwise._trace.capture_hooks import is_capturing, not_capturable, tracing_paused
from shardwise._trace.user_stack import call_sites
from shardwise.errors import PlanError, RuleError, ThreadError
from shardwise.parallel.fully_sharded.messages import (
    NO_BACKWARD,
    UNIT,
    Finish,
    Message,
    MixedPrecisionPolicy,
    Slot,
    Slots,
    axes_along,
    backward_task,
    check_all_stored,
    messages_of,
)

UNREDUCED = "_unreduced_gradient"  # on a parameter: its full gradient of earlier backwards, and its unit's name
CALLERS = 4  # callers of deepcopy that identify a copy
T = TypeVar("T")


class State(Enum):
    """State of the parameters of one forward of a unit, on one rank."""

    SHARDED = "sharded"
    GATHERING = "gathering"  # all-gathers have started
    GATHERED = "gathered"  # the full parameters are in memory
    FORWARD = "in forward"  # modules have them
    BACKWARD = "in backward"  # modules have them, for what is recomputed


TRANSITIONS = (
    (State.SHARDED, State.GATHERING),
    (State.GATHERING, State.GATHERED),
    (State.GATHERING, State.SHARDED),  # a backward that did not need what was started for it
    (State.GATHERED, State.FORWARD),
    (State.GATHERED, State.BACKWARD),
    (State.GATHERED, State.SHARDED),
    (State.FORWARD, State.GATHERED),
    (State.BACKWARD, State.GATHERED),
)


@dataclass(frozen=True)
class Options:
    """See `fully_shard`."""

    mesh: Mesh
    reshard_after_forward: bool | int | None  # an int is a factor of the number of ranks, neither of them nor 1
    mp_policy: MixedPrecisionPolicy
    prefetch: int


# ---- the parameters of one forward ------------------------------------------------------------------------


class FullParameters:
    """The all-gathered parameters of one forward of a unit, and the gradients of its backward.

    Args:
        unit: the unit that owns the parameters.
        slots: the parameters as stored.
        messages: together they have each parameter once.
        as_dtensors: a forward of the batch of all ranks.
    """

    def __init__(self, unit: "Unit", slots: Sequence[Slot], messages: Sequence[Message], as_dtensors: bool) -> None:
        self.unit, self.slots, self.messages, self.as_dtensors = unit, slots, messages, as_dtensors
        self.parameters = [slot.parameter for slot in slots]
        self.state = State.SHARDED
        self.full: list[Tensor] = []  # without history; those that a forward uses share their versions
        self.is_pinned = False  # its memory is kept: it is part of an output
        self.backward = NO_BACKWARD  # torch's number of the backward that needs it
        self.earlier: Sequence[ref[FullParameters]] = ()  # parameters of earlier units, which backward needs next
        self._seen = _versions(self.parameters)
        self._finish: list[Finish] = []  # while gathering
        self._resharded: list[tuple[Batched, list[Tensor]]] = []  # shards of each message among fewer ranks
        self._shown: list[Tensor] = []  # what modules have instead of stored parameters
        self._hidden: list[
            tuple[dict[str, nn.Parameter | None], str, nn.Parameter | None]
        ] = []  # parameters that `_shown` hides

    def become(self, state: State) -> None:
        """Change the state.

        Raises:
            ThreadError: no transition from the present state.
        """
        if (self.state, state) not in TRANSITIONS:
            expected = " or ".join(after.value for before, after in TRANSITIONS if before is self.state)
            raise ThreadError(
                f"Parameters of {self.unit.label} are {self.state.value}: expected {expected} next, got {state.value}. "
                f"Fix: run its forwards and backwards in one thread, one after the other."
            )
        self.state = state

    # ---- memory -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the all-gathers, unless they have started."""
        if self.state is not State.SHARDED:
            return
        self._check_unchanged()
        with torch.inference_mode(False), torch.no_grad(), DisableTorchFunctionSubclass():
            stored = [(m.moves, [_on(plain(self.parameters[i]), m.device) for i in m.members]) for m in self.messages]
            self._finish = [
                message.start_gather(shards, moves, self.unit.label)
                for message, (moves, shards) in zip(self.messages, self._resharded or stored, strict=True)
            ]
        self.become(State.GATHERING)

    def fill(self) -> None:
        """Wait for the all-gathers."""
        if self.state not in (State.SHARDED, State.GATHERING):
            return
        self.start()
        first = not self.full
        with torch.inference_mode(False), torch.no_grad(), DisableTorchFunctionSubclass():
            by_parameter: list[Tensor | None] = [None] * len(self.parameters)
            for message, finish in zip(self.messages, self._finish, strict=True):
                outs = [None if first or self.is_pinned else _allocated(self.full[i]) for i in message.members]
                for i, x in zip(message.members, finish(outs), strict=True):
                    by_parameter[i] = x
        if first:
            self.full = cast("list[Tensor]", by_parameter)
        elif not self.is_pinned:
            _set_versions(self.full, 0)
        self._finish = []
        self.become(State.GATHERED)

    def free(self, among_fewer: bool = False) -> None:
        """Free the memory; tensors that share it can be read again after `fill`.

        Args:
            among_fewer: keep shards, which fewer ranks can all-gather again.
        """
        self._finish, self._resharded = [], []
        if self.state is State.SHARDED:
            return
        is_filled = self.state is State.GATHERED
        self.become(State.SHARDED)
        if is_filled and among_fewer:
            self._resharded = [
                (m.resharded, m.resharded.own_shards([self.full[i] for i in m.members], collectives.rank()))
                for m in self.messages
                if m.resharded is not None
            ]
        if is_filled and not self.is_pinned:  # on this rank: all ranks must go on with the same collectives
            _set_versions(self.full, 1)
            for x in self.full:
                x.untyped_storage().resize_(0)

    # ---- what modules have ------------------------------------------------------------------------------------

    def show(self, state: State) -> None:
        """Set all-gathered parameters on modules, for a forward or a backward."""
        self.unit.hide()
        self.become(state)
        self.unit.shown = self
        for slot, out in zip(self.slots, self._outputs(), strict=True):
            layout = slot.stored.gathered if self.as_dtensors and slot.stored.shown is None else slot.stored.shown
            shown = out if layout is None else tag(out, layout)
            _mark_parameter(shown, slot.parameter)
            self._shown.append(shown)
            self._hidden += [(owner._parameters, name, owner._parameters[name]) for owner, name in slot.owners]
            assign(slot.owners, shown)

    def hide(self) -> None:
        """Set the earlier parameters on modules: in backward not always what forward used (`functional_call`)."""
        for parameters, name, before in self._hidden:
            parameters[name] = before
        self._shown, self._hidden, self.unit.shown = [], [], None
        self.become(State.GATHERED)

    def _outputs(self) -> tuple[Tensor, ...]:
        """The all-gathered parameters, whose gradients are reduced to those of the stored parameters."""
        if torch._C._are_functorch_transforms_active():
            refuse_transform(f"the forward of {self.unit.name}, a unit of fully_shard: {FUNC}")
        with DisableTorchFunctionSubclass():
            if not torch.is_grad_enabled() or not any(p.requires_grad for p in self.parameters):
                return tuple(x.detach() for x in self.full)
            return cast("tuple[Tensor, ...]", _AllGathered.apply(self, *self.parameters))

    def check_kept(self) -> None:
        """Raise if a forward changed or replaced an all-gathered parameter: the change would be lost."""
        for slot, shown, full in zip(self.slots, self._shown, self.full, strict=True):
            with DisableTorchFunctionSubclass(), tracing_paused():
                same_dtype = shown.dtype == full.dtype  # else it was converted, for this forward
                moved = same_dtype and torch._C.TensorBase.data_ptr(shown) != full.data_ptr()
            if moved or any(owner._parameters[name] is not cast(object, shown) for owner, name in slot.owners):
                what = "was replaced"
            elif full._version:
                what = "changed in place"
            else:
                continue
            raise RuntimeError(
                f"{slot.parameter._name} of {self.unit.name} {what} in forward, where it is an all-gathered copy of "
                f"its shards: the change would be lost. Fix: change the parameter before or after the forward."
            )

    def is_of(self, slots: Sequence[Slot], messages: Sequence[Message]) -> bool:
        """Whether an all-gather would find these parameters again."""
        if self.messages is not messages or any(
            p is not s.parameter for p, s in zip(self.parameters, slots, strict=True)
        ):
            return False
        return _versions(self.parameters) == self._seen

    def _check_unchanged(self) -> None:
        changed = [
            p._name or "a parameter"
            for p, before, now in zip(self.parameters, self._seen, _versions(self.parameters), strict=True)
            if before != now
        ]
        if changed:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{', '.join(changed)} of {self.unit.name} changed between forward and backward, which would "
                f"all-gather other values. Fix: change parameters after backward."
            )

    # ---- backward ---------------------------------------------------------------------------------------------

    def begin_backward(self, *_: object) -> None:
        """Fill the parameters before the first op of backward; start those that backward needs next."""
        self.fill()
        self.keep_in_backward()
        for earlier in reversed(self.earlier):
            found = earlier()
            if found is not None and found.full:
                found.start()

    def keep_in_backward(self) -> None:
        """Keep the parameters on modules until gradients are computed: checkpoints recompute with them."""
        self.backward = backward_task()
        _end_after_backward(self)
        if self.state is not State.BACKWARD and not self.unit.is_running:
            with torch.enable_grad():
                self.show(State.BACKWARD)

    def end_backward(self, *_: object) -> None:
        """Free the parameters of backward, unless it is an inner backward: a checkpoint that recomputes."""
        if self.backward not in (backward_task(), NO_BACKWARD) or self.state is State.FORWARD:
            return
        if self.state is State.BACKWARD:
            self.hide()
        if not torch.is_grad_enabled():  # a double backward reads them again
            self.free()

    def reduce(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the stored parameters."""
        for p, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None and gradient.is_sparse:  # on all ranks
                raise RuleError(
                    f"{p._name} of {self.unit.name} has a sparse gradient, which a fully sharded parameter cannot "
                    f"have. Fix: sparse=False, or list it in ignored_params and shard the table with shard_module."
                )
        gradients = self._accumulated(gradients)
        reduced: list[Tensor | None] = [None] * len(gradients)
        for message in self.messages:
            found = message.reduce([gradients[i] for i in message.members], self.unit.label)
            with DisableTorchFunctionSubclass():
                for i, x in zip(message.members, found, strict=True):
                    p = self.parameters[i]
                    reduced[i] = None if x is None else x.to(p.device, _gradient_dtype(p))
        return reduced

    def _accumulated(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Add the gradients that earlier backwards did not reduce; if these are not reduced either, keep the sum."""
        found, sync = list(gradients), self.unit.requires_gradient_sync
        if sync and not [p for p in self.parameters if UNREDUCED in vars(p)]:
            return found
        not_capturable("gradients of fully_shard that are not reduced")
        for message in self.messages:
            for i in message.members:
                p, now = self.parameters[i], found[i]
                kept: tuple[Tensor, str] | None = vars(p).pop(UNREDUCED, None)
                if now is not None:
                    now = now.to(_kept_dtype(p, message.reduce_dtype))
                if kept is not None:
                    now = kept[0] if now is None else kept[0] + now
                if now is not None and not sync:
                    vars(p)[UNREDUCED] = now, self.unit.name
                found[i] = now if sync else None
        return found


class _AllGathered(TensorFunction):
    """All-gathers stored parameters; its backward reduces their gradients."""

    @staticmethod
    def forward(ctx: Context, gathered: FullParameters, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.args = gathered
        ctx.set_materialize_grads(False)
        outs = tuple(x.detach() for x in gathered.full)
        ctx.mark_non_differentiable(*[x for x, p in zip(outs, gathered.parameters, strict=True) if not p.requires_grad])
        return outs

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.args.end_backward()
        return None, *ctx.args.reduce(grads)


@cache
def check_steps() -> None:
    """Make all optimizer steps refuse parameters with gradients that were not reduced."""
    register_optimizer_step_pre_hook(_check_reduced)


def _check_reduced(optimizer: Optimizer, args: object, kwargs: object) -> None:
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if UNREDUCED in vars(parameter):
            _, unit = vars(parameter)[UNREDUCED]
            raise RuntimeError(
                f"{type(optimizer).__name__}.step: gradients of {unit} were not reduced over the ranks. Fix: "
                f"set_requires_gradient_sync(True) before the last backward, and let that one use {unit}."
            )


# ---- the forward and the backward that run on this thread -------------------------------------------------


class Forward:
    """A forward of a root, the outermost unit.

    Args:
        root: its unit.
        as_dtensors: the inputs are DTensors on a mesh with the data axis, so parameters are used as such.
    """

    def __init__(self, root: "Unit", as_dtensors: bool) -> None:
        self.root, self.as_dtensors = root, as_dtensors
        self.units: list[Unit] = []
        self.gathered: list[ref[FullParameters]] = []

    def add(self, gathered: FullParameters) -> None:
        """Add a unit that uses its parameters; start the units that followed it last time."""
        ahead, order = self.root.options.prefetch, self.root.order
        gathered.earlier = self.gathered[-gathered.unit.options.prefetch :] if gathered.unit.options.prefetch else ()
        self.gathered.append(ref(gathered))
        self.units.append(gathered.unit)
        count = len(self.units)
        if ahead and order[:count] == self.units:
            for following in order[count : count + ahead]:
                following.start_ahead(self.as_dtensors)

    def end(self) -> None:
        """Keep the order of the units, and leave this thread."""
        self.root.order = self.units
        _thread.forward = None
        if not torch.is_grad_enabled():
            buffers_of_rank().clear()


class _Thread(threading.local):
    forward: Forward | None = None
    backward: int = NO_BACKWARD
    filled: list[FullParameters] = []  # noqa: RUF012 - replaced, never changed


_thread = _Thread()


def _end_after_backward(gathered: FullParameters) -> None:
    """Free what is left at the end of the backward that runs: parameters that need no gradient."""
    if _thread.backward != gathered.backward:
        filled = _thread.filled = []
        _thread.backward = gathered.backward
        torch.autograd.Variable._execution_engine.queue_callback(lambda: _end(filled))
    _thread.filled.append(gathered)


def _end(filled: list[FullParameters]) -> None:
    _thread.backward = NO_BACKWARD
    for gathered in filled:
        gathered.end_backward()
    buffers_of_rank().clear()


# ---- units ------------------------------------------------------------------------------------------------


class _Made(Counter[Mesh]):
    """The number of units that a rank has made on each mesh."""


def next_number(mesh: Mesh) -> str:
    """The number of the next unit on this mesh. All ranks make equal units in one order, except copies."""
    counts = collectives.owner().state(_Made)
    counts[mesh] += 1
    return str(counts[mesh])


class Unit:
    """A unit of `fully_shard`: its forward and backward run with all-gathered parameters.

    Args:
        number: equal on all ranks of its mesh, and different for every unit.
    """

    def __init__(self, module: nn.Module, options: Options, number: str) -> None:
        self.module, self.options, self.number = module, options, number
        self.name = type(module).__name__  # a root finds the paths of those inside it
        self.reshard_after_forward = options.reshard_after_forward
        self.requires_gradient_sync = True
        self.data_ranks = frozenset(options.mesh.ranks)  # the ranks of all units of the model in whose forward it ran
        self.order: list[Unit] = []  # units of the last forward with this one as root
        self.is_running = False  # its forward
        self.shown: FullParameters | None = None  # parameters of a running forward or backward
        self.ahead: FullParameters | None = None  # started for the next forward
        self.slots = Slots(module)
        self._as_dtensors = False
        self._checked: object = None
        self._copies: Counter[str] = Counter()  # copies by where they were made

    def __deepcopy__(self, memo: dict[int, object]) -> "Unit":
        module = cast(nn.Module, memo[id(self.module)])
        where = " < ".join(site.frame.short for site in call_sites(CALLERS))
        self._copies[where] += 1  # counted for each place: a rank may make a copy that others do not
        copy = memo[id(self)] = Unit(module, self.options, f"{self.number}, copy {self._copies[where]} made at {where}")
        copy.reshard_after_forward = self.reshard_after_forward
        copy.requires_gradient_sync = self.requires_gradient_sync
        for p in self.module.parameters():
            if UNREDUCED in vars(p):
                gradient, name = vars(p)[UNREDUCED]
                vars(memo[id(p)])[UNREDUCED] = gradient.clone(), name
        return copy

    @property
    def label(self) -> str:
        """Name and number of the unit, for communication traces and comparisons between ranks."""
        return f"{self.name} (unit {self.number})"

    # ---- forward ----------------------------------------------------------------------------------------------

    def call(self, forward: Callable[..., object], args: Args, kwargs: Kwargs) -> object:
        """Run the forward of the module, with its hooks."""
        if self.is_running:  # the module calls itself
            return forward(*args, **kwargs)
        in_backward, policy = backward_task() != NO_BACKWARD, self.options.mp_policy
        known = self.shown if in_backward else None
        self.hide()
        around = None if in_backward else _thread.forward
        run = around or (None if in_backward else self._begin(args, kwargs))
        if run is not None:
            self._as_dtensors = run.as_dtensors
        full, self.is_running = None, True
        try:
            full = self._full_parameters(self._as_dtensors if known is None else known.as_dtensors, known)
            if full is not None:
                full.fill()
                if run is not None:
                    run.add(full)
                full.show(State.FORWARD)
            args, kwargs = _cast((args, kwargs), policy.param_dtype if policy.cast_forward_inputs else None)
            output = forward(*args, **kwargs)
            if full is not None:
                full.check_kept()
        finally:
            self.is_running = False
            self.hide()
            if run is not None and run is not around:
                run.end()
            if in_backward and full is not None and full.state is State.GATHERED:
                full.keep_in_backward()  # a checkpoint that has what it needs ends a forward by an exception
        if full is not None:
            self._leave(full, (args, kwargs), output, is_root=run is not around)
        return _cast(output, policy.output_dtype)

    def _begin(self, args: Args, kwargs: Kwargs) -> Forward:
        """Begin a forward with this unit as root."""
        inputs = [x for x in pytree.tree_leaves((args, kwargs)) if type(x) is DTensor]
        as_dtensors = any(axes_along(x._layout.mesh, self.options.mesh) is not None for x in inputs)
        self._prepare_below(as_dtensors)
        _thread.forward = Forward(self, as_dtensors)
        return _thread.forward

    def _prepare_below(self, as_dtensors: bool) -> None:
        """Name the units of this root, and check that all of them reduce gradients in one way."""
        now = as_dtensors, [(id(x), len(x._parameters), vars(x).get(UNIT)) for x in self.module.modules()]
        if self._checked == now:
            return
        units: list[Unit] = []
        for path, module in self.module.named_modules():
            check_all_stored(path, module)
            unit = unit_of(module)
            if unit is not None:
                unit.name = path or unit.name
                units.append(unit)
        data_ranks = frozenset(rank for unit in units for rank in unit.data_ranks)
        reduced: dict[tuple[frozenset[int], int], str] = {}
        for unit in units:
            unit.data_ranks, unit.slots.owned = data_ranks, None
            for slot in unit.find_slots():
                known = slot.stored.reduction(data_ranks, as_dtensors)
                reduced.setdefault(known, f"{slot.parameter._name} of {unit.name}")
        if len(reduced) > 1:
            one, other = [
                f"those of {name} are added over ranks {as_text(sorted(ranks))} and divided by {terms}"
                for (ranks, terms), name in list(reduced.items())[:2]
            ]
            raise PlanError(
                f"Gradients of one loss are reduced in two ways: {one}, but {other}. Fix: call fully_shard on a mesh "
                f"of all data axes, parallelise on the other axes only, such as mesh['tp'], but experts by "
                f"ExpertParallel, and pass batches that are plain or on these axes; or lay out all parameters on all "
                f"axes with shard_module before fully_shard."
            )
        self._checked = now

    def find_slots(self) -> Sequence[Slot]:
        """The stored parameters, also while modules have all-gathered ones."""
        return self.slots.find() if self.shown is None else self.shown.slots

    def _full_parameters(self, as_dtensors: bool, in_backward: FullParameters | None = None) -> FullParameters | None:
        """The parameters of the forward that begins: in a backward its own, else started or new ones."""
        if not (slots := self.find_slots()):
            return None
        key, options = (as_dtensors, self.data_ranks), self.options
        known_messages = self.slots.messages
        if key not in known_messages:
            fewer = None if isinstance(options.reshard_after_forward, bool) else options.reshard_after_forward
            known_messages[key] = messages_of(slots, options.mp_policy, fewer, self.data_ranks, as_dtensors)
        messages = known_messages[key]
        ahead, self.ahead = self.ahead, None
        for known in (in_backward, None if is_capturing() else ahead):  # a replay would use those from before the trace
            if known is not None and known.is_of(slots, messages):
                return known
        return FullParameters(self, slots, messages, as_dtensors)

    def start_ahead(self, as_dtensors: bool) -> None:
        """Start the all-gathers before the forward."""
        if not is_capturing():
            self.ahead = self._full_parameters(as_dtensors)
            if self.ahead is not None:
                self.ahead.start()

    def unshard(self, async_op: bool) -> None:
        """`start_ahead` with parameters as the last forward used them; waits, unless `async_op`."""
        self.start_ahead(self._as_dtensors)
        if self.ahead is not None and not async_op:
            self.ahead.fill()

    def _leave(self, full: FullParameters, inputs: object, output: object, is_root: bool) -> None:
        """Free the parameters after forward, and fill them before the backward of its outputs."""
        tensors = list(_tensors(output))
        full.is_pinned |= _share_memory(tensors, full.full)
        if torch.is_grad_enabled() and full.state is State.GATHERED and not is_capturing():  # backward needs it at once
            reshard = not is_root if self.reshard_after_forward is None else self.reshard_after_forward
            if reshard:
                full.free(among_fewer=not isinstance(reshard, bool))
        with DisableTorchFunctionSubclass():
            for x in tensors:
                if x.requires_grad and not x.is_leaf:
                    x.register_hook(full.begin_backward)  # before hooks of its node
            for node in _nodes(tensors):
                node.register_prehook(full.begin_backward)  # also of changed views
            if not any(p.requires_grad for p in full.parameters):
                # The gradient of the only input ends the backward; of several inputs, any may be last.
                needing = {id(x): x for x in _tensors(inputs) if x.requires_grad}
                if len(needing) == 1:
                    needing.popitem()[1].register_hook(full.end_backward)

    def hide(self) -> None:
        """Set the stored parameters on modules."""
        if self.shown is not None:
            self.shown.hide()

    def settle(self) -> None:
        """Set the stored parameters on modules also after a backward that failed."""
        if not self.is_running and backward_task() == NO_BACKWARD:
            self.hide()


def unit_of(module: nn.Module) -> Unit | None:
    found: Unit | None = vars(module).get(UNIT)
    return found


def _mark_parameter(shown: Tensor, parameter: DTensor) -> None:
    """Make `shown` pass for an `nn.Parameter` with the attributes that a user set on it."""
    shown._is_param = True
    for key, x in parameter.__dict__.items():
        if key[0] != "_":
            setattr(shown, key, x)
    if type(shown) is DTensor:
        shown._name = parameter._name


# ---- tensors ----------------------------------------------------------------------------------------------


def _cast(tree: T, dtype: torch.dtype | None) -> T:
    """The tree with its floating-point tensors in this dtype; None: as they are."""
    if dtype is None:
        return tree
    return cast(
        T,
        pytree.tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, tree),
    )


def _gradient_dtype(parameter: DTensor) -> torch.dtype | None:
    return parameter.grad_dtype if parameter.is_leaf else parameter.dtype


def _kept_dtype(parameter: DTensor, reduce_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients are added before they are reduced, not below the one that the user chose."""
    chosen = _gradient_dtype(parameter)
    return reduce_dtype if chosen in (None, parameter.dtype) else torch.promote_types(reduce_dtype, chosen)


def _on(x: Tensor, device: str) -> Tensor:
    return x.detach() if x.device.type == device else x.detach().to(device, non_blocking=True)


def _set_versions(tensors: Sequence[Tensor], version: int) -> None:
    _unsafe_set_version_counter(tuple(tensors), (version,) * len(tensors))


def _versions(parameters: Sequence[DTensor]) -> list[tuple[int, int]]:
    """Version counters of parameters, each different after its parameter changed."""
    with DisableTorchFunctionSubclass(), tracing_paused():
        return [(p._version, torch._C.TensorBase.data_ptr(p)) for p in parameters]


def _allocated(x: Tensor) -> Tensor:
    """The freed memory of `x`, allocated again, as a tensor whose changes `x` does not count."""
    storage = x.untyped_storage()
    storage.resize_(x.numel() * x.element_size())
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(storage, 0, x.shape, x.stride())


def _tensors(output: object) -> Iterator[Tensor]:
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors([getattr(leaf, field.name) for field in fields(leaf)])


def _nodes(tensors: Iterable[Tensor]) -> set[Node]:
    """The nodes where backward of these tensors begins, also after an in-place change of a view."""
    views = [x for t in tensors for x in (t, t._base) if x is not None]
    return {x.grad_fn for x in views if x.grad_fn is not None}


def _share_memory(tensors: Iterable[Tensor], full: Iterable[Tensor]) -> bool:
    held = {x.untyped_storage()._cdata for x in full}
    with DisableTorchFunctionSubclass():
        return any(t.untyped_storage()._cdata in held for t in tensors if not t.is_sparse)
