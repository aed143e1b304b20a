"""Builds the source distribution and the wheel in dist/, and tries the wheel in empty environments.

`make wheel` runs it: once for each interpreter, `make wheel TORCH=2.14.1` with that torch. An environment is as large
as torch, and removed afterwards. An interpreter that does not run here is named and left out.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
INTERPRETERS = ("python3.11", "python3.12", "python3.13")  # those of the classifiers in pyproject.toml
FIRST_EXAMPLE = re.compile(r"^```python\n(.*?)^```$.*?^```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)
IMPORT = "import shardwise; print(shardwise.__version__, shardwise.__file__)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", help=f"interpreters (default: {', '.join(INTERPRETERS)})")
    parser.add_argument("--torch", help="version (default: that of constraints.txt)")
    args = parser.parse_args()
    wheel = build(DIST)
    check_files(wheel)
    tried = []
    for python in args.python or INTERPRETERS:
        if shutil.which(python) is None or started([python, "--version"]).returncode:
            print(f"{python} does not run here: not tried.")
        else:
            print(f"{python}, {try_wheel(wheel, python, args.torch)}: works.", flush=True)
            tried.append(python)
    return 0 if tried else 1


def build(folder: Path, *options: str) -> Path:
    """The new wheel, made from the new source distribution.

    Args:
        folder: for both; emptied first.
        options: of `python -m build`.
    """
    shutil.rmtree(folder, ignore_errors=True)
    run([sys.executable, "-m", "build", *options, "--outdir", str(folder), str(ROOT)])
    for file in sorted(folder.iterdir()):
        print(f"Built {file}, {file.stat().st_size / 1e6:.1f} MB.", flush=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_files(wheel: Path) -> None:
    """The wheel has every file of the package that git has, and no other beside its metadata."""
    listed = run(["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "src/shardwise"])
    expected = {line.removeprefix("src/") for line in listed.splitlines()}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    if found != expected:
        raise SystemExit(f"{wheel.name} differs from src/shardwise by {sorted(found ^ expected)}")


def try_wheel(wheel: Path, python: str, torch: str | None) -> str:
    """Install it in a new environment and use it from an empty folder. The version of torch there."""
    with TemporaryDirectory() as folder:
        root, empty = Path(folder), Path(folder, "empty")
        empty.mkdir()
        constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
        if torch is not None:
            constraints = re.sub(r"^torch==.*", f"torch=={torch}", constraints, flags=re.MULTILINE)
        (root / "constraints.txt").write_text(constraints, encoding="utf-8")
        run([python, "-m", "venv", str(root / "env")])
        bin_folder = root / "env" / "bin"
        install = [str(bin_folder / "python"), "-m", "pip", "install", "--quiet", "--constraint"]
        run([*install, str(root / "constraints.txt"), f"{wheel}[completion]"])
        use(bin_folder, empty, version=wheel.name.split("-")[1])
        return run([str(bin_folder / "python"), "-c", "import torch; print('torch', torch.__version__)"]).strip()


def use(bin_folder: Path, folder: Path, version: str) -> None:
    """Import it, run the first example of the README, and the command line.

    Args:
        bin_folder: of the environment.
        folder: empty; where the commands run.
    """
    python, shardwise = str(bin_folder / "python"), str(bin_folder / "shardwise")
    found, _, file = run([python, "-c", IMPORT], folder).partition(" ")
    assert found == version, f"shardwise.__version__ is {found}, the wheel is of {version}"
    assert Path(file).is_relative_to(bin_folder.parent), f"shardwise was imported from {file}"
    example = FIRST_EXAMPLE.search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert example is not None, "README.md has no example"
    (folder / "example.py").write_text(example[1], encoding="utf-8")
    printed = run([python, "example.py"], folder)
    assert printed == example[2], f"the first example of README.md printed {printed}, not {example[2]}"
    assert run([shardwise, "--version"], folder) == f"shardwise {version}\n"
    assert "_shtab_shardwise" in run([shardwise, "completion", "bash"], folder)
    assert "2 exchanged 1 MiB each way" in run([shardwise, "doctor"], folder)


def run(command: Sequence[str], folder: Path | None = None) -> str:
    """What a command prints; its error ends this program."""
    done = started(command, folder)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def started(command: Sequence[str], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command at its end. It finds no packages but those of its own interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    sys.exit(main())
