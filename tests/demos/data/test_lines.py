"""Text as steps of ranks and workers: each line once, the same steps for any number of both, resumed at any step."""

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from shardwise.demos.data.criteo import CriteoBatch, CriteoDataset
from shardwise.demos.data.errors import DataError, PassError
from shardwise.demos.data.lines import READ_BYTES
from shardwise.testing import world
from tests.demos.data.criteo_lines import numbers, write

Number = tuple[int, int]


def write_files(folder: Path, sizes: Sequence[int], gz: Sequence[bool]) -> tuple[list[Path], list[Number]]:
    """Files of so many lines, and the numbers of all lines in order."""
    paths = [folder / f"day_{i}{'.gz' * gz[i]}" for i in range(len(sizes))]
    for i, path in enumerate(paths):
        write(path, sizes[i], i, last_newline=i % 2 == 0)
    return paths, [(i, line) for i, size in enumerate(sizes) for line in range(size)]


def read(dataset: CriteoDataset, num_workers: int = 0) -> list[CriteoBatch]:
    return list(DataLoader(dataset, batch_size=None, num_workers=num_workers) if num_workers else dataset)


def steps(per_rank: Sequence[Sequence[CriteoBatch]]) -> list[list[Number]]:
    """The lines of each step, those of rank 0 first."""
    assert len({len(batches) for batches in per_rank}) == 1, "ranks have different numbers of batches"
    return [list(chain.from_iterable(map(numbers, step))) for step in zip(*per_rank, strict=True)]


