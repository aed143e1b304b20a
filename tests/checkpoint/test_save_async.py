"""A checkpoint that is written while training goes on is that of `save`, or nothing and an error on all ranks."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._layout import Layout, Mesh, Shard
from shardwise._tensor import DTensor, plain
from shardwise.checkpoint import latest, load, lock, restore, save, save_async, saving, saving_async
from shardwise.errors import CheckpointError, MismatchError
from shardwise.testing import world
from tests.checkpoint.faults import watched_at
from tests.checkpoint.states import blank, content, distributed, failed, layouts
from tests.collectives.real_ranks import run_program

SEE = "Fix: see that the place exists, has room and may be read and written"
SHAPE = (5, 3)


def rows(size: int) -> Layout:
    return Layout(Mesh((size,)), [Shard(0)], SHAPE)


def state_of_step(step: int, layout: Layout) -> dict[str, Any]:
    full = torch.full(SHAPE, float(step))
    return {
        "x": distributed(full, layout),
        "half": full.bfloat16().t(),
        "z": torch.tensor(1j * step).conj(),
        "empty": torch.empty(0, 2),
        "epoch": [step],
    }


def overwrite(state: dict[str, Any]) -> None:
    """What training does after the copy."""
    for x in state.values():
        if isinstance(x, Tensor):
            plain(x.detach()).fill_(-1)
        else:
            x[0] = -1


def loaded(folder: Path) -> float:
    state = {"x": torch.zeros(SHAPE)}
    load(folder, state, subset=True)
    (value,) = set(state["x"].flatten().tolist())
    return float(value)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Lets no rank write before it is set."""
    found = threading.Event()

    def before(method: str, args: tuple[Any, ...]) -> None:
        if method == "write" and args[0].endswith(".safetensors"):
            assert found.wait(60)

    monkeypatch.setattr(saving, "store_at", lambda folder: watched_at(folder, before))
    yield found
    found.set()  # or threads of a test that fails never end


@pytest.mark.parametrize("size", [1, 2, 3])
def test_it_is_the_checkpoint_of_the_moment_of_the_call(tmp_path: Path, size: int, gate: threading.Event) -> None:
    """Whatever the ranks hold: parts, copies, nothing; and whatever they do with it before it is written."""

    def state_in_every_layout() -> dict[str, Any]:
        return {str(layout): state_of_step(7, layout) for layout in layouts(size, SHAPE)}

    def body() -> None:
        save(tmp_path / "expected", state_in_every_layout(), step=7, metadata={"loss": 1})
        state, metadata = state_in_every_layout(), {"loss": 1}
        collectives.barrier(tuple(range(size)))
        gate.clear()
        pending = save_async(tmp_path / "found", state, step=7, metadata=metadata)
        for one in state.values():
            overwrite(one)
        metadata["loss"] = -1
        assert latest(tmp_path / "found") is None
        collectives.barrier(tuple(range(size)))
        gate.set()
        assert pending.wait() == tmp_path / "found" / "step-00000007"
        assert pending.done()
        assert pending.wait() == tmp_path / "found" / "step-00000007"

    gate.set()
    world(size).run(body)
    assert content(tmp_path / "found") == content(tmp_path / "expected")


def test_the_next_save_waits_and_uses_the_memory_of_the_copy_again(tmp_path: Path) -> None:
    def body() -> bool:
        layout, kept = rows(2), []
        for step in range(4):
            state = state_of_step(step, layout)
            save_async(tmp_path, state, step=step, keep=2)
            overwrite(state)
            memory = collectives.owner().state(saving_async._Memory)
            kept.append({name: x.data_ptr() for name, x in memory.items()})
        save_async(tmp_path, {"other": torch.ones(3)}, step=4)
        assert [*collectives.owner().state(saving_async._Memory)] == ["other/0"]
        state = {"other": torch.zeros(3)}
        load(tmp_path, state)  # waits for step 4
        assert state["other"].tolist() == [1, 1, 1]
        return kept[0] == kept[3]

    assert world(2).run(body) == [True, True]
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [f"step-0000000{step}" for step in (2, 3, 4)]
    assert loaded(tmp_path / "step-00000003") == 3


