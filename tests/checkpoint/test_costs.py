"""A rank reads the bytes that it needs, into the memory that it has."""

import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from zlib import crc32 as zlib_crc32

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from isal.isal_zlib import crc32 as isal_crc32

from shardwise import collectives
from shardwise.checkpoint import files, load, manifest, read_manifest, save
from shardwise.checkpoint.folder_store import _LocalFile
from shardwise.errors import CheckpointError
from shardwise.layout import Layout, Mesh, Shard
from shardwise.testing import world
from shardwise.testing.local_shards import local_tensor
from tests.checkpoint.states import bits, blank, distributed, layouts, values

ROWS, COLUMNS = 23, 3  # rows of 12 bytes; a crc32 of each 16


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (files, manifest):
        monkeypatch.setattr(module, "CRC_BYTES", 16)
    monkeypatch.setattr(files, "BLOCK_BYTES", 8)


def save_rows(folder: Path, size: int) -> Path:
    layout = Layout(Mesh((size,)), [Shard(0)], (ROWS, COLUMNS))
    return save(folder, {"x": distributed(values((ROWS, COLUMNS)), layout)}, step=1)


def load_rows(path: Path, layout: Layout) -> None:
    x = blank(layout)
    load(path, {"x": x})
    assert bits(x) == bits(local_tensor(values((ROWS, COLUMNS)), layout, collectives.rank()))


@pytest.mark.usefixtures("small_blocks")
def test_long_chunks_have_several_checksums(tmp_path: Path) -> None:
    path = world(2).run(save_rows, tmp_path, 2)[0]
    chunks = read_manifest(path).tensors["x"].chunks
    assert [len(chunk.crcs) for chunk in chunks] == [12 * 12 // 16, -(-11 * 12 // 16)]
    data = local_tensor(values((ROWS, COLUMNS)), Layout(Mesh((2,)), [Shard(0)], (ROWS, COLUMNS)), 0).numpy().tobytes()
    assert chunks[0].crcs == tuple(zlib_crc32(data[at : at + 16]) for at in range(0, len(data), 16))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_layout_loads_from_blocks(tmp_path: Path, size: int) -> None:
    path = world(3).run(save_rows, tmp_path, 3)[0]
    for layout in layouts(size, (ROWS, COLUMNS)):
        world(size).run(load_rows, path, layout)


@pytest.mark.usefixtures("small_blocks")
def test_a_rank_reads_only_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice: to verify it, in blocks, and to copy it."""
    path = world(1).run(save_rows, tmp_path, 1)[0]
    count: dict[int, int] = {}
    read_into = _LocalFile.read_into

    def counted(file: _LocalFile, buffer: memoryview, offset: int) -> None:
        if file.name.endswith(".safetensors"):
            count[collectives.rank()] = count.get(collectives.rank(), 0) + len(buffer)
        read_into(file, buffer, offset)

    monkeypatch.setattr(_LocalFile, "read_into", counted)
    layout = Layout(Mesh((4,)), [Shard(0, sizes=(1, 0, 20, 2))], (ROWS, COLUMNS))
    world(4).run(load_rows, path, layout)
    header = 8 + int.from_bytes(next(path.glob("*.safetensors")).read_bytes()[:8], "little")
    assert 1 not in count
    assert count[0] == header + 16 + 12
    assert count[2] == header + 256 + 240  # rows 1 to 21 are bytes 12 to 252
    assert count[3] == header + (276 - 240) + 24


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


def test_one_checksum_of_a_long_chunk_is_read_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 1 of the format has no others."""
    path = world(1).run(save_rows, tmp_path, 1)[0]
    for module in (files, manifest):
        monkeypatch.setattr(module, "CRC_BYTES", 16)
    world(2).run(load_rows, path, Layout(Mesh((2,)), [Shard(0)], (ROWS, COLUMNS)))


@given(st.binary(max_size=4096), st.integers(0, 4096))
def test_both_libraries_compute_the_same_checksum(data: bytes, middle: int) -> None:
    first, second = memoryview(data)[:middle], memoryview(data)[middle:]
    assert isal_crc32(second, isal_crc32(first, 0)) == zlib_crc32(data)


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


PEAK = """
    import resource, sys, torch
    from shardwise import collectives
    from shardwise.checkpoint import load, save
    from shardwise.layout import Layout, Mesh, Shard
    from shardwise.tensor import plain
    from shardwise.testing import world

    rows, columns = 1 << 16, 512                 # 128 MiB
    layout = Layout(Mesh((2,)), [Shard(int(sys.argv[3]))], (rows, columns))
    torch.set_num_threads(1)
    state = {"x": torch.ones(rows, columns)} if sys.argv[1] == "save" else {}

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

    if sys.argv[1] == "save":
        before = peak()
        save(sys.argv[2], state, step=1)
    else:
        from tests.checkpoint.states import blank

        def body():
            x = blank(layout)
            collectives.barrier((0, 1))
            first = peak()
            load(sys.argv[2], {"x": x})
            assert bool((plain(x) == 1).all())
            return first

        before = max(world(2).run(body))
    print(peak() - before)
"""


@pytest.mark.processes
@pytest.mark.parametrize("dim", ["0", "1"])
def test_peak_memory(tmp_path: Path, dim: str) -> None:
    """Of saving 128 MiB, and of loading it in two halves, by rows and by columns."""
    for what in ("save", "load"):
        command = [sys.executable, "-c", dedent(PEAK), what, str(tmp_path), dim]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        assert int(done.stdout) < 64 << 20
