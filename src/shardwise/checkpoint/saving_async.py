"""Saving while training goes on: a copy of the state is written by a thread of each rank.

    pending = save_async("runs/1", state_of(module, optimizer), step=1200)
    ...                                    # training goes on and changes the state
    path = pending.wait()

The thread of rank 0 commits when all ranks have written. Only main threads communicate, so each rank puts a report into
the draft; `wait` sends it, if that comes first.
"""

import atexit
import concurrent.futures.thread  # noqa: F401 - registers its end before the one below
import json
import os
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from os import PathLike
from pathlib import Path
from time import monotonic
from typing import Any

from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._layout import checked
from shardwise.checkpoint.collective_errors import RanksError, decide, text_of
from shardwise.checkpoint.files import read_bytes
from shardwise.checkpoint.retention import Keep
from shardwise.checkpoint.saving import Contents, Report, Saving, finish_pending, forget_pending, set_pending
from shardwise.errors import CheckpointError, NotFiniteError

POLL_SECONDS = (0.05, 5.0)  # between two looks for reports: at first, and at most
EXIT_SECONDS = 60.0  # for the reports of other ranks after the program of this one has ended
_REPORT = re.compile(r"report-(\d{4,9})\.json", re.ASCII)


class _Memory(dict[str, Tensor]):
    """The copy of the state that a rank saved last, reused for the next one."""


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
    """`save` in the background. Returns when `state` is copied and may change. All ranks of the world call it.

        pending = save_async("runs/1", state_of(module, optimizer), step=1200)

    One save runs at a time: the next `save`, `save_async`, `load` or `restore` waits for it first, and raises its
    error. At exit the program waits for it, up to 60 s for other ranks. If it failed and no call has raised its error,
    the program prints it and exits with code 1. The lock of the folder is held until it is complete.

    Each rank keeps the memory of its copy for the next save, so it needs memory for its state twice.

    Args:
        folder, state, step, metadata, keep, overwrite, require_finite: as of `save`.

    Raises:
        CheckpointError: nothing has begun, or the previous save failed; the same text on every rank.
        MismatchError: ranks passed different names, layouts, values or arguments.
    """
    finish_pending()
    saving = Saving(folder, Contents(state, metadata), step, keep, overwrite, require_finite)
    try:
        draft = saving.begin()
        memory = collectives.owner().state(_Memory)
        decide(saving.what, lambda: saving.contents.take_copy(memory), lambda done: None)
    except BaseException:
        saving.release()
        raise
    pending = PendingSave(saving, draft)
    set_pending(pending)
    return pending


