"""Local kernels of collections, behind one interface, `Kernels`.

`Kernels` is plain torch and runs on every device. With the extra `numba`, `CompiledKernels` replaces parts of it by
compiled loops on CPUs. Results are the same up to rounding, which tests check.
"""

import importlib.util

import torch

from shardwise.embedding.kernels.plain import Allocate, ByRow, Kernels, RowIndex, RowUses, RunIndex, Runs, Stack

__all__ = ["Allocate", "ByRow", "Kernels", "RowIndex", "RowUses", "RunIndex", "Runs", "Stack", "fastest_kernels"]


def fastest_kernels(device: torch.device) -> Kernels:
    """Those that were measured fastest (docs/performance.md) among what is installed.

    Compiled loops use one thread. With more, those of torch are taken, which use all.
    """
    is_watched = (
        torch._C._len_torch_dispatch_stack() > 0
    )  # a dispatch mode has to see the ops, such as the one of `simulate`
    if device.type != "cpu" or torch.get_num_threads() > 1 or is_watched:
        return Kernels()
    if importlib.util.find_spec("numba") is not None:
        from shardwise.embedding.kernels.compiled import CompiledKernels

        return CompiledKernels()
    return Kernels()
