"""All-to-alls of ranks that share no process group, by sends and receives: making a group would involve all ranks."""

from collections.abc import Sequence
from datetime import timedelta
from hashlib import blake2b
from time import monotonic

import torch.distributed as dist
from torch import Tensor

from shardwise.collectives.collective_call import Ranks


def start_pairwise(
    out: Tensor,
    parts: Sequence[Tensor],
    recv_counts: Sequence[int],
    ranks: Ranks,
    here: int,
    number: int,
) -> Sequence[dist.Work]:
    """Start what rank `here` sends and receives in collective `number` of `ranks`.

    Args:
        parts: what each of `ranks` is sent.
    """
    ops = []
    tag = _tag(ranks, number)
    for peer, outgoing, incoming in zip(ranks, parts, out.split(list(recv_counts)), strict=True):
        if peer == here:
            incoming.copy_(outgoing)
            continue
        if outgoing.numel():
            ops.append(dist.P2POp(dist.isend, outgoing, peer, tag=tag))
        if incoming.numel():
            ops.append(dist.P2POp(dist.irecv, incoming, peer, tag=tag))
    return dist.batch_isend_irecv(ops) if ops else []


def wait_pairwise(works: Sequence[dist.Work], deadline: float) -> None:
    """Wait for all; after a failure abandon the others, so that those peers fail as well."""
    failure = None
    for work in works:
        try:
            work.wait(wait_limit(deadline - monotonic() if failure is None else 0.0))
        except RuntimeError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def wait_limit(seconds: float) -> timedelta:
    """As torch takes it: zero would be no limit."""
    return timedelta(seconds=max(seconds, 0.002))


def _tag(ranks: Ranks, number: int) -> int:
    """Identifies one exchange, so that surplus messages of an earlier one are never received in it."""
    return int.from_bytes(blake2b(repr((ranks, number)).encode(), digest_size=4).digest()) >> 1
