"""A checkpoint appears at once and complete, or not at all; earlier ones stay as they are, or as the rules say."""

import errno
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise import _collectives as collectives
from shardwise import capture
from shardwise._layout import Layout, Mesh, Partial, Replicate, Shard
from shardwise._tensor import tag
from shardwise.checkpoint import (
    Keep,
    files,
    latest,
    load,
    loading,
    locations,
    lock,
    read_manifest,
    retention,
    save,
    save_async,
    stores,
)
from shardwise.checkpoint.files import DTYPES
from shardwise.checkpoint.locations import store_at
from shardwise.checkpoint.retention import Facts, facts_of
from shardwise.errors import CaptureError, CheckpointError, MismatchError, NotFiniteError, ShardwiseError
from shardwise.testing import world
from tests.checkpoint.faults import failing_at, watched_at
from tests.checkpoint.states import blank, content, distributed, failed, loaded_seed, save_seed, steps

LAYOUT = Layout(Mesh((2,)), [Shard(0)], (3, 2))


def fails(folder: Path, seed: int, **options: Any) -> str:
    return failed(lambda: save_seed(folder, seed, **options))


def save_and_wait(*args: Any, **options: Any) -> None:
    save_async(*args, **options).wait()


def save_step(folder: Path, step: int, **options: Any) -> None:
    save(folder, {"x": torch.tensor(step)}, step=step, **options)


@pytest.mark.parametrize(
    "number", [errno.EIO, *(pytest.param(n, marks=pytest.mark.slow) for n in (errno.EACCES, errno.EMFILE))]
)
def test_what_cannot_be_read_for_a_moment_is_not_removed(tmp_path: Path, number: int) -> None:
    """A save that was interrupted while it replaced a step has left the only copy of it under another name."""
    folder = tmp_path / "run"
    for moment in count(1):
        world(2).run(save_seed, folder, 1)
        (folder / "step-00000001").rename(folder / ".old-step-00000001-01234567")
        with failing_at(moment, folder, number) as fails_now:
            with suppress(CheckpointError):
                world(2).run(save_seed, folder, 2)
            came_to_it = fails_now()
        assert loaded_seed(folder / "step-00000001" if (folder / "step-00000001").exists() else folder) == 1
        shutil.rmtree(folder)
        if not came_to_it:
            break
    assert moment > 10


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_cannot_be_written_to_its_end_is_reported_by_rank(tmp_path: Path) -> None:
    world(2).run(save_seed, tmp_path, 1)
    before = content(tmp_path)
    layout = Layout(Mesh((2,)), [Shard(0, sizes=(0, 100_000))], (100_000,))
    of_lock, of_rank = (0, ".lock"), (1, "rank-0001.safetensors")
    for limit in (0, 8, 100, 1000, 4000, 40_000, 399_999):
        with largest_file(limit):
            text = failed(lambda: save(tmp_path, {"x": distributed(torch.ones(100_000), layout)}, step=2))
        rank, file = of_lock if limit < 1000 else of_rank
        assert text.startswith(f"Saving step 2 to {tmp_path} failed:\n  rank {rank}: File too large: "), limit
        assert file in text
        assert content(tmp_path) == before


def test_a_folder_that_cannot_be_made_is_reported_by_the_system_s_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert fails(tmp_path / "file" / "run", 1) == (
        f"Saving step 1 to {tmp_path}/file/run failed:\n  rank 0: Not a directory: {tmp_path}/file/run. "
        f"Fix: see that the place exists, has room and may be read and written"
    )
    assert fails(tmp_path / "file", 1) == (
        f"Saving step 1 to {tmp_path}/file failed:\n  rank 0: {tmp_path}/file is a file. "
        f"Fix: name a folder: a checkpoint, step-…, or the one above"
    )
    assert "rank 0: File name too long" in fails(tmp_path / ("x" * 300), 1)
    (tmp_path / "loop").symlink_to("loop")
    assert "rank 0: " in fails(tmp_path / "loop", 1)


