"""Reads pictures back, as somebody does who looks at one: by its frames and the numbers on its edges."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

BORDERS = frozenset("┌┬┐├┼┤└┴┘─│")
Point = tuple[int, int]  # line, character


@dataclass(frozen=True)
class Frame:
    """One panel: where its outline is."""

    lines: list[str]
    top: int
    left: int
    bottom: int
    right: int

    @property
    def rows(self) -> dict[int, int]:
        """The number at the left of a line, and which line that is."""
        found = {}
        for y in range(self.top + 1, self.bottom):
            number = re.search(r"(\d+) $", self.lines[y][: self.left])
            if number:
                found[int(number[1])] = y
        return found

    @property
    def columns(self) -> dict[int, int]:
        """The numbers above, and at which characters they begin."""
        above = self.lines[self.top - 1][: self.right]
        return {int(n[0]): n.start() for n in re.finditer(r"\d+", above) if n.start() > self.left}

    @property
    def slices(self) -> list[tuple[int, int] | None]:
        """Of the third dim and those behind it; empty where there is only one slice."""
        label = self.lines[self.top - 2][self.left - 1 : self.right + 9] if self.top > 1 else ""
        found = re.search(r"\[:, :, ([^]]*)\]", label)
        parts = found[1].split(", ") if found else []
        return [None if part == ":" else (int(part.split(":")[0]), int(part.split(":")[1])) for part in parts]

    def region(self, start: Point) -> set[Point]:
        """What is connected with `start` without crossing a line."""
        pending, found = [start], set()
        while pending:
            y, x = pending.pop()
            if (y, x) in found or self.lines[y][x] in BORDERS:
                continue
            found.add((y, x))
            pending += [(y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)]
        return found

    def words(self, region: set[Point]) -> str:
        lines = sorted({y for y, _ in region})
        parts = ("".join(self.lines[y][x] for _, x in sorted(p for p in region if p[0] == y)).strip() for y in lines)
        return " ".join(part for part in parts if part)


def frames_of(text: str) -> Iterator[Frame]:
    lines = text.splitlines()
    for top, line in enumerate(lines):
        for corner in re.finditer("┌", line):
            left = corner.start()
            right = line.index("┐", left)
            bottom = next(y for y in range(top + 1, len(lines)) if lines[y][left : left + 1] == "└")
            yield Frame(lines, top, left, bottom, right)


def labels_of(text: str) -> list[str]:
    """What stands in each cell, panel by panel."""
    found = []
    for frame in frames_of(text):
        seen: set[Point] = set()
        for y in range(frame.top + 1, frame.bottom):
            for x in range(frame.left + 1, frame.right):
                if (y, x) not in seen and frame.lines[y][x] not in BORDERS:
                    region = frame.region((y, x))
                    seen |= region
                    found.append(frame.words(region))
    return found


def label_at(text: str, index: tuple[int, ...]) -> str:
    """What stands in the cell of the element at `index`."""
    for frame in frames_of(text):
        parts = zip(index[2:], frame.slices, strict=True) if frame.slices else ()
        if all(part is None or part[0] <= i < part[1] for i, part in parts):
            y = frame.rows[max(row for row in frame.rows if row <= index[0])] if index else frame.top + 1
            columns = frame.columns if len(index) > 1 else {}
            x = columns[max(column for column in columns if column <= index[1])] if columns else frame.left + 1
            return frame.words(frame.region((y, x)))
    raise AssertionError(f"no slice shows {index}:\n{text}")


def ranks_in(label: str, text: str = "") -> set[int]:
    """The ranks that a label names, or a note of the picture for it."""
    note = re.search(r" ranks (\(\d+\))$", label)
    if note:
        label = next(line.removeprefix(f"{note[1]} ") for line in text.splitlines() if line.startswith(note[1]))
    inner = label.partition("rank ")[2].removesuffix(")")
    found: list[int] = []
    for part in re.split("[,|] ?", inner.replace(" |", "|")):
        if "…" in part:
            second, last = map(int, part.split(" … "))
            found += range(second, last + 1, second - found[-1])
        elif "-" in part:
            first, last = map(int, part.split("-"))
            found += range(first, last + 1)
        else:
            found.append(int(part))
    assert len(found) == len(set(found)), f"a rank is named twice: {label}"
    return set(found)
