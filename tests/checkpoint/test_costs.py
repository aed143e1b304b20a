"""A rank reads the bytes that it needs, once, into memory as large as they are."""

import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from textwrap import dedent
from typing import Any
from uuid import uuid4
from zlib import crc32 as zlib_crc32

import pytest
import torch
from isal.isal_zlib import crc32 as isal_crc32
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._collectives import agreement
from shardwise._layout import Layout, Mesh, Shard
from shardwise.checkpoint import files, load, manifest, read_manifest, save, sources
from shardwise.checkpoint.local_files import LocalFile
from shardwise.checkpoint.object_store import ObjectStore
from shardwise.errors import CheckpointError
from shardwise.testing import world
from shardwise.testing.local_shards import local_tensor
from tests.checkpoint.states import bits, blank, counted_reads, distributed, layouts, values
from tests.timeouts import PATIENCE_SECONDS

ROWS, COLUMNS = 23, 3  # rows of 12 bytes; a crc32 of each 16


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (files, manifest, sources):
        monkeypatch.setattr(module, "CRC_BYTES", 16)
    monkeypatch.setattr(files, "BLOCK_BYTES", 8)
    monkeypatch.setattr(sources, "WINDOW_BYTES", 8)


def save_rows(folder: Path, size: int) -> Path:
    layout = Layout(Mesh((size,)), [Shard(0)], (ROWS, COLUMNS))
    return save(folder, {"x": distributed(values((ROWS, COLUMNS)), layout)}, step=1)


def load_rows(path: Path, layout: Layout) -> None:
    x = blank(layout)
    load(path, {"x": x})
    assert bits(x) == bits(local_tensor(values((ROWS, COLUMNS)), layout, collectives.rank()))


