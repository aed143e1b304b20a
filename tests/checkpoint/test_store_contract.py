"""What every store of checkpoints does: a subclass of `StoreContract` tests a store."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Barrier, Lock
from typing import Any
from uuid import uuid4

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from shardwise.checkpoint import latest, load, locations, save
from shardwise.checkpoint.files import read_bytes
from shardwise.checkpoint.folder_store import FolderStore
from shardwise.checkpoint.locations import versions_in
from shardwise.checkpoint.object_store import ObjectStore
from shardwise.checkpoint.remedies import damaged
from shardwise.checkpoint.stores import Store
from shardwise.errors import CheckpointError, UnreachableError
from shardwise.testing import world
from tests.checkpoint.states import loaded_seed, save_seed


class StoreContract:
    """The tests. `store` gives an empty store; another one of the same place is made by `again`."""

    creates_exclusively = True

    @pytest.fixture
    def store(self, tmp_path: Path) -> Any:
        raise NotImplementedError

    def again(self, store: Any) -> Store:
        return store.__class__(store.name)  # type: ignore[no-any-return]

    def content(self, store: Store, path: str) -> bytes:
        with closing(self.again(store).open(path)) as file:
            return read_bytes(file)

    def test_files_are_there_once_they_are_written(self, store: Store) -> None:
        assert store.list("") == {}
        assert store.create(".lock", b"mine")  # and the folder for it
        store.write("one/x", 6, [b"abc", memoryview(b"def")])
        store.write("one/empty", 0, [])
        assert self.again(store).list("one") == {"x": 6, "empty": 0}
        assert self.again(store).list("") == {".lock": 4, "one": None}
        assert store.list("nowhere") == store.list("one/x/y") == {}
        assert self.content(store, "one/x") == b"abcdef"
        with closing(store.open("one/x")) as file:
            read_into = bytearray(2)
            file.read_into(memoryview(read_into), 3)
            assert (bytes(read_into), file.size) == (b"de", 6)
            with pytest.raises(CheckpointError, match="ends at byte 6"):
                file.read_into(memoryview(read_into), 5)

    def test_a_file_that_is_not_there(self, store: Store) -> None:
        store.create(".lock", b"")
        store.remove("x")
        for path in ("x", "one/x"):
            with pytest.raises(CheckpointError, match=f"{path}: cannot be read") as caught:
                store.open(path)
            assert isinstance(caught.value.__cause__, FileNotFoundError)
            assert not isinstance(caught.value, UnreachableError)

    def test_what_is_removed_is_not_there(self, store: Store) -> None:
        store.create(".lock", b"")
        for path in ("one/x", "one/y", "two/x"):
            store.write(path, 1, [b"x"])
        store.remove("one/y")
        assert store.list("one") == {"x": 1}
        store.remove_folder("one")
        assert store.list("one") == {}
        assert store.list("two") == {"x": 1}
        store.remove(".lock")
        assert ".lock" not in store.list("")

    def test_of_those_that_create_a_file_one_succeeds(self, store: Store) -> None:
        assert store.create("first", b"mine")
        assert not self.again(store).create("first", b"yours")
        assert self.content(store, "first") == b"mine"
        if self.creates_exclusively:
            gate = Barrier(8)

            def create(number: int) -> bool:
                gate.wait()
                return self.again(store).create("second", f"{number}".encode())

            with ThreadPoolExecutor(8) as pool:
                (winner,) = [number for number, created in enumerate(pool.map(create, range(8))) if created]
            assert self.content(store, "second") == f"{winner}".encode()

    def test_names_change_at_once(self, store: Store) -> None:
        if store.renames:
            store.create("latest", b"old")
            store.write("new", 3, [b"new"])
            store.rename("new", "latest")
            store.write(".tmp/x", 1, [b"x"])
            store.rename(".tmp", "one")
            assert store.list("") == {"latest": 3, "one": None}
            assert store.list("one") == {"x": 1}
            with pytest.raises(OSError, match="nowhere"):
                store.rename("nowhere", "two")

    def test_checkpoints_are_saved_replaced_and_loaded(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("shardwise.checkpoint.saving.store_at", lambda _: versions_in(store))
        monkeypatch.setattr("shardwise.checkpoint.loading.store_at", lambda _: versions_in(self.again(store)))
        monkeypatch.setattr(locations, "store_at", lambda _: versions_in(self.again(store)))
        assert latest("here") is None
        for seed, step in ((1, 5), (2, 9), (3, 5)):
            world(2).run(save_seed, "here", seed, step=step, overwrite=True)
            assert loaded_seed("here") == seed
        save("here", {"x": torch.ones(1)}, step=10, keep=1)
        load("here", {"x": torch.zeros(1)})
        assert [*versions_in(store).versions()] == [10]


class TestFolderStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> FolderStore:
        return FolderStore(tmp_path / "run")


class TestFilesByUrl(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return ObjectStore(f"file://{tmp_path}/run")


class TestMemoryByUrl(StoreContract):
    creates_exclusively = False  # its creation is exclusive for one thread

    @pytest.fixture
    def store(self) -> Iterator[ObjectStore]:
        name = uuid4().hex
        yield ObjectStore(f"memory://{name}")
        for path in [path for path in MemoryFileSystem.store if name in path]:
            del MemoryFileSystem.store[path]


class DictStore:
    """A store in a dict, as a user may write one."""

    renames = False

    def __init__(self, files: dict[str, bytes]) -> None:
        self.name, self.files, self.turn = "dict://store", files, Lock()

    def list(self, folder: str) -> dict[str, int | None]:
        prefix, found = f"{folder}/" if folder else "", dict[str, int | None]()
        for path, data in list(self.files.items()):
            if path.startswith(prefix):
                name, slash, _ = path[len(prefix) :].partition("/")
                found[name] = None if slash else len(data)
        return found

    def open(self, path: str) -> "DictFile":
        try:
            return DictFile(path, self.files[path])
        except KeyError as error:
            raise damaged(f"{path}: cannot be read: it is not there") from FileNotFoundError(str(error))

    def write(self, path: str, size: int, content: Iterable[memoryview | bytes]) -> None:
        self.files[path] = b"".join(content)

    def create(self, path: str, content: bytes) -> bool:
        with self.turn:
            return self.files.setdefault(path, content) is content

    def rename(self, source: str, target: str) -> None:
        raise NotImplementedError

    def remove(self, path: str) -> None:
        self.files.pop(path, None)

    def remove_folder(self, path: str) -> None:
        for name in [name for name in self.files if name.startswith(f"{path}/")]:
            del self.files[name]


class DictFile:
    def __init__(self, name: str, data: bytes) -> None:
        self.name, self.size, self.data = name, len(data), data

    def read_into(self, buffer: memoryview, offset: int) -> None:
        if offset + len(buffer) > self.size:
            raise damaged(f"{self.name}: ends at byte {self.size}")
        buffer[:] = self.data[offset : offset + len(buffer)]

    def close(self) -> None:
        pass


class TestDictStore(StoreContract):
    @pytest.fixture
    def store(self) -> DictStore:
        return DictStore({})

    def again(self, store: DictStore) -> DictStore:
        return DictStore(store.files)