def test_the_lock_is_held_until_it_is_complete(tmp_path: Path, gate: threading.Event) -> None:
    def body() -> list[bool]:
        pending = save_async(tmp_path, state_of_step(1, rows(2)), step=1)
        held = [(tmp_path / ".lock").exists()]
        threading.Timer(0.1, gate.set).start()
        pending.wait()
        held.append((tmp_path / ".lock").exists())
        with lock(tmp_path):
            save_async(tmp_path, state_of_step(2, rows(2)), step=2).wait()
            held.append((tmp_path / ".lock").exists())
        return held

    assert world(2).run(body)[0] == [True, False, True]  # rank 1 looks when rank 0 has gone on


def total_of(x: DTensor) -> float:
    total = x.sum()
    assert isinstance(total, DTensor)
    return float(total.full_tensor())


def real_training(folder: str) -> list[float]:
    """Collectives of training go on while checkpoints are written."""
    size = collectives.world_size()
    mesh = Mesh((size,))
    x = distributed(torch.arange(15.0).view(SHAPE), Layout(mesh, [Shard(0)], SHAPE))
    expected = []
    for step in range(5):
        save_async(folder, {"x": x}, step=step)
        for _ in range(20):
            plain(x).add_(1)
            total = total_of(x)
        expected.append(total)
    load(folder, {"x": (last := blank(rows(size)))})
    sums = []
    for step in range(5):
        load(Path(folder) / f"step-0000000{step}", {"x": last})
        sums.append(total_of(last))
    assert sums == [105.0, *expected[:4]]
    return sums


@pytest.mark.processes
def test_real_processes(tmp_path: Path) -> None:
    first, second = world(2, real=True).run(real_training, str(tmp_path))
    assert first == second
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", *(f"step-0000000{step}" for step in range(5))]


CALLS: dict[str, Callable[[Path], object]] = {
    "save": lambda folder: save(folder, {"x": torch.zeros(SHAPE)}, step=9),
    "save_async": lambda folder: save_async(folder, {"x": torch.zeros(SHAPE)}, step=9),
    "load": lambda folder: load(folder, {"x": torch.zeros(SHAPE)}, subset=True),
}


@pytest.mark.parametrize(
    ("rank", "file", "call"),
    [(0, "rank-0000.safetensors", "wait"), (2, "rank-0002.safetensors", "save_async")]
    + [(1, "rank-0001.safetensors", call) for call in ("wait", *CALLS)],
)
def test_a_failure_is_raised_by_the_next_call_on_all_ranks(
    tmp_path: Path, rank: int, file: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world(3).run(lambda: save(tmp_path, state_of_step(1, rows(3)), step=1))
    before = content(tmp_path)
    on = [True]

    def fail(method: str, args: tuple[Any, ...]) -> None:
        if on[0] and method == "write" and args[0].endswith(file):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file)

    monkeypatch.setattr(saving, "store_at", lambda folder: watched_at(folder, fail))

    def body() -> None:
        pending = save_async(tmp_path, state_of_step(2, rows(3)), step=2)
        pending.wait() if call == "wait" else CALLS[call](tmp_path)

    text = failed(body, size=3)
    assert text == f"Saving step 2 to {tmp_path} failed:\n  rank {rank}: No space left on device: {file}. {SEE}"
    assert content(tmp_path) == before

    def goes_on() -> None:
        on[0] = True
        with pytest.raises(CheckpointError):
            body()
        collectives.barrier((0, 1, 2))
        on[0] = False
        save(tmp_path, state_of_step(3, rows(3)), step=3)  # the error was raised, once

    world(3).run(goes_on)
    assert loaded(tmp_path) == 3


