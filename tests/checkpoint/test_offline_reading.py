"""Checkpoints are read window by window, verified, compared and resharded, in one process without ranks."""

from itertools import count, product
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import Adam

from shardwise import shard_module
from shardwise._layout import Box, Layout, Mesh, Placement, Shard
from shardwise.checkpoint import files, restore, save, sources, state_of
from shardwise.checkpoint.offline import diff, reshard, verify
from shardwise.checkpoint.offline.reading import Difference, open_checkpoint
from shardwise.checkpoint.sources import Progress
from shardwise.errors import ArgumentError, CheckpointError, PlanError
from shardwise.testing import world
from tests.checkpoint.faults import failing_at
from tests.checkpoint.states import content, distributed, failed, flip, values
from tests.checkpoint.test_round_trip import all_tensors, other_layouts
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
def test_windows_are_small_and_follow_each_other(dims: list[tuple[int, int]], most: int, itemsize: int) -> None:
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
    with open_checkpoint(saved(tmp_path, layout), Progress())[0] as source:
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
    assert total.begun == total.done == 7 * 5 * 4 + 6 * 2 + 8


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


def saved_as(folder: Path, size: int, layouts: dict[str, Layout]) -> Path:
    def body() -> Path:
        state = {
            name: distributed(values(layout.shape, crc32(name.encode()) % 97), layout)
            for name, layout in layouts.items()
        }
        more = {"z": {"half": torch.arange(5).half(), "flag": torch.tensor(True)}, "b": [1, None, "é"]}
        return save(folder, state | more, step=3, metadata={"é": 1, "a": 2})

    return world(size).run(body)[0]


@pytest.mark.parametrize(
    ("size", "most"),
    [(3, 9), *(pytest.param(*case, marks=pytest.mark.slow) for case in product((1, 2, 3, 4), (1 << 24, 9)))],
)
def test_the_files_are_those_that_ranks_would_have_saved(
    tmp_path: Path, size: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", most)
    monkeypatch.setattr(sources, "WINDOW_BYTES", most)
    for other in (1, 3, 4):
        before = all_tensors(other)
        after = other_layouts(before, size, other)
        folder = tmp_path / str(other)
        saved_as(folder / "before", other, before)
        path = reshard(folder / "before", folder / "here", size, after)
        assert path == folder / "here" / "step-00000003"
        saved_as(folder / "after", size, after)
        assert content(folder / "here") == content(folder / "after")


def trained(layouts: dict[str, Layout]) -> tuple[nn.Module, Adam]:
    model = shard_module(nn.Sequential(nn.Linear(3, 5)), layouts)
    optimizer = Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    "placement", [Shard(0), Shard(1), Shard(0, sizes=(4, 0, 1))], ids=["rows", "columns", "an empty one"]
)
def test_states_of_the_optimizer_follow_their_parameters(tmp_path: Path, placement: Placement) -> None:
    before, after = ({"0.weight": Layout(Mesh((n,)), [p], (5, 3))} for n, p in ((2, Shard(0)), (3, placement)))

    def write() -> None:
        torch.manual_seed(0)
        save(tmp_path / "before", state_of(*trained(before)) | {"epoch": 1}, step=1)

    def read() -> None:
        model, optimizer = trained(after)
        extra = {"epoch": 0}
        restore(tmp_path / "before", model, optimizer, extra=extra)
        save(tmp_path / "after", state_of(model, optimizer) | extra, step=1)

    world(2).run(write)
    reshard(tmp_path / "before", tmp_path / "here", 3, after)
    world(3).run(read)
    assert content(tmp_path / "here") == content(tmp_path / "after")


W = {"w": Layout(Mesh((2,)), [Shard(0)], (5, 3))}


@pytest.mark.parametrize(
    ("size", "plan", "text"),
    [
        (2, {"ww": W["w"]}, "ww: the checkpoint has no such tensor. Did you mean 'w'? Fix: "),
        (2, {"w": Layout(Mesh((2,)), [Shard(0)], (5, 2))}, "w: shape [5, 2] in the plan, [5, 3] in the checkpoint."),
        (1, W, "w: rank 1 of its mesh is not one of 1 ranks. Fix: a world of 2 ranks or more."),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(tmp_path: Path, size: int, plan: dict[str, Layout], text: str) -> None:
    saved_as(tmp_path / "a", 2, W)
    assert text in failed(lambda: reshard(tmp_path / "a", tmp_path / "b", size, plan), PlanError, 1)
    with pytest.raises(ArgumentError, match="one rank or more, got 0"):
        reshard(tmp_path / "a", tmp_path / "b", 0)
    assert not (tmp_path / "b").exists()


def test_nothing_is_replaced_unless_it_is_said_so(tmp_path: Path) -> None:
    saved_as(tmp_path / "a", 2, W)
    before = content(tmp_path)
    with pytest.raises(CheckpointError, match="exists already"):
        reshard(tmp_path / "a", tmp_path / "a", 1)
    assert content(tmp_path) == before
    reshard(tmp_path / "a", tmp_path / "a", 1, overwrite=True)
    saved_as(tmp_path / "b", 1, {"w": Layout(Mesh((1,)), [Shard(0)], (5, 3))})
    assert content(tmp_path / "a") == content(tmp_path / "b")


def test_damaged_data_leaves_nothing(tmp_path: Path) -> None:
    flip(saved_as(tmp_path / "a", 2, W) / "rank-0001.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor 'z.flag'.*rank-0001\.safetensors: the data of .* is damaged"):
        reshard(tmp_path / "a", tmp_path / "b", 1)
    assert list((tmp_path / "b").iterdir()) == []


def test_a_full_disk_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    saved_as(tmp_path / "a", 2, W)
    for operation in count(1):
        target = tmp_path / str(operation)
        with failing_at(operation, target) as fails:
            try:
                reshard(tmp_path / "a", target, 3, W)
            except CheckpointError as error:
                assert "o space left" in str(error)  # noqa: PT017 - it may also succeed
                assert not target.exists() or list(target.iterdir()) == []
            if not fails():
                break
    assert operation > 5
