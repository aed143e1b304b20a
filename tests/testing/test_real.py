"""Real ranks: gloo processes that persist, fail, die and hang."""

import functools
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardwise import DTensor, Mesh, Replicate, distribute_tensor
from shardwise._collectives import all_reduce, all_to_all, barrier, check_ranks, draw_from_torch, rank, world_size
from shardwise.errors import RemoteRankError, ShardwiseError
from shardwise.testing import DeadlockError, world
from shardwise.testing.failures import LATE, SendError
from shardwise.testing.reference import refer
from tests.collectives.real_ranks import run_program
from tests.timeouts import PATIENCE_SECONDS, under_load

pytestmark = pytest.mark.processes

REAL = world(2, real=True)
HERE = str(Path(__file__)).removeprefix(f"{Path.cwd()}/")


def line(fn: Callable[..., object], offset: int) -> int:
    return fn.__code__.co_firstlineno + offset


# ---- values -----------------------------------------------------------------------------------------------


def pid() -> int:
    return os.getpid()


def exchange(scale: float, *, shift: int = 0) -> tuple[list[float], torch.Tensor]:
    counts = [[2, 1], [0, 3]]
    here = rank()
    send = scale * torch.arange(3.0) + 10 * here + shift
    got = all_to_all(send, counts[here], [row[here] for row in counts], (0, 1))
    return got.tolist(), all_reduce(send, "sum", (0, 1))


def draw() -> list[float]:
    return [torch.rand(()).item(), draw_from_torch()]


def threads() -> int:
    return torch.get_num_threads()


def test_processes_persist_from_run_to_run() -> None:
    pids = REAL.run(pid)
    assert REAL.run(pid) == pids
    assert len({*pids, os.getpid()}) == 3


def test_real_ranks_exchange_what_simulated_ranks_exchange() -> None:
    real, simulated = REAL.run(exchange, 0.5, shift=1), world(2).run(exchange, 0.5, shift=1)
    assert [got for got, _ in real] == [got for got, _ in simulated] == [[1.0, 1.5], [2.0, 11.0, 11.5, 12.0]]
    for (_, ours), (_, theirs) in zip(real, simulated, strict=True):
        assert torch.equal(ours, theirs)


def test_worlds_of_different_sizes_stand_side_by_side() -> None:
    pids = REAL.run(pid)
    assert world(1, real=True).run(world_size) == [1]
    assert REAL.run(pid) == pids


def test_real_ranks_start_where_the_callers_generator_is() -> None:
    torch.manual_seed(4)
    assert REAL.run(draw) == world(2).run(draw) == [draw()] * 2


def test_real_ranks_leave_the_other_cores_alone() -> None:
    assert REAL.run(threads) == [1, 1]


# ---- a run knows nothing of those before ------------------------------------------------------------------


def leave_open(what: str) -> None:
    """Ranks do what differs, which no collective finds any more."""
    x = distribute_tensor(torch.ones(3, 2), Mesh((2,)), [Replicate()])
    match what:
        case "values":
            x * torch.full((2,), 1.0 + rank())
        case "seeds":
            torch.manual_seed(0)
            for number in range(3):
                torch.manual_seed(number + rank() * (number == 2))
                torch.rand_like(x)
        case "leaves" if rank() == 1:
            x.clone().detach().requires_grad_()
        case "calls" if rank() == 1:
            check_ranks()


def right() -> list[float]:
    torch.manual_seed(1)
    x = distribute_tensor(torch.ones(3, 2), Mesh((2,)), [Replicate()])
    y = x.clone().detach().requires_grad_()
    (y * torch.ones(2) + torch.rand_like(x).floor()).sum().backward()
    gradient = y.grad
    assert isinstance(gradient, DTensor)
    return gradient.full_tensor().flatten().tolist()


@pytest.mark.parametrize("what", ["values", "seeds", "leaves", "calls"])
def test_what_an_earlier_run_left_open_is_no_error_of_the_next(what: str) -> None:
    REAL.run(leave_open, what)
    assert REAL.run(right) == [[1.0] * 6] * 2


# ---- what cannot be sent ----------------------------------------------------------------------------------


def lock() -> object:
    return threading.Lock()


@pytest.mark.parametrize("fn", [lambda: 1, functools.partial(pid), REAL.run], ids=["lambda", "partial", "method"])
def test_functions_without_a_name_in_a_module_are_refused(fn: Callable[[], object]) -> None:
    with pytest.raises(SendError, match="Fix: define it with `def` at module level"):
        REAL.run(fn)


def test_a_closure_is_refused_by_name() -> None:
    def body() -> None: ...

    with pytest.raises(SendError) as caught:
        REAL.run(body)
    assert str(caught.value) == (
        f"'test_a_closure_is_refused_by_name.<locals>.body' of module {__name__} cannot run on real ranks: "
        "functions are sent there by name, and no module has this one under that name. "
        "Fix: define it with `def` at module level and pass what it needs as arguments."
    )


def test_an_argument_that_cannot_be_pickled_is_named() -> None:
    with pytest.raises(SendError, match=r"^Argument number 0, shift cannot be sent to real ranks"):
        REAL.run(exchange, threading.Lock(), shift=threading.Lock())  # type: ignore[arg-type]


def test_a_result_that_cannot_be_pickled_is_reported_with_the_function() -> None:
    with pytest.raises(SendError, match=r"^The result of lock cannot be pickled") as caught:
        REAL.run(lock)
    assert "ranks 0, 1 raised the same" in caught.value.__notes__