def test_a_step_that_latest_passes_over_is_saved_again(tmp_path: Path) -> None:
    for number, file in enumerate(["manifest.json", "rank-0001.safetensors"] * 2):
        folder = tmp_path / f"{number}"
        world(2).run(save_seed, folder, 1, step=10)
        world(2).run(save_seed, folder, 2, step=20)
        damaged = folder / "step-00000020" / file
        damaged.unlink() if number < 2 else os.truncate(damaged, 100)
        with pytest.warns(UserWarning, match="step 10"):
            assert loaded_seed(folder) == 1
        world(2).run(save_seed, folder, 3, step=20)
        assert loaded_seed(folder) == 3
        assert sorted(p.name for p in folder.iterdir()) == ["latest", "step-00000010", "step-00000020"]
    shutil.rmtree(folder / "step-00000020")
    (folder / "step-00000010").rename(folder / "step-00000020")  # whose step is another one
    before = content(folder)
    assert "step-00000020 exists already" in fails(folder, 2, step=20)
    assert content(folder) == before


def test_keep_does_not_count_or_touch_what_is_not_a_complete_checkpoint(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    for name in ("step-00000050", "step-7", "notes", ".tmp-mine"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000060").write_text("a file")
    save_step(tmp_path, 2, keep=2)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("step-00000001", "step-00000002", "latest"),
        *("step-00000050", "step-7", "notes", ".tmp-mine", "step-00000060"),
    }


def test_latest_is_the_one_saved_last_and_else_the_highest_complete_one(tmp_path: Path) -> None:
    assert latest(tmp_path / "nowhere") is None
    assert latest(tmp_path) is None
    for step in (9, 10, 3):
        save_step(tmp_path, step)
    pointer = tmp_path / "latest"
    assert pointer.read_text() == "step-00000003\n"
    assert latest(tmp_path) == tmp_path / "step-00000003"
    for nonsense in (b"", b"step-00000099", b"../step-00000010", b"\xff\xfe", b"step-3"):
        pointer.write_bytes(nonsense)
        assert latest(tmp_path) == tmp_path / "step-00000010"


@pytest.mark.parametrize("file", ["latest", ".lock"])
def test_what_is_no_short_file_in_place_of_one_is_refused_at_once(tmp_path: Path, file: str) -> None:
    save_step(tmp_path, 1)
    path = tmp_path / file
    changes: list[Callable[[], object]] = [
        lambda: os.mkfifo(path),
        lambda: path.symlink_to("/dev/zero"),
        path.mkdir,
        lambda: path.write_bytes(bytes(5000)),
    ]
    for change in changes:
        path.unlink(missing_ok=True)
        change()
        with pytest.raises(CheckpointError, match=f"{path}: "):
            latest(tmp_path) if file == "latest" else save_step(tmp_path, 2)
        path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.is_floating_point or d.is_complex], ids=str)
