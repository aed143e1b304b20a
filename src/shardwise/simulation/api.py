"""`simulate`."""

import copy
import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import nn

from shardwise.collectives import Ranks, using
from shardwise.collectives.cost_tables import Costs, costs_of, using_costs
from shardwise.errors import MeshError
from shardwise.layout import Layout, Mesh, checked
from shardwise.parallel.shard_module import LayoutPlan, shard_module
from shardwise.simulation.memory import Memory
from shardwise.simulation.one_rank import OneRank
from shardwise.simulation.result import RankClass, Simulation
from shardwise.simulation.roles import Roles
from shardwise.simulation.traffic import Recorded
from shardwise.trace.comm_trace import listening_with

Step = Callable[[], object]


@checked
def simulate(
    fn_or_module: Callable[[Mesh], Step] | nn.Module,
    *inputs: object,
    mesh: Mesh,
    plan: LayoutPlan | None = None,
    costs: Costs | None = None,
) -> Simulation:
    """Memory and communication of a training step on each class of equal ranks of `mesh`; nothing is allocated or sent.

        def train(mesh):
            model = Transformer(args)
            shard_module(model, {...}, mesh=mesh)
            optimizer = torch.optim.AdamW(model.parameters())
            def step():
                optimizer.zero_grad()
                loss_of(model, torch.randint(100, (8, 16))).backward()
                optimizer.step()
            return step
        print(simulate(train, mesh=Mesh((512, 8))))

    The function runs once for each class, as one rank of the class. Tensors of floating dtype with dims have no values,
    nor what is computed from them; integers have, up to 4 Mi elements of a tensor. A condition on values that are not
    there is False (`if bad.any()`). Shapes, dtypes, devices and strides are those of a run on CPUs. The first step is
    not counted, because in it optimizers make their states.

    Other ranks are taken to send what this one sends to itself. So where sizes depend on data (ids of a lookup), each
    rank receives from every rank as many as it keeps; plain batches of ranks have equal shapes.

    Memory is that of storages which ops return; not what a kernel, an allocator or a network library takes for itself.

    Args:
        fn_or_module: a function of the mesh that makes a model and returns a function of one training step; or a
            module, for which a step is forward, backward of the sum of its output, and AdamW.
        inputs: of a module.
        mesh: of ranks 0, 1, ….
        plan: of a module: what `shard_module` takes.
        costs: by which plans are made and time is modelled; None is those of the device type of the mesh.

    Returns:
        The classes. Ranks are equal if, of all layouts of the program, they have local tensors of the same shapes.
        What they send may still differ by an element. The lowest rank of a class runs code that asks for `rank()`.

    Raises:
        ShardwiseError: the program reads values that a simulation does not have.
        MeshError: the mesh has other ranks.
    """
    if mesh.sorted_ranks != tuple(range(mesh.size())):
        raise MeshError(f"simulate takes a mesh of the ranks 0 to {mesh.size() - 1}, got {mesh}.")
    build = _training(fn_or_module, inputs, plan or {}) if isinstance(fn_or_module, nn.Module) else fn_or_module
    costs = costs or costs_of(mesh.device_type, None, None)
    classes: list[RankClass] = []
    left = list(mesh.sorted_ranks)
    while left:
        one, layouts = _run(build, mesh, left[0], costs)
        equal = _equal_ranks(layouts, mesh, left)
        classes.append(replace(one, ranks=equal))
        known = set(equal)
        left = [rank for rank in left if rank not in known]
    return Simulation(mesh, tuple(classes), costs)


def _run(build: Callable[[Mesh], Step], mesh: Mesh, rank: int, costs: Costs) -> tuple[RankClass, list[Layout]]:
    """One rank, and the layouts of its tensors."""
    recorded, memory = Recorded(), Memory(allocate=False)
    roles = Roles(memory)
    here = OneRank(rank, mesh.size(), recorded)
    state = torch.get_rng_state()
    try:
        with (
            using_costs(costs), using(here), torch.autograd.set_multithreading_enabled(False), roles.watching(),
            memory, listening_with(recorded),
        ):  # fmt: skip
            step = build(mesh)
            step()
            recorded.collectives.clear()
            gc.collect()  # else what is in reference cycles of the first step is counted
            start = len(memory.log)
            step()
            roles.find()
        layouts = list(here.owner._layouts.values())
    finally:
        torch.set_rng_state(state)
    return RankClass((rank,), roles.at_peak(start), tuple(recorded.collectives)), layouts


def _equal_ranks(layouts: Sequence[Layout], mesh: Mesh, ranks: Sequence[int]) -> Ranks:
    """The ranks that have as many local tensors of each shape as the first one."""

    def held(rank: int) -> list[tuple[tuple[int, ...], ...]]:
        return sorted((x.shape, x.local_shape(_counterpart(x.mesh, mesh, rank))) for x in layouts)

    layouts = [x for x in layouts if not x.is_even]
    first = held(ranks[0])
    return tuple(rank for rank in ranks if held(rank) == first)


@lru_cache(maxsize=1 << 16)
def _counterpart(part: Mesh, mesh: Mesh, rank: int) -> int:
    """The rank that has in `part`, a mesh of some axes of `mesh`, the place that `rank` has in its own such mesh."""
    if len(part.ranks) == len(mesh.ranks):
        return rank
    places = [mesh.coordinate(member) or () for member in part.ranks]
    own = mesh.coordinate(rank) or ()
    counterpart = mesh.rank_at(
        [at if len(set(axis)) > 1 else axis[0] for axis, at in zip(zip(*places, strict=True), own, strict=True)]
    )
    return counterpart if counterpart in part.ranks else rank


def _training(module: nn.Module, inputs: Sequence[object], plan: LayoutPlan) -> Callable[[Mesh], Step]:
    """A step of a copy of `module`, which has no values: forward, backward of the sum of its output, and AdamW."""

    def build(mesh: Mesh) -> Step:
        known = [*module.parameters(), *(x for x in module.buffers() if x.is_floating_point())]
        memo: dict[int, object] = {}
        for x in known:
            empty = torch.empty(x.shape, dtype=x.dtype)
            memo[id(x)] = nn.Parameter(empty, x.requires_grad) if isinstance(x, nn.Parameter) else empty
        model = shard_module(copy.deepcopy(module, memo), plan, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            model(*inputs).sum().backward()
            optimizer.step()

        return step

    return build
