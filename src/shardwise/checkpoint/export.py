"""One table, or another tensor, as one file for serving: streamed to the rank that writes it, a few MiB at a time."""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._layout import Box, checked
from shardwise.checkpoint.collective_errors import all_ranks, digest, on_all_ranks, require_same
from shardwise.checkpoint.files import byte_blocks, check_export_dtype, export_dtype, file_layout
from shardwise.checkpoint.local_files import naming, replaced, write_synced
from shardwise.checkpoint.locations import local_path
from shardwise.checkpoint.state import LocalBoxes, holders, storable_boxes
from shardwise.embedding import EmbeddingBagCollection, EmbeddingCollection
from shardwise.embedding.sharded import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from shardwise.errors import CheckpointError

Collection = EmbeddingBagCollection | EmbeddingCollection | ShardedEmbeddingBagCollection | ShardedEmbeddingCollection

MOST_BYTES = 1 << 23  # bytes of the file that are sent at a time


@checked
def export_table(
    collection: Collection | Tensor, table: str, path: str | PathLike[str], *, dtype: torch.dtype | None = None
) -> Path:
    """Write a full table to one safetensors file; all ranks of the world call it.

        export_table(sharded, "items", "serving/items.safetensors")

    The file has one tensor under the name of the parameter. So the `load_state_dict` of a plain collection of this
    table takes the result of `safetensors.torch.load_file`. Metadata: `table`, `rows`, `columns` and `dtype`.

    Shards are sent to rank 0, some rows at a time: no rank needs more than 48 MiB (or 3 rows) of additional memory. The
    file appears at once, when all of it is on disk, and replaces an earlier one.

    Args:
        collection: a plain or sharded one; or any tensor with rows, which gets the name `table` in the file. Of
            replicas, and of plain tensors, the values of the first rank are written.
        dtype: the dtype of floating-point values in the file, converted by `tensor.to(dtype)`; None: the table's.

    Returns:
        The path.

    Raises:
        CheckpointError: no such table, a tensor that cannot be stored, a `dtype` that is not of floating-point numbers
            or not of safetensors, or a file that cannot be written. An earlier file is then not damaged. The same text
            on every rank.
        MismatchError: ranks passed different tables, layouts, paths or dtypes.
    """
    what, target = f"Exporting {table} to {path}", local_path(path)
    key, tensor = _prepared(what, collection, table, target, dtype)
    drafts: list[Path] = []  # on the first rank
    with ExitStack() as stack:

        def begin() -> None:
            if collectives.rank() == 0:
                drafts.append(stack.enter_context(replaced(target)))
                write_synced(drafts[0], [_header(key, tensor, table)])

        def write(window: Tensor) -> None:
            for draft in drafts:
                with naming(draft), draft.open("ab") as file:
                    file.writelines(byte_blocks(window))

        def commit() -> None:
            for draft in drafts:
                write_synced(draft, [], "ab")
            stack.close()

        on_all_ranks(what, begin)
        for rows in _windows(tensor):
            on_all_ranks(what, partial(write, _window(tensor, rows)))
        on_all_ranks(what, commit)
    return target


def _prepared(
    what: str, collection: Collection | Tensor, table: str, target: Path, dtype: torch.dtype | None
) -> tuple[str, LocalBoxes]:
    """The name of the tensor in the file; the boxes of this rank, in the dtype of the file."""
    found: list[tuple[str, LocalBoxes]] = []
    facts = {"table": table, "path": str(target), "dtype": str(dtype)}

    def prepare() -> str:
        check_export_dtype(dtype)
        key, tensor = _tensor(collection, table)
        boxes = storable_boxes(key, tensor)
        if not boxes.layout.shape:
            raise CheckpointError(f"tensor {key!r} has no rows to send one after the other. Fix: export x.reshape(1)")
        found.append((key, boxes._replace(dtype=export_dtype(boxes.dtype, dtype))))
        facts["tensor"] = f"{key} {boxes.dtype} {boxes.layout!r}"
        return digest(facts)

    require_same("Exporting a table", facts, on_all_ranks(what, prepare))
    return found[0]


def _tensor(collection: Collection | Tensor, table: str) -> tuple[str, Tensor]:
    """The tensor, and its name in the file."""
    if isinstance(collection, Tensor):
        return table, collection
    names = {name.split(".")[-2]: name for name, _ in collection.named_parameters()}
    if table not in names:
        raise CheckpointError(f"there is no table {table!r}; the tables are {', '.join(names)}. Fix: name one of them")
    return names[table], collection.get_parameter(names[table])


def _header(key: str, tensor: LocalBoxes, table: str) -> bytes:
    shape = tensor.layout.shape
    about = {"table": table, "rows": str(shape[0]), "dtype": str(tensor.dtype).removeprefix("torch.")}
    if len(shape) == 2:
        about["columns"] = str(shape[1])
    return file_layout([(key, tensor.dtype, shape)], about).header


def _windows(tensor: LocalBoxes) -> Iterator[Box]:
    """The full tensor, some rows at a time."""
    rows, *inner = tensor.layout.shape
    step = max(1, MOST_BYTES // max(1, Box((0,) * len(inner), tuple(inner)).numel * tensor.dtype.itemsize))
    for first in range(0, rows, step):
        yield Box((first, *(0 for _ in inner)), (min(step, rows - first), *inner))


def _window(tensor: LocalBoxes, rows: Box) -> Tensor:
    """These rows on rank 0; elsewhere, nothing. All ranks have to call it."""
    rank, ranks, layout = collectives.rank(), all_ranks(), tensor.layout
    parts = [view[at.relative_to(box)] for box, view in tensor.views for at in _sent(tensor, rank, box, rows)]
    device = collectives.message_device(ranks)
    raw = (part.to(tensor.dtype).cpu().contiguous().reshape(-1).view(torch.uint8) for part in parts)
    sent = torch.cat([torch.empty(0, dtype=torch.uint8), *raw]).to(device)
    boxes = [
        [at for box in layout.boxes(source) for at in _sent(tensor, source, box, rows)]
        for source in (ranks if rank == 0 else ())
    ]
    counts = [sum(box.numel for box in of_rank) * tensor.dtype.itemsize for of_rank in boxes] or [0] * len(ranks)
    received = collectives.all_to_all(sent, [len(sent), *[0] * (len(ranks) - 1)], counts, ranks).cpu()
    if rank != 0:
        return received[:0]
    window, done = torch.empty(rows.sizes, dtype=tensor.dtype), 0
    for box in (box for of_rank in boxes for box in of_rank):
        size = box.numel * tensor.dtype.itemsize
        part = received[done : done + size].clone().view(tensor.dtype)  # aligned
        window[box.relative_to(rows)] = part.view(box.sizes)
        done += size
    return window


def _sent(tensor: LocalBoxes, rank: int, box: Box, rows: Box) -> list[Box]:
    """The part of a box that `rank` sends: nothing if another rank that holds it does."""
    if not box.numel or holders(tensor.layout, rank)[0] != rank:
        return []
    common = box.intersect(rows)
    return [] if common is None or not common.numel else [common]
