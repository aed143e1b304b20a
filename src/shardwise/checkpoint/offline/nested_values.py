"""Lists of mappings that `torch.distributed.checkpoint` has divided into values, put together again.

Source: `flatten_state_dict` of torch/distributed/checkpoint/_nested_dict.py.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

KeyPath: TypeAlias = tuple[str | int, ...]
"""Where a value is in a nested state: keys of mappings and places in lists."""

DEEPEST = 64


def as_path(said: object) -> KeyPath | None:
    """`said`, if it is a path."""
    if isinstance(said, tuple) and len(said) <= DEEPEST and all(type(part) in (str, int) for part in said):
        return said
    return None


def with_lists(values: Mapping[str, Any], paths: Mapping[str, KeyPath], tensors: Collection[str]) -> dict[str, Any]:
    """`values` with lists under their own names: "groups" in place of "groups.0.lr" and "groups.1.lr".

    A list that is not there in full, or has tensors, stays divided; lists in it are put together.

    Args:
        paths: of values and tensors, by name.
        tensors: their names.
    """
    lists: dict[KeyPath, list[tuple[KeyPath, str]]] = defaultdict(list)
    for name in [*values, *tensors]:
        path = paths.get(name, ())
        for depth in (at for at, part in enumerate(path) if at and isinstance(part, int)):
            lists[path[:depth]].append((path[depth:], name))
    found, taken = dict(values), {*values, *tensors}
    for prefix, members in sorted(lists.items(), key=lambda entry: len(entry[0])):
        own = ".".join(map(str, prefix))
        if own in taken or any(name not in found for _, name in members):
            continue
        try:
            nested = _nested([(path, values[name]) for path, name in members])
        except ValueError:
            continue
        for _, name in members:
            del found[name]
        found[own] = nested
        taken.add(own)
    return found


def _nested(members: Sequence[tuple[KeyPath, Any]]) -> object:
    """The list, mapping or value that has these; ValueError if none does."""
    if len(members) == 1 and not members[0][0]:
        return members[0][1]
    parts: dict[str | int, list[tuple[KeyPath, Any]]] = defaultdict(list)
    for path, value in members:
        if not path:
            raise ValueError("a value and what is in it")
        parts[path[0]].append((path[1:], value))
    kinds = {type(part) for part in parts}
    if kinds == {str}:
        return {part: _nested(inside) for part, inside in parts.items()}
    if kinds == {int} and parts.keys() == set(range(len(parts))):
        return [_nested(parts[place]) for place in range(len(parts))]
    raise ValueError("neither a mapping nor a list in full")
