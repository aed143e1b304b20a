"""`plan_module`: a plan of `parallelize_module` and `fully_shard`, with its bound and its reasons."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, Unpack

from torch import nn

from shardwise import _collectives as collectives
from shardwise._layout import Mesh, Placement, checked
from shardwise._layout.parse import read_toml
from shardwise._pictures.labels import bytes_text, count_text, milliseconds_text, more_bytes_text
from shardwise._pictures.page import framed
from shardwise._pictures.report import Report, table_text
from shardwise._torch_bridge import module_sharding
from shardwise.errors import PlanError, ShardwiseError, TooLargeError, did_you_mean
from shardwise.parallel import ExpertParallel, fully_shard, parallelize_module
from shardwise.plan.comparisons import Figure, PlanChange, PlanCheck, check_of, other_costs, run_steps
from shardwise.plan.fit import fits_text
from shardwise.plan.module_experts import (
    EXPERT_AXES,
    ExpertCosts,
    check_experts,
    expert_keys,
    expert_layers,
    expert_sizes,
    expert_units,
)
from shardwise.plan.module_search import (
    Forward,
    Found,
    Inputs,
    Reason,
    Search,
    Tried,
    batch_rows,
    check_call,
    collecting_new_objects,
    reasons_of,
    step_of,
)
from shardwise.plan.module_styles import as_globs, globs, plan_of_choices
from shardwise.plan.module_text import Entry, code_of, entry_text, plan_of_toml, toml_of
from shardwise.plan.page import module_page
from shardwise.plan.table_request import check_head_room
from shardwise.simulation.api import simulate_rank, training
from shardwise.simulation.result import RankClass, sent_by_cause
from shardwise.simulation.topology import Topology

FORMAT = "shardwise module plan 1"


@dataclass(frozen=True, repr=False)
class ModulePlan(Report):
    """The placement of a module's parameters, and the sharding of its activations. `str()` is a text with tables.

    Attributes:
        mesh: of the axis "tp", or of "dp" and "tp"; or the given one. With experts on several ranks, of "edp" and "ep",
            which both are data axes.
        styles: the plan for `parallelize_module`, along the last axis.
        units: paths of the modules for `fully_shard` along the data axes; "" is the module itself. Units with an
            `ExpertParallel` style are sharded along the first axis only.
        reshard: whether the units free their parameters after forward, and all-gather them again for backward.
        seconds: of a modelled step, in which nothing overlaps.
        bound: seconds that no choices fall below, on any tried shape of the mesh; 0 without a search.
        step: the simulated step of rank 0 under the plan; its `peak_bytes` fit the memory.
        memory: bytes that the plan may take on a rank.
        reasons: for each parameter.
        tried: shapes of the mesh.
        origin: the arguments of the plan; None for a plan of a file, or of another process.
    """

    mesh: Mesh
    styles: Mapping[str, Entry]
    units: tuple[str, ...] = ()
    reshard: bool = True
    seconds: float = 0.0
    bound: float = 0.0
    step: RankClass | None = field(default=None, compare=False)
    memory: float = field(default=0.0, compare=False)
    reasons: tuple[Reason, ...] = field(default=(), compare=False)
    tried: tuple[Tried, ...] = field(default=(), compare=False)
    origin: "Origin | None" = field(default=None, compare=False)

    def __getstate__(self) -> dict[str, object]:
        """The state without the module, so that a plan can be sent to ranks."""
        return vars(self) | {"origin": None}

    @property
    def gap(self) -> float:
        """The largest speed-up that a better plan may give, as a share of the bound."""
        return self.seconds / self.bound - 1 if self.bound else 0.0

    def apply(self, module: nn.Module, *, src_data_rank: int | None = 0) -> nn.Module:
        """Parallelise the module in place, on all ranks of the mesh; make the optimizer afterwards.

        Raises:
            PlanError: the module's parts differ from those of the planned module.
            MismatchError: modules or plans differ between ranks; on all ranks.
        """
        if self.mesh.size() > (ranks := collectives.world_size()):
            raise PlanError(f"The plan is for {self.mesh}, but this world has {ranks} ranks. Fix: a plan for these.")
        named = module_sharding.named_parameters(module)
        facts = {"mesh": str(self.mesh), "units": self.units, "reshard": self.reshard, "src_data_rank": src_data_rank}
        module_sharding.agree_on_plan(self.styles.items(), named, self.mesh.ranks, **facts)
        last, first = self._axes()
        parts = dict(module.named_modules())
        if problems := module_sharding.resolve(self.units, list(parts), "module")[1]:
            raise PlanError(f"units: {problems[0]}")
        check_experts(self.styles, self.units, self.mesh, module)
        if self.styles:
            parallelize_module(module, last, dict(self.styles), src_data_rank=src_data_rank)
        experts, everyone = self._experts, Mesh((self.mesh.size(),), self.mesh.ranks, None, self.mesh.device_type)
        for path in self.units:
            mesh = everyone if experts and path not in experts else first
            fully_shard(parts[path], mesh=mesh, reshard_after_forward=self.reshard, src_data_rank=src_data_rank)
        return module

    @property
    def data_ranks(self) -> int:
        """The number of parts of the batch."""
        if expert_keys(self.styles, self.mesh):
            return self.mesh.size()
        return self.mesh.shape[0] if self.mesh.ndim > 1 else 1

    @property
    def _experts(self) -> list[str]:
        """The units of experts that are sharded along the last axis, which is then a data axis, too."""
        return expert_units(self.styles, self.units, self.mesh)

    def _axes(self) -> tuple[Mesh, Mesh | None]:
        """The meshes of the last axis and of the first one through this rank."""
        if self.mesh.ndim == 1:
            return self.mesh, None
        return self.mesh.submesh((1,), collectives.rank()), self.mesh.submesh((0,), collectives.rank())

    def as_code(self) -> str:
        """Python code that applies the plan to `model`."""
        return code_of(self.mesh, self.styles, self.units, self.reshard, self._experts)

    def as_toml(self) -> str:
        """The plan as the text of a file, which `save` writes and `load` reads."""
        return toml_of(FORMAT, self.mesh, self.styles, self.units, self.reshard)

    @checked
    def save(self, path: str | Path) -> None:
        """Write the plan to a TOML file: the mesh, the units, and a line for each entry."""
        Path(path).write_text(self.as_toml(), encoding="utf-8")

    @classmethod
    @checked
    def load(cls, path: str | Path) -> "ModulePlan":
        """The plan of a file, without its times and reasons; `apply` checks it against the module.

        Raises:
            PlanError: it cannot be read, or has no plan.
        """
        content = read_toml(Path(path))
        try:
            return cls(*plan_of_toml(FORMAT, content))
        except ShardwiseError as error:
            raise PlanError(f"{path}: {error}") from error

    # ---- reasons -----------------------------------------------------------------------------------------------

    @checked
    def what_if(self, **changes: Unpack["Changes"]) -> tuple[PlanChange, "ModulePlan"]:
        """The plan with changes, and the difference of its simulated step from that of this plan.

            change, other = plan.what_if(pinned={"layers.*.attention.wq.weight": Replicate()})
            change, other = plan.what_if(units=plan.units[1:])

        `pinned` (added to that of this plan), `mesh` and `head_room` are arguments of `plan_module`: the rest of the
        plan is found again. `styles` (added to those of the plan), `units` and `reshard` are parts of the plan: the
        rest stays.

        Raises:
            PlanError: the plan is not of `plan_module`; a change is unknown or impossible.
            ArgumentError, MeshError: a change of a wrong type.
        """
        if self.origin is None or self.step is None:
            raise PlanError("The plan has no module to try changes on. Fix: plan_module(…), or price_module(…).")
        known = list(Changes.__annotations__)
        for name in changes:
            if name not in known:
                raise PlanError(f"what_if: no change {name!r}.{did_you_mean(name, known)} Fix: {', '.join(known)}.")
        given: dict[str, Any] = dict(changes)
        search = self.origin.search
        again = {name: given.pop(name) for name in self.origin._fields if name in given}
        if "pinned" in again:
            again["pinned"] = {**self.origin.pinned, **again["pinned"]}
        other = _planned(self.origin._replace(**again)) if again else self
        if "styles" in given:
            given["styles"] = {**other.styles, **given["styles"]}
        if given:
            other = replace(other, **given)
            step = price_module(search.module, other, search.topology, search.inputs, forward=search.forward)
            other = replace(other, seconds=step.seconds, bound=0.0, step=step, reasons=(), tried=())
        new, old = other.step or self.step, self.step
        label, time = ", ".join(f"other {name}" for name in changes), 1e3 * (new.seconds - old.seconds)
        return PlanChange(label, time, new.sent_bytes - old.sent_bytes, new.peak_bytes - old.peak_bytes), other

    @checked
    def check(self, step: Callable[[], object], price: RankClass | None = None) -> PlanCheck:
        """The plan beside steps that run: bytes, memory and time of rank 0. All ranks of the mesh call it together.

            plan.apply(model)
            optimizer = torch.optim.AdamW(model.parameters())
            print(plan.check(lambda: train_step(model, optimizer, batch)))

        Args:
            step: one training step; it runs five times. Inputs are as large as those of the plan.
            price: the result of `price_module`, for a plan that was read from a file or written by hand.

        Raises:
            PlanError: the expected communication of the step is unknown.
        """
        price = self.step if price is None else price
        if price is None:
            raise PlanError("The plan has no modelled step. Fix: price=price_module(module, plan, topology, inputs).")
        first = self.mesh.sorted_ranks[0]
        runs = run_steps(step, self.mesh, first)
        memory = Figure(price.peak_bytes, runs[0].memory)
        note = other_costs(self.origin.search.topology, self.mesh.device_type) if self.origin is not None else ""
        return check_of(sent_by_cause(price.collectives), runs[0].sent, memory, price.seconds, runs, note)

    @checked
    def explain(self, name: str) -> str:
        """The reason for a parameter's placement, and the cost of the next best placement.

        Raises:
            PlanError: there is no such parameter.
        """
        known = {each: reason for reason in self.reasons for each in reason.names}
        if name not in known:
            raise PlanError(f"The plan has no reason for {name!r}.{did_you_mean(name, known)} Fix: a parameter's name.")
        reason = known[name]
        text = f"{name} is {reason.placement}" + (f": {reason.why}." if reason.why else ".")
        if reason.next_best is not None:
            text += f" The next best is {reason.next_best}: {_change(reason)}."
        return text

    def text(self, width: int | None = None, colour: bool = False) -> str:
        """Tables of the plan, of its reasons, and of shapes of the mesh."""
        lines = self._heading()
        if self.styles:
            styles = [(key or '""', entry_text(entry)) for key, entry in self.styles.items()]
            lines += ["", table_text([("path", "plan"), *styles], "ll", width)]
        if self.units:
            lines += ["", table_text([(self._units_text(),)], "l", width)]
        if self.reasons:
            rows = [(_names(r), str(r.placement), str(r.next_best or ""), _change(r)) for r in self.reasons]
            lines += ["", table_text([("parameter", "placement", "next best", "costs"), *rows], "llll", width)]
        if len(self.tried) > 1:
            shapes = [(tried.text, _seconds(tried)) for tried in self.tried]
            lines += ["", table_text([("dp x tp", "a step"), *shapes], "lr", width)]
        return "\n".join(lines)

    def _heading(self) -> list[str]:
        if self.step is None:
            return [f"{self.mesh}: a step of {milliseconds_text(self.seconds)}"]
        peak, sent = self.step.peak_bytes, bytes_text(self.step.sent_bytes)
        assumed = ["Tokens are taken to choose all experts equally often."] if self._experts else []
        return [
            fits_text(peak, self.memory, self.mesh.size(), self.seconds, self.gap if self.bound else None),
            f"{self.mesh}; simulated: {milliseconds_text(self.step.seconds)}, {sent} sent",
            *assumed,
        ]

    def _units_text(self) -> str:
        units = ", ".join(unit or "the module" for unit in globs(self.units))
        options = f"reshard_after_forward={self.reshard}"
        if not self._experts:
            return f"fully_shard along the data axis, {options}: {units}"
        apart = ", ".join(globs(self._experts))
        return f"fully_shard along both axes, {apart} along the first only, {options}: {units}"

    def to_html(self) -> str:
        """The plan as a page that is one file: memory and time of a rank, styles, and each parameter with its reason.

        Raises:
            PlanError: the plan is not of `plan_module`.
        """
        if self.step is None:
            raise PlanError("A plan that plan_module did not make has no times and no reasons. Fix: plan_module(…).")
        styles = [(key or '""', entry_text(entry)) for key, entry in self.styles.items()]
        units = self._units_text() if self.units else ""
        return module_page(self._heading(), self.mesh, self.step, styles, units, self.reasons, self.tried)

    def _repr_html_(self) -> str | None:
        return None if self.step is None else framed(self.to_html())


class Changes(TypedDict, total=False):
    """The changes of `what_if`."""

    pinned: Mapping[str, Placement]
    mesh: Mesh | None
    head_room: float
    styles: Mapping[str, Entry]
    units: Sequence[str]
    reshard: bool


def _names(reason: Reason) -> str:
    names = globs(reason.names) if reason.names[1:] else reason.names
    return names[0] + (f" and {len(names) - 1} more" if names[1:] else "")


def _change(reason: Reason) -> str:
    if reason.next_best is None:
        return ""
    more = round(reason.more_seconds * 1e3, 3) + 0.0  # adding 0.0 turns -0.0 into 0.0
    return f"{more:+.3f} ms, {more_bytes_text(reason.more_bytes)} a rank"


def _seconds(tried: Tried) -> str:
    if tried.seconds is None:
        return "does not fit"
    return f"{'at least ' if tried.is_bound else ''}{milliseconds_text(tried.seconds)}"


# ---- planning -------------------------------------------------------------------------------------------------------


@checked
def plan_module(
    module: nn.Module,
    topology: Topology,
    inputs: Inputs,
    *,
    mesh: Mesh | None = None,
    forward: Forward | None = None,
    pinned: Mapping[str, Placement] | None = None,
    head_room: float = 0.1,
) -> ModulePlan:
    """The plan with the shortest modelled step that fits the memory of a rank.

        plan = plan_module(model, Topology.preset("H100"), (tokens, targets), forward=loss_of)
        print(plan)
        plan.apply(model)

    The plan's step, with AdamW, is simulated on rank 0. So is a plan for the longest data axis whose costs are nearly
    as low; the faster one is taken. If it does not fit in memory, choices with less are searched.

    One forward is traced without memory, and each op, redistribution and reduction is timed once on a simulated rank.
    Equal blocks share their choices. Along the tensor axis parameters are used as they are stored; along the data axis
    they are fully sharded, and plain inputs are the rank's part of the batch.

    Without a tensor axis, layers that `ExpertParallel` supports may have their experts on a part of the data axis,
    "ep", to which tokens are sent; along the rest, "edp", these experts are fully sharded. A trace has no values to
    choose experts by, so each expert is assumed to get tokens x top_k / experts, and a token to go to as many ranks as
    it can.

    Args:
        module: on any device, also meta; nothing of it changes.
        topology: the machine.
        inputs: of the forward, of the batch of all ranks, by position or by name; meta tensors are enough.
        mesh: of one axis, the tensor axis, or of a data axis and a tensor axis, or of the axes "edp" and "ep"; None
            tries all shapes whose tensor axis stays in a host, and all sizes of "ep".
        forward: a function from the module and the inputs to the loss; None calls the module. Results that are not a
            loss are replicated.
        pinned: given placements of parameters along the tensor axis, by name or glob: Shard(dim) or Replicate(). Among
            equal blocks one decides for all.
        head_room: the share of the memory that stays free.

    Raises:
        TooLargeError: nothing fits; the text says how much is missing.
        PlanError: inputs without a tensor, or that `forward` does not take, a mesh of other axes, or pinned placements
            that no plan has.
    """
    return _planned(Origin(Search(module, topology, inputs, forward), mesh, dict(pinned or {}), head_room))


class Origin(NamedTuple):
    """The origin of a plan: the module with its choices and costs, and the other arguments of `plan_module`."""

    search: Search
    mesh: Mesh | None
    pinned: Mapping[str, Placement]
    head_room: float


@collecting_new_objects()
def _planned(origin: Origin) -> ModulePlan:
    check_head_room(origin.head_room)
    search, mesh, topology, module = origin.search, origin.mesh, origin.search.topology, origin.search.module
    check_call(module, search.inputs, search.forward)
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    paths = [path for path, _ in module.named_modules()]
    matched, problems = module_sharding.resolve(origin.pinned, names, "parameter", paths)
    if problems:
        raise PlanError(f"plan_module: pinned: {problems[0]}")
    pinned = {name: origin.pinned[key] for key, of_key in matched.items() for name in of_key}
    memory, shapes = topology.memory * (1 - origin.head_room), _shapes(topology, mesh, batch_rows(search.inputs))
    experts = _expert_axes(origin, pinned)
    if experts and mesh is not None:
        shapes = []
    budget, scale = inf, 1.0
    while found := search.run(shapes, budget, pinned, experts):
        steps = _simulated(origin, found)
        step, plan, choices = next(steps)
        if step.peak_bytes <= memory:
            fitting = [(step, plan, choices), *(one for one in steps if one[0].peak_bytes <= memory)]
            step, plan, choices = min(fitting, key=lambda one: one[0].seconds)
            return replace(
                plan, step=step, memory=memory, bound=search.bound, reasons=tuple(reasons_of(choices)),
                tried=tuple(search.tried), origin=origin,
            )  # fmt: skip
        scale = step.peak_bytes / choices.bytes
        budget = choices.bytes * min(memory / step.peak_bytes, 0.99)
    need = max(search.least_bytes * scale, memory)
    raise TooLargeError(
        f"Does not fit on {count_text(topology.ranks, 'rank')}: a rank has {bytes_text(memory)} and needs "
        f"{bytes_text(need)}, so {bytes_text(need - memory)} are missing. "
        f"Fix: more ranks, a smaller batch, or activation checkpointing."
    )


def _simulated(origin: Origin, found: list[Found]) -> Iterator[tuple[RankClass, ModulePlan, Found]]:
    """Choices with their plans and simulated steps, one after the other."""
    search = origin.search
    for choices in found:
        plan = _plan_of(search.module, origin.mesh, choices)
        step = price_module(search.module, plan, search.topology, search.inputs, forward=search.forward)
        yield step, plan, choices


def _plan_of(module: nn.Module, mesh: Mesh | None, found: Found) -> ModulePlan:
    """The plan of choices, without its reasons."""
    shape = found.costs.shape
    if isinstance(found.costs, ExpertCosts):
        layers = expert_layers(module)
        own = as_globs({path: [ExpertParallel()] for path in layers}, [path for path, _ in module.named_modules()])
        units = (*layers, *(unit for unit in _units(module) if unit not in layers))
        return ModulePlan(mesh or found.costs.expert_mesh, own, units, found.reshard, found.seconds)
    styles = plan_of_choices(module, found.costs, found.problem.chosen(found.solution)) if shape[1] > 1 else {}
    if mesh is None:
        mesh = Mesh(shape, names=("dp", "tp")) if shape[0] > 1 else Mesh(shape[1:], names=("tp",))
    return ModulePlan(mesh, styles, _units(module) if shape[0] > 1 else (), found.reshard, found.seconds)


@checked
def price_module(
    module: nn.Module, plan: ModulePlan, topology: Topology, inputs: Inputs, *, forward: Forward | None = None
) -> RankClass:
    """The modelled step of a plan, also of one written by hand: the real program on one simulated rank.

        by_hand = ModulePlan(Mesh((4,)), {"up": ColwiseParallel(), "down": RowwiseParallel()})
        price_module(model, by_hand, topology, (batch,)).seconds

    Args: as of `plan_module`.
    """
    step = step_of(inputs, forward, plan.data_ranks)
    build = training(module, lambda model, _: plan.apply(model, src_data_rank=None), step, first_step=False)
    return simulate_rank(build, plan.mesh, topology, plan.mesh.ranks[0])[0]


def _shapes(topology: Topology, mesh: Mesh | None, rows: int) -> list[tuple[int, int]]:
    """The shapes to try: each data rank has rows, and a tensor axis stays in a host if such a shape exists."""
    if mesh is None:
        sizes = [n for n in range(topology.ranks, 0, -1) if topology.ranks % n == 0 and topology.ranks // n <= rows]
        inside = [n for n in sizes if n <= topology.ranks_per_host]
        return [(topology.ranks // n, n) for n in inside or sizes]
    if mesh.ndim > 2 or mesh.size() != topology.ranks:
        raise PlanError(
            f"plan_module takes a mesh of {topology.ranks} ranks, those of the topology, and of one or two axes, got "
            f"{mesh}. Fix: a data axis and a tensor axis, such as Mesh((2, {topology.ranks // 2 or 1}))."
        )
    return [(mesh.shape[0], mesh.shape[1]) if mesh.ndim == 2 else (1, mesh.shape[0])]


def _expert_axes(origin: Origin, pinned: Iterable[str]) -> list[int]:
    """The sizes of an axis of experts to try: the size of a mesh that has one, or all if nothing of a layer is pinned.

    Raises:
        PlanError: the module or the batch does not allow the size of the mesh.
    """
    module, topology, mesh = origin.search.module, origin.search.topology, origin.mesh
    layers = tuple([f"{path}." for path in expert_layers(module)])
    free = not any(name.startswith(layers) for name in pinned) and batch_rows(origin.search.inputs) >= topology.ranks
    sizes = expert_sizes(module, topology.ranks) if free else []
    if mesh is None or mesh.names != EXPERT_AXES:
        return sizes if mesh is None else []
    if mesh.shape[1] not in sizes:
        raise PlanError(
            f"plan_module: {mesh} shards experts along ep, and the batch along both axes. This takes layers of experts "
            f"of which no parameter is pinned, 2 to as many ranks as experts along ep, and a row of the batch for each "
            f"rank. Fix: mesh=None tries all that can be."
        )
    return [mesh.shape[1]]


def _units(module: nn.Module) -> tuple[str, ...]:
    """Each child of the lists of the module, then the module itself."""
    lists = [path for path, part in module.named_modules() if isinstance(part, nn.ModuleList)]
    outermost = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
    blocks = [f"{path}.{name}" for path in outermost for name, part in module.get_submodule(path).named_children()
              if any(True for _ in part.parameters())]  # fmt: skip
    return (*blocks, "")
