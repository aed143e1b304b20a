"""The page of errors has every class, its other types, and what causes it."""

import inspect
import re
from pathlib import Path

import pytest

from shardwise import errors
from shardwise.errors import ShardwiseError

PAGE = (Path(__file__).parents[1] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
SECTIONS: dict[str, str] = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## )", PAGE, re.DOTALL | re.MULTILINE))
CLASSES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, ShardwiseError)]
CLASSES.remove(ShardwiseError)  # the base, which is never raised itself


def test_the_sections_of_errors_are_those_of_the_module_in_order() -> None:
    named = [title for title in SECTIONS if title.endswith("Error")]
    assert named == sorted(kind.__name__ for kind in CLASSES)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_the_other_types_of_an_error_are_true(kind: type[ShardwiseError]) -> None:
    said = re.findall(r"`(\w+)`", SECTIONS[kind.__name__].strip().split("\n")[0])
    bases = [base.__name__ for base in kind.__bases__ if base is not ShardwiseError]
    assert said == bases
    assert "\n* " in SECTIONS[kind.__name__]  # causes