FILES = st.lists(st.tuples(st.integers(0, 23), st.booleans()), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(
    files=FILES,
    ranks=st.integers(1, 5),
    batch_size=st.integers(1, 7),
    seed=st.none() | st.integers(0, 3),
    block_bytes=st.sampled_from([1, 100, 300, 1000]),
    drop_last=st.booleans(),
    data=st.data(),
)
def test_each_line_is_read_once_in_steps_that_resume(
    files: list[tuple[int, bool]],
    ranks: int,
    batch_size: int,
    seed: int | None,
    block_bytes: int,
    drop_last: bool,
    data: st.DataObject,
) -> None:
    with TemporaryDirectory() as folder:
        paths, every = write_files(Path(folder), [size for size, _ in files], [gz for _, gz in files])

        def dataset(rank: int, ranks: int, size: int) -> CriteoDataset:
            return CriteoDataset(
                paths,
                size,
                rank=rank,
                world_size=ranks,
                seed=seed,
                block_bytes=block_bytes,
                drop_last=drop_last,
            )

        per_rank = [read(dataset(rank, ranks, batch_size)) for rank in range(ranks)]
        of_step = steps(per_rank)
        found = list(chain.from_iterable(of_step))
        per_step = ranks * batch_size
        assert [len(step) for step in of_step[:-1]] == [per_step] * (len(of_step) - 1)
        one = list(chain.from_iterable(numbers(batch) for batch in dataset(0, 1, per_step)))
        assert found == one
        assert len(found) == (len(every) // per_step * per_step if drop_last else len(every))
        if seed is None:
            assert found == every[: len(found)]
        else:
            assert len(set(found)) == len(found)
            assert set(found) <= set(every)
        if not of_step:
            return
        taken = data.draw(st.integers(1, len(of_step)))
        others, other_size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
        states = {json.dumps(dataset(0, ranks, batch_size).state_dict(batches[taken - 1])) for batches in per_rank}
        assert len(states) == 1  # the same on all ranks
        resumed = []
        for rank in range(others):
            rest = dataset(rank, others, other_size)
            rest.load_state_dict(json.loads(next(iter(states))))
            resumed.append(read(rest))
        rest_found = list(chain.from_iterable(steps(resumed)))
        left = len(every) - taken * per_step
        if drop_last:
            assert len(rest_found) == left // (others * other_size) * (others * other_size)
        else:
            assert rest_found == found[taken * per_step :]


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("seed", [None, 5])
def test_workers_change_neither_batches_nor_their_order(num_workers: int, seed: int | None, tmp_path: Path) -> None:
    paths, _ = write_files(tmp_path, [13, 0, 30], [False, False, True])
    for rank in range(2):
        alone = CriteoDataset(paths, 4, rank=rank, world_size=2, seed=seed, block_bytes=400)
        shared = CriteoDataset(paths, 4, rank=rank, world_size=2, seed=seed, block_bytes=400)
        expected = read(alone)
        found = read(shared, num_workers)
        assert [numbers(batch) for batch in found] == [numbers(batch) for batch in expected]
        assert [batch.position for batch in found] == [batch.position for batch in expected]
        with pytest.raises(PassError, match=r"read ahead.*Fix: give the last batch used, state_dict\(after=batch\)"):
            shared.state_dict()
        shared.load_state_dict(shared.state_dict(after=found[2]))
        assert [numbers(batch) for batch in read(shared, num_workers)] == [numbers(batch) for batch in expected[3:]]


def test_persistent_workers_see_the_epoch_and_the_state(tmp_path: Path) -> None:
    paths, _ = write_files(tmp_path, [40], [False])
    dataset = CriteoDataset(paths, 3, rank=0, world_size=1, seed=1, block_bytes=300)
    plain = CriteoDataset(paths, 3, rank=0, world_size=1, seed=1, block_bytes=300)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=True)
    orders = []
    for epoch in range(3):
        dataset.set_epoch(epoch)
        plain.set_epoch(epoch)
        batches = list(loader)
        orders.append([numbers(batch) for batch in batches])
        assert orders[-1] == [numbers(batch) for batch in plain]
    assert orders[0] != orders[1] != orders[2]
    dataset.load_state_dict(dataset.state_dict(after=batches[4]))
    assert [numbers(batch) for batch in loader] == orders[-1][5:]


def test_a_state_without_after_is_that_of_the_last_batch_read(tmp_path: Path) -> None:
    paths, every = write_files(tmp_path, [20], [True])
    dataset = CriteoDataset(paths, 3, rank=0, world_size=1)
    assert dataset.state_dict()["offset"] == 0
    batches = iter(dataset)
    found = [numbers(next(batches)) for _ in range(2)]
    other = CriteoDataset(paths, 3, rank=0, world_size=1)
    other.load_state_dict(dataset.state_dict())
    assert other.state_dict() == dataset.state_dict()
    assert [*chain(*found), *chain.from_iterable(numbers(batch) for batch in other)] == every


def test_a_resumed_or_shuffled_pass_is_not_repeated_silently(tmp_path: Path) -> None:
    paths, every = write_files(tmp_path, [20], [False])
    plain = CriteoDataset(paths, 3, rank=0, world_size=1)
    assert len(read(plain)) == len(read(plain)) == 7  # complete and in the order of the files: the same each time
    shuffled = CriteoDataset(paths, 3, rank=0, world_size=1, seed=0)
    read(shuffled)
    resumed = CriteoDataset(paths, 3, rank=0, world_size=1)
    resumed.load_state_dict(plain.state_dict(after=read(plain)[1]))
    assert len(read(resumed)) == 5
    for dataset in (shuffled, resumed):
        with pytest.raises(PassError, match=r"epoch 0 was read already.*Fix: call set_epoch\(1\)"):
            iter(dataset)
        with pytest.raises(PassError, match="epoch 0 was read already"):
            read(dataset, 2)
        dataset.set_epoch(1)
        assert sorted(chain.from_iterable(map(numbers, dataset))) == every


def test_set_epoch_goes_on_with_the_pass_that_was_resumed(tmp_path: Path) -> None:
    paths, _ = write_files(tmp_path, [20], [False])
    dataset = CriteoDataset(paths, 3, rank=0, world_size=1)
    dataset.set_epoch(4)
    state = dataset.state_dict(after=read(dataset)[2])
    dataset.load_state_dict(state)
    dataset.set_epoch(4)
    assert len(read(dataset)) == 4
    dataset.set_epoch(4)  # once more, so from the beginning
    assert len(read(dataset)) == 7
    dataset.load_state_dict(state)
    dataset.set_epoch(5)
    assert len(read(dataset)) == 7


def test_a_state_of_another_order_is_refused(tmp_path: Path) -> None:
    paths, _ = write_files(tmp_path, [20, 3], [False, False])
    dataset = CriteoDataset(paths, 3, rank=0, world_size=1, seed=1)
    state = dataset.state_dict()
    for other, what in [
        (CriteoDataset(paths, 3, rank=0, world_size=1, seed=2), "seed is 1, expected 2"),
        (CriteoDataset(paths, 3, rank=0, world_size=1, seed=1, block_bytes=9), "block_bytes is 1048576, expected 9"),
        (CriteoDataset(paths[:1], 3, rank=0, world_size=1, seed=1), "files is"),
    ]:
        with pytest.raises(PassError, match=what):
            other.load_state_dict(state)
        assert other.fingerprint != dataset.fingerprint
    with pytest.raises(PassError, match="expected a number for each of epoch"):
        dataset.load_state_dict({**state, "offset": "far"})
    write(paths[0], 21)
    with pytest.raises(PassError, match="files is"):
        CriteoDataset(paths, 3, rank=0, world_size=1, seed=1).load_state_dict(state)


def test_ranks_are_those_of_the_world(tmp_path: Path) -> None:
    paths, every = write_files(tmp_path, [2], [False])

    def body() -> list[list[Number]]:
        return [numbers(batch) for batch in CriteoDataset(paths, 1)]

    assert world(3).run(body) == [[every[:1]], [every[1:]], [[]]]  # one rank more than lines


def test_lines_longer_than_blocks_and_than_a_read_are_read_once(tmp_path: Path) -> None:
    sizes = [2 * READ_BYTES // 250, 1]  # more than one read
    paths, every = write_files(tmp_path, sizes, [False, True])
    for seed, block_bytes in ((None, 1), (1, 1 << 19), (1, 1 << 20)):
        dataset = CriteoDataset(paths, 999, rank=0, world_size=1, seed=seed, block_bytes=block_bytes)
        assert sorted(chain.from_iterable(map(numbers, dataset))) == every


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    paths, _ = write_files(tmp_path, [20], [False])
    dataset = CriteoDataset(paths, 3, rank=0, world_size=1)
    size = paths[0].stat().st_size
    paths[0].write_bytes(paths[0].read_bytes()[:-100])
    with pytest.raises(DataError, match=rf"day_0: ends at byte {size - 100}, expected {size} bytes"):
        read(dataset)


def test_impossible_arguments_are_refused(tmp_path: Path) -> None:
    paths, _ = write_files(tmp_path, [2], [False])
    with pytest.raises(ValueError, match="batch_size is 0"):
        CriteoDataset(paths, 0, rank=0, world_size=1)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"rank is {rank} of 2"):
            CriteoDataset(paths, 1, rank=rank, world_size=2)
    with pytest.raises(ValueError, match="block_bytes is 0"):
        CriteoDataset(paths, 1, rank=0, world_size=1, block_bytes=0)
