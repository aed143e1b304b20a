"""What notebooks and loggers read of a DTensor."""

from html import escape

import numpy as np

from shardwise.errors import RuleError, printable
from shardwise.tensor.dtensor import DTensor, local_only, register_method


def repr_html(x: DTensor) -> str:
    """The text, with the elements of this rank, and a drawing of which rank holds which shard."""
    dtype = str(x.dtype).removeprefix("torch.")
    header = f"{x._name}: {dtype}" if x._name else dtype
    return f"<div><pre>{escape(printable(repr(x)))}</pre>{x._layout._repr_html_(header, x.element_size())}</div>"


def as_numpy(x: DTensor, *, force: bool = False) -> np.ndarray:
    """A copy of a replicated tensor of one element, such as TensorBoard makes of a loss; sends nothing.

    Raises:
        RuleError: another tensor, of which this rank may hold a part only, or a rank outside its mesh.
    """
    if x.numel() != 1 or not x._layout.is_replicated or not x.to_local().numel():
        raise RuleError(local_only("numpy()"))
    return x.to_local().clone().numpy(force=force)


register_method("_repr_html_", repr_html)
register_method("numpy", as_numpy)
