"""Rows of Parquet files as steps of ranks and workers, and what is wrong with a file, by its name and row."""

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from shardwise.demos.data import DataError, ParquetBatch, ParquetDataset, PassError
from shardwise.embedding import EmbeddingBagCollection, EmbeddingBagConfig, JaggedTensor
from shardwise.testing import world

Row = tuple[int, list[int], float, float]
INT32S = pa.list_(pa.int32())
FEATURES, DENSE, LABEL = ["number", "ids"], ["half"], "odd"


def row_of(number: int) -> Row:
    return number, [number * 10 + i for i in range(number % 4)], number / 2, float(number % 2)


def write(path: Path, numbers: Sequence[int], group_rows: int = 5, ids: pa.DataType | None = None) -> Path:
    """The rows of these numbers, `group_rows` in a row group."""
    columns: list[Sequence[object]] = list(zip(*map(row_of, numbers), strict=True)) or [[], [], [], []]
    table = pa.table({
        "number": pa.array(columns[0], pa.int32()),
        "unused": pa.array([None] * len(numbers), pa.string()),
        "ids": pa.array(columns[1], ids or pa.list_(pa.int64())),
        "half": pa.array(columns[2], pa.float64()),
        "odd": pa.array(columns[3], pa.int8()),
    })  # fmt: skip
    pq.write_table(table, path, row_group_size=group_rows)
    return path


def write_files(folder: Path, sizes: Sequence[int], group_rows: int) -> tuple[list[Path], list[int]]:
    """Files of so many rows, and the numbers of all rows."""
    numbers = [[1000 * i + row for row in range(size)] for i, size in enumerate(sizes)]
    paths = [write(folder / f"part-{i}.parquet", of_file, group_rows) for i, of_file in enumerate(numbers)]
    return paths, list(chain.from_iterable(numbers))


def dataset(
    paths: Path | Sequence[Path], batch_size: int, rank: int = 0, ranks: int = 1, **options: int | bool | None
) -> ParquetDataset:
    return ParquetDataset(
        paths,
        batch_size,
        features=FEATURES,
        dense=DENSE,
        label=LABEL,
        rank=rank,
        world_size=ranks,
        **options,  # type: ignore[arg-type]
    )


def bag_lists(bags: JaggedTensor) -> list[list[int]]:
    return [part.tolist() for part in bags.values().split(bags.lengths().tolist())]


def rows(batch: ParquetBatch) -> list[int]:
    """The numbers of the rows, whose other columns are checked."""
    found, ids = bag_lists(batch.features["number"]), bag_lists(batch.features["ids"])
    assert batch.labels is not None
    assert {batch.dense.dtype, batch.labels.dtype} == {torch.float32}
    of_rows = zip(found, ids, batch.dense.tolist(), batch.labels.tolist(), strict=True)
    for (number,), bag, (half,), odd in of_rows:
        assert (number, bag, half, odd) == row_of(number)
    return [number for (number,) in found]


def read(data: ParquetDataset, num_workers: int = 0) -> list[ParquetBatch]:
    return list(DataLoader(data, batch_size=None, num_workers=num_workers) if num_workers else data)


def steps(per_rank: Sequence[Sequence[ParquetBatch]]) -> list[list[int]]:
    """The rows of each step, those of rank 0 first."""
    assert len({len(batches) for batches in per_rank}) == 1, "ranks have different numbers of batches"
    return [list(chain.from_iterable(map(rows, step))) for step in zip(*per_rank, strict=True)]


