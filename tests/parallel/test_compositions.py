"""What a parallel module is used together with, on real processes, as the table of docs/data-parallel.md says."""

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from shardwise import DTensor, Replicate, Shard, distribute_tensor, gradient_buckets, init_device_mesh, shard_module
from shardwise import _collectives as collectives
from shardwise.embedding import SGD, EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, shard_embeddings
from shardwise.errors import ShardwiseError
from shardwise.parallel import ColwiseParallel, RowwiseParallel, local_parameters, parallelize_module
from shardwise.parallel import fully_shard as shardwise_fully_shard
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.parallel.one_process import full

pytestmark = pytest.mark.processes

PAGE = Path(__file__).parents[2] / "docs" / "data-parallel.md"
NONE, YES = "–", "yes"
LOST = "correct, but each tp rank stores the full parameter"
R, S0, S1 = Replicate(), Shard(0), Shard(1)
PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}
GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(8, 6, generator=GENERATOR), torch.randn(8, 3, generator=GENERATOR)
Step = Callable[[nn.Module, torch.optim.Optimizer, Tensor, Tensor], None]
Made = Callable[[nn.Module], torch.optim.Optimizer]


def mlp() -> nn.Sequential:
    """Ten hidden features, which four ranks share unevenly."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=0.1)


def usual(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    F.mse_loss(module(x), y).backward()
    optimizer.step()


def trained(module: nn.Module, x: Tensor, y: Tensor, made: Made = adam, step: Step = usual) -> nn.Module:
    optimizer = made(module)
    for _ in range(3):
        step(module, optimizer, x, y)
    return module


def right(module: nn.Module, x: Tensor, expected: nn.Module) -> None:
    with torch.no_grad():
        assert_close(full(module(x)), expected(X), rtol=1e-5, atol=1e-5)


# ---- DTensors on the whole mesh ------------------------------------------------------------------------------------


def on_mesh(mesh: Any, *first: Any) -> nn.Module:
    """Cut along the last axis, and along the one before it as `first` says."""
    data = list(first or [R])[-(len(mesh.shape) - 1) or 9 :]
    plan = {"0.weight": [*data, S0], "0.bias": [*data, S0], "2.weight": [*data, S1], "2.bias": [*data, R]}
    return shard_module(mlp(), plan, mesh=mesh)


def batch(x: Tensor, mesh: Any) -> Tensor:
    return distribute_tensor(x, mesh, [S0, R][-len(mesh.shape) :])


def by(made: Made = adam, step: Step = usual) -> Callable[[Any], str]:
    """Training by such steps equals one process."""

    def tried(mesh: Any) -> str:
        right(
            trained(on_mesh(mesh), batch(X, mesh), batch(Y, mesh), made, step),
            batch(X, mesh),
            trained(mlp(), X, Y, made, step),
        )
        return YES

    return tried


def optimizers(mesh: Any) -> str:
    for made in (
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
        lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, fused=True),
        lambda m: torch.optim.Adam(m.parameters(), lr=0.1, foreach=False),
        lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1),
    ):
        by(made)(mesh)
    return YES


def clipped(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    F.mse_loss(module(x), y).backward()
    nn.utils.clip_grad_norm_(module.parameters(), 0.1)
    optimizer.step()


def scaled(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """The second step meets an infinity in one element, so all ranks skip it."""
    scaler = optimizer.__dict__.setdefault("scaler", GradScaler("cpu", init_scale=8.0))
    optimizer.zero_grad()
    scaler.scale(F.mse_loss(module(x), y)).backward()
    if not hasattr(optimizer, "spoiled") and optimizer.state:
        optimizer.__dict__["spoiled"] = True
        gradient = module.get_parameter("0.weight").grad
        assert gradient is not None
        gradient[9, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()


def recomputed(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    F.mse_loss(checkpoint(module, x, use_reentrant=False), y).backward()
    optimizer.step()


def accumulated(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    for _ in range(3):
        (F.mse_loss(module(x), y) / 3).backward()
    optimizer.step()


def saved(mesh: Any) -> str:
    """Model and optimizer are loaded into other layouts, and training goes on as it would have."""
    x, y = batch(X, mesh), batch(Y, mesh)
    module = on_mesh(mesh)
    optimizer = adam(module)
    usual(module, optimizer, x, y)
    folder = collectives.gather_json(tempfile.mkdtemp(), tuple(range(4)))[0]
    save(dict(zip("mo", get_state_dict(module, optimizer), strict=True)), checkpoint_id=folder)
    other = shard_module(mlp(), {"**.weight": [S1] * len(mesh.shape)}, mesh=mesh)
    fresh = adam(other)
    model_state, optimizer_state = get_state_dict(other, fresh)
    load({"m": model_state, "o": optimizer_state}, checkpoint_id=folder)
    set_state_dict(other, fresh, model_state_dict=model_state, optim_state_dict=optimizer_state)
    for _ in range(2):
        usual(other, fresh, x, y)
    right(other, x, trained(mlp(), X, Y))
    return YES


def gathered_for_each_op(mesh: Any) -> str:
    """Parameters and optimizer states are sharded along the data axis by their layout alone."""
    if len(mesh.shape) == 1:
        return NONE
    module = on_mesh(mesh, S0)
    trained(module, batch(X, mesh), batch(Y, mesh))
    assert all(as_dtensor(p).to_local().numel() < p.numel() for p in module.parameters())
    right(module, batch(X, mesh), trained(mlp(), X, Y))
    return YES


# ---- wrappers of the data axis, around a module that is parallel on the other --------------------------------------


def around(
    wrap: Callable[[nn.Module, Any], nn.Module], made: Any = None, step: Step = usual, local: bool = False
) -> Callable[[Any], str]:
    def tried(mesh: Any) -> str:
        if len(mesh.shape) == 1:
            return NONE
        parallel = parallelize_module(mlp(), mesh["tp"], PLAN)
        module = wrap(local_parameters(parallel) if local else parallel, mesh["dp"])
        at, group = mesh["dp"].get_local_rank(), mesh["dp"].get_group()
        decomposed = adam if made is None else lambda m: made(m, group)
        trained(module, X.chunk(2)[at], Y.chunk(2)[at], decomposed, step)
        right(module, X, trained(mlp(), X, Y))
        sizes = [p.to_local().numel() for p in module.parameters() if hasattr(p, "to_local")]
        return LOST if wrap is fsdp2 and sum(sizes) > 40 else YES

    return tried


def ddp(module: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    return DistributedDataParallel(module, process_group=mesh.get_group(), **options)


def ddp_with_views(module: nn.Module, mesh: Any) -> nn.Module:
    return ddp(module, mesh, gradient_as_bucket_view=True)


def fsdp2(module: nn.Module, mesh: Any) -> nn.Module:
    """torch's, which warns if it undoes the tensor parallelism of DTensors."""
    assert isinstance(module, nn.Sequential)
    has_dtensors = any(isinstance(p, DTensor) for p in module.parameters())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for layer in (module[0], module[2], module):
            fully_shard(layer, mesh=mesh)
    assert any("import fully_shard from shardwise.parallel" in str(w.message) for w in found) == has_dtensors
    return module


