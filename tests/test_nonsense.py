"""Nonsense for any argument of any public function: an error of ours, the same on every rank, or it works."""

from collections.abc import Callable, Iterator
from contextlib import _GeneratorContextManager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.tensor as theirs
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import shardwise as sw
from shardwise import (
    Boxes,
    DTensor,
    Layout,
    Mesh,
    OnRanks,
    Partial,
    Replicate,
    Shard,
    checkpoint,
    collectives,
    debug,
    distribute_tensor,
    embedding,
    experimental,
    models,
    parallel,
    pictures,
    simulation,
    testing,
)
from shardwise import sharded_tensor as st
from shardwise.errors import LaunchError, ShardwiseError
from shardwise.testing import world

RANKS = 2
MESH = Mesh((RANKS,))
NAMESPACES = (sw, embedding, parallel, st, testing, checkpoint, debug, experimental, pictures, models, simulation)
COLLECTIVES = ("as_mesh", "check_ranks", "init_device_mesh")  # what users call there

# ---- nonsense -----------------------------------------------------------------------------------------------------


@cache
def torch_mesh() -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(RANKS), _init_backend=False, _rank=0)


@cache
def torch_dtensor() -> theirs.DTensor:
    meta = TensorMeta(torch.Size((4, 3)), (3, 1), torch.float32)
    return theirs.DTensor(torch.zeros(2, 3), DTensorSpec(torch_mesh(), (theirs.Shard(0),), meta), requires_grad=False)


@cache
def foreign_dtensor() -> DTensor:
    return world(3).run(lambda: distribute_tensor(torch.arange(12.0).view(4, 3), Mesh((3,)), [Shard(0)]))[2]


NONSENSE: dict[str, Callable[[], object]] = {
    "None": lambda: None,
    "text": lambda: "nonsense",
    "float": lambda: 2.5,
    "nan": lambda: float("nan"),
    "bool": lambda: True,
    "negative": lambda: -1,
    "huge": lambda: 2**70,
    "empty list": list,
    "empty dict": dict,
    "nested": lambda: [[1.5], [[2]]],
    "wrong names": lambda: {"nonsense": 1},
    "numbered": lambda: {0: "nonsense"},
    "object": object,
    "class": lambda: Shard,
    "placement": lambda: Shard(0),
    "distant dim": lambda: [Shard(7)],
    "two placements": lambda: [Replicate(), Replicate()],
    "torch's Shard": lambda: theirs.Shard(0),
    "torch's Replicate": theirs.Replicate,
    "torch's Partial": lambda: [theirs.Partial("sum")],
    "torch's _StridedShard": lambda: theirs.placement_types._StridedShard(0, split_factor=2),
    "torch's DeviceMesh": torch_mesh,
    "torch's DTensor": torch_dtensor,
    "a mesh of other ranks": lambda: Mesh((3,)),
    "meta tensor": lambda: torch.zeros(4, 3, device="meta"),
    "sparse tensor": lambda: torch.eye(4, 3).to_sparse(),
    "CSR tensor": lambda: torch.eye(4, 3).to_sparse_csr(),
    "quantized tensor": lambda: torch.quantize_per_tensor(torch.zeros(4, 3), 0.1, 0, torch.qint8),
    "a DTensor of another world": foreign_dtensor,
}

# ---- public functions, each with arguments that it takes ------------------------------------------------------


def table() -> DTensor:
    return distribute_tensor(torch.arange(12.0).view(4, 3), MESH, [Shard(0)])


def applied(
    style: Callable[..., parallel.ParallelStyle], module: Callable[[], nn.Module] = lambda: nn.Linear(4, 4)
) -> Callable[..., object]:
    """`style(**kwargs)`, applied to a module that then runs."""

    def run(**kwargs: Any) -> object:
        model = nn.Sequential(module())
        parallel.parallelize_module(model, MESH, {"0": style(**kwargs)})
        return model(torch.ones(2, 4))

    return run


def bag_config() -> embedding.EmbeddingBagConfig:
    return embedding.EmbeddingBagConfig(4, 3, "t", feature_names=["f"])


def config_arguments(pooling: bool) -> "Arguments":
    bags: Arguments = {"pooling": embedding.PoolingType.SUM} if pooling else {}
    return bags | {
        "num_embeddings": 4,
        "embedding_dim": 3,
        "name": "t",
        "data_type": torch.float32,
        "feature_names": ["f"],
        "weight_init_max": None,
        "weight_init_min": None,
        "init_fn": None,
        "padding_idx": None,
        "max_norm": None,
        "bad_ids": "error",
    }


def spec() -> st.ChunkShardingSpec:
    return st.ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])


def shard_metadata() -> st.ShardMetadata:
    return st.ShardMetadata([2 * collectives.rank(), 0], [2, 3], f"rank:{collectives.rank()}/cpu")