def flat(of_steps: Iterable[Iterable[int]]) -> list[int]:
    return list(chain.from_iterable(of_steps))


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 23), min_size=1, max_size=4),
    group_rows=st.integers(1, 30),
    ranks=st.integers(1, 5),
    batch_size=st.integers(1, 7),
    seed=st.none() | st.integers(0, 3),
    drop_last=st.booleans(),
    data=st.data(),
)
def test_each_row_is_read_once_in_steps_that_resume(
    sizes: list[int],
    group_rows: int,
    ranks: int,
    batch_size: int,
    seed: int | None,
    drop_last: bool,
    data: st.DataObject,
) -> None:
    with TemporaryDirectory() as folder:
        paths, every = write_files(Path(folder), sizes, group_rows)

        def of(rank: int, ranks: int, size: int) -> ParquetDataset:
            return dataset(paths, size, rank, ranks, seed=seed, drop_last=drop_last)

        per_rank = [read(of(rank, ranks, batch_size)) for rank in range(ranks)]
        of_step, per_step = steps(per_rank), ranks * batch_size
        found = flat(of_step)
        assert [len(step) for step in of_step[:-1]] == [per_step] * (len(of_step) - 1)
        assert found == flat(map(rows, of(0, 1, per_step)))
        assert len(found) == (len(every) // per_step * per_step if drop_last else len(every))
        assert len(set(found)) == len(found)
        assert set(found) <= set(every)
        assert seed is not None or found == every[: len(found)]
        if not of_step:
            return
        taken = data.draw(st.integers(1, len(of_step)))
        others, other_size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
        (state,) = {json.dumps(of(0, ranks, batch_size).state_dict(batches[taken - 1])) for batches in per_rank}
        resumed = []
        for rank in range(others):
            rest = of(rank, others, other_size)
            rest.load_state_dict(json.loads(state))
            resumed.append(read(rest))
        rest_found = flat(steps(resumed))
        left = len(every) - taken * per_step
        if drop_last:
            assert len(rest_found) == left // (others * other_size) * (others * other_size)
        else:
            assert rest_found == found[taken * per_step :]


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("seed", [None, 5])
def test_workers_change_neither_batches_nor_their_order(num_workers: int, seed: int | None, tmp_path: Path) -> None:
    paths, _ = write_files(tmp_path, [13, 0, 30], 7)
    for rank in range(2):
        alone, shared = (dataset(paths, 4, rank, 2, seed=seed) for _ in range(2))
        expected, found = read(alone), read(shared, num_workers)
        assert list(map(rows, found)) == list(map(rows, expected))
        assert [batch.position for batch in found] == [batch.position for batch in expected]
        with pytest.raises(PassError, match=r"state_dict\(after=batch\)"):
            shared.state_dict()
        shared.load_state_dict(shared.state_dict(after=found[2]))
        assert list(map(rows, read(shared, num_workers))) == list(map(rows, expected[3:]))


def test_each_epoch_has_another_order_of_row_groups(tmp_path: Path) -> None:
    paths, every = write_files(tmp_path, [40, 20], 5)
    data, orders = dataset(paths, 7, seed=2), []
    for epoch in range(2):
        data.set_epoch(epoch)
        orders.append(flat(map(rows, data)))
        assert sorted(orders[-1]) == every
        groups = [orders[-1][i : i + 5] for i in range(0, 60, 5)]
        assert all(group == list(range(group[0], group[0] + 5)) for group in groups)
    assert orders[0] != orders[1]


def test_more_ranks_than_row_groups_and_rows(tmp_path: Path) -> None:
    paths, _ = write_files(tmp_path, [2], 50)

    def body() -> list[list[int]]:
        data = ParquetDataset(paths, 1, features=FEATURES, dense=DENSE, label=LABEL)
        return [rows(batch) for batch in data]

    assert world(3).run(body) == [[[0]], [[1]], [[]]]


def test_files_without_rows_have_no_batches(tmp_path: Path) -> None:
    paths, _ = write_files(tmp_path, [0, 0], 5)
    assert read(dataset(paths, 3)) == []
    assert dataset(paths, 3).state_dict()["offset"] == 0


@pytest.mark.parametrize("ids", [pa.list_(pa.int16()), pa.large_list(pa.uint32()), pa.list_(pa.field("x", pa.int64()))])
def test_every_kind_of_list_is_read(ids: pa.DataType, tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", range(23), ids=ids)
    assert flat(map(rows, dataset(path, 4))) == list(range(23))


def test_columns_are_as_they_were_written(tmp_path: Path) -> None:
    table = pa.table({
        "pair": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int64(), 2)),
        "bool": [True, False, True],
        "big": pa.array([2**24 + 2, -1, 0], pa.int64()),
        "nan": pa.array([float("nan"), -0.5, float("inf")], pa.float64()),
        "a.b": pa.array([7, 8, 9], pa.uint8()),
    })  # fmt: skip
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    (batch,) = ParquetDataset(tmp_path, 5, features=["a.b", "pair"], dense=["bool", "big", "nan"], rank=0, world_size=1)
    assert batch.features.keys() == ["a.b", "pair"]
    assert batch.features.values().tolist() == [7, 8, 9, 1, 2, 3, 4, 5, 6]
    assert batch.features.lengths().tolist() == [1, 1, 1, 2, 2, 2]
    assert batch.labels is None
    expected = torch.tensor([[1, 2**24 + 2, torch.nan], [0, -1, -0.5], [1, 0, torch.inf]])
    torch.testing.assert_close(batch.dense, expected, equal_nan=True, rtol=0, atol=0)
    (only,) = ParquetDataset(tmp_path, 5, label="bool", rank=0, world_size=1)
    assert only.features.keys() == []
    assert only.dense.shape == (3, 0)
    assert only.labels is not None
    assert only.labels.tolist() == [1, 0, 1]


