"""Configuration: frozen dataclasses are the truth; a TOML file and `--set key=value` change it.

    @dataclass(frozen=True)
    class Table:
        rows: int = 1000
        sharding: Literal["row", "column"] = "row"

    @dataclass(frozen=True)
    class Run:
        seed: int = 0
        table: Table = Table()

    load(Run, "run.toml", ["table.rows=500"])

Fields are bool, int, float, str, `Literal`, `tuple[T, ...]` of these, a union of these or with None, or a
dataclass in turn. TOML has no word for None, so a field that may be None has to default to it.
"""

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from itertools import accumulate
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeGuard, TypeVar, Union, get_args, get_origin, get_type_hints

from shardwise.errors import ConfigError, PlanError
from shardwise.layout import read_toml

T = TypeVar("T")


def load(cls: type[T], toml_path: str | PathLike[str] | None = None, overrides: Sequence[str] = ()) -> T:
    """The defaults of `cls`, changed by a TOML file, then by `overrides` in their order.

    Args:
        cls: a dataclass; its `__post_init__` may refuse values with a ValueError.
        toml_path: no file if None.
        overrides: "a.b=value" each. The value is TOML; where it is not, or a string is wanted, it is taken as
            the string it is. `none` sets a field that may be None.

    Raises:
        ConfigError: lists every problem, each with its file or `--set` and its key.
    """
    problems: list[str] = []
    values: dict[str, object] = {}
    for table, source in _sources(toml_path, overrides, problems):
        _merge(_Place(cls, cls, "", source, problems), table, values)
    config = _build(cls, values, MISSING, "", problems)
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError("\n  ".join([f"{count} in the configuration:", *problems, FIX]))
    assert isinstance(config, cls)
    return config


def dump_toml(config: object) -> str:
    """`config` as TOML, every field of it; `load` makes an equal value of it.

    Raises:
        ConfigError: a field is None and does not default to None.
    """
    return "\n".join(_lines(config, MISSING, "")).strip() + "\n"


# ---- reading ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Text:
    """A value of `--set`: what it means depends on the field."""

    text: str


@dataclass(frozen=True)
class _Place:
    """The table `prefix` of one source; `cls` describes it, `root` the full configuration."""

    root: type
    cls: type
    prefix: str
    source: str
    problems: list[str]

    def inside(self, key: str, cls: type) -> "_Place":
        return _Place(self.root, cls, f"{self.prefix}{key}.", self.source, self.problems)

    def complain(self, key: str, what: str) -> None:
        self.problems.append(f"{self.source}{self.prefix}{key}: {what}")


FIX = "Fix: correct these in the file, or set them by --set KEY=VALUE."
_WRONG = object()  # in place of a value with a reported problem


def _sources(
    toml_path: str | PathLike[str] | None, overrides: Sequence[str], problems: list[str]
) -> Iterator[tuple[dict[str, object], str]]:
    """Nested tables, later ones win, each with how a message names it."""
    if toml_path is not None:
        try:
            content = read_toml(Path(toml_path))
        except PlanError as error:
            problems.append(str(error))
        else:
            yield content, f"{toml_path}: "
    for override in overrides:
        key, equals, text = override.partition("=")
        *tables, name = key.strip().split(".")
        nested: dict[str, object] = {name: _Text(text.strip())}
        for table in reversed(tables):
            nested = {table: nested}
        if equals and key.strip():
            yield nested, "--set "
        else:
            problems.append(f"--set {override}: expected key=value")


def _merge(at: _Place, table: Mapping[str, object], values: dict[str, Any]) -> None:
    """Check `table` against the fields of `at.cls` and lay it over `values`."""
    hints = _hints(at.cls)
    for key, value in table.items():
        hint = hints.get(key)
        if hint is None:
            at.complain(key, f"unknown key{_suggestion(at, key)}")
        elif not _is_table(hint):
            try:
                if isinstance(value, _Text):
                    values[key] = _from_text(hint, value.text)
                else:
                    values[key] = _checked(hint, value)
            except ValueError as error:
                at.complain(key, str(error))
                values[key] = _WRONG
        elif isinstance(value, dict):
            _merge(at.inside(key, hint), value, values.setdefault(key, {}))
        else:
            at.complain(key, f"is a table; set its keys: {', '.join(_keys(hint, f'{at.prefix}{key}.'))}")


def _suggestion(at: _Place, key: str) -> str:
    """The key that was meant: the same name in another table, or a similar spelling."""
    names: dict[str, set[str]] = {}
    for path in _keys(at.root, ""):
        for name in accumulate(path.split("."), "{}.{}".format):
            names.setdefault(name.split(".")[-1], set()).add(name)
    close = difflib.get_close_matches(key, names, n=1)
    if not close:
        return f"; the keys are {', '.join(_keys(at.root, ''))}"
    beside = at.prefix + close[0]
    return f"; did you mean {beside if beside in names[close[0]] else ' or '.join(sorted(names[close[0]]))}?"


