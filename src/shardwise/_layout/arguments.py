"""Checks the arguments of public functions against their annotations.

    @checked
    def rows(count: int, names: Sequence[str] = ()) -> None: ...

    rows("3")   # ArgumentError: rows(): count must be an integer, got '3'. Fix: pass an integer.

The check comes first, so a call is refused before it changes or sends anything. `KINDS` has the text of each annotation
in errors; a subpackage adds its own types with `describe`.
"""

import inspect
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce, wraps
from itertools import chain, repeat
from numbers import Number, Real
from operator import index, or_
from typing import (
    Annotated,
    Any,
    Literal,
    ParamSpec,
    SupportsIndex,
    TypeGuard,
    TypeVar,
    Union,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
)

from shardwise.errors import ArgumentError, ShardwiseError

P = ParamSpec("P")
R = TypeVar("R")
SHOWN = 80  # characters of a value in an error


@dataclass(frozen=True)
class Kind:
    """The allowed values of an argument.

    Args:
        expected: the rest of "… must be".
        fits: whether a value is allowed.
        fix: the rest of "Fix: "; "" is to pass the expected value.
        error: the class of the error.
        misuse: a more precise fix for some values, or "".
        exact: types of which all values fit, or are checked later; this is the fast path.
    """

    expected: str
    fits: Callable[[Any], bool]
    fix: str = ""
    error: type[ShardwiseError] = ArgumentError
    misuse: Callable[[Any], str] = lambda value: ""
    exact: frozenset[type] = frozenset()

    def __repr__(self) -> str:
        """The text of an annotation in `help()`."""
        return repr(self.expected)


KINDS: dict[object, Kind | None] = {Any: None, object: None, inspect.Parameter.empty: None}


def describe(annotation: object, kind: Kind | None) -> None:
    """Define the meaning of `annotation` in the signature of a public function."""
    KINDS[annotation] = kind


def shown(value: object) -> str:
    """`value` in an error, equal on every rank: its text if that has no address, else its type."""
    kind = type(value)
    if isinstance(value, str | bytes | int | float | complex | None | types.EllipsisType) or (
        kind.__module__.startswith("shardwise._layout")
    ):
        text = repr(value)
    elif kind in (tuple, list) and isinstance(value, tuple | list):
        text = ", ".join([shown(item) for item in value[:8]] + ["…"] * (len(value) > 8))
        text = f"({text}{',' * (len(value) == 1)})" if kind is tuple else f"[{text}]"
    elif kind is dict and isinstance(value, dict):
        text = ", ".join(f"{shown(k)}: {shown(v)}" for k, v in value.items())
        text = f"{{{text}}}"
    elif isinstance(value, type):
        text = f"the class {value.__qualname__}"
    else:
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        return _with_article(name)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _with_article(name: str) -> str:
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


# ---- integers ---------------------------------------------------------------------------------------------


def is_integer(value: object) -> TypeGuard[SupportsIndex]:
    """Whether `value` counts as an integer: Python's, NumPy's or torch's, but not a bool."""
    if type(value) is int:
        return True
    if isinstance(value, bool | str | float) or not isinstance(value, SupportsIndex):
        return False
    try:
        return type(value).__name__ not in ("bool", "bool_") and isinstance(index(value), int)
    except (TypeError, ValueError, RuntimeError):
        return False


def as_integer(value: object, what: str, error: type[ShardwiseError], fix: str) -> int:
    """`value` as a Python integer, else an error that names it `what`."""
    if not is_integer(value):
        raise error(f"{what} must be an integer, got {shown(value)}. Fix: {fix}.")
    return index(value)


_INT = frozenset((int,))


def as_integers(values: object, what: str, error: type[ShardwiseError], fix: str) -> tuple[int, ...]:
    """`values`, a sequence of integers, as Python integers."""
    if isinstance(values, tuple) and _INT.issuperset(map(type, values)):
        return tuple(values)
    if not is_listing(values):
        raise error(f"{what} must be a sequence of integers, got {shown(values)}. Fix: {fix}.")
    items: list[Any] = list(values)
    if not all(map(is_integer, items)):
        raise error(f"{what} must be a sequence of integers, got {shown(items)}. Fix: {fix}.")
    return tuple(map(index, items))


def is_listing(value: object) -> TypeGuard[Collection[Any]]:
    """Whether `value` is a collection in an order that ranks share: not a text, a mapping or a set."""
    return (
        isinstance(value, Iterable)
        and not isinstance(value, str | bytes | Mapping | set | frozenset)
        and (not hasattr(value, "ndim") or value.ndim == 1)
        and hasattr(value, "__len__")
    )