class PendingSave:
    """A checkpoint that is being written, made by `save_async`."""

    def __init__(self, saving: Saving, draft: str) -> None:
        self.what = saving.what
        self._saving, self._draft = saving, draft
        self._rank, self._size = collectives.rank(), collectives.world_size()
        self.error: Exception | None = None
        self._unwritten = ""  # why this rank could not write what it holds
        self._version = ""
        self._report: Report = (0, (), ())
        self._has_written = threading.Event()  # this rank, or it has failed
        self._reports: Sequence[Report | str] = ()  # of all ranks, by `wait`; a text says why a rank has failed
        self._has_reports = threading.Event()
        self.thread = threading.Thread(target=self._run, name=saving.what)
        _unfinished.add(self)
        self.thread.start()

    def done(self) -> bool:
        """Whether this rank has finished writing. `wait` says whether all ranks have succeeded."""
        return not self.thread.is_alive()

    def wait(self) -> Path | str:
        """The path of the complete checkpoint; all ranks call it.

        Raises:
            CheckpointError: nothing was saved; the same text on every rank says where and why.
            NotFiniteError: nothing was saved, by `require_finite`.
        """
        try:
            version = decide(self.what, self._own_report, self._outcome)
        finally:
            self._has_reports.set()
            self.thread.join()
            _unfinished.discard(self)
            forget_pending(self)
        return self._saving.store.location(version)

    def _own_report(self) -> Report | str:
        self._has_written.wait()
        return self._unwritten or self._report

    def _outcome(self, reports: Sequence[Report | str]) -> str:
        """The version, on rank 0, after all ranks have written or failed."""
        self._reports = reports
        self._has_reports.set()
        self.thread.join()
        if self.error is None:
            return self._version
        self._saving.abandon(self._draft)
        if isinstance(self.error, NotFiniteError):
            raise self.error
        failed = {rank: report for rank, report in enumerate(reports) if isinstance(report, str)}
        raise RanksError(failed or {0: text_of(self.error)})

    def _run(self) -> None:
        saving = self._saving
        try:
            self._report = saving.contents.write(saving.store, self._draft)
            if self._rank:
                data = json.dumps(self._report).encode() + b"\n"
                with suppress(OSError, CheckpointError):  # rank 0 learns it in `wait`
                    saving.store.files.write(f"{self._draft}/report-{self._rank:04d}.json", len(data), [data])
            self._has_written.set()
            if not self._rank:
                self._version = saving.commit(self._draft, self._all_reports())
        except Exception as error:  # noqa: BLE001 - whatever it is, `wait` raises it
            self.error = error
            if not self._has_written.is_set():
                self._unwritten = text_of(error)
        finally:
            self._has_written.set()
            saving.release()

    def _all_reports(self) -> Sequence[Report]:
        """The reports of all ranks in rank order; removes them from the draft."""
        files, delay, until = self._saving.store.files, POLL_SECONDS[0], float("inf")
        found = {0: self._report}
        while len(found) < self._size and monotonic() < until and not self._has_reports.wait(delay):
            delay = min(2 * delay, POLL_SECONDS[1])
            if _program_has_ended.is_set():
                delay, until = POLL_SECONDS[0], min(until, monotonic() + EXIT_SECONDS)
            for rank, path in self._report_paths().items():
                if rank not in found and (report := self._read_report(path)) is not None:
                    found[rank] = report
        if len(found) < self._size:
            found = {rank: report for rank, report in enumerate(self._reports) if not isinstance(report, str)}
        if missing := [f"{rank}" for rank in range(self._size) if rank not in found]:
            raise CheckpointError(
                f"there is no report of ranks {', '.join(missing)}. "
                f"Fix: see why they ended; all ranks call wait() before their programs end"
            )
        for path in self._report_paths().values():
            files.remove(path)
        return [found[rank] for rank in range(self._size)]

    def _report_paths(self) -> dict[int, str]:
        """The reports that a listing of the draft shows, by rank."""
        with suppress(CheckpointError):  # the next look, or `wait`, finds them
            matches = filter(None, map(_REPORT.fullmatch, self._saving.store.sizes(self._draft)))
            return {int(match[1]): f"{self._draft}/{match[0]}" for match in matches}
        return {}

    def _read_report(self, path: str) -> Report | None:
        """A report; None if it is not complete."""
        try:
            with closing(self._saving.store.files.open(path)) as file:
                data = read_bytes(file)
            return json.loads(data) if data.endswith(b"\n") else None
        except (CheckpointError, ValueError):  # as above
            return None


_unfinished: set[PendingSave] = set()  # no call has raised why they failed
_program_has_ended = threading.Event()


def _join_at_exit() -> None:
    """Wait at the end of the main thread, before executors refuse work, which drivers of object stores need."""
    _program_has_ended.set()
    for save in _unfinished:
        save.thread.join()


# The executors of `concurrent.futures` know of the end by the same call; what is registered last runs first.
threading._register_atexit(_join_at_exit)  # type: ignore[attr-defined]


@atexit.register
def _exit_with_failure() -> None:
    failed = [(save, save.error) for save in _unfinished if save.error is not None]
    for save, error in failed:
        sys.stderr.write(f"{save.what} failed: {text_of(error)}\n")
    if failed:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # an exit handler has no other way to say that the program has failed
