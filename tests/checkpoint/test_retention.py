"""Which checkpoints stay, and what is known of them without parsing their manifests again."""

from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise import _collectives as collectives
from shardwise.checkpoint import Keep, latest, load, loading, locations, retention, save, stores
from shardwise.checkpoint.folder_store import FolderStore
from shardwise.checkpoint.locations import store_at
from shardwise.checkpoint.retention import Facts, facts_of
from shardwise.checkpoint.stores import complete_manifest
from shardwise.errors import CheckpointError
from tests.checkpoint.faults import WatchedStore
from tests.checkpoint.states import failed, steps


def test_rules_of_what_stays(tmp_path: Path) -> None:
    losses = {10: 5.0, 20: 1.0, 30: 4.0, 40: None, 50: 1.0, 55: None, 60: 3.0}
    stay = []
    for step, loss in losses.items():
        keep = Keep(last=2, every=30, best=1, metric="loss")
        save(tmp_path, {"x": torch.ones(1)}, step=step, metadata={"loss": loss}, keep=keep)
        stay.append(steps(tmp_path))
    assert stay == [
        *([10], [10, 20], [20, 30], [20, 30, 40]),  # 20 is the best, 30 a multiple
        [30, 40, 50],  # as good as 20, and later
        [30, 50, 55],
        [30, 50, 55, 60],
    ]


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
    facts = {step: Facts(0, {"m": metric}, b"") for step, metric in metrics.items()}
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
    facts = {step: Facts(0, {} if m is None else {"m": m}, b"") for step, m in metrics.items()}
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


def test_a_save_parses_the_manifest_of_no_checkpoint_that_was_there_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "_known", {})
    for step in range(5):
        save(tmp_path, {"x": torch.ones(1)}, step=step)
    parsed: list[str] = []
    original = stores.stored_manifest

    def stored_manifest(store: stores.CheckpointStore, version: str) -> Any:
        parsed.append(version)
        return original(store, version)

    monkeypatch.setattr(stores, "stored_manifest", stored_manifest)
    for step in range(5, 8):
        save(tmp_path, {"x": torch.ones(1)}, step=step, keep=10)
    names = [f"step-{step:08d}" for step in range(8)]
    assert sorted(parsed) == names
    store = FolderStore(tmp_path)
    for name in names:
        facts, manifest = facts_of(store, name), complete_manifest(store, name)
        assert (facts.num_not_finite, facts.metadata) == (0, manifest.metadata)


def test_a_checkpoint_that_lost_a_file_or_was_replaced_is_not_taken_for_what_it_was(tmp_path: Path) -> None:
    state = {"x": torch.ones(3)}
    keep = Keep(last=1, best=1, metric="loss")
    for step, loss in ((1, 1.0), (2, 2.0)):
        save(tmp_path, state, step=step, metadata={"loss": loss}, keep=keep)
    assert steps(tmp_path) == [1, 2]
    store = FolderStore(tmp_path)
    assert facts_of(store, "step-00000001").metadata == {"loss": 1.0}
    save(tmp_path, {"x": torch.tensor([1.0, float("nan"), 0.0])}, step=2, metadata={"loss": 0.5}, overwrite=True)
    assert facts_of(store, "step-00000002") == Facts(1, {"loss": 0.5}, facts_of(store, "step-00000002").files)
    (tmp_path / "step-00000001" / "rank-0000.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="has 0 bytes"):
        facts_of(store, "step-00000001")
    (tmp_path / "step-00000001" / "rank-0000.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        facts_of(store, "step-00000001")
    save(tmp_path, state, step=3, metadata={"loss": 3.0}, keep=keep)
    assert steps(tmp_path) == [1, 2, 3]  # what is not complete is not counted, and not removed
    load(tmp_path, state)


def test_what_is_remembered_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "KNOWN", 3)
    monkeypatch.setattr(retention, "_known", {})
    for step in range(8):
        save(tmp_path, {"x": torch.ones(1)}, step=step, keep=Keep(last=6))
        assert len(retention._known) <= 3
    assert steps(tmp_path) == [2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("scheme", ["", "file://"])
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
        monkeypatch.setattr(module, "store_at", lambda place: WatchedStore(store_at(place), saves))
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
