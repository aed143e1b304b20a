"""Criteo's lines beside a plain loop over them, and what is wrong with a file, with its line."""

import gzip
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.make_criteo_sample import NUM_LINES, SEED, lines
from shardwise.demos.data.criteo import KEYS, NAMES, SAMPLE, CriteoBatch, CriteoDataset
from shardwise.demos.data.errors import DataError
from shardwise.demos.data.lines import READ_BYTES
from tests.demos.data.criteo_lines import read_rows, rows_of

GOOD = "\t".join(["1", *["5"] * 13, *["0000000a"] * 26])


def dataset(*paths: Path, batch_size: int = 7, num_embeddings: int | list[int] | None = None) -> CriteoDataset:
    return CriteoDataset(paths, batch_size, rank=0, world_size=1, num_embeddings=num_embeddings)


def expect_rows(batches: list[CriteoBatch], text: str) -> None:
    expected = read_rows(text)
    found = [row for batch in batches for row in rows_of(batch)]
    assert [(label, ids) for label, _, ids in found] == [(label, ids) for label, _, ids in expected]
    np.testing.assert_allclose([dense for _, dense, _ in found], [dense for _, dense, _ in expected], rtol=1e-6)


def test_the_sample_is_what_a_plain_loop_reads() -> None:
    batches = list(dataset(SAMPLE))
    expect_rows(batches, SAMPLE.read_text())
    assert {(x.dense.dtype, x.ids.dtype, x.labels.dtype) for x in batches} == {
        (torch.float32, torch.int64, torch.float32)
    }
    assert sum(len(batch.labels) for batch in batches) == NUM_LINES


def test_the_sample_is_what_its_script_makes() -> None:
    assert SAMPLE.read_text(encoding="ascii") == "".join(lines(NUM_LINES, SEED))


@pytest.mark.parametrize(
    "line",
    [
        "0" + "\t" * 39,
        GOOD,
        GOOD.replace("5", "-1"),
        GOOD.replace("5", "123456789012345678"),
        GOOD.replace("0000000a", "ffFFabCD"),
        GOOD.replace("\t0000000a", "\t", 25),
        GOOD.removesuffix("0000000a"),
    ],
)
@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
def test_every_kind_of_field_is_what_a_plain_loop_reads(line: str, end: str, tmp_path: Path) -> None:
    text = f"{GOOD}\n{line}{end}"
    (tmp_path / "train.txt").write_text(text, newline="")
    expect_rows(list(dataset(tmp_path)), text)


def test_ids_fit_the_tables_and_a_missing_one_has_its_own(tmp_path: Path) -> None:
    sizes = [2 + i for i in range(len(KEYS))]
    (raw,) = dataset(SAMPLE, batch_size=NUM_LINES)
    (batch,) = dataset(SAMPLE, batch_size=NUM_LINES, num_embeddings=sizes)
    assert torch.equal(batch.ids == 0, raw.ids == 0)
    assert (raw.ids == 0).any()
    modulus = torch.tensor(sizes) - 1
    assert torch.equal(batch.ids, torch.where(raw.ids == 0, 0, 1 + (raw.ids - 1) % modulus))
    (same,) = dataset(SAMPLE, batch_size=NUM_LINES, num_embeddings=50)
    assert int(same.ids.max()) < 50
    for wrong in (1, [5] * 25, [1] * 26):
        with pytest.raises(ValueError, match="num_embeddings is"):
            dataset(SAMPLE, num_embeddings=wrong)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("", "1 fields separated by '\\t', expected 40: label, I1"),
        ("\t".join(GOOD.split("\t")[1:]), "39 fields separated"),
        (GOOD + "\t", "41 fields separated"),
        (GOOD + "\n", "1 fields separated"),  # an empty line after it
        (GOOD.replace("1\t", "2\t", 1), "field 1, label, is b'2', expected 0 or 1."),
        (GOOD.replace("1\t", "\t", 1), "field 1, label, is b'', expected an integer."),
        (GOOD.replace("1\t", "x\t", 1), "field 1, label, is b'x', expected an integer."),
        (GOOD.replace("5", "1.5", 1), "field 2, I1, is b'1.5', expected an integer or nothing."),
        (GOOD.replace("5", "-", 1), "field 2, I1, is b'-', expected an integer or nothing."),
        (GOOD.replace("5", "--1", 1), "field 2, I1, is b'--1'"),
        (GOOD.replace("5", " 5", 1), "field 2, I1, is b' 5'"),
        (GOOD.replace("5", "1" * 19, 1), "field 2, I1, is b'1111111111111111111'"),
        (GOOD.replace("0000000a", "0000000g", 1), "field 15, C1, is b'0000000g', expected 8 hexadecimal digits or no"),
        (GOOD.replace("0000000a", "000000a", 1), "field 15, C1, is b'000000a'"),
        (GOOD.replace("0000000a", "00000000a", 1), "field 15, C1, is b'00000000a'"),
        (GOOD[:-1], "field 40, C26, is b'0000000'"),
    ],
)
@pytest.mark.parametrize("gz", [False, True])
@pytest.mark.parametrize("before", [0, 5])
def test_a_wrong_line_is_named(line: str, problem: str, gz: bool, before: int, tmp_path: Path) -> None:
    path = tmp_path / f"train.txt{'.gz' * gz}"
    content = (f"{GOOD}\n" * before + f"{line}\n" + f"{GOOD}\n" * 3).encode()
    path.write_bytes(gzip.compress(content) if gz else content)
    number = before + 1 + line.endswith("\n")
    with pytest.raises(DataError, match=rf"^{re.escape(f'{path}:{number}: {problem}')}.*Fix: "):
        list(dataset(path))


