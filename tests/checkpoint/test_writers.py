"""One job at a time writes to a folder; what it has not written in full is not a checkpoint."""

import errno
import json
import os
import secrets
import signal
import socket
import threading
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from shardwise import _collectives as collectives
from shardwise.checkpoint import latest, load, lock, read_manifest, save, save_async, saving, writer_lock
from shardwise.checkpoint.folder_store import FolderStore
from shardwise.checkpoint.locations import store_at
from shardwise.checkpoint.stores import CheckpointStore
from shardwise.checkpoint.writer_lock import Writer, this_process
from shardwise.errors import CheckpointError
from shardwise.testing import world
from tests.checkpoint.faults import another_job, watched_at
from tests.checkpoint.format_reader import Refused, read_checkpoint
from tests.checkpoint.states import content, failed, loaded_seed, save_seed


def refused(folder: Path | str, step: int = 1) -> str:
    return failed(lambda: save_seed(folder, step))


def leave_lock(folder: Path, writer: Writer) -> None:
    folder.mkdir(exist_ok=True)
    (folder / ".lock").write_text(json.dumps(asdict(writer)))


@pytest.mark.processes
@pytest.mark.parametrize("where", ["", "file://"])
def test_a_second_job_is_told_who_writes_until_that_process_is_killed(tmp_path: Path, where: str) -> None:
    location = f"{where}{tmp_path}"
    with another_job(location) as pid:
        before = content(tmp_path)
        text = refused(location)
        assert text.startswith(
            f"Saving step 1 to {location} failed:\n  rank 0: {location} is being written to: its lock is held by "
            f"process {pid} on {socket.gethostname()}, which took it at 20"
        )
        assert text.endswith(" UTC. Fix: end that job, or save to another folder")
        assert content(tmp_path) == before
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it has ended, and its parent has not asked how
        world(2).run(save_seed, location, 1)
    assert loaded_seed(location) == 1
    assert not list(tmp_path.glob(".lock*"))


@pytest.mark.processes
def test_another_process_under_the_same_id_holds_no_lock(tmp_path: Path) -> None:
    with another_job(tmp_path / "elsewhere") as pid:
        leave_lock(tmp_path, replace(this_process(), pid=pid))
        world(2).run(save_seed, tmp_path, 1)
    assert loaded_seed(tmp_path) == 1


@pytest.mark.processes
def test_a_child_process_does_not_hold_the_locks_of_its_parent(tmp_path: Path) -> None:
    def child_of_the_holder() -> None:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with pytest.raises(CheckpointError, match=f"is held by process {os.getppid()} on"):
                    save(tmp_path, {"x": 1}, step=1)
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0

    with lock(tmp_path):
        child_of_the_holder()


def test_a_job_saves_inside_its_own_lock_and_gives_it_back_at_the_end(tmp_path: Path) -> None:
    def body() -> None:
        with lock(tmp_path):
            save_seed(tmp_path, 1)
            with lock(tmp_path):
                save_seed(tmp_path, 2)
            assert collectives.rank() or (tmp_path / ".lock").exists()

    world(2).run(body)
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "step-00000001", "step-00000002"}


