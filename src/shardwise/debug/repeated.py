"""Products, convolutions and attention that each rank of a mesh axis runs in full, and from which tensors."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from shardwise.debug.alternatives import REFUSED, OperandCall
from shardwise.debug.calls import parameters_text
from shardwise.layout import Layout, Mesh, Partial, Placement, Replicate, Shard
from shardwise.rules.row import Args, Kwargs
from shardwise.tensor.dispatch import resolve
from shardwise.tensor.dispatch.modes import DispatchMode, without_modes
from shardwise.trace.user_stack import StackFrame

# Of the work of a rank. Heads, routers and low-rank projections, which are often replicated on purpose, are below.
SAID = 0.25  # of all ops of an axis
ENTRY = 0.05  # of those that are listed
ENTRIES = 3
REPEATED = "Repeated: ops that each rank of a mesh axis runs in full"

_Axis = tuple[Mesh, int]


class NotedTensor(NamedTuple):
    """An operand or result of an op.

    Args:
        number: another one for each tensor.
        what: the name of a parameter of a sharded module, or such as `operand 0`.
        is_parameter: it has such a name, or is a leaf with a gradient.
        maker: the op whose result it is, with its line.
        given, layout: its own, and the one in which the op ran; of plain tensors replicated.
    """

    number: int
    what: str
    is_parameter: bool
    maker: str
    given: Layout
    layout: Layout


class _Origin(NamedTuple):
    """The tensor from which others follow: an input, or one that was gathered.

    Args:
        tensor: as its first op had it.
        user: that op, with its line.
    """

    tensor: NotedTensor
    user: str


@dataclass
class _Group:
    """Ops that follow from one tensor, and that each rank of an axis runs in full.

    Attributes:
        what, operand: the first of them, with its line, and the operand that follows from the tensor.
        work: FLOPs of one rank.
    """

    axis: _Axis
    origin: _Origin
    what: str
    operand: NotedTensor
    parameters: dict[str, None] = field(default_factory=dict)
    ops: int = 0
    work: float = 0.0

    @property
    def key(self) -> object:
        """The same for a tensor of another step."""
        return self.what, self.origin.user, self.origin.tensor.maker, self.origin.tensor.given


class Repeated:
    """Adds up the FLOPs of a rank in forward, and those of ops that each rank of a mesh axis runs in full.

    The FLOPs of an op are those that torch counts, divided by the ranks of each axis on which an operand or the result
    is sharded.
    """

    def __init__(self) -> None:
        self._flops: dict[object, int] = {}  # by call
        self._origins: dict[tuple[int, _Axis], _Origin | None] = {}  # by number of the tensor
        self._groups: dict[tuple[_Axis, int], _Group] = {}  # by number of the origin
        self._sharded: set[_Axis] = set()  # on which a parameter that is no expert's is sharded, of an op with FLOPs
        self._work = 0.0

    def note(
        self,
        op: str,
        site: StackFrame | None,
        call: OperandCall | None,
        operands: Sequence[NotedTensor],
        results: Sequence[NotedTensor],
    ) -> None:
        """An op has run.

        Args:
            call: None for an op that is decomposed into others, which are noted.
        """
        mesh, tensors, user = results[0].layout.mesh, (*operands, *results), f"{op} ({site})" if site else op
        of_experts = _of_experts(op, [x.given.shape for x in operands])
        flops = of_experts or (0 if call is None else self._flops_of(call))
        axes = [(mesh, a) for a in range(mesh.ndim)]
        divided = [axis for axis in axes if any(_is_sharded(x.layout, axis) for x in tensors)]
        work = flops / prod(mesh.shape[a] for _, a in divided)
        self._work += work
        for axis in axes:
            if flops and not of_experts and any(x.is_parameter and _is_sharded(x.layout, axis) for x in operands):
                self._sharded.add(axis)
            origins = [(x, self._origin(x, axis, user)) for x in operands]
            operand, origin = next(((x, origin) for x, origin in origins if origin is not None), (None, None))
            for x in results:
                self._origins.setdefault((x.number, axis), origin)
            if work and operand and origin and all(_is_full(x.layout, axis) for x in tensors):
                what = f"{site}: {op}, {operand.what}" if site else f"{op}, {operand.what}"
                group = self._groups.setdefault((axis, origin.tensor.number), _Group(axis, origin, what, operand))
                group.ops += 1
                group.work += work
                group.parameters |= {x.what: None for x in operands if x.is_parameter}

    def _origin(self, x: NotedTensor, axis: _Axis, user: str) -> _Origin | None:
        """What an operand follows from, None for a parameter, and for what is made of parameters alone.

        If that is sharded on the axis and the operand is not, it was gathered, and follows from nothing else.
        """
        if x.is_parameter or x.layout.mesh != axis[0]:
            return None
        found = self._origins.get((x.number, axis), _Origin(x, user))
        if found is not None and _is_sharded(found.tensor.given, axis) and _is_full(x.layout, axis):
            found = _Origin(x, user)
        self._origins[x.number, axis] = found
        return found

    def _flops_of(self, call: OperandCall) -> int:
        """Of the op on global tensors."""
        key = call.key, tuple(x.layout.shape for x in call.operands)
        if key not in self._flops:
            self._flops[key] = _flops(call)
        return self._flops[key]

    def forget(self) -> None:
        """Forget the tensors, once no more ops are noted."""
        self._origins, self._flops = {}, {}

    def rows(self) -> list[list[str]]:
        """What repeats most: op, layout, parameters, what to do, share of a rank's FLOPs, number of ops."""
        found = list(filter(self._is_said, self._merged()))
        by_axis = defaultdict[_Axis, float](float)
        for group in found:
            by_axis[group.axis] += group.work
        alike: dict[object, list[_Group]] = {}  # the same ops on several axes
        for group in sorted(found, key=lambda group: -group.work):
            if by_axis[group.axis] >= SAID * self._work and group.work >= ENTRY * self._work:
                alike.setdefault((group.key, group.ops, group.axis in self._sharded), []).append(group)
        return [self._row(groups) for groups in list(alike.values())[:ENTRIES]]

    def _merged(self) -> list[_Group]:
        """Those of several steps as one."""
        merged: dict[object, _Group] = {}
        for group in self._groups.values():
            known = merged.get((group.axis, group.key))
            if known is None:
                merged[group.axis, group.key] = replace(group)
            else:
                known.parameters = known.parameters | group.parameters
                known.ops, known.work = known.ops + group.ops, known.work + group.work
        return list(merged.values())

    def _is_said(self, group: _Group) -> bool:
        """Whether it could be divided: there are parameters to shard, or as many rows as ranks."""
        (mesh, a), layout = group.axis, group.origin.tensor.given
        enough = group.axis in self._sharded or _fits(layout, [a])
        return bool(enough and group.parameters and mesh.shape[a] > 1)

    def _row(self, groups: Sequence[_Group]) -> list[str]:
        group, axes = groups[0], [group.axis[1] for group in groups]
        mesh, layout = group.axis[0], group.origin.tensor.given
        on = " and ".join(f"axis {a}" if mesh.names is None else mesh.names[a] for a in axes)
        where = f"in full on each of the {prod(mesh.shape[a] for a in axes)} ranks of {on}"
        if group.axis in self._sharded:
            avoid = f"shard these parameters on {on}, as others are"
        elif _is_sharded(layout, group.axis):
            avoid, where = "", "gathered for this op"
        else:
            chosen = axes if _fits(layout, axes) else axes[:1]
            placements = [Shard(0) if a in chosen else p for a, p in enumerate(layout.placements)]
            ranks = prod(mesh.shape[a] for a in chosen)
            avoid = f"{_chosen(group, placements)}: each rank then does 1/{ranks} of that"
        held = f"{layout.shape} on {mesh}: [{', '.join(map(str, layout.placements))}], {where}"
        return [
            group.what,
            held,
            parameters_text(group.parameters),
            avoid,
            f"{group.work / self._work:.0%}",
            str(group.ops),
        ]


