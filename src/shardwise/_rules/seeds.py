"""The seed of a random op: drawn from torch's generator, and compared between the ranks.

A random op draws one number, on every rank, from torch's default CPU generator or from its `generator=`. Each element
is a function of this number and its index (`counter_rng`). So `torch.manual_seed`, `torch.get_rng_state`,
`torch.set_rng_state`, `torch.random.fork_rng` and activation checkpoints govern random DTensors too, and a state can be
restored on another number of ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from weakref import WeakSet

import torch

from shardwise import _collectives as collectives
from shardwise._layout import Mesh
from shardwise._trace.capture_hooks import allow_in_graph, not_capturable
from shardwise.errors import MismatchError

Ranks = tuple[int, ...]
FIX = (
    "call torch.manual_seed with the same number on every rank, and let every rank draw alike from torch's "
    "default generator afterwards: give numbers of one rank's own a torch.Generator of their own, or draw "
    "them inside torch.random.fork_rng()."
)


@dataclass
class _Drawn:
    """The draws of this rank with the others of a group."""

    draws: int = 0
    digest: int = 0
    generators: "WeakSet[torch.Generator]" = field(default_factory=WeakSet)


class _DrawnByGroup(dict[Ranks, _Drawn]):
    """The draws of a rank, by group."""


@allow_in_graph
def draw_seed(mesh: Mesh, generator: torch.Generator | None = None) -> int:
    """A number for one random op on `mesh`, equal on all its ranks.

    The ranks compare digests of their draws at draws 1, 2, 4, … 64, at every 64th from then on, and at the first draw
    from a `generator`. All count equal draws, so they know when to compare without communication. A draw communicates
    nothing else, so ledgers, which are read before a collective, would be too late.

    Raises:
        MismatchError: the ranks' generators differ, or differed at a draw since the last comparison.
    """
    seed, ranks = collectives.draw_from_torch(generator), _members(mesh)
    if len(ranks) == 1 or collectives.rank() not in ranks:
        return seed
    groups = collectives.owner().state(_DrawnByGroup)
    drawn = groups.setdefault(ranks, _Drawn())
    drawn.draws += 1
    drawn.digest = collectives.rolling(drawn.digest, [seed])
    is_new = generator is not None and generator not in drawn.generators
    if generator is not None:
        drawn.generators.add(generator)
    if is_new or collectives.is_sampled(drawn.draws):
        try:
            collectives.agree("the random seed", drawn.digest, ranks, FIX)
        except MismatchError:
            groups.pop(ranks)  # the next draw is compared at once
            raise
    return seed


@lru_cache(maxsize=1024)
def _members(mesh: Mesh) -> Ranks:
    return tuple(sorted(mesh.ranks))


@contextmanager
def same_on_all_ranks(mesh: Mesh, generator: torch.Generator | None, device: torch.device) -> Iterator[None]:
    """Inside, torch's generators of the CPU and of `device` are seeded with one drawn number."""
    not_capturable("random numbers of torch's own generators in an op that runs replicated")
    seed = draw_seed(mesh, generator)
    accelerator = None if device.type == "cpu" else torch.get_device_module(device)
    devices = [] if accelerator is None else [device]
    with torch.random.fork_rng(devices, device_type="cuda" if accelerator is None else device.type):
        torch.default_generator.manual_seed(seed)
        if accelerator is not None:
            with accelerator.device(device):
                accelerator.manual_seed(seed)
        yield
