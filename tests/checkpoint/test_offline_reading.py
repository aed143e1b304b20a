"""Checkpoints are read window by window, verified and compared, in one process without ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise._layout import Box, Layout, Mesh, Shard
from shardwise.checkpoint import files, save
from shardwise.checkpoint.offline import diff, sources, verify
from shardwise.checkpoint.offline.reading import Difference
from shardwise.checkpoint.offline.sources import CheckpointSource, Progress
from shardwise.errors import CheckpointError
from shardwise.testing import world
from tests.checkpoint.states import distributed, flip, values
from tests.strategies import laws

SHAPE = (7, 5)
COLUMNS = Layout(Mesh((3,)), [Shard(1)], SHAPE)
ROWS = Layout(Mesh((2,)), [Shard(0, sizes=(7, 0))], SHAPE)


def saved(folder: Path, layout: Layout = COLUMNS, **changes: Any) -> Path:
    """A checkpoint of three tensors and two values on as many ranks as the layout has."""

    def body() -> Path:
        full = values(SHAPE)
        state: dict[str, Any] = {
            "a.w": full,
            "a.half": torch.arange(6.0).half(),
            "n": torch.tensor(3),
            "epoch": 1,
            "lr": 0.1,
        }
        state |= changes
        state["a.w"] = distributed(state["a.w"], layout)
        return save(folder, state, step=1)

    return world(len(layout.mesh.ranks)).run(body)[0]


class Total(Progress):
    def __init__(self) -> None:
        self.begun, self.done, self.names = 0, 0, set[str]()

    def begin(self, num_bytes: int) -> None:
        self.begun = num_bytes

    def advance(self, what: str, num_bytes: int) -> None:
        self.done += num_bytes
        self.names.add(what)


@laws
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=4), st.integers(1, 40), st.sampled_from([1, 4])
)
def test_windows_are_small_and_follow_each_other_in_the_file(
    dims: list[tuple[int, int]], most: int, itemsize: int
) -> None:
    box = Box(tuple(offset for offset, _ in dims), tuple(size for _, size in dims))
    numbers = torch.arange(box.numel).reshape(box.sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "WINDOW_BYTES", most)
        found = list(sources.windows(box, itemsize))
    assert [n for part in found for n in numbers[part.relative_to(box)].flatten().tolist()] == list(range(box.numel))
    for part in found:
        assert part.numel * itemsize <= max(most, itemsize)
    # As few as the limit allows, up to the remainders of rows.
    if box.numel * itemsize <= most:
        assert len(found) <= 1


@pytest.fixture(params=[1 << 24, 1, 17], ids=["all at once", "an element", "some"])
def block_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and windows of tensors of a few bytes."""
    monkeypatch.setattr(files, "BLOCK_BYTES", request.param)
    monkeypatch.setattr(sources, "WINDOW_BYTES", request.param)


@pytest.mark.usefixtures("block_bytes")
@pytest.mark.parametrize("layout", [COLUMNS, ROWS], ids=["columns", "rows and none"])
def test_every_window_is_read_to_the_bit_with_few_open_files(
    tmp_path: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "OPEN_FILES", 1)
    with CheckpointSource(saved(tmp_path, layout), Progress()) as source:
        for rows in (slice(0, 7), slice(2, 5), slice(6, 7)):
            for columns in (slice(0, 5), slice(1, 4), slice(3, 4)):
                box = Box((rows.start, columns.start), (rows.stop - rows.start, columns.stop - columns.start))
                expected = values(SHAPE)[rows, columns].contiguous()
                assert torch.equal(source.read("a.w", box).view(torch.int32), expected.view(torch.int32))
                assert b"".join(source.blocks("a.w", box)) == expected.numpy().tobytes()


@pytest.mark.usefixtures("block_bytes")
def test_a_sound_checkpoint_is_verified_byte_by_byte(tmp_path: Path) -> None:
    saved(tmp_path)
    total = Total()
    manifest, problems = verify(tmp_path, total)
    assert (manifest.step, problems) == (1, [])
    assert total.begun == total.done == 7 * 5 * 4 + 6 * 2 + 8
    assert total.names == {"a.w", "a.half", "n"}


def test_each_damage_is_named_with_tensor_and_file(tmp_path: Path) -> None:
    path = saved(tmp_path)
    files = [path / f"rank-000{rank}.safetensors" for rank in range(3)]
    flip(files[1], 20)
    assert verify(tmp_path)[1] == [f"{files[1]}: its header is damaged: it is not the one the manifest implies"]
    flip(files[0])
    files[1].unlink()
    files[2].write_bytes(files[2].read_bytes()[:-1])
    flipped, gone, short = verify(path)[1]
    assert "tensor 'a." in flipped
    assert f"{files[0]}: the data of" in flipped
    assert "is damaged: its crc32 is" in flipped
    assert f"{files[1]}: cannot be read: No such file" in gone
    assert f"{files[2]}: has" in short
    with pytest.raises(CheckpointError, match="there is no complete checkpoint in"):
        verify(tmp_path / "none")


@pytest.mark.usefixtures("block_bytes")
def test_layouts_and_ranks_make_no_difference(tmp_path: Path) -> None:
    total = Total()
    assert diff(saved(tmp_path / "a"), saved(tmp_path / "b", ROWS), total) == []
    assert total.begun == total.done == 3 * (7 * 5 * 4 + 6 * 2 + 8)


@pytest.mark.usefixtures("block_bytes")
def test_each_difference_is_named(tmp_path: Path) -> None:
    other = torch.zeros(SHAPE)
    other[2, 3], other[6, 0] = 1.5, -0.0
    half = torch.arange(6.0).half()
    half[4] = float("nan")
    first = saved(tmp_path / "a", COLUMNS, **{"a.w": torch.zeros(SHAPE), "gone": torch.zeros(2), "lr": 0.2, "x": 1})
    second = saved(tmp_path / "b", ROWS, **{"a.w": other, "a.half": half, "n": torch.zeros(1), "x": torch.zeros(0)})
    assert diff(first, second) == [
        Difference("a.half", "1 of 6 elements differ, by inf at most"),
        Difference("a.w", "2 of 35 elements differ, by 1.5 at most"),
        Difference("gone", "only in the first: float32 [2]"),
        Difference("lr", "0.2 against 0.1"),
        Difference("n", "int64 [] against float32 [1]"),
        Difference("x", "1 against float32 [0]"),
    ]
    assert diff(first, first) == diff(second, second) == []


def test_damaged_data_is_not_compared(tmp_path: Path) -> None:
    first, second = saved(tmp_path / "a"), saved(tmp_path / "b", ROWS)
    flip(second / "rank-0000.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor 'a\.\w+': .*b/step-00000001/rank-0000.safetensors: the data of"):
        diff(first, second)
