"""Updates by fbgemm's table-batched kernels, on CPUs: the extra `fbgemm`.

Their backward sorts ids, sums gradients and updates rows in one call of an operator. Forward is `torch.embedding_bag`,
which calls the same code of fbgemm inside torch.
"""

import importlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardwise.embedding.kernels.plain import Kernels, Stack, plain_kind

SUM_POOLING = 0  # PoolingMode.SUM
FLOAT32 = 0  # SparseType.FP32


class FbgemmKernels(Kernels):
    """Faster updates by SGD, Adagrad and RowWiseAdagrad of float32 tables.

    Raises:
        ImportError: fbgemm is not installed, or for another version of torch.
    """

    name = "fbgemm"

    def __init__(self) -> None:
        importlib.import_module("fbgemm_gpu")  # registers the operators

    def update(
        self,
        optimizer: object,
        stack: Stack,
        rows: Tensor,
        offsets: Tensor,
        gradient: Tensor,
        scale: Tensor | None,
    ) -> bool:
        weight, kind = stack.weight, plain_kind(optimizer)
        if kind not in _OPERATORS or weight.dtype != torch.float32 or weight.device.type != "cpu":
            return False
        if not rows.numel():
            return True
        num_rows, columns = weight.shape
        zero, on_host = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
        table = (weight.view(-1), on_host, zero, torch.tensor([0, columns], dtype=torch.int32), columns)
        sizes = (torch.tensor([0, num_rows]), max(1, (num_rows - 1).bit_length()))
        weights = torch.ones(rows.numel()) if scale is None else scale.float()  # None is no tensor of the operator
        batch = (rows, offsets, SUM_POOLING, weights, False)
        states = [x for state in stack.states.values() for x in (state.view(-1), on_host, zero)]
        rate = torch.tensor(vars(optimizer)["lr"])
        given = (gradient.contiguous(), *table, *sizes, *batch, *states, rate)
        _OPERATORS[kind](given, vars(optimizer))
        return True


Options = Mapping[str, float]


def _sgd(given: Sequence[object], _options: Options) -> None:
    torch.ops.fbgemm.split_embedding_backward_codegen_sgd_cpu(*given, FLOAT32)


def _adagrad(given: Sequence[object], options: Options) -> None:
    torch.ops.fbgemm.split_embedding_backward_codegen_adagrad_cpu(*given, options["eps"], FLOAT32)


def _row_wise_adagrad(given: Sequence[object], options: Options) -> None:
    no_decay, decay_mode, no_max_norm = 0.0, 0, 0.0
    torch.ops.fbgemm.split_embedding_backward_codegen_rowwise_adagrad_cpu(
        *given, options["eps"], no_decay, decay_mode, no_max_norm, FLOAT32
    )


_OPERATORS = {"SGD": _sgd, "Adagrad": _adagrad, "RowWiseAdagrad": _row_wise_adagrad}
