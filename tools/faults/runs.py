"""Operations on checkpoints whose processes meet one fault each: killed, stopped, or an operation on a file fails."""

import json
import os
import random
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

import torch
import torch.distributed as dist

from shardwise._collectives import init_processes
from shardwise.errors import ShardwiseError
from tools.faults.operations import OPERATIONS, Operation, leftovers, renewed, state_of
from tools.faults.points import KINDS, count_points, fail_at

TIMEOUT_SECONDS = 2.0  # of a collective
PATIENCE_SECONDS = 20.0  # a process that takes longer hangs
POLL_SECONDS = 0.005


@dataclass(frozen=True)
class Fault:
    """A process meets `kind` at the operation `number` on files."""

    operation: str
    rank: int
    number: int
    kind: str

    def __str__(self) -> str:
        return f"{self.operation}: {self.kind} at operation {self.number} of rank {self.rank}"


@dataclass(frozen=True)
class Outcome:
    """What came of it.

    Attributes:
        met: at which kind of operation the fault was met; None if the process had fewer operations.
        state: "old" or "new".
        problems: what should not be: a word for the table, and what happened.
    """

    fault: Fault
    met: str | None
    state: str
    problems: tuple[tuple[str, str], ...]


class Rank:
    """A process that was forked, and what it says at its end."""

    def __init__(self, body: Callable[[], dict[str, object]]) -> None:
        self.said = Path(tempfile.mkstemp()[1])
        self.pid = os.fork()
        self.status: int | None = None
        if not self.pid:
            code = 1
            try:
                torch.set_num_threads(1)
                self.said.write_text(json.dumps(body()), encoding="utf-8")
                code = 0
            finally:
                os._exit(code)

    def ended(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = status if pid else None
        return self.status is not None

    def answer(self) -> dict[str, object]:
        """Of a process that has ended."""
        assert self.status is not None
        text = self.said.read_text(encoding="utf-8")
        self.said.unlink()
        if os.WIFSIGNALED(self.status):
            return {"killed": os.WTERMSIG(self.status)}
        return dict(json.loads(text)) if text else {"foreign": f"exit code {self.status}"}


def _in_world(rank: int, ranks: int, store: Path, act: Callable[[], object]) -> dict[str, object]:
    """What a rank says: that it is done, or the error."""
    if ranks > 1:
        init_processes(rank, ranks, str(store), timeout_seconds=TIMEOUT_SECONDS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            act()
        except ShardwiseError as error:
            return {"error": str(error)}
        except BaseException as error:  # noqa: BLE001 - of whatever kind, it is what is looked for
            return {"foreign": f"{type(error).__name__}: {error}"}
    if ranks > 1:
        dist.destroy_process_group()
    return {"done": [str(warning.message) for warning in caught]}


def _start(operation: Operation, folder: Path, fault: Fault | None, points: Path | None = None) -> list[Rank]:
    """Processes that do the operation, one of which meets the fault; each writes the operations that it came to."""
    store = folder.with_name(f"{folder.name}.store")
    store.unlink(missing_ok=True)

    def body(rank: int) -> dict[str, object]:
        seen: list[str] = []

        def act() -> None:
            nonlocal seen
            if fault is not None and rank == fault.rank:
                seen = fail_at(fault.number, fault.kind, folder)
            elif points is not None:
                seen = count_points(folder)
            operation.act(folder)

        said = _in_world(rank, operation.ranks, store, act)
        return said | {"seen": list(seen)}

    def of(rank: int) -> Callable[[], dict[str, object]]:
        return lambda: body(rank)

    return [Rank(of(rank)) for rank in range(operation.ranks)]


def _wait(processes: list[Rank], seconds: float) -> bool:
    """Whether all end in time."""
    until = monotonic() + seconds
    while sum(process.ended() for process in processes) < len(processes):
        if monotonic() > until:
            return False
        sleep(POLL_SECONDS)
    return True


def _wait_for_stop(process: Rank) -> None:
    """Until the process has stopped or ended."""
    until = monotonic() + PATIENCE_SECONDS
    while not process.ended() and monotonic() < until:
        if Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "T":
            return
        sleep(POLL_SECONDS)


def prepared(operation: Operation, folder: Path) -> Path:
    """A folder in the old state."""
    folder.mkdir(parents=True)
    store = folder.with_name(f"{folder.name}.store")

    def of(rank: int) -> Callable[[], dict[str, object]]:
        return lambda: _in_world(rank, operation.ranks, store, lambda: operation.prepare(folder))

    processes = [Rank(of(rank)) for rank in range(operation.ranks)]
    assert _wait(processes, PATIENCE_SECONDS)
    for process in processes:
        answer = process.answer()
        assert "done" in answer, answer
    return folder


def points_of(operation: Operation, template: Path, folder: Path) -> list[list[str]]:
    """The operations on files of each rank where nothing fails."""
    processes = _start(operation, renewed(template, folder), None, folder)
    assert _wait(processes, PATIENCE_SECONDS)
    answers = [process.answer() for process in processes]
    assert all("done" in answer for answer in answers), answers
    assert state_of(operation, folder) == "new"
    return [answer["seen"] for answer in answers]  # type: ignore[misc]


def run(fault: Fault, template: Path, folder: Path, names: list[str]) -> Outcome:
    """Let one process of an operation meet the fault; look at what it left; do the operation once more.

    Args:
        names: the operations on files of that rank where nothing fails, for the table.
    """
    operation = OPERATIONS[fault.operation]
    renewed(template, folder)
    processes = _start(operation, folder, fault)
    answers, problems = _watched(processes, fault)
    met = names[fault.number - 1] if fault.number <= len(names) else "end"
    state = state_of(operation, folder)
    problems += _judged(fault, folder, answers, state)
    if not problems:
        problems += _again(operation, folder)
    return Outcome(fault, met, state, tuple(problems))


def _watched(processes: list[Rank], fault: Fault) -> tuple[list[dict[str, object]], list[tuple[str, str]]]:
    """What the processes say. One that is stopped goes on when the others have given up."""
    others = [process for rank, process in enumerate(processes) if rank != fault.rank]
    problems: list[tuple[str, str]] = []
    if fault.kind == "stop":
        if others:
            in_time = _wait(others, PATIENCE_SECONDS)
        else:
            in_time = True
            _wait_for_stop(processes[0])
        with suppress(ProcessLookupError):
            if not processes[fault.rank].ended():
                os.kill(processes[fault.rank].pid, signal.SIGCONT)
        in_time = _wait(processes, PATIENCE_SECONDS) and in_time
    else:
        in_time = _wait(processes, PATIENCE_SECONDS)
    if not in_time:
        hanging = [rank for rank, process in enumerate(processes) if not process.ended()]
        problems.append(("hang", f"ranks {hanging} did not end in time"))
    for process in processes:
        if not process.ended():
            os.kill(process.pid, signal.SIGKILL)
    _wait(processes, PATIENCE_SECONDS)
    return [process.answer() for process in processes], problems


def _judged(fault: Fault, folder: Path, answers: list[dict[str, object]], state: str) -> Iterator[tuple[str, str]]:
    """Problems of what the processes said, and of the state that they left."""
    if state not in ("old", "new"):
        yield ("lost" if state.startswith("lost") else "silent"), state
    if state != "new" and any("done" in answer for answer in answers):
        yield "silent", f"a rank has saved, and the state is {state}"
    is_errno = fault.kind not in ("kill", "stop")
    if is_errno and state == "new" and all("error" in answer for answer in answers):
        yield "silent", f"all ranks have failed, and the state is new: {answers[0]['error']}"
    texts = {str(answer["error"]) for answer in answers if "error" in answer}
    if is_errno and len(texts) > 1:
        yield "unnamed", f"ranks say different things: {sorted(texts)}"
    for rank, answer in enumerate(answers):
        if "foreign" in answer or ("killed" in answer and (rank, fault.kind) != (fault.rank, "kill")):
            yield "unnamed", f"rank {rank}: {answer}"
        if "error" in answer and not _is_named(fault, folder, str(answer["error"])):
            yield "unnamed", f"rank {rank}: {answer['error']}"


def _is_named(fault: Fault, folder: Path, text: str) -> bool:
    """Whether the text of an error says where and what."""
    if fault.kind in ("kill", "stop"):
        return f"rank {fault.rank}" in text.lower() or str(folder) in text
    reasons = {"ENOSPC": ("No space left", "no space left"), "EIO": ("Input/output error",)}
    return str(folder) in text and any(reason in text for reason in reasons.get(fault.kind, ("Permission denied",)))


def _again(operation: Operation, folder: Path) -> Iterator[tuple[str, str]]:
    """Problems of the same operation after the fault, in new processes."""
    processes = _start(operation, folder, None)
    if not _wait(processes, PATIENCE_SECONDS):
        yield "hang", "the next one did not end in time"
    for process in processes:
        if not process.ended():
            os.kill(process.pid, signal.SIGKILL)
    _wait(processes, PATIENCE_SECONDS)
    answers = [process.answer() for process in processes]
    exists = [answer for answer in answers if "exists already" in str(answer.get("error"))]
    if not exists and not all("done" in answer for answer in answers):
        yield "stuck", f"the next one: {answers}"
    state = state_of(operation, folder)
    if state != "new":
        yield "stuck", f"after the next one the state is {state}"
    if found := leftovers(folder):
        yield "leftover", f"after the next one there are {found}"


def all_faults(names: dict[str, list[list[str]]], limit: int | None, seed: int) -> list[Fault]:
    """Every fault at every operation on files, or `limit` of them by chance."""
    found = [
        Fault(operation, rank, number, kind)
        for operation, ranks in names.items()
        for rank, seen in enumerate(ranks)
        for number in range(1, len(seen) + 1)
        for kind in KINDS
    ]
    if limit is not None and limit < len(found):
        found = random.Random(seed).sample(found, limit)
    return found
