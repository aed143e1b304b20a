"""The page for those who come from torch has every public name of the torch that is installed."""

import re
from pathlib import Path

from torch.distributed import fsdp, tensor
from torch.distributed.device_mesh import __all__ as of_meshes
from torch.distributed.tensor import debug, experimental, parallel

PAGE = Path(__file__).parents[1] / "docs" / "coming-from-torch.md"
METHODS = [name for name in vars(fsdp.FSDPModule) if not name.startswith("_")]
NAMES = {
    *tensor.__all__, *parallel.__all__, *debug.__all__, *experimental.__all__, *of_meshes, *fsdp.__all__, *METHODS,
    "from_local", "to_local", "full_tensor", "redistribute", "device_mesh", "placements",
}  # fmt: skip


def test_every_public_name_of_torch_is_on_the_page() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    found = {name for row in rows for span in re.findall(r"`([^`]+)`", row) for name in re.findall(r"\w+", span)}
    assert len(NAMES) > 40
    assert NAMES - found == set()
