"""Versions of a store that renames, such as a folder.

    folder/
      step-00000100/                 a complete checkpoint, never changed once it is there
      step-00000200/
      latest                         the name of the one that was saved last
      .lock                          which process saves here, while it does
      .tmp-step-00000300-1f3a90bc/   a version being written or removed, or a leftover
      .old-step-00000200-5e11d0aa/   the previous one of that step while it is being replaced

Names change at once, so a `step-` folder is always complete, whenever a process is killed. The order is in
docs/checkpoint-format.md.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from shardwise.checkpoint.local_files import temp_name
from shardwise.checkpoint.manifest import MANIFEST
from shardwise.checkpoint.stores import CheckpointStore, is_damaged, step_name, step_of

LATEST = "latest"
_OLD = re.compile(r"\.old-(step-\d{8,18})-[0-9a-f]{8}", re.ASCII)
_TEMP = re.compile(r"\.tmp-(step-\d{8,18}|latest)-[0-9a-f]{8}", re.ASCII)


class RenamedVersions(CheckpointStore):
    """A version is a folder with the name of its step; "." is the store itself."""

    def own_version(self) -> str | None:
        is_one = step_of(self.name.rpartition("/")[2]) is not None or MANIFEST in self.files.list("")
        return "." if is_one else None

    def versions(self) -> dict[int, str]:
        """The folder of each step, the one saved last before those of higher steps.

        While a version is being replaced, the previous one counts.
        """
        names = self.names()
        found: dict[int, str] = {}
        for name in names:  # ".old-…" before "step-…"
            old = _OLD.fullmatch(name)
            step = step_of(old[1] if old else name)
            if step is not None:
                found[step] = name
        last = step_of(self._named_in(next(self._published(names), LATEST)))
        if last is not None and last not in found and self.files.list(step_name(last)):
            found[last] = step_name(last)  # a listing lacks what is renamed meanwhile
        first = [last] if last in found else []
        return {step: found[step] for step in [*first, *sorted(found, reverse=True)]}

    def _published(self, names: Sequence[str]) -> Iterator[str]:
        """The next `latest` of each interrupted save whose checkpoint was there."""
        for name in names:
            if name.startswith(f".tmp-{LATEST}-"):
                step = step_of(self._named_in(name))
                if step is not None and self.files.list(step_name(step)):
                    yield name

    def _named_in(self, path: str) -> str:
        return (self.read_short(path) or b"").decode(errors="replace").strip()

    def location(self, version: str) -> Path | str:
        path = "" if version == "." else version
        return f"{self.name}/{path}".rstrip("/") if "://" in self.name else Path(self.name) / path

    def tidy(self) -> dict[int, str]:
        names = self.names()
        for name in self._published(names):
            self.files.rename(name, LATEST)
        for name in names:
            old = _OLD.fullmatch(name)
            if old and old[1] not in self.files.list("") and not is_damaged(self, name):
                self.files.rename(name, old[1])  # a save was interrupted while it replaced this one
            elif name.startswith(f".tmp-{LATEST}-"):
                self.files.remove(name)
            elif old or _TEMP.fullmatch(name):
                self.files.remove_folder(name)
        return self.versions()

    def draft(self, step: int, after: Iterable[str]) -> str:
        return temp_name("tmp", step_name(step))

    def publish(self, draft: str) -> str:
        match = _TEMP.fullmatch(draft)
        assert match is not None
        final, old, pointer = match[1], temp_name("old", match[1]), temp_name("tmp", LATEST)
        done: list[tuple[str, str]] = []

        def move(source: str, target: str) -> None:
            self.files.rename(source, target)
            done.append((source, target))

        try:
            if final in self.files.list(""):
                move(final, old)
            self.files.write(pointer, len(final) + 1, [f"{final}\n".encode()])
            move(draft, final)  # from here on it is the last one, by `_published`
            self.files.rename(pointer, LATEST)  # the last thing that can fail, because it cannot be undone
        except BaseException:
            for source, target in reversed(done):
                self.files.rename(target, source)
            with suppress(OSError):
                self.files.remove(pointer)
            raise
        with suppress(OSError):  # the next `tidy` removes the rest
            self.files.remove_folder(old)
        return final

    def discard(self, draft: str) -> None:
        self.files.remove_folder(draft)

    def remove(self, version: str) -> None:
        self.files.remove_folder(version)
