"""MovieLens' three formats beside a plain loop."""

import gzip
import re
from pathlib import Path

import pytest

from shardwise.demos.data.errors import DataError
from shardwise.demos.data.movielens import MovieLensDataset

ROWS = [(1, 1193, 5.0, 978300760), (1, 661, 3.5, 978302109), (6040, 1097, 0.5, 956715569), (7, 10, 4.0, 1)]
HEADER = "userId,movieId,rating,timestamp"
FORMATS = {"u.data": "\t", "u1.base": "\t", "ratings.dat": "::", "ratings.csv": ","}


def write(path: Path, separator: str, end: str = "\n", num_copies: int = 1) -> Path:
    lines = [separator.join(map(str, row)) for row in ROWS] * num_copies
    content = "".join(line + end for line in ([HEADER] if separator == "," else []) + lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def rows_of(dataset: MovieLensDataset) -> list[tuple[int, int, float, int]]:
    return [
        (user, movie, rating, seconds)
        for batch in dataset
        for (user, movie), rating, seconds in zip(
            batch.ids.tolist(), batch.ratings.tolist(), batch.timestamps.tolist(), strict=True
        )
    ]


@pytest.mark.parametrize("gz", [False, True])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_read(name: str, end: str, gz: bool, tmp_path: Path) -> None:
    path = write(tmp_path / (name + ".gz" * gz), FORMATS[name], end)
    assert rows_of(MovieLensDataset(path, 3, rank=0, world_size=1)) == ROWS
    if name != "u1.base":
        assert rows_of(MovieLensDataset(tmp_path, 1, rank=0, world_size=1)) == ROWS


@pytest.mark.parametrize("seed", [None, 1])
def test_a_header_is_skipped_once_by_ranks_blocks_and_resumed_passes(seed: int | None, tmp_path: Path) -> None:
    path = write(tmp_path / "ratings.csv", ",", num_copies=5)

    def dataset(rank: int) -> MovieLensDataset:
        return MovieLensDataset(path, 2, rank=rank, world_size=2, seed=seed, block_bytes=20)

    assert sorted(rows_of(dataset(0)) + rows_of(dataset(1))) == sorted(ROWS * 5)
    expected = rows_of(dataset(1))
    for taken, batch in enumerate(dataset(0), start=1):
        resumed = dataset(1)
        resumed.load_state_dict(resumed.state_dict(after=batch))
        assert rows_of(resumed) == expected[2 * taken :]


@pytest.mark.parametrize(
    ("name", "line", "problem"),
    [
        ("u.data", "1\t2\t3", "3 fields separated by '\\t', expected 4: userId, movieId, rating, timestamp"),
        ("ratings.dat", "1::2::3:4", "3 fields separated by '::'"),
        ("ratings.dat", "1::2:::3::4", "5 fields separated by '::'"),
        ("ratings.csv", "1;2;3;4", "1 fields separated by ','"),
        ("ratings.csv", "1,2,x,4", "field 3, rating, is b'x', expected a number such as 4 or 3.5."),
        ("ratings.csv", "1,2,.,4", "field 3, rating, is b'.'"),
        ("ratings.csv", "1,2,3.5.0,4", "field 3, rating, is b'3.5.0'"),
        ("ratings.csv", "1,2,nan,4", "field 3, rating, is b'nan'"),
        ("ratings.csv", "1,2,,4", "field 3, rating, is b''"),
        ("ratings.csv", "1,,3,4", "field 2, movieId, is b'', expected an integer."),
        ("ratings.csv", "1,2,3,4.0", "field 4, timestamp, is b'4.0', expected an integer."),
    ],
)
def test_a_wrong_line_is_named(name: str, line: str, problem: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, FORMATS[name])
    number = len(path.read_text().splitlines()) + 1
    with path.open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(DataError, match=rf"^{re.escape(f'{path}:{number}: {problem}')}.*Fix: "):
        rows_of(MovieLensDataset(path, 2, rank=0, world_size=1))


@pytest.mark.parametrize("header", ["", "1,2,3,4\n", "movieId,userId,rating,timestamp\n"])
def test_a_file_without_its_header_is_refused(header: str, tmp_path: Path) -> None:
    path = tmp_path / "ratings.csv"
    path.write_text(header)
    with pytest.raises(DataError, match=rf"^{path}:1: the header is .*expected b'{HEADER}'"):
        rows_of(MovieLensDataset(path, 2, rank=0, world_size=1))


def test_files_of_other_or_different_formats_are_refused(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, FORMATS[name]) for name in ("u.data", "ratings.csv")]
    with pytest.raises(DataError, match="are of different formats"):
        MovieLensDataset(tmp_path, 1, rank=0, world_size=1)
    with pytest.raises(DataError, match=r"movies.txt ends in '.txt', expected one of .data"):
        MovieLensDataset([*paths[:1], write(tmp_path / "movies.txt", ",")], 1, rank=0, world_size=1)