@pytest.mark.parametrize("seed", [None, 3])
def test_the_line_of_an_error_is_that_of_the_file_on_any_rank(seed: int | None, tmp_path: Path) -> None:
    path = tmp_path / "day_3"
    path.write_text("".join(f"{GOOD}\n" for _ in range(50)) + GOOD.replace("5", "x", 1) + "\n" + f"{GOOD}\n" * 9)
    problems = []
    for rank in range(3):
        try:
            list(CriteoDataset(path, 2, rank=rank, world_size=3, seed=seed, block_bytes=700))
        except DataError as error:
            problems.append(str(error))
    (problem,) = problems
    assert problem.startswith(f"{path}:51: field 2, I1, is b'x'")


def test_truncated_and_damaged_gz_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "day_0.gz"
    content = gzip.compress("".join(lines(5000, 1)).encode())
    path.write_bytes(content[: len(content) // 2])
    number = f"{path}:(2[0-9]{{3}})"
    with pytest.raises(DataError, match=f"^{number}: the gz data is damaged or ends here: Compressed file ended"):
        list(dataset(path))
    path.write_bytes(content[:9000] + bytes(100) + content[9100:])
    with pytest.raises(DataError, match=rf"^{path}:\d+: the gz data is damaged or ends here"):
        list(dataset(path))
    for wrong in (b"", b"text\n"):
        path.write_bytes(wrong)
        with pytest.raises(DataError, match=f"^{path}:1: not a gz file: it starts with"):
            list(dataset(path))


def test_a_file_without_lines_is_an_error_and_an_empty_one_has_no_batches(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_bytes(b"")
    assert list(dataset(path)) == []
    for num_bytes in (READ_BYTES, READ_BYTES + 1, 3 * READ_BYTES):
        path.write_bytes(b"0" * num_bytes + b"\n")
        with pytest.raises(DataError, match=f"^{path}:1: no end of the line in {READ_BYTES} bytes"):
            list(dataset(path))


def test_files_of_a_folder_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for i in (10, 9, 1):  # the Terabyte's files are gz
        content = (GOOD.replace("5", str(i), 1) + "\n").encode()
        (tmp_path / f"day_{i}{'' if i == 9 else '.gz'}").write_bytes(content if i == 9 else gzip.compress(content))
    (tmp_path / "day_1_notes").write_text("no data")
    (batch,) = dataset(tmp_path)
    assert batch.dense[:, 0].expm1().round().tolist() == [1, 9, 10]


def test_files_that_are_missing_or_named_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"no file in {tmp_path} is named train.txt, day_"):
        dataset(tmp_path)
    path = tmp_path / "train.txt"
    with pytest.raises(DataError, match=f"there is no file {path}. Fix: check the path."):
        dataset(path)
    with pytest.raises(DataError, match="paths is empty"):
        dataset()
    path.write_text(GOOD)
    (tmp_path / "train.txt.gz").write_bytes(gzip.compress(GOOD.encode()))
    for paths in ([tmp_path], [path, path]):
        with pytest.raises(DataError, match=r"are the same lines\. Fix: name one of them\."):
            dataset(*paths)


def test_names_are_those_of_the_fields() -> None:
    assert len(NAMES) == 40
    assert NAMES[0] == "label"
    assert NAMES[-26:] == KEYS
