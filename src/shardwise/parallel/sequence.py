"""Layers that work on every place of a sequence alone: each rank has some of the places."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from shardwise.layout import REPLICATE, Shard
from shardwise.parallel.styles import After, Before, ParallelStyle, Placed, Where, first


@dataclass(frozen=True, kw_only=True)
class SequenceParallel(ParallelStyle):
    """Parameters are whole on every rank, inputs cut along the sequence: LayerNorm, RMSNorm, Dropout and their like.

    Args:
        sequence_dim: of the input. A plain input is this rank's part of it; how long the parts of others are is asked,
            in one small exchange a call. A DTensor is moved if it is cut otherwise.
        use_local_output: hand on this rank's part as a plain tensor.
    """

    sequence_dim: int = 1
    use_local_output: bool = False

    def parameters(self, module: nn.Module, where: Where) -> Mapping[str, Placed]:
        return {name: REPLICATE for name, _ in module.named_parameters(remove_duplicate=False)}

    def before(self, module: nn.Module, where: Where) -> Before:
        cut = Shard(self.sequence_dim)
        return first(module, where.crossing(cut, cut))

    def after(self, module: nn.Module, where: Where) -> After | None:
        return where.crossing(None, None, local=True, what="the output") if self.use_local_output else None
