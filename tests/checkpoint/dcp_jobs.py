"""What torch.distributed.checkpoint saves and loads on ranks that are processes."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.checkpoint.states import bits

KINDS = (
    torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.complex64, torch.int64, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.bool,
)  # fmt: skip
SHARDED = {"sharded": 0, "wide": 1}
VALUES = {"step": 3, "optimizer": {"groups": [{"lr": 0.1, "betas": [0.9, 0.99]}], "name": "é"}}


def tensors() -> dict[str, Tensor]:
    """Of each dtype that can be stored, strided, empty and without dims."""
    random = torch.rand(6, 5, 4, generator=torch.Generator().manual_seed(0))
    found = {f"kind.{str(kind).removeprefix('torch.')}": (random[0] * 100).to(kind) for kind in KINDS}
    found |= {"plain": random[1], "dim order": random.permute(2, 0, 1), "column": random[0].t(), "one": random[:, :1]}
    return found | {"empty": torch.zeros(0, 3), "number": torch.tensor(2.5), "sharded": random[2], "wide": random}


def _model() -> dict[str, Tensor]:
    """`tensors`, of which two are sharded: dims of 5, unevenly on 3 ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = tensors()
    return found | {name: distribute_tensor(found[name], mesh, [Shard(dim)]) for name, dim in SHARDED.items()}


def save(folder: Path) -> None:
    """Save `tensors` and `VALUES`."""
    dcp_save({"model": _model(), **VALUES}, checkpoint_id=folder)


def load(folder: Path) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """What torch loads from there into tensors that hold other values: their bits, and the values."""
    model = _model()
    for x in model.values():
        (x.to_local() if isinstance(x, DTensor) else x).zero_()
    state: dict[str, Any] = {"step": 0, "optimizer": {"groups": [{"lr": 0.0, "betas": ()}], "name": ""}}
    state["model"] = model
    dcp_load(state, checkpoint_id=folder)
    full = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in state.pop("model").items()}
    return {name: bits(x) for name, x in full.items()}, state
