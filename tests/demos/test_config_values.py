"""Dataclasses, TOML and `--set`: what is accepted, what is refused and in which words."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.demos.config_values import dump_toml, load
from shardwise.errors import ConfigError


@dataclass(frozen=True)
class Optimizer:
    lr: float = 1e-5
    warmup: int | None = None

    def __post_init__(self) -> None:
        if self.lr < 0:
            raise ValueError(f"lr must be at least 0, got {self.lr}")


@dataclass(frozen=True)
class Table:
    rows: int = 10
    sharding: Literal["row", "column", 2] = "row"
    sizes: tuple[int, ...] = (1, 2)
    optimizer: Optimizer = Optimizer(lr=3.0)


@dataclass(frozen=True)
class Run:
    seed: int = 0
    name: str = "demo"
    label: str | None = None
    resume: bool = False
    tags: tuple[str, ...] = ()
    table: Table = field(default_factory=Table)
    optimizer: Optimizer = Optimizer()


@dataclass(frozen=True)
class NeedsPath:
    path: str
    table: Table


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(text, encoding="utf-8")
    return file


def problems(cls: type, toml_path: Path | None, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(cls, toml_path, overrides)
    headline, *lines, fix = str(caught.value).splitlines()
    assert headline.split()[0] == str(len(lines))
    assert fix == "  Fix: correct these in the file, or set them by --set KEY=VALUE."
    return [line.strip().removeprefix(f"{toml_path}: ") for line in lines]


# ---- what is accepted -------------------------------------------------------------------------------------


def test_without_sources_the_defaults_hold() -> None:
    assert load(Run) == Run()


def test_a_later_source_wins_and_leaves_the_rest_alone(tmp_path: Path) -> None:
    file = write(tmp_path, 'seed = 1\nname = "file"\n[table]\nrows = 5\n[table.optimizer]\nwarmup = 7\n')
    config = load(Run, file, ["seed=2", "table.rows=6", "table.rows=8"])
    table = Table(rows=8, optimizer=Optimizer(lr=3.0, warmup=7))  # lr: the default of the outer table
    assert config == Run(seed=2, name="file", table=table)


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("seed=-7", "seed", -7),
        (" seed = 1_000 ", "seed", 1000),
        ("resume=true", "resume", True),
        ("optimizer.lr=1e-3", "optimizer.lr", 1e-3),
        ("optimizer.lr=2", "optimizer.lr", 2.0),
        ("optimizer.warmup=9", "optimizer.warmup", 9),
        ("optimizer.warmup=none", "optimizer.warmup", None),
        ("name=two words", "name", "two words"),
        ('name="quoted"', "name", "quoted"),
        ("name=123", "name", "123"),
        ("name=none", "name", "none"),
        ("name=a=b", "name", "a=b"),
        ("name=", "name", ""),
        ("name=1\nseed = 2", "name", "1\nseed = 2"),
        ("label=none", "label", None),
        ('label="none"', "label", "none"),
        ("table.sharding=column", "table.sharding", "column"),
        ("table.sharding=2", "table.sharding", 2),
        ("table.sizes=[3, 4]", "table.sizes", (3, 4)),
        ("table.sizes=[]", "table.sizes", ()),
        ('tags=["a", "b"]', "tags", ("a", "b")),
    ],
)
def test_set_reads_the_value_as_the_field_wants_it(override: str, path: str, value: object) -> None:
    found: Any = load(Run, None, [override])
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)


def test_a_byte_order_mark_is_no_problem(tmp_path: Path) -> None:
    assert load(Run, write(tmp_path, "\ufeffseed = 3\n")).seed == 3


# ---- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("sed = 1", "sed: unknown key; did you mean seed?"),
        ("[tabel]\nrows = 1", "tabel: unknown key; did you mean table?"),
        ("[table]\nrow = 1", "table.row: unknown key; did you mean table.rows?"),
        ("rows = 1", "rows: unknown key; did you mean table.rows?"),
        ("lr = 1", "lr: unknown key; did you mean optimizer.lr or table.optimizer.lr?"),
        ("[table]\nlr = 1", "table.lr: unknown key; did you mean optimizer.lr or table.optimizer.lr?"),
        ("seed = 1.0", "seed: expected an integer, got 1.0"),
        ("seed = true", "seed: expected an integer, got true"),
        ("seed = []", "seed: expected an integer, got []"),
        ("seed.x = 1", "seed: expected an integer, got a table"),
        ("resume = 1", "resume: expected true or false, got 1"),
        ("optimizer.lr = true", "optimizer.lr: expected a number, got true"),
        ('optimizer.lr = "1"', 'optimizer.lr: expected a number, got "1"'),
        ("optimizer.warmup = 1979-05-27", "optimizer.warmup: expected an integer or none, got 1979-05-27"),
        ("name = 1", "name: expected a string, got 1"),
        ("table.sharding = 'rwo'", 'table.sharding: expected "row" or "column" or 2, got "rwo"'),
        ("table.sharding = 2.0", 'table.sharding: expected "row" or "column" or 2, got 2.0'),
        ("table.sizes = [1, true]", "table.sizes: expected a list, each item an integer, got [1, true]"),
        ("table.sizes = 1", "table.sizes: expected a list, each item an integer, got 1"),
        ("optimizer = 1", "optimizer: is a table; set its keys: optimizer.lr, optimizer.warmup"),
        ("optimizer.lr = -1", "optimizer: lr must be at least 0, got -1.0"),
        (
            "seed = ",
            "is not TOML: Invalid value (at end of document). Fix: correct it there; text is in quotes, in UTF-8.",
        ),
    ],
)
def test_a_wrong_file_is_refused_in_clear_words(tmp_path: Path, line: str, problem: str) -> None:
    assert problems(Run, write(tmp_path, line)) == [problem]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("seed", "--set seed: expected key=value"),
        ("=1", "--set =1: expected key=value"),
        ("seed=fast", '--set seed: expected an integer, got "fast"'),
        ("seed=", '--set seed: expected an integer, got ""'),
        ("seed=none", '--set seed: expected an integer, got "none"'),
        ("seed=1\nname = 2", r'--set seed: expected an integer, got "1\nname = 2"'),
        ("sed=1", "--set sed: unknown key; did you mean seed?"),
        ("table.row=1", "--set table.row: unknown key; did you mean table.rows?"),
        ("optimizer=1", "--set optimizer: is a table; set its keys: optimizer.lr, optimizer.warmup"),
        ("seed.x=1", "--set seed: expected an integer, got a table"),
        ("table.sharding=diagonal", '--set table.sharding: expected "row" or "column" or 2, got "diagonal"'),
        ("optimizer.lr=-1", "optimizer: lr must be at least 0, got -1.0"),
    ],
)
def test_a_wrong_set_is_refused_in_clear_words(override: str, problem: str) -> None:
    assert problems(Run, None, override)[0] == problem


def test_a_key_that_resembles_nothing_is_answered_with_all_keys() -> None:
    keys = "path, table.rows, table.sharding, table.sizes, table.optimizer.lr, table.optimizer.warmup"
    assert problems(NeedsPath, None, "qqq=1", "path=x") == [f"--set qqq: unknown key; the keys are {keys}"]


def test_all_problems_come_at_once_in_the_order_of_their_sources(tmp_path: Path) -> None:
    file = write(tmp_path, "pth = 1\n[table]\nrows = 'many'\n[table.optimizer]\nlr = -1\n")
    assert problems(NeedsPath, file, "table.sharding=no", "oops") == [
        "pth: unknown key; did you mean path?",
        'table.rows: expected an integer, got "many"',
        '--set table.sharding: expected "row" or "column" or 2, got "no"',
        "--set oops: expected key=value",
        "path: is missing and has no default",
        "table.optimizer: lr must be at least 0, got -1.0",
    ]


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert problems(Run, tmp_path / "no.toml") == [
        "cannot be read: No such file or directory. Fix: name a file that can be read."
    ]


# ---- writing ----------------------------------------------------------------------------------------------


def test_the_dump_is_toml_a_person_would_write() -> None:
    config = Run(name='say "hi"', resume=True, tags=("a", "b"), table=Table(sharding=2, sizes=()))
    assert dump_toml(config) == (
        'seed = 0\nname = "say \\"hi\\""\n# label = none\nresume = true\ntags = ["a", "b"]\n\n'
        "[table]\nrows = 10\nsharding = 2\nsizes = []\n\n"
        "[table.optimizer]\nlr = 3.0\n# warmup = none\n\n"
        "[optimizer]\nlr = 1e-05\n# warmup = none\n"
    )


optimizers = st.builds(Optimizer, lr=st.floats(min_value=0, allow_nan=False), warmup=st.none() | st.integers())
tables = st.builds(
    Table,
    rows=st.integers(),
    sharding=st.sampled_from(["row", "column", 2]),
    sizes=st.lists(st.integers()).map(tuple),
    optimizer=optimizers,
)
runs = st.builds(
    Run,
    seed=st.integers(),
    name=st.text(),
    label=st.none() | st.text(),
    resume=st.booleans(),
    tags=st.lists(st.text()).map(tuple),
    table=tables,
    optimizer=optimizers,
)


@settings(max_examples=50)
@given(config=runs)
def test_what_was_dumped_loads_to_an_equal_value(config: Run, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert load(Run, write(tmp_path_factory.mktemp("config"), dump_toml(config))) == config


def test_a_none_that_would_not_come_back_is_not_dumped() -> None:
    @dataclass(frozen=True)
    class Limit:
        limit: int | None = 5

    assert load(Limit, None, ["limit=none"]) == replace(Limit(), limit=None)
    with pytest.raises(ConfigError, match="limit is None and defaults to 5"):
        dump_toml(Limit(limit=None))