# ---- annotations --------------------------------------------------------------------------------------------


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_within(value: object, most: int) -> bool:
    return is_integer(value) and 1 <= index(value) <= most


def _is_bool(value: object) -> bool:
    return isinstance(value, bool) or type(value).__name__ == "bool"


describe(int, Kind("an integer", is_integer, exact=frozenset((int,))))
describe(float, Kind("a number", _is_real))
describe(complex, Kind("a number", lambda value: isinstance(value, Number)))
describe(bool, Kind("True or False", _is_bool, exact=frozenset((bool,))))
describe(str, Kind("a string", lambda value: isinstance(value, str)))
describe(type(None), Kind("None", lambda value: value is None, exact=frozenset((type(None),))))
describe(None, KINDS[type(None)])
describe(slice, Kind("a slice", lambda value: isinstance(value, slice)))


MOST = 2**31 - 1
Count = Annotated[int, Kind(f"an integer from 1 to {MOST}", lambda value: _is_within(value, MOST))]
"""A number of things, at least one."""
NumRanks = Annotated[int, Kind("a number of ranks, an integer from 1 to 4096", lambda value: _is_within(value, 4096))]
Timeout = Annotated[
    float, Kind("a time of 0.001 to 1e9 seconds", lambda value: _is_real(value) and 1e-3 <= value <= 1e9)
]
"""The time that a process waits for others: torch counts milliseconds, and has no infinite time."""


NAMED = Kind("a dict by name", lambda value: isinstance(value, Mapping) and all(isinstance(k, str) for k in value))
SEQUENCE = Kind("a sequence", is_listing)
"""A sequence of unchecked items: the function checks them, because ranks may pass different ones."""


def kind_of(annotation: Any) -> Kind | None:
    """The kind of `annotation`; None if it has nothing that can be checked."""
    try:
        if annotation in KINDS:
            return KINDS[annotation]
    except TypeError:  # the value cannot be hashed
        return None
    origin, parameters = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return parameters[1] if isinstance(parameters[1], Kind) else kind_of(parameters[0])
    if isinstance(annotation, TypeVar):
        return kind_of(annotation.__bound__) if annotation.__bound__ is not None else None
    if origin in (Union, types.UnionType):
        if type(None) in parameters:  # an alias that `describe` knows, or None
            others = reduce(or_, [p for p in parameters if p is not type(None)])
            return _any_of([kind_of(others), KINDS[None]])
        return _any_of([kind_of(p) for p in parameters])
    if origin is Literal:
        return Kind(
            " or ".join(map(repr, parameters)),
            lambda value: isinstance(value, type(parameters[0])) and value in parameters,
        )
    if isinstance(origin, type):
        return _generic(origin, parameters)
    if not isinstance(annotation, type) or getattr(annotation, "_is_protocol", False):
        return None
    return Kind(_with_article(annotation.__name__), lambda value: isinstance(value, annotation))


def _any_of(kinds: list[Kind | None]) -> Kind | None:
    found = [kind for kind in kinds if kind is not None]
    if len(found) < len(kinds):
        return None
    others = [kind for kind in found if kind.expected != "None"]
    first = max(others, key=lambda kind: bool(kind.fix), default=found[0])
    misuse = [kind.misuse for kind in others]
    return Kind(
        " or ".join(kind.expected for kind in [*others, *(kind for kind in found if kind not in others)]),
        lambda value: any(kind.fits(value) for kind in found),
        first.fix,
        first.error,
        lambda value: next((text for each in misuse if (text := each(value))), ""),
        frozenset().union(*(kind.exact for kind in found)),
    )


