"""The bundled data set is what it says, and a file that is not is refused."""

import hashlib
import json
import lzma
from pathlib import Path

import numpy as np
import pytest
import torch

from shardwise.demos.data import DataError, PyIdent, load_pyident
from shardwise.demos.data.pyident import BUNDLED, MAGIC, MAX_PAYLOAD, is_held_out

# A change of the fingerprint is a change of the data set: the figures below, those in the documentation and
# the expected quality of the demo have to be measured again.
FINGERPRINT = "ff29b49b982998c476159f777688e5d8d6bcf2879f357f1308db04e69b8370a4"


def test_the_bundled_file_has_the_known_fingerprint_and_fits_its_budget(pyident: PyIdent) -> None:
    assert pyident.fingerprint == FINGERPRINT
    assert pyident.python == "3.11.7"
    assert BUNDLED.stat().st_size <= 140_000


def test_the_licence_travels_with_the_file() -> None:
    text = BUNDLED.with_name("PSF-LICENSE.txt").read_text(encoding="utf-8")
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in text
    assert "Python\nSoftware Foundation; All Rights Reserved" in text
    assert "Summary of the changes" in text


def test_the_counts_are_those_of_the_documentation(pyident: PyIdent) -> None:
    assert pyident.num_functions == 13_573
    assert len(pyident.vocab) == 3_530
    assert len(pyident.bags.values) == 112_206
    assert len(pyident.modules) == 665
    assert len(pyident.packages) == 186
    assert int(pyident.is_test.sum()) == 1_652
    assert repr(pyident) == (
        "PyIdent(13,573 functions x 3,530 identifiers, 112,206 interactions, 1,652 functions held out, "
        "CPython 3.11.7, ff29b49b9829)"
    )


def test_every_tensor_has_the_promised_shape_and_range(pyident: PyIdent) -> None:
    functions = (pyident.num_functions,)
    for ids, names in [(pyident.module_of, pyident.modules), (pyident.package_of, pyident.packages)]:
        assert ids.shape == functions
        assert ids.unique().tolist() == list(range(len(names)))
    assert pyident.num_args.shape == pyident.is_test.shape == functions
    assert pyident.bags.offsets.shape == (pyident.num_functions + 1,)
    assert pyident.bags.offsets[-1] == len(pyident.bags.values)
    assert pyident.bags.values.unique().tolist() == list(range(len(pyident.vocab)))


def test_a_bag_holds_three_or_more_ids_once_each_ascending(pyident: PyIdent) -> None:
    values, offsets = pyident.bags
    assert int(offsets.diff().min()) >= 3
    starts_a_bag = torch.zeros(len(values), dtype=torch.bool)
    starts_a_bag[offsets[:-1]] = True
    assert bool(((values.diff() > 0) | starts_a_bag[1:]).all())


def test_a_function_of_the_library_is_found_with_its_identifiers(pyident: PyIdent) -> None:
    bags = [
        {pyident.vocab[i] for i in pyident.bag(f).tolist()}
        for f in range(pyident.num_functions)
        if pyident.modules[pyident.module_of[f]] == "bisect"
    ]
    assert {"a", "x", "lo", "hi", "key", "insert"} in bags  # insort_left; `bisect_left` itself is too rare


def test_a_package_is_the_first_part_of_the_modules_name(pyident: PyIdent) -> None:
    for module, package in {*zip(pyident.module_of.tolist(), pyident.package_of.tolist(), strict=True)}:
        assert pyident.modules[module].split(".")[0] == pyident.packages[package]
    assert sorted(pyident.packages) == list(pyident.packages)
    assert sorted(pyident.modules) == list(pyident.modules)


def test_no_module_is_in_both_splits(pyident: PyIdent) -> None:
    held_out = {pyident.modules[m] for m in pyident.module_of[pyident.is_test].tolist()}
    trained = {pyident.modules[m] for m in pyident.module_of[~pyident.is_test].tolist()}
    assert not held_out & trained
    assert len(held_out) == 77
    assert all(is_held_out(module) for module in held_out)


def test_training_counts_ignore_held_out_functions_and_order_the_vocabulary(pyident: PyIdent) -> None:
    counts = [0] * len(pyident.vocab)
    for f in (~pyident.is_test).nonzero().flatten().tolist():
        for i in pyident.bag(f).tolist():
            counts[i] += 1
    assert pyident.train_counts.tolist() == counts
    by_popularity = sorted(range(len(counts)), key=lambda i: (-counts[i], pyident.vocab[i]))
    assert by_popularity == list(range(len(counts)))
    assert pyident.vocab[:3] == ("self", "len", "name")


def test_two_loads_are_equal_and_share_nothing(pyident: PyIdent) -> None:
    other = load_pyident(BUNDLED)
    assert other.bags.values.equal(pyident.bags.values)
    assert other.bags.values.data_ptr() != pyident.bags.values.data_ptr()


