"""Plain tensors beside DTensors, and local tensors of Replicate, that differ between ranks: one error on all ranks."""

import re
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise import DTensor, Mesh, Replicate, Shard, distribute_tensor, full
from shardwise import _collectives as collectives
from shardwise._collectives import rank
from shardwise._collectives.checks.calls import CallLog
from shardwise._collectives.checks.ledger import SAMPLE_EVERY
from shardwise._collectives.checks.shared_memory import LATEST
from shardwise._collectives.checks.values import MAX_ELEMENTS
from shardwise._collectives.failures.reports import store_of_world
from shardwise._collectives.processes import TORCH_TRANSPORT
from shardwise.errors import MismatchError, RemoteRankError
from shardwise.testing import world
from shardwise.testing.worlds import World
from tests.collectives.test_different_calls import REAL, SIMULATED, WORLDS, odd, one_text, sharded
from tests.timeouts import PATIENCE_SECONDS

HERE = str(Path(__file__)).removeprefix(f"{Path.cwd()}/")


def table() -> DTensor:
    return distribute_tensor(torch.arange(12.0).view(6, 2), Mesh((3,)), [Shard(0)])


def use(x: torch.Tensor) -> float:
    assert isinstance(x, DTensor)
    return float(x.detach().full_tensor().sum())


def monotone_offsets() -> None:
    use(F.embedding_bag(torch.arange(6), table(), torch.tensor([0, 1 if odd() else 2, 4]), mode="sum"))


def initial_values() -> None:
    x = distribute_tensor(torch.full((4,), 1.0 + odd()), Mesh((3,)), [Shard(0)], src_data_rank=None)
    use(x)


def replicas() -> None:
    x = DTensor.from_local(torch.full((4,), 1.0 + odd()), Mesh((3,)), [Replicate()], run_check=False)
    use(x.redistribute(placements=[Shard(0)]) + 1)


def one_row_of_many() -> None:
    x = torch.zeros(100, 6)
    x[57, 3] = odd()
    use(x * sharded(6).sum(0))


