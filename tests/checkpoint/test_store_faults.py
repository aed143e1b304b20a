"""Whatever operation of a store fails, or is the last of the process: the last good checkpoint loads, to the bit."""

import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from fsspec.core import url_to_fs
from fsspec.implementations.memory import MemoryFileSystem

from shardwise.checkpoint import load, locations, save_async, writer_lock
from shardwise.checkpoint.folder_store import FolderStore
from shardwise.checkpoint.locations import store_at
from shardwise.checkpoint.object_store import ObjectStore
from shardwise.checkpoint.stores import find
from shardwise.errors import CheckpointError, UnreachableError
from shardwise.testing import world
from tests.checkpoint.faults import FAULTS, Fault, LaggingStore, failing_at, faulty_store, killed_at
from tests.checkpoint.states import bits, content, loaded_seed, save_seed, state_of_seed

SAVED = 10  # the step of a later save, and the seed of its values


@dataclass
class Place:
    """Where checkpoints are, and the fault that its stores meet."""

    location: str
    fault: Fault


def names_at(location: str) -> list[str]:
    """Every file or object, by its name from there on."""
    file_system, root = url_to_fs(location)
    return sorted(name.removeprefix(root).lstrip("/") for name in file_system.find(root))


@pytest.fixture(params=["folder", "memory://", "file://"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    fault = Fault()
    for kind in (FolderStore, ObjectStore):
        monkeypatch.setattr(locations, kind.__name__, lambda place, kind=kind: faulty_store(kind(place), fault))
    for name, seconds in {"SILENT_SECONDS": 0.05, "POLL_SECONDS": 0.01}.items():  # of a lock written in part
        monkeypatch.setattr(writer_lock, name, seconds)
    where = {"folder": f"{tmp_path}/run", "memory://": f"memory://{uuid4().hex}", "file://": f"file://{tmp_path}/run"}
    yield Place(where[request.param], fault)
    for name in [name for name in MemoryFileSystem.store if name.startswith(where["memory://"][len("memory:/") :])]:
        del MemoryFileSystem.store[name]
    shutil.rmtree(tmp_path / "run", ignore_errors=True)


def text_of(save_it: Callable[..., object], location: str, seed: int, **options: Any) -> str:
    """Save on this rank; the text of the error, "" if there is none."""
    try:
        save_it(location, seed, **options)
    except CheckpointError as error:
        return str(error)
    return ""


def save_in_background(location: str, seed: int, **options: Any) -> None:
    save_async(location, state_of_seed(seed), **({"step": seed} | options)).wait()


text_of_save, text_of_async = partial(text_of, save_seed), partial(text_of, save_in_background)


def latest_seed(location: str) -> int | None:
    return loaded_seed(location) if locations.latest(location) else None


# The checkpoints that a save finds, the last one last; what it does, with seed 2.
SAVES: dict[str, tuple[tuple[int, ...], Callable[..., str], dict[str, Any]]] = {
    "the first one": ((), text_of_save, {}),
    "a new step": ((1,), text_of_save, {}),
    "a new step, the old one removed": ((1,), text_of_save, {"keep": 1}),
    "an old step replaced": ((1,), text_of_save, {"step": 1, "overwrite": True}),
    "in the background": ((1,), text_of_async, {"step": 1, "overwrite": True}),
    "of a run that was taken back": ((9, 1), text_of_save, {}),
    "of a run that was taken back, replaced": ((9, 4, 1), text_of_save, {"step": 4, "overwrite": True}),
}
EVERY = pytest.mark.slow  # point of failure; without this mark, some


def begun(location: str, save_name: str) -> tuple[int | None, Callable[..., str], dict[str, Any]]:
    """The latest checkpoint before `save_name`, and what that does, after those that it finds were saved."""
    before, do, options = SAVES[save_name]
    for seed in before:
        assert world(2).run(text_of_save, location, seed) == ["", ""]
    return before[-1] if before else None, do, options


def old_or_new(location: str, save_name: str) -> int | None:
    """The seed of the latest checkpoint; each step that is there has one that was saved."""
    for version in store_at(location).versions().values():
        assert loaded_seed(str(store_at(location).location(version))) in {*SAVES[save_name][0], 2}
    return latest_seed(location)


def assert_goes_on(location: str) -> None:
    """The next save succeeds, and removes what was left."""
    assert world(2).run(text_of_save, location, SAVED, keep=1) == ["", ""]
    assert loaded_seed(location) == SAVED
    assert_nothing_left(location)


def assert_nothing_left(location: str) -> None:
    names = names_at(location)
    if "://" not in location:
        assert [name for name in names if name.startswith(".")] == []
        return
    saves = {name.removesuffix(".committed") for name in names if name.endswith(".committed")}
    assert saves
    assert {name.rpartition("/")[0] for name in names if not name.endswith(".committed")} == saves


def sweeps() -> Iterator[Any]:
    """Every fault while a step is replaced, and those of each sort in other saves."""
    for save_name in SAVES:
        replaces = save_name == "an old step replaced"
        for kind in FAULTS if replaces else ("timeout", "torn", "dies"):
            yield pytest.param(save_name, kind, 1, marks=EVERY)
    yield "an old step replaced", "torn", 4
    yield "in the background", "dies", 6


@pytest.mark.filterwarnings("ignore:.*cannot be removed")
@pytest.mark.parametrize(("save_name", "kind", "stride"), [*sweeps()])
def test_a_save_that_meets_a_fault_is_an_error_or_a_checkpoint_never_a_part(
    place: Place, save_name: str, kind: str, stride: int
) -> None:
    seeds, failures = [], 0
    for operation in count(1, stride):
        location = f"{place.location}/{operation}"
        before, do, options = begun(location, save_name)
        place.fault.arm(kind, operation)
        (text,) = set(world(2).run(do, location, 2, **options))
        place.fault.disarm()
        if text:
            failures += 1
            assert text.startswith(f"Saving step {options.get('step', 2)} to {location} failed")
            assert any(said in text for said in ("No space", "Input/output", "Permission", "timed out", "reset by"))
            assert text.count(location) > 1, text
        seeds.append(old_or_new(location, save_name))
        if not kind.startswith("dies"):
            assert seeds[-1] == (before if text else 2)
            assert not text or not [name for name in names_at(location) if name.startswith(".lock")]
        if not place.fault.came_to_it:
            break
        assert_goes_on(location)
    assert not text
    assert failures > 5 // stride
    assert seeds == sorted(seeds, key=lambda seed: seed == 2) or do is text_of_async  # whose threads take any turn
    assert {*seeds} == {before, 2}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("where", "save_name", "stride"),
    [
        *(pytest.param(where, name, 1, marks=EVERY) for where in ("", "file://") for name in SAVES),
        *(("", "of a run that was taken back, replaced", 5), ("", "in the background", 9)),
        ("file://", "an old step replaced", 9),
    ],
)
def test_killed_at_any_moment_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, where: str, save_name: str, stride: int
) -> None:
    outcomes = []
    for moment in count(1, stride):
        location = f"{where}{tmp_path}/{moment}"
        before, do, options = begun(location, save_name)
        killed = killed_at(moment, tmp_path / f"{moment}", lambda: world(2).run(do, location, 2, **options))  # noqa: B023
        outcomes.append(old_or_new(location, save_name))
        if not killed:
            break
        assert_goes_on(location)
    assert len(outcomes) > 8 // stride, "the sweep met hardly any operation"
    assert outcomes == sorted(outcomes, key=lambda seed: seed == 2) or do is text_of_async
    assert {*outcomes} == {before, 2}


