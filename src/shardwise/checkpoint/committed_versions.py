"""Versions of a store that does not rename, such as an object store.

    s3://bucket/run/
      step-00000100/
        1764156852123456-1f3a90bc/              one save of the step
          rank-0000.safetensors
          manifest.json
        1764156852123456-1f3a90bc.committed     empty: while it is there, this save is the checkpoint of the step
        1764160452654321-5e11d0aa/              a save being written or removed, or a leftover
      .lock                                     which process saves here, while it does

No object is written twice. One request commits a save: it writes an object without bytes, which cannot be there in
part. The number of a save is the time of its start in microseconds, or more, so that it is larger than that of any
earlier save. The committed save with the largest number is the checkpoint of its step; of all steps, it is the latest
checkpoint.
"""

import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import suppress
from time import time_ns

from shardwise.checkpoint.stores import CheckpointStore, step_name, step_of
from shardwise.errors import CheckpointError

COMMITTED = ".committed"
_SAVE = re.compile(r"(\d{16}-[0-9a-f]{8})(\.committed|)", re.ASCII)


class CommittedVersions(CheckpointStore):
    """A version is the folder of a save, as `step-00000100/1764156852123456-1f3a90bc`."""

    def own_version(self) -> str | None:
        return _newest(self._saves(""))

    def versions(self) -> dict[int, str]:
        found = {step: newest for step, saves in self._steps() if (newest := _newest(saves))}
        return dict(sorted(found.items(), key=lambda entry: _number(entry[1]), reverse=True))

    def _steps(self) -> Iterator[tuple[int, dict[str, set[str]]]]:
        """Each step and its saves."""
        for name in self.names():
            step = step_of(name)
            if step is not None:
                yield step, self._saves(name)

    def _saves(self, folder: str) -> dict[str, set[str]]:
        """The saves in `folder`, the oldest first, and how the entries of each end: COMMITTED, "" for its files."""
        found: dict[str, set[str]] = {}
        for entry in self.files.list(folder):
            if match := _SAVE.fullmatch(entry):
                found.setdefault(f"{folder}/{match[1]}".lstrip("/"), set()).add(match[2])
        return dict(sorted(found.items()))

    def _is_committed(self, save: str) -> bool:
        """Whether the save is committed. A listing is not enough: it may lag."""
        return self.read_short(save + COMMITTED) is not None

    def location(self, version: str) -> str:
        return f"{self.name}/{version.rpartition('/')[0]}".rstrip("/")

    def tidy(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for step, saves in self._steps():
            is_settled = [*saves.values()] == [{COMMITTED, ""}]
            committed = [save for save in saves if is_settled or self._is_committed(save)]
            newest = committed[-1] if committed else ""
            found |= {step: newest} if newest else {}
            for save in saves:
                if save != newest:
                    with suppress(OSError):  # the next save tries it again
                        self._drop(save)
        return found

    def draft(self, step: int, after: Iterable[str]) -> str:
        number = max([time_ns() // 1000, *(int(_number(version)[:16]) + 1 for version in after)])
        return f"{step_name(step)}/{number:016d}-{secrets.token_hex(4)}"

    def publish(self, draft: str) -> str:
        try:
            self.files.write(draft + COMMITTED, 0, [])
        except BaseException:
            with suppress(OSError):
                self.files.remove(draft + COMMITTED)  # a request that failed may have been carried out
            raise
        with suppress(OSError, CheckpointError):  # the next `tidy` removes the rest
            self._drop_older(draft)
        return draft

    def discard(self, draft: str) -> None:
        if not self._is_committed(draft):
            self._drop(draft)

    def remove(self, version: str) -> None:
        self._drop_older(version)  # else that would be the checkpoint of the step again
        self._drop(version)

    def _drop_older(self, save: str) -> None:
        """Remove earlier saves of the step."""
        for other in self._saves(save.partition("/")[0]):
            if other < save:
                self._drop(other)

    def _drop(self, save: str) -> None:
        self.files.remove(save + COMMITTED)
        with suppress(OSError):
            self.files.remove_folder(save)


def _newest(saves: dict[str, set[str]]) -> str | None:
    """The last committed save."""
    return max((save for save, there in saves.items() if COMMITTED in there), default=None)


def _number(save: str) -> str:
    """The number that orders saves by their start."""
    return save.rpartition("/")[2]
