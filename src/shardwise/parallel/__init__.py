"""Tensor and sequence parallelism: a module is cut by a plan of styles, as in `torch.distributed.tensor.parallel`."""

from shardwise.parallel.api import parallelize_module
from shardwise.parallel.boundary import Crossing
from shardwise.parallel.experts import ExpertParallel, mix_experts
from shardwise.parallel.features import ColwiseParallel, RowwiseParallel
from shardwise.parallel.local_parameters import local_parameters
from shardwise.parallel.loss import loss_parallel
from shardwise.parallel.plan import Plan
from shardwise.parallel.prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from shardwise.parallel.sequence import SequenceParallel
from shardwise.parallel.styles import After, Before, First, ParallelStyle, Where, first

__all__ = [
    "After", "Before", "ColwiseParallel", "Crossing", "ExpertParallel", "First", "ParallelStyle", "Plan",
    "PrepareModuleInput", "PrepareModuleInputOutput", "PrepareModuleOutput", "RowwiseParallel", "SequenceParallel",
    "Where", "first", "local_parameters", "loss_parallel", "mix_experts", "parallelize_module",
]  # fmt: skip
