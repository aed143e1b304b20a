"""A checkpoint resharded offline has, byte for byte, the files that ranks with that plan would have saved."""

from itertools import count, product
from pathlib import Path
from zlib import crc32

import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.optim import Adam

from shardwise import shard_module
from shardwise._layout import Boxes, Layout, Mesh, Placement, Shard
from shardwise.checkpoint import files, restore, save, state_of
from shardwise.checkpoint.offline import reshard, sources
from shardwise.errors import ArgumentError, CheckpointError, PlanError
from shardwise.testing import world
from tests.checkpoint.faults import failing_at
from tests.checkpoint.states import content, distributed, flip, values
from tests.checkpoint.test_round_trip import all_tensors, other_layouts
from tests.strategies import laws
from tests.strategies import layouts as any_layout


def saved(folder: Path, size: int, layouts: dict[str, Layout]) -> Path:
    def body() -> Path:
        state = {
            name: distributed(values(layout.shape, crc32(name.encode()) % 97), layout)
            for name, layout in layouts.items()
        }
        more = {"z": {"half": torch.arange(5).half(), "flag": torch.tensor(True)}, "b": [1, None, "é"]}
        return save(folder, state | more, step=3, metadata={"é": 1, "a": 2})

    return world(size).run(body)[0]


@pytest.mark.parametrize(
    ("size", "block_bytes"),
    [(3, 9), *(pytest.param(*case, marks=pytest.mark.slow) for case in product((1, 2, 3, 4), (1 << 24, 9)))],
)
def test_the_files_are_those_that_ranks_would_have_saved(
    tmp_path: Path, size: int, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(sources, "WINDOW_BYTES", block_bytes)
    for other in (1, 3, 4):
        before = all_tensors(other)
        after = other_layouts(before, size, other)
        folder = tmp_path / str(other)
        saved(folder / "before", other, before)
        path = reshard(folder / "before", folder / "here", size, after)
        assert path == folder / "here" / "step-00000003"
        saved(folder / "after", size, after)
        assert content(folder / "here") == content(folder / "after")


without_partial = any_layout(shape=(5, 3)).map(lambda w: w.layout).filter(lambda layout: not layout.partial_axes)


@pytest.mark.slow
@settings(laws, max_examples=30)
@given(before=without_partial, after=without_partial)
def test_any_layout_becomes_any_other(tmp_path_factory: pytest.TempPathFactory, before: Layout, after: Layout) -> None:
    folder = tmp_path_factory.mktemp("run")
    sizes = [max(layout.mesh.ranks) + 1 for layout in (before, after)]
    saved(folder / "before", sizes[0], {"w": before})
    reshard(folder / "before", folder / "here", sizes[1], {"w": after})
    saved(folder / "after", sizes[1], {"w": after})
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
    saved(tmp_path / "a", 2, W)
    with pytest.raises(PlanError) as error:
        reshard(tmp_path / "a", tmp_path / "b", size, plan)
    assert text in str(error.value)
    with pytest.raises(ArgumentError, match="one rank or more, got 0"):
        reshard(tmp_path / "a", tmp_path / "b", 0)
    assert not (tmp_path / "b").exists()


def test_nothing_is_replaced_unless_it_is_said_so(tmp_path: Path) -> None:
    saved(tmp_path / "a", 2, W)
    before = content(tmp_path)
    with pytest.raises(CheckpointError, match="exists already"):
        reshard(tmp_path / "a", tmp_path / "a", 1)
    assert content(tmp_path) == before
    reshard(tmp_path / "a", tmp_path / "a", 1, overwrite=True)
    saved(
        tmp_path / "b",
        1,
        {"w": Layout(Mesh((1,)), [Boxes([[Layout(Mesh((1,)), [Shard(0)], (5, 3)).boxes(0)[0]]])], (5, 3))},
    )
    assert content(tmp_path / "a") == content(tmp_path / "b")


def test_damaged_data_leaves_nothing(tmp_path: Path) -> None:
    flip(saved(tmp_path / "a", 2, W) / "rank-0001.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor 'z.flag'.*rank-0001\.safetensors: the data of .* is damaged"):
        reshard(tmp_path / "a", tmp_path / "b", 1)
    assert list((tmp_path / "b").iterdir()) == []


def test_a_full_disk_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    saved(tmp_path / "a", 2, W)
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
