"""Placements of shards beside torch's own: devices with and without a rank, and what needs RPC."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._shard import metadata as their_metadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed._shard.sharding_spec import api as theirs
from torch.distributed._shard.sharding_spec.chunk_sharding_spec import ChunkShardingSpec as TheirChunks
from torch.distributed.remote_device import _remote_device

from shardwise import DTensor, Mesh, Shard, distribute_tensor, rank
from shardwise.errors import LayoutError, RuleError
from shardwise.sharded_tensor import (
    ChunkShardingSpec,
    DevicePlacementSpec,
    EnumerableShardingSpec,
    LocalShard,
    ShardingPlan,
    ShardingSpec,
    ShardMetadata,
    full,
    init_from_local_shards,
    shard_module,
    shard_parameter,
    zeros,
)
from shardwise.sharded_tensor.specs import placement_of
from shardwise.testing import world


@pytest.mark.parametrize("text", ["rank:1/pudding", "rank:0/cuda:foo", "rank:0/cpu2", "rank:0/"])
def test_a_device_that_torch_does_not_know_is_refused_as_in_torch(text: str) -> None:
    with pytest.raises(RuntimeError):
        _remote_device(text)
    with pytest.raises(RuntimeError, match="names no device torch knows"):
        placement_of(text)


@pytest.mark.parametrize(
    "device",
    [
        *("cuda:0", "cpu", "meta", "rank:0", "rank:2/cuda:1"),
        *(torch.device("cuda:1"), _remote_device("rank:1/cpu"), _remote_device("cuda:3")),
    ],
    ids=str,
)
def test_placements_have_the_rank_the_device_and_the_text_of_torch(device: Any) -> None:
    peer = device if isinstance(device, _remote_device) else _remote_device(device)
    for ours in (
        placement_of(device),
        DevicePlacementSpec(device).device,
        ShardMetadata([0], [1], device).placement,
        ChunkShardingSpec(0, [device]).placements[0],
    ):
        assert ours is not None
        assert (ours.rank(), ours.device(), str(ours)) == (peer.rank(), peer.device(), str(peer))
    assert len({ChunkShardingSpec(0, [place]) for place in (device, peer, str(peer))}) == 1


def test_devices_without_a_rank_describe_shards_as_in_torch() -> None:
    shards = [([0, 0], [3, 5], "cuda:0"), ([3, 0], [7, 5], "cuda:1")]
    ours = EnumerableShardingSpec([ShardMetadata(*shard) for shard in shards])
    peer = theirs.EnumerableShardingSpec([their_metadata.ShardMetadata(*shard) for shard in shards])
    chunks, their_chunks = ChunkShardingSpec(0, ["cuda:0", "cuda:1"]), TheirChunks(0, ["cuda:0", "cuda:1"])
    properties = TensorProperties()
    for one, other, shape in ((ours, peer, (10, 5)), (chunks, their_chunks, (7, 2))):
        found, expected = one.build_metadata(shape), other.build_metadata(torch.Size(shape), properties)
        assert [(list(s.shard_offsets), list(s.shard_sizes), str(s.placement)) for s in found] == [
            (s.shard_offsets, s.shard_sizes, str(s.placement)) for s in expected.shards_metadata
        ]
    with pytest.raises(LayoutError, match=r"\[0:3, 0:5\] \(cuda:0\) and \[2:5, 0:5\] \(cuda:1\) share"):
        EnumerableShardingSpec([ShardMetadata([0, 0], [3, 5], "cuda:0"), ShardMetadata([2, 0], [3, 5], "cuda:1")])


@pytest.mark.parametrize("placements", [["cpu", "cpu"], ["rank:0/cpu", "cpu"]], ids=str)
def test_no_tensor_is_sharded_by_devices_without_a_rank(placements: list[str]) -> None:
    chunks = ChunkShardingSpec(0, placements)
    pair = EnumerableShardingSpec([ShardMetadata([2 * i, 0], [2, 3], place) for i, place in enumerate(placements)])
    tries: list[Callable[[ShardingSpec], object]] = [
        lambda spec: zeros(spec, 4, 3),
        lambda spec: spec.shard(torch.ones(4, 3)),
        lambda spec: shard_parameter(nn.Linear(3, 4), "weight", spec),
        lambda spec: shard_module(nn.Linear(3, 4), ShardingPlan({"weight": spec})),
        lambda spec: spec.layout((4, 3), (0, 1)),
        lambda spec: distribute_tensor(torch.ones(4, 3), Mesh((2,)), [Shard(0)]).reshard(spec),
    ]

    def texts() -> list[str]:
        found = []
        for spec in (chunks, pair):
            for attempt in tries:
                with pytest.raises(LayoutError) as caught:
                    attempt(spec)
                found.append(str(caught.value))
        return found

    first, second = world(2).run(texts)
    assert first == second
    assert all("the placement cpu, without a rank" in text and "Fix: placement='rank:R/cpu'" in text for text in first)


@world(2)
def test_shards_of_other_ranks_are_not_reached_by_rpc() -> None:
    spec = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
    mine = LocalShard(torch.ones(2, 3), ShardMetadata([2 * rank(), 0], [2, 3], f"rank:{rank()}/cpu"))
    attempts: tuple[Callable[..., DTensor], ...] = (
        lambda **options: zeros(spec, 4, 3, **options),
        lambda **options: full(spec, (4, 3), 1.0, **options),
        lambda **options: init_from_local_shards([mine], 4, 3, **options),
    )
    for attempt in attempts:
        assert attempt(init_rrefs=False).shape == (4, 3)
        with pytest.raises(RuleError, match=r"init_rrefs=True .* RPC.*Fix: leave it out"):
            attempt(init_rrefs=True)
    refused: list[dict[str, Any]] = [{"pin_memory": True}, {"memory_format": torch.channels_last}]
    for options in refused:
        with pytest.raises(LayoutError, match="shards are contiguous and not pinned"):
            zeros(spec, 4, 3, **options)
