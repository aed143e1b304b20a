"""A batch that every rank knows, laid out so that each rank works on its own rows."""

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


def whole(batch: Batch) -> Inputs:
    """The batch for one process."""
    return Inputs(batch.context_ids, batch.offsets[:-1], batch.num_args.clamp(max=MAX_ARGS), batch.target)


def shared_out(batch: Batch, mesh: Mesh) -> Inputs:
    """The batch over a mesh of one axis: rows are cut, as `torch.chunk` cuts them, and ids with their rows.

    Nothing is sent, because every rank makes the same batch. Offsets count from the first id of the whole
    batch. Targets are replicated: scores may arrive cut by rows or by classes, and both find theirs here.
    """
    everything = whole(batch)
    rows = chunk(len(batch), mesh.size())
    ids = batch.offsets[[0, *accumulate(rows)]].diff().tolist()
    return Inputs(
        context_ids=_part(everything.context_ids, mesh, Shard(0, ids)),
        offsets=_part(everything.offsets, mesh, Shard(0, rows)),
        num_args=_part(everything.num_args, mesh, Shard(0, rows)),
        target=_part(everything.target, mesh, REPLICATE),
    )


def _part(x: Tensor, mesh: Mesh, placement: Placement) -> DTensor:
    """A vector that this rank knows, of which it keeps what `placement` gives it."""
    local = x
    if isinstance(placement, Shard):
        local = x.split(list(placement.sizes))[mesh.ranks.index(collectives.rank())]  # type: ignore[arg-type]
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=x.shape)
