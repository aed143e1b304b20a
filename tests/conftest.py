"""What holds for all tests."""

import gc

import pytest
from hypothesis import settings

# Thousands of other random cases: pytest --hypothesis-profile=many tests/embedding/test_random_collections.py
settings.register_profile("many", max_examples=5000, deadline=None, database=None, print_blob=True)


@pytest.fixture(scope="module", autouse=True)
def _what_earlier_tests_left_is_not_visited_again() -> None:
    """Modules, tests, caches and reports: a million objects, and some tests collect garbage a hundred times."""
    gc.collect()
    gc.freeze()
