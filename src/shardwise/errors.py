"""Every error this library raises on purpose.

A message says what is wrong, where (rank, parameter, table, global id), expected against got, and a fix. An error that
concerns several ranks has one text on all of them.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class ShardwiseError(Exception):
    """Base of all errors raised by shardwise."""


def summary(error: BaseException, lines: int = 1) -> str:
    """The type of `error` and the first lines of its text, those after the first indented."""
    text = "\n    ".join(str(error).splitlines()[:lines])
    return f"{type(error).__name__}: {text}".removesuffix(": ")


def without_fix(error: BaseException) -> str:
    """The text of `error` without its fix and last full stop, for an error with another fix or a list of several."""
    return str(error).partition("Fix: ")[0].rstrip().rstrip(".")


def printable(text: str) -> str:
    """`text` with control characters escaped: names in it may be from an untrusted file."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def did_you_mean(name: str, known: Iterable[str], text: str = " Did you mean {!r}?") -> str:
    """`text` with the known name that is spelt most like `name`; "" if none is similar."""
    close = get_close_matches(name, list(known), n=1)
    return text.format(close[0]) if close else ""


IN_PARENTHESES = " (did you mean {!r}?)"  # inside a sentence


class ArgumentError(ShardwiseError, TypeError, ValueError):
    """An argument of a type that the function does not take."""


class MeshError(ShardwiseError, ValueError, RuntimeError):
    """A mesh that cannot exist here: repeated ranks, more ranks than the world has, unknown axis."""


class LayoutError(ShardwiseError, ValueError, RuntimeError):
    """Placements, sizes or boxes that do not describe the tensor: gap, overlap, out of range, wrong count.

    Torch raises ValueError or RuntimeError.
    """


class ShapeError(ShardwiseError, ValueError, RuntimeError):
    """A plain tensor beside DTensors without the global shape. Torch raises ValueError or RuntimeError, by op."""


class RuleError(ShardwiseError, NotImplementedError):
    """An op that cannot run on the given layouts, or has no rule."""


class ShadowError(ShardwiseError, AssertionError):
    """A distributed op gave another result than plain torch on full tensors.

    Attributes:
        op: its name.
        rank: a rank that holds the largest difference.
        index: of that element in the global tensor; empty if shapes or types differ.
        difference: absolute; infinite where a value is missing or not a number.
    """

    def __init__(
        self, message: str, op: str = "", rank: int = 0, index: tuple[int, ...] = (), difference: float = 0.0
    ) -> None:
        super().__init__(message)
        self.op = op
        self.rank = rank
        self.index = index
        self.difference = difference


class PlanError(ShardwiseError, ValueError):
    """A sharding plan that does not fit the module."""


class TooLargeError(PlanError):
    """Tables or a module that do not fit in the memory of the ranks, however they are sharded."""


class MissingError(PlanError, AttributeError):
    """A plan for an attribute that the module does not have."""


class MismatchError(ShardwiseError, ValueError):
    """Ranks disagree on something that must be the same everywhere."""


class GroupError(ShardwiseError, RuntimeError):
    """A process group without this rank, or one inside another where only one may be set."""


class ThreadError(ShardwiseError, RuntimeError):
    """Two threads of one rank communicate in no fixed order, or a process that a rank started communicates."""


class RemoteRankError(ShardwiseError, RuntimeError):
    """Another rank failed; `rank` says which."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class CaptureError(ShardwiseError, RuntimeError):
    """Something that a captured graph could not repeat."""


class CheckpointError(ShardwiseError, RuntimeError):
    """A checkpoint that is incomplete, damaged or does not fit."""


class UnreachableError(CheckpointError):
    """A checkpoint that may be sound: the place where it is stored does not answer."""


class NotFiniteError(CheckpointError):
    """A state with infinite values or NaN, which was to be saved only without them."""


class ConfigError(ShardwiseError, ValueError):
    """A configuration with unknown keys or values of the wrong type."""


class IdError(ShardwiseError, IndexError):
    """An id outside its embedding table."""


class OptimizerError(ShardwiseError, RuntimeError):
    """An optimizer of parameters that were replaced in their module."""


class PlaceError(ShardwiseError, IndexError, RuntimeError):
    """An index outside the tensor. Torch raises IndexError or RuntimeError, by op."""


class EmptyError(ShardwiseError, IndexError, RuntimeError):
    """No element to choose. Torch raises IndexError or RuntimeError, by op."""


class IdTypeError(ShardwiseError, TypeError):
    """Ids of a dtype, device or number of dims that a lookup cannot take."""


class JaggedError(ShardwiseError, ValueError):
    """Lengths, offsets, weights or keys that do not fit the values of a jagged tensor."""


class LaunchError(ShardwiseError, ValueError):
    """A function, or arguments of it, that cannot be run on new processes."""


class RankFailedError(ShardwiseError, RuntimeError):
    """A rank that `launch` started raised, left or was killed.

    Attributes:
        rank: the first one that failed.
        exitcode: of its process; -9 after SIGKILL.
        error_type: class name of what it raised, or "".
        rank_traceback: text of its traceback, or "".
    """

    def __init__(
        self, message: str, rank: int = 0, exitcode: int = 1, error_type: str = "", rank_traceback: str = ""
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.exitcode = exitcode
        self.error_type = error_type
        self.rank_traceback = rank_traceback
