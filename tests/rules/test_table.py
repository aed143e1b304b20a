"""Every key of the table of rules has samples, every row is taken, and every call gives what one process gives."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import Partial, Replicate, Shard
from shardwise._rules import RULES, Meta, OpRule, Row
from shardwise._rules.local_context import LocalContext
from shardwise._rules.registry import ops_with_rules
from shardwise._tensor.dispatch import dispatcher
from shardwise._trace.autograd_function import TensorFunction
from shardwise.parallel.experts import mix_experts
from tools import table_survey
from tools.op_judge import Sample
from tools.rows import exceptions, main, survey, table_of
from tools.table_survey import Checked, Survey, run

X = torch.arange(10, dtype=torch.float64).view(5, 2) - 3


@pytest.mark.survey
def test_every_row_of_every_key_is_taken_and_right() -> None:
    found = survey(jobs=2)
    keys = [op for op in ops_with_rules() if op is not mix_experts]  # sharded by experts, it refuses some layouts
    assert len({result.key for result in found.results}) == len(keys)
    assert not found.complaints(exceptions()), str(found)


def rows_of_squared(x: Meta) -> list[Row]:
    return [Row((Shard(0),), Shard(0), "each element by itself")]


def rows_with_a_wrong_one(x: Meta) -> list[Row]:
    return [*rows_of_squared(x), Row((Partial(),), Partial(), "squares of Partial values")]


def rows_with_a_shadow(x: Meta) -> list[Row]:
    return [*rows_of_squared(x), Row((Shard(0),), Replicate(), "behind another one")]


def rows_with_a_wrong_output(x: Meta) -> list[Row]:
    return [Row((Shard(0),), Replicate(), "every rank has everything, it says")]


class Kept(TensorFunction):
    """The square; keeps its operand instead of saving it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x
        return x.square()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        gradient: Tensor = 2 * ctx.x * grads[0]
        return gradient


def squared_on_one(ctx: LocalContext, x: Tensor) -> Tensor:
    return x.square() if ctx.rank == 0 else Kept.apply(x)


def rows_that_save_on_one_rank(x: Meta) -> list[Row]:
    return [Row((Shard(0),), Shard(0), "each element by itself", squared_on_one)]


@pytest.fixture(autouse=True)
def forget_new_rules() -> Iterator[None]:
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)
    dispatcher.forget()


def surveyed(*keys: Any) -> Survey:
    """Of some keys, where only torch.square has samples."""
    planned = table_survey.plan({torch.square: [Sample(torch.square, (X,))]}, {key: RULES[key] for key in keys})
    return Survey(planned.unsampled, (), frozenset(planned.rows), tuple(map(run, planned.checks)))


def complaints(rule: Any) -> list[str]:
    """What is said of torch.square if its rule were this one."""
    RULES[torch.square] = OpRule(rule)
    return surveyed(torch.square).complaints({})


def test_a_right_rule_passes() -> None:
    assert complaints(rows_of_squared) == []


WRONG_VALUE = "torch.square: square(float64[5, 2])", "on Mesh(0=2)", "squares of Partial values", "expected [9, 4, 1, 0"


@pytest.mark.parametrize(
    ("rule", "parts"),
    [
        (rows_with_a_wrong_one, (*WRONG_VALUE, "got [")),
        (rows_with_a_wrong_output, ("every rank has everything, it says",)),
        (rows_that_save_on_one_rank, ("ranks save the last tensor for backward after other collectives: [0, None",)),
        (rows_with_a_shadow, ("torch.square: the row 'behind another one' is never taken",)),
    ],
)
def test_a_wrong_rule_is_named_with_what_is_wrong(rule: Any, parts: tuple[str, ...]) -> None:
    found = " ".join(complaints(rule))
    assert all(part in found for part in parts), found


def test_a_key_without_a_sample_is_named() -> None:
    (line,) = surveyed(torch.square, torch.sinc).complaints({})
    assert line == "torch.sinc has no sample. Fix: add one to SAMPLES of tests/rules/by_hand.py"


def test_a_row_in_the_source_that_no_sample_makes_is_named() -> None:
    planned = table_survey.plan({torch.abs: [Sample(torch.abs, (X,))]}, {torch.abs: RULES[torch.abs]})
    assert any(line.startswith("matmul.py:") for line in planned.unbuilt)


WRONG = Checked("a.key", "key(float64[5])", ("on Mesh(0=2): it differs",), 1)


def test_an_exception_excuses_its_key_and_fails_once_that_is_right() -> None:
    found = Survey((), (), frozenset(), (WRONG,))
    assert found.complaints({}) == ["a.key: key(float64[5]): on Mesh(0=2): it differs"]
    assert found.complaints({"a.key": "equal keys in any order"}) == []
    right = Survey((), (), frozenset(), (replace(WRONG, errors=()),))
    assert right.complaints({"a.key": "equal keys in any order"}) == [
        "a.key is right now. Fix: strike it from EXCEPTIONS"
    ]


def test_the_table_has_a_line_a_key() -> None:
    right = replace(WRONG, errors=(), cases=12)
    line = table_of(Survey((), (), frozenset(), (WRONG, right))).splitlines()[1]
    assert line.split() == ["a.key", "2", "0", "12", "1"]


def test_a_key_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--keys", "no such key"])
    assert "no key matches 'no such key'" in capsys.readouterr().err