def test_a_number_that_is_no_float32_is_an_error(tmp_path: Path) -> None:
    table = pa.table({"x": pa.array([1.0, 3e38, -4e38], pa.float64())})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet:3: column 'x' is -4e\+38, which is no float32"):
        read(ParquetDataset(tmp_path, 5, dense=["x"], rank=0, world_size=1))


def test_features_are_what_a_collection_looks_up(tmp_path: Path) -> None:
    (batch,) = dataset(write(tmp_path / "a.parquet", range(6)), 8)
    table = EmbeddingBagConfig(60, 3, "items", feature_names=["ids"])
    collection = EmbeddingBagCollection([table])
    weight = collection.get_parameter("embedding_bags.items.weight")
    expected = torch.stack([weight[row_of(number)[1]].sum(0) for number in range(6)])
    torch.testing.assert_close(collection(batch.features)["ids"], expected)


def test_one_row_group_of_many_rows_is_not_read_at_once(tmp_path: Path) -> None:
    count = 1 << 21
    numbers = torch.randint(1 << 60, (count,))
    table = pa.table({"id": numbers.numpy(), "x": torch.rand(count, dtype=torch.float64).numpy()})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=count)
    assert pq.read_metadata(tmp_path / "a.parquet").num_row_groups == 1
    del table
    before, most, found = pa.total_allocated_bytes(), 0, []
    for batch in ParquetDataset(tmp_path, 1 << 16, features=["id"], dense=["x"], rank=0, world_size=1):
        most = max(most, pa.total_allocated_bytes() - before)
        found.append(batch.features.values())
    assert torch.equal(torch.cat(found), numbers)
    assert most < 12 << 20  # of 32 MiB


# ---- what is wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "value", "problem"),
    [
        ("number", None, "column 'number' is null, expected ids. Fix: write an empty list."),
        ("ids", None, "column 'ids' is null, expected ids. Fix: write an empty list."),
        ("ids", [None, 5], "column 'ids' has an id that is null. Fix: leave it out of the list."),
        ("half", None, "column 'half' is null, expected a number. Fix: write 0."),
        ("odd", None, "column 'odd' is null, expected a number. Fix: write 0."),
    ],
)
@pytest.mark.parametrize("number", [0, 7, 12, 22])
def test_a_null_is_an_error_with_its_row(
    number: int, column: str, value: list[int | None] | None, problem: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.parquet", range(23))
    table = pq.read_table(path)
    values = table[column].to_pylist()
    values[number] = value
    place = table.schema.get_field_index(column)
    table = table.set_column(place, table.schema.field(column), pa.array(values, table.schema.field(column).type))
    pq.write_table(table, path, row_group_size=5)
    problems = []
    for rank in range(3):
        try:
            read(dataset(path, 2, rank, 3))
        except DataError as error:
            problems.append(str(error))
    assert problems == [f"{path}:{number + 1}: {problem}"]


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"half": pa.float32()}, "column 'half' is float, expected double as in {first}. Fix: write all files with"),
        ({"ids": INT32S}, "column 'ids' is list<element: int32>, expected list<element: int64> as in {first}"),
        ({"ids": pa.int64()}, "column 'ids' is int64, expected list<element: int64> as in {first}"),
        ({"ids": pa.string()}, "column 'ids' is string, expected integers of at most 63 bits, or lists of them. Fix:"),
        ({"number": pa.uint64()}, "column 'number' is uint64, expected integers of at most 63 bits, or lists of them"),
        ({"number": pa.float64()}, "column 'number' is double, expected integers"),
        ({"ids": pa.list_(INT32S)}, "column 'ids' is list<element: list<element: int32>>, expected integers"),
        ({"odd": pa.list_(pa.int8())}, "column 'odd' is list<element: int8>, expected numbers or booleans"),
        ({"odd": pa.dictionary(pa.int8(), pa.string())}, "column 'odd' is dictionary<"),
        ({"odd": None}, "no columns are named 'odd', expected one of number, ids, half. Fix: name a column of every"),
    ],
)  # fmt: skip
def test_a_file_of_another_schema_is_an_error(schema: dict[str, pa.DataType], problem: str, tmp_path: Path) -> None:
    first = write(tmp_path / "part-0.parquet", range(3))
    types = {"number": pa.int32(), "ids": pa.list_(pa.int64()), "half": pa.float64(), "odd": pa.int8()} | schema
    fields = [(name, kind) for name, kind in types.items() if kind is not None]
    second = tmp_path / "part-1.parquet"
    pq.write_table(pa.schema(fields).empty_table(), second)
    text = re.escape(f"{second}: {problem.format(first=first)}")
    with pytest.raises(DataError, match=f"^{text}"):
        dataset([first, second], 3)
    with pytest.raises(DataError, match=f"^{re.escape(f'{second}: no columns are named')} 'x'"):
        ParquetDataset([second], 3, features=["x"], rank=0, world_size=1)


