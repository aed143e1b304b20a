"""Plans by name and from files."""

from pathlib import Path

import pytest
from torch import nn

from shardwise.demos.data import PyIdent
from shardwise.demos.recommender.config import TrainConfig
from shardwise.demos.recommender.plans import NAMED, SMALL_BYTES, placed, plan_for
from shardwise.demos.recommender.training import outline
from shardwise.errors import PlanError
from shardwise.layout import OnRanks, Replicate, Shard


@pytest.fixture(scope="module")
def model(tiny: PyIdent) -> nn.Module:
    """Tables of 23, 16 and 23 rows of 1,000 columns: 92,000 and 64,000 bytes."""
    return outline(TrainConfig(dim=1000), tiny)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 40])
@pytest.mark.parametrize("name", NAMED)
def test_every_named_plan_holds_each_byte_once_or_on_all_ranks(name: str, num_ranks: int, model: nn.Module) -> None:
    for one in placed(model, plan_for(name, model, num_ranks), num_ranks):
        copies = num_ranks if one.placement == Replicate() else 1
        assert sum(one.rank_bytes) == 4 * one.shape[0] * one.shape[1] * copies
        assert len(one.rank_bytes) == num_ranks


def test_named_plans_are_what_they_say(model: nn.Module) -> None:
    assert plan_for("row", model, 2) == dict.fromkeys(["context.weight", "num_args.weight", "items.weight"], Shard(0))
    assert set(plan_for("column", model, 2).values()) == {Shard(1)}
    assert set(plan_for("replicate", model, 2).values()) == {Replicate()}
    assert 16 * 1000 * 4 <= SMALL_BYTES < 23 * 1000 * 4
    assert plan_for("auto-simple", model, 2) == {
        "context.weight": Shard(0),
        "num_args.weight": Replicate(),
        "items.weight": Shard(0),
    }


@pytest.mark.parametrize(
    ("num_ranks", "ranks"),
    [(1, (0, 0, 0)), (2, (0, 1, 0)), (3, (0, 1, 2)), (9, (0, 1, 2))],
)
def test_tables_go_to_the_rank_that_has_least(num_ranks: int, ranks: tuple[int, ...], model: nn.Module) -> None:
    plan = plan_for("table", model, num_ranks)
    order = ["context.weight", "items.weight", "num_args.weight"]  # the largest first
    assert [plan[name] for name in order] == [OnRanks(rank) for rank in ranks]


def test_a_file_names_parameters_with_or_without_quotes(model: nn.Module, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(
        '"**.weight" = "Shard(0)"\ncontext.weight = "Shard(1, sizes=[400, 600])"\n[num_args]\nweight="OnRanks(1)"'
    )
    plan = plan_for(str(file), model, 2)
    assert plan == {"**.weight": Shard(0), "context.weight": Shard(1, (400, 600)), "num_args.weight": OnRanks(1)}
    assert [one.placement for one in placed(model, plan, 2)] == [Shard(1, (400, 600)), OnRanks(1), Shard(0)]


def test_what_a_file_does_not_name_is_replicated(model: nn.Module, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text('context.weight = "Shard(0)"')
    names = {one.name: one.placement for one in placed(model, plan_for(str(file), model, 2), 2)}
    assert names == {"context.weight": Shard(0), "num_args.weight": Replicate(), "items.weight": Replicate()}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('context.wieght = "Shard(0)"', r"'context.wieght' matches no parameter. Did you mean 'context.weight'?"),
        ('context.weight = "Shard(2)"', "context.weight: "),
        ('context.weight = "OnRanks(2)"', "context.weight: "),
        ('context.weight = "Shard(0, sizes=[1, 2])"', "context.weight: "),
        ("context.weight = 0", "context.weight: 0 is no placement"),
        ('context.weight = "Partial()"', "context.weight: Partial('sum') cannot hold a table"),
        ("context.weight = ", "plan.toml: is not TOML: "),
        ('a = "x"\nb = "y"', "b: 'y' is no placement"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_with_the_reason(
    content: str, why: str, model: nn.Module, tmp_path: Path
) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(content)
    with pytest.raises(PlanError) as refused:
        placed(model, plan_for(str(file), model, 2), 2)
    assert why in str(refused.value)


def test_an_unknown_plan_is_refused_with_a_suggestion(model: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(
        PlanError, match=r"'rows' is neither a file nor a known plan. Did you mean 'row'\? Fix: use one"
    ):
        plan_for("rows", model, 2)
    with pytest.raises(PlanError, match="neither a file nor a known plan"):
        plan_for(str(tmp_path), model, 2)


def test_a_file_that_cannot_be_read_as_text_is_refused(model: nn.Module, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match=r"plan\.toml: is not TOML"):
        plan_for(str(file), model, 2)
