"""Saving while training goes on: a copy of the state is written by a thread of each rank.

    pending = save_async("runs/1", state_of(module, optimizer), step=1200)
    ...                                    # training goes on and changes the state
    path = pending.wait()

No thread but the main one may communicate. So rank 0 learns from files what the others have written: beside its
data, each puts a report into the draft. The thread of rank 0 commits when all reports are there.
"""

import atexit
import concurrent.futures.thread  # noqa: F401 - registers its end before the one below
import json
import os
import sys
import threading
from collections.abc import Mapping
from contextlib import closing, suppress
from os import PathLike
from pathlib import Path
from time import monotonic
from typing import Any

from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._layout import checked
from shardwise.checkpoint.collective_errors import on_all_ranks, text_of
from shardwise.checkpoint.files import read_bytes
from shardwise.checkpoint.retention import Keep
from shardwise.checkpoint.saving import AllSums, Contents, Saving, Sums, finish_pending, forget_pending, set_pending
from shardwise.errors import CheckpointError, NotFiniteError, UnreachableError

POLL_SECONDS = 0.05  # between two looks for reports
EXIT_SECONDS = 60.0  # for the reports of other ranks after the program of this one has ended


class _Memory(dict[str, Tensor]):
    """The copy of the state that a rank saved last, for the next one."""


@checked
def save_async(
    folder: str | PathLike[str],
    state: Mapping[str, Any],
    *,
    step: int,
    metadata: Mapping[str, Any] | None = None,
    keep: int | Keep | None = None,
    overwrite: bool = False,
    require_finite: bool = False,
) -> "PendingSave":
    """`save` in the background: returns when `state` is copied and may change; all ranks of the world call it.

        pending = save_async("runs/1", state_of(module, optimizer), step=1200)

    One save goes on at a time: the next `save`, `save_async`, `load` or `restore` waits for it first, and raises
    why it failed. At exit the program waits for it, up to 60 s for other ranks; if it failed and no call has raised
    that, the program prints why and exits with code 1. The lock of the folder is held until it is complete.

    Each rank keeps the memory of its copy for the next one, so it needs room for what it holds twice.

    Args:
        folder, state, step, metadata, keep, overwrite, require_finite: as of `save`.

    Raises:
        CheckpointError: nothing was begun, or the previous save failed; the same text on every rank.
        MismatchError: ranks passed different names, layouts, values or arguments.
    """
    finish_pending()
    saving = Saving(folder, Contents(state, metadata), step, keep, overwrite, require_finite)
    saving.prepare()
    try:
        draft = saving.begin()
        memory = collectives.owner().state(_Memory)
        try:
            on_all_ranks(saving.what, lambda: saving.contents.take_copy(memory))
        except BaseException:
            saving.abandon(draft)
            raise
    except BaseException:
        saving.release()
        raise
    pending = PendingSave(saving, draft, collectives.world_size())
    set_pending(pending)
    return pending


