"""`simulate`."""

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise._collectives import Ranks, using
from shardwise._collectives.cost_tables import Costs, costs_of
from shardwise._layout import Boxes, Layout, Mesh, OnRanks, checked
from shardwise._redistribute.plan import planned
from shardwise._trace.comm_trace import listening_with
from shardwise.errors import ArgumentError, MeshError
from shardwise.parallel.shard_module import LayoutPlan, shard_module
from shardwise.simulation.memory import Memory, Roles
from shardwise.simulation.one_rank import OneRank
from shardwise.simulation.result import RankClass, Recorded, Simulation

Step = Callable[[], object]
"""One training step: forward, backward, optimizer."""


@checked
def simulate(
    fn_or_module: Callable[[Mesh], Step] | nn.Module,
    *inputs: object,
    mesh: Mesh,
    plan: LayoutPlan | None = None,
    costs: Costs | None = None,
) -> Simulation:
    """Memory and communication of a training step on each class of equal ranks of `mesh`; nothing is allocated or sent.

        print(simulate(train, mesh=Mesh((512, 8))))  # docs/pictures.md has such a function

    The function runs once for each class, as one rank of the class. Tensors of floating dtype with dims have no values,
    nor what is computed from them; integers have, up to 4 Mi elements of a tensor. A condition on values that are not
    there is False (`if bad.any()`), which the result says. Shapes, dtypes, devices and strides are those of a run on
    CPUs. The first step is not counted, because in it optimizers make their states.

    Other ranks are taken to send what this one sends to itself. So where sizes depend on data (ids of a lookup), each
    rank receives from every rank as many as it keeps; plain batches of ranks have equal shapes.

    Memory is that of storages which ops return; not what a kernel, an allocator or a network library takes for itself.

    Args:
        fn_or_module: a function of the mesh that makes a model and returns a function of one training step; or a
            module, for which a step is forward, backward of the sum of its outputs, and AdamW.
        inputs: of a module.
        mesh: of ranks 0, 1, ….
        plan: of a module: what `shard_module` takes.
        costs: by which plans are made and time is modelled; None is those of the device type of the mesh.

    Returns:
        The classes. Ranks are equal if, of all layouts of the program, they have local tensors of the same shapes, and
        send as many bytes in each redistribution. They may send other amounts in exchanges inside an op: a lookup, a
        flatten of uneven shards. The lowest rank of a class runs code that asks for `rank()`, which the result says.

    Raises:
        ShardwiseError: the program reads values that a simulation does not have.
        MeshError: the mesh has other ranks.
        ArgumentError: inputs or a plan beside a function, or a function that returns no function.
    """
    if mesh.sorted_ranks != tuple(range(mesh.size())):
        raise MeshError(
            f"simulate takes a mesh of the ranks 0 to {mesh.size() - 1}, got {mesh}. "
            f"Fix: Mesh({mesh.shape}), without ranks=."
        )
    if not isinstance(fn_or_module, nn.Module) and (inputs or plan is not None):
        raise ArgumentError("simulate: inputs and plan are those of a module. Fix: use them in the function.")
    build = _training(fn_or_module, inputs, plan or {}) if isinstance(fn_or_module, nn.Module) else fn_or_module
    costs = costs or costs_of(mesh.device_type, None, None)
    classes: list[RankClass] = []
    assumed: dict[str, None] = {}
    left = list(mesh.sorted_ranks)
    while left:
        one, layouts, redistributions = _run(build, mesh, left[0], costs, assumed)
        equal = _equal_ranks(layouts, redistributions, mesh, left, costs)
        classes.append(replace(one, ranks=equal))
        left = sorted({*left}.difference(equal))
    return Simulation(mesh, tuple(classes), costs, tuple(assumed))