@pytest.mark.parametrize(
    "calls", [("save", "load", "save"), ("save_async", "save", "save"), ("save", "restore", "load")]
)
def test_ranks_that_make_different_calls_are_told_by_whom(calls: tuple[str, ...], tmp_path: Path) -> None:
    world(3).run(lambda: save(tmp_path, state_of_step(1, rows(3)), step=1))

    def body() -> None:
        state = state_of_step(2, rows(3))
        match calls[collectives.rank()]:
            case "load":
                load(tmp_path, state)
            case "restore":
                restore(tmp_path, torch.nn.Linear(2, 2))
            case "save":
                save(tmp_path, state, step=2)
            case "save_async":
                save_async(tmp_path, state, step=2).wait()

    text = failed(body, MismatchError, size=3)
    assert text.startswith("ranks make different calls:\n  rank 0")
    assert "Fix: make the same call on every rank" in text
    for call in calls:
        assert (f"Loading {tmp_path}\n" if call in ("load", "restore") else f"Saving step 2 to {tmp_path}") in text
    assert ("step 2 to" in text and ", by save_async\n" in text) == ("save_async" in calls)
    assert loaded(tmp_path) == 1


def test_a_copy_that_cannot_be_made_is_raised_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def no_memory(*args: Any, **kwargs: Any) -> Tensor:
        if collectives.rank() and kwargs.get("device") == "cpu":
            raise RuntimeError("not enough memory")
        return empty(*args, **kwargs)

    def body() -> None:
        x = torch.zeros(SHAPE)
        monkeypatch.setattr(torch, "empty", no_memory)
        save_async(tmp_path, {"x": x}, step=1)

    text = failed(body)
    assert text == f"Saving step 1 to {tmp_path} failed:\n  rank 1: RuntimeError: not enough memory"
    assert not content(tmp_path)


FAILS = """
    import sys
    import torch
    from shardwise.checkpoint import folder_store, save_async

    def write(*args):
        raise OSError(28, "No space left on device", "somewhere")

    folder_store.FolderStore.write = write
    save_async(sys.argv[1], {"x": torch.ones(3)}, step=1)
    print("end")
"""

USES_AN_EXECUTOR = """
    import time
    from concurrent.futures import ThreadPoolExecutor
    import torch
    from shardwise.checkpoint import latest, save_async
    from shardwise.checkpoint.object_store import ObjectStore

    write, executor = ObjectStore.write, ThreadPoolExecutor()

    def write_by_executor(*args):
        time.sleep(0.3)  # the program has ended before
        executor.submit(write, *args).result()

    ObjectStore.write = write_by_executor
    x = torch.ones(3)
    save_async("file://" + __import__("sys").argv[1], {"x": x}, step=1)
    x.zero_()
    print("end")
"""


@pytest.mark.processes
def test_a_program_that_ends_waits_for_it_also_where_the_store_uses_an_executor(tmp_path: Path) -> None:
    assert run_program(dedent(USES_AN_EXECUTOR), str(tmp_path)) == (0, "end\n", "")
    state = {"x": torch.zeros(3)}
    load(f"file://{tmp_path}", state)
    assert state["x"].tolist() == [1, 1, 1]


@pytest.mark.processes
def test_a_program_whose_last_checkpoint_failed_has_failed(tmp_path: Path) -> None:
    said = f"Saving step 1 to {tmp_path} failed: No space left on device: somewhere. {SEE}\n"
    assert run_program(dedent(FAILS), str(tmp_path)) == (1, "end\n", said)
    assert latest(tmp_path) is None


def test_a_rank_may_hold_nothing(tmp_path: Path) -> None:
    x = torch.ones(3, 2)
    layout = Layout(Mesh((2,)), [Shard(0, sizes=(3, 0))], (3, 2))
    world(2).run(lambda: save_async(tmp_path, {"x": distributed(x, layout)}, step=1).wait())
    load(tmp_path, {"x": (found := torch.zeros(3, 2))})
    assert found.equal(x)