def with_arguments(
    fn: Callable[..., object], arguments: Callable[[], "Arguments"]
) -> "tuple[Callable[..., object], Arguments]":
    return fn, arguments()


Arguments = dict[str, object]  # by name; a name with a star is passed by position
CALLS: dict[str, Callable[[], tuple[Callable[..., object], Arguments]]] = {
    "shardwise.Boxes": lambda: (Boxes, {"boxes": [[((0, 0), (2, 3))], [((2, 0), (2, 3))]]}),
    "shardwise.Layout": lambda: (
        Layout,
        {"*mesh": MESH, "*placements": [Shard(0)], "*shape": (4, 3), "shard_order": [0]},
    ),
    "shardwise.LocalShardsWrapper": lambda: (
        sw.LocalShardsWrapper,
        {"local_shards": [torch.ones(2, 3)], "local_offsets": [(2 * collectives.rank(), 0)]},
    ),
    "shardwise.Mesh": lambda: (Mesh, {"shape": (2,), "ranks": (1, 0), "names": ("tp",), "device_type": "cpu"}),
    "shardwise.OnRanks": lambda: (OnRanks, {"position": 0}),
    "shardwise.Partial": lambda: (Partial, {"reduce_op": "sum"}),
    "shardwise.Replicate": lambda: (Replicate, {}),
    "shardwise.Shard": lambda: (Shard, {"dim": 0, "sizes": [3, 1]}),
    "shardwise.capture": lambda: (sw.capture, {"function": torch.exp, "backend": None, "limit": 3}),
    "shardwise.count_comms": lambda: (sw.count_comms, {}),
    "shardwise.embedding.SGD": lambda: (
        embedding.SGD,
        {"lr": 0.1, "weight_decay": 0.0, "max_gradient": 1.0, "stochastic_rounding": False},
    ),
    "shardwise.embedding.Adagrad": lambda: (embedding.Adagrad, {"lr": 0.1, "eps": 1e-10}),
    "shardwise.embedding.RowWiseAdagrad": lambda: (embedding.RowWiseAdagrad, {"lr": 0.1, "eps": 1e-8}),
    "shardwise.embedding.Adam": lambda: (embedding.Adam, {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}),
    "shardwise.embedding.RowWiseAdam": lambda: (embedding.RowWiseAdam, {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}),
    "shardwise.embedding.Lamb": lambda: (embedding.Lamb, {"lr": 0.1, "decoupled_weight_decay": False}),
    "shardwise.embedding.RowWiseLamb": lambda: (embedding.RowWiseLamb, {"lr": 0.1, "max_gradient_norm": 1.0}),
    "shardwise.embedding.EmbeddingBagConfig": lambda: (embedding.EmbeddingBagConfig, config_arguments(pooling=True)),
    "shardwise.embedding.EmbeddingConfig": lambda: (embedding.EmbeddingConfig, config_arguments(pooling=False)),
    "shardwise.embedding.EmbeddingBagCollection": lambda: (
        embedding.EmbeddingBagCollection,
        {"tables": [bag_config()], "is_weighted": False, "device": "cpu"},
    ),
    "shardwise.embedding.EmbeddingCollection": lambda: (
        embedding.EmbeddingCollection,
        {"tables": [embedding.EmbeddingConfig(4, 3, "t", feature_names=["f"])], "device": "cpu"},
    ),
    "shardwise.embedding.FeatureProcessedEmbeddingBagCollection": lambda: (
        embedding.FeatureProcessedEmbeddingBagCollection,
        {
            "embedding_bag_collection": embedding.EmbeddingBagCollection([bag_config()], is_weighted=True),
            "feature_processors": nn.Identity(),
        },
    ),
    "shardwise.embedding.PositionWeightedModuleCollection": lambda: (
        embedding.PositionWeightedModuleCollection,
        {"max_feature_lengths": {"f": 2}, "device": "cpu"},
    ),
    "shardwise.embedding.JaggedTensor": lambda: (
        embedding.JaggedTensor,
        {"values": torch.ones(2), "weights": None, "lengths": torch.tensor([2, 0]), "offsets": None},
    ),
    "shardwise.embedding.KeyedJaggedTensor": lambda: (
        embedding.KeyedJaggedTensor,
        {
            "keys": ["f"],
            "values": torch.tensor([1, 2]),
            "weights": None,
            "lengths": torch.tensor([2, 0]),
            "offsets": None,
            "stride_per_key": None,
        },
    ),
    "shardwise.embedding.KeyedTensor": lambda: (
        embedding.KeyedTensor,
        {"keys": ["f"], "length_per_key": [3], "values": torch.ones(2, 3), "stride_per_key": None},
    ),
    "shardwise.embedding.balanced_rows": lambda: (
        embedding.balanced_rows,
        {"counts": torch.tensor([3, 0, 1, 2]), "ranks": 2, "max_rows": None},
    ),
    "shardwise.embedding.count_rows": lambda: (embedding.count_rows, {"config": bag_config(), "batches": []}),
    "shardwise.embedding.from_lengths": lambda: (embedding.from_lengths, {"lengths": torch.tensor([2, 0])}),
    "shardwise.embedding.prefetch": lambda: (
        embedding.prefetch,
        {
            "loader": [],
            "model": embedding.shard_embeddings(embedding.EmbeddingBagCollection([bag_config()]), {}, MESH),
            "ids_of": None,
            "depth": 1,
        },
    ),
    "shardwise.embedding.shard_embeddings": lambda: (
        embedding.shard_embeddings,
        {
            "collection": embedding.EmbeddingBagCollection([bag_config()]),
            "plan": {"t": [Shard(0)]},
            "mesh": MESH,
            "optimizer": None,
            "forward_dtype": torch.float32,
            "backward_dtype": torch.float32,
        },
    ),
    "shardwise.distribute_module": lambda: (
        sw.distribute_module,
        {"module": nn.Linear(3, 3), "device_mesh": MESH, "partition_fn": None, "input_fn": None, "output_fn": None},
    ),
    "shardwise.distribute_tensor": lambda: (
        distribute_tensor,
        {
            "tensor": torch.ones(4, 3),
            "device_mesh": MESH,
            "placements": [Shard(0)],
            "src_data_rank": 0,
            "shard_order": [0],
        },
    ),
    "shardwise.embedding_bags": lambda: (
        sw.embedding_bags,
        {
            "inputs": [torch.tensor([0, 1, 2])],
            "weights": [table()],
            "offsets": [torch.tensor([0, 2])],
            "mode": "sum",
            "sparse": False,
        },
    ),
    **{
        f"shardwise.{f.__name__}": partial(with_arguments, f, lambda: {"*size": (4, 3), **FACTORY})
        for f in (sw.empty, sw.ones, sw.zeros, sw.rand, sw.randn)
    },
    "shardwise.full": lambda: (sw.full, {"size": (4, 3), "fill_value": 1.5, **FACTORY}),
    "shardwise.linspace": lambda: (sw.linspace, {"start": 0.0, "end": 1.0, "steps": 5, **FACTORY}),
    "shardwise.logspace": lambda: (sw.logspace, {"start": 0.0, "end": 1.0, "steps": 5, "base": 2.0, **FACTORY}),
    "shardwise.gradient_buckets": lambda: (restoring_buckets, {"max_bytes": 100, "overlap": None}),
    "shardwise.init_device_mesh": lambda: (
        sw.init_device_mesh,
        {"device_type": "cpu", "mesh_shape": (2,), "mesh_dim_names": ("tp",), "timeout_seconds": 1.0},
    ),
    "shardwise.launch": lambda: (
        launched_if_it_could_be_sent,
        {"*fn": an_op, "nproc": 1, "timeout_seconds": 1.0, "grace_seconds": 1.0},
    ),
    "shardwise.no_implicit_comm": lambda: (sw.no_implicit_comm, {"max_bytes": 0, "gradients": False}),
    "shardwise.parallelize_module": lambda: (
        sw.parallelize_module,
        {
            "module": nn.Sequential(nn.Linear(4, 4)),
            "device_mesh": MESH,
            "parallelize_plan": {"0": parallel.ColwiseParallel()},
            "src_data_rank": 0,
        },
    ),
    "parallel.plan_from_transformers": lambda: (parallel.plan_from_transformers, {"model": planned()}),
    "parallel.fully_shard": lambda: (
        parallel.fully_shard,
        {
            "module": nn.Linear(4, 4),
            "mesh": MESH,
            "reshard_after_forward": None,
            "shard_placement_fn": None,
            "mp_policy": parallel.MixedPrecisionPolicy(),
            "offload_policy": parallel.OffloadPolicy(),
            "ignored_params": (),
            "prefetch": 1,
            "src_data_rank": 0,
        },
    ),
    "parallel.CPUOffloadPolicy": lambda: (parallel.CPUOffloadPolicy, {"pin_memory": True}),
    "parallel.OffloadPolicy": lambda: (parallel.OffloadPolicy, {}),
    "parallel.MixedPrecisionPolicy": lambda: (
        parallel.MixedPrecisionPolicy,
        {"param_dtype": torch.bfloat16, "reduce_dtype": None, "output_dtype": None, "cast_forward_inputs": True},
    ),
    "shardwise.picture": lambda: (sw.picture, {"x": table(), "header": "table", "itemsize": 4}),
    "shardwise.rank": lambda: (sw.rank, {}),
    "shardwise.shard_module": lambda: (
        sw.shard_module,
        {"module": nn.Linear(4, 4), "plan": {"weight": Shard(0)}, "mesh": MESH, "src_rank": 0},
    ),
    "an entry of shardwise.shard_module": lambda: (
        lambda entry: sw.shard_module(nn.Linear(4, 4), {"weight": entry}, mesh=MESH),
        {"entry": [Shard(0)]},
    ),
    "shardwise.sharding_table": lambda: (
        sw.sharding_table,
        {"module": nn.Linear(4, 4), "plan": {"weight": Shard(0)}, "mesh": MESH},
    ),
    "shardwise.strict": lambda: (sw.strict, {"enabled": True}),
    "shardwise.world_size": lambda: (sw.world_size, {}),
    "shardwise.DTensor.from_local": lambda: (
        DTensor.from_local,
        {
            "local_tensor": torch.ones(2, 3),
            "device_mesh": MESH,
            "placements": [Shard(0)],
            "run_check": True,
            "shape": (4, 3),
            "stride": (3, 1),
            "grad_placements": None,
        },
    ),
    "shardwise.DTensor.to_local": lambda: (table().to_local, {"grad_placements": [Shard(0)]}),
    "shardwise.DTensor.full_tensor": lambda: (table().full_tensor, {"grad_placements": [Replicate()]}),
    "shardwise.DTensor.redistribute": lambda: (
        table().redistribute,
        {
            "device_mesh": MESH,
            "placements": [Replicate()],
            "async_op": False,
            "forward_dtype": torch.float64,
            "backward_dtype": torch.float32,
            "shard_order": [0],
        },
    ),
    "shardwise.DTensor.reshard": lambda: (table().reshard, {"resharding_spec": spec(), "process_group": None}),
    "shardwise.DTensor.gather": lambda: (table().gather, {"dst": 0, "out": torch.empty(4, 3), "dtype": torch.float32}),
    "shardwise.DTensor.set_": lambda: (table().set_, {"*source": table()}),
    "beside a DTensor": lambda: (lambda other: table() + other, {"other": table()}),
    "indexed by": lambda: (lambda index: table()[index], {"index": 1}),
    "shardwise.parallel.input_reshard": lambda: (
        parallel.input_reshard,
        {"module": nn.Linear(4, 4), "tp_device_mesh": MESH, "input_reshard_dim": 0},
    ),
    "shardwise.parallel.BoundaryRedistribution": lambda: (
        parallel.BoundaryRedistribution(MESH, 0, (Shard(0),), (Replicate(),), True, "x"),
        {"x": torch.ones(2, 4)},
    ),
    "shardwise.parallel.ColwiseParallel": lambda: (
        applied(parallel.ColwiseParallel),
        {"input_layouts": Shard(0), "output_layouts": Shard(-1), "use_local_output": True, "unit": 1, "sizes": (3, 1)},
    ),
    "shardwise.parallel.RowwiseParallel": lambda: (
        applied(parallel.RowwiseParallel),
        {"input_layouts": Shard(0), "output_layouts": Shard(0), "use_local_output": True, "unit": 1, "sizes": (3, 1)},
    ),
    "shardwise.parallel.SequenceParallel": lambda: (
        applied(parallel.SequenceParallel, lambda: nn.LayerNorm(4)),
        {"sequence_dim": 0, "use_local_output": True},
    ),
    "shardwise.parallel.PrepareModuleInput": lambda: (
        applied(parallel.PrepareModuleInput),
        {
            "input_layouts": (Shard(0),),
            "desired_input_layouts": (Shard(0),),
            "input_kwarg_layouts": None,
            "desired_input_kwarg_layouts": None,
            "use_local_output": True,
        },
    ),
    "shardwise.parallel.PrepareModuleOutput": lambda: (
        applied(parallel.PrepareModuleOutput),
        {"output_layouts": Shard(0), "desired_output_layouts": Shard(0), "use_local_output": True},
    ),
    "shardwise.parallel.PrepareModuleInputOutput": lambda: (
        applied(parallel.PrepareModuleInputOutput),
        {
            "input_layouts": (Shard(0),),
            "desired_input_layouts": (Shard(0),),
            "output_layouts": Shard(0),
            "desired_output_layouts": Shard(0),
            "use_local_input": True,
            "use_local_output": True,
        },
    ),
    "shardwise.parallel.ExpertParallel": lambda: (
        parallel.ExpertParallel,
        {"input_layouts": Shard(0), "output_layouts": Shard(0), "use_local_output": True},
    ),
    "shardwise.parallel.FirstInput": lambda: (parallel.FirstInput, {"transform": torch.exp, "name": "x"}),
    "shardwise.parallel.ModuleContext": lambda: (parallel.ModuleContext, {"path": "a", "mesh": MESH, "axis": 0}),
    "shardwise.parallel.first_input": lambda: (
        parallel.first_input,
        {"module": nn.Linear(4, 4), "transform": torch.exp},
    ),
    "shardwise.parallel.local_parameters": lambda: (parallel.local_parameters, {"module": nn.Linear(4, 4)}),
    "shardwise.parallel.loss_parallel": lambda: (parallel.loss_parallel, {}),
    "shardwise.parallel.mix_experts": lambda: (
        parallel.mix_experts,
        {
            "chosen": torch.tensor([[0], [1]]),
            "w1": torch.ones(2, 4, 3),
            "w2": torch.ones(2, 3, 4),
            "tokens": torch.ones(2, 3),
            "weights": torch.ones(2, 1),
        },
    ),
    "shardwise.sharded_tensor.ChunkShardingSpec": lambda: (
        st.ChunkShardingSpec,
        {"dim": 0, "placements": ["rank:0/cpu", "rank:1/cpu"]},
    ),
    "shardwise.sharded_tensor.DevicePlacementSpec": lambda: (st.DevicePlacementSpec, {"device": "rank:0/cpu"}),
    "shardwise.sharded_tensor.EnumerableShardingSpec": lambda: (
        st.EnumerableShardingSpec,
        {"shards": [st.ShardMetadata([0], [4], "rank:0/cpu")]},
    ),
    "shardwise.sharded_tensor.LocalShard": lambda: (
        st.LocalShard,
        {"tensor": torch.ones(2, 3), "metadata": st.ShardMetadata([0, 0], [2, 3])},
    ),
    "shardwise.sharded_tensor.RemoteDevice": lambda: (st.RemoteDevice, {"of_rank": 0, "of_device": "cpu"}),
    "shardwise.sharded_tensor.ShardMetadata": lambda: (
        st.ShardMetadata,
        {"shard_offsets": [0, 0], "shard_sizes": [2, 3], "placement": "rank:0/cpu"},
    ),
    "shardwise.sharded_tensor.ShardedTensorMetadata": lambda: (
        st.ShardedTensorMetadata,
        {"shards_metadata": [shard_metadata()], "size": (4, 3), "tensor_properties": st.TensorProperties()},
    ),
    "shardwise.sharded_tensor.ShardingPlan": lambda: (
        lambda **plans: st.shard_module(nn.Sequential(nn.Linear(4, 4)), st.ShardingPlan(**plans)),
        {"plan": {"0.weight": spec()}, "output_plan": None, "return_local_tensor": None},
    ),
    "shardwise.sharded_tensor.TensorProperties": lambda: (
        st.TensorProperties,
        {
            "dtype": torch.float32,
            "layout": torch.strided,
            "requires_grad": False,
            "memory_format": torch.contiguous_format,
            "pin_memory": False,
        },
    ),
    "shardwise.sharded_tensor.collect_local_shard": lambda: (st.collect_local_shard, {"module": nn.Linear(4, 4)}),
    "shardwise.sharded_tensor.custom_sharding_spec_op": lambda: (
        st.custom_sharding_spec_op,
        {"sharding_spec_class": st.ChunkShardingSpec, "func": torch.exp},
    ),
    **{
        f"shardwise.sharded_tensor.{f.__name__}": partial(
            with_arguments, f, lambda: {"*sharding_spec": spec()} | SPEC_FACTORY
        )
        for f in (st.empty, st.ones, st.zeros, st.rand, st.randn)
    },
    "shardwise.sharded_tensor.full": lambda: (st.full, {"*sharding_spec": spec(), "*size": (4, 3), "fill_value": 1.5}),
    "shardwise.sharded_tensor.init_from_local_shards": lambda: (
        st.init_from_local_shards,
        {
            "*local_shards": [st.LocalShard(torch.ones(2, 3), shard_metadata())],
            "*global_size": (4, 3),
            "process_group": None,
            "init_rrefs": False,
        },
    ),
    "shardwise.sharded_tensor.layout_of_shards": lambda: (
        st.layout_of_shards,
        {"shards": [st.ShardMetadata([0, 0], [4, 3], "rank:0/cpu")], "shape": (4, 3), "ranks": (0, 1)},
    ),
    "shardwise.sharded_tensor.load_with_process_group": lambda: (st.load_with_process_group, {"process_group": (0, 1)}),
    "shardwise.sharded_tensor.reshard_output": lambda: (
        st.reshard_output,
        {"module": nn.Linear(4, 4), "resharding_spec": spec()},
    ),
    "shardwise.sharded_tensor.shard_module": lambda: (
        st.shard_module,
        {"module": nn.Linear(4, 4), "plan": st.ShardingPlan({"weight": spec()}), "src_rank": 0, "process_group": None},
    ),
    "shardwise.sharded_tensor.shard_parameter": lambda: (
        st.shard_parameter,
        {
            "module": nn.Linear(4, 4),
            "param_name": "weight",
            "sharding_spec": spec(),
            "src_rank": 0,
            "process_group": None,
        },
    ),
    "shardwise.sharded_tensor.spec_of": lambda: (st.spec_of, {"layout": table().layout_}),
    "shardwise.sharded_tensor.ChunkShardingSpec.shard": lambda: (
        spec().shard,
        {"tensor": torch.ones(4, 3), "src_rank": 0, "process_group": None},
    ),
    "shardwise.testing.DTensorConverter": lambda: (
        testing.DTensorConverter,
        {"mesh": MESH, "args": (torch.ones(2),), "kwargs": {}},
    ),
    "shardwise.testing.World": lambda: (testing.World, {"size": 2, "real": False, "timeout": 1.0}),
    "shardwise.testing.world": lambda: (testing.world, {"size": 2, "real": False, "timeout": 1.0}),
    "shardwise.simulation.simulate": lambda: (
        lambda module, **kwargs: simulation.simulate(
            module, torch.ones(2, 3), **kwargs
        ),  # its inputs are its own affair
        {"*module": nn.Linear(3, 3), "mesh": MESH, "plan": {"weight": Shard(0)}, "costs": None},
    ),
    "shardwise.testing.check_rows": lambda: (
        testing.check_rows,
        {"op": torch.neg, "args": (torch.ones(2),), "kwargs": {}, "gradients": False, "meshes": [Mesh((2,))]},
    ),
    "shardwise.checkpoint.export_table": lambda: (
        checkpoint.export_table,
        {
            "collection": embedding.EmbeddingBagCollection([bag_config()]),
            "table": "t",
            "path": "table.safetensors",
        },
    ),
    "shardwise.checkpoint.latest": lambda: (checkpoint.latest, {"folder": "saved"}),
    "shardwise.checkpoint.load": lambda: (
        checkpoint.load,
        {"folder": "saved", "state": {"x": table()}, "subset": False, "resize": None},
    ),
    "shardwise.checkpoint.lock": lambda: (checkpoint.lock, {"folder": "saved"}),
    "shardwise.checkpoint.read_manifest": lambda: (checkpoint.read_manifest, {"path": "saved/step-00000001"}),
    "shardwise.checkpoint.restore": lambda: (
        checkpoint.restore,
        {
            "folder": "module",
            "module": nn.Linear(3, 4),
            "optimizer": None,
            "schedulers": None,
            "extra": None,
            "subset": True,
            "strict": True,
            "resize": None,
        },
    ),
    "shardwise.checkpoint.Rows": lambda: (checkpoint.Rows, {"count": 4, "init_fn": None}),
    "shardwise.checkpoint.load_safetensors": lambda: (
        checkpoint.load_safetensors,
        {"source": "plain.safetensors", "module": nn.Linear(3, 4), "strict": True, "prefix": ""},
    ),
    "shardwise.checkpoint.save": lambda: (
        checkpoint.save,
        {"folder": "saved", "state": {"x": table()}, "step": 1, "metadata": None, "keep": 2, "overwrite": True}
        | {"require_finite": True},
    ),
    "shardwise.checkpoint.save_async": lambda: (
        lambda *args, **kwargs: checkpoint.save_async(*args, **kwargs).wait(),
        {"folder": "saved", "state": {"x": table()}, "step": 1, "metadata": None, "keep": 2, "overwrite": True}
        | {"require_finite": True},
    ),
    "shardwise.checkpoint.Keep": lambda: (
        checkpoint.Keep,
        {"last": 1, "every": None, "best": None, "metric": None, "largest": False},
    ),
    "shardwise.checkpoint.state_of": lambda: (
        checkpoint.state_of,
        {"module": nn.Linear(3, 4), "optimizer": None, "schedulers": None},
    ),
    "shardwise.debug.CommDebugMode": lambda: (debug.CommDebugMode, {}),
    "shardwise.debug.Explanation": lambda: (debug.Explanation, {}),
    "shardwise.debug.explain": lambda: (debug.explain, {"*fn": lambda: None}),
    "shardwise.debug.explain_redistribute": lambda: (
        debug.explain_redistribute,
        {
            "src": Layout(Mesh((2,)), [Shard(0)], (4, 3)),
            "dst": Layout(Mesh((2,)), [Replicate()], (4, 3)),
            "itemsize": 4,
        },
    ),
    "shardwise.debug.profiler_ranges": lambda: (debug.profiler_ranges, {}),
    "shardwise.debug.shadow": lambda: (debug.shadow, {"every": 1, "ops": None, "rtol": 1e-3, "atol": 1e-3}),
    "shardwise.debug.visualize_sharding": lambda: (
        debug.visualize_sharding,
        {"dtensor": table(), "header": "", "use_rich": False},
    ),
    "shardwise.experimental.context_parallel": lambda: (
        experimental.context_parallel,
        {"*mesh": MESH, "buffers": [torch.ones(4)], "buffer_seq_dims": [0], "no_restore_buffers": set()},
    ),
    "shardwise.experimental.context_parallel_unshard": lambda: (
        experimental.context_parallel_unshard,
        {"mesh": MESH, "buffers": [torch.ones(1 + (collectives.rank() < 4 % RANKS))], "seq_dims": [0]},
    ),
    "shardwise.experimental.implicit_replication": lambda: (experimental.implicit_replication, {}),
    "shardwise.experimental.local_map": lambda: (
        lambda device_mesh, **kw: experimental.local_map(torch.zeros_like, device_mesh=device_mesh, **kw)(table()),
        {
            "out_placements": [Shard(0)],
            "in_placements": ([Shard(0)],),
            "in_grad_placements": ([Shard(0)],),
            "device_mesh": MESH,
            "redistribute_inputs": True,
        },
    ),
    "shardwise.experimental.register_sharding": lambda: (
        experimental.register_sharding,
        {"op": an_op, "in_place": False, "shape": None, "data_dependent_shape": False},
    ),
    "shardwise.pictures.Picture": lambda: (
        pictures.Picture,
        {"layout": table().layout_, "header": "", "itemsize": 4},
    ),
    "shardwise.testing.MLPModule": lambda: (testing.MLPModule, {"device": None, "bias": True}),
    "shardwise.testing.MLPStacked": lambda: (testing.MLPStacked, {"device": None, "n_layers": 2}),
    "shardwise.testing.ModelArgs": lambda: (testing.ModelArgs, {"dim": 8, "dropout_p": 0.1, "weight_tying": True}),
    "shardwise.testing.RMSNormPython": lambda: (testing.RMSNormPython, {"dim": 4, "eps": 1e-6}),
    "shardwise.testing.Transformer": lambda: (testing.Transformer, {"args": testing.ModelArgs()}),
    "shardwise.models.MixtureOfExperts": lambda: (
        models.MixtureOfExperts,
        {"num_experts": 2, "dim": 4, "hidden_dim": 4},
    ),
    "shardwise.models.balance_loss": lambda: (
        models.balance_loss,
        {"routing": models.Routing(torch.tensor([[0], [1]]), torch.ones(2, 1), torch.ones(2, 2) / 2)},
    ),
    "shardwise.collectives.as_mesh": lambda: (collectives.as_mesh, {"mesh": MESH}),
    "shardwise.collectives.check_ranks": lambda: (restoring_checks, {"on": True}),
    "shardwise.collectives.init_device_mesh": lambda: (
        collectives.init_device_mesh,
        {"device_type": "cpu", "mesh_shape": (2,), "mesh_dim_names": ("tp",), "timeout_seconds": 1.0},
    ),
}
SPEC_FACTORY: Arguments = {"*size": (4, 3), "process_group": None, "dtype": torch.float64, "requires_grad": True}
SPEC_FACTORY |= {"pin_memory": False, "memory_format": torch.contiguous_format, "init_rrefs": False}
FACTORY: Arguments = {"dtype": torch.float64, "requires_grad": True, "device_mesh": MESH, "placements": [Shard(0)]}