def another_shape_of_values() -> None:
    x = torch.zeros(3 * MAX_ELEMENTS)
    x[:: 3 * MAX_ELEMENTS // 7] = odd()  # in the sample
    use(distribute_tensor(x, Mesh((3,)), [Shard(0)]) + x)


def replicated_parameter() -> DTensor:
    return distribute_tensor(torch.ones(4, 2), Mesh((3,)), [Replicate()]).requires_grad_()


def use_gradient(w: DTensor) -> None:
    assert isinstance(w.grad, DTensor)
    use(w.grad.redistribute(placements=[Shard(0)]))


def backward_with(hook: Callable[[torch.Tensor], torch.Tensor]) -> None:
    w = replicated_parameter()
    w.register_hook(hook)  # type: ignore[no-untyped-call]
    (w * 2).sum().backward()
    use_gradient(w)


def new_data() -> None:
    w = replicated_parameter()
    w.data = torch.full((4, 2), 1.0 + odd())
    use(w.detach().redistribute(placements=[Shard(0)]))


def new_gradient() -> None:
    w = replicated_parameter()
    w.grad = torch.full((4, 2), 1.0 + odd())
    use_gradient(w)


def start_of_backward() -> None:
    w = replicated_parameter()
    (w * 2).backward(torch.full((4, 2), 1.0 + odd()))
    use_gradient(w)


ROWS: Any = {"device_mesh": Mesh((3,)), "placements": [Shard(0)]}
BESIDE = "the plain tensor beside DTensors of shape"
VALUES: dict[str, tuple[Callable[[], object], str]] = {
    "data": (new_data, ".data =: the plain tensor of shape (4, 2), float32"),
    "gradient": (new_gradient, ".grad =: the plain gradient of shape (4, 2), float32"),
    "backward": (start_of_backward, "backward: the plain gradient of shape (4, 2), float32"),
    "batch": (lambda: use(torch.full((4, 6), 1.0 + odd()) @ sharded()), f"matmul: {BESIDE} (4, 6), float32"),
    "ids": (lambda: use(F.embedding(torch.tensor([0, 5 - odd()]), table())), f"embedding: {BESIDE} (2,), int64"),
    "offsets": (monotone_offsets, f"embedding_bag: {BESIDE} (3,), int64"),
    "initial": (initial_values, "distribute_tensor(src_data_rank=None): the tensor of shape (4,), float32"),
    "replicas": (replicas, "from_local: the local tensor of a Replicate axis of shape (4,), float32"),
    "one row": (one_row_of_many, f"mul: {BESIDE} (100, 6), float32"),
    "many": (another_shape_of_values, f"add: {BESIDE} (98304,), float32"),
}


def call(name: str) -> None:
    VALUES[name][0]()


@pytest.mark.parametrize("name", VALUES)
@WORLDS
def test_values_that_differ_are_named_with_line_and_ranks(ranks: World, name: str) -> None:
    (act, what), lines = VALUES[name], one_text(ranks, partial(call, name)).splitlines()
    assert lines[0] == f"{what}, must be the same on all ranks, but is not:"
    named = [line.split(":")[0] for line in lines if line.startswith("  rank ")]
    assert "  rank 1" in named
    assert len(named) > 1
    assert f"  called at {HERE}:" in lines[-2]
    assert lines[-2].endswith(f"in {act.__name__}")
    assert lines[-1].startswith("  Fix: if each rank has its own part, DTensor.from_local(")


def rows_of_zeros() -> None:
    use(torch.zeros(2 + odd(), 6) @ distribute_tensor(torch.ones(6, 4), Mesh((3,)), [Shard(0)]))


def dims_of_one() -> None:
    x = torch.zeros((1,) * 5 + (1 + odd(), 2))
    use(x.movedim(-2, 0) + distribute_tensor(torch.ones(1, 2), Mesh((3,)), [Shard(1)]))


@pytest.mark.parametrize(
    ("act", "shapes"),
    [(rows_of_zeros, ["(2, 6)", "(3, 6)"]), (dims_of_one, ["(1, 1, 1, 1, 2)", "(2, 1, 1, 1, 2)"])],
    ids=lambda x: x.__name__ if callable(x) else "",
)
@WORLDS
def test_other_sizes_of_equal_values_are_named(ranks: World, act: Callable[[], object], shapes: list[str]) -> None:
    """Equal as they are in six elements and in two sums."""
    text = one_text(ranks, act)
    named = re.findall(r"^  rank (\d): shape (\(.*\)): 0, 0", text, re.MULTILINE)
    assert ("1", shapes[1]) in named
    assert {(rank, shapes[int(rank) % 2]) for rank, _ in named} == {*named}
    assert len(named) > 1


def late() -> None:
    """The 64th call of a line differs, of 100."""
    x = sharded()
    for i in range(1, 101):
        use(x * torch.full((6,), 2.0 if odd() and i >= SAMPLE_EVERY - 10 else 1.0))


def test_a_difference_that_appears_later_is_found_at_the_next_comparison() -> None:
    assert "mul: the plain tensor" in one_text(SIMULATED, late)


# ---- numbers --------------------------------------------------------------------------------------------


def checking_numbers(act: Callable[[], object]) -> None:
    collectives.check_values(numbers=True)
    try:
        act()
    finally:
        collectives.check_values()


def in_place() -> None:
    x = sharded()
    x[0] = rank()
    use(x)


def learning_rate() -> None:
    w = replicated_parameter()
    w.grad = distribute_tensor(torch.ones(4, 2), Mesh((3,)), [Replicate()])
    torch.optim.SGD([w], lr=0.1 + rank()).step()
    use(w.redistribute(placements=[Shard(0)]))


def optimizer() -> None:
    w = replicated_parameter()
    w.grad = distribute_tensor(torch.ones(4, 2), Mesh((3,)), [Replicate()])
    (torch.optim.Adam if rank() == 1 else torch.optim.Adagrad)([w], lr=0.1).step()
    use(w.redistribute(placements=[Shard(0)]))


@pytest.mark.parametrize("act", [learning_rate, optimizer])
@WORLDS
def test_optimizers_that_differ_are_found_by_default(ranks: World, act: Callable[[], object]) -> None:
    lines = one_text(ranks, act).splitlines()
    what = "lr" if act is learning_rate else "a digest of its class"
    assert re.fullmatch(
        rf"\w+\.step\(\) of parameter group 0: {what} must be the same on all ranks, but is not:", lines[0]
    )
    assert len({line.partition(": ")[2] for line in lines if line.startswith("  rank ")}) > 1
    assert lines[-1].startswith("  Fix: make the same optimizer with the same options on all ranks")


def after_many_collectives() -> None:
    x = sharded()
    for i in range(400):
        y = x * (2.0 if i < 100 else 2.0 + rank())
        x.sum().item()
    use(y)


NUMBERS: dict[str, tuple[Callable[[], object], str, Sequence[str]]] = {
    "index": (lambda: use(sharded()[rank()]), "__getitem__: argument 1", "012"),
    "one bound": (lambda: use(sharded()[:, 1 : 3 + odd()]), "__getitem__: argument 1[1].stop", "343"),
    "factor": (lambda: use((sharded() * (2.0 + rank())).relu()), "mul: argument 1", "234"),
    "in place": (in_place, "__setitem__: argument 2", "012"),
    "one element": (lambda: use(sharded() * torch.tensor([1.0 + rank()])), "mul: argument 1", "123"),
    "filled": (lambda: use(full((4,), fill_value=rank(), **ROWS)), "a factory: fill_value", "012"),
    "later": (after_many_collectives, "mul: argument 1", "234"),
    "backward": (lambda: backward_with(lambda gradient: gradient * (1.0 + rank())), "mul: argument 1", "123"),
}


def with_numbers(name: str) -> None:
    checking_numbers(NUMBERS[name][0])


@pytest.mark.parametrize("name", NUMBERS)
@WORLDS
def test_numbers_that_differ_are_named_with_argument_line_and_values(ranks: World, name: str) -> None:
    (_, what, values), lines = NUMBERS[name], one_text(ranks, partial(with_numbers, name)).splitlines()
    assert lines[0] == f"{what} must be the same on all ranks, but is not:"
    named = [line for line in lines if line.startswith("  rank ")]
    assert len(named) > 1
    assert set(named) <= {f"  rank {i}: {value}" for i, value in enumerate(values)}
    assert lines[-2].startswith(f"  called at {HERE}:")
    assert lines[-1].startswith("  Fix: pass the same number on all ranks.")


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)


