"""Units, whose parameters are all-gathered together before forward and before backward, and the forwards that run."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.autograd.graph import Node
from torch.utils import _pytree as pytree

from shardwise import _collectives as collectives
from shardwise._layout import Mesh
from shardwise._layout import shown as as_text
from shardwise._redistribute.batched import batched, buffers_of_rank
from shardwise._rules.row import Args, Kwargs
from shardwise._tensor.dtensor import DTensor
from shardwise._torch_bridge.module_sharding import assign
from shardwise._trace.capture_hooks import is_capturing, tracing_paused
from shardwise._trace.user_stack import call_sites
from shardwise.errors import PlanError
from shardwise.parallel.fully_sharded.gathered import NO_BACKWARD, UNREDUCED, Gathered, Message
from shardwise.parallel.fully_sharded.parameters import (
    MixedPrecisionPolicy,
    Stored,
    axes_along,
    check_all_stored,
    shown_as,
    stored_of,
)

UNIT = "_fully_sharded_unit"  # of a module
CALLERS = 4  # of deepcopy: a copy is known by where it was made


class _Made(Counter[Mesh]):
    """How many units a rank has made on each mesh."""


def next_number(mesh: Mesh) -> str:
    """The number of the next unit on this mesh. All ranks of it make the same units, but copies, in the same order."""
    counts = collectives.owner().state(_Made)
    counts[mesh] += 1
    return str(counts[mesh])


@dataclass(eq=False)
class Slot:
    """A parameter of a unit, and the modules that own it."""

    parameter: DTensor
    stored: Stored
    owners: list[tuple[nn.Module, str]]
    dtype: torch.dtype

    @property
    def is_current(self) -> bool:
        """Whether the modules have this parameter, in this dtype."""
        p = self.parameter
        return p.dtype == self.dtype and all(o._parameters.get(name) is cast(object, p) for o, name in self.owners)

    def is_same(self, other: "Slot") -> bool:
        return (self.parameter is other.parameter, self.owners, self.dtype) == (True, other.owners, other.dtype)


@dataclass(frozen=True)
class Options:
    """See `fully_shard`."""

    mesh: Mesh
    reshard_after_forward: bool | int | None  # an int is a factor of the number of ranks, neither of them nor 1
    mp_policy: MixedPrecisionPolicy
    prefetch: int


# ---- the forward and the backward that run on this thread -------------------------------------------------


class Forward:
    """A forward of a root: the outermost unit.

    Args:
        root: its unit.
        as_dtensors: the inputs are DTensors on a mesh with the data axis, so parameters are used as such.
        prefetch: how many units are all-gathered ahead.
    """

    def __init__(self, root: "Unit", as_dtensors: bool, prefetch: int) -> None:
        self.root, self.as_dtensors, self.prefetch = root, as_dtensors, prefetch
        self.expected = root.order
        self.units: list[Unit] = []
        self.gathered: list[ref[Gathered]] = []

    def add(self, unit: "Unit", gathered: Gathered) -> None:
        """`unit` uses its parameters now; those of the units that followed it last time are started."""
        gathered.before = self.gathered
        gathered.number = len(self.gathered)
        self.gathered.append(ref(gathered))
        self.units.append(unit)
        count = len(self.units)
        if self.prefetch and self.expected[:count] == self.units:
            for following in self.expected[count : count + self.prefetch]:
                following.start_ahead(self.as_dtensors)

    def begin(self) -> "Forward":
        """Make this the forward that runs on this thread."""
        _thread.forward = self
        return self

    def end(self) -> None:
        """Keep the order of its units, and leave this thread."""
        self.root.order = self.units
        _thread.forward = None
        if not torch.is_grad_enabled():
            buffers_of_rank().clear()


class _Thread(threading.local):
    forward: Forward | None = None
    backward: int = NO_BACKWARD
    filled: list[Gathered] = []  # noqa: RUF012 - replaced, never changed


_thread = _Thread()


def _end_after_backward(gathered: Gathered) -> None:
    """At the end of the backward that runs, free what is left then: parameters that need no gradient."""
    task = torch._C._current_graph_task_id()
    if _thread.backward != task:
        filled = _thread.filled = []
        _thread.backward = task
        torch.autograd.Variable._execution_engine.queue_callback(lambda: _end(filled))
    _thread.filled.append(gathered)


def _end(filled: list[Gathered]) -> None:
    _thread.backward = NO_BACKWARD
    for gathered in filled:
        gathered.unit.end_backward(gathered)
    buffers_of_rank().clear()


# ---- units ------------------------------------------------------------------------------------------------


class Unit:
    """What `fully_shard` adds to a module: its forward and backward run with all-gathered parameters.

    Args:
        number: the same on all ranks of its mesh, and another than that of every other unit.
    """

    made = 0  # units of this process, of all modules

    def __init__(self, module: nn.Module, options: Options, number: str) -> None:
        self.module, self.options, self.number = module, options, number
        self.name = self._class_name = type(module).__name__
        self.reshard_after_forward = options.reshard_after_forward
        self.requires_gradient_sync = True
        self.unreduced: dict[int, Tensor] = {}
        self.order: list[Unit] = []  # of the last forward with this unit as root
        self._slots: list[Slot] = []
        self._messages: dict[bool, list[Message]] = {}
        self._units_then = 0
        self._data_ranks = frozenset(options.mesh.ranks)  # those of all units of the model it was called in
        self._as_dtensors = False
        self._checked: object = None
        self._ahead: Gathered | None = None  # started for the next forward
        self._running: Gathered | None = None  # of the forward that runs
        self._in_backward: Gathered | None = None
        self._shown: list[Tensor] = []  # what modules have in the place of stored parameters
        self._hidden: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter | None]] = []  # what they had there
        self._copies: Counter[str] = Counter()  # by where they were made
        Unit.made += 1

    def __deepcopy__(self, memo: dict[int, object]) -> "Unit":
        module = cast(nn.Module, memo[id(self.module)])
        where = " < ".join(site.frame.short for site in call_sites(CALLERS))
        self._copies[where] += 1  # counted for each place: a rank may make a copy that others do not
        copy = memo[id(self)] = Unit(module, self.options, f"{self.number}, copy {self._copies[where]} made at {where}")
        copy.reshard_after_forward = self.reshard_after_forward
        copy.requires_gradient_sync = self.requires_gradient_sync
        for key, x in self.unreduced.items():
            copy.unreduced[id(memo[key])] = x.clone()
            vars(memo[key])[UNREDUCED] = copy
        return copy

    # ---- forward ----------------------------------------------------------------------------------------------

    @property
    def is_gathered(self) -> bool:
        """Whether the modules have what a forward needs. In backward, `call` knows."""
        return self._running is not None or not (self._shown or self.slots())

    def call(self, forward: Callable[..., object], args: Args, kwargs: Kwargs) -> object:
        """Run the forward of the module, with its hooks."""
        if self._running is not None:  # the module calls itself
            return forward(*args, **kwargs)
        self._hide()
        run = self._enter(args, kwargs)
        is_root = _thread.forward is run and run.root is self
        gathered = None
        try:
            if self.slots():
                gathered = self._running = self._gathered(run.as_dtensors)
                gathered.fill()
                if _thread.forward is run:
                    run.add(self, gathered)
                self._show(gathered)
            args, kwargs = self._cast(args, kwargs)
            output = forward(*args, **kwargs)
            if gathered is not None:
                gathered.check_not_changed()
                self._check_still_shown()
        finally:
            self._running = None
            self._hide()
            if is_root:
                run.end()
            if gathered is not None and torch._C._current_graph_task_id() != NO_BACKWARD:
                self._keep_in_backward(gathered)  # a checkpoint that has what it needs ends a forward by an exception
        if gathered is not None:
            self._leave(gathered, (args, kwargs), output, is_root)
        return self._cast_output(output)

    def _enter(self, args: Args, kwargs: Kwargs) -> Forward:
        if torch._C._current_graph_task_id() != NO_BACKWARD:  # recomputed: as it was in forward
            before = self._in_backward
            return Forward(self, self._as_dtensors if before is None else before.as_dtensors, 0)
        if _thread.forward is None:
            as_dtensors = _has_axis(args, kwargs, self.options.mesh)
            self._prepare_below(as_dtensors)
            Forward(self, as_dtensors, self.options.prefetch).begin()
        assert _thread.forward is not None
        self._as_dtensors = _thread.forward.as_dtensors
        return _thread.forward

    def _prepare_below(self, as_dtensors: bool) -> None:
        """Name the units of this root, and check that it reduces all gradients, in one way."""
        now = as_dtensors, Unit.made, [(id(module), len(module._parameters)) for module in self.module.modules()]
        if self._checked == now:
            return
        units: list[Unit] = []
        for path, module in self.module.named_modules():
            check_all_stored(path, module)
            unit = unit_of(module)
            if unit is not None:
                unit.name = path or unit._class_name
                unit._units_then = 0
                units.append(unit)
        data_ranks = frozenset(rank for unit in units for rank in unit._data_ranks)
        reduced: dict[tuple[frozenset[int], int], str] = {}
        for unit in units:
            if unit._data_ranks != data_ranks:
                unit._data_ranks, unit._messages = data_ranks, {}
            for slot in unit.slots():
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

    def _gathered(self, as_dtensors: bool) -> Gathered:
        """The all-gathered parameters for the forward that begins: those that backward has, if it is recomputed."""
        ahead, self._ahead = self._ahead, None
        if is_capturing():  # a replay would use what was all-gathered before the trace
            ahead = None
        for known in (self._in_backward, ahead):
            if known is not None and known.is_current and known.messages is self.messages(as_dtensors):
                return known
        return Gathered(self, [slot.parameter for slot in self.slots()], self.messages(as_dtensors), as_dtensors)

    def start_ahead(self, as_dtensors: bool) -> None:
        """Start the all-gathers before the forward."""
        if self.slots() and not is_capturing():
            self._ahead = self._gathered(as_dtensors)
            self._ahead.start()

    def unshard(self, async_op: bool) -> None:
        """`start_ahead` as the last forward used parameters; waits, unless `async_op`."""
        self.start_ahead(self._as_dtensors)
        if self._ahead is not None and not async_op:
            self._ahead.fill()

    def reshard(self) -> None:
        """Drop what was started."""
        self._ahead = None

    def _leave(self, gathered: Gathered, inputs: object, output: object, is_root: bool) -> None:
        tensors = list(_tensors(output))
        if _share_memory(tensors, gathered.full):
            gathered.is_pinned = True
        recomputed = torch._C._current_graph_task_id() != NO_BACKWARD  # backward needs it at once
        if torch.is_grad_enabled() and not recomputed and not is_capturing():
            reshard = not is_root if self.reshard_after_forward is None else self.reshard_after_forward
            if reshard:
                gathered.free(among_fewer=not isinstance(reshard, bool))
        with DisableTorchFunctionSubclass():
            for x in tensors:
                if x.requires_grad and not x.is_leaf:
                    x.register_hook(partial(self._before_backward, gathered))  # before hooks of its node
            for node in _nodes(tensors):
                node.register_prehook(partial(self._before_backward, gathered))  # also of changed views
        if not any(p.requires_grad for p in gathered.parameters):
            self._end_with_gradient_of(inputs, gathered)

    def _end_with_gradient_of(self, inputs: object, gathered: Gathered) -> None:
        """Without gradients of parameters, that of the only input ends the backward; of several, any may be last."""
        needing = {id(x): x for x in _tensors(inputs) if x.requires_grad}
        if len(needing) == 1:
            (x,) = needing.values()
            with DisableTorchFunctionSubclass():
                x.register_hook(lambda grad: self.end_backward(gathered))

    # ---- what modules have ------------------------------------------------------------------------------------

    def _show(self, gathered: Gathered) -> None:
        """Let modules have all-gathered parameters."""
        for slot, out in zip(self._slots, gathered.outputs(), strict=True):
            shown = shown_as(out, slot.stored, gathered.as_dtensors)
            _mark_parameter(shown, slot.parameter)
            self._shown.append(shown)
            self._hidden += [(owner._parameters, name, owner._parameters[name]) for owner, name in slot.owners]
            assign(slot.owners, shown)

    def _hide(self) -> None:
        """Let modules have what they had before: in backward not always what forward used (`functional_call`)."""
        for parameters, name, before in self._hidden:
            parameters[name] = before
        self._shown, self._hidden = [], []

    def settle(self) -> None:
        """Let modules have their stored parameters also after a backward that failed."""
        if self._running is None and torch._C._current_graph_task_id() == NO_BACKWARD:
            self._hide()

    def _check_still_shown(self) -> None:
        """Raise if a forward put something else in the place of a parameter: it would be lost."""
        assert self._running is not None
        for slot, shown, full in zip(self._slots, self._shown, self._running.full, strict=True):
            with DisableTorchFunctionSubclass(), tracing_paused():
                same_dtype = shown.dtype == full.dtype  # else it was converted, for this forward
                moved = same_dtype and torch._C.TensorBase.data_ptr(shown) != full.data_ptr()
            if moved or any(owner._parameters[name] is not cast(object, shown) for owner, name in slot.owners):
                raise RuntimeError(
                    f"{slot.parameter._name} of {self.name} was replaced in forward, where it is an all-gathered copy "
                    f"of its shards: the change would be lost. Fix: copy values into the parameter before or after "
                    f"the forward."
                )

    # ---- backward ---------------------------------------------------------------------------------------------

    def _before_backward(self, gathered: Gathered, grads: object) -> None:
        gathered.fill()
        self._keep_in_backward(gathered)
        if self.options.prefetch:
            gathered.start_earlier(self.options.prefetch)

    def _keep_in_backward(self, gathered: Gathered) -> None:
        """Until its gradients are computed, also for what is recomputed meanwhile."""
        self._in_backward = gathered
        gathered.backward = torch._C._current_graph_task_id()
        _end_after_backward(gathered)
        if not self._shown:
            with torch.enable_grad():
                self._show(gathered)

    def end_backward(self, gathered: Gathered) -> None:
        """Free what backward all-gathered, unless a backward inside it ends: a checkpoint that recomputes."""
        if gathered.backward not in (torch._C._current_graph_task_id(), NO_BACKWARD) or self._running is gathered:
            return
        self._hide()
        if self._in_backward is gathered:
            self._in_backward = None
        if not torch.is_grad_enabled():  # a double backward reads them again
            gathered.free()

    # ---- parameters -------------------------------------------------------------------------------------------

    def slots(self) -> list[Slot]:
        """The parameters that no unit inside this one has."""
        if self._units_then == Unit.made and all(slot.is_current for slot in self._slots):
            return self._slots
        found = list(_slots(self.module))
        if len(found) != len(self._slots) or not all(map(Slot.is_same, found, self._slots)):
            self._slots, self._messages, self._ahead = found, {}, None
        self._units_then = Unit.made
        return self._slots

    def messages(self, as_dtensors: bool) -> list[Message]:
        """What is all-gathered, in one collective for each dtype and mesh axis."""
        if as_dtensors not in self._messages:
            self._messages[as_dtensors] = _messages(self.slots(), self.options, self._data_ranks, as_dtensors)
        return self._messages[as_dtensors]

    # ---- mixed precision --------------------------------------------------------------------------------------

    def _cast(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        policy = self.options.mp_policy
        if policy.param_dtype is None or not policy.cast_forward_inputs:
            return args, kwargs
        return cast("tuple[Args, Kwargs]", pytree.tree_map(partial(_cast, policy.param_dtype), (args, kwargs)))

    def _cast_output(self, output: object) -> object:
        dtype = self.options.mp_policy.output_dtype
        return output if dtype is None else pytree.tree_map(partial(_cast, dtype), output)


def unit_of(module: nn.Module) -> Unit | None:
    found: Unit | None = vars(module).get(UNIT)
    return found


def _has_axis(args: Args, kwargs: Kwargs, mesh: Mesh) -> bool:
    """Whether an input is a DTensor on a mesh with the axes of `mesh`."""
    inputs = [x for x in pytree.tree_leaves((args, kwargs)) if type(x) is DTensor]
    return any(axes_along(x._layout.mesh, mesh) is not None for x in inputs)


def _owned(module: nn.Module) -> Iterator[tuple[nn.Module, str, Stored]]:
    """The fully sharded parameters of a unit, each with a module that owns it."""
    for name, stored in stored_of(module).items():
        yield module, name, stored
    for child in module.children():
        if unit_of(child) is None:
            yield from _owned(child)


def _slots(module: nn.Module) -> Iterable[Slot]:
    found: dict[int, Slot] = {}
    for owner, name, stored in _owned(module):
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
        slot = found.setdefault(id(p), Slot(p, stored, [], p.dtype))
        if (owner, name) not in slot.owners:
            slot.owners.append((owner, name))
    return found.values()


def _messages(slots: Sequence[Slot], options: Options, data_ranks: frozenset[int], as_dtensors: bool) -> list[Message]:
    policy, fewer = options.mp_policy, options.reshard_after_forward
    groups: dict[object, list[int]] = {}
    for i, slot in enumerate(slots):
        groups.setdefault((slot.stored.at_rest.mesh, slot.stored.axis, slot.parameter.dtype), []).append(i)
    messages = []
    for members in groups.values():
        first = slots[members[0]]
        moves = batched([slots[i].stored.sharded for i in members], first.stored.axis, collectives.rank())
        stored = first.parameter.dtype
        dtype = policy.param_dtype if policy.param_dtype is not None and stored.is_floating_point else stored
        terms = tuple(slots[i].stored.reduction(data_ranks, as_dtensors)[1] for i in members)
        device = first.stored.gathered.mesh.device_type
        names = tuple(slots[i].parameter._name or f"number {i}" for i in members)
        resharded = None if fewer is None or isinstance(fewer, bool) else moves.among(fewer, collectives.rank())
        messages.append(
            Message(tuple(members), names, moves, device, dtype, policy.reduce_dtype or dtype, terms, resharded)
        )
    return messages


def _mark_parameter(shown: Tensor, parameter: DTensor) -> None:
    """Let modules that look for an `nn.Parameter`, or for what a user set on it, find one."""
    shown._is_param = True
    for key, x in parameter.__dict__.items():
        if key[0] != "_":
            setattr(shown, key, x)
    if type(shown) is DTensor:
        shown._name = parameter._name


def _tensors(output: object) -> Iterator[Tensor]:
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors([getattr(leaf, field.name) for field in fields(leaf)])


def _nodes(tensors: Iterable[Tensor]) -> set[Node]:
    """Where the backward of these tensors begins, also after one that is a view was changed in place."""
    views = [x for t in tensors for x in (t, t._base) if x is not None]
    return {x.grad_fn for x in views if x.grad_fn is not None}


def _share_memory(tensors: Iterable[Tensor], full: Iterable[Tensor]) -> bool:
    held = {x.untyped_storage()._cdata for x in full}
    with DisableTorchFunctionSubclass():
        return any(t.untyped_storage()._cdata in held for t in tensors if not t.is_sparse)


def _cast(dtype: torch.dtype, x: object) -> object:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
