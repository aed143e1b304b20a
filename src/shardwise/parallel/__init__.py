"""Tensor, sequence and expert parallelism by a plan of styles, as in `torch.distributed.tensor.parallel`."""

from shardwise.parallel.boundary import BoundaryRedistribution
from shardwise.parallel.experts import ExpertParallel, mix_experts
from shardwise.parallel.fully_sharded import (
    CPUOffloadPolicy,
    FullyShardedModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from shardwise.parallel.loss import loss_parallel
from shardwise.parallel.plan import ParallelPlan, parallelize_module
from shardwise.parallel.prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from shardwise.parallel.saved_inputs import input_reshard
from shardwise.parallel.shard_module import local_parameters
from shardwise.parallel.styles import (
    ColwiseParallel,
    FirstInput,
    InputFn,
    ModuleContext,
    OutputFn,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    first_input,
)
from shardwise.parallel.transformers_plan import plan_from_transformers

__all__ = [
    "BoundaryRedistribution", "CPUOffloadPolicy", "ColwiseParallel", "ExpertParallel", "FirstInput",
    "FullyShardedModule", "InputFn", "MixedPrecisionPolicy", "ModuleContext", "OffloadPolicy", "OutputFn",
    "ParallelPlan", "ParallelStyle", "PrepareModuleInput", "PrepareModuleInputOutput", "PrepareModuleOutput",
    "RowwiseParallel", "SequenceParallel", "first_input", "fully_shard", "input_reshard", "local_parameters",
    "loss_parallel", "mix_experts", "parallelize_module", "plan_from_transformers",
]  # fmt: skip