def _generic(origin: type, parameters: tuple[Any, ...]) -> Kind | None:
    if issubclass(origin, Mapping):
        keys, values = (kind_of(p) for p in parameters) if parameters else (None, None)
        return Kind(
            f"a dict from {keys.expected if keys else 'keys'} to {values.expected if values else 'values'}",
            lambda value: isinstance(value, Mapping) and _all_fit(keys, value) and _all_fit(values, value.values()),
            misuse=lambda value: _misuse_in(values, value),
        )
    if origin is type:
        return Kind("a class", lambda value: isinstance(value, type))
    if origin.__name__ == "Callable":
        return Kind("a function", callable)
    if origin is tuple and parameters[1:] not in ((), (...,)):
        kinds = [kind_of(p) for p in parameters]
        return Kind(
            f"a tuple of {len(kinds)}",
            lambda value: (
                is_listing(value)
                and len(value) == len(kinds)
                and all(_all_fit(kind, [item]) for kind, item in zip(kinds, value, strict=True))
            ),
        )
    if issubclass(origin, Collection):
        item = kind_of(parameters[0]) if parameters else None
        if origin is Collection:  # in any order, so a set or one string is allowed
            return Kind(f"a collection{_of(item)}", lambda value: _is_collection(value) and _all_fit(item, value))
        if item is None:
            return Kind("a sequence", is_listing)
        return Kind(
            f"a sequence{_of(item)}",
            lambda value: is_listing(value) and _all_fit(item, value),
            error=item.error,
            misuse=lambda value: (
                next((text for x in value if (text := item.misuse(x))), "") if is_listing(value) else ""
            ),
        )
    if issubclass(origin, Iterable):
        return Kind("an iterable", lambda value: isinstance(value, Iterable) and not isinstance(value, str | bytes))
    return Kind(_with_article(origin.__name__), lambda value: isinstance(value, origin))


def _misuse_in(kind: Kind | None, value: object) -> str:
    """The fix for the first value of a mapping that does not fit, with its key."""
    if kind is None or not isinstance(value, Mapping):
        return ""
    unfit = [(key, item) for key, item in value.items() if not kind.fits(item)]
    fix = next((kind.misuse(item) or kind.fix for _, item in unfit), "")
    return f"{fix}, for {shown(unfit[0][0])}" if fix else ""


def _is_collection(value: object) -> bool:
    return isinstance(value, Collection) and not isinstance(value, Mapping) and not hasattr(value, "ndim")


def _of(kind: Kind | None) -> str:
    return "" if kind is None else f", each {kind.expected}"


def _all_fit(kind: Kind | None, values: Iterable[object]) -> bool:
    return kind is None or all(map(kind.fits, values))


# ---- functions ----------------------------------------------------------------------------------------------


def checked(fn: Callable[P, R]) -> Callable[P, R]:
    """`fn`, which first checks its arguments against its annotations.

    Raises:
        ArgumentError, or the error of the kind: names the argument, what it must be, its value, and a fix.
    """
    kinds: dict[str, Kind | None] | None = None
    names: list[str] = []
    rest: str = ""

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal kinds, rest
        if kinds is None:  # names in quotes can be resolved only after the modules are imported
            hints = _hints(fn)
            parameters = inspect.signature(fn).parameters
            positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            names.extend(p.name for p in parameters.values() if p.kind in positional)
            found = {p.name: kind_of(hints.get(p.name, Any)) for p in parameters.values()}
            for p in parameters.values():
                if p.kind is inspect.Parameter.VAR_KEYWORD:
                    found |= {p.name: None, **_kinds_of_others(hints.get(p.name))}
            rest = next((p.name for p in parameters.values() if p.kind is inspect.Parameter.VAR_POSITIONAL), "")
            kinds = found
        others = zip(repeat(rest), args[len(names) :], strict=False)
        for name, value in chain(zip(names, args, strict=False), kwargs.items(), others):
            kind = kinds.get(name)
            if kind is not None and type(value) not in kind.exact and not kind.fits(value):
                _refuse(fn, name, kind, value)
        return fn(*args, **kwargs)

    return call


def _kinds_of_others(annotation: object) -> dict[str, Kind | None]:
    """The kind of each name of a typed dict in `**others: Unpack[...]`."""
    if get_origin(annotation) is not Unpack:
        return {}
    (named,) = get_args(annotation)
    return {name: kind_of(hint) for name, hint in get_type_hints(named, include_extras=True).items()}


def _hints(fn: Callable[..., object]) -> dict[str, object]:
    try:
        return get_type_hints(fn, include_extras=True)
    except NameError:  # a name of torch in quotes, in a module that does not import it
        from torch import Tensor, nn

        return get_type_hints(fn, localns={"nn": nn, "Tensor": Tensor}, include_extras=True)


def checked_init(cls: type[R]) -> type[R]:
    """A class whose constructor is `checked`."""
    setattr(cls, "__init__", checked(cls.__init__))  # noqa: B010 (mypy lets no method be assigned)
    return cls


def _refuse(fn: Callable[..., object], name: str, kind: Kind, value: object) -> None:
    what = fn.__qualname__.removesuffix(".__init__").removesuffix(".__new__").rpartition("<locals>.")[2]
    fix = kind.misuse(value) or kind.fix or f"pass {kind.expected}"
    raise kind.error(f"{what}(): {name} must be {kind.expected}, got {shown(value)}. Fix: {fix}.")