@pytest.mark.parametrize(
    ("save_name", "stride"),
    [*(pytest.param(name, 1, marks=EVERY) for name in SAVES), ("a new step, the old one removed", 3)],
)
def test_a_failing_operation_of_the_file_system_changes_nothing(tmp_path: Path, save_name: str, stride: int) -> None:
    failures, complaints = 0, []
    for moment in count(1, stride):
        folder = tmp_path / f"{moment}"
        _, do, options = begun(str(folder), save_name)
        found = content(folder)
        with failing_at(moment, folder) as fails, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            (text,) = set(world(2).run(do, str(folder), 2, **options))
            came_to_it = fails()
        complaints += [str(warning.message) for warning in warned]
        if text:
            failures += 1
            assert came_to_it
            assert text.startswith(f"Saving step {options.get('step', 2)} to {folder} failed")
            assert "no space left" in text.lower()
            left = content(folder)
            if do is text_of_async:  # its draft may stay until the next save
                left = {name: data for name, data in left.items() if not name.startswith(".")}
            assert left == found
            assert world(2).run(do, str(folder), 2, **options) == ["", ""]
        assert loaded_seed(str(folder)) == 2
        if not came_to_it:
            break
        assert_goes_on(str(folder))
    assert failures > 5 // stride, "the sweep met hardly any operation"
    assert bool(complaints) == ("keep" in options)
    assert all("cannot be removed: " in complaint and "No space left" in complaint for complaint in complaints)


