"""What the tests of rules share: operands, and tables of samples."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise import Mesh, count_comms, distribute_tensor
from shardwise.testing import world
from tools.op_judge import Sample


class Draw:
    """Operands from a generator of its own, in float64 and int64."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=self.generator)

    def fraction(self, *shape: int) -> Tensor:
        """Between 0.1 and 0.9, where nearly every function is smooth."""
        return torch.rand(shape, dtype=torch.float64, generator=self.generator) * 0.8 + 0.1

    def integers(self, *shape: int, low: int = -4, high: int = 5) -> Tensor:
        """From `low` to below `high`."""
        return torch.randint(low, high, shape, generator=self.generator)

    def ids(self, high: int, *shape: int) -> Tensor:
        """From 0 to below `high`."""
        return self.integers(*shape, low=0, high=high)


def calls(op: Callable[..., Any], *arguments: Any, **fields: Any) -> list[Sample]:
    """A sample for each of `arguments`: a tuple, whose last item may be a dict of keywords; or one argument.

    Args:
        fields: of all samples, such as `gradients`.
    """
    found = []
    for given in arguments:
        args = given if isinstance(given, tuple) else (given,)
        kwargs = args[-1] if args and isinstance(args[-1], dict) else {}
        found.append(Sample(op, args[: len(args) - bool(kwargs)], kwargs, **fields))
    return found


def sent(mesh: Mesh, op: Callable[..., Any], *operands: tuple[Tensor, Any]) -> list[tuple[Any, int, int]]:
    """Of each rank: the placements of the result, how many collectives the call makes, and the bytes that it sends.

    Args:
        operands: a tensor and its placement, or its placements, each; what moves by itself sends nothing.
    """

    def body() -> tuple[Any, int, int]:
        laid = ((x, p if isinstance(p, list) else [p]) for x, p in operands)
        xs = [distribute_tensor(x, mesh, p) for x, p in laid]
        with count_comms() as comms:
            out = op(*xs)
        assert not comms.implicit or not comms.total_calls
        return getattr(out, "placements", None), comms.total_calls, comms.total_bytes

    return world(mesh.size()).run(body)
