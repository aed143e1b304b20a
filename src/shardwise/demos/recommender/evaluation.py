"""The quality of a distributed model, without gathering its tables or its scores."""

from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import collectives
from shardwise.demos.data import Batch, PyIdent, Quality, examples, quality
from shardwise.demos.recommender.model import Recommender
from shardwise.layout import PARTIAL, Box, Mesh, Shard, chunk
from shardwise.tensor import DTensor

BATCH_SIZE = 512


def evaluate(model: Recommender, data: PyIdent, mesh: Mesh) -> Quality:
    """The quality on the functions of held-out files; every rank gets it.

    Raises:
        ValueError: nothing is held out.
    """
    return quality(torch.cat([places(model, batch, mesh) for batch in examples(data, "test").batches(BATCH_SIZE)]))


@torch.no_grad()
def places(model: Recommender, batch: Batch, mesh: Mesh) -> Tensor:
    """The place of each target among the identifiers outside its context, as `shardwise.demos.data.places` counts it.

    Each rank compares its local scores, sharded by rows or by identifiers, with the target's score. Two
    all-reduces of one number per example are all that is sent.
    """
    scores = sharded(F.linear(hidden(model, batch, mesh), model.table("items"), model.log_popularity))
    (box,) = scores._layout.boxes(collectives.rank())
    own = scores.to_local()
    mine = _inside(box, torch.arange(len(batch)), batch.target)
    target = own.new_zeros(len(batch))
    target[mine] = own[_local(box, mine.nonzero().squeeze(1), batch.target[mine])]
    target = _sum(target, mesh)
    # As there: not `>=`, so that a nan is the worst; and what is equal to the target counts as ahead of it.
    ahead = ~(own < target[box.offsets[0] : box.offsets[0] + box.sizes[0], None])
    row = batch.context_rows
    seen = _inside(box, row, batch.context_ids)
    ahead[_local(box, row[seen], batch.context_ids[seen])] = False
    count = torch.zeros(len(batch), dtype=torch.int64)
    count[box.offsets[0] : box.offsets[0] + box.sizes[0]] = ahead.sum(1)
    return _sum(count, mesh)


def own_rows(batch: Batch, mesh: Mesh) -> Batch:
    """The rows of this rank, of a batch that is the same on every rank: as `torch.chunk` divides them, maybe none."""
    ends = [0, *accumulate(chunk(len(batch), mesh.size()))]
    position = mesh.ranks.index(collectives.rank())
    return batch.rows(ends[position], ends[position + 1])


def hidden(model: Recommender, batch: Batch, mesh: Mesh) -> DTensor:
    """What the items are multiplied with: (rows, dim), sharded by rows."""
    local = model.hidden(own_rows(batch, mesh))
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(len(batch), local.shape[1]))


def sharded(scores: Tensor) -> DTensor:
    """`scores` with every element on one rank: Partial and replicated ones become Shard(0)."""
    assert isinstance(scores, DTensor)
    return scores if isinstance(scores.placements[0], Shard) else scores.redistribute(placements=[Shard(0)])


def _inside(box: Box, row: Tensor, column: Tensor) -> Tensor:
    first, size = box.offsets, box.sizes
    by_row = (row >= first[0]) & (row < first[0] + size[0])
    return by_row & (column >= first[1]) & (column < first[1] + size[1])


def _local(box: Box, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
    return row - box.offsets[0], column - box.offsets[1]


def _sum(own: Tensor, mesh: Mesh) -> Tensor:
    return DTensor.from_local(own, mesh, [PARTIAL], run_check=False, shape=own.shape).full_tensor()


@torch.no_grad()
def neighbours(model: Recommender, data: PyIdent, words: tuple[str, ...], count: int) -> dict[str, tuple[str, ...]]:
    """The best-scored identifiers for each of `words`, ignoring popularity; unknown words are left out."""
    known = [word for word in words if word in data.vocab]
    ids = torch.tensor([data.vocab.index(word) for word in known], dtype=torch.int64)
    scores = F.linear(F.embedding(ids, model.table("context")), model.table("items"))
    assert isinstance(scores, DTensor)
    scores = scores.full_tensor()
    scores[torch.arange(len(ids)), ids] = -torch.inf
    best = scores.topk(min(count, scores.shape[1] - 1)).indices.tolist()
    return {word: tuple(data.vocab[i] for i in row) for word, row in zip(known, best, strict=True)}
