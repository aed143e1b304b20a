"""What simulated ranks bring to a collective, whether it fits together, and what each takes home."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.collectives import Ranks, reduce_stack


@dataclass(frozen=True)
class Call:
    """One rank's part in a collective: an all-reduce if there is a `reduce_op`, else an all-to-all."""

    tensor: Tensor
    reduce_op: str = ""
    send_counts: tuple[int, ...] = ()
    recv_counts: tuple[int, ...] = ()

    def __str__(self) -> str:
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        if self.reduce_op:
            return f"all_reduce {self.reduce_op} of {dtype} {tuple(self.tensor.shape)}"
        return f"all_to_all of {dtype}, send counts {self.send_counts}, receive counts {self.recv_counts}"

    def check(self, ranks: Ranks) -> None:
        """Assert what one rank alone can see to be wrong."""
        if self.reduce_op:
            return
        assert len(self.send_counts) == len(self.recv_counts) == len(ranks), f"{self} among ranks {ranks}"
        assert self.tensor.shape == (sum(self.send_counts),), f"{self}: the tensor is {self.tensor.shape}"


def disagreement(ranks: Ranks, calls: Mapping[int, Call]) -> str | None:
    """What keeps the calls of `ranks` from being one collective; None if nothing does."""
    signatures = {
        (call.reduce_op, call.tensor.dtype, call.tensor.shape if call.reduce_op else ()) for call in calls.values()
    }
    if len(signatures) > 1:
        return "all ranks must make the same call"
    if calls[ranks[0]].reduce_op:
        return None
    for i, source in enumerate(ranks):
        for j, target in enumerate(ranks):
            sent, expected = calls[source].send_counts[j], calls[target].recv_counts[i]
            if sent != expected:
                return f"rank {source} sends {sent} elements to rank {target}, which expects {expected}"
    return None


def results(calls: Sequence[Call]) -> list[Tensor]:
    """What each rank of the group gets, in group order; no two share memory with each other or a sender."""
    with torch.no_grad():
        if calls[0].reduce_op:
            total = reduce_stack(torch.stack([call.tensor for call in calls]), calls[0].reduce_op)
            return [total, *(total.clone() for _ in calls[1:])]
        pieces = [call.tensor.split(list(call.send_counts)) for call in calls]
        return [torch.cat(incoming) for incoming in zip(*pieces, strict=True)]
