"""What `explain` and `count_comms` say of a redistribution, beside bytes that were worked out by hand."""

import inspect
import pickle
import re
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import DTensor, Mesh, Partial, Replicate, Shard, count_comms, distribute_tensor, shard_module
from shardwise import _collectives as collectives
from shardwise._trace import comm_trace
from shardwise.debug import explain
from shardwise.parallel import RowwiseParallel, parallelize_module
from shardwise.testing import world
from tests.debug.ops import halved

S0, S1, R = Shard(0), Shard(1), Replicate()
ROWS = Shard(0, sizes=(4, 1, 2))
HALVED = "shardwise_tests.halved.default"


def here() -> int:
    """The line of the caller."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def operands(mesh: Mesh, requires_grad: bool = False) -> tuple[DTensor, DTensor]:
    """7 x 3 twice, float64: in rows (4, 1, 2) of three ranks, and in one column each."""
    values = torch.arange(21.0, dtype=torch.float64).view(7, 3)
    rows, columns = distribute_tensor(values, mesh, [ROWS]), distribute_tensor(values, mesh, [S1])
    return rows.requires_grad_(requires_grad), columns.requires_grad_(requires_grad)


@world(3)
def test_a_redistributed_operand_is_reported_with_line_layouts_bytes_and_reason() -> None:
    rows, columns = operands(Mesh((3,)))
    columns._name = "head.weight"
    with explain() as report:
        line = here() + 1
        rows * columns
    rank = collectives.rank()
    (event,) = report.events
    cause = event.cause
    assert (cause.kind, cause.op, cause.operand, cause.backward) == ("operand", "mul", "head.weight", False)
    assert cause.call_site is not None
    assert (cause.call_site.file, cause.call_site.line) == (__file__, line)
    assert (event.src, event.dst) == (columns.layout_, rows.layout_)
    assert event.sent_bytes == 8 * (1 + 2, 4 + 2, 4 + 1)[rank]  # its column, but for the rows that stay
    assert event.total_bytes == 8 * 14
    assert cause.why == "elementwise"
    assert "(7, 3) on Mesh(0=3): [Shard(1)] -> [Shard(0, sizes=(4, 1, 2))]\n" in str(report)
    assert "why: elementwise\n" in str(report)
    assert "less: with head.weight as [Shard(0)]: 48 bytes in place of 112, " in str(report)


@world(3)
def test_an_implicit_backward_is_reported_with_the_line_of_its_forward() -> None:
    rows, columns = operands(Mesh((3,)), requires_grad=True)
    with explain() as report:
        line = here() + 1
        out = rows * columns
        out.sum().backward()
    rank = collectives.rank()
    forward, backward = (event for event in report.events if event.cause.op == "mul")
    assert not forward.cause.backward
    assert backward.cause.backward
    assert (backward.src, backward.dst) == (rows.layout_, columns.layout_)
    assert backward.sent_bytes == 8 * (4 * 2, 1 * 2, 2 * 2)[rank]  # its rows, but for the column that stays
    assert backward.total_bytes == 8 * 14
    assert backward.cause.call_site is not None
    assert backward.cause.call_site.line == line


@world(3)
def test_a_backward_whose_forward_was_outside_is_reported_with_the_line_that_called_it() -> None:
    rows, columns = operands(Mesh((3,)), requires_grad=True)
    out = (rows * columns).sum()
    with explain() as report:
        line = here() + 1
        out.backward()
    (event,) = [event for event in report.events if event.cause.op == "mul"]
    assert event.cause.backward
    assert event.cause.implicit
    assert event.cause.call_site is not None
    assert event.cause.call_site.line == line


@pytest.mark.parametrize("async_op", [False, True])
@world(3)
def test_explicit_redistributions_are_reported_as_such_forward_and_backward(async_op: bool) -> None:
    rows, _ = operands(Mesh((3,)), requires_grad=True)
    with explain() as report:
        rows.redistribute(placements=[S1], async_op=async_op).sum().backward()
    assert report.sent_bytes == sum(event.sent_bytes for event in report.events)
    events = [event for event in report.events if event.src is not None and event.src.shape == (7, 3)]
    assert [(event.cause.kind, event.cause.backward) for event in events] == [
        ("explicit", False),
        ("explicit", True),
    ]
    assert not any(event.cause.implicit for event in events)


@world(4)
def test_gradients_that_are_read_are_reported_for_all_ranks_of_the_mesh() -> None:
    """Columns of 2 and 1 over "tp", copies over "dp": each line of "dp" reduces its own width."""

    mesh = Mesh((2, 2), names=("dp", "tp"))
    w = distribute_tensor(torch.ones(5, 3), mesh, [R, S1]).requires_grad_()
    w._name = "w"
    x = distribute_tensor(torch.ones(4, 5), mesh, [S0, R])
    (x @ w).sum().backward()
    with explain() as report:
        w.grad  # noqa: B018
        w.grad  # noqa: B018
    rank = collectives.rank()
    (event,) = report.events
    assert (event.cause.kind, event.cause.operand, event.cause.implicit) == ("gradient", "the gradient of w", True)
    held = 5 * (2, 1)[rank % 2]
    assert event.sent_bytes == 4 * held  # to the one other rank of the line, by an exchange or as a ring
    assert event.total_bytes == 4 * (2 * 10 + 2 * 5)
    assert event.ranks == (0, 1, 2, 3)


@world(2)
def test_an_exchange_inside_an_op_is_reported_but_not_implicit() -> None:
    mesh = Mesh((2,))
    table = distribute_tensor(torch.randn(9, 4), mesh, [S0]).requires_grad_()
    ids = distribute_tensor(torch.tensor([0, 8, 3, 7, 1]), mesh, [S0])
    with count_comms() as counted:
        report = explain(F.embedding, ids, table)
        with report:
            report.result.sum().backward()
    lookups = [event for event in report.events if event.cause.op == "embedding"]
    assert {event.cause.backward for event in lookups} == {False, True}
    for event in lookups:
        assert (event.cause.kind, event.cause.implicit, event.total_bytes) == ("internal", False, None)
        assert event.cause.why == "all-to-all of ids to row owners, then of embeddings"
        assert event.src is None
    assert report.sent_bytes == counted.total_bytes


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = torch.nn.Embedding(11, 5)
        self.head = torch.nn.Linear(5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = halved(self.head(self.items(ids)).softmax(-1))
        return out


@pytest.mark.parametrize(("shape", "placements"), [((1,), [S0]), ((3,), [S0]), ((2, 2), [S0, R]), ((2, 2), [S0, S1])])
def test_the_bytes_of_events_and_of_agreement_checks_are_all_that_is_sent(
    shape: tuple[int, ...], placements: Any
) -> None:
    def body() -> None:
        mesh = Mesh(shape)
        torch.manual_seed(0)
        model = shard_module(Model(), {"items.weight": placements, "head.weight": placements}, mesh=mesh)
        optimizer = torch.optim.Adam(model.parameters())
        ids = distribute_tensor(torch.tensor([[1, 10, 3], [4, 0, 6]]), mesh, [S0] + [R] * (len(shape) - 1))
        with count_comms() as counted, explain() as report:
            model(ids).log().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            distribute_tensor(torch.ones(3), mesh, [R] * len(shape)).sum().item()
        assert (
            report.sent_bytes
            == counted.total_bytes
            == sum(event.sent_bytes for event in report.events) + (report.other_bytes)
        )
        assert (counted.total_bytes > 0) == (mesh.size() > 1)
        totals = [(event.total_bytes, event.sent_bytes) for event in report.events if event.total_bytes is not None]
        every = collectives.gather_json(totals, tuple(range(mesh.size())))
        assert len({len(rank) for rank in every}) == 1
        for same_move in zip(*every, strict=True):
            assert {total for total, _ in same_move} == {sum(sent for _, sent in same_move)}

    world(Mesh(shape).size()).run(body)


def test_the_report_is_sorted() -> None:
    def body() -> str:
        _, columns = operands(Mesh((3,)))
        small = distribute_tensor(torch.ones(3), Mesh((3,)), [S0])
        with explain() as report:
            halved(small)
            for _ in range(2):
                line = here() + 1
                halved(columns)
        text = str(report)
        assert f"test_explain.py:{line} in body: {HALVED}, an operand" in text
        return text

    text = world(3).run(body)[0]
    lines = text.splitlines()
    # Two gathers of 21 elements of 8 bytes to two ranks each, then 3 elements of 4 bytes.
    assert [line.split()[:3] for line in lines if "test_explain.py" in line] == [["672", "224", "2"], ["24", "8", "1"]]
    assert lines[0] == "Rank 0 sent 232 bytes, 232 of them implicitly."
    assert "(7, 3) on Mesh(0=3): [Shard(1)] -> [Replicate()]" in text
    assert "why: it has no rule" in text


def test_a_report_of_nothing_says_so() -> None:
    with explain() as report:
        torch.ones(3) + 1
    assert report.events == ()
    assert str(report) == "Rank 0 sent 0 bytes, 0 of them implicitly."


@world(3)
def test_events_before_an_error_are_reported() -> None:
    _, columns = operands(Mesh((3,)))
    report = explain()

    def fail() -> None:
        with report:
            halved(columns)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    halved(columns)
    assert len(report.events) == 1


@world(3)
def test_no_stack_is_read_unless_a_listener_wants_call_sites() -> None:
    _, columns = operands(Mesh((3,)), requires_grad=True)
    redistributed = columns.redistribute(placements=[S0])
    assert redistributed.grad_fn is not None
    assert redistributed.grad_fn.cause.call_site is None  # type: ignore[attr-defined]
    with count_comms():
        redistributed = columns.redistribute(placements=[S0])
    assert redistributed.grad_fn.cause.call_site is None  # type: ignore[union-attr]
    with explain():
        redistributed = columns.redistribute(placements=[S0])
    assert redistributed.grad_fn.cause.call_site is not None  # type: ignore[union-attr]


def test_simulated_ranks_record_themselves_only() -> None:
    def body() -> tuple[int, bool]:
        _, columns = operands(Mesh((3,)))
        if collectives.rank() == 1:
            with explain() as report:
                halved(columns)
                listening = comm_trace.listening()
            return len(report.events), listening
        halved(columns)
        return 0, comm_trace.listening()

    with explain() as outside:
        assert world(3).run(body) == [(0, False), (1, True), (0, False)]
    assert outside.events == ()


def test_the_threads_of_a_process_are_one_rank() -> None:
    """Autograd runs the backward of an accelerator in threads of its own."""
    with count_comms() as counted:
        thread = threading.Thread(target=comm_trace.record_collective, args=("all_to_all", 5))
        thread.start()
        thread.join()
    assert counted.total_bytes == 5


def test_the_first_of_two_overlapping_listeners_may_leave_first() -> None:
    first, second = count_comms(), count_comms()
    one, two = first.__enter__(), second.__enter__()
    comm_trace.record_collective("all_to_all", 1)
    first.__exit__(None, None, None)
    comm_trace.record_collective("all_to_all", 2)
    second.__exit__(None, None, None)
    assert (one.total_bytes, two.total_bytes) == (1, 3)
    assert not comm_trace.listening()


def test_an_operand_of_another_mesh_is_reported_with_the_mesh_it_needs() -> None:
    def body() -> str:
        x = distribute_tensor(torch.ones(5, 3), Mesh((3,)), [S0])
        y = distribute_tensor(torch.ones(3), Mesh((2,)), [R])
        with explain() as report:
            x * y
        (event,) = report.events
        assert event.total_bytes == 4 * 3  # to the rank that is not in the smaller mesh
        return str(report)

    change = "Layout((3,) as [Replicate()] on Mesh(0=2)) -> Layout((3,) as [Replicate()] on Mesh(0=3))"
    assert all(f"mul, an operand\n{' ' * 32}{change}\n" in text for text in world(3).run(body))


@world(2)
def test_a_maximum_that_backward_has_to_reduce_is_reported() -> None:
    x = distribute_tensor(torch.tensor(5.0), Mesh((2,)), [Replicate()]).requires_grad_()
    assert isinstance(x, DTensor)
    top = x.redistribute(placements=[Partial("max")])
    with explain() as report:
        top.backward()
    expected = [(event.cause.kind, event.cause.op) for event in report.events]
    assert expected[0] == ("operand", "backward")


@pytest.mark.processes
def test_real_ranks_report_the_same() -> None:
    for rank, (sent, total, file) in enumerate(world(2, real=True).run(gathered_on_a_real_rank)):
        assert sent == 4 * (3, 2)[rank]
        assert total == 4 * 5
        assert file == __file__


def gathered_on_a_real_rank() -> tuple[int, int | None, str]:
    x = distribute_tensor(torch.ones(5), Mesh((2,)), [S0])
    with explain() as report:
        halved(x)
    (event,) = report.events
    assert event.cause.call_site is not None
    return event.sent_bytes, event.total_bytes, event.cause.call_site.file


def test_a_long_report_begins_with_the_lines_that_send_most() -> None:
    def body() -> tuple[str, int, int]:
        xs = [distribute_tensor(torch.ones(4, n), Mesh((2,)), [S0]) for n in range(1, 10)]
        with explain() as report:
            much, first = here() + 2, xs[0]
            for x in xs:
                x.redistribute(placements=[R])
            first.redistribute(placements=[R])
        return str(report), much, much + 1

    text, much, little = world(2).run(body)[0]
    lines = text.splitlines()
    start = lines.index("By line")
    first, second, end = lines[start + 2 : start + 5]
    assert (first.split()[:3], second.split()[:3], end) == (["720", "360", "9"], ["16", "8", "1"], "")
    assert first.endswith(f"test_explain.py:{much} in body")
    assert second.endswith(f"test_explain.py:{little} in body")


def test_parameters_of_repeated_modules_are_one_entry() -> None:
    def body() -> tuple[str, int]:
        # Of 3 x 2 and 2 x 3 elements, so those of 0 and 2 are alike, and that of 1 is not.
        layers = nn.Sequential(*(nn.Linear(*sizes, bias=False) for sizes in ((3, 2), (2, 3), (3, 2))))
        shard_module(layers, {"**": S0}, mesh=Mesh((2,)))
        x = distribute_tensor(torch.ones(400, 3), Mesh((2,)), [S0])
        with explain() as report, torch.no_grad():
            layers(x)
        return str(report), len(report.events)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of parameters that are sharded as the batch is
        text, number = world(2).run(body)[0]
    entries = [line.split() for line in text.splitlines() if "linear, " in line]
    # Each of two ranks sends its half of 6 elements of 4 bytes; of 3 rows the first rank has 2, of 2 elements each.
    assert [(*entry[:3], entry[-1]) for entry in entries] == [
        ("48", "24", "2", "*.weight"),
        ("24", "16", "1", "1.weight"),
    ]
    assert number == 3


def test_inputs_and_outputs_of_modules_with_a_style_are_named_and_one_entry_for_equal_modules() -> None:
    def body() -> str:
        layers = nn.ModuleDict({str(i): nn.ModuleDict({"up": nn.Linear(16, 16)}) for i in range(2)})
        parallelize_module(layers, Mesh((2,)), {"*.up": RowwiseParallel(input_layouts=R)})
        with explain() as report:
            for layer in layers.values():
                layer["up"](torch.ones(9, 16, requires_grad=True)).sum().backward()  # type: ignore[index]
        return str(report)

    entry = r" (\d+)  \S+ in body: parallelize_module(| in backward), the (input|output) of \*.up\n.*\n +why: (.*)"
    why = "the style is RowwiseParallel"
    found = re.findall(entry, world(2).run(body)[0])
    assert sorted(found) == [("2", "", "output", why), ("2", " in backward", "input", why)]


def test_full_tensor_is_named_with_its_parameter() -> None:
    def body() -> str:
        model = shard_module(nn.Sequential(nn.Linear(4, 6)), {"0.weight": S0}, mesh=Mesh((2,)))
        with explain() as report:
            weight: Any = model[0].weight
            weight.full_tensor()
            weight.detach().full_tensor()
            weight.sum().item()
        return str(report)

    assert re.findall(" in body: (.*)", world(2).run(body)[0]) == [
        "full_tensor, 0.weight",
        "full_tensor",
        "item or tolist",
    ]


def test_a_report_can_be_sent_to_another_process() -> None:
    def body() -> tuple[str, bytes]:
        rows, columns = operands(Mesh((3,)), requires_grad=True)
        with explain() as report:
            (rows * columns).sum().backward()
        return str(report), pickle.dumps(report)

    text, stored = world(3).run(body)[0]
    assert str(pickle.loads(stored)).partition("\n")[2] == text.partition("\n")[2] != ""  # noqa: S301 - made above


@world(3)
def test_numbered_operands_are_not_folded() -> None:
    rows, columns = operands(Mesh((3,)))
    with explain() as report:
        for pair in ((rows, columns), (columns, rows)):
            torch.mul(*pair)
    assert re.findall("mul, (operand [01])", str(report)) == ["operand 1", "operand 0"]


def test_entries_of_a_long_report_that_send_less_than_a_hundredth_are_counted() -> None:
    def body() -> tuple[str, int]:
        sizes = [1, 1000, *range(2, 11)]  # columns of four rows on two ranks
        xs = [distribute_tensor(torch.ones(4, n), Mesh((2,)), [S0]) for n in sizes]
        with explain() as report:
            for x in xs:
                x.redistribute(placements=[R])
        return str(report), report.sent_bytes

    (text, sent) = world(2).run(body)[0]
    entries = [line for line in text.splitlines() if "an explicit redistribution" in line]
    assert sent == 8 * (1000 + 55)  # of float32, this rank's two rows
    assert [line.split()[1] for line in entries] == ["8,000"]
    note = "Entries of less than 1 % of the bytes, left out: 10; this rank sent 440 bytes."
    assert note in text
