"""Message 1 of two requests: in each segment (owner, stack) the runs of the first, then those of the second."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.embedding.exchange.requests import Outgoing, ranges
from shardwise.embedding.exchange.results import ResultIndex


def merged(first: Outgoing, second: Outgoing, widths: Sequence[int]) -> Outgoing:
    """One request of both, whose results are added up.

    Args:
        widths: of a run of each segment, in units.
    """
    width = torch.tensor(widths, device=first.rows.device)
    pair = (first, second)
    run_counts, id_counts = [_counts(one.runs) for one in pair], [_counts(one.ids) for one in pair]
    sent = [counts.to(width.device) * width for counts in run_counts]
    return Outgoing(
        _interleaved([_lengths(one) for one in pair], run_counts),
        _interleaved([first.rows, second.rows], id_counts),
        None,
        _bounds(run_counts[0] + run_counts[1]),
        _bounds(id_counts[0] + id_counts[1]),
        _results(first.results, second.results, sent),
    )


def _counts(bounds: Sequence[int]) -> Tensor:
    return torch.tensor(bounds).diff()


def _bounds(counts: Tensor) -> list[int]:
    found: list[int] = F.pad(counts.cumsum(0), (1, 0)).tolist()
    return found


def _lengths(outgoing: Outgoing) -> Tensor:
    return torch.ones_like(outgoing.rows) if outgoing.lengths is None else outgoing.lengths


def _interleaved(pair: Sequence[Tensor], counts: Sequence[Tensor]) -> Tensor:
    """In each segment what the first has, then what the second has."""
    first, second = (x.split(n.tolist()) for x, n in zip(pair, counts, strict=True))
    return torch.cat([part for of_segment in zip(first, second, strict=True) for part in of_segment])


def _results(first: ResultIndex, second: ResultIndex, sent: Sequence[Tensor]) -> ResultIndex:
    """Where the results of both belong; `sent` has the units of message 3 in each segment, of each request."""
    pair = (first, second)
    replies, received = None, list(sent)
    if first.replies is not None and second.replies is not None:
        replies = _interleaved([first.replies, second.replies], sent)
        received = [_within(r.replies, n) for r, n in zip(pair, sent, strict=True) if r.replies is not None]
    per_target = [_sizes(r.target_offsets, r.targets) for r in pair]
    of_segments = [_within(n, counts) for n, counts in zip(per_target, sent, strict=True)]
    target_sizes = _interleaved(per_target, sent)
    sources, offsets = _joined_sources(pair, received)
    return ResultIndex(
        first.unit,
        first.num_units,
        _interleaved([r.targets for r in pair], of_segments),
        target_sizes.cumsum(0) - target_sizes,
        replies,
        sources,
        offsets,
        _sum(first.received, second.received),
        _sum(first.sent, second.sent),
    )


def _joined_sources(pair: Sequence[ResultIndex], received: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """For each unit of the output its units of message 2, which has `received` units in each segment."""
    before = [received[1].cumsum(0) - received[1], received[0].cumsum(0)]  # units of the other one
    moved = []
    for results, counts, shift in zip(pair, received, before, strict=True):
        moved.append(results.sources + torch.repeat_interleave(shift, counts)[results.sources])
    sizes = [_sizes(r.offsets, r.sources) for r in pair]
    total = sizes[0] + sizes[1]
    starts = total.cumsum(0) - total
    sources = torch.empty(sum(x.numel() for x in moved), dtype=torch.int64, device=starts.device)
    sources[ranges(starts, sizes[0])] = moved[0]
    sources[ranges(starts + sizes[0], sizes[1])] = moved[1]
    return sources, starts


def _sizes(offsets: Tensor | None, index: Tensor) -> Tensor:
    """The sizes of the lists that start at `offsets` of `index`; None: each has one."""
    if offsets is None:
        return torch.ones_like(index)
    return F.pad(offsets, (0, 1), value=index.numel()).diff()


def _within(of_units: Tensor, counts: Tensor) -> Tensor:
    """The sums of consecutive `counts` of units."""
    ends = F.pad(of_units.cumsum(0), (1, 0))
    return ends[F.pad(counts.cumsum(0), (1, 0))].diff()


def _sum(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(first, second, strict=True))
