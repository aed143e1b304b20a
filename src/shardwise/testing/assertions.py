"""Comparisons of tensors for test cases, and the values in an assert that failed."""

import ast
import linecache
import traceback
import unittest
from collections.abc import Iterator, Mapping
from contextlib import suppress
from numbers import Number
from textwrap import shorten
from types import ModuleType

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise._tensor import DTensor

__unittest = True  # unittest leaves the frames of such modules out of its reports

_LONGEST = 300  # characters of a value in a note


def as_dtensor(x: object) -> DTensor:
    """Cast to DTensor: torch's functions are typed to return plain tensors."""
    assert isinstance(x, DTensor), type(x)
    return x


class TensorAssertions(unittest.TestCase):
    """`assertEqual` for tensors, also inside lists, tuples and dicts; DTensors are compared as full tensors."""

    def assertEqual(  # noqa: N802 - unittest's name
        self,
        first: object,
        second: object,
        msg: object = None,
        *,
        atol: float | None = None,
        rtol: float | None = None,
        equal_nan: bool = True,
        exact_dtype: bool = True,
        exact_device: bool = False,
    ) -> None:
        """Fail unless both are equal; tensors may differ by torch's tolerance for their dtype.

        All ranks of a DTensor's mesh must call this together: it gathers.

        Args:
            atol, rtol: largest absolute and relative difference; give both or neither.
            equal_nan: NaN equals NaN.
            exact_dtype, exact_device: whether these must be equal as well.
        """
        if not any(isinstance(x, Tensor) for x in pytree.tree_leaves((first, second))):
            super().assertEqual(first, second, msg)  # noqa: PT009 - what it is built on
            return
        first, second = pytree.tree_map_only(DTensor, lambda x: x.full_tensor(), (first, second))
        # If one is a tensor, a number or list in the other is converted to its dtype and device.
        if isinstance(first, Tensor) and isinstance(second, Number | list | tuple):
            second = torch.as_tensor(second, dtype=first.dtype, device=first.device)
        elif isinstance(second, Tensor) and isinstance(first, Number | list | tuple):
            first = torch.as_tensor(first, dtype=second.dtype, device=second.device)
        torch.testing.assert_close(
            first, second, atol=atol, rtol=rtol, equal_nan=equal_nan, check_dtype=exact_dtype,
            check_device=exact_device, msg=None if msg is None else lambda why: f"{why}\n{msg}",
        )  # fmt: skip


def note_values(error: BaseException) -> None:
    """Add a note to a bare AssertionError: the names in the assert that failed, and their values."""
    frames = list(traceback.walk_tb(error.__traceback__))
    if type(error) is not AssertionError or str(error) or not frames:
        return
    frame, line = frames[-1]
    known = {**frame.f_globals, **frame.f_locals}
    with suppress(SyntaxError):
        nodes = ast.walk(ast.parse("".join(linecache.getlines(frame.f_code.co_filename))))
        tests = [n.test for n in nodes if isinstance(n, ast.Assert) and n.lineno <= line <= (n.end_lineno or n.lineno)]
        # On one line each. The text of a DTensor is that of its local tensor, which needs no other rank.
        values = dict(found for test in tests for found in _values_in(test, known))
        lines = [f"  {text} = {shorten(repr(value), _LONGEST)}" for text, value in values.items()]
        if lines:
            error.add_note("\n".join(["the values there:", *lines]))


def _values_in(node: ast.AST, known: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """The names, and attributes of names, of an expression with their values, in order."""
    value = _looked_up(node, known)
    if value is None or callable(value) or isinstance(value, ModuleType):
        for child in ast.iter_child_nodes(node):
            yield from _values_in(child, known)
    else:
        yield ast.unparse(node), value


def _looked_up(node: ast.AST, known: Mapping[str, object]) -> object:
    """The value of an expression. Attributes of tensors are not read: reading a gradient communicates."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    owner = _looked_up(node.value, known) if isinstance(node, ast.Attribute) else None
    with suppress(Exception):  # whatever a property may raise
        if isinstance(node, ast.Attribute) and owner is not None and not isinstance(owner, Tensor):
            return getattr(owner, node.attr)
    return None
