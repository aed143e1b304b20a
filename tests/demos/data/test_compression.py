"""Bits per byte of texts whose cost is known."""

import lzma
import random
from math import log2

import pytest

from shardwise.demos.data import lzma_bits, order2_bits
from shardwise.demos.data.compression import _Table

RANDOM = random.Random(5).randbytes(20_000)


def test_lzma_cannot_shorten_random_bytes_and_finds_what_it_was_given() -> None:
    assert 8 <= lzma_bits(RANDOM) < 8.01
    assert lzma_bits(RANDOM, given=RANDOM) < 0.2  # matches have at most 273 bytes
    assert lzma_bits(b"a" * 10_000) < 0.1


def test_lzma_bits_are_those_of_the_file_less_its_frame() -> None:
    text = (lzma.__doc__ or "").encode() + __doc__.encode() * 30
    with_frame = 8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text)
    assert with_frame - 8 * 100 / len(text) < lzma_bits(text) < with_frame


def test_order_2_probabilities_of_any_context_add_up_to_one() -> None:
    given = b"abracadabra, said the cat; abracadabra"
    tables = [_Table(given, order) for order in range(3)]
    for context in (b"", b"a", b"z", b"ab", b"zz", b"za", b"ra"):
        p = [1 / 256] * 256
        for order in range(len(context) + 1):
            p = [tables[order].mixed(context[len(context) - order :] + bytes([c]), p[c]) for c in range(256)]
        assert sum(p) == pytest.approx(1)
        assert min(p) > 0


def test_order_2_bits_follow_the_formula() -> None:
    """Given abab, the text xab: worked out by hand."""
    u = 1 / 256
    p_x = (0 + 2 * u) / (4 + 2)
    p_a = (2 + 2 * u) / (4 + 2)  # x was never seen before anything, so nothing before it counts
    p_b_alone = (2 + 2 * u) / (4 + 2)
    p_b = (2 + 1 * p_b_alone) / (2 + 1)  # after a; xa was never seen
    expected = -(log2(p_x) + log2(p_a) + log2(p_b)) / 3
    assert order2_bits(b"xab", given=b"abab") == pytest.approx(expected)


def test_order_2_bits_of_a_text_do_not_learn_from_it() -> None:
    assert order2_bits(RANDOM, given=b"") == 8
    once = order2_bits(b"so it goes ", given=b"how it goes and so on")
    again = order2_bits(b"so it goes " * 50, given=b"how it goes and so on")
    assert again == pytest.approx(once, abs=0.5)


@pytest.mark.parametrize("bits", [lzma_bits, order2_bits])
def test_an_empty_text_has_no_bits_a_byte(bits: object) -> None:
    with pytest.raises(ValueError, match="there is no text to measure"):
        bits(b"", b"abc")  # type: ignore[operator]
