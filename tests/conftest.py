"""What holds for all tests."""

import gc
from collections import defaultdict
from collections.abc import Generator

import pytest
from hypothesis import settings

from tests.browser import BROWSER, NOT_RUN
from tests.pairs import pairwise_cover

# Thousands of other random cases: pytest --hypothesis-profile=many tests/embedding/test_random_collections.py
settings.register_profile("many", max_examples=5000, deadline=None, database=None, print_blob=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests stay, so collecting garbage meanwhile would visit all of them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _what_earlier_tests_left_is_not_visited_again() -> None:
    """Modules, tests, caches and reports: a million objects, and some tests collect garbage a hundred times."""
    gc.collect()
    gc.freeze()


# ---- tests in a browser ---------------------------------------------------------------------------------------------


def pytest_runtest_setup(item: pytest.Item) -> None:
    if BROWSER is None and item.get_closest_marker("browser"):
        pytest.skip(NOT_RUN)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    left_out = [report for report in terminalreporter.stats.get("skipped", []) if "browser" in report.keywords]
    if left_out:
        terminalreporter.section("NOT RUN", red=True, bold=True)
        terminalreporter.line(f"{len(left_out)} tests in a browser did not run: {NOT_RUN}", red=True, bold=True)


# ---- cases of tests with three parameters or more ----------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-case",
        action="store_true",
        help="run all cases of tests with three parameters or more; without it, every two values meet in one case",
    )


@pytest.hookimpl(trylast=True)  # what -k and -m deselect covers nothing
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--every-case"):
        _leave_out_cases(config, items)
    # First what waits for processes: the first worker begins with these, and others compute meanwhile.
    items.sort(key=lambda item: item.get_closest_marker("processes") is None)


def _leave_out_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    families: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        families[item.nodeid.partition("[")[0]].append(item)
    left_out = set[pytest.Item]()
    for family in families.values():
        cases = [_values(item) for item in family]
        if len(cases[0]) > 2:
            left_out |= set(family) - {family[number] for number in pairwise_cover(cases)}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def _values(item: pytest.Item) -> list[tuple[int, ...]]:
    """The value of each `parametrize` of a test, by identity, and of each fixture with parameters."""
    spec = getattr(item, "callspec", None)
    left = {} if spec is None else dict(spec.params)
    found = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        found.append(tuple(id(left.pop(name.strip())) for name in names))
    return found + [(id(value),) for _, value in sorted(left.items())]