# What is passed on to torch or to a function of the user fails there as it does in one process.
AS_TORCH = {
    ("shardwise.distribute_module", "partition_fn", "class"),
    ("shardwise.debug.explain", "*fn", "class"),
    ("shardwise.parallel.SequenceParallel", "sequence_dim", "negative"),  # the normalised dim
    *(("shardwise.testing.check_rows", "args", kind) for kind in NONSENSE),
    ("shardwise.testing.check_rows", "op", "class"),
    ("shardwise.testing.check_rows", "kwargs", "wrong names"),
}
OF_OPERANDS = tuple(f"!{kind}" for kind in ("TypeError", "IndexError", "ValueError", "OverflowError", "RuntimeError"))
RANK_LOCAL = {("shardwise.parallel.RowwiseParallel", "input_layouts")}  # the text has the shapes of the rank
PLAIN: dict[str, Callable[[Any], object]] = {
    "beside a DTensor": lambda other: torch.ones(4, 3) + other,
    "indexed by": lambda index: torch.ones(4, 3)[index],  # of an index, torch raises TypeError or IndexError
}

# Results of other functions, base classes, parts of test suites, and hooks that torch calls: users make none of them.
NOT_CALLED = {
    *("CommCounts", "DTensor", "DeviceMesh", "Placement", "Placements", "ShardwiseError", "InputFn", "OutputFn"),
    *(
        "ParallelStyle",
        "ParallelPlan",
        "PlacementSpec",
        "ShardedTensor",
        "Sharder",
        "ShardingPlanner",
        "ShardingSpec",
        "Chunk",
    ),
    *(
        "Manifest",
        "PendingSave",
        "LoadedKeys",
        "Restored",
        "StoredTensor",
        "Budget",
        "Cause",
        "CollectiveSequence",
        "CommEvent",
        "RedistributeComparison",
        "Shadow",
        "Meta",
        "Row",
        "Placed",
        "Table",
    ),
    *(
        "PoolingType",
        "Routing",
        "RowOptimizer",
        "DTensorOpTestBase",
        "DTensorTestBase",
        "TensorAssertions",
        "DeadlockError",
        "SendError",
    ),
    *("Collective", "RankClass", "Simulation", "Step"),
    *("FullyShardedModule", "skip_unless_torch_gpu", "with_comms", "pre_load_state_dict_hook", "state_dict_hook"),
}