HEAD = len(MAGIC) + 32


@pytest.mark.parametrize("position", [len(MAGIC), HEAD - 1, HEAD, HEAD + 10, 60_000, -1])
def test_a_flipped_bit_is_refused(tmp_path: Path, position: int) -> None:
    content = bytearray(BUNDLED.read_bytes())
    content[position] ^= 1
    damaged = tmp_path / "damaged.bin"
    damaged.write_bytes(content)
    with pytest.raises(DataError, match=r"damaged\.bin: damaged: (.|\n)*Fix: reinstall shardwise"):
        load_pyident(damaged)


@pytest.mark.parametrize("size", [len(MAGIC), HEAD, HEAD + 20, 60_000])
def test_a_file_cut_short_is_refused(tmp_path: Path, size: int) -> None:
    damaged = tmp_path / "short.bin"
    damaged.write_bytes(BUNDLED.read_bytes()[:size])
    with pytest.raises(DataError, match=r"short\.bin: damaged: its SHA-256 is \w{64}, expected \w*\.\n"):
        load_pyident(damaged)


@pytest.mark.parametrize("content", [b"", b"PyIdent", b"\x80\x04K\x01.", b"user\titem\n"])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes) -> None:
    other = tmp_path / "other.bin"
    other.write_bytes(content)
    with pytest.raises(DataError) as refused:
        load_pyident(other)
    assert str(refused.value) == (
        f"{other}: not a PyIdent file: it starts with {content[:8]!r}, expected b'PyIdent\\x01'.\n"
        "  Fix: reinstall shardwise, or write the file again with scripts/make_pyident.py."
    )


def write(path: Path, payload: bytes) -> Path:
    packed = lzma.compress(payload, preset=0)
    path.write_bytes(MAGIC + hashlib.sha256(payload).digest() + packed)
    return path


# One module with the functions {a, b} and {b}.
HEADER = {"python": "3.11.7", "vocab": ["b", "a"], "modules": ["m"], "functions": 2, "interactions": 3}
NUMBERS = [2, 0, 3, 2, 1, 0, 1, 0]


def payload(header: object, numbers: list[int]) -> bytes:
    return json.dumps(header).encode() + b"\n" + np.array(numbers, dtype="<u2").tobytes()


def test_a_file_written_by_hand_is_read_as_documented(tmp_path: Path) -> None:
    data = load_pyident(write(tmp_path / "hand.bin", payload(HEADER, NUMBERS)))
    assert (data.vocab, data.modules, data.packages) == (("b", "a"), ("m",), ("m",))
    assert [data.bag(0).tolist(), data.bag(1).tolist()] == [[0, 1], [0]]
    assert data.num_args.tolist() == [0, 3]
    assert data.train_counts.tolist() == [2, 1]


def test_a_file_without_functions_is_read(tmp_path: Path) -> None:
    header = {"python": "3.11.7", "vocab": [], "modules": [], "functions": 0, "interactions": 0}
    data = load_pyident(write(tmp_path / "empty.bin", payload(header, [])))
    assert data.num_functions == 0
    assert data.bags.offsets.tolist() == [0]
    assert data.module_of.shape == data.package_of.shape == data.is_test.shape == data.train_counts.shape == (0,)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (payload(HEADER, NUMBERS[:-1]), "7 numbers, expected 8"),
        (payload(HEADER, [*NUMBERS, 0]), "9 numbers, expected 8"),
        (payload(HEADER, NUMBERS) + b"\0", "buffer size"),
        (payload(HEADER, [1, *NUMBERS[1:]]), "do not add up"),
        (payload(HEADER, [2, 0, 3, 2, 2, 0, 1, 0]), "do not add up"),
        (payload(HEADER, [2, 0, 3, 2, 1, 0, 2, 0]), "id 2 is outside the vocabulary of 2"),
        (payload({**HEADER, "functions": -2}, NUMBERS), "expected"),
        (payload({**HEADER, "modules": [7]}, NUMBERS), "partition"),
        (payload([], NUMBERS), "list indices"),
        (payload({"vocab": []}, NUMBERS), "modules"),
        (b"\xff\xfe", "not PyIdent 1"),
        (b"", "not PyIdent 1"),
    ],
)
def test_content_that_does_not_fit_its_header_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    with pytest.raises(DataError, match=rf"odd\.bin: the checksum is right but .*{why}"):
        load_pyident(write(tmp_path / "odd.bin", content))


def test_a_file_that_unpacks_to_far_too_much_is_refused(tmp_path: Path) -> None:
    bomb = write(tmp_path / "bomb.bin", payload(HEADER, NUMBERS) + bytes(MAX_PAYLOAD))
    with pytest.raises(DataError, match=r"bomb\.bin: damaged"):
        load_pyident(bomb)
