"""Nonsense for any argument of any public function: an error of ours, the same on every rank, or it works."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import _GeneratorContextManager
from functools import cache, partial
from pathlib import Path
from shutil import copytree
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
    debug,
    distribute_tensor,
    embedding,
    experimental,
    parallel,
    plan,
    simulation,
    testing,
)
from shardwise import _collectives as collectives
from shardwise import _pictures as pictures
from shardwise import sharded_tensor as st
from shardwise.errors import LaunchError, ShardwiseError
from shardwise.parallel.experts import Routing
from shardwise.testing import world

RANKS = 2
MESH = Mesh((RANKS,))
NAMESPACES = (sw, embedding, parallel, st, testing, checkpoint, debug, experimental, pictures, plan, simulation)
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

Arguments = dict[str, object]  # by name
Call = tuple[Callable[..., object], Arguments]
INTERNAL = ("strides", "shared")  # that the library passes to a Layout and a ModuleContext


def call(fn: Callable[..., object], /, **given: object) -> Call:
    """A function with the arguments of a call, those that have a default among them."""
    defaults = {p.name: p.default for p in inspect.signature(fn).parameters.values() if p.default is not p.empty}
    return fn, {name: value for name, value in defaults.items() if name not in INTERNAL} | given


def invoke(fn: Callable[..., object], arguments: Arguments) -> object:
    """Call `fn` with arguments by name, but for those that it takes by position only."""
    kinds = {p.name: p.kind for p in inspect.signature(fn).parameters.values()}
    stars = [name for name in arguments if kinds.get(name) is inspect.Parameter.VAR_POSITIONAL]
    first = [name for name in kinds if name in arguments]
    by_position = first[: first.index(stars[0]) + 1] if stars else []
    by_position += [name for name in arguments if kinds.get(name) is inspect.Parameter.POSITIONAL_ONLY]
    named = {name: value for name, value in arguments.items() if name not in by_position}
    return fn(*(arguments[name] for name in by_position), **named)


def table() -> DTensor:
    return distribute_tensor(torch.arange(12.0).view(4, 3), MESH, [Shard(0)])


def applied(style: Callable[..., Any], module: Callable[[], nn.Module] = lambda: nn.Linear(4, 4)) -> Any:
    """`style(**kwargs)`, applied to a module that then runs."""

    def run(**kwargs: Any) -> object:
        model = nn.Sequential(module())
        parallel.parallelize_module(model, MESH, {"0": style(**kwargs)})
        return model(torch.ones(2, 4))

    return run


def bag_config() -> embedding.EmbeddingBagConfig:
    return embedding.EmbeddingBagConfig(4, 3, "t", feature_names=["f"])


def bags(**options: Any) -> embedding.EmbeddingBagCollection:
    return embedding.EmbeddingBagCollection([bag_config()], **options)


def spec() -> st.ChunkShardingSpec:
    return st.ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])


def shard_metadata() -> st.ShardMetadata:
    return st.ShardMetadata([2 * collectives.rank(), 0], [2, 3], f"rank:{collectives.rank()}/cpu")


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


def restoring(fn: Callable[..., object], restore: Callable[[], object]) -> Callable[..., object]:
    """`fn`, after which what it sets is as before."""

    def run(**kwargs: Any) -> None:
        try:
            fn(**kwargs)
        finally:
            restore()

    return run


LAYER, IDS = partial(nn.Linear, 4, 4), partial(torch.tensor, [2, 0])
FACTORY: Arguments = {"dtype": torch.float64, "requires_grad": True, "device_mesh": MESH, "placements": [Shard(0)]}
SPEC_FACTORY: Arguments = {"size": (4, 3), "dtype": torch.float64, "requires_grad": True}
LAYOUTS: Arguments = {"input_layouts": Shard(0), "output_layouts": Shard(0), "use_local_output": True}
SAVE: Arguments = {"step": 1, "metadata": None, "keep": 2, "overwrite": True, "require_finite": True}
CALLS: dict[str, Callable[[], Call]] = {
    "Boxes": lambda: call(Boxes, boxes=[[((0, 0), (2, 3))], [((2, 0), (2, 3))]]),
    "Layout": lambda: call(Layout, mesh=MESH, placements=[Shard(0)], shape=(4, 3), shard_order=[0]),
    "parallel.MixtureOfExperts": lambda: call(parallel.MixtureOfExperts, num_experts=2, dim=4, hidden_dim=4),
    "parallel.balance_loss": lambda: call(parallel.balance_loss,
        routing=Routing(torch.tensor([[0], [1]]), torch.ones(2, 1), torch.ones(2, 2) / 2)),
    "sharded_tensor.LocalShardsWrapper": lambda: call(st.LocalShardsWrapper, local_shards=[torch.ones(2, 3)],
        local_offsets=[(2 * collectives.rank(), 0)]),
    "Mesh": lambda: call(Mesh, shape=(2,), ranks=(1, 0), names=("tp",)),
    "OnRanks": lambda: call(OnRanks, position=0),
    "Partial": lambda: call(Partial),
    "Replicate": lambda: call(Replicate),
    "Shard": lambda: call(Shard, dim=0, sizes=[3, 1]),
    "capture": lambda: call(sw.capture, function=torch.exp, limit=3),
    "count_comms": lambda: call(sw.count_comms),
    **{f"embedding.{f.__name__}": partial(call, f, lr=0.1, max_gradient=1.0) for f in (embedding.SGD, embedding.Adagrad,
        embedding.Adam, embedding.RowWiseAdagrad, embedding.RowWiseAdam)},
    "embedding.Lamb": lambda: call(embedding.Lamb, lr=0.1, decoupled_weight_decay=False),
    "embedding.RowWiseLamb": lambda: call(embedding.RowWiseLamb, lr=0.1, max_gradient_norm=1.0),
    **{f"embedding.{f.__name__}": partial(call, f, num_embeddings=4, embedding_dim=3, name="t", data_type=torch.float32,
        feature_names=["f"]) for f in (embedding.EmbeddingBagConfig, embedding.EmbeddingConfig)},
    "embedding.EmbeddingBagCollection": lambda: call(embedding.EmbeddingBagCollection, tables=[bag_config()],
        device="cpu"),
    "embedding.EmbeddingCollection": lambda: call(embedding.EmbeddingCollection,
        tables=[embedding.EmbeddingConfig(4, 3, "t", feature_names=["f"])], device="cpu"),
    "embedding.FeatureProcessedEmbeddingBagCollection": lambda: call(embedding.FeatureProcessedEmbeddingBagCollection,
        embedding_bag_collection=bags(is_weighted=True), feature_processors=nn.Identity()),
    "embedding.PositionWeightedModuleCollection": lambda: call(embedding.PositionWeightedModuleCollection,
        max_feature_lengths={"f": 2}, device="cpu"),
    "embedding.JaggedTensor": lambda: call(embedding.JaggedTensor, values=torch.ones(2), lengths=IDS()),
    "embedding.KeyedJaggedTensor": lambda: call(embedding.KeyedJaggedTensor, keys=["f"], values=torch.tensor([1, 2]),
        lengths=IDS()),
    "embedding.KeyedTensor": lambda: call(embedding.KeyedTensor, keys=["f"], length_per_key=[3],
        values=torch.ones(2, 3)),
    "embedding.balanced_rows": lambda: call(embedding.balanced_rows, counts=torch.tensor([3, 0, 1, 2]), ranks=2),
    "embedding.count_rows": lambda: call(embedding.count_rows, config=bag_config(), batches=[]),
    "embedding.from_lengths": lambda: call(embedding.from_lengths, lengths=IDS()),
    "embedding.prefetch": lambda: call(embedding.prefetch, loader=[],
        model=embedding.shard_embeddings(bags(), {}, MESH)),
    "embedding.shard_embeddings": lambda: call(embedding.shard_embeddings, collection=bags(), plan={"t": [Shard(0)]},
        mesh=MESH),
    "distribute_module": lambda: call(sw.distribute_module, module=LAYER(), device_mesh=MESH),
    "distribute_tensor": lambda: call(distribute_tensor, tensor=torch.ones(4, 3), device_mesh=MESH,
        placements=[Shard(0)], shard_order=[0]),
    "embedding_bags": lambda: call(sw.embedding_bags, inputs=[torch.tensor([0, 1, 2])], weights=[table()],
        offsets=[torch.tensor([0, 2])], mode="sum"),
    **{f.__name__: partial(call, f, size=(4, 3), **FACTORY) for f in (sw.empty, sw.ones, sw.zeros, sw.rand, sw.randn)},
    "full": lambda: call(sw.full, size=(4, 3), fill_value=1.5, **FACTORY),
    "linspace": lambda: call(sw.linspace, start=0.0, end=1.0, steps=5, **FACTORY),
    "logspace": lambda: call(sw.logspace, start=0.0, end=1.0, steps=5, base=2.0, **FACTORY),
    "gradient_buckets": lambda: call(restoring(sw.gradient_buckets, sw.gradient_buckets), max_bytes=100, overlap=None),
    "init_device_mesh": lambda: call(sw.init_device_mesh, device_type="cpu", mesh_shape=(2,), mesh_dim_names=("tp",),
        timeout_seconds=1.0),
    "launch": lambda: call(launched_if_it_could_be_sent, fn=an_op, nproc=1, timeout_seconds=1.0, grace_seconds=1.0),
    "no_implicit_comm": lambda: call(sw.no_implicit_comm),
    "parallelize_module": lambda: call(sw.parallelize_module, module=nn.Sequential(LAYER()), device_mesh=MESH,
        parallelize_plan={"0": parallel.ColwiseParallel()}),
    "parallel.plan_from_transformers": lambda: call(parallel.plan_from_transformers, model=planned()),
    "parallel.fully_shard": lambda: call(parallel.fully_shard, module=LAYER(), mesh=MESH,
        mp_policy=parallel.MixedPrecisionPolicy(), offload_policy=parallel.OffloadPolicy(), prefetch=1),
    "parallel.CPUOffloadPolicy": lambda: call(parallel.CPUOffloadPolicy),
    "parallel.OffloadPolicy": lambda: call(parallel.OffloadPolicy),
    "parallel.MixedPrecisionPolicy": lambda: call(parallel.MixedPrecisionPolicy, param_dtype=torch.bfloat16),
    "picture": lambda: call(sw.picture, x=table(), header="table", itemsize=4),
    "rank": lambda: call(sw.rank),
    "shard_module": lambda: call(sw.shard_module, module=LAYER(), plan={"weight": Shard(0)}, mesh=MESH),
    "an entry of shard_module": lambda: call(lambda entry: sw.shard_module(LAYER(), {"weight": entry}, mesh=MESH),
        entry=[Shard(0)]),
    "sharding_table": lambda: call(sw.sharding_table, module=LAYER(), plan={"weight": Shard(0)}, mesh=MESH),
    "strict": lambda: call(sw.strict),
    "world_size": lambda: call(sw.world_size),
    "DTensor.from_local": lambda: call(DTensor.from_local, local_tensor=torch.ones(2, 3), device_mesh=MESH,
        placements=[Shard(0)], shape=(4, 3), stride=(3, 1)),
    "DTensor.to_local": lambda: call(table().to_local, grad_placements=[Shard(0)]),
    "DTensor.full_tensor": lambda: call(table().full_tensor, grad_placements=[Replicate()]),
    "DTensor.redistribute": lambda: call(table().redistribute, device_mesh=MESH, placements=[Replicate()],
        forward_dtype=torch.float64, backward_dtype=torch.float32, shard_order=[0]),
    "DTensor.reshard": lambda: call(table().reshard, resharding_spec=spec()),
    "DTensor.gather": lambda: call(table().gather, dst=0, out=torch.empty(4, 3), dtype=torch.float32),
    "DTensor.set_": lambda: call(lambda source: table().set_(source), source=table()),
    "beside a DTensor": lambda: call(lambda other: table() + other, other=table()),
    "indexed by": lambda: call(lambda index: table()[index], index=1),
    "parallel.input_reshard": lambda: call(parallel.input_reshard, module=LAYER(), tp_device_mesh=MESH,
        input_reshard_dim=0),
    "parallel.ColwiseParallel": lambda: call(applied(parallel.ColwiseParallel),
        **LAYOUTS | {"output_layouts": Shard(-1)}, unit=1, sizes=(3, 1)),
    "parallel.RowwiseParallel": lambda: call(applied(parallel.RowwiseParallel), **LAYOUTS, unit=1, sizes=(3, 1)),
    "parallel.SequenceParallel": lambda: call(applied(parallel.SequenceParallel, lambda: nn.LayerNorm(4)),
        sequence_dim=0, use_local_output=True),
    "parallel.PrepareModuleInput": lambda: call(applied(parallel.PrepareModuleInput), input_layouts=(Shard(0),),
        desired_input_layouts=(Shard(0),), input_kwarg_layouts=None, desired_input_kwarg_layouts=None,
        use_local_output=True),
    "parallel.PrepareModuleOutput": lambda: call(applied(parallel.PrepareModuleOutput), output_layouts=Shard(0),
        desired_output_layouts=Shard(0), use_local_output=True),
    "parallel.PrepareModuleInputOutput": lambda: call(applied(parallel.PrepareModuleInputOutput),
        input_layouts=(Shard(0),), desired_input_layouts=(Shard(0),), output_layouts=Shard(0),
        desired_output_layouts=Shard(0), use_local_input=True, use_local_output=True),
    "parallel.ExpertParallel": lambda: call(parallel.ExpertParallel, **LAYOUTS),
    "parallel.first_input": lambda: call(parallel.first_input, module=LAYER(), transform=torch.exp),
    "parallel.local_parameters": lambda: call(parallel.local_parameters, module=LAYER()),
    "parallel.loss_parallel": lambda: call(parallel.loss_parallel),
    "parallel.mix_experts": lambda: call(parallel.mix_experts, chosen=torch.tensor([[0], [1]]), w1=torch.ones(2, 4, 3),
        w2=torch.ones(2, 3, 4), tokens=torch.ones(2, 3), weights=torch.ones(2, 1)),
    "sharded_tensor.ChunkShardingSpec": lambda: call(st.ChunkShardingSpec, dim=0,
        placements=["rank:0/cpu", "rank:1/cpu"]),
    "sharded_tensor.DevicePlacementSpec": lambda: call(st.DevicePlacementSpec, device="rank:0/cpu"),
    "sharded_tensor.EnumerableShardingSpec": lambda: call(st.EnumerableShardingSpec,
        shards=[st.ShardMetadata([0], [4], "rank:0/cpu")]),
    "sharded_tensor.LocalShard": lambda: call(st.LocalShard, tensor=torch.ones(2, 3),
        metadata=st.ShardMetadata([0, 0], [2, 3])),
    "sharded_tensor.ShardMetadata": lambda: call(st.ShardMetadata, shard_offsets=[0, 0], shard_sizes=[2, 3],
        placement="rank:0/cpu"),
    "sharded_tensor.ShardedTensorMetadata": lambda: call(st.ShardedTensorMetadata, shards_metadata=[shard_metadata()],
        size=(4, 3), tensor_properties=st.TensorProperties()),
    "sharded_tensor.ShardingPlan": lambda: call(lambda **plans: st.shard_module(nn.Sequential(LAYER()),
        st.ShardingPlan(**plans)), plan={"0.weight": spec()}, output_plan=None, return_local_tensor=None),
    "sharded_tensor.TensorProperties": lambda: call(st.TensorProperties),
    "sharded_tensor.collect_local_shard": lambda: call(st.collect_local_shard, module=LAYER()),
    "sharded_tensor.custom_sharding_spec_op": lambda: call(st.custom_sharding_spec_op,
        sharding_spec_class=st.ChunkShardingSpec, func=torch.exp),
    **{f"sharded_tensor.{f.__name__}": partial(lambda f: call(f, sharding_spec=spec(), **SPEC_FACTORY),
        f) for f in (st.empty, st.ones, st.zeros, st.rand, st.randn)},
    "sharded_tensor.full": lambda: call(st.full, sharding_spec=spec(), size=(4, 3), fill_value=1.5),
    "sharded_tensor.init_from_local_shards": lambda: call(st.init_from_local_shards,
        local_shards=[st.LocalShard(torch.ones(2, 3), shard_metadata())], global_size=(4, 3)),
    "sharded_tensor.load_with_process_group": lambda: call(st.load_with_process_group, process_group=(0, 1)),
    "sharded_tensor.reshard_output": lambda: call(st.reshard_output, module=LAYER(), resharding_spec=spec()),
    "sharded_tensor.shard_module": lambda: call(st.shard_module, module=LAYER(),
        plan=st.ShardingPlan({"weight": spec()})),
    "sharded_tensor.shard_parameter": lambda: call(st.shard_parameter, module=LAYER(), param_name="weight",
        sharding_spec=spec()),
    "sharded_tensor.ChunkShardingSpec.shard": lambda: call(spec().shard, tensor=torch.ones(4, 3)),
    "testing.DTensorConverter": lambda: call(testing.DTensorConverter, mesh=MESH, args=(torch.ones(2),), kwargs={}),
    "testing.World": lambda: call(testing.World, size=2, timeout=1.0),
    "testing.world": lambda: call(testing.world, size=2, timeout=1.0),
    "testing.check_rows": lambda: call(testing.check_rows, op=torch.neg, args=(torch.ones(2),), kwargs={},
        gradients=False, meshes=[Mesh((2,))]),
    "testing.MLPModule": lambda: call(testing.MLPModule, device=None),
    "testing.MLPStacked": lambda: call(testing.MLPStacked, device=None),
    "testing.ModelArgs": lambda: call(testing.ModelArgs, dim=8),
    "testing.RMSNormPython": lambda: call(testing.RMSNormPython, dim=4),
    "testing.Transformer": lambda: call(testing.Transformer, args=testing.ModelArgs()),
    "simulation.simulate": lambda: call(lambda module,
        **kwargs: simulation.simulate(module, torch.ones(2, 4), **kwargs), module=LAYER(), mesh=MESH,
        plan={"weight": Shard(0)}, topology=None),
    "plan.BatchShape": lambda: call(plan.BatchShape, bags=4),
    "plan.Link": lambda: call(plan.Link, bytes_per_second=1e9, latency=1e-6),
    "plan.Topology": lambda: call(plan.Topology, hosts=1, ranks_per_host=2, memory=1 << 30, inside=plan.Link(1e9, 1e-6),
        between=plan.Link(1e8, 1e-5), flops=1e12, memory_bandwidth=1e12, lookup_bandwidth=1e11),
    "plan.plan_module": lambda: call(plan.plan_module, module=LAYER(), topology=plan.Topology.preset("cpu",
        ranks_per_host=RANKS), inputs=(torch.ones(2, 4),), mesh=MESH, forward=None, head_room=0.1),
    "plan.price_module": lambda: call(plan.price_module, module=LAYER(),
        plan=plan.ModulePlan(MESH, {"weight": Shard(0)}), topology=plan.Topology.preset("cpu", ranks_per_host=RANKS),
        inputs=(torch.ones(2, 4),), forward=None),
    "plan.plan_tables": lambda: call(plan.plan_tables, collection=[bag_config()], topology=plan.Topology.preset("cpu"),
        batch=plan.BatchShape(4)),
    "checkpoint.export_table": lambda: call(checkpoint.export_table, collection=bags(), table="t",
        path="table.safetensors"),
    "checkpoint.latest": lambda: call(checkpoint.latest, folder="saved"),
    "checkpoint.load": lambda: call(checkpoint.load, folder="saved", state={"x": table()}),
    "checkpoint.lock": lambda: call(checkpoint.lock, folder="saved"),
    "checkpoint.read_manifest": lambda: call(checkpoint.read_manifest, path="saved/step-00000001"),
    "checkpoint.restore": lambda: call(checkpoint.restore, folder="module", module=nn.Linear(3, 4), subset=True),
    "checkpoint.Rows": lambda: call(checkpoint.Rows, count=4),
    "checkpoint.load_safetensors": lambda: call(checkpoint.load_safetensors, source="plain.safetensors",
        module=nn.Linear(3, 4)),
    "checkpoint.save": lambda: call(checkpoint.save, folder="saved", state={"x": table()}, **SAVE),
    "checkpoint.save_async": lambda: call(lambda *args, **kwargs: checkpoint.save_async(*args, **kwargs).wait(),
        folder="saved", state={"x": table()}, **SAVE),
    "checkpoint.Keep": lambda: call(checkpoint.Keep),
    "checkpoint.state_of": lambda: call(checkpoint.state_of, module=nn.Linear(3, 4)),
    "debug.CommDebugMode": lambda: call(debug.CommDebugMode),
    "debug.explain": lambda: call(debug.explain, fn=lambda: None),
    "debug.explain_redistribute": lambda: call(debug.explain_redistribute, src=Layout(Mesh((2,)), [Shard(0)], (4, 3)),
        dst=Layout(Mesh((2,)), [Replicate()], (4, 3))),
    "debug.profiler_ranges": lambda: call(debug.profiler_ranges),
    "debug.shadow": lambda: call(debug.shadow, rtol=1e-3, atol=1e-3),
    "debug.visualize_sharding": lambda: call(debug.visualize_sharding, dtensor=table()),
    "experimental.context_parallel": lambda: call(experimental.context_parallel, mesh=MESH, buffers=[torch.ones(4)],
        buffer_seq_dims=[0], no_restore_buffers=set()),
    "experimental.context_parallel_unshard": lambda: call(experimental.context_parallel_unshard, mesh=MESH,
        buffers=[torch.ones(1 + (collectives.rank() < 4 % RANKS))], seq_dims=[0]),
    "experimental.implicit_replication": lambda: call(experimental.implicit_replication),
    "experimental.local_map": lambda: call(lambda device_mesh,
        **kw: experimental.local_map(torch.zeros_like, device_mesh=device_mesh, **kw)(table()),
        out_placements=[Shard(0)], in_placements=([Shard(0)],), in_grad_placements=([Shard(0)],), device_mesh=MESH,
        redistribute_inputs=True),
    "experimental.register_sharding": lambda: call(experimental.register_sharding, op=an_op),
    "pictures.Picture": lambda: call(pictures.Picture, layout=table().layout_, itemsize=4),
    "collectives.as_mesh": lambda: call(collectives.as_mesh, mesh=MESH),
    "collectives.check_ranks": lambda: call(restoring(collectives.check_ranks, lambda: collectives.check_ranks(False)),
        on=True),
    "collectives.init_device_mesh": lambda: call(collectives.init_device_mesh, device_type="cpu", mesh_shape=(2,),
        mesh_dim_names=("tp",), timeout_seconds=1.0),
}  # fmt: skip

# What is passed on to torch or to a function of the user fails there as it does in one process.
AS_TORCH = {
    ("distribute_module", "partition_fn", "class"),
    ("debug.explain", "fn", "class"),
    ("parallel.mix_experts", "compute", "class"),
    ("parallel.SequenceParallel", "sequence_dim", "negative"),  # the normalised dim
    *(("testing.check_rows", argument, kind) for argument in ("args", "tolerance") for kind in NONSENSE),
    ("testing.check_rows", "op", "class"),
    ("testing.check_rows", "kwargs", "wrong names"),
}
OF_OPERANDS = tuple(f"!{kind}" for kind in ("TypeError", "IndexError", "ValueError", "OverflowError", "RuntimeError"))
RANK_LOCAL = {("parallel.RowwiseParallel", "input_layouts")}  # the text has the shapes of the rank
PLAIN: dict[str, Callable[[Any], object]] = {
    "beside a DTensor": lambda other: torch.ones(4, 3) + other,
    "indexed by": lambda index: torch.ones(4, 3)[index],  # of an index, torch raises TypeError or IndexError
}

# Results of other functions, base classes, parts of test suites, and hooks that torch calls: users make none of them.
NOT_CALLED = set(
    """
    CommCounts DTensor DeviceMesh Placement Placements ShardwiseError InputFn OutputFn ParallelStyle ParallelPlan
    ShardedTensor Sharder ShardingPlanner ShardingSpec Chunk Manifest PendingSave LoadedKeys Restored
    StoredTensor Budget Cause CollectiveSequence CommEvent RedistributeComparison Shadow Meta Row Placed Table
    PoolingType Routing RowOptimizer DTensorOpTestBase DTensorTestBase TensorAssertions DeadlockError SendError
    Collective RankClass Simulation Step FullyShardedModule skip_unless_torch_gpu with_comms
    pre_load_state_dict_hook state_dict_hook PlanChange TablePlan ModulePlan
    """.split()
)


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


def run(name: str, change: dict[str, object]) -> None:
    fn, arguments = CALLS[name]()
    result = invoke(fn, arguments | change)
    if isinstance(result, _GeneratorContextManager):
        with result:
            pass


def outcome(name: str, change: dict[str, object]) -> str:
    """What a call gives on this rank: the text of an error of ours, "" if it works, after "!" any other error."""
    try:
        run(name, change)
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


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")

    def save() -> None:
        torch.manual_seed(0)
        checkpoint.save(folder / "saved", {"x": table()}, step=1)
        checkpoint.save(folder / "module", checkpoint.state_of(nn.Linear(3, 4)), step=1)
        save_file(nn.Linear(3, 4).state_dict(), folder / "plain.safetensors")

    world(RANKS).run(save)
    return folder


@pytest.fixture
def saved(saved_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory is a copy, which calls may change."""
    copytree(saved_once, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


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