def an_op(x: object) -> object:
    return x


def planned() -> nn.Module:
    """A model with a plan, as those of transformers have."""
    model = nn.Sequential(nn.Linear(4, 4))
    model._tp_plan = {"0": "colwise"}  # type: ignore[assignment]
    return model


def launched_if_it_could_be_sent(fn: Any, **kwargs: Any) -> None:
    """`launch` with a lambda among the arguments: it cannot be sent, so nothing is started."""
    try:
        sw.launch(fn, lambda: None, **kwargs)
    except LaunchError as error:
        if "cannot send" not in str(error):
            raise


def restoring_buckets(**kwargs: Any) -> None:
    try:
        sw.gradient_buckets(**kwargs)
    finally:
        sw.gradient_buckets()


def restoring_checks(**kwargs: Any) -> None:
    try:
        collectives.check_ranks(**kwargs)
    finally:
        collectives.check_ranks(False)


# ---- the tests ------------------------------------------------------------------------------------------------


def public_callables() -> Iterator[str]:
    for namespace in NAMESPACES:
        for name in namespace.__all__:
            if callable(getattr(namespace, name)) and name not in NOT_CALLED:
                yield name
    yield from COLLECTIVES


def test_every_public_callable_is_tried() -> None:
    tried = {name.rpartition(".")[2] for name in CALLS}
    assert sorted(set(public_callables()) - tried) == []


