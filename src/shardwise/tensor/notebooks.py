"""What notebooks show of a DTensor."""

from html import escape

from shardwise.errors import printable
from shardwise.tensor.dtensor import DTensor, register_method


def repr_html(x: DTensor) -> str:
    """The text, with the elements of this rank, and a drawing of which rank holds which shard."""
    dtype = str(x.dtype).removeprefix("torch.")
    header = f"{x._name}: {dtype}" if x._name else dtype
    return f"<div><pre>{escape(printable(repr(x)))}</pre>{x._layout._repr_html_(header, x.element_size())}</div>"


register_method("_repr_html_", repr_html)
