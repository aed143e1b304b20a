"""Lookups in a cut table: requests to the ranks that hold the rows, and their answers.

One lookup has three parts with an exchange between each two, so that several lookups can share theirs:

    request  ids for every owner, deduplicated where rows come back, whole bags where pooled sums come back
    serve    an owner looks up, or pools, what others asked for
    finish   the asking rank puts the answers together

All of it is ordinary autograd: the backward of the answers' exchange carries the gradients of the rows (or
sums) to their owners, and the owner's own lookup makes a gradient of the size of its shard, sparse if asked.
Every request starts with a verdict on the sender's ids, so an id outside the table raises the same error on
all ranks before any row has moved.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.boxes import Box
from shardwise.errors import IdError, IdTypeError
from shardwise.layout import Layout
from shardwise.placement import Boxes, OnRanks, Shard
from shardwise.rules.row import Site

HEADER = 3  # int64 words before the ids: how many ids follow, position of the first bad id or -1, that id
PADDED_LIMIT = 1 << 20  # bytes of ids up to which padding them is cheaper than one more collective for counts


@dataclass(frozen=True)
class Bags:
    """How ids form bags."""

    mode: str
    offsets: Tensor | None  # where each bag starts, counted from this rank's first id; None for 2-D ids
    include_last_offset: bool = False

    def fit(self, num_ids: int) -> bool:
        """Whether the bags are made of this rank's ids, all of them and no others."""
        if self.offsets is None:
            return True
        if self.offsets.numel() == 0:
            return num_ids == 0
        rising = bool((self.offsets.diff() >= 0).all())
        return rising and int(self.offsets[0]) == 0 and int(self.offsets[-1]) <= num_ids


@dataclass(frozen=True)
class Request:
    """One lookup under way on one rank."""

    site: Site
    ids: Tensor
    weight: Tensor
    bags: Bags | None
    sparse: bool
    axes: tuple[int, ...]  # the mesh axes on which ids travel
    ranks: tuple[int, ...]  # the ranks that share them
    owners: tuple[Box, ...]  # what each of `ranks` holds of the table; empty boxes for nothing
    pooled: bool  # whole bags go to the owners and sums come back
    rows: Tensor  # sorted different ids (pooled: unused)
    inverse: Tensor  # where each id is among `rows`


# ---- entry points: the local functions of the rules --------------------------------------------------------


