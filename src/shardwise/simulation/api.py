"""`simulate`."""

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise._collectives import Ranks
from shardwise._layout import Boxes, Layout, Mesh, OnRanks, checked
from shardwise._layout.rank_boxes import Ints, rank_boxes
from shardwise._redistribute.plan import planned
from shardwise.errors import ArgumentError, MeshError
from shardwise.parallel.shard_module import LayoutPlan, shard_module
from shardwise.simulation.clock import RankClock
from shardwise.simulation.memory import Roles
from shardwise.simulation.result import RankClass, Simulation
from shardwise.simulation.topology import Topology

Step = Callable[[], object]
"""One training step: forward, backward, optimizer."""


@checked
def simulate(
    fn_or_module: Callable[[Mesh], Step] | nn.Module,
    *inputs: object,
    mesh: Mesh,
    plan: LayoutPlan | None = None,
    topology: Topology | None = None,
) -> Simulation:
    """Memory and time of a training step on each class of equal ranks of `mesh`; nothing is allocated or sent.

        mesh = Mesh((512, 8), device_type="cuda")
        print(simulate(train, mesh=mesh, topology=Topology.preset("H100", hosts=512)))  # docs/pictures.md has a `train`

    The function runs once for each class, as one rank of it. Tensors of floating dtype with dims have no values, nor
    have results computed from them; integers have values, up to 4 Mi elements of a tensor. A condition on missing
    values is False (`if bad.any()`); the result lists it. Shapes, dtypes and strides are those of a run; devices are
    CPUs, whatever the program asks for. The first step is not counted: in it, optimizers create their states.

    An op takes the time of its FLOPs, or of its memory traffic if that is longer. Nothing overlaps.

    Other ranks are assumed to send what this rank sends to itself: in a lookup, as many ids as it keeps.

    Memory is that of storages which ops return, without that of kernels, allocators and network libraries.

    Args:
        fn_or_module: a function of the mesh that makes a model and returns a function of one training step; or a
            module, for which a step is forward, backward of its loss, and AdamW. The loss is the first result without
            dims, else the sum of all results.
        inputs: of a module.
        mesh: of ranks 0, 1, ….
        plan: of a module: what `shard_module` takes.
        topology: the machine: costs of collectives, which also decide redistributions, speeds and memory. None:
            collectives of the mesh's type of devices on one host; ops take no time, and memory is unlimited.

    Returns:
        The classes. Ranks are equal if all layouts of the program give them local tensors of equal shapes, and they
        send equal bytes in each redistribution. They may send other amounts in exchanges inside an op: a lookup, a
        flatten of uneven shards. The lowest rank of a class runs code that asks for `rank()`; the result lists it.

    Raises:
        ShardwiseError: the program reads values that a simulation does not have.
        MeshError: the mesh has other ranks, or more than the topology, or other devices.
        ArgumentError: inputs or a plan beside a function, or a function that does not return one.
    """
    _check(mesh, topology, isinstance(fn_or_module, nn.Module) or not (inputs or plan is not None))
    build = fn_or_module
    if isinstance(build, nn.Module):
        build = training(
            build, lambda copy, mesh: shard_module(copy, plan or {}, mesh=mesh), lambda copy: copy(*inputs)
        )
    classes: list[RankClass] = []
    assumed: dict[str, None] = {}
    left = list(mesh.sorted_ranks)
    while left:
        one, clock = simulate_rank(build, mesh, topology, left[0])
        equal = _equal_ranks(clock, mesh, left)
        classes.append(replace(one, ranks=equal))
        assumed |= dict.fromkeys(_assumptions(clock))
        left = sorted({*left}.difference(equal))
    return Simulation(mesh, tuple(classes), topology, tuple(assumed))


def _check(mesh: Mesh, topology: Topology | None, takes_arguments: bool) -> None:
    """Raise unless `simulate` takes these arguments."""
    if mesh.sorted_ranks != tuple(range(mesh.size())):
        raise MeshError(
            f"simulate takes a mesh of the ranks 0 to {mesh.size() - 1}, got {mesh}. "
            f"Fix: Mesh({mesh.shape}), without ranks=."
        )
    if topology is not None and (mesh.size() > topology.ranks or mesh.device_type != topology.device_type):
        raise MeshError(
            f"simulate: {mesh} has {mesh.size()} ranks on {mesh.device_type}, and the topology {topology.ranks} on "
            f"{topology.device_type}. Fix: more hosts, and Mesh(…, device_type={topology.device_type!r})."
        )
    if not takes_arguments:
        raise ArgumentError("simulate: inputs and plan are those of a module. Fix: use them in the function.")


