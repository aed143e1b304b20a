"""A process group that takes what NCCL takes, for tests where there is no GPU; gloo sends it."""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend

DEVICE = os.environ.get("SHARDWISE_TEST_DEVICE", "fake")  # see device.cpp
# Of torch's table of NCCL's dtypes.
MOVED = {torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2}
ADDED = {torch.int8, torch.uint8, torch.int32, torch.int64}
FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


class RefusedError(RuntimeError):
    pass


class Copied(dist.Work):
    """A collective of gloo, whose results are copied to the device when a rank waits for it."""

    def __init__(self, work: dist.Work, results: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.work, self.results = work, results

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        assert self.work.wait()
        for on_device, received in self.results:
            on_device.copy_(received)
        self.results = ()
        return True

    def is_completed(self) -> bool:
        return self.work.is_completed()


class NcclRules(dist.ProcessGroup):
    """Refuses CPU tensors, dtypes that NCCL lacks, tensors that are not contiguous, and splits that do not fit."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch does not declare this overload
        self.gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._register_backend(torch.device(DEVICE), dist.ProcessGroup.BackendType.CUSTOM, self.gloo)

    def all_to_all_single(self, out: Tensor, send: Tensor, received: list[int], sent: list[int], *_: Any) -> dist.Work:
        for x, sizes in ((out, received), (send, sent)):
            _check(x, MOVED | FLOATS)
            if sizes and (len(sizes) != self.size() or sum(sizes) != len(x) or min(sizes) < 0):
                raise RefusedError(f"split sizes {sizes} of {tuple(x.shape)}")
        return self._run(lambda o, x: self.gloo.alltoall_base(o, x, received, sent), out, send)

    def all_gather_single(self, out: Tensor, x: Tensor, *_: Any) -> dist.Work:
        _check(out, MOVED | FLOATS)
        _check(x, MOVED | FLOATS)
        return self._run(self.gloo._allgather_base, out, x)

    def reduce_scatter_single(self, out: Tensor, x: Tensor, options: Any) -> dist.Work:
        _check(out, ADDED | FLOATS)
        _check(x, ADDED | FLOATS)
        return self._run(lambda o, x: self.gloo._reduce_scatter_base(o, x, options), out, x)

    def allreduce(self, *args: Any, **_: Any) -> dist.Work:
        (x,), options = args
        _check(x, ADDED | FLOATS)
        return self._run(lambda x: self.gloo.allreduce([x], options), x)

    def broadcast(self, *args: Any, **_: Any) -> dist.Work:
        (x,), options = args
        _check(x, MOVED | FLOATS)
        return self._run(lambda x: self.gloo.broadcast([x], options), x)

    def send(self, tensors: list[Tensor], to: int, tag: int) -> dist.Work:
        _check(tensors[0], MOVED | FLOATS)
        return self._run(lambda x: self.gloo.send([x], to, tag), tensors[0])

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        _check(tensors[0], MOVED | FLOATS)
        return self._run(lambda x: self.gloo.recv([x], source, tag), tensors[0])

    def _run(self, start: Callable[..., dist.Work], first: Tensor, *others: Tensor) -> dist.Work:
        """Run a collective that writes its first tensor."""
        on_cpu = first.cpu()
        return Copied(start(on_cpu, *(x.cpu() for x in others)), [(first, on_cpu)])


def _check(x: Tensor, dtypes: set[torch.dtype]) -> None:
    if x.device.type != DEVICE:
        raise RefusedError(f"a tensor on {x.device}")
    if x.dtype not in dtypes:
        raise RefusedError(f"a tensor of {x.dtype}")
    if not x.is_contiguous():
        raise RefusedError(f"a tensor of strides {x.stride()}")


SEEDS: list[int] = []  # that the generator of the device was given


def register(library: Path) -> None:
    """Make the device and the backend known to torch, in this process."""
    rename_privateuse1_backend(DEVICE)
    torch.ops.load_library(library)
    module = SimpleNamespace(
        is_initialized=lambda: True,
        is_available=lambda: True,
        current_device=lambda: 0,
        device_count=lambda: 1,
        _is_in_bad_fork=lambda: False,
        manual_seed=lambda seed: None,
        manual_seed_all=SEEDS.append,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    )
    torch._register_device_module(DEVICE, module)
    generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend("nccl_rules", NcclRules, devices=[DEVICE])
