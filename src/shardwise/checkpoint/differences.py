"""Differences of a checkpoint and a program: compared as nested data, then formatted as the lines of an error."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

NAMED = 3  # parameters of a list that an error names


@dataclass(frozen=True)
class Difference:
    """One entry that differs.

    Difference(("optimizer '0'", "weight", "exp_avg"), torch.Size([7]), torch.Size([2]))
    # optimizer '0': exp_avg of weight: (7,) in the checkpoint, (2,) here
    """

    path: tuple[str, ...]  # the optimizer or scheduler, and the keys to the entry in it
    stored: object = None  # its value in the checkpoint; None: it is missing there
    here: object = None  # its value in the program; None: it is only in the checkpoint


def compare(stored: object, here: object, path: tuple[str, ...] = ()) -> Iterator[Difference]:
    """The names, lengths of lists and shapes (`torch.Size`) that differ; other values may differ."""
    if isinstance(stored, torch.Size | None) and isinstance(here, torch.Size | None):
        if stored != here:
            yield Difference(path, *("no tensor" if shape is None else shape for shape in (stored, here)))
    elif isinstance(stored, Mapping) and isinstance(here, Mapping):
        for key in dict.fromkeys(key for key in (*stored, *here) if isinstance(key, str)):
            if key in stored and key in here:
                yield from compare(stored[key], here[key], (*path, key))
            else:
                yield Difference((*path, key), "there" if key in stored else None, "there" if key in here else None)
    elif isinstance(stored, list | tuple) and isinstance(here, list | tuple):
        if len(stored) != len(here):
            yield Difference((*path, "length"), len(stored), len(here))
        for number, (one, other) in enumerate(zip(stored, here, strict=False)):
            yield from compare(one, other, (*path, str(number)))


def format_lines(differences: Iterable[Difference]) -> list[str]:
    """A line for each difference. Equal differences of parameters with equal differences share one."""
    entries: dict[tuple[str, str, str], list[str]] = {}
    for one in differences:
        said = f"{_format(one.stored)} in the checkpoint, {_format(one.here)} here"
        if one.stored is None or one.here is None:
            said = f"{'missing' if one.stored is None else 'only'} in the checkpoint"
        entries.setdefault((one.path[0], ".".join(one.path[1:-1]), said), []).extend(one.path[1:][-1:])
    owners: dict[tuple[str, str, str], list[str]] = {}
    for (where, owner, said), names in entries.items():
        owners.setdefault((where, ", ".join(names), said), []).append(owner)
    return [
        ": ".join(filter(None, (where, f"{names} of {some(of)}" if any(of) else names, said)))
        for (where, names, said), of in owners.items()
    ]


def _format(value: object) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value)


def some(names: Sequence[str], most: int = NAMED) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