def _fits(layout: Layout, axes: Sequence[int]) -> bool:
    """Whether dim 0 has a row for each rank, if it is sharded on these axes as well."""
    sharded = [a for a, p in enumerate(layout.placements) if a in axes or (isinstance(p, Shard) and p.dim == 0)]
    return bool(layout.shape) and layout.shape[0] >= prod(layout.mesh.shape[a] for a in sharded)


def _chosen(group: _Group, placements: Sequence[Placement]) -> str:
    """Where these placements of the tensor are chosen."""
    tensor, user = group.origin
    if tensor.maker:
        return f"have {tensor.maker} give {placements}"
    what = tensor.what if tensor.number == group.operand.number else f"{tensor.what} of {user}"
    return f"{placements} where {what} is made"


def _is_full(layout: Layout, axis: _Axis) -> bool:
    """Whether each rank of the axis holds all elements, or a partial sum of each."""
    return layout.mesh == axis[0] and isinstance(layout.placements[axis[1]], Replicate | Partial)


def _is_sharded(layout: Layout, axis: _Axis) -> bool:
    """Whether the ranks of the axis hold different elements."""
    return layout.mesh == axis[0] and not _is_full(layout, axis)


def _of_experts(op: str, shapes: Sequence[tuple[int, ...]]) -> int:
    """The FLOPs of ops whose work depends on data, so that they do not run on the meta device; of others 0."""
    if op == "mix_experts":
        chosen, w1, w2, *_ = shapes
        return 2 * prod(chosen) * (prod(w1[1:]) + prod(w2[1:]))
    return 2 * prod(shapes[0]) * shapes[1][-1] if op in ("_grouped_mm", "grouped_mm") else 0


class _Flops(DispatchMode):
    """Adds up what torch's formulas give for the ops inside."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(
        self, func: OpOverload, types: Iterable[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        self.flops += int(formula(*args, **(kwargs or {}), out_val=out)) if formula else 0
        return out


def _flops(call: OperandCall) -> int:
    counter = _Flops()
    with without_modes(), counter:
        try:
            resolve.results_on_meta(call.op, call.args, call.kwargs, call.operands)
        except REFUSED:
            return 0
    return counter.flops
