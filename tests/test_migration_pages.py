"""The pages for those who come from torch have every public name of the torch that is installed."""

import re
from pathlib import Path

import pytest
from torch.distributed import fsdp, tensor
from torch.distributed.device_mesh import __all__ as of_meshes
from torch.distributed.tensor import debug, experimental, parallel

DOCS = Path(__file__).parents[1] / "docs"
METHODS = [name for name in vars(fsdp.FSDPModule) if not name.startswith("_")]
NAMES = {
    "coming-from-torch.md": [
        *tensor.__all__, *parallel.__all__, *debug.__all__, *experimental.__all__, *of_meshes,
        "from_local", "to_local", "full_tensor", "redistribute", "device_mesh", "placements",
    ],
    "coming-from-fsdp.md": [*fsdp.__all__, *METHODS],
}  # fmt: skip


def names_of(page: str) -> set[str]:
    """Every identifier in the code spans of a page's tables."""
    rows = [line for line in (DOCS / page).read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    return {name for row in rows for span in re.findall(r"`([^`]+)`", row) for name in re.findall(r"\w+", span)}


@pytest.mark.parametrize("page", NAMES)
def test_every_public_name_of_torch_is_on_the_page(page: str) -> None:
    assert len(NAMES[page]) > 20
    assert set(NAMES[page]) - names_of(page) == set()
