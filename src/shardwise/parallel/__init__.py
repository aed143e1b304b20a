"""Tensor and sequence parallelism: a module is cut by a plan of styles, as in `torch.distributed.tensor.parallel`."""

from shardwise.parallel.api import parallelize_module
from shardwise.parallel.crossing import Crossing, Scope
from shardwise.parallel.features import ColwiseParallel, RowwiseParallel
from shardwise.parallel.local_parameters import local_parameters
from shardwise.parallel.sequence import SequenceParallel
from shardwise.parallel.style import First, ParallelStyle, Where, first

__all__ = [
    "ColwiseParallel", "Crossing", "First", "ParallelStyle", "RowwiseParallel", "Scope", "SequenceParallel", "Where",
    "first", "local_parameters", "parallelize_module",
]  # fmt: skip
