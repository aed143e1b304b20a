"""The description of a release on a package index: README.md, whose relative links lead nowhere there.

A hook of hatchling. `address` in `[tool.hatch.metadata.hooks.custom]` of pyproject.toml is where the files of a version
can be read, such as "https://example.org/shardwise/blob/v{version}/". Without it such links become plain text.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# Not of another site, and not within the page.
RELATIVE_LINK = re.compile(r"\[([^\]\n]+)\]\((?![a-z]+:|#)([^)\s]+)\)")
WITHOUT_ADDRESS = "\nPages that are named without a link are in the source distribution, in its folder `docs`.\n"


class ReadmeLinks(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        address = self.config["address"].format(version=metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": for_index(text, address)}


def for_index(text: str, address: str) -> str:
    """`text` with relative links made absolute; as plain text if the address is empty."""
    if not address:
        return RELATIVE_LINK.sub(r"\1", text) + WITHOUT_ADDRESS
    return RELATIVE_LINK.sub(lambda link: f"[{link[1]}]({address.rstrip('/')}/{link[2]})", text)
