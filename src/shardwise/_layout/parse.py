"""Placements, meshes, shapes and dtypes as text in a file or a command; parsed, never executed."""

import ast
import re
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardwise._layout.mesh import Mesh
from shardwise._layout.placement import OnRanks, Partial, Placement, Replicate, Shard
from shardwise.errors import LayoutError, MeshError, PlanError, without_fix

# Names and abbreviations.
NAMES: dict[str, Callable[..., Placement]] = {
    "Shard": Shard, "S": Shard, "Replicate": Replicate, "R": Replicate, "Partial": Partial, "P": Partial,
    "OnRanks": OnRanks,
}  # fmt: skip
NO_ARGUMENTS = ("Replicate", "R", "Partial", "P")  # allowed without parentheses
HELP = 'write "Shard(0)", "Shard(1, sizes=[…])", "OnRanks(0)", "Replicate()" or "Partial(\'sum\')"'

ITEMSIZES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint16": 2, "uint32": 4, "uint64": 8,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8,
    "complex128": 16,
}  # fmt: skip
"""Bytes per element, by dtype name; importing torch for them would take a second."""


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file.

    Raises:
        PlanError: it cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror}. Fix: name a file that can be read.") from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path}: is not TOML: {error}. Fix: correct it there; text is in quotes, in UTF-8.") from error


def parse_placement(text: object) -> Placement:
    """The placement written in `text`, such as "Shard(0, sizes=[3, 1])" or "S(0)".

    Raises:
        PlanError: no placement, or several.
    """
    match parse_placements(text) if isinstance(text, str) else []:
        case [placement]:
            return placement
    raise _refusal(text)


def parse_placements(text: object) -> list[Placement] | dict[str, Placement]:
    """The placements in `text`, one per mesh axis: "Shard(0), Replicate()", or "dp=Shard(0)" by axis name.

    Args:
        text: one string, or a list or a table by axis name of strings of one placement each.

    Raises:
        PlanError: anything else.
    """
    if isinstance(text, list):
        return [parse_placement(one) for one in text]
    if isinstance(text, dict):
        return {str(name): parse_placement(one) for name, one in text.items()}
    if not isinstance(text, str):
        raise _refusal(text)
    try:
        match ast.parse(f"placements({text.strip()}\n)", mode="eval").body:
            case ast.Call(func=ast.Name(), args=[], keywords=keywords) if keywords:
                names = [str(word.arg) for word in keywords]  # "None" for **, which no axis can be called
                if len(set(names)) < len(names) or "None" in names:
                    raise ValueError("an axis is named once")
                return {name: _placement(word.value) for name, word in zip(names, keywords, strict=True)}
            case ast.Call(func=ast.Name(), args=elements, keywords=[]) if elements:
                return [_placement(element) for element in elements]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, LayoutError) as error:
        why = error.msg if isinstance(error, SyntaxError) else without_fix(error)
        raise PlanError(f"{text!r} is not a placement: {why}. Fix: {HELP}.") from error
    raise _refusal(text)


def _refusal(text: object) -> PlanError:
    return PlanError(f"{text!r} is not a placement. Fix: {HELP}.")


def _placement(node: ast.expr) -> Placement:
    match node:
        case ast.Name(id=name) if name in NO_ARGUMENTS:
            return NAMES[name]()
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if name in NAMES:
            # `Partial(max)` is read too; elsewhere a name means nothing.
            bare = NAMES[name] is Partial
            values = [arg.id if bare and isinstance(arg, ast.Name) else ast.literal_eval(arg) for arg in args]
            named = {str(word.arg): ast.literal_eval(word.value) for word in keywords}
            found = NAMES[name](*values, **named)
            if isinstance(found, OnRanks) and type(found.position) is not int:
                raise TypeError(f"OnRanks takes the number of a rank, got {found.position!r}")
            return found
    raise ValueError(f"{ast.unparse(node)} is unknown")


def parse_integers(text: object, what: str) -> tuple[int, ...]:
    """`2,2` or `2x2` as (2, 2), also a list of integers; empty text is not an integer at all.

    Raises:
        PlanError: anything else.
    """
    words = re.split(r"\s*[,x×]\s*", text.strip()) if isinstance(text, str) and text.strip() else text
    if words == "" or (isinstance(words, str) and not words.strip()):
        return ()
    if isinstance(words, list):
        numbers = [int(p) if isinstance(p, str) and re.fullmatch(r"-?[0-9]{1,18}", p) else p for p in words]
        if all(type(n) is int for n in numbers):
            return tuple(numbers)
    raise PlanError(f"{text!r} is not a {what}. Fix: write integers with commas between, such as 4,2.")


def parse_mesh(text: object, ranks: Sequence[int] = ()) -> Mesh:
    """`2,2`, or with names `dp=2,tp=2`; also a list, or a table of names.

    Args:
        ranks: in row-major order; none are 0, 1, 2, ….

    Raises:
        PlanError: anything else.
    """
    names = None
    if isinstance(text, dict):
        names, sizes = tuple(map(str, text)), parse_integers(list(text.values()), "mesh")
    elif isinstance(text, str) and "=" in text:
        pairs = [pair.partition("=") for pair in text.split(",")]
        names = tuple(name.strip() for name, _, _ in pairs)
        if not all(re.fullmatch("-?[0-9]+", size.strip()) for _, _, size in pairs):
            raise PlanError(f"{text!r} is not a mesh: an axis has a name and a size. Fix: write 2,2 or dp=2,tp=2.")
        sizes = parse_integers([size.strip() for _, _, size in pairs], "mesh")
    else:
        sizes = parse_integers([text] if isinstance(text, int) else text, "mesh")
    try:
        if names is not None and not all(names):
            raise MeshError("An axis has a name or none has.")
        return Mesh(sizes, tuple(ranks), names)
    except MeshError as error:
        raise PlanError(f"{text!r} is not a mesh: {without_fix(error)}. Fix: write 2,2 or dp=2,tp=2.") from error


def parse_itemsize(text: object) -> int:
    """Bytes of an element of the dtype with this name, with or without `torch.` before it.

    Raises:
        PlanError: an unknown dtype.
    """
    size = ITEMSIZES.get(text.removeprefix("torch.")) if isinstance(text, str) else None
    if size is None:
        raise PlanError(f"{text!r} is not a dtype. Fix: use one of {', '.join(ITEMSIZES)}.")
    return size