def test_one_checksum_of_a_long_chunk_is_read_as_well(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Version 1 of the format has no others."""
    path = world(1).run(save_rows, tmp_path, 1)[0]
    request.getfixturevalue("small_blocks")
    world(2).run(load_rows, path, Layout(Mesh((2,)), [Shard(0)], (ROWS, COLUMNS)))


@pytest.mark.usefixtures("small_blocks")
def test_long_chunks_have_several_checksums_and_are_loaded_in_every_layout(tmp_path: Path) -> None:
    path = world(2).run(save_rows, tmp_path, 2)[0]
    chunks = read_manifest(path).tensors["x"].chunks
    assert [len(chunk.crcs) for chunk in chunks] == [12 * 12 // 16, -(-11 * 12 // 16)]
    data = local_tensor(values((ROWS, COLUMNS)), Layout(Mesh((2,)), [Shard(0)], (ROWS, COLUMNS)), 0).numpy().tobytes()
    assert chunks[0].crcs == tuple(zlib_crc32(data[at : at + 16]) for at in range(0, len(data), 16))
    for size in (1, 2, 4):
        for layout in layouts(size, (ROWS, COLUMNS)):
            world(size).run(load_rows, path, layout)


@pytest.mark.usefixtures("small_blocks")
def test_a_rank_reads_only_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks, which it verifies."""
    path = world(1).run(save_rows, tmp_path, 1)[0]
    count = counted_reads(monkeypatch)
    layout = Layout(Mesh((4,)), [Shard(0, sizes=(1, 0, 20, 2))], (ROWS, COLUMNS))
    world(4).run(load_rows, path, layout)
    header = 8 + int.from_bytes(next(path.glob("*.safetensors")).read_bytes()[:8], "little")
    assert 1 not in count
    assert count[0] == header + 16
    assert count[2] == header + 256  # rows 1 to 21 are bytes 12 to 252
    assert count[3] == header + 276 - 240


@pytest.mark.usefixtures("small_blocks")
def test_damage_is_found_by_the_ranks_that_need_it(tmp_path: Path) -> None:
    path = world(1).run(save_rows, tmp_path, 1)[0]
    file = path / "rank-0000.safetensors"
    data = bytearray(file.read_bytes())
    start = len(data) - ROWS * COLUMNS * 4
    halves = Layout(Mesh((2,)), [Shard(0)], (ROWS, COLUMNS))  # 12 rows, 144 bytes, 9 blocks
    for at in range(0, ROWS * COLUMNS * 4, 7):
        file.write_bytes(data[: start + at] + bytes([data[start + at] ^ 1]) + data[start + at + 1 :])

        def body(rank: int = int(at >= 144), block: int = at // 16 * 16) -> None:
            with pytest.raises(CheckpointError) as caught:
                load(path, {"x": (x := blank(halves))})
            text = f"rank {rank}: {file}: the data of 'x' is damaged in bytes {block} to {min(block + 16, 276)}: "
            assert text in str(caught.value)
            assert "rank 0" not in str(caught.value) or not rank
            assert set(bits(x)) == set(bits(blank(halves)))

        world(2).run(body)


def test_small_neighbors_are_read_by_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"{number}": values((4, 3), number) for number in range(40)}
    path, counts = save(tmp_path, state, step=1), list[int]()
    plain_read = LocalFile.read_into

    def counting(file: LocalFile, buffer: memoryview, offset: int) -> None:
        counts.append(len(buffer))
        plain_read(file, buffer, offset)

    monkeypatch.setattr(LocalFile, "read_into", counting)
    found = {name: torch.zeros(4, 3) for name in state}
    load(path, found)
    assert {name: bits(x) for name, x in found.items()} == {name: bits(x) for name, x in state.items()}
    assert len(counts) == 3  # the manifest, the header, the data
    assert counts[-1] == 40 * 48


@pytest.mark.usefixtures("small_blocks")
def test_several_requests_of_an_object_store_are_made_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first read of data waits until another one has begun."""
    x, url, loading = values((64, 4)), f"memory://{uuid4().hex}", threading.current_thread()
    save(url, {"x": x}, step=1)
    plain_read, first, second = ObjectStore.read, threading.Lock(), threading.Event()

    def waiting(store: ObjectStore, *args: Any) -> bytes:
        if threading.current_thread() is not loading:
            if first.acquire(blocking=False):
                assert second.wait(PATIENCE_SECONDS)
            second.set()
        return plain_read(store, *args)

    monkeypatch.setattr(ObjectStore, "read", waiting)
    load(url, {"x": (found := torch.zeros(64, 4))})
    assert bits(found) == bits(x)


@pytest.mark.parametrize("size", [2, 64])
def test_what_a_rank_receives_on_saving_does_not_grow_with_the_ranks(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of checkpoints, but for those to the first rank."""
    received = Counter[int]()
    exchange, broadcast = collectives.exchange_messages, collectives.broadcast

    def counted_exchange(send: Tensor, sent: list[int], expected: list[int], ranks: tuple[int, ...]) -> Tensor:
        received[collectives.rank()] += sum(count > 0 for count in expected)
        return exchange(send, sent, expected, ranks)

    def counted_broadcast(x: Tensor, count: int, root: int, ranks: tuple[int, ...]) -> Tensor:
        received[collectives.rank()] += 1
        return broadcast(x, count, root, ranks)

    monkeypatch.setattr(agreement, "exchange_messages", counted_exchange)
    monkeypatch.setattr(collectives, "broadcast", counted_broadcast)
    world(size).run(
        lambda: save(tmp_path, {"x": torch.ones(3), "y": distributed(torch.ones(size), rows(size))}, step=1)
    )
    assert {received[rank] for rank in range(1, size)} == {2}  # to begin, and what became of it


def rows(size: int) -> Layout:
    return Layout(Mesh((size,)), [Shard(0)], (size,))


WITHOUT_ISAL = """
    import sys
    sys.modules["isal"] = None
    import torch
    from shardwise.checkpoint import files, load
    assert files.crc32.__module__ == "zlib"
    x = torch.zeros(3)
    load(sys.argv[1], {"x": x})
    assert x.tolist() == [1, 2, 3]
"""


@pytest.mark.processes
def test_a_checkpoint_is_read_without_the_extra(tmp_path: Path) -> None:
    assert vars(files)["crc32"] is isal_crc32
    save(tmp_path, {"x": torch.tensor([1.0, 2.0, 3.0])}, step=1)
    subprocess.run([sys.executable, "-c", dedent(WITHOUT_ISAL), str(tmp_path)], check=True)


# Not ru_maxrss: that of a new process begins with the peak of the one that started it.
PEAKS = """
    import sys, torch
    from pathlib import Path

    torch.set_num_threads(1)
    base, rows, columns = Path(sys.argv[1]), 1 << 16, 512                 # 128 MiB

    def peak():
        status = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in status if line.startswith("VmHWM:")).split()[1])

    def memory():
        # Of this process; `peak` begins here.
        Path("/proc/self/clear_refs").write_text("5")
        return peak()
"""

RANKS = """
    from shardwise import _collectives as collectives
    from shardwise.checkpoint import export_table, load, save
    from shardwise._layout import Layout, Mesh, Shard
    from shardwise._tensor import plain
    from shardwise.testing import world
    from tests.checkpoint.states import blank

    def measured(what, work, dim, size):
        def body():
            x = blank(Layout(Mesh((size,)), [Shard(dim)], (rows, columns)))
            collectives.barrier(range(size))
            before = memory()
            collectives.barrier(range(size))
            work(x)
            collectives.barrier(range(size))
            assert bool((plain(x) == 7).all())
            return peak() - before - (4 * rows * columns if "load" in what else 0)

        print(f"{what}: {max(world(size).run(body))}")

    for dim in (0, 1):
        measured(f"save, dim {dim}", lambda x: save(base / str(dim), {"x": x}, step=1), dim, 2)
        measured(f"load, dim {dim}", lambda x: load(base / str(dim), {"x": x}), dim, 2)
        measured(f"export, dim {dim}", lambda x: export_table(x, "x", base / f"{dim}.safetensors"), dim, 2)
    measured("load columns of rows", lambda x: load(base / "0", {"x": x}), 1, 3)
    measured("load rows of columns", lambda x: load(base / "1", {"x": x}), 0, 3)
"""

OFFLINE = """
    from shardwise.checkpoint import save
    from shardwise.checkpoint.offline import (
        diff, export_file, export_hugging_face, export_torch, import_safetensors, import_torch, reshard, verify
    )
    from shardwise._layout import Layout, Mesh, Shard

    def steps(source, folder, rows):
        folder.mkdir()

        def layouts(size, dim):
            return {"x": Layout(Mesh((size,)), [Shard(dim)], (rows, columns))}

        yield "reshard to rows", lambda: reshard(source, folder / "rows", 3, layouts(3, 0))
        yield "reshard to columns", lambda: reshard(folder / "rows", folder / "columns", 4, layouts(4, 1))
        yield "reshard to one rank", lambda: reshard(folder / "columns", folder / "one", 1)
        yield "verify", lambda: verify(folder / "columns")
        yield "diff", lambda: diff(folder / "rows", folder / "columns")
        yield "export a file", lambda: export_file(folder / "columns", folder / "x.safetensors")
        yield "export for Hugging Face", lambda: export_hugging_face(folder / "columns", folder / "hugging-face")
        yield "export in bfloat16", lambda: export_hugging_face(
            folder / "columns", folder / "brain", dtype=torch.bfloat16
        )
        yield "export in float64", lambda: export_torch(folder / "columns", folder / "double", dtype=torch.float64)
        yield "export for torch", lambda: export_torch(folder / "columns", folder / "torch")
        yield "import safetensors", lambda: import_safetensors(folder / "x.safetensors", folder / "imported", prefix="")
        yield "import from torch", lambda: import_torch(
            folder / "torch", folder / "torch-imported", allow_pickle_metadata=True
        )

    for name, count in (("small", 64), ("large", rows)):  # first what is imported on first use
        save(base / name, {"model": {"x": torch.ones(count, columns)}}, step=1)
        for what, work in steps(base / name, base / f"of-{name}", count):
            before = memory()
            work()
            if name == "large":
                print(f"{what}: {peak() - before}")
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("code", "count", "limit"), [(RANKS, 8, 48 << 20), (OFFLINE, 12, 32 << 20)])
def test_peak_memory(tmp_path: Path, code: str, count: int, limit: int) -> None:
    """Beside the tensors, of each step with 128 MiB."""
    command = [sys.executable, "-c", dedent(PEAKS) + dedent(code), str(tmp_path)]
    # Blocks from 1 MiB go back to the system when they are freed. By default glibc soon keeps them in the heaps of
    # threads: then a peak has their holes as well, which depend on the order in which threads happen to run.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert not done.returncode, done.stderr
    peaks = {what: int(found) for what, found in (line.split(": ") for line in done.stdout.splitlines())}
    assert len(peaks) == count
    assert {what: found for what, found in peaks.items() if found > limit} == {}
