"""The time of one simulated rank: its ops by FLOPs or memory traffic, its collectives by their costs.

An op takes the time of its floating-point operations, or of its memory traffic if that is longer; nothing overlaps.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from shardwise._collectives import Collective, Wait, using
from shardwise._collectives.cost_tables import costs_of
from shardwise._layout import Mesh
from shardwise._rules.row import Args, Kwargs
from shardwise._trace.comm_trace import listening_with
from shardwise.simulation.memory import Memory, tensors_in
from shardwise.simulation.one_rank import OneRank
from shardwise.simulation.result import Collective as Timed
from shardwise.simulation.result import Recorded
from shardwise.simulation.topology import Topology

aten = torch.ops.aten


class RankClock:
    """One rank of a mesh, whose tensors have no values.

    with RankClock(mesh, topology).running() as clock:
        clock.restart()
        ...
        clock.seconds()

    Args:
        topology: None: ops take no time, and collectives are those of the mesh's type of devices, on one host.
        rank: the rank; 0 has the largest shards.

    Attributes:
        memory: of the rank.
        transport: the transport of the rank.
        recorded: its communication.
        costs: of collectives.
    """

    def __init__(self, mesh: Mesh, topology: Topology | None, rank: int = 0) -> None:
        self.mesh, self.memory = mesh, _TimedMemory(topology)
        self.recorded = Recorded()
        self.costs = costs_of(mesh.device_type, None, None) if topology is None else topology.costs
        self.transport = _Rank(rank, mesh.size(), self.recorded, self.memory)
        self.transport.owner.costs[mesh.device_type] = self.costs

    @contextmanager
    def running(self) -> Iterator["RankClock"]:
        """Inside, this thread is the rank."""
        state = torch.get_rng_state()
        try:
            with (
                using(self.transport), torch.autograd.set_multithreading_enabled(False), self.memory,
                listening_with(self.recorded),
            ):  # fmt: skip
                yield self
        finally:
            torch.set_rng_state(state)

    def restart(self) -> None:
        """Restart the clock."""
        self.recorded.clear()
        self.memory.seconds = 0.0

    def collectives(self) -> tuple[Timed, ...]:
        """The collectives since the restart, with their times."""
        ranks = self.mesh.sorted_ranks
        return tuple([
            replace(one, seconds=self.costs.seconds(one.kind, one.ranks, ranks, one.received_bytes))
            for one in self.recorded.collectives
        ])  # fmt: skip

    @property
    def compute(self) -> float:
        """Seconds of the ops since the restart."""
        return self.memory.seconds

    def seconds(self) -> float:
        """Seconds of ops and collectives since the restart."""
        return self.compute + sum(one.seconds for one in self.collectives())


class _Rank(OneRank):
    """A rank whose transport computes nothing."""

    def __init__(self, rank: int, world_size: int, recorded: Recorded, memory: "_TimedMemory") -> None:
        super().__init__(rank, world_size, recorded)
        self.memory = memory

    def start(self, collective: Collective) -> Wait:
        before = self.memory.seconds
        wait = super().start(collective)
        self.memory.seconds = before
        return wait


class _TimedMemory(Memory):
    """Memory without values that also adds up the seconds of ops. One mode does both: each costs much for every op."""

    def __init__(self, topology: Topology | None) -> None:
        super().__init__(allocate=False)
        self.topology, self.seconds = topology, 0.0

    def __torch_dispatch__(
        self, func: OpOverload, types: Iterable[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        named = kwargs or {}
        out = super().__torch_dispatch__(func, types, args, named)
        if self.topology is not None and out is not NotImplemented and not func.is_view and func not in _FREE:
            of_tensor: dict[int, int] = {id(x): x.nbytes for x in tensors_in([*args, *named.values(), out])}
            if (elements := _INDEXED.get(func._overloadpacket)) is not None:
                of_tensor[id(args[0])] = elements(args, out) * args[0].element_size()
            touched = sum(of_tensor.values())
            count = _FLOPS.get(func._overloadpacket)
            flops = count(*args, **named, out_val=out) if count else 0
            self.seconds += max(flops / self.topology.flops, touched / self.topology.memory_bandwidth)
        return out


_FREE = {
    aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default, aten.empty_strided.default,
    aten.detach.default, aten._unsafe_view.default,
}  # fmt: skip

_INDEXED: Mapping[Any, Callable[[Args, Any], int]] = {  # elements of the first operand that an op reads or writes
    **dict.fromkeys((aten.embedding, aten.gather, aten.index, aten.index_select), lambda _, out: out.numel()),
    **dict.fromkeys((aten.index_add_, aten.index_copy_, aten.scatter_add_), lambda args, _: args[3].numel()),
    **dict.fromkeys(
        (aten._embedding_bag, aten._embedding_bag_forward_only), lambda args, _: args[1].numel() * args[0].shape[1]
    ),
}


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> int:
    return int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))


_FLOPS: Mapping[Any, Callable[..., int]] = {
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
