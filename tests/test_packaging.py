"""The wheel, its description on a package index, and what a release is checked for."""

import re
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

import shardwise
from scripts.check_release import problems
from scripts.readme_links import for_index
from scripts.try_wheel import FIRST_EXAMPLE, IMPORT, build, check_files

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[1]
PYPROJECT = '[project]\nversion = "0.2.0"\n'
CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-12-01\n\n- A.\n\n## [0.1.0] - 2026-11-01\n\n- B.\n"


def test_the_version_is_that_of_pyproject() -> None:
    assert shardwise.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_the_wheel_has_the_package_and_runs_from_it(tmp_path: Path) -> None:
    wheel = build(tmp_path / "dist", "--no-isolation")
    check_files(wheel)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    (metadata,) = (tmp_path / "site").glob("*.dist-info/METADATA")
    described = message_from_string(metadata.read_text())
    assert described["Version"] == shardwise.__version__
    assert {Path(name).name for name in described.get_all("License-File", [])} == {"LICENSE"}
    files = (path for path in (tmp_path / "site" / "shardwise").rglob("*") if path.is_file())
    assert {path.name for path in files if path.suffix != ".py"} == {"py.typed"}
    assert re.findall(r"\]\((?!https?:|#)", str(described.get_payload())) == []
    command, environment = [sys.executable, "-c", IMPORT], {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == f"{shardwise.__version__} {tmp_path / 'site' / 'shardwise' / '__init__.py'}\n"


def test_links_of_the_readme_lead_somewhere_on_a_package_index() -> None:
    text = "[A](docs/a.md#b) [B](https://b.org/c) [C](#d) **[D](LICENSE)**"
    assert for_index(text, "https://e.org/v1/") == (
        "[A](https://e.org/v1/docs/a.md#b) [B](https://b.org/c) [C](#d) **[D](https://e.org/v1/LICENSE)**"
    )
    plain = for_index(text, "")
    assert plain.startswith("A [B](https://b.org/c) [C](#d) ")
    assert "are in the source distribution" in plain


def test_the_wheel_is_tried_with_the_first_example_of_the_readme() -> None:
    found = FIRST_EXAMPLE.search((ROOT / "README.md").read_text())
    assert found is not None
    assert "sw.shard_module(" in found[1]
    assert "  Fix: " in found[2]


def test_a_release_whose_tag_version_and_changelog_agree_has_no_problems() -> None:
    assert problems("v0.2.0", PYPROJECT, CHANGELOG) == []


TAG, CHANGES, LAST = "The tag is", "CHANGELOG.md has to begin", "The last release in CHANGELOG.md is"


@pytest.mark.parametrize(
    ("tag", "pyproject", "changelog", "said"),
    [
        ("v0.3.0", PYPROJECT, CHANGELOG, [f"{TAG} v0.3.0, the version in pyproject.toml 0.2.0."]),
        ("0.2.0", PYPROJECT, CHANGELOG, [f"{TAG} 0.2.0, the version in pyproject.toml 0.2.0."]),
        ("v0.3.0", PYPROJECT.replace("2", "3"), CHANGELOG, [f"{LAST} [0.2.0] - 2026-12-01."]),
        ("v0.2.0", PYPROJECT, CHANGELOG.replace(" - 2026-12-01", ""), [f"{LAST} [0.2.0]."]),
        ("v0.2.0", PYPROJECT, CHANGELOG.replace("2026-12-01", "soon"), [f"{LAST} [0.2.0] - soon."]),
        ("v0.2.0", PYPROJECT, CHANGELOG.replace("[Unreleased]\n", "[Unreleased]\n\n- C.\n"), [CHANGES]),
        ("v0.2.0", PYPROJECT, CHANGELOG.replace("## [Unreleased]\n", ""), [CHANGES, LAST]),
        ("v0.2.0", PYPROJECT, "## [Unreleased]\n\n- A.\n", [CHANGES, LAST]),
    ],
)
def test_a_release_whose_tag_version_and_changelog_differ_is_refused(
    tag: str, pyproject: str, changelog: str, said: list[str]
) -> None:
    found = problems(tag, pyproject, changelog)
    assert len(found) == len(said)
    for line, beginning in zip(found, said, strict=True):
        assert line.startswith(beginning)
        assert "Fix: " in line
