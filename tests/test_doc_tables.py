"""The page of errors has every class, its other types and causes; the page for users of torch every name of torch."""

import inspect
import re
from pathlib import Path

import pytest
from torch.distributed import fsdp, tensor
from torch.distributed.device_mesh import __all__ as of_meshes
from torch.distributed.tensor import debug, experimental, parallel

from shardwise import errors
from shardwise.errors import ShardwiseError

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
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


METHODS = [name for name in vars(fsdp.FSDPModule) if not name.startswith("_")]
NAMES = {
    *tensor.__all__, *parallel.__all__, *debug.__all__, *experimental.__all__, *of_meshes, *fsdp.__all__, *METHODS,
    "from_local", "to_local", "full_tensor", "redistribute", "device_mesh", "placements",
}  # fmt: skip


def test_every_public_name_of_torch_is_on_the_page() -> None:
    page = (DOCS / "coming-from-torch.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("|")]
    found = {name for row in rows for span in re.findall(r"`([^`]+)`", row) for name in re.findall(r"\w+", span)}
    assert len(NAMES) > 40
    assert NAMES - found == set()
