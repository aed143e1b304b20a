"""The script that makes the data set, on a small library whose result is known."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.make_pyident import make_payload, read_functions, write
from shardwise.demos.data import load_pyident
from shardwise.demos.data.pyident import is_held_out

pytestmark = pytest.mark.processes

FILES = {
    "top.py": """
import os
def first(a, /, b, *rest, key=None, **more):
    "A doc string: words here are no identifiers."
    return a.b.c(d, e, rare)
class Box:
    def second(self):
        self.a = b, c, d, e
        def inner(): return a, b, c, d
        return inner
    async def third(self): return [a for a in b if c(d, e)]
""",
    "kit/__init__.py": "def fourth(unused): return a, b, c, d, e, self\n",
    "kit/sub.py": "def fifth(): return a, b, c, d, self\nfifth()\ndef sixth(): return a, b, e, self, '\\d'\n",
    "abc.py": "def seventh(x): return a, b, e, self, late, late, four\n",
    "kit/late.py": "def eighth(): late.four\ndef ninth(): late.four\ndef tenth(): late.four\ndef g(): late, a, b\n",
    "test/skipped.py": "def no(): return a, b, c, d, e",
    "kit/tests/skipped.py": "def no(): return a, b, c, d, e",
    "site-packages/skipped.py": "def no(): return a, b, c, d, e",
    "config-3.11/skipped.py": "def no(): return a, b, c, d, e",
    "_sysconfigdata_x.py": "def no(): return a, b, c, d, e",
    "notes.txt": "def no(): return a, b, c, d, e",
}


@pytest.fixture
def lib(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        file = tmp_path / "Lib" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return tmp_path / "Lib"


def test_the_names_and_attributes_of_every_function_are_read_in_order(lib: Path) -> None:
    functions = read_functions(lib)
    assert [(f.module, f.num_args, "".join(sorted(f.identifiers))) for f in functions][:5] == [
        ("abc", 1, "abefourlateself"),
        ("kit", 1, "abcdeself"),
        ("kit.late", 0, "fourlate"),
        ("kit.late", 0, "fourlate"),
        ("kit.late", 0, "fourlate"),
    ]
    assert [(f.num_args, sorted(f.identifiers)) for f in functions if f.module == "top"] == [
        (5, ["a", "b", "c", "d", "e", "rare"]),
        (1, ["a", "b", "c", "d", "e", "inner", "self"]),
        (0, ["a", "b", "c", "d"]),
        (1, ["a", "b", "c", "d", "e"]),
    ]
    assert {f.module for f in functions} == {"abc", "kit", "kit.sub", "kit.late", "top"}


def test_identifiers_that_are_frequent_in_training_are_kept_in_functions_with_three_of_them(
    lib: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.bin"
    write(make_payload(read_functions(lib)), out)
    data = load_pyident(out)
    # `self` and `late` are used by five functions, but one of them is held out; the functions of `kit.late`
    # have too few others.
    names = [[data.vocab[i] for i in data.bag(f).tolist()] for f in range(data.num_functions)]
    assert data.modules == ("abc", "kit", "kit.sub", "top")
    assert data.packages == ("abc", "kit", "top")
    assert data.module_of.tolist() == [0, 1, 2, 2, 3, 3, 3, 3]
    assert data.package_of.tolist() == [0, 1, 1, 1, 2, 2, 2, 2]
    assert data.num_args.tolist() == [1, 1, 0, 0, 5, 1, 0, 1]
    assert ["".join(bag) for bag in names] == ["abe", "abcde", "abcd", "abe", "abcde", "abcde", "abcd", "abcde"]


def test_the_vocabulary_is_ordered_by_training_frequency(lib: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.bin"
    write(make_payload(read_functions(lib)), out)
    data = load_pyident(out)
    assert is_held_out("abc")
    assert data.is_test.tolist() == [True] + 7 * [False]
    assert data.vocab == ("a", "b", "c", "d", "e")
    assert data.train_counts.tolist() == [7, 7, 6, 6, 5]


def test_the_command_writes_the_same_file_each_time(lib: Path, tmp_path: Path) -> None:
    script = Path(__file__).parents[3] / "scripts" / "make_pyident.py"
    outputs = [tmp_path / "one.bin", tmp_path / "two.bin"]
    said = [
        subprocess.run(
            [sys.executable, script, "--lib", lib, "--out", out], check=True, capture_output=True, text=True
        ).stdout
        for out in outputs
    ]
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    assert "8 functions x 5 identifiers, 34 interactions, 1 functions held out" in said[0]
    assert f"fingerprint {load_pyident(outputs[0]).fingerprint}" in said[0]


def test_a_library_without_functions_gives_an_empty_data_set(tmp_path: Path) -> None:
    write(make_payload(read_functions(tmp_path)), tmp_path / "out.bin")
    assert load_pyident(tmp_path / "out.bin").num_functions == 0
