"""Fields of lines of text as arrays, without a loop over lines."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardwise.demos.data.lines import NEWLINE, Block

MAX_DIGITS = 18  # of a number; more may not fit int64
HEX_DIGITS = 8
NO_DIGIT = 255
HIGH_BITS = np.uint64(0x8080808080808080)  # of eight bytes: set in NO_DIGIT, not in digits
NIBBLE = np.full(256, NO_DIGIT, np.uint8)
for _value, _digits in enumerate(zip(b"0123456789abcdef", b"0123456789ABCDEF", strict=True)):
    NIBBLE[list(_digits)] = _value


class Fields:
    """The fields of each line of a block.

    Args:
        separator: of one or two bytes. A carriage return at the end of a line belongs to no field.
        names: of the fields, for errors.

    Raises:
        DataError: a line has another number of fields.
    """

    def __init__(self, block: Block, separator: bytes, names: Sequence[str]) -> None:
        self._block, self._names, self._text = block, names, block.text
        separates = self._text == separator[0]
        if len(separator) == 2:
            separates[:-1] &= self._text[1:] == separator[1]
        ends = np.flatnonzero(separates | (self._text == NEWLINE))
        num_lines, num_fields = len(block.ends), len(names)
        if len(ends) != num_lines * num_fields or (ends[num_fields - 1 :: num_fields] != block.ends).any():
            found = np.diff(np.searchsorted(ends, block.ends, side="right"), prepend=0)
            line = int(np.flatnonzero(found != num_fields)[0])
            raise block.error(
                line,
                f"{found[line]} fields separated by {separator.decode()!r}, expected {num_fields}: {', '.join(names)}. "
                f"Fix: give a file of this format, or repair the line.",
            )
        self._ends = ends.reshape(num_lines, num_fields)
        self._starts = np.zeros_like(self._ends)
        self._starts[1:, 0] = self._ends[:-1, -1] + 1
        self._starts[:, 1:] = self._ends[:, :-1] + len(separator)
        last = self._ends[:, -1]
        last -= (self._text[last - 1] == ord("\r")) & (last > self._starts[:, -1])

    def integers(self, first: int, last: int, empty: int | None = None) -> NDArray[np.int64]:
        """Columns `first` to `last`, both included: (lines, columns).

        Args:
            empty: the value of an empty field; None: there must be none.

        Raises:
            DataError: a field is not an integer of at most 18 digits, a minus sign before them or not.
        """
        start, end = self._starts[:, first : last + 1], self._ends[:, first : last + 1]
        negative = (self._text[start] == ord("-")) & (end > start)
        numbers, _, wrong = self._decimals(start + negative, end, point=False)
        if empty is not None:
            is_empty = end == start
            numbers[is_empty], wrong = empty, wrong & ~is_empty
        self._check(wrong, first, "an integer" if empty is None else "an integer or nothing")
        return np.where(negative, -numbers, numbers)

    def decimals(self, column: int) -> NDArray[np.float64]:
        """A column of numbers without a sign and an exponent: (lines,).

        Raises:
            DataError: a field is not digits, with a point or not.
        """
        start, end = self._starts[:, column], self._ends[:, column]
        numbers, scale, wrong = self._decimals(start, end, point=True)
        self._check(wrong[:, None], column, "a number such as 4 or 3.5")
        return numbers / scale

    def hexes(self, first: int, last: int) -> NDArray[np.int64]:
        """Columns `first` to `last` of 8 hexadecimal digits each: (lines, columns), -1 for an empty field.

        Raises:
            DataError: a field is neither empty nor 8 hexadecimal digits.
        """
        start, end = self._starts[:, first : last + 1], self._ends[:, first : last + 1]
        is_empty = end == start
        if len(self._text) < HEX_DIGITS:
            self._check(~is_empty, first, "8 hexadecimal digits or nothing")
            return np.full(start.shape, -1)
        # Eight bytes from any byte on, as one number each: faster to pick than eight bytes by themselves.
        eights = np.ndarray((len(self._text) - HEX_DIGITS + 1,), np.uint64, self._text, strides=(1,))
        picked = eights[np.minimum(start, len(eights) - 1)]
        nibbles = NIBBLE[picked.view(np.uint8).reshape(*start.shape, HEX_DIGITS)]
        wrong = ~is_empty & ((end - start != HEX_DIGITS) | (nibbles.view(np.uint64)[..., 0] & HIGH_BITS != 0))
        self._check(wrong, first, "8 hexadecimal digits or nothing")
        bytes_of_number = (nibbles[..., 0::2] << 4) | nibbles[..., 1::2]
        numbers = bytes_of_number.view(">u4")[..., 0].astype(np.int64)
        numbers[is_empty] = -1
        return numbers

    def one_of(self, values: NDArray[np.int64], column: int, allowed: Sequence[int]) -> NDArray[np.int64]:
        """`values`, which a column has, shape (lines,).

        Raises:
            DataError: one of them is not allowed.
        """
        self._check(~np.isin(values, allowed)[:, None], column, " or ".join(map(str, allowed)))
        return values

    def _decimals(
        self, start: NDArray[np.int64], end: NDArray[np.int64], *, point: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """The digits as a number, what to divide it by, and where there are none, too many or anything else."""
        width = end - start
        numbers, scale = np.zeros_like(start), np.ones_like(start)
        has_point = np.zeros(start.shape, np.bool_)
        wrong = (width == 0) | (width > MAX_DIGITS)
        for k in range(min(int(width.max(initial=0)), MAX_DIGITS)):
            inside = width > k
            char = self._text[np.minimum(start + k, len(self._text) - 1)]
            digit = char - np.uint8(ord("0"))  # wraps, so that what is before "0" is above 9
            is_digit = inside & (digit <= 9)
            numbers = np.where(is_digit, 10 * numbers + digit, numbers)
            if point:
                scale = np.where(is_digit & has_point, 10 * scale, scale)
                is_point = inside & (char == ord(".")) & ~has_point & (width > 1)
                has_point |= is_point
                wrong |= inside & ~is_digit & ~is_point
            else:
                wrong |= inside & ~is_digit
        return numbers, scale, wrong

    def _check(self, wrong: NDArray[np.bool_], first: int, expected: str) -> None:
        """`wrong` has shape (lines, columns from `first` on)."""
        if wrong.any():
            line, column = (int(index) for index in np.argwhere(wrong)[0])
            column += first
            field = bytes(self._text[self._starts[line, column] : self._ends[line, column]])
            raise self._block.error(
                line,
                f"field {column + 1}, {self._names[column]}, is {field!r}, expected {expected}. Fix: repair the line.",
            )