def index_between_two_looks() -> None:
    """Rank 2 compares calls and values one after the other. Between the two, the others note their index and call."""
    x, store, here = sharded(), store_of_world(), TORCH_TRANSPORT
    memory, log = here._memory, here.ledger.logs[0, 1, 2]
    assert store is not None
    assert memory is not None

    def with_a_pause(look: Callable[..., Any]) -> Callable[..., Any]:
        def looked(*args: object) -> Any:
            found = look(*args)
            if not store.read("running", 2):
                store.publish("running", "looked once")
                until(lambda: all(view.words[view.start + LATEST] == log.latest for view in memory._views[log]))
            return found

        return looked

    def report_second(log: CallLog, record: "array[int]") -> None:
        memory.compare(log, record)
        until(store.are_states_requested)

    with pytest.MonkeyPatch.context() as patch:
        if rank() == 2:
            for name in ("read_notes", "compare"):
                patch.setattr(memory, name, with_a_pause(getattr(memory, name)))
        else:
            patch.setattr(here, "compare_calls", report_second)
            until(lambda: store.read("running", 2))
        use(x[rank()])


@pytest.mark.processes
def test_numbers_that_differ_are_named_whenever_a_rank_looks() -> None:
    text = one_text(REAL, partial(checking_numbers, index_between_two_looks))
    assert text.startswith("__getitem__: argument 1 must be the same on all ranks, but is not:")


def test_a_difference_after_the_first_numbers_of_a_call_is_found() -> None:
    text = one_text(SIMULATED, lambda: checking_numbers(lambda: use(sharded()[:, [0, 1, 2, 3, 4, 5, 0, rank()]])))
    assert "__getitem__: the numbers argument 1[1][0], argument 1[1][1]" in text


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * torch.full((4, 2), 1.0 + rank())


