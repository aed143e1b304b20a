"""Values that add up exactly, and reductions in plain torch: the reference of tests that move and reduce shards."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwise._layout import Layout, Partial
from shardwise.testing.local_shards import PartialValues, partial_indices

REDUCE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda stack: stack.sum(0, dtype=stack.dtype),
    "avg": lambda stack: stack.mean(0),
    "max": lambda stack: stack.amax(0),
    "min": lambda stack: stack.amin(0),
    "product": lambda stack: stack.prod(0, dtype=stack.dtype),
}


def numbered(shape: Sequence[int]) -> Tensor:
    """A tensor whose elements are all different."""
    return torch.arange(torch.Size(shape).numel()).view(tuple(shape))


def partial_sums(total: Tensor, layout: Layout, generator: torch.Generator) -> dict[tuple[int, ...], Tensor]:
    """Values on the Partial(sum) axes of `layout` that add up to `total`."""
    keys = partial_indices(layout)
    parts = {key: small_integers(total.shape, generator).to(total.dtype) for key in keys[1:]}
    rest = total.clone()
    for part in parts.values():
        rest -= part
    return {**parts, keys[0]: rest}


def small_integers(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Doubles from -2 to 2: sums and products of them are exact, and there are many ties and zeros."""
    return torch.randint(-2, 3, tuple(shape), generator=generator).double()


def reduced_value(parts: PartialValues, layout: Layout) -> Tensor:
    """The reduction of `parts` over the Partial axes."""
    for axis in reversed(layout.partial_axes):
        placement = layout.placements[axis]
        assert isinstance(placement, Partial)
        reduce = REDUCE[placement.reduce_op]
        count = layout.mesh.shape[axis]
        parts = {
            key: reduce(torch.stack([parts[(*key, i)] for i in range(count)])) for key in {key[:-1] for key in parts}
        }
    return parts[()]