class PendingSave:
    """A checkpoint that is being written, made by `save_async`."""

    def __init__(self, saving: Saving, draft: str, world_size: int) -> None:
        self.what = saving.what
        self._saving, self._draft, self._world_size = saving, draft, world_size
        self._error: Exception | None = None
        # Why the report of this rank could not be written; others may have read it all the same.
        self._unsent: Exception | None = None
        self._version = ""
        self._reported = threading.Event()  # this rank has written its part and the report of it, or failed
        self._given_up = threading.Event()  # some rank has failed
        self._is_known = False
        self._thread = threading.Thread(target=self._run, name=saving.what)
        _unfinished.add(self)
        self._thread.start()

    def done(self) -> bool:
        """Whether this rank has nothing left to write; `wait` says whether all have succeeded."""
        return not self._thread.is_alive()

    def wait(self) -> Path | str:
        """The checkpoint, when it is complete; all ranks call it.

        Raises:
            CheckpointError: nothing was saved; the same text on every rank says where and why.
            NotFiniteError: so for `require_finite`.
        """
        try:
            all_sent = all(on_all_ranks(self.what, self._own_part))
            if not all_sent:
                self._given_up.set()
            kind, text = on_all_ranks(self.what, lambda: self._outcome(all_sent))[0]
            if kind == "unsent":
                on_all_ranks(self.what, self._raise_unsent)
        except BaseException:
            self._given_up.set()
            raise
        finally:
            self._thread.join()
            self._is_known = True
            _unfinished.discard(self)
            forget_pending(self)
        if kind == "not finite":
            raise NotFiniteError(text)
        return self._saving.store.location(text)

    def _own_part(self) -> bool:
        """Whether the report of this rank was written."""
        self._reported.wait()
        if self._error is not None and not isinstance(self._error, NotFiniteError):
            raise self._error
        return self._unsent is None

    def _raise_unsent(self) -> None:
        if self._unsent is not None:
            raise self._unsent

    def _outcome(self, all_sent: bool) -> tuple[str, str]:
        """What became of the save, on rank 0. All ranks have reported, so this does not take long."""
        if not self._saving.is_first:
            return "", ""
        self._thread.join()
        if isinstance(self._error, NotFiniteError):
            return "not finite", str(self._error)
        if self._error is not None:
            if not all_sent:
                return "unsent", ""
            raise self._error
        return "saved", self._version

    def _run(self) -> None:
        saving = self._saving
        sums: Sums = []
        try:
            sums = saving.contents.write(saving.store, self._draft)
            self._send(sums)
        except Exception as error:  # noqa: BLE001 - whatever it is, `wait` raises it
            self._error = error
            with suppress(Exception):  # then rank 0 learns it in `wait`
                _write_report(saving, self._draft, {"failed": text_of(error)})
        finally:
            self._reported.set()
            if saving.is_first:
                self._finish(sums)
                saving.release()

    def _send(self, sums: Sums) -> None:
        if not self._saving.is_first:
            try:
                _write_report(self._saving, self._draft, {"sums": sums})
            except (OSError, CheckpointError) as error:
                self._unsent = error

    def _finish(self, sums: Sums) -> None:
        """Commit, or remove the draft, when all ranks have written; on rank 0."""
        try:
            others = self._reports()
            if self._error is None:
                self._saving.check_finite([sums, *others])
                self._version = self._saving.commit(self._draft, [sums, *others])
        except Exception as error:  # noqa: BLE001 - `wait` raises it
            self._error = self._error or error
        if self._error is not None:
            self._saving.abandon(self._draft)

    def _reports(self) -> AllSums:
        """What the other ranks have written, in their order. Removes the reports."""
        found: dict[int, dict[str, Any]] = {}
        store, ended = self._saving.store, None
        while missing := [rank for rank in range(1, self._world_size) if rank not in found]:
            for rank in missing:
                report = _read_report(self._saving, self._draft, rank)
                if report is not None:
                    found[rank] = report
            if ended is None and _program_has_ended.is_set():
                ended = monotonic()
            if self._given_up.is_set() or (ended is not None and monotonic() - ended > EXIT_SECONDS):
                raise CheckpointError(
                    f"there is no report of ranks {', '.join(map(str, missing))}. "
                    f"Fix: see why they ended; all ranks call wait() before their programs end"
                )
            self._given_up.wait(POLL_SECONDS)
        failed = {rank: str(report["failed"]) for rank, report in found.items() if "failed" in report}
        if failed:
            raise CheckpointError("; ".join(f"rank {rank}: {text}" for rank, text in sorted(failed.items())))
        for rank in found:
            store.erase(self._draft, _report_name(rank))
        return [[(crc, finite) for crc, finite in found[rank]["sums"]] for rank in sorted(found)]

    def join(self) -> None:
        """Wait until its thread has ended."""
        self._thread.join()

    def unknown_error(self) -> Exception | None:
        """Why it failed, if no call has raised it; its thread has ended."""
        if self._is_known:
            return None
        return self._error or self._unsent


_unfinished: set[PendingSave] = set()
_program_has_ended = threading.Event()


def _join_at_exit() -> None:
    """Runs at the end of the main thread, before executors refuse work, which drivers of object stores give them."""
    _program_has_ended.set()
    for save in _unfinished:
        save.join()


# The executors of `concurrent.futures` know of the end by the same call; what is registered last runs first.
threading._register_atexit(_join_at_exit)  # type: ignore[attr-defined]


@atexit.register
def _exit_with_failure() -> None:
    failed = [(save, error) for save in _unfinished if (error := save.unknown_error()) is not None]
    for save, error in failed:
        sys.stderr.write(f"{save.what} failed: {text_of(error)}\n")
    if failed:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # an exit handler has no other way to say that the program has failed


def _report_name(rank: int) -> str:
    return f"report-{rank:04d}.json"


def _write_report(saving: Saving, draft: str, report: Mapping[str, object]) -> None:
    data = json.dumps(report).encode() + b"\n"
    saving.store.write(draft, _report_name(saving.contents.rank), len(data), [data])


def _read_report(saving: Saving, draft: str, rank: int) -> dict[str, Any] | None:
    """The report of a rank; None if it is not there in full."""
    try:
        with closing(saving.store.open(draft, _report_name(rank))) as file:
            data = read_bytes(file)
    except UnreachableError:
        raise
    except CheckpointError:
        return None
    if not data.endswith(b"\n"):
        return None
    try:
        report: dict[str, Any] = json.loads(data)
    except ValueError:  # a write failed in its middle; that rank says so in `wait`
        return None
    return report
