"""The same cases on torch.distributed.tensor, for the table beside ours, in the layouts that it promises.

Its ranks are threads of torch's own "threaded" process group, as in torch's tests of it. Random ops are left out:
it promises their numbers on other devices only. A rank that raises wakes the others here; on real ranks they would
wait, so an error on some ranks only is a hang there.
"""

import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed import tensor as peer
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup, _install_threaded_pg

from shardwise._layout import Layout, Partial, Placement, Shard, contiguous_strides
from shardwise.testing.failures import DeadlockError
from shardwise.testing.local_shards import SEED, local_tensor, partial_index, partial_values
from tools.op_judge import Layouts, Observed, OpJudge, Outcome, Sample, Verdict, observe

WOKEN = "Test termination event occurs"  # what a rank says that waited for one that raised

torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
_install_threaded_pg()


class PeerJudge(OpJudge):
    """Judges a call of torch.distributed.tensor."""

    def verdict(self, layouts: Layouts, size: int = 4) -> Verdict:
        if self.is_random:
            return Verdict(Outcome.RIGHT, "random: not compared")
        return super().verdict(layouts, size)

    def on_ranks(self, layouts: Layouts, size: int) -> Sequence[Observed]:
        found: list[Observed] = [Observed(error=DeadlockError("never came to an end")) for _ in range(size)]
        ProcessLocalGroup.reset()
        store = HashStore()
        backward = self.plain.grads is not None
        threads = [
            threading.Thread(target=_live, args=(rank, size, store, found, self.sample, layouts, backward), daemon=True)
            for rank in range(size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(self.timeout)
        if any(thread.is_alive() for thread in threads):
            raise DeadlockError("some ranks wait for ever")
        return found


def _live(
    rank: int, size: int, store: Any, found: list[Observed], sample: Sample, layouts: Layouts, backward: bool
) -> None:
    dist.init_process_group("threaded", rank=rank, world_size=size, store=store)
    try:
        torch.manual_seed(SEED)
        pairs = zip(sample.tensors(), layouts, strict=True)
        leaves = [sample.leaf(_distributed(x.detach(), layout, rank), i) for i, (x, layout) in enumerate(pairs)]
        found[rank] = observe(sample, leaves, backward)
        if found[rank].error is not None:
            raise found[rank].error  # type: ignore[misc]
    except Exception as error:  # noqa: BLE001 - any error is an outcome
        found[rank].error = DeadlockError(WOKEN) if WOKEN in str(error) else error
        _wake(error)
    finally:
        dist.destroy_process_group()


def _wake(error: Exception) -> None:
    """Let ranks that wait in a collective give up."""
    while True:
        try:
            ProcessLocalGroup.exception_handle(error)
            return
        except RuntimeError:  # another rank changed what is iterated over
            continue


def _distributed(x: Tensor, layout: Layout | None, rank: int) -> Tensor:
    if layout is None:
        return x.clone()
    mesh = DeviceMesh("cpu", torch.arange(layout.mesh.size()).view(layout.mesh.shape))
    return peer.DTensor.from_local(
        local_tensor(partial_values(x, layout)[partial_index(layout, rank)], layout, rank),
        mesh,
        [_as_theirs(p) for p in layout.placements],
        run_check=False,
        shape=torch.Size(layout.shape),
        stride=contiguous_strides(layout.shape),
    )


def _as_theirs(placement: Placement) -> Any:
    if isinstance(placement, Shard):
        return peer.Shard(placement.dim)
    return peer.Partial() if isinstance(placement, Partial) else peer.Replicate()