@pytest.mark.parametrize("kind", ["input/output error", "dies"])
def test_a_load_that_meets_a_fault_is_an_error_on_all_ranks_or_succeeds(place: Place, kind: str) -> None:
    world(2).run(text_of_save, place.location, 1)

    def body() -> str:
        target, text = state_of_seed(2), ""
        try:
            load(place.location, target)
        except CheckpointError as error:
            text = str(error)
        expected = state_of_seed(2 if text else 1)
        assert target["seed"] == expected["seed"]
        assert all(bits(target[name]) == bits(expected[name]) for name in ("sharded", "replicated"))
        return text

    failures = 0
    for operation in count(1):
        place.fault.arm(kind, operation)
        (text,) = set(world(2).run(body))
        place.fault.disarm()
        failures += bool(text)
        assert not text or text.startswith(f"Loading {place.location}")
        assert not text or text.count(place.location) > 1
        if not place.fault.came_to_it:
            break
    assert not text
    assert failures > 4 or place.location.startswith("/")


def test_a_store_that_does_not_answer_is_not_an_older_checkpoint(place: Place) -> None:
    """It is not known whether the last one is complete, so nothing older is taken for the last one."""
    for seed in (1, 2):
        world(2).run(text_of_save, place.location, seed)

    def found() -> str:
        try:
            return str(find(store_at(place.location))[1].step)
        except (UnreachableError, OSError) as error:
            return str(error)

    for operation in count(1):
        place.fault.arm("timeout", operation)
        text = found()
        place.fault.disarm()
        assert text == "2" or "timed out" in text
        if not place.fault.came_to_it:
            break


@pytest.fixture(params=["memory://", "file://"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(locations, "ObjectStore", LaggingStore)
    return f"{request.param}{tmp_path}"


def test_before_a_listing_shows_a_save_there_is_the_one_before(url: str) -> None:
    world(2).run(text_of_save, url, 1)
    with LaggingStore.stale(url):
        assert world(2).run(text_of_save, url, 2) == ["", ""]
        assert loaded_seed(url) == 1
        assert world(2).run(text_of_save, url, 3) == ["", ""]
    assert loaded_seed(url) == 3
    world(2).run(text_of_save, url, 4)
    assert sorted(store_at(url).versions()) == [1, 2, 3, 4]
    assert_nothing_left(url)


def test_a_save_that_a_listing_does_not_show_as_committed_is_not_removed(url: str) -> None:
    """What is removed is what has no object ".committed" when that is looked for itself."""
    world(2).run(text_of_save, url, 1)
    (marker,) = [name for name in names_at(url) if name.endswith(".committed")]
    ObjectStore(url).remove(marker)
    with LaggingStore.stale(url):
        ObjectStore(url).write(marker, 0, [])
        assert world(2).run(text_of_save, url, 2) == ["", ""]
    assert loaded_seed(f"{url}/step-00000001") == 1


def test_a_step_replaced_while_listings_lag_is_the_new_one_when_they_do_not(url: str) -> None:
    with LaggingStore.stale(url):
        for seed in (1, 2):
            assert world(2).run(text_of_save, url, seed, step=7) == ["", ""]  # the first one is not seen
        assert locations.latest(url) is None
    assert loaded_seed(url) == 2
    with LaggingStore.stale(url):
        assert world(2).run(text_of_save, url, 3, step=7, overwrite=True) == ["", ""]
        with pytest.raises(CheckpointError, match=r"there is no complete checkpoint in .*\n.*manifest.json: cannot be"):
            loaded_seed(url)  # only the one that was replaced is listed
    assert loaded_seed(url) == 3
    world(2).run(text_of_save, url, 4, step=8)
    assert_nothing_left(url)


def test_a_marker_that_a_listing_shows_after_it_was_removed_does_not_cost_the_save_before(url: str) -> None:
    world(2).run(text_of_save, url, 1)
    store, step = ObjectStore(url), "step-00000001"
    store.write(f"{step}/9999999999999998-00000000.committed", 0, [])
    with LaggingStore.stale(url):
        store.remove(f"{step}/9999999999999998-00000000.committed")
        assert world(2).run(text_of_save, url, 2) == ["", ""]
    assert loaded_seed(f"{url}/{step}") == 1
    assert loaded_seed(url) == 2
