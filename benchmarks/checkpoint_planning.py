"""What saving and loading compute for many boxes, beside what they read and write; one process, no data.

On saving, rank 0 makes the manifest of the checksums of all ranks; on loading, each rank parses it and finds
the chunks that it needs.

    python benchmarks/checkpoint_planning.py [--boxes 100000]
"""

import argparse
from collections.abc import Callable
from time import perf_counter
from typing import TypeVar

import torch
from measure import machine, print_table

from shardwise import Boxes, Layout, Mesh, Shard
from shardwise._layout import Box
from shardwise.checkpoint.manifest import as_bytes, parse
from shardwise.checkpoint.saving import Contents, Report
from shardwise.checkpoint.sources import Source, _in_files
from shardwise.checkpoint.state import LocalBoxes, held_boxes

T = TypeVar("T")
WRITERS, READERS = 64, 8


def cases(boxes: int) -> dict[str, dict[str, Layout]]:
    """Layouts with about this number of boxes on `WRITERS` ranks."""
    side = int(boxes**0.5)
    rows: list[list[Box]] = [[] for _ in range(WRITERS)]
    grid: list[list[Box]] = [[] for _ in range(WRITERS)]
    for i in range(boxes):
        rows[i % WRITERS].append(Box((2 * i, 0), (2, 8)))
    for i in range(side):
        for j in range(side):
            grid[(i + j) % WRITERS].append(Box((3 * i, 4 * j), (3, 4)))
    mesh = Mesh((WRITERS,))
    return {
        "one tensor, blocks of rows": {"x": Layout(mesh, [Boxes(rows)], (2 * boxes, 8))},
        "one tensor, a grid": {"x": Layout(mesh, [Boxes(grid)], (3 * side, 4 * side))},
        "a box a rank of each tensor": {
            f"layer.{i}": Layout(mesh, [Shard(0)], (1000, 8)) for i in range(boxes // WRITERS)
        },
    }


def timed(seconds: list[float], work: Callable[[], T]) -> T:
    start = perf_counter()
    found = work()
    seconds.append(perf_counter() - start)
    return found


def measure(layouts: dict[str, Layout]) -> list[float]:
    """Seconds of each step."""
    seconds: list[float] = []
    contents = Contents({name: torch.zeros(()) for name in layouts}, None)
    contents.tensors = {name: LocalBoxes(layout, torch.float32, ()) for name, layout in layouts.items()}
    reports: list[Report] = [(0, [(1,) for _ in held_boxes(layouts, rank)], ()) for rank in range(WRITERS)]
    manifest = timed(seconds, lambda: contents.manifest(1, reports))
    data = timed(seconds, lambda: as_bytes(manifest))
    read = timed(seconds, lambda: parse(data))
    files = timed(seconds, read.file_layouts)

    def find_chunks() -> None:
        tensors = {name: _in_files(stored, files) for name, stored in read.tensors.items()}
        source = Source("", tensors, {}, open_file=NotImplemented)  # nothing is read
        for name, stored in read.tensors.items():
            for box in Layout(Mesh((READERS,)), [Shard(0)], stored.shape).boxes(0):
                source._touching(name, box)

    timed(seconds, find_chunks)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--boxes", type=int, default=100_000)
    boxes = parser.parse_args().boxes
    columns = ("layouts", "manifest", "to bytes", "parse", "files", f"chunks of 1 of {READERS} ranks")
    rows = [(name, *(f"{s:.2f} s" for s in measure(layouts))) for name, layouts in cases(boxes).items()]
    print_table(f"About {boxes:,} boxes on {WRITERS} ranks; {machine()}", columns, rows)


if __name__ == "__main__":
    main()