def of_this_library(module: nn.Module, mesh: Any) -> nn.Module:
    assert isinstance(module, nn.Sequential)
    for layer in (module[0], module[2], module):
        shardwise_fully_shard(layer, mesh=mesh)
    return module


def without_sync(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    assert isinstance(module, DistributedDataParallel) or type(module) is nn.Sequential
    optimizer.zero_grad()
    with module.no_sync() if isinstance(module, DistributedDataParallel) else torch.enable_grad():
        (F.mse_loss(module(x), y) / 2).backward()
    (F.mse_loss(module(x), y) / 2).backward()
    optimizer.step()


def zero(module: nn.Module, group: Any) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of something in it when it is imported

    return ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam, process_group=group, lr=0.1)


ROWS: dict[str, Callable[[Any], str]] = {
    "optimizers of `torch.optim`, single, foreach, fused": optimizers,
    "`clip_grad_norm_`": by(step=clipped),
    "`GradScaler`, with a step that all ranks skip": by(step=scaled),
    "activation checkpointing": by(step=recomputed),
    "gradient accumulation": by(step=accumulated),
    "`torch.distributed.checkpoint`, into other layouts": saved,
    "parameters sharded along dp by their layout": gathered_for_each_op,
    "`DistributedDataParallel`": around(ddp),
    "`DistributedDataParallel(gradient_as_bucket_view=True)`": around(ddp_with_views),
    "`DistributedDataParallel.no_sync`": around(ddp, step=without_sync),
    "`shardwise.parallel.fully_shard`": around(of_this_library),
    "`fully_shard` (FSDP2) of `local_parameters(module)`": around(fsdp2, local=True),
    "`fully_shard` (FSDP2) of a module with DTensors": around(fsdp2),
    "`ZeroRedundancyOptimizer` of `local_parameters(module)`": around(ddp, made=zero, local=True),
    "`ZeroRedundancyOptimizer` of a module with DTensors": around(ddp, made=zero),
}
COLUMNS = {"tp": (4,), "dp × tp": (2, 2)}