def _build(cls: type, values: Mapping[str, Any], default: object, prefix: str, problems: list[str]) -> object:
    """An instance of `cls`: checked `values`, then what `default` has, then the defaults of the fields."""
    found = {}
    for field in _fields(cls):
        key, fallback = field.name, _default(field, default)
        hint = _hints(cls)[key]
        if _is_table(hint):
            found[key] = _build(hint, values.get(key, {}), fallback, f"{prefix}{key}.", problems)
        else:
            found[key] = values.get(key, fallback)
        if found[key] is MISSING:
            problems.append(f"{prefix}{key}: is missing and has no default")
            found[key] = _WRONG
    if any(value is _WRONG for value in found.values()):
        return _WRONG
    try:
        return cls(**found)
    except ValueError as error:
        problems.append(f"{prefix.rstrip('.')}: {error}" if prefix else str(error))
        return _WRONG


# ---- the schema -------------------------------------------------------------------------------------------


def _is_table(hint: object) -> TypeGuard[type]:
    return isinstance(hint, type) and is_dataclass(hint)


def _fields(cls: Any) -> list[Field[Any]]:
    return [field for field in fields(cls) if field.init]


@cache
def _hints(cls: type) -> dict[str, object]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in _fields(cls)}


def _keys(cls: type, prefix: str) -> Iterator[str]:
    """The dotted names of all values in `cls`."""
    for name, hint in _hints(cls).items():
        if _is_table(hint):
            yield from _keys(hint, f"{prefix}{name}.")
        else:
            yield prefix + name


def _default(field: Field[Any], owner: object) -> object:
    """What `field` is in `owner`, the default of the full table, or else by itself."""
    if owner is not MISSING:
        return getattr(owner, field.name)
    return field.default_factory() if callable(field.default_factory) else field.default


# ---- values -----------------------------------------------------------------------------------------------

_EXPECTED = {bool: "true or false", int: "an integer", float: "a number", str: "a string", NoneType: "none"}


def _checked(hint: object, value: object) -> object:
    """`value` as a field of type `hint` holds it; ValueError if it does not fit."""
    origin, options = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        for option in options:
            with suppress(ValueError):
                return _checked(option, value)
    elif origin is Literal:
        if any(type(value) is type(choice) and value == choice for choice in options):
            return value
    elif origin is tuple:
        if isinstance(value, list):
            with suppress(ValueError):
                return tuple(_checked(options[0], item) for item in value)
    elif hint is float and type(value) is int:
        with suppress(OverflowError):
            return float(value)
    elif type(value) is hint:
        return value
    raise ValueError(f"expected {_expected(hint)}, got {_shown(value)}")


def _from_text(hint: object, text: str) -> object:
    """What `text`, typed after `--set key=`, means in a field of type `hint`."""
    readings: list[object] = [None] if text == "none" else []
    with suppress(ValueError, RecursionError):
        parsed = tomllib.loads(f"value = {text}")
        readings += [parsed["value"]] if len(parsed) == 1 else []
    for reading in [*readings, text]:
        with suppress(ValueError):
            return _checked(hint, reading)
    raise ValueError(f"expected {_expected(hint)}, got {_shown(text)}")


def _expected(hint: object) -> str:
    options = get_args(hint)
    match get_origin(hint):
        case None if hint in _EXPECTED:
            return _EXPECTED[hint]
        case origin if origin in (Union, UnionType):
            return " or ".join(map(_expected, options))
        case origin if origin is Literal:
            return " or ".join(map(_shown, options))
        case origin if origin is tuple and options[1:] == (Ellipsis,):
            return f"a list, each item {_expected(options[0])}"
    raise TypeError(f"{hint} is no type for a configuration field. Fix: one that the top of {__name__} names")


def _shown(value: object) -> str:
    """`value` in TOML, or a word for it where it is not a value of ours."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():  # JSON escapes what TOML wants escaped, except for DEL
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return f"[{', '.join(map(_shown, value))}]"
        case dict():
            return "a table"
        case None:
            return "none"
    return str(value)


def _lines(config: object, default: object, prefix: str) -> Iterator[str]:
    """The values of `config`, then its tables: TOML wants them in this order."""
    tables = []
    for field in _fields(config):
        key, value, fallback = field.name, getattr(config, field.name), _default(field, default)
        if is_dataclass(value):
            tables.append((f"{prefix}{key}", value, fallback))
        elif value is not None:
            yield f"{key} = {_shown(value)}"
        elif fallback is None:
            yield f"# {key} = none"
        else:
            raise ConfigError(
                f"{prefix}{key} is None and defaults to {fallback!r}: TOML cannot say that. "
                f"Fix: give {prefix}{key} a value, or the field the default None."
            )
    for name, table, fallback in tables:
        yield from ("", f"[{name}]", *_lines(table, fallback, f"{name}."))