def test_manifests_name_what_is_not_finite(tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN and, where the dtype has it, infinity; on one rank of two, in any place, in any block that is written."""
    monkeypatch.setattr(files, "BLOCK_BYTES", 4)
    bad = [torch.tensor(value).to(dtype) for value in (float("nan"), float("inf"), -float("inf"))]

    def body() -> None:
        state = {}
        for number, value in enumerate(bad):
            for place in (0, 3, 5):
                full = torch.full((6,), 0.5).to(dtype)
                full[place] = value
                state[f"{number}.{place}"] = distributed(full.view(3, 2), LAYOUT)
        sound = {"sound": distributed(torch.full((3, 2), 0.5).to(dtype), LAYOUT), "empty": torch.empty(0, dtype=dtype)}
        save(tmp_path, state | sound, step=1)

    world(2).run(body)
    finite = {f"{number}" for number, value in enumerate(bad) if value.to(torch.complex64).isfinite()}
    expected = {f"{n}.{place}" for n in range(3) for place in (0, 3, 5) if f"{n}" not in finite}
    assert set(read_manifest(tmp_path / "step-00000001").not_finite) == expected
    assert "0.0" in expected


@pytest.mark.parametrize("save_it", [save, save_and_wait])
def test_nothing_is_saved_that_has_to_be_finite_and_is_not(tmp_path: Path, save_it: Callable[..., object]) -> None:
    full = torch.tensor([[1.0, 2.0], [3.0, 4.0], [float("nan"), 6.0]])
    most = torch.tensor([torch.finfo(torch.float32).max, 2**31, -1.0])

    def sound() -> None:
        save_it(tmp_path, {"most": most, "integers": torch.arange(3), "flags": most > 0}, step=1, require_finite=True)

    def bad() -> None:
        save_it(tmp_path, {"sound": most, "w": distributed(full, LAYOUT)}, step=2, require_finite=True)

    world(2).run(sound)
    before = content(tmp_path)
    text = failed(bad, NotFiniteError)
    said = f"Saving step 2 to {tmp_path} failed: there are infinite values or NaN in\n  w\n"
    assert text.startswith(said + "  Fix: restore the last checkpoint")
    assert content(tmp_path) == before


REFUSED = {
    "a sum not reduced": (lambda: {"x": blank(LAYOUT.replace([Partial()]))}, "tensor 'x': it is Partial"),
    "a sparse tensor": (lambda: {"x": torch.eye(2).to_sparse()}, "tensor 'x': torch.sparse_coo tensors cannot be"),
    "a meta tensor": (lambda: {"x": torch.ones(2, device="meta")}, "tensor 'x': it is on the meta device"),
    "complex doubles": (lambda: {"x": torch.ones(2, dtype=torch.complex128)}, "tensor 'x': torch.complex128 has no"),
    "not a number": (lambda: {"x": {"y": [1.0, float("nan")]}}, "x.y[1]: cannot be saved: nan is neither"),
    "a tensor in a list": (lambda: {"x": [torch.ones(1)]}, "x[0]: cannot be saved: Tensor is neither"),
    "a function": (lambda: {"x": print}, "x: cannot be saved: builtin_function_or_method is neither"),
    "bytes": (lambda: {"x": b"y"}, "x: cannot be saved: bytes is neither"),
    "a lone surrogate": (lambda: {"x": "\ud800"}, "x: cannot be saved: str is neither"),
    "number keys": (lambda: {"state": {0: {"step": 1}}}, "the keys of the state must be strings that are not empty"),
    "an empty key": (lambda: {"": 1}, "the keys of the state must be strings that are not empty"),
    "a surrogate key": (lambda: {"\ud800": 1}, "the keys of the state must be strings that are not empty"),
    "one name twice": (lambda: {"a": {"b": 1}, "a.b": 2}, "two entries of the state are called 'a.b'"),
    "a reserved name": (lambda: {"__metadata__": torch.ones(1)}, "no tensor can be called '__metadata__'"),
    "a number too long": (lambda: {"x": 10**5000}, "ValueError: Exceeds the limit"),
}


@pytest.mark.parametrize(("state", "text"), REFUSED.values(), ids=list(REFUSED))
def test_what_cannot_be_saved_is_refused_by_name(tmp_path: Path, state: Any, text: str) -> None:
    found = failed(lambda: save(tmp_path / "run", state(), step=1))
    assert found.startswith(f"Saving step 1 to {tmp_path}/run failed: {text}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"step": -1}, "step must be an integer from 0, below 10^18, got -1. Fix: such as int(step)"),
        ({"step": True}, "step must be an integer, got True"),
        ({"step": 1, "keep": 0}, "keep must be a positive integer, a Keep or None, got 0"),
        ({"step": 1, "metadata": {"rate": float("nan")}}, "metadata['rate']: cannot be saved: nan"),
        ({"step": 1, "metadata": {1: 2}}, "metadata must be a dict from a string to values or None, got {1: 2}"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    assert text in failed(lambda: save(tmp_path, {"x": 1}, **options), ShardwiseError)


def test_a_name_that_looks_like_a_shard_of_another_is_refused(tmp_path: Path) -> None:
    def body() -> None:
        sharded = distributed(torch.ones(2), Layout(Mesh((2,)), [Shard(0)], (2,)))
        of_rank_0 = distributed(torch.ones(3), Layout(Mesh((1,)), [Replicate()], (3,)))
        save(tmp_path, {"a": sharded, "a[0:1]": of_rank_0}, step=1)

    assert "two tensors of the state are called 'a[0:1]'" in failed(body)


@pytest.mark.parametrize("save_it", [save, save_and_wait])
def test_copies_that_are_not_equal_are_refused_and_named(tmp_path: Path, save_it: Callable[..., object]) -> None:
    def body() -> None:
        drifted = torch.ones(3, 2)
        drifted[2, 1] += 1e-7 * (collectives.rank() == 2)
        layout = Layout(Mesh((3,)), [Replicate()], (3, 2))
        save_it(tmp_path, {"same": torch.ones(1), "w": tag(drifted, layout)}, step=1)

    text = failed(body, size=3).replace("failed:\n  rank 0: ", "failed: ")  # which compares in the background
    assert text.startswith(
        f"Saving step 1 to {tmp_path} failed: ranks that should hold the same do not:\n"
        f"  'w' [0:3, 0:2]: rank 0, 1 against rank 2\n  Fix: "
    )
    assert content(tmp_path) == {}


@pytest.mark.parametrize(
    ("differing", "text"),
    [
        (lambda rank: {"state": {"epoch": rank}}, "  'state epoch':\n    rank 0: 0\n    rank 1: 1\n"),
        (lambda rank: {"state": {"x" * rank or "y": 1}}, "  'state x':\n    rank 0: nothing\n    rank 1: 1\n"),
        (lambda rank: {"state": {"x": torch.ones(2 + rank)}}, "rank 1: torch.float32 Layout((3,) as [Replicate()]"),
        (lambda rank: {"step": rank}, "  'step':\n    rank 0: 0\n    rank 1: 1\n"),
        (lambda rank: {"metadata": {"a": rank}}, '  \'metadata\':\n    rank 0: {"a": 0}\n    rank 1: {"a": 1}\n'),
        (lambda rank: {"overwrite": bool(rank)}, "  'overwrite':\n    rank 0: False\n    rank 1: True\n"),
    ],
    ids=["value", "name", "shape", "step", "metadata", "argument"],
)
def test_ranks_that_disagree_are_told_on_what(tmp_path: Path, differing: Any, text: str) -> None:
    def body() -> None:
        given = {"state": {}, "step": 1} | differing(collectives.rank())
        save(tmp_path, given.pop("state"), **given)

    found = failed(body, MismatchError)
    assert text in found
    assert found.endswith("  Fix: pass the same state and arguments on every rank.")
    assert content(tmp_path) == {}


def test_ranks_that_do_not_share_a_folder_are_told_so(tmp_path: Path) -> None:
    def body() -> None:
        save(tmp_path / str(collectives.rank()), {"x": torch.ones(2)}, step=1)

    text = failed(body)
    assert text.startswith(
        f"Saving step 1 to {tmp_path}/0 failed:\n  rank 1: No such file or directory: {tmp_path}/1/.tmp-step-00000001-"
    )
    assert content(tmp_path) == {"0": None}


def test_saving_changes_no_random_state(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    save(tmp_path, {"x": torch.ones(2)}, step=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert read_manifest(tmp_path / "step-00000001").step == 1


def test_a_metric_that_the_new_checkpoint_leaves_out_removes_no_other(tmp_path: Path) -> None:
    keep = Keep(best=1, metric="los")

    def body(metadata: dict[str, Any] | None) -> None:
        save(tmp_path, {"x": torch.ones(1)}, step=2, metadata=metadata, keep=keep)

    save(tmp_path, {"x": torch.ones(1)}, step=1, metadata={"los": 0.5})
    cases: list[tuple[dict[str, Any] | None, str]] = [
        ({"loss": 1.0}, "is not there, only ['loss']"),
        (None, "is not there, only []"),
        ({"los": "1.0"}, "is '1.0' there"),
        ({"los": True}, "is True there"),
    ]
    for metadata, said in cases:
        assert failed(partial(body, metadata)).endswith(
            f"failed: keep needs the number 'los' of metadata, which {said}. "
            f"Fix: metadata={{'los': …}}, None if this checkpoint has no such number"
        )
    text = failed(lambda: body({"los": 1.0} if collectives.rank() == 0 else {}), size=3)
    assert "rank 1, 2: keep needs the number 'los' of metadata, which is not there, only []." in text
    assert steps(tmp_path) == [1]


def test_keep_never_removes_the_last_finite_checkpoint(tmp_path: Path) -> None:
    """A buffer that always has infinite values does not make a checkpoint worse than others."""

    mask, nan = torch.tensor([0.0, -float("inf")]), float("nan")

    def save_value(step: int, value: float, keep: int = 2) -> list[int]:
        save(tmp_path, {"mask": mask, "x": torch.tensor(value)}, step=step, keep=keep)
        return steps(tmp_path)

    assert save_value(1, 1.0) == [1]
    assert save_value(2, 2.0) == [1, 2]
    assert save_value(3, nan) == [2, 3]
    assert save_value(4, nan) == [2, 3, 4]
    assert save_value(5, nan, keep=1) == [2, 5]
    assert save_value(6, 6.0) == [5, 6]
    assert save_value(7, 7.0, keep=1) == [7]


def test_the_best_are_those_with_a_number_the_largest_if_it_is_said_so(tmp_path: Path) -> None:
    keep = Keep(best=2, metric="auc", largest=True)
    for step, auc in enumerate([0.5, 0.9, 0.7, 0.6, 0.65]):
        save(tmp_path, {"x": torch.ones(1)}, step=step, metadata={"auc": auc}, keep=keep)
    assert steps(tmp_path) == [1, 2, 4]
    metrics = {1: True, 2: 3.0, 3: "0", 4: None, 5: 4.0}  # of saves without `keep`, or by another version
    facts = {step: Facts(0, {"m": metric}, {}) for step, metric in metrics.items()}
    assert Keep(best=1, metric="m").staying(facts, 5) == {2, 5}


@given(
    st.dictionaries(st.integers(0, 40), st.none() | st.integers(0, 3), min_size=1),
    st.data(),
    st.integers(1, 4),
    st.none() | st.integers(1, 7),
    st.none() | st.integers(1, 3),
)
def test_what_stays_is_what_the_rules_say(
    metrics: dict[int, int | None], data: st.DataObject, last: int, every: int | None, best: int | None
) -> None:
    """Steps after the one that is saved are of a run that was taken back: only a place in `last` keeps them."""
    facts = {step: Facts(0, {} if m is None else {"m": m}, {}) for step, m in metrics.items()}
    saved = data.draw(st.sampled_from(sorted(metrics)))
    before, after = [s for s in sorted(metrics) if s <= saved], [s for s in sorted(metrics) if s > saved]
    newest = [*before[::-1], *after[::-1]][:last]
    multiples = [step for step in before if every and step % every == 0]
    ranked = sorted((m, -step) for step in before if (m := metrics[step]) is not None)
    chosen = [-negative for _, negative in ranked[: best or 0]]
    stay = Keep(last, every, best, None if best is None else "m").staying(facts, saved)
    assert stay == {*newest, *multiples, *chosen}


def test_rules_that_cannot_be() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"last": 0}, "Keep: last must be a positive integer, got 0"),
        ({"every": 1.5}, "Keep: every must be a positive integer, got 1.5"),
        ({"best": True, "metric": "x"}, "Keep: best must be a positive integer, got True"),
        ({"best": 1}, "Keep: best is 1 and metric None. Fix: give both"),
        ({"metric": "loss"}, "Keep: best is None and metric 'loss'. Fix: give both"),
    ]
    for arguments, said in cases:
        with pytest.raises(CheckpointError) as caught:
            Keep(**arguments)
        assert said in str(caught.value)


def test_a_save_parses_no_manifest_of_earlier_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_known", {})
    for step in range(5):
        save(tmp_path, {"x": torch.ones(1)}, step=step)
    parsed: list[str] = []
    original = stores.stored_manifest

    def stored_manifest(store: stores.CheckpointStore, version: str) -> Any:
        parsed.append(version)
        return original(store, version)

    monkeypatch.setattr(retention, "stored_manifest", stored_manifest)
    for step in range(5, 8):
        save(tmp_path, {"x": torch.ones(1)}, step=step, keep=10)
    assert sorted(parsed) == [f"step-{step:08d}" for step in range(5)]  # each once, and none of those saved here
    assert retention._known[str(tmp_path)] == {
        manifest.sha256: Facts(0, manifest.metadata, manifest.file_sizes())
        for manifest in (read_manifest(tmp_path / f"step-{step:08d}") for step in range(8))
    }


def test_a_checkpoint_that_lost_a_file_or_was_replaced_is_not_taken_for_what_it_was(tmp_path: Path) -> None:
    state = {"x": torch.ones(3)}
    keep = Keep(last=1, best=1, metric="loss")
    for step, loss in ((1, 1.0), (2, 2.0)):
        save(tmp_path, state, step=step, metadata={"loss": loss}, keep=keep)
    assert steps(tmp_path) == [1, 2]
    store = store_at(tmp_path)
    assert facts_of(store, "step-00000001")[1].metadata == {"loss": 1.0}
    save(tmp_path, {"x": torch.tensor([1.0, float("nan"), 0.0])}, step=2, metadata={"loss": 0.5}, overwrite=True)
    manifest = read_manifest(tmp_path / "step-00000002")
    assert facts_of(store, "step-00000002") == (manifest.sha256, Facts(1, {"loss": 0.5}, manifest.file_sizes()))
    (tmp_path / "step-00000001" / "rank-0000.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="has 0 bytes"):
        facts_of(store, "step-00000001")
    (tmp_path / "step-00000001" / "rank-0000.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        facts_of(store, "step-00000001")
    save(tmp_path, state, step=3, metadata={"loss": 3.0}, keep=keep)
    assert steps(tmp_path) == [1, 2, 3]  # what is not complete is not counted, and not removed
    load(tmp_path, state)


@pytest.mark.parametrize(
    ("scheme", "keep"),
    [("", 2), ("file://", 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("", 1), ("file://", 2)))],
)
def test_a_reader_finds_a_checkpoint_whenever_another_job_saves(
    scheme: str, keep: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other job saves before one operation of the reader, each in turn; or before some in a row."""
    folder = f"{scheme}{tmp_path}"
    turns: set[int] = set()
    done, step = [0], [1]

    def saves(method: str, args: tuple[Any, ...]) -> None:
        done[0] += 1
        if done[0] in turns:
            step[0] += 1
            save(folder, {"x": torch.full((3,), float(step[0]))}, step=step[0], keep=keep)

    for module in (locations, loading):
        monkeypatch.setattr(module, "store_at", lambda place: watched_at(place, saves))
    save(folder, {"x": torch.ones(3)}, step=1)
    for first in count(1):
        for length in (1, 6):
            turns, done[0], before = {*range(first, first + length)}, 0, step[0]
            assert latest(folder) is not None
            done[0], state, found, text = 0, {"x": torch.zeros(3)}, 0, ""
            try:
                found = load(folder, state).step
            except CheckpointError as error:
                text = str(error)
            assert state["x"].tolist() == [found] * 3
            assert "Fix: load again" in text or before <= found <= step[0]
        if first > done[0]:
            break
    assert first > 4
    text = failed(lambda: load(f"{folder}/step-00000001", {"x": torch.zeros(3)}), size=1)
    assert "Fix: load again, from the folder above" in text


CAPTURED: dict[str, Callable[[Path], object]] = {
    "save": lambda folder: save(folder, {"x": 1}, step=1),
    "save_async": lambda folder: save_async(folder, {"x": 1}, step=1),
    "load": lambda folder: load(folder, {"x": 1}),
    "lock": lambda folder: lock(folder).__enter__(),
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", CAPTURED)
def test_checkpoints_are_refused_in_a_captured_function(tmp_path: Path, name: str, size: int) -> None:
    def body() -> None:
        with pytest.raises(CaptureError, match="a replay cannot repeat work of checkpoints that all ranks do"):
            capture(lambda x: (CAPTURED[name](tmp_path), x + 1))(torch.ones(3))

    world(size).run(body)
    assert not content(tmp_path)


def test_a_shape_that_loading_refuses_is_not_saved(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    before = content(tmp_path)
    with pytest.raises(CheckpointError, match=r"tensor 'x': its shape \(0, 2305843009213693952\) is too large"):
        save(tmp_path, {"x": torch.empty(0, 2**61)}, step=2, keep=1)
    assert content(tmp_path) == before


class Refusing(dict[str, Any]):
    """Takes no other values than those that it was made with."""

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("fixed")


def test_a_mapping_that_refuses_a_value_keeps_its_tensors(tmp_path: Path) -> None:
    save(tmp_path, {"x": torch.ones(3), "y": 1}, step=1)
    with pytest.raises(TypeError, match="fixed"):
        load(tmp_path, Refusing(x=(x := torch.zeros(3)), y=2))
    assert x.tolist() == [0, 0, 0]