def outcome(row: Callable[[Any], str], mesh: Any) -> str:
    try:
        return row(mesh)
    except ShardwiseError as error:
        return f"`{type(error).__name__}`: {str(error).partition('. ')[0]}"


def outcomes() -> list[list[str]]:
    """What becomes of every row in every column, with gradients that travel early; the same on all ranks."""
    torch.set_num_threads(1)
    collectives.check_values(numbers=True)  # which these programs pass
    gradient_buckets(100, overlap=True)
    meshes = [init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :]) for shape in COLUMNS.values()]
    found = [[outcome(row, mesh) for mesh in meshes] for row in ROWS.values()]
    gradient_buckets()
    dist.barrier()
    return found


def table(found: list[list[str]]) -> str:
    lines = [
        ["", *COLUMNS],
        ["---"] * (1 + len(COLUMNS)),
        *([name, *row] for name, row in zip(ROWS, found, strict=True)),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def test_the_documented_matrix_is_what_real_processes_do() -> None:
    found = world(4, real=True, timeout=120).run(outcomes)
    assert found[1:] == found[:1] * 3
    assert table(found[0]) in PAGE.read_text(encoding="utf-8"), table(found[0])
    words = [word for row in found[0] for word in row]
    assert words.count(YES) > 17
    assert words.count(NONE) == 9


def train_tables_beside_ddp(ranks: int) -> Tensor:
    """A table and the dense layer over it after three steps; DDP averages gradients, tables add them."""
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    config = EmbeddingBagConfig(10, 8, "users", feature_names=["user"])
    collection = EmbeddingBagCollection([config])
    sharded = shard_embeddings(collection, {"users": S0}, mesh, SGD(lr=0.1 / ranks))
    dense = nn.Linear(8, 1)
    model = DistributedDataParallel(dense) if ranks > 1 else dense
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.arange(8).chunk(ranks)[mesh.get_local_rank()]
    features = KeyedJaggedTensor(["user"], ids, lengths=torch.ones_like(ids))
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(model(sharded(features).values()).squeeze(1), (ids % 3).float()).backward()
        optimizer.step()
    rows = as_dtensor(sharded.state_dict()["embedding_bags.users.weight"]).full_tensor()
    return torch.cat([rows.flatten(), dense.weight.detach().flatten()])


def test_tables_beside_dense_layers_under_ddp_equal_one_process_if_their_rate_is_divided_by_the_ranks() -> None:
    (expected,) = world(1).run(train_tables_beside_ddp, 1)
    for got in world(2, real=True).run(train_tables_beside_ddp, 2):
        assert_close(got, expected)