def test_a_column_that_is_there_twice_is_an_error(tmp_path: Path) -> None:
    pq.write_table(pa.table([[1], [2]], names=["x", "x"]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: 2 columns are named 'x'"):
        ParquetDataset(tmp_path, 3, features=["x"], rank=0, world_size=1)


def test_truncated_and_other_files_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", range(50))
    content = path.read_bytes()
    for wrong in (b"", b"PAR1", b"text\n" * 9, content[:-7], content[: len(content) // 2], content[4:-8] + b"PAR1"):
        path.write_bytes(wrong)
        with pytest.raises(DataError, match=f"^{path}: damaged or no Parquet: .*Fix: get the file again"):
            dataset(path, 3)


def test_damaged_pages_are_named_with_their_row_group(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"x": torch.randint(1 << 60, (4000,)).numpy()})
    pq.write_table(table, path, row_group_size=1000, use_dictionary=False, write_page_checksum=True)
    column = pq.read_metadata(path).row_group(2).column(0)
    content = bytearray(path.read_bytes())
    at = column.data_page_offset + column.total_compressed_size // 2
    content[at] ^= 0xFF  # one byte of a value
    path.write_bytes(content)
    data = iter(ParquetDataset(path, 500, features=["x"], rank=0, world_size=1))
    for _ in range(4):
        next(data)
    with pytest.raises(DataError, match=f"^{path}: row group 2 is damaged or no Parquet: .*Fix: get the file again"):
        next(data)


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", range(50))
    data, size = dataset(path, 3), path.stat().st_size
    write(path, range(10))
    with pytest.raises(DataError, match=rf"^{path}: has \d+ bytes, expected {size} as when the data set was made"):
        read(data)


def test_a_state_of_other_files_is_refused(tmp_path: Path) -> None:
    paths, _ = write_files(tmp_path, [20, 3], 5)
    state = dataset(paths, 3, seed=1).state_dict()
    for other in (dataset(paths, 3, seed=2), dataset(paths[:1], 3, seed=1)):
        with pytest.raises(PassError, match="the state is of another order"):
            other.load_state_dict(state)


def test_impossible_arguments_are_refused(tmp_path: Path) -> None:
    path, folder = write(tmp_path / "a.parquet", range(2)), tmp_path / "none"
    folder.mkdir()
    with pytest.raises(DataError, match=r"no file in .* is named \*\.parquet"):
        dataset(folder, 1)
    with pytest.raises(ValueError, match="batch_size is 0"):
        dataset(path, 0)
    for features in ([], ["number", "number"]):
        with pytest.raises(ValueError, match=r"columns are .*, expected at least one, and each once"):
            ParquetDataset(path, 1, features=features, rank=0, world_size=1)


def test_without_pyarrow_the_error_names_the_extra(tmp_path: Path) -> None:
    """In a process of its own, in which it cannot be imported; the other data sets can."""
    script = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from shardwise.demos.data import CriteoDataset, MissingPackageError, ParquetDataset\n"
        "try: ParquetDataset(sys.argv[1], 1, features=['number'], rank=0, world_size=1)\n"
        "except MissingPackageError as error: print(error)\n"
    )
    path = write(tmp_path / "a.parquet", range(2))
    found = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    assert found.stdout == (
        "ParquetDataset needs pyarrow, which is not installed. Fix: pip install 'shardwise[parquet]'.\n"
    )
