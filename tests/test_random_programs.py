"""Random programs of torch ops give on ranks what they give in one process; what finds the ones that do not."""

import warnings

import pytest

from tools.fuzz import main, shrunk
from tools.op_judge import GOOD, Outcome
from tools.program_judge import verdict
from tools.programs import Program, program

pytestmark = pytest.mark.slow

LEAF = "x1 = leaf(1, (4, 3), torch.float64, True, Mesh((2,)), [Shard(0)])"
RANK = '__import__("shardwise").rank()'


@pytest.mark.parametrize("first", range(1040, 1140, 20))
def test_random_programs_are_right_or_a_clear_error_on_every_rank(first: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about ops on odd shapes
        for seed in range(first, first + 20):
            found = verdict(program(seed))
            assert found.outcome in GOOD, f"{found}\n{program(seed)}"


def test_a_seed_gives_the_same_program_again() -> None:
    assert program(7) == program(7) != program(8)
    assert program(7, world=4).world == 4


@pytest.mark.parametrize(
    ("line", "outcome"),
    [
        ("v2 = x1 * 2", Outcome.RIGHT),
        ("v2 = x1.view(5)", Outcome.RIGHT),  # torch raises too
        ("v2 = x1 * (1 + (type(x1).__name__ == 'DTensor'))", Outcome.WRONG_VALUE),
        (f"v2 = x1 + {RANK}", Outcome.WRONG_VALUE),
        (f"v2 = x1 * [2][{RANK}]", Outcome.SOME_RANKS),
        (f"v2 = x1.sum() if {RANK} else x1.sum().item()", Outcome.HANG),
        ("v2 = x1.numpy() if type(x1).__name__ == 'DTensor' else x1 * 1", Outcome.CLEAR_ERROR),
        ("v2 = x1.placements", Outcome.LENIENT),
        ("v2 = x1 * (1 if type(x1) is torch.Tensor else {}[0])", Outcome.OTHER_ERROR),
    ],
)
def test_every_outcome_is_told_from_the_others(line: str, outcome: Outcome) -> None:
    assert verdict(Program(2, (LEAF, line))).outcome is outcome


AVERAGE = "redistribute(x1, Mesh((3,)), [Partial('avg')])"
ON_THREE = "x1 = leaf(49, (3, 2), torch.float64, False, Mesh((3,)), [Replicate()])"
SHARDED = "x1 = leaf(47, (7,), torch.float64, True, Mesh((3,)), [Shard(0)])"


@pytest.mark.parametrize(
    ("lines", "outcome"),
    [
        ((ON_THREE, f"v2 = x1 == {AVERAGE}"), Outcome.UNSTABLE),  # n * x / n is not always x
        ((ON_THREE, f"v2 = {AVERAGE} > {RANK}"), Outcome.WRONG_VALUE),
        ((ON_THREE, "x1.requires_grad_()", "v2 = torch.autograd.grad((x1 ** 2).sum(), [x1])[0]", "v3 = v2 == x1 * 2"),
         Outcome.UNSTABLE),  # a sum of three terms
        ((SHARDED, "with torch.no_grad(): x1[...] = 3", "v2 = x1.kthvalue(2, 0).values"), Outcome.UNSTABLE),  # which 3?
        ((SHARDED, "with torch.no_grad(): x1[...] = 3", f"v2 = x1.sort(stable=True).values * (1 + {RANK})"),
         Outcome.WRONG_VALUE),
        # Without `.data` this is an error: backward meets values that were changed.
        (("x1 = leaf(82, (3,), torch.float64, True, Mesh((3,)), [Partial('sum')])", "v2 = x1 * 1", "v3 = v2 * v2",
          "v2.data.mul_(0.5)"), Outcome.UNSTABLE),
        # Which of the values of one index is written?
        (("x1 = leaf(94, (4, 7), torch.float64, False, None)",
          "x2 = leaf(80, (2, 2), torch.int64, False, Mesh((3,)), [Shard(1, [1, 0, 1])]) % 4",
          "v3 = x1.index_put((x2,), x1[leaf(83, (2, 2), torch.int64, False, Mesh((3,)), [Replicate()]) % 4] * 2)"),
         Outcome.UNSTABLE),
        ((SHARDED, f"v2 = x1.index_put((torch.tensor([0, 1]),), x1[5:] * {RANK})"), Outcome.WRONG_VALUE),
        # Backward of plain torch meets the changed tensor, because `save_on_cpu` keeps it.
        ((ON_THREE, "x1.requires_grad_()", "v2 = x1 * 1", "with torch.autograd.graph.save_on_cpu(): v3 = v2.amax(0)",
          "v2 += 1"), Outcome.RIGHT),
    ],
)  # fmt: skip
def test_what_plain_torch_does_not_define_is_not_wrong(lines: tuple[str, ...], outcome: Outcome) -> None:
    found = verdict(Program(3, lines))
    assert found.outcome is outcome, found


def test_a_copy_where_torch_raises_and_a_changed_value_where_it_does_not_are_lenient() -> None:
    """`dot` saves what shares no version with x1; relu saves its result, where the ranks reduce a Partial one."""
    lines = "v2 = torch.dot(x1.data, x1)", "v2.relu_()", "x1.detach().add_(1)", "with torch.no_grad(): v2.mul_(2)"
    found = verdict(Program(1, ("x1 = leaf(1, (1,), torch.float64, True, Mesh((1,)), [Shard(0)])", *lines)))
    assert found.outcome is Outcome.LENIENT, found


def test_a_failure_is_shrunk_to_the_lines_that_make_it() -> None:
    what = Program(2, (LEAF, "v2 = x1 * 2", f"v3 = v2 + {RANK}", "v4 = v3.sum()", "x1.grad = None"))
    least = shrunk(what)
    assert [line[:2] for line in least.lines] == ["x1", "v2", "v3"]
    assert verdict(least).outcome is Outcome.WRONG_VALUE


def test_the_command_line_tells_how_many_were_right(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        assert main(["--seeds", "1000:1003"]) == 0
    assert "3 programs" in capsys.readouterr().out


def test_jobs_judge_parts_of_the_range(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "1000:1006", "--jobs", "2", "--part", "3", "--ranks", "2"]) == 0
    assert "6 of 6 programs: " in capfd.readouterr().out
