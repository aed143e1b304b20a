"""The first values of a sharded table: of a full one, or random numbers that do not depend on the layout."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from shardwise import collectives
from shardwise.embedding.configs import EmbeddingConfig
from shardwise.embedding.plan import Block

CHUNK = 1 << 12  # rows of one seed; a rank makes full chunks, of which it may need a part
RowsBetween = Callable[[int, int], Tensor]  # [rows, all columns] of a table


def draw_seed() -> int:
    """A seed of torch's generator."""
    return int(torch.randint(1 << 62, (1,)))


def seed_of_first(ranks: Sequence[int]) -> int:
    """A seed of torch's generator on the first rank, on all of them."""
    drawn = torch.tensor([draw_seed()], device="cpu").to(collectives.message_device(tuple(ranks)))
    return int(collectives.broadcast(drawn, 1, min(ranks), tuple(ranks)))


def fill(into: Tensor, block: Block, rows: RowsBetween) -> None:
    """Copy a block of a table, some rows at a time."""
    for part in by_chunk(block.rows):
        found = rows(part.start, part.stop)[:, block.cols.start : block.cols.stop]
        into[part.start - block.rows.start : part.stop - block.rows.start].copy_(found)


def by_chunk(rows: range) -> Iterator[range]:
    """`rows` in parts, each of one chunk."""
    first = rows.start
    while first < rows.stop:
        yield range(first, end := min(rows.stop, (first // CHUNK + 1) * CHUNK))
        first = end


def rows_of_full(table: Tensor) -> RowsBetween:
    """Those of a full table."""
    return lambda first, stop: table[first:stop]


def new_rows(config: EmbeddingConfig, seed: int) -> RowsBetween:
    """Those of a new table, which `config.initialize` fills."""
    return seeded_rows(config.initialize, (config.num_embeddings, config.embedding_dim), config.data_type, seed)


def seeded_rows(
    initialize: Callable[[Tensor], object], shape: Sequence[int], dtype: torch.dtype, seed: int
) -> RowsBetween:
    """Those of a new tensor, which `initialize` fills on the CPU, `CHUNK` rows at a time, each with its seed."""

    def rows(first: int, stop: int) -> Tensor:
        start = first // CHUNK * CHUNK
        chunk = torch.empty(min(CHUNK, shape[0] - start), *shape[1:], dtype=dtype)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(hash((seed, start)))
            initialize(chunk)
        return chunk[first - start : stop - start]

    return rows
