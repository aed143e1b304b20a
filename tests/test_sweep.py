"""Every op that torch lists for its own tests, on distributed tensors: right, or known not to be; sharded, or known to
run replicated."""

import json
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tools.op_judge import Outcome
from tools.opinfo import elementwise_names
from tools.sweep import (
    Plan,
    Result,
    Worker,
    by_op,
    cause,
    counted,
    fallbacks,
    known,
    main,
    shrunk,
    summary,
    sweep,
    table,
    worst,
)

pytestmark = pytest.mark.survey


# Why ops run replicated -> their names on torch's list, in the case that represents each.
FALLBACKS = Path(__file__).parent / "sweep_fallbacks.json"


@pytest.fixture(scope="module")
def few() -> list[Result]:
    """The case that represents each op: its first sample, out of place and in place, with dim 0 sharded unevenly."""
    return sweep(Plan(few=True), jobs=2)


def test_every_op_of_torch_is_right_or_known_not_to_be(few: list[Result]) -> None:
    """If an op is right that was not: `python tools/sweep.py --few --shrink`. The list never grows."""
    listed = known()
    ops = by_op(few)
    assert len(ops) > 600
    for name, results in ops.items():
        for result in results:
            allowed = Outcome(listed[name].split(":")[0]) if name in listed else Outcome.RIGHT
            assert result.badness <= allowed.badness, f"{name}: {result}"
    healed = [name for name in listed if name not in ops or worst(ops[name]).badness == 0]
    assert not healed, "now right; strike them with `python tools/sweep.py --few --shrink`"


def test_every_op_of_torch_stays_sharded_or_its_fallback_has_a_reason(few: list[Result]) -> None:
    reasons = json.loads(FALLBACKS.read_text(encoding="utf-8"))
    listed = [name for names in reasons.values() for name in names]
    found = fallbacks(few)
    assert len(listed) == len(set(listed)), "an op has two reasons"
    new = {name: ops for name, ops in found.items() if name not in listed}
    assert not new, f"these run replicated now. Fix: give them rows, or a reason in {FALLBACKS.name}"
    sharded = [name for name in listed if name not in found]
    assert not sharded, f"these stay sharded now. Fix: strike them from {FALLBACKS.name}"
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # importing torch's list changes global flags
        elementwise = pool.submit(elementwise_names).result()
    assert len(elementwise) > 150
    assert not elementwise & set(listed)


def answer(connection: Connection, plan: Plan) -> None:
    """A worker whose second case of three ends the process, as a crash in C++ would; the op "late" wears it out."""
    connection.send(["op", "late"])
    while True:
        name, start = connection.recv()
        for number in range(start, 3):
            begun = Result(name, "function", number)
            connection.send((number, begun))
            if number == 1 and name == "op":
                os._exit(7)
            connection.send((number, Result(name, "function", number, outcome="right")))
        connection.send(name == "late")
        if name == "late":
            os._exit(0)


def test_a_crash_is_one_case_and_the_next_cases_are_tried() -> None:
    worker = Worker(Plan(), answer)
    try:
        results = worker.judge("op")
        assert [result.outcome for result in results] == ["right", "crash", "right"]
        assert results[1].message == "the process ended with exit code 7"
        assert counted(worker.judge("late")) == {"right": 3}
        assert counted(worker.judge("late")) == {"right": 3}
    finally:
        worker.stop()


RESULTS = [
    Result("a", "function", 0, "float32[3]", "all replicated", "right", implicit=2, fallbacks=("aten.b.default",)),
    Result("a", "method", 0, "float32[3]", "all Shard(0)", "clear error", "RuleError: add_ has no row for (x, (y)) 3"),
    Result("b", "function", 0, "float32[3]", "all replicated", "right"),
]


def test_the_table_names_causes_and_ops_that_are_not_right() -> None:
    text = table(RESULTS)
    assert "1 of 2 ops are right in every case; 1 run replicated in some case" in summary(RESULTS)
    assert fallbacks(RESULTS) == {"a": ["aten.b.default"]}
    assert "| clear error | 1 | 1 | RuleError: OP has no row for … N | a |" in text
    assert "| a | 1 right, 1 clear error | clear error as method of (float32[3]), all Shard(0): RuleError" in text
    assert "| b |" not in text


def test_causes_are_alike_where_only_names_and_sizes_differ() -> None:
    one = "RuleError: aten.abs_.default has no rule (4, [3]) here. Fix: wait."
    other = "RuleError: aten.neg_.default has no rule (17, [2]) here. Fix: run."
    assert cause(one) == cause(other) == "RuleError: aten.OP has no rule … here"


def test_the_list_of_what_is_known_only_shrinks() -> None:
    assert shrunk({"a": "clear error: x", "b": "other error: y"}, RESULTS) == {"a": "clear error: x"}
    assert shrunk({}, RESULTS) == {}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [(["--layouts", "one,diagonal"], "got diagonal"), (["--shrink"], "--shrink needs --few")],
)
def test_options_that_would_do_nothing_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], why: str
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert why in capsys.readouterr().err
