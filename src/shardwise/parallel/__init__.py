"""Tensor, sequence and expert parallelism by a plan of styles, as in `torch.distributed.tensor.parallel`."""

from shardwise.parallel.experts import ExpertParallel, MixtureOfExperts, balance_loss, mix_experts
from shardwise.parallel.fully_sharded import (
    CPUOffloadPolicy,
    FullyShardedModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from shardwise.parallel.loss import loss_parallel
from shardwise.parallel.plan import parallelize_module
from shardwise.parallel.prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from shardwise.parallel.saved_inputs import input_reshard
from shardwise.parallel.shard_module import local_parameters
from shardwise.parallel.styles import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel, first_input
from shardwise.parallel.transformers_plan import plan_from_transformers

__all__ = [
    "CPUOffloadPolicy", "ColwiseParallel", "ExpertParallel", "FullyShardedModule", "MixedPrecisionPolicy",
    "MixtureOfExperts", "OffloadPolicy", "ParallelStyle", "PrepareModuleInput", "PrepareModuleInputOutput",
    "PrepareModuleOutput", "RowwiseParallel", "SequenceParallel", "balance_loss", "first_input", "fully_shard",
    "input_reshard", "local_parameters", "loss_parallel", "mix_experts", "parallelize_module", "plan_from_transformers",
]  # fmt: skip