def combined_in_a_function() -> None:
    w = replicated_parameter()
    scaled: torch.Tensor = Scaled.apply(w)  # type: ignore[no-untyped-call]
    scaled.sum().backward()
    use_gradient(w)


HOOKS: dict[str, tuple[Callable[[], object], str]] = {
    "returned": (
        lambda: backward_with(lambda _: torch.full((4, 2), 1.0 + rank())),
        "the plain gradient that a hook of a tensor returned of shape (4, 2), float32",
    ),
    "combined": (combined_in_a_function, f"mul: {BESIDE} (4, 2), float32"),
}


def in_hook(name: str) -> None:
    HOOKS[name][0]()


@pytest.mark.parametrize("name", HOOKS)
@WORLDS
def test_values_of_hooks_that_differ_are_named(ranks: World, name: str) -> None:
    text = one_text(ranks, partial(in_hook, name))
    assert text.startswith(f"{HOOKS[name][1]}, must be the same on all ranks, but is not:")
    assert f"  called at {HERE}:" in text


@pytest.mark.processes
def test_real_ranks_name_what_simulated_ones_do() -> None:
    numbers, hook = partial(with_numbers, "factor"), partial(in_hook, "returned")
    acts: list[Callable[[], object]] = [rows_of_zeros, numbers, hook]
    acts += [partial(call, name) for name in ("batch", "ids", "gradient")]
    for act in acts:
        simulated, real = (one_text(ranks, act).splitlines() for ranks in (SIMULATED, REAL))
        assert real[0].partition(" of shape")[0] == simulated[0].partition(" of shape")[0], act
        assert real[-2:] == simulated[-2:], act


# ---- groups that call no collective ------------------------------------------------------------------------

GRID = Mesh((2, 2), names=("dp", "tp"))
EACH_GRID = pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(world(4), id="simulated"),
        pytest.param(world(4, real=True), id="real", marks=[pytest.mark.processes, pytest.mark.slow]),
    ],
)