def decorated_twice(fn: Callable[[], int]) -> Callable[[], int]:
    @functools.wraps(fn)
    def inner() -> int:
        return -1

    @functools.wraps(inner)
    def outer() -> int:
        return -2

    return outer


@decorated_twice
def inside() -> int:
    return 7


def test_a_function_is_found_under_its_decorators() -> None:
    original: Callable[[], int] = inside.__wrapped__.__wrapped__  # type: ignore[attr-defined]
    assert refer(original).wrappers == 2
    assert refer(original).resolve() is original
    assert refer(inside).resolve() is inside


# ---- failures: each is followed by a run of all ranks -----------------------------------------------------


class Unfriendly(Exception):  # noqa: N818 - the name is of no matter
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def fail(ranks: tuple[int, ...]) -> None:
    if rank() in ranks:
        raise KeyError("boom")
    barrier((0, 1))


def fail_unfriendly() -> None:
    raise Unfriendly(rank(), 2)


def end(how: str) -> None:
    if rank() == 1:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    barrier((0, 1))


def hang() -> None:
    if rank() == 1:
        time.sleep(1000)
    if rank() == 0:
        barrier((0, 1))


def fail_alone() -> None:
    if rank() == 1:
        raise KeyError("boom")
    for _ in range(3):
        barrier((0, 1))


def run_and_get_pids(
    fn: Callable[..., object], *args: object, error: type[Exception]
) -> pytest.ExceptionInfo[Exception]:
    """What `fn` raises; afterwards a run must succeed, on other processes if one hung or is gone."""
    before = REAL.run(pid)
    with pytest.raises(error) as caught:
        world(2, real=True, timeout=under_load(1.0) if fn is hang else PATIENCE_SECONDS).run(fn, *args)
    after = REAL.run(pid)
    if error in {RemoteRankError, DeadlockError}:
        assert not set(before) & set(after)
        assert all(is_gone(old) for old in before)
    else:
        assert after == before
    assert REAL.run(exchange, 1.0) is not None
    return caught


def is_gone(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_the_exception_of_a_failing_rank_is_raised_with_its_traceback() -> None:
    caught = run_and_get_pids(fail, (1,), error=KeyError)
    assert caught.value.args == ("boom",)
    there, where = caught.value.__notes__
    assert there.startswith("its traceback there:\nTraceback (most recent call last):\n")
    assert f'test_real.py", line {line(fail, 2)}, in fail' in there
    assert "worker.py" not in there
    assert where == "on rank 1 of 2, real"
    last = caught.traceback[-1]  # where pytest's report ends
    assert (Path(last.path).name, last.lineno + 1, last.name) == ("test_real.py", line(fail, 2), "fail")


def test_collectives_that_were_half_done_leave_nothing_in_the_world_after() -> None:
    for _ in range(3):
        run_and_get_pids(fail_alone, error=KeyError)


def test_an_exception_that_cannot_be_pickled_keeps_its_text() -> None:
    caught = run_and_get_pids(fail_unfriendly, error=ShardwiseError)
    assert str(caught.value) == "Unfriendly: 0 and 2 (this exception cannot be pickled)"
    assert caught.value.__notes__[1:] == [
        "on rank 0 of 2, real",
        "rank 1 raised ShardwiseError: Unfriendly: 1 and 2 (this exception cannot be pickled)",
    ]


@pytest.mark.parametrize(
    ("how", "expected", "fix"),
    [
        ("exit", "exited with code 3", "its own output says why; correct that"),
        ("kill", "was killed by SIGKILL", "look whether memory ran out (dmesg); if so, let a rank hold less"),
    ],
    ids=["exit", "kill"],
)
def test_a_rank_that_dies_is_named_with_the_way_it_ended(how: str, expected: str, fix: str) -> None:
    caught = run_and_get_pids(end, how, error=RemoteRankError)
    assert str(caught.value) == f"Rank 1 of 2 {expected}; it was to run end. Fix: {fix}."
    assert getattr(caught.value, "rank", None) == 1


def test_a_rank_that_hangs_is_reported_with_the_stack_of_each() -> None:
    caught = run_and_get_pids(hang, error=DeadlockError)
    text = str(caught.value).splitlines()
    assert re.fullmatch(r"2 real ranks did not run hang within [\d.]+ s:", text[0])
    assert text[1].startswith("  rank 0: running ")
    assert text[2:] == [
        f"      called at {HERE}:{line(hang, 4)} in hang",
        "  rank 1: running",
        f"      called at {HERE}:{line(hang, 2)} in hang",
        f"  {LATE}",
    ]


def test_a_rank_that_died_between_runs_is_replaced() -> None:
    before = REAL.run(pid)
    os.kill(before[0], signal.SIGKILL)
    while before[0] in {child.pid for child in multiprocessing.active_children()}:
        time.sleep(0.01)
    assert not set(before) & set(REAL.run(pid))


def test_modules_that_came_onto_the_path_later_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    REAL.run(pid)
    (tmp_path / "came_later.py").write_text("def answer():\n    return 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "came_later", raising=False)
    import came_later  # type: ignore[import-not-found]

    assert REAL.run(came_later.answer) == [42, 42]


def test_a_function_that_is_in_no_file_is_refused_with_the_fix() -> None:
    code = "from shardwise.testing import world\ndef f(): pass\nworld(2, real=True).run(f)"
    _, _, said = run_program(code)
    assert "SendError: f cannot run on real ranks: it was defined interactively" in said
    assert "%%writefile jobs.py" in said
