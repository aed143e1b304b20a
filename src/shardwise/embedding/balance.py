"""Row shards of equal load: `count_rows` and `balanced_rows`."""

from collections.abc import Iterable

import torch
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._layout import Shard, checked
from shardwise.embedding.batch import IdRules, features_of
from shardwise.embedding.configs import EmbeddingBagConfig, EmbeddingConfig
from shardwise.embedding.jagged import JaggedFeatures
from shardwise.errors import ArgumentError, RemoteRankError

MOST_RANKS = 1 << 16


@checked
def count_rows(config: EmbeddingConfig, batches: Iterable[JaggedFeatures]) -> Tensor:
    """The number of lookups of each row of a table in the batches of all ranks; all ranks call it.

    Args:
        batches: of this rank.

    Returns:
        int64, [rows], on the CPU; equal on all ranks.

    Raises:
        ArgumentError: a tensor as `batches`.
        IdError: an id that the table does not have, if its `bad_ids` is "error".
        IdTypeError: a batch without the table's features.
        RemoteRankError: another rank, or its loader, raised an error.
    """
    if isinstance(batches, Tensor):
        raise ArgumentError("count_rows: batches is a tensor. Fix: a list, or a loader, of KeyedJaggedTensors.")
    features = features_of([config])
    rules = IdRules(features, skips_padding=isinstance(config, EmbeddingBagConfig))
    counts, error = torch.zeros(config.num_embeddings + 1, dtype=torch.int64), None
    try:
        for given in batches:
            device = given.values().device if isinstance(given, JaggedFeatures) else torch.device("cpu")
            batch, verdict = rules.apply(features.batch(given, False, device))
            rules.raise_for([verdict])
            counts += torch.bincount(batch.values, minlength=counts.numel()).cpu()
    except Exception as raised:  # noqa: BLE001 - of a loader as well: other ranks wait for the counts
        error = raised
        counts[-1] = 1  # ranks that raised
    ranks = tuple(range(collectives.world_size()))
    counts = collectives.all_reduce(counts.to(collectives.message_device(ranks)), "sum", ranks).cpu()
    if error is not None:
        raise error
    if int(counts[-1]):
        raise RemoteRankError(
            "count_rows: another rank could not count its batches. Fix: correct what its own error says."
        )
    return counts[:-1]


@checked
def balanced_rows(counts: Tensor, ranks: int, *, max_rows: int | None = None) -> Shard:
    """Row shards whose largest load, the sum of the counts of a shard's rows, is as small as possible.

        plan = {"items": balanced_rows(count_rows(items, batches), 4)}

    Args:
        counts: of each row of a table, int64, such as those of `count_rows`; equal on all ranks.
        ranks: number of ranks along the sharded mesh axis. Some get no rows, if that is best.
        max_rows: of a rank, as its memory allows; None: no limit.

    Raises:
        ArgumentError: counts that are not 1-D int64 or are negative; no ranks; more rows than `max_rows` allows.
    """
    if counts.ndim != 1 or counts.dtype != torch.int64 or (counts.numel() and int(counts.min()) < 0):
        raise ArgumentError(
            f"balanced_rows: counts are 1-D, int64 and not negative, got {counts.ndim}-D {counts.dtype}"
            f"{' with negative ones' if counts.dtype == torch.int64 else ''}. Fix: counts as count_rows gives them."
        )
    if not 1 <= ranks <= MOST_RANKS:
        raise ArgumentError(
            f"balanced_rows: ranks must be 1 to {MOST_RANKS:,}, got {ranks:,}. "
            f"Fix: the size of the mesh axis, such as mesh.size(0)."
        )
    rows = counts.numel()
    most = rows if max_rows is None else max_rows
    if ranks * most < rows:
        raise ArgumentError(
            f"balanced_rows: {rows} rows do not fit on {ranks} ranks of at most {most}. "
            f"Fix: max_rows={-(-rows // ranks)} or more."
        )
    ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).cpu()
    low, high = -1, int(ends[-1])  # the least load that is possible is above `low`, and at most `high`
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if sum(_sizes(ends, ranks, most, middle)) == rows else (middle, high)
    return Shard(0, _sizes(ends, ranks, most, high))


def _sizes(ends: Tensor, ranks: int, most: int, load: int) -> list[int]:
    """Rows on each rank in turn, as many as have at most `load`."""
    sizes, first, rows = list[int](), 0, ends.numel() - 1
    while len(sizes) < ranks and first < rows:
        stop = int(torch.searchsorted(ends, int(ends[first]) + load, right=True)) - 1
        stop = min(stop, first + most, rows)
        if stop == first:  # no rank may hold this row
            break
        sizes.append(stop - first)
        first = stop
    return sizes + [0] * (ranks - len(sizes))