def simulate_rank(
    build: Callable[[Mesh], Step], mesh: Mesh, topology: Topology | None, rank: int
) -> tuple[RankClass, RankClock]:
    """The second step of one rank, and its clock."""
    clock = RankClock(mesh, topology, rank)
    roles = Roles(clock.memory)
    with roles.watching(), clock.running():
        step = build(mesh)
        if not callable(step):
            what = f"a function of one step, got {type(step).__name__}"
            raise ArgumentError(f"simulate: the function must return {what}. Fix: return it.")
        step()  # in which optimizers create their states
        gc.collect()  # else reference cycles of the first step are counted
        start = len(clock.memory.log)
        clock.restart()
        step()
        compute = clock.compute
        roles.find()
    return RankClass((rank,), roles.at_peak(start), clock.collectives(), compute), clock


def _assumptions(clock: RankClock) -> Iterator[str]:
    for where in clock.memory.conditions:
        yield f"{where}: a condition on values that are not there is False"
    for where in clock.transport.rank_reads:
        yield f"{where}: rank() is the lowest of each class, whose other ranks do the same"


def _equal_ranks(clock: RankClock, mesh: Mesh, ranks: Sequence[int]) -> Ranks:
    """The ranks with tensors of the shapes on the first one, and equal bytes sent in each redistribution."""
    equal = np.array(ranks)
    for layout in [x for x in clock.transport.owner._layouts.values() if not x.is_even]:
        equal = equal[_like_first(layout, mesh, equal)]
        if len(equal) == 1:
            break
    left: list[int] = equal.tolist()
    moves = [(src, dst) for src, dst in clock.recorded.redistributions if not _is_even(src, dst)]
    for plan in [planned(src, dst, clock.costs) for src, dst in moves if len(left) > 1]:
        part = plan.src.mesh if plan.src.mesh == plan.dst.mesh else mesh
        sent = [plan.sent_bytes(_counterpart(part, mesh, rank), 1) for rank in left]
        left = [rank for rank, n in zip(left, sent, strict=True) if n == sent[0]]
    return tuple(left)


def _like_first(layout: Layout, mesh: Mesh, ranks: Ints) -> NDArray[np.bool_]:
    """Whether each rank has a local tensor of the first one's shape."""
    if layout.mesh != mesh or not layout.shape or any(isinstance(p, Boxes) for p in layout.placements):
        shapes = [layout.local_shape(_counterpart(layout.mesh, mesh, rank)) for rank in ranks.tolist()]
        return np.array([shape == shapes[0] for shape in shapes])
    found = rank_boxes(layout)
    shape_of = np.zeros((mesh.size(), len(layout.shape)), dtype=np.int64)
    shape_of[:, 1:] = layout.shape[1:]  # of a rank without a box
    shape_of[found.position] = found.sizes.T
    equal: NDArray[np.bool_] = (shape_of[ranks] == shape_of[ranks[0]]).all(1)
    return equal


def _is_even(src: Layout, dst: Layout) -> bool:
    """Whether all ranks of a redistribution send equal bytes."""
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
    """A copy on a device, whose parameters and floating buffers have no values."""
    memo: dict[int, object] = {}
    for x in [*module.parameters(), *(x for x in module.buffers() if x.is_floating_point())]:
        empty = torch.empty(x.shape, dtype=x.dtype, device=device)
        memo[id(x)] = nn.Parameter(empty, x.requires_grad) if isinstance(x, nn.Parameter) else empty
    return copy.deepcopy(module, memo)


def training(
    module: nn.Module,
    shard: Callable[[nn.Module, Mesh], object],
    forward: Callable[[nn.Module], object],
    first_step: bool = True,
) -> Callable[[Mesh], Step]:
    """A function that makes a step of a copy of `module`, which has no values: forward, backward of the loss, AdamW.

    The loss is the first result without dims, else the sum of all results.

    Args:
        shard: a function that shards the copy in place.
        first_step: whether the first call is a step. Else it creates the states of AdamW from gradients of zero, also
            for parameters without gradients: two steps take a third less time.
    """

    def build(mesh: Mesh) -> Step:
        model = without_values(module)
        shard(model, mesh)
        parameters = [p for p in model.parameters() if p.requires_grad]
        fused = all(p.is_floating_point() for p in parameters)  # torch fuses no complex ones
        optimizer = torch.optim.AdamW(parameters, fused=fused) if parameters else None

        def step() -> None:
            model.zero_grad()
            results = [x for x in pytree.tree_leaves(forward(model)) if isinstance(x, Tensor) and x.requires_grad]
            losses = [x for x in results if not x.ndim][:1] or [x.sum() for x in results]
            if losses:
                torch.autograd.backward(losses)
            if optimizer is not None:
                optimizer.step()

        def make_states() -> None:
            for p in parameters:
                p.grad = torch.zeros_like(p)
            if optimizer is not None:
                optimizer.step()

        first = [] if first_step else [make_states]

        def next_step() -> None:
            (first.pop() if first else step)()

        return next_step

    return build