def _run(
    build: Callable[[Mesh], Step], mesh: Mesh, rank: int, costs: Costs, assumed: dict[str, None]
) -> tuple[RankClass, list[Layout], list[tuple[Layout, Layout]]]:
    """One rank, the layouts of its tensors, and between which layouts it redistributes."""
    recorded, memory = Recorded(), Memory(allocate=False)
    roles = Roles(memory)
    here = OneRank(rank, mesh.size(), recorded)
    here.owner.costs[mesh.device_type] = costs
    state = torch.get_rng_state()
    try:
        with (
            using(here), torch.autograd.set_multithreading_enabled(False), roles.watching(),
            memory, listening_with(recorded),
        ):  # fmt: skip
            step = build(mesh)
            if not callable(step):
                what = f"a function of one step, got {type(step).__name__}"
                raise ArgumentError(f"simulate: the function must return {what}. Fix: return it.")
            step()
            recorded.clear()
            gc.collect()  # else what is in reference cycles of the first step is counted
            start = len(memory.log)
            step()
            roles.find()
        layouts = list(here.owner._layouts.values())
    finally:
        torch.set_rng_state(state)
    assumptions = [(where, "a condition on values that are not there is False") for where in memory.conditions]
    assumptions += [
        (where, "rank() is the lowest of each class, whose other ranks do the same") for where in here.rank_reads
    ]
    assumed |= {f"{where}: {what}": None for where, what in assumptions}
    found = RankClass((rank,), roles.at_peak(start), tuple(recorded.collectives))
    return found, layouts, list(recorded.redistributions)


def _equal_ranks(
    layouts: Sequence[Layout], moves: Sequence[tuple[Layout, Layout]], mesh: Mesh, ranks: Sequence[int], costs: Costs
) -> Ranks:
    """The ranks that hold tensors of the same shapes as the first one, and send as much in each redistribution."""
    uneven = [x for x in layouts if not x.is_even]
    plans = [planned(src, dst, costs) for src, dst in moves if not _is_even(src, dst)]

    def traits(rank: int) -> Iterator[object]:
        for x in uneven:
            yield x.local_shape(_counterpart(x.mesh, mesh, rank))
        for plan in plans:
            one_mesh = plan.src.mesh == plan.dst.mesh
            yield plan.sent_bytes(_counterpart(plan.src.mesh, mesh, rank) if one_mesh else rank, 1)

    first = list(traits(ranks[0]))
    return tuple(rank for rank in ranks if all(a == b for a, b in zip(traits(rank), first, strict=True)))


def _is_even(src: Layout, dst: Layout) -> bool:
    """Whether all ranks of a redistribution send as much."""
    one_rank = any(isinstance(p, OnRanks | Boxes) for p in (*src.placements, *dst.placements))
    return src.is_even and dst.is_even and src.mesh == dst.mesh and not one_rank


@lru_cache(maxsize=1 << 16)
def _counterpart(part: Mesh, mesh: Mesh, rank: int) -> int:
    """The rank that has in `part`, a mesh of some axes of `mesh`, the place that `rank` has in its own such mesh."""
    if len(part.ranks) == len(mesh.ranks):
        return rank
    axes = zip(*(mesh.coordinate(member) or () for member in part.ranks), strict=True)
    own = mesh.coordinate(rank) or ()
    counterpart = mesh.rank_at([at if len(set(axis)) > 1 else axis[0] for axis, at in zip(axes, own, strict=True)])
    return counterpart if counterpart in part.ranks else rank


def without_values(module: nn.Module, device: torch.device | None = None) -> nn.Module:
    """A copy whose parameters and floating buffers have no values, on a device."""
    memo: dict[int, object] = {}
    for x in [*module.parameters(), *(x for x in module.buffers() if x.is_floating_point())]:
        empty = torch.empty(x.shape, dtype=x.dtype, device=device)
        memo[id(x)] = nn.Parameter(empty, x.requires_grad) if isinstance(x, nn.Parameter) else empty
    return copy.deepcopy(module, memo)


def _training(module: nn.Module, inputs: Sequence[object], plan: LayoutPlan) -> Callable[[Mesh], Step]:
    """A step of a copy of `module`, which has no values: forward, backward of the sum of its output, and AdamW."""

    def build(mesh: Mesh) -> Step:
        model = shard_module(without_values(module), plan, mesh=mesh)
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters) if parameters else None

        def step() -> None:
            model.zero_grad()
            outputs = [x for x in pytree.tree_leaves(model(*inputs)) if isinstance(x, Tensor) and x.requires_grad]
            if outputs:
                torch.autograd.backward([x.sum() for x in outputs])
            if optimizer is not None:
                optimizer.step()

        return step

    return build
