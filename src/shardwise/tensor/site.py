"""Where a row's local function runs."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from shardwise import collectives, movement
from shardwise.layout import Layout
from shardwise.mesh import Mesh


class LocalSite:
    """The `Site` that rules are promised."""

    __slots__ = ("axes", "layouts", "op", "operands", "output")

    def __init__(
        self,
        op: Callable[..., Any],
        layouts: tuple[Layout, ...],
        output: Layout,
        axes: tuple[int, ...],
        operands: Sequence[Any],
    ) -> None:
        self.op = op
        self.layouts = layouts
        self.output = output
        self.axes = axes
        self.operands = operands

    @property
    def rank(self) -> int:
        return collectives.rank()

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self.op(*args, **kwargs)

    def ranks(self, axes: Sequence[int] | None = None) -> tuple[int, ...]:
        return _neighbours(self.layouts[0].mesh, self.rank, self.axes if axes is None else tuple(axes))

    def exchange(
        self,
        send: Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        ranks: tuple[int, ...] | None = None,
    ) -> Tensor:
        return movement.exchange(send, send_counts, recv_counts, self.ranks() if ranks is None else ranks)

    def name_of(self, operand: int) -> str:
        return self.operands[operand]._name or f"operand {operand}"


@lru_cache(maxsize=1024)
def _neighbours(mesh: Mesh, rank: int, axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(mesh.submesh(tuple(sorted(axes)), rank).ranks)) if axes else (rank,)
