"""Three ways to make a tensor: plain torch, shardwise, torch.distributed.tensor."""

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed.tensor as peer
from measure import Times, ratio
from torch import Tensor

import shardwise._tensor as ours
from shardwise import Replicate, Shard, init_device_mesh


@dataclass(frozen=True)
class System:
    """One way to make a tensor of a plain one, given letters for placements: R, or the dim of a Shard."""

    name: str
    make: Callable[[Tensor, str], Tensor]


def systems() -> list[System]:
    """Plain torch, shardwise, torch.distributed.tensor, on one mesh of one rank."""
    mesh = init_device_mesh("cpu", (1,))

    def of_ours(x: Tensor, letter: str) -> Tensor:
        return ours.distribute_tensor(x, mesh, [Replicate() if letter == "R" else Shard(int(letter))])

    def of_peer(x: Tensor, letter: str) -> Tensor:
        placement = peer.Replicate() if letter == "R" else peer.Shard(int(letter))
        made = peer.distribute_tensor(x.detach(), mesh, [placement])
        return made.requires_grad_(x.requires_grad)

    return [System("plain", lambda x, letter: x), System("ours", of_ours), System("torch", of_peer)]


COLUMNS = ["plain", "ours", "torch", "ours over plain", "torch over plain", "ratio", "ratio of medians"]


def figures(times: dict[str, Times]) -> list[str]:
    plain, mine, theirs = times["plain"], times["ours"], times["torch"]
    over = [mine.best - plain.best, theirs.best - plain.best]
    return [
        *(f"{t.best * 1e6:.1f}" for t in (plain, mine, theirs)),
        *(f"{s * 1e6:.1f}" for s in over),
        ratio(*over),
        ratio(mine.median - plain.median, theirs.median - plain.median),
    ]
