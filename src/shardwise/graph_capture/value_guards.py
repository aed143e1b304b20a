"""Guards of the values that a function read from tensors while it was traced.

A function may read values, as `if mask.all()` does, or make a tensor whose shape depends on values, as `x[mask]` does.
Its graph holds for the values that it read, so it has a call that compares each of them. These calls, and the ops on
which they depend, come first in the graph and change nothing. If a value is another one, another graph is tried.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise.trace.user_stack import StackFrame, call_site


class OtherValueError(Exception):
    """A replay found another value than the traced call."""

    def __init__(self, read: "ValueRead") -> None:
        super().__init__(str(read))


@dataclass(frozen=True)
class ValueRead:
    """What Python learned of values: a value as text, in which NaN equals NaN, or only the shapes of results.

    Attributes:
        what: the op or method that showed them, for messages.
        frame: the line of the user's code.
    """

    found: object
    shapes_only: bool
    what: str = field(compare=False)
    frame: StackFrame | None = field(compare=False, default_factory=call_site)

    def __str__(self) -> str:
        return self.what if self.frame is None else f"{self.what} at {self.frame}"

    def check(self) -> Callable[[object], None]:
        """A call for the graph, of the value at a replay."""

        def check_value(value: object) -> None:
            if learned(value, self.shapes_only) != self.found:
                raise OtherValueError(self)

        check_value.__module__ = "shardwise"  # what the code of the graph calls it
        return check_value


def learned(value: object, shapes_only: bool) -> object:
    """What Python learns from the result of an op."""
    if shapes_only:
        return [tuple(x.shape) for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]
    return repr(value.tolist() if isinstance(value, Tensor) else value)