def evaluate(batches: int, rows: Sequence[int], trained: int = 0) -> list[float]:
    """Losses of plain batches; those of ranks that differ in `dp` have these numbers of rows. Nothing crosses `dp`."""
    w = DTensor.from_local(torch.ones(3, 4), GRID, [Replicate(), Shard(0)], run_check=False)
    for _ in range(trained):
        collectives.barrier((0, 1, 2, 3))
    losses = []
    for i in range(batches):
        x = torch.full((rows[rank() // 2], 6), 1.0 + i)
        loss = (x @ w).sum()
        assert isinstance(loss, DTensor)
        losses.append(float(loss.full_tensor()))
    return losses


@pytest.mark.parametrize(("trained", "rows"), [(0, (3, 2)), (3, (3, 2)), (0, (3, 0)), (3, (0, 2))])
@EACH_GRID
def test_values_are_compared_before_calls_of_other_groups(ranks: World, trained: int, rows: Sequence[int]) -> None:
    """By the ranks that see it first; at the latest in the third batch, when the others have made the first."""
    with pytest.raises((MismatchError, RemoteRankError)) as caught:
        ranks.run(evaluate, 40, rows, trained)
    text = str(caught.value)
    assert re.match(r"matmul: the plain tensor beside DTensors of shape \([023], 6\), float32, must be the same", text)
    assert f"called at {HERE}:" in text


@pytest.mark.parametrize(("trained", "rows"), [(0, 3), (3, 3), (0, 0), (3, 0)])
@EACH_GRID
def test_equal_values_of_a_group_without_collectives_raise_nothing(ranks: World, trained: int, rows: int) -> None:
    found = ranks.run(evaluate, 5, (rows, rows), trained)
    assert found == [[rows * 24.0 * (1 + i) for i in range(5)]] * 4


def numbers_at_another_pace(steps: int) -> list[float]:
    """Numbers that are equal on all ranks, but not at the same time; nothing crosses `dp`."""
    collectives.check_values(numbers=True)
    w = DTensor.from_local(torch.ones(3, 4), GRID, [Replicate(), Shard(0)], run_check=False)
    sums = []
    for i in range(steps):
        sums.append((w * float(i)).sum().item())
        if rank() >= 2:
            time.sleep(0.01)
    collectives.barrier((0, 1, 2, 3))
    return sums


@pytest.mark.processes
def test_real_ranks_compare_values_of_groups_without_collectives() -> None:
    real = world(4, real=True)
    assert real.run(evaluate, 5, (3, 3), 3) == [[72.0 * (1 + i) for i in range(5)]] * 4
    with pytest.raises((MismatchError, RemoteRankError), match="matmul: the plain tensor beside DTensors of shape"):
        real.run(evaluate, 40, (3, 2), 0)


def numbers_are_compared() -> bool:
    before = collectives.transport().ledger.numbers
    collectives.check_values(numbers=True)
    return before


@pytest.mark.processes
def test_a_run_begins_with_the_defaults_whatever_the_last_one_of_its_processes_chose() -> None:
    assert [world(2, real=True).run(numbers_are_compared) for _ in range(2)] == [[False] * 2] * 2


@EACH_GRID
def test_equal_numbers_of_a_group_without_collectives_raise_nothing(ranks: World) -> None:
    assert ranks.run(numbers_at_another_pace, 20) == [[24.0 * i for i in range(20)]] * 4


# ---- correct programs -------------------------------------------------------------------------------------


def only_plain() -> None:
    x = torch.full((4,), float(rank()))
    use(sharded())
    torch.save(x + 1, "/dev/null")
    use(sharded())


def numbers_that_agree() -> None:
    collectives.check_values(numbers=True)
    x = sharded()
    local = x.to_local() * rank() + rank()
    y = DTensor.from_local(local, Mesh((3,)), [Shard(0)])
    for i in range(3):
        use(y[i] * (0.1 + 0.2) + i)
        use(y * (1 / 3 * (1 + 1e-15 * rank())))  # rounding
        y.to("cpu")


def rounding() -> None:
    x = torch.tensor([1e-30, 1.0, 3.0, nan, -0.0 if odd() else 0.0, 1 / 3])
    use(sharded() * (x * (1 + 1e-7 * rank())))
    half = torch.tensor([1.0, 2.0]).to(torch.bfloat16) * (1 + 0.004 * rank())
    use(distribute_tensor(torch.ones(2, dtype=torch.bfloat16), Mesh((3,)), [Shard(0)]) * half)


def log_on_one_rank() -> None:
    collectives.check_values(numbers=True)
    x = distribute_tensor(torch.ones(6), Mesh((3,)), [Replicate()])

    def scaled(by: torch.Tensor) -> DTensor:
        y = x * by
        assert isinstance(y, DTensor)
        return y

    for i in range(5):
        if rank() == 0:
            scaled(torch.full((6,), 100.0 + i))  # no communication, so one rank may
            _ = x[i] * (100 + i)
        use(scaled(torch.full((6,), 2.0 + i)).redistribute(placements=[Shard(0)]))


def outside_the_mesh() -> None:
    x = distribute_tensor(torch.ones(4), Mesh((2,), (0, 1)), [Shard(0)])
    y = x * torch.full((4,), 7.0 if rank() == 2 else 1.0)
    if rank() < 2:
        use(y)


def strided_and_with_gradient() -> None:
    w = torch.arange(36.0).view(6, 6).t().requires_grad_()
    use(sharded() @ w)
    sum_ = (sharded() @ w).sum()
    sum_.backward()


def switched_off() -> None:
    collectives.check_values(False)
    use(sharded() * torch.full((6,), float(rank())))


@pytest.mark.parametrize(
    "act",
    [
        only_plain,
        numbers_that_agree,
        rounding,
        log_on_one_rank,
        outside_the_mesh,
        strided_and_with_gradient,
        switched_off,
    ],
)
def test_ranks_of_correct_programs_raise_nothing(act: Callable[[], object]) -> None:
    SIMULATED.run(act)