def call(name: str, change: dict[str, object]) -> None:
    fn, arguments = CALLS[name]()
    arguments = arguments | change
    result = fn(
        *(value for key, value in arguments.items() if key.startswith("*")),
        **{key: value for key, value in arguments.items() if not key.startswith("*")},
    )
    if isinstance(result, _GeneratorContextManager):
        with result:
            pass


def outcome(name: str, change: dict[str, object]) -> str:
    """What a call gives on this rank: the text of an error of ours, "" if it works, after "!" any other error."""
    try:
        call(name, change)
        collectives.barrier(tuple(range(RANKS)))  # where ranks compare what they passed
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001 (of whatever kind, it is what the test looks for)
        return f"!{type(error).__name__}: {error}"
    return ""


def outcomes(name: str, values: dict[str, object]) -> dict[tuple[str, str], str]:
    found = {("", ""): outcome(name, {})}
    for argument in CALLS[name]()[1]:
        for kind, value in values.items():
            found[argument, kind] = outcome(name, {argument: value})
            collectives.barrier(tuple(range(RANKS)))  # nobody is left behind, and nobody waits
    return found


def is_refused(op: Callable[[Any], object], value: object) -> bool:
    """Whether plain torch refuses an operand, too."""
    try:
        op(value)
    except Exception:  # noqa: BLE001 (whatever torch raises)
        return True
    return False


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def save() -> None:
        torch.manual_seed(0)
        checkpoint.save("saved", {"x": table()}, step=1)
        checkpoint.save("module", checkpoint.state_of(nn.Linear(3, 4)), step=1)
        save_file(nn.Linear(3, 4).state_dict(), "plain.safetensors")

    world(RANKS).run(save)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("saved")
@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize_per_tensor")
def test_nonsense_works_or_is_refused_alike_on_all_ranks(name: str) -> None:
    values = {kind: make() for kind, make in NONSENSE.items()}
    by_rank = world(RANKS, timeout=60).run(outcomes, name, values)
    problems = []
    for (argument, kind), text in by_rank[0].items():
        texts = {found[argument, kind] for found in by_rank}
        if (name, argument) in RANK_LOCAL and not text.startswith("!"):
            continue
        if name in PLAIN and argument and text.startswith(OF_OPERANDS) and is_refused(PLAIN[name], values[kind]):
            continue
        wrong = len(texts) > 1 or text.startswith("!") or (text and not argument)
        if wrong and (name, argument, kind) not in AS_TORCH:
            problems.append(f"{argument} = {kind}: {sorted(texts)}")
    assert not problems, "\n".join(problems)