def embedding(
    site: Site,
    input: Tensor,
    weight: Tensor,
    padding_idx: None = None,
    max_norm: None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """The local function of `F.embedding`: the op's own arguments, on locals."""
    return _lookup(site, input, weight, None, sparse)


def embedding_bag(
    site: Site,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: None = None,
    include_last_offset: bool = False,
    padding_idx: None = None,
) -> Tensor:
    """The local function of `F.embedding_bag`."""
    bags = Bags(mode, _from_own_first_id(site, offsets), include_last_offset)
    return _lookup(site, input, weight, bags, sparse)


def _lookup(site: Site, ids: Tensor, weight: Tensor, bags: Bags | None, sparse: bool) -> Tensor:
    _check_devices(site, ids, weight)
    if not travelling_axes(site):
        raise_bad_ids(site, _verdict_everywhere(site, ids, bags))
        return _lookup_here(site, ids, weight, bags, sparse)
    (out,) = lookup_together([(site, ids, weight, bags, sparse)])
    return out


Call = tuple[Site, Tensor, Tensor, Bags | None, bool]  # site, ids, table, bags, sparse gradients


def lookup_together(calls: Sequence[Call]) -> list[Tensor]:
    """Several lookups over the same ranks with one exchange of ids and one of answers."""
    requests = [_request(*call) for call in calls]
    site, ranks = requests[0].site, requests[0].ranks
    asked = _exchange_ids(site, ranks, requests)
    answers = [_serve(request, ids) for request, ids in zip(requests, asked, strict=True)]
    received = _exchange_answers(site, ranks, requests, answers, asked)
    return [_finish(request, blocks) for request, blocks in zip(requests, received, strict=True)]


def bag_call(site: Site, args: Sequence[Any], kwargs: dict[str, Any]) -> Call:
    """The lookup that a call of `F.embedding_bag` asks for, for `lookup_together`."""
    names = ("input", "weight", "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    offsets = given.get("offsets")
    bags = Bags(given.get("mode", "mean"), _from_own_first_id(site, offsets), given.get("include_last_offset", False))
    return site, given["input"], given["weight"], bags, given.get("sparse", False)


def _from_own_first_id(site: Site, offsets: Tensor | None) -> Tensor | None:
    if offsets is None:
        return None
    (box,) = site.layouts[0].boxes(site.rank)
    return offsets - box.offsets[0]


def travelling_axes(site: Site) -> tuple[int, ...]:
    """The mesh axes on which ids and table are both cut."""
    ids, table = site.layouts[0].placements, site.layouts[1].placements
    return tuple(
        axis
        for axis, (a, b) in enumerate(zip(ids, table, strict=True))
        if isinstance(a, Shard) and isinstance(b, Shard | OnRanks | Boxes)
    )


# ---- request ------------------------------------------------------------------------------------------------


def _request(site: Site, ids: Tensor, weight: Tensor, bags: Bags | None, sparse: bool) -> Request:
    axes = travelling_axes(site)
    ranks = site.ranks(axes)
    nothing = Box((0, 0), (0, 0))
    owners = tuple((site.layouts[1].boxes(rank) or (nothing,))[0] for rank in ranks)
    num_rows = site.layouts[1].shape[0]
    holders = [box for box in owners if box.numel]
    pooled = bags is not None and bool(holders) and all(box.sizes[0] == num_rows for box in holders)
    rows = inverse = ids
    if not pooled:
        rows, inverse = _different(ids.reshape(-1))
    return Request(site, ids, weight, bags, sparse, axes, ranks, owners, pooled, rows, inverse)


def _different(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The different ids in rising order, and the place of each id among them (sorting beats hashing here)."""
    in_order, order = ids.sort()
    rows, places = torch.unique_consecutive(in_order, return_inverse=True)
    return rows, torch.empty_like(places).index_copy_(0, order, places)


def _exchange_ids(site: Site, ranks: tuple[int, ...], requests: Sequence[Request]) -> list[list[Tensor]]:
    """For every request, the ids (pooled: ids and offsets) that each rank asks this one for."""
    messages = [_messages(request) for request in requests]  # [request][owner]
    me = ranks.index(site.rank)
    send = [[m[o].numel() for m in messages] for o in range(len(ranks))]
    capacity = [[_capacity(r, sender, me) for r in requests] for sender in range(len(ranks))]
    largest = max(sum(_capacity(r, s, o) for r in requests) for s in range(len(ranks)) for o in range(len(ranks)))
    if largest * len(ranks) * 8 <= PADDED_LIMIT:
        messages = [
            [F.pad(m, (0, _capacity(r, me, o) - m.numel())) for o, m in enumerate(row)]
            for r, row in zip(requests, messages, strict=True)
        ]
        lengths = capacity
    else:
        counts = site.exchange(
            torch.tensor(send).reshape(-1), [len(requests)] * len(ranks), [len(requests)] * len(ranks), ranks
        )
        lengths = counts.view(len(ranks), len(requests)).tolist()
    flat = torch.cat([m[o] for o in range(len(ranks)) for m in messages])
    send_counts = [sum(m[o].numel() for m in messages) for o in range(len(ranks))]
    received = site.exchange(flat, send_counts, [sum(row) for row in lengths], ranks)
    pieces = iter(received.split([n for row in lengths for n in row]))
    by_sender = [[next(pieces) for _ in requests] for _ in ranks]
    for index, request in enumerate(requests):
        raise_bad_ids(request.site, _worst([row[index][:HEADER].tolist() for row in by_sender], ranks))
    return [[_payload(row[index]) for row in by_sender] for index in range(len(requests))]


def _capacity(request: Request, sender: int, owner: int) -> int:
    """The most words that a rank can send an owner, known to both from the layouts alone."""
    box = request.owners[owner]
    if box.numel == 0:
        return HEADER
    numel = request.site.layouts[0].local_numel(request.ranks[sender])
    if not request.pooled:
        return HEADER + min(numel, box.sizes[0])
    return HEADER + numel + (_num_offsets(request, sender) if _has_offsets(request) else 0)


def _has_offsets(request: Request) -> bool:
    return request.bags is not None and request.bags.offsets is not None


def _num_offsets(request: Request, sender: int) -> int:
    return request.site.layouts[2].local_numel(request.ranks[sender])


def _messages(request: Request) -> list[Tensor]:
    """One message an owner: header, then row numbers in the owner's own count (pooled: and offsets)."""
    site, ids = request.site, request.ids.reshape(-1)
    position, bad = _first_bad(site, ids, request.bags)
    header = [position, bad]
    messages = []
    for box in request.owners:
        if box.numel == 0 or position != FINE:
            words = ids.new_empty(0)
        elif request.pooled:
            parts = (
                [ids]
                if request.bags is None or request.bags.offsets is None
                else [ids, request.bags.offsets.to(ids.dtype)]
            )
            words = torch.cat(parts)
        else:
            ends = torch.tensor(
                [box.offsets[0], box.offsets[0] + box.sizes[0]], dtype=request.rows.dtype, device=ids.device
            )
            start, stop = torch.searchsorted(request.rows, ends).tolist()
            words = request.rows[start:stop] - box.offsets[0]
        head = torch.tensor([words.numel(), *header], dtype=torch.int64, device=ids.device)
        messages.append(torch.cat([head, words.long()]))
    return messages


def _payload(message: Tensor) -> Tensor:
    return message[HEADER : HEADER + int(message[0])]


# ---- serve --------------------------------------------------------------------------------------------------


def _serve(request: Request, asked: Sequence[Tensor]) -> list[Tensor]:
    """What this rank answers each rank: rows, or pooled sums, of its own columns."""
    weight, me = request.weight, request.ranks.index(request.site.rank)
    if request.owners[me].numel == 0:
        nothing = _nothing_from(weight, request.sparse)
        return [nothing for _ in asked]
    if not request.pooled:
        found = F.embedding(torch.cat(list(asked)), weight, sparse=request.sparse)
        return list(found.split([ids.numel() for ids in asked]))
    assert request.bags is not None
    sums = _pool(request, asked)
    return list(sums.split([_num_bags(request, sender) for sender in range(len(asked))]))


def _nothing_from(weight: Tensor, sparse: bool) -> Tensor:
    """No rows, yet looked up, so that every rank's backward is the same and every rank has a gradient."""
    return F.embedding(torch.empty(0, dtype=torch.int64, device=weight.device), weight, sparse=sparse)


def _pool(request: Request, asked: Sequence[Tensor]) -> Tensor:
    bags = request.bags
    assert bags is not None
    if bags.offsets is None:
        width = request.site.layouts[0].shape[1]
        bag_rows = torch.cat(list(asked)).view(-1, width)
        if width == 0:
            nothing = _nothing_from(request.weight, request.sparse).sum()
            return request.weight.new_zeros(bag_rows.shape[0], request.weight.shape[1]) + nothing
        return F.embedding_bag(bag_rows, request.weight, mode=bags.mode, sparse=request.sparse)
    ids: list[Tensor] = []
    offsets: list[Tensor] = []
    before = 0
    for sender, words in enumerate(asked):
        count = _num_offsets(request, sender)
        own, starts = words[: words.numel() - count], words[words.numel() - count :]
        ids.append(own)
        offsets.append(starts[: count - bags.include_last_offset] + before)
        before += own.numel()
    return F.embedding_bag(torch.cat(ids), request.weight, torch.cat(offsets), mode=bags.mode, sparse=request.sparse)


def _num_bags(request: Request, sender: int) -> int:
    if _has_offsets(request):
        assert request.bags is not None
        return _num_offsets(request, sender) - request.bags.include_last_offset
    return request.site.layouts[0].local_shape(request.ranks[sender])[0]


# ---- finish -------------------------------------------------------------------------------------------------


def _exchange_answers(
    site: Site,
    ranks: tuple[int, ...],
    requests: Sequence[Request],
    answers: Sequence[Sequence[Tensor]],
    asked: Sequence[Sequence[Tensor]],
) -> list[list[Tensor]]:
    """For every request, this rank's blocks of rows (sums) from each owner."""
    expected = [[_expected(request, owner) for request in requests] for owner in range(len(ranks))]
    flat = torch.cat([answer[o].reshape(-1) for o in range(len(ranks)) for answer in answers])
    send_counts = [sum(answer[o].numel() for answer in answers) for o in range(len(ranks))]
    received = site.exchange(flat, send_counts, [sum(r * c for r, c in row) for row in expected], ranks)
    pieces = iter(received.split([r * c for row in expected for r, c in row]))
    blocks = [[next(pieces).view(shape) for shape in row] for row in expected]
    return [[row[index] for row in blocks] for index in range(len(requests))]


def _expected(request: Request, owner: int) -> tuple[int, int]:
    box, me = request.owners[owner], request.ranks.index(request.site.rank)
    if box.numel == 0:
        return 0, 0
    if request.pooled:
        return _num_bags(request, me), box.sizes[1]
    start, stop = box.offsets[0], box.offsets[0] + box.sizes[0]
    return int(((request.rows >= start) & (request.rows < stop)).sum()), box.sizes[1]


def _finish(request: Request, blocks: Sequence[Tensor]) -> Tensor:
    held = [(box, block) for box, block in zip(request.owners, blocks, strict=True) if box.numel]
    held.sort(key=lambda item: item[0].offsets)
    bands = []  # by rows, then by columns
    for _, band in groupby(held, key=lambda item: (item[0].offsets[0], item[0].sizes[0])):
        columns = [block for _, block in band]
        bands.append(columns[0] if len(columns) == 1 else torch.cat(columns, 1))
    if request.pooled:
        (sums,) = bands
        return sums
    found = torch.cat(bands) if bands else _nothing_from(request.weight, request.sparse)
    places = _places(request, [box for box, _ in held])
    if places is not None:
        found, inverse = torch.cat([found, found.new_zeros(1, found.shape[1])]), places[request.inverse]
    else:
        inverse = request.inverse
    return _combine(inverse.view(request.ids.shape), found, request.bags)


def _places(request: Request, boxes: Sequence[Box]) -> Tensor | None:
    """Where the answer for each of `rows` stands, the last place being zeros; None if each has its own."""
    covered = torch.zeros_like(request.rows, dtype=torch.bool)
    for box in boxes:
        covered |= (request.rows >= box.offsets[0]) & (request.rows < box.offsets[0] + box.sizes[0])
    if bool(covered.all()):
        return None
    return torch.where(covered, covered.cumsum(0) - 1, covered.sum())


def _combine(ids: Tensor, rows: Tensor, bags: Bags | None) -> Tensor:
    if bags is None:
        return _rows_at(ids, rows)
    if rows.shape[0] == 0:
        offsets = bags.offsets
        count = ids.shape[0] if offsets is None else offsets.numel() - bags.include_last_offset
        return rows.new_zeros(count, rows.shape[1]) + rows.sum()
    return F.embedding_bag(ids, rows, bags.offsets, mode=bags.mode, include_last_offset=bags.include_last_offset)


def _rows_at(ids: Tensor, rows: Tensor) -> Tensor:
    if rows.shape[0] == 0:
        return rows.new_zeros(*ids.shape, rows.shape[1]) + rows.sum()
    return F.embedding(ids, rows)


# ---- lookups that need nobody ------------------------------------------------------------------------------


def _lookup_here(site: Site, ids: Tensor, weight: Tensor, bags: Bags | None, sparse: bool) -> Tensor:
    """This rank's rows and columns only: the foreign ids of a row-cut table add zero."""
    boxes = site.layouts[1].boxes(site.rank)
    num_rows = site.layouts[1].shape[0]
    box = boxes[0] if boxes else Box((0, 0), (0, site.layouts[1].shape[1]))
    if not box.numel:  # zeros, yet connected to the table, so that every rank has a gradient
        shape = ids.shape if bags is None else _bag_lengths(ids, bags).shape
        return weight.new_zeros(*shape, weight.shape[1]) + _nothing_from(weight, sparse).sum()
    if box.sizes[0] == num_rows:
        if bags is None:
            return F.embedding(ids, weight, sparse=sparse)
        return F.embedding_bag(
            ids,
            weight,
            bags.offsets,
            mode=bags.mode,
            sparse=sparse,
            include_last_offset=bags.include_last_offset,
        )
    flat = ids.reshape(-1)
    mine = (flat >= box.offsets[0]) & (flat < box.offsets[0] + box.sizes[0])
    own = flat[mine] - box.offsets[0]
    if bags is None:
        rows = F.embedding(own, weight, sparse=sparse)
        out = rows.new_zeros(flat.numel(), weight.shape[1]).index_copy(0, mine.nonzero().squeeze(1), rows)
        return out.view(*ids.shape, weight.shape[1])
    lengths = _bag_lengths(ids, bags)
    bag_of = torch.repeat_interleave(torch.arange(lengths.numel(), device=ids.device), lengths)
    kept = torch.bincount(bag_of[mine], minlength=lengths.numel())
    sums = F.embedding_bag(own, weight, kept.cumsum(0) - kept, mode="sum", sparse=sparse)
    return sums / lengths.clamp(min=1).unsqueeze(1) if bags.mode == "mean" else sums


def _bag_lengths(ids: Tensor, bags: Bags) -> Tensor:
    if bags.offsets is None:
        return torch.full((ids.shape[0],), ids.shape[1], device=ids.device)
    ends = bags.offsets.long()
    if not bags.include_last_offset:
        ends = torch.cat([ends, ends.new_tensor([ids.numel()])])
    return ends.diff()


# ---- ids that no table has -----------------------------------------------------------------------------------

Verdict = tuple[int, int, int]  # position in the global ids, id, rank; or one of these for the position
FINE, BAD_BAGS = -1, -2


def _first_bad(site: Site, ids: Tensor, bags: Bags | None) -> tuple[int, int]:
    """Position in the global ids and value of this rank's first id outside the table; (FINE, 0) for none."""
    if bags is not None and not bags.fit(ids.numel()):
        return BAD_BAGS, 0
    num_rows = site.layouts[1].shape[0]
    if ids.numel() == 0:
        return FINE, 0
    low, high = torch.aminmax(ids)
    if int(low) >= 0 and int(high) < num_rows:
        return FINE, 0
    local = int(((ids < 0) | (ids >= num_rows)).nonzero()[0])
    return _global_position(site.layouts[0], site.rank, local), int(ids[local])


def _global_position(layout: Layout, rank: int, local: int) -> int:
    """Row-major position in the global tensor of a rank's element number `local`."""
    (box,) = layout.boxes(rank)
    index = []
    for size in reversed(box.sizes):
        local, i = divmod(local, size)
        index.append(i)
    position = 0
    for i, offset, size in zip(reversed(index), box.offsets, layout.shape, strict=True):
        position = position * size + offset + i
    return position


def _worst(headers: Sequence[Sequence[int]], ranks: Sequence[int]) -> Verdict:
    bad = [(head[-2], head[-1], rank) for head, rank in zip(headers, ranks, strict=True) if head[-2] != FINE]
    return min(bad, default=(FINE, 0, -1))


def _verdict_everywhere(site: Site, ids: Tensor, bags: Bags | None) -> Verdict:
    """The first bad id of all ranks; asks the others only where they have ids that this rank has not."""
    position, bad = _first_bad(site, ids.reshape(-1), bags)
    axes = tuple(a for a, p in enumerate(site.layouts[0].placements) if isinstance(p, Shard))
    if not axes:
        return position, bad, site.rank
    ranks = site.ranks(axes)
    count = [2] * len(ranks)
    own = torch.tensor([position, bad], dtype=torch.int64, device=ids.device)
    every = site.exchange(own.repeat(len(ranks)), count, count, ranks)
    return _worst(every.view(-1, 2).tolist(), ranks)


def raise_bad_ids(site: Site, verdict: Verdict) -> None:
    """Raise IdError, the same on every rank, unless the verdict is that all ids are in the table."""
    position, bad, rank = verdict
    if position == FINE:
        return
    if position == BAD_BAGS:
        raise ValueError(
            f"{site.name_of(1)}: the offsets on rank {rank} do not describe bags of the ids that this rank holds: they "
            f"must rise from its first id to at most its last. Fix: cut ids and offsets between the same bags."
        )
    shape, index = site.layouts[0].shape, []
    for size in reversed(shape):
        position, i = divmod(position, size)
        index.append(i)
    where = index[0] if len(index) == 1 else tuple(reversed(index))
    held = f" (held by rank {rank})" if any(isinstance(p, Shard) for p in site.layouts[0].placements) else ""
    raise IdError(
        f"{site.name_of(1)}: id {bad} at position {where} of the ids{held} is not in the table, whose valid ids are "
        f"0 to {site.layouts[1].shape[0] - 1}. Nothing was looked up."
    )


def _check_devices(site: Site, ids: Tensor, weight: Tensor) -> None:
    if ids.device != weight.device:
        raise IdTypeError(
            f"{site.name_of(1)} is on {weight.device}, but its ids are on {ids.device}. "
            f"Fix: ids.to({str(weight.device)!r})."
        )
