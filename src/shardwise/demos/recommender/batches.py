"""A batch, the same on every rank, sharded so that each rank works on its own rows."""

from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from shardwise import collectives
from shardwise.demos.data import Batch
from shardwise.demos.recommender.model import MAX_ARGS
from shardwise.layout import REPLICATE, Mesh, Placement, Shard, chunk
from shardwise.tensor import DTensor


@dataclass(frozen=True)
class Inputs:
    """What the model and the loss take, plain or distributed: see `Recommender.forward`."""

    context_ids: Tensor
    offsets: Tensor
    num_args: Tensor
    target: Tensor


def plain_inputs(batch: Batch) -> Inputs:
    """The batch for one process."""
    return Inputs(batch.context_ids, batch.offsets[:-1], batch.num_args.clamp(max=MAX_ARGS), batch.target)


def shard_batch(batch: Batch, mesh: Mesh) -> Inputs:
    """The batch sharded over a mesh of one axis: rows as `torch.chunk` divides them, ids with their rows.

    Sends nothing, because every rank makes the same batch. Offsets are global. Targets are replicated, because
    the scores may be sharded by rows or by classes.
    """
    plain = plain_inputs(batch)
    rows = chunk(len(batch), mesh.size())
    ids = batch.offsets[[0, *accumulate(rows)]].diff().tolist()
    return Inputs(
        context_ids=_shard(plain.context_ids, mesh, Shard(0, ids)),
        offsets=_shard(plain.offsets, mesh, Shard(0, rows)),
        num_args=_shard(plain.num_args, mesh, Shard(0, rows)),
        target=_shard(plain.target, mesh, REPLICATE),
    )


def _shard(x: Tensor, mesh: Mesh, placement: Placement) -> DTensor:
    """The DTensor of a vector that is equal on every rank."""
    local = x
    if isinstance(placement, Shard):
        local = x.split(list(placement.sizes))[mesh.ranks.index(collectives.rank())]  # type: ignore[arg-type]
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=x.shape)
