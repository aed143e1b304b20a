"""The seed of a random op: drawn from torch's generator, and watched to be the same on all ranks.

One random op draws one number, on every rank, from torch's default CPU generator or from the `generator=` it
was given, and makes its elements from it and their places (`counter_rng`). So `torch.manual_seed`,
`torch.get_rng_state`, `torch.set_rng_state`, `torch.random.fork_rng` and activation checkpoints govern random
DTensors too, and a state saved on some ranks may be restored on another number of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from shardwise import collectives
from shardwise.errors import MismatchError
from shardwise.layout import Mesh
from shardwise.trace.capture_hooks import allow_in_graph, not_capturable

CHECK_EVERY = 64  # draws: how late at most ranks learn that they draw different numbers

Ranks = tuple[int, ...]


@dataclass
class _Ledger:
    """What this rank has drawn together with the others of a group."""

    draws: int = 0
    digest: int = 0
    generators: "WeakSet[torch.Generator]" = field(default_factory=WeakSet)


_ledgers: "WeakKeyDictionary[Any, dict[Ranks, _Ledger]]" = WeakKeyDictionary()


@allow_in_graph
def draw_seed(mesh: Mesh, generator: torch.Generator | None = None) -> int:
    """A number for one random op on `mesh`, the same on all its ranks.

    The ranks compare what they have drawn at draws number 1, 2, 4, … 64, at every 64th from then on, and when
    they first draw from a `generator`. All ranks count alike, so they agree on when to compare without asking.

    Raises:
        MismatchError: the ranks' generators are, or were at a draw since the last comparison, not in the same
            state.
    """
    seed = collectives.draw_from_torch(generator) if generator is not None else collectives.transport().draw_seed()
    ranks = _members(mesh)
    if len(ranks) == 1 or collectives.rank() not in ranks:
        return seed
    ledger = _ledgers.setdefault(collectives.transport(), {}).setdefault(ranks, _Ledger())
    ledger.draws += 1
    ledger.digest = (ledger.digest * 0x5851F42D4C957F2D + seed) & ((1 << 62) - 1)
    due = ledger.draws % CHECK_EVERY == 0 or (ledger.draws < CHECK_EVERY and ledger.draws.bit_count() == 1)
    if generator is not None and generator not in ledger.generators:
        ledger.generators.add(generator)
        due = True
    if due:
        _compare(ledger, ranks)
    return seed


def _compare(ledger: _Ledger, ranks: Ranks) -> None:
    try:
        collectives.agree(
            "the random seed",
            ledger.digest,
            ranks,
            "call torch.manual_seed with the same number on every rank, and let every rank draw alike from torch's "
            "default generator afterwards: give numbers of one rank's own a torch.Generator of their own, or draw "
            "them inside torch.random.fork_rng().",
        )
    except MismatchError:
        _ledgers[collectives.transport()].pop(ranks)  # what is drawn next is compared at once
        raise


@lru_cache(maxsize=1024)
def _members(mesh: Mesh) -> Ranks:
    return tuple(sorted(mesh.ranks))


@contextmanager
def seeded_alike(mesh: Mesh, generator: torch.Generator | None, device: torch.device) -> Iterator[None]:
    """Inside, torch's generators of the CPU and of `device` start from one drawn seed, the same on all ranks."""
    not_capturable("random numbers of torch's own generators for whole copies")
    seed = draw_seed(mesh, generator)
    accelerator = None if device.type == "cpu" else torch.get_device_module(device)
    devices = [] if accelerator is None else [device]
    with torch.random.fork_rng(devices, device_type="cuda" if accelerator is None else device.type):
        torch.default_generator.manual_seed(seed)
        if accelerator is not None:
            with accelerator.device(device):
                accelerator.manual_seed(seed)
        yield
