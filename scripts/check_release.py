"""Refuses a release whose tag, version and changelog differ: `python scripts/check_release.py v0.2.0`."""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEADING = re.compile(r"^## \[(.+?)\](?: - (.+))?$", re.MULTILINE)


def problems(tag: str, pyproject: str, changelog: str) -> list[str]:
    """What keeps `tag` from being released, with its fix; nothing if it can be.

    Args:
        tag: such as v0.2.0.
        pyproject: the text of pyproject.toml.
        changelog: the text of CHANGELOG.md.
    """
    version = tomllib.loads(pyproject)["project"]["version"]
    found = []
    if tag != f"v{version}":
        found.append(
            f"The tag is {tag}, the version in pyproject.toml {version}. Fix: tag v{version}, or set the version."
        )
    _, unreleased, *rest = HEADING.split(changelog)
    if unreleased != "Unreleased" or changelog.partition("## [Unreleased]")[2].partition("\n## ")[0].strip():
        found.append("CHANGELOG.md has to begin with an empty [Unreleased]. Fix: move its entries to the new version.")
    name, date = (rest[2], rest[3]) if len(rest) > 3 else ("Unreleased", None)
    if name != version or not re.fullmatch(r"\d{4}-\d\d-\d\d", date or ""):
        got = f"[{name}]" if date is None else f"[{name}] - {date}"
        found.append(f"The last release in CHANGELOG.md is {got}. Fix: the heading `## [{version}] - YYYY-MM-DD`.")
    return found


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    texts = ((ROOT / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "CHANGELOG.md"))
    found = problems(sys.argv[1], *texts)
    print("\n".join(found) or f"{sys.argv[1]} is the version of pyproject.toml and of CHANGELOG.md.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