FILES = ("rank-0000.safetensors", "rank-0001.safetensors")


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks that are renewed, and count as given up, within a moment."""
    for name, seconds in {"BEAT_SECONDS": 0.02, "SILENT_SECONDS": 0.4, "POLL_SECONDS": 0.01}.items():
        monkeypatch.setattr(writer_lock, name, seconds)


ELSEWHERE = replace(this_process(), host="far", pid=12, boot="another")


@pytest.mark.usefixtures("soon")
def test_a_process_elsewhere_holds_the_lock_while_it_renews_it(tmp_path: Path) -> None:
    leave_lock(tmp_path, ELSEWHERE)
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(0.02):
            FolderStore(tmp_path).remove(".lock-renewed")
            FolderStore(tmp_path).write(".lock-renewed", 8, [secrets.token_bytes(8)])

    thread = threading.Thread(target=renew)
    thread.start()
    text = refused(tmp_path)
    ended.set()
    thread.join()
    assert f"its lock is held by process 12 on far, which took it at {ELSEWHERE.since}. Fix: end that job" in text
    world(2).run(save_seed, tmp_path, 1)
    assert loaded_seed(tmp_path) == 1


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("what", [b"", b"{}", b"[1]", b'{"pid": 1}', b"\xff"])
def test_a_lock_that_says_nothing_and_is_not_renewed_is_taken(tmp_path: Path, what: bytes) -> None:
    (tmp_path / ".lock").write_bytes(what)
    world(2).run(save_seed, tmp_path, 1)
    assert loaded_seed(tmp_path) == 1


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("where", ["", "file://", "memory://"])
def test_a_lock_is_renewed_while_it_is_held(tmp_path: Path, where: str) -> None:
    location = f"{where}{tmp_path}"
    store = store_at(location)
    with lock(location):
        content, stamps = store.read_short(".lock"), set[bytes | None]()
        while len(stamps) < 4:
            stamps.add(store.read_short(".lock-renewed"))
        assert content == store.read_short(".lock")
    assert not store.names()


@pytest.mark.parametrize(
    ("writer", "said"), [(ELSEWHERE, f"held by {ELSEWHERE}"), (None, "gone")], ids=["taken", "removed"]
)
def test_a_job_that_has_lost_its_lock_does_not_commit(tmp_path: Path, writer: Writer | None, said: str) -> None:
    world(2).run(save_seed, tmp_path, 1)

    def body() -> None:
        with lock(tmp_path):
            if writer is None:
                (tmp_path / ".lock").unlink(missing_ok=True)
            else:
                leave_lock(tmp_path, writer)
            save_seed(tmp_path, 2)

    text = failed(body)
    assert f"the lock of this job is {said}: a job that does not renew it for 60 s counts as ended." in text
    assert loaded_seed(tmp_path) == 1
    assert (tmp_path / ".lock").exists() == (writer is not None)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 9)], ids=["gone", "shorter"])
def test_a_file_that_vanishes_before_the_commit_is_no_success(
    tmp_path: Path, file: str, damage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world(2).run(save_seed, tmp_path, 1)
    before = content(tmp_path)
    written = []

    def watched(folder: Path) -> CheckpointStore:
        def before_call(method: str, args: tuple[Any, ...]) -> None:
            if method == "write":
                written.append(args[0])
            elif len(written) == 2:  # the first call after all ranks have written
                damage(*tmp_path.glob(f".tmp-*/{file}"))
                written.clear()

        return watched_at(folder, before_call)

    monkeypatch.setattr(saving, "store_at", watched)
    text = refused(tmp_path, 2)
    assert f"/{file}: " in text
    assert ("No such file" in text) or ("has 9 bytes, the manifest says " in text)
    assert content(tmp_path) == before


def test_a_failing_fsync_names_the_file_or_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, named = os.fsync, set()
    for moment in count(1):
        calls = count(1)

        def failing(descriptor: int) -> None:
            if next(calls) == moment:  # noqa: B023
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            fsync(descriptor)

        folder = tmp_path / f"{moment}"
        monkeypatch.setattr(os, "fsync", failing)
        try:
            text = refused(folder)
        except AssertionError:
            break
        finally:
            monkeypatch.setattr(os, "fsync", fsync)
        path = text.rpartition("Input/output error: ")[2]
        assert path.startswith(str(tmp_path)), text
        named.add(path.replace(str(folder), "").rpartition("/")[2][:4])
        assert not folder.exists() or latest(folder) is None
        world(2).run(save_seed, folder, 1)
        assert loaded_seed(folder) == 1
    assert {name[:4] for name in (*FILES, "manifest.json", ".tmp-latest")} <= named
    assert moment >= 7


@pytest.mark.parametrize("name", ["step-7", "step-00000007"])
def test_a_folder_renamed_after_another_step_is_refused(tmp_path: Path, name: str) -> None:
    first, second = (world(2).run(save_seed, tmp_path, step)[0] for step in (1, 2))
    renamed = second.rename(tmp_path / name)
    said = f"{renamed}: is named after step 7 and holds step 2. Fix: give it the name that it was saved under"
    assert said in failed(lambda: load(renamed, {}))
    with pytest.raises(CheckpointError) as caught:
        read_manifest(renamed)
    assert str(caught.value) == said
    with pytest.raises(Refused):
        read_checkpoint(renamed)
    with pytest.warns(UserWarning, match="is named after step 7") if len(name) > 8 else nullcontext():
        assert latest(tmp_path) == first
    elsewhere = renamed.rename(tmp_path / "mine")
    assert loaded_seed(elsewhere) == 2
    read_checkpoint(elsewhere)


def test_a_folder_has_one_lock_whatever_its_name_and_the_working_directory_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    with lock("link"):
        save("run", {"x": 1}, step=1)
        monkeypatch.chdir("/")
        save(tmp_path / "link", {"x": 1}, step=2)
    monkeypatch.chdir(tmp_path)
    pending = save_async("run", {"x": 1}, step=3)
    monkeypatch.chdir("/")
    assert pending.wait() == Path("run/step-00000003")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "latest",
        *(f"step-0000000{i}" for i in "123"),
    ]
