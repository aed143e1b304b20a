"""A simulated step communicates, and takes memory, as the same step in a world of ranks that all run."""

import gc
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import (
    DTensor,
    Mesh,
    OnRanks,
    Replicate,
    Shard,
    count_comms,
    distribute_tensor,
    embedding_bags,
    shard_module,
)
from shardwise import _collectives as collectives
from shardwise._cli.simulate import OPTIONS
from shardwise._cli.simulate import SHAPES as NAMED
from shardwise._collectives.cost_tables import COLLECTIVES, Cost, Costs
from shardwise._layout import Placement
from shardwise._models import ModelArgs, Transformer
from shardwise._tensor.dispatch.dispatcher import forget
from shardwise.embedding import Adam, EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, shard_embeddings
from shardwise.errors import ArgumentError, MeshError, ShardwiseError
from shardwise.parallel import fully_shard
from shardwise.plan import Topology
from shardwise.simulation import shapes, simulate
from shardwise.simulation.api import Step
from shardwise.simulation.clock import RankClock
from shardwise.simulation.memory import Memory, Roles
from shardwise.simulation.shapes import LLAMA_70B, MIXTRAL_8X7B, SHAPES, BalancedExperts, Options, recommender
from shardwise.testing import world

ARGS = ModelArgs(n_layers=2, vocab_size=64, max_seq_len=16, dim=48, n_heads=4, dropout_p=0.0)


def tensor_parallel(model: Any, mesh: Mesh) -> None:
    Transformer.parallelize(model, mesh, use_seq_parallel=False)


def sequence_parallel(model: Any, mesh: Mesh) -> None:
    Transformer.parallelize(model, mesh, use_seq_parallel=True)


def fully_sharded(model: Any, mesh: Mesh) -> None:
    for layer in (*model.layers, model):
        fully_shard(layer, mesh=mesh)


STYLES = [tensor_parallel, sequence_parallel, fully_sharded]


def training(style: Callable[[nn.Module, Mesh], None], args: ModelArgs = ARGS) -> Callable[[Mesh], Step]:
    def build(mesh: Mesh) -> Step:
        torch.manual_seed(0)
        model = Transformer(args)
        style(model, mesh)
        optimizer = torch.optim.Adam(model.parameters())

        def step() -> None:
            tokens = torch.randint(args.vocab_size, (3, 13))
            optimizer.zero_grad()
            F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()

        return step

    return build


def run(build: Callable[[Mesh], Step], mesh: Mesh) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Collectives and bytes of the second step, by kind, on each rank of a world."""

    def rank() -> tuple[dict[str, int], dict[str, int]]:
        step = build(mesh)
        step()
        with count_comms() as counts:
            step()
        return counts.calls, counts.sent_bytes

    return world(mesh.size()).run(rank)


def peak_of_a_real_rank(style: Callable[[nn.Module, Mesh], None], args: ModelArgs, size: int) -> int:
    """The most bytes in storages during a step in which everything is allocated.

    The least of three steps: threads of the process group may hold what was sent a moment longer.
    """
    torch.set_num_threads(1)
    gc.disable()
    peaks = []
    with Memory(allocate=True) as memory:
        step = training(style, args)(Mesh((size,)))
        step()
        for _ in range(3):
            gc.collect()
            start = len(memory.log)
            step()
            peaks.append(sum(Roles(memory).at_peak(start).values()))
    return min(peaks)


def assert_same_collectives(build: Callable[[Mesh], Step], mesh: Mesh, in_ops: bool = False) -> None:
    """On all ranks of each class, unless they exchange other amounts inside an op."""
    counted = run(build, mesh)
    found = simulate(build, mesh=mesh)
    assert sorted(rank for one in found.classes for rank in one.ranks) == list(range(mesh.size()))
    assert any(one.sent_bytes for one in found.classes)
    for one in found.classes:
        calls: Counter[str] = Counter()
        sent: Counter[str] = Counter()
        for collective in one.collectives:
            calls[collective.kind] += 1
            sent[collective.kind] += collective.sent_bytes
        for rank in one.ranks[: 1 if in_ops else None]:
            assert (dict(calls), dict(sent)) == counted[rank], rank


def fully_sharded_and_sequence_parallel(model: nn.Module, mesh: Mesh) -> None:
    rank = collectives.rank()
    sequence_parallel(model, mesh.submesh("tp", rank))
    fully_sharded(model, mesh.submesh(mesh.names[:-1] if mesh.names else (), rank))


def of_lookups(placement: Placement, mesh: Mesh) -> Step:
    tables = nn.ModuleList(nn.EmbeddingBag(rows, 10, mode="sum") for rows in (24, 17, 5))
    shard_module(tables, {"*.weight": placement}, mesh=mesh)

    def step() -> None:
        # Each rank looks up all rows: then each receives as many requests from others as from itself.
        ids = [torch.arange(rows).view(-1, 1) for rows in (24, 17, 5)]
        inputs = [DTensor.from_local(x, mesh, [Shard(0)]) for x in ids]
        torch.cat(embedding_bags(inputs, list(tables.parameters()), mode="sum")).sum().backward()

    return step


def of_collections(placement: Placement, mesh: Mesh) -> Step:
    """Each rank looks up all ids, so all get as many."""
    names = [f"t{i}" for i in range(3)]
    tables = [EmbeddingBagConfig(48, 16, name, feature_names=[name]) for name in names]
    collection = EmbeddingBagCollection(tables, device="meta")
    sharded = shard_embeddings(collection, dict.fromkeys(names, placement), mesh, Adam(lr=0.1))
    ids = KeyedJaggedTensor(names, torch.arange(48).repeat(3), lengths=torch.full((3 * 24,), 2))
    return lambda: sharded(ids).values().sum().backward()


def of_swapped_axes(mesh: Mesh) -> Step:
    """Two tensors of one shape, each sharded as the other one along the other axis."""
    model = shard_module(nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7)), SWAPPED, mesh=mesh)

    def step() -> None:
        model.zero_grad()
        model(torch.ones(2, 7)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    return step


def from_one_rank(mesh: Mesh) -> Step:
    return lambda: distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)] * mesh.ndim)


def to_all_ranks(mesh: Mesh) -> Step:
    x = distribute_tensor(torch.ones(24), mesh, [OnRanks(1)])
    return x.full_tensor


def of_uneven_grids(mesh: Mesh) -> Step:
    x = distribute_tensor(torch.ones(5, 7), mesh, [Shard(0), Shard(1)])
    return lambda: x.redistribute(mesh, [Shard(1), Shard(0)])


R, S0, S1 = Replicate(), Shard(0), Shard(1)
SWAPPED: dict[str, Sequence[Placement]] = {"0.weight": [S0, R], "0.bias": [R, R], "1.weight": [R, S0], "1.bias": [R, R]}


LINES = [Mesh((size,)) for size in (2, 3, 4, 8)]
AXES = ("replicate", "shard", "tp")
PLACEMENTS: list[Placement] = [Shard(0), Shard(1), OnRanks(1), Replicate()]
PROGRAMS: dict[str, tuple[Callable[[Mesh], Step], list[Mesh]]] = {
    **{style.__name__: (training(style), LINES) for style in STYLES},
    "experts": (training(sequence_parallel, replace(ARGS, num_experts=6)), LINES),
    "hybrid": (training(fully_sharded), [Mesh(shape) for shape in ((2, 2), (2, 3), (3, 2), (2, 4), (4, 2))]),
    "sub-meshes": (
        training(fully_sharded_and_sequence_parallel),
        [Mesh(shape, names=AXES[-len(shape) :]) for shape in ((2, 2), (3, 2), (2, 3), (2, 2, 2))],
    ),
    **{f"lookups in {p}": (partial(of_lookups, p), LINES) for p in PLACEMENTS[:3]},
    **{f"collections in {p}": (partial(of_collections, p), LINES) for p in PLACEMENTS},
    "swapped axes": (of_swapped_axes, [Mesh((2, 2)), Mesh((3, 2))]),
    "from one rank": (from_one_rank, [Mesh((4,)), Mesh((2, 2))]),
    "to all ranks": (to_all_ranks, [Mesh((3,)), Mesh((4,))]),
    "uneven grids": (of_uneven_grids, [Mesh((2, 2)), Mesh((2, 3))]),
}
CASES = [(name, number, mesh) for name, (_, meshes) in PROGRAMS.items() for number, mesh in enumerate(meshes)]


@pytest.mark.parametrize(
    ("name", "mesh"),
    [pytest.param(name, mesh, marks=() if number == 1 else pytest.mark.slow) for name, number, mesh in CASES],
)
def test_collectives_and_bytes_are_those_of_a_world(name: str, mesh: Mesh) -> None:
    in_ops = name.startswith("lookups") or (name == "experts" and mesh.size() == 8)
    assert_same_collectives(PROGRAMS[name][0], mesh, in_ops)


def test_a_large_mask_takes_no_memory() -> None:
    def build(mesh: Mesh) -> Step:
        def step() -> None:
            places = torch.arange(1 << 18)
            mask = places.unsqueeze(1) >= places  # 64 GiB
            assert mask.shape == (1 << 18, 1 << 18)

        return step

    (one,) = simulate(build, mesh=Mesh((2,))).classes
    assert one.memory["activations"] == (1 << 36) + (8 << 18)


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """It would free cycles of activation checkpointing at times that depend on other threads."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.processes
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.usefixtures("no_garbage_collection")
def test_memory_is_that_of_processes(style: Callable[[nn.Module, Mesh], None], checkpointed: bool, size: int) -> None:
    args = replace(ARGS, checkpoint_activations=checkpointed)
    found = simulate(training(style, args), mesh=Mesh((size,)))
    peaks = world(size, real=True).run(peak_of_a_real_rank, style, args, size)
    for one in found.classes:
        assert one.peak_bytes == pytest.approx(min(peaks[rank] for rank in one.ranks), rel=0.05)


def test_memory_has_the_bytes_of_what_it_is_for() -> None:
    model = nn.Linear(1 << 15, 1 << 15, bias=False, device="meta")  # 4 GiB
    batch = torch.ones(2, 1 << 15)
    found = simulate(model, batch, mesh=Mesh((1024,)), plan={"weight": Shard(0)})
    (one,) = found.classes
    weight = 4 << 20
    assert len(one.ranks) == 1024
    assert (one.memory["parameters"], one.memory["gradients"]) == (weight, weight)
    assert one.memory["optimizer states"] == 2 * weight + 4  # and the number of steps
    assert model.weight.is_meta
    assert "1,024 ranks" in str(found)


def test_ranks_with_other_shards_are_other_classes() -> None:
    found = simulate(nn.Linear(3, 10), torch.ones(2, 3), mesh=Mesh((4,)), plan={"weight": Shard(0), "bias": Shard(0)})
    assert [one.ranks for one in found.classes] == [(0, 1, 2), (3,)]
    assert [one.memory["parameters"] for one in found.classes] == [3 * 4 * 4, 1 * 4 * 4]


def test_ranks_of_sub_meshes_are_equal() -> None:
    def build(mesh: Mesh) -> Step:
        model = fully_shard(nn.Linear(8, 8), mesh=mesh.submesh("shard", collectives.rank()))
        return lambda: model(torch.ones(2, 8)).sum().backward()

    found = simulate(build, mesh=Mesh((3, 4), names=("replicate", "shard")))
    assert [len(one.ranks) for one in found.classes] == [12]
    assert {found.axes(one) for one in found.classes[0].collectives} == {"shard"}


def test_what_depends_on_values_or_ranks_is_said() -> None:
    def build(mesh: Mesh) -> Step:
        model = nn.Linear(2 if collectives.rank() == 0 else 3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            model(torch.ones(1, model.in_features)).sum().backward()
            if torch.isfinite(model.weight).all():
                optimizer.step()

        return step

    found = simulate(build, mesh=Mesh((4,)))
    condition, reads = found.assumptions
    assert "test_simulate.py" in condition
    assert "in step: a condition on values that are not there is False" in condition
    assert "in build: rank() is the lowest of each class" in reads
    assert condition in str(found)
    assert not simulate(nn.Linear(2, 2), torch.ones(1, 2), mesh=Mesh((2,))).assumptions


class Several(nn.Module):
    """Without parameters, and with several outputs."""

    def forward(self, x: Tensor) -> dict[str, object]:
        return {"a": (x * 2, None), "b": x.exp(), "count": 3}


def test_modules_may_have_several_outputs_and_no_parameters() -> None:
    for x in (torch.ones(3, requires_grad=True), torch.ones(3)):
        (one,) = simulate(Several(), x, mesh=Mesh((2,))).classes
        assert one.peak_bytes
        assert not one.collectives


def test_a_function_takes_no_inputs_and_returns_a_function() -> None:
    mesh = Mesh((2,))
    with pytest.raises(ArgumentError, match="inputs and plan are those of a module"):
        simulate(from_one_rank, torch.ones(2), mesh=mesh)
    with pytest.raises(ArgumentError, match="inputs and plan are those of a module"):
        simulate(from_one_rank, mesh=mesh, plan={})
    for returned in (None, torch.ones(2)):
        with pytest.raises(ArgumentError, match=r"must return a function of one step, got (NoneType|Tensor)"):
            simulate(cast(Callable[[Mesh], Step], partial(lambda found, _: found, returned)), mesh=mesh)


def test_reading_a_value_is_an_error() -> None:
    def build(mesh: Mesh) -> Step:
        return lambda: torch.ones(3).sum().item()

    with pytest.raises(ShardwiseError, match="has no values, but a number is read"):
        simulate(build, mesh=Mesh((2,)))
    with pytest.raises(ShardwiseError, match="has no values, but tolist"):
        simulate(lambda mesh: lambda: torch.ones(3).tolist(), mesh=Mesh((2,)))


@pytest.mark.slow
def test_a_limit_of_addresses_is_named() -> None:
    program = """
import resource, torch
from torch import nn
from shardwise import Mesh
from shardwise.plan import Topology
from shardwise.simulation import shapes, simulate
resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))
simulate(nn.Linear(2, 2), torch.ones(1, 2), mesh=Mesh((2,)))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "A simulation reserves 16 TiB of addresses, no memory, which the system refuses" in ran.stderr
    assert "Fix: lift the limit of this process: ulimit -v unlimited." in ran.stderr


# ---- the machine ----------------------------------------------------------------------------------------------------

CPUS, GPUS = Topology.preset("cpu"), Topology.preset("H100", ranks_per_host=4)


def of_products(mesh: Mesh) -> Step:
    def step() -> None:
        x, y = (
            DTensor.from_local(torch.ones(n, m), mesh, [Shard(dim)]) for n, m, dim in ((512, 128, 1), (128, 512, 0))
        )
        cast(DTensor, torch.mm(x, y)).redistribute(mesh, [Replicate()])

    return step


def test_times_are_those_of_the_topology() -> None:
    mesh = Mesh((4,), device_type="cuda")
    (one,) = simulate(of_products, mesh=mesh, topology=replace(GPUS, flops=1e12)).classes
    (half,) = simulate(of_products, mesh=mesh, topology=replace(GPUS, flops=5e11)).classes
    assert half.compute - one.compute == pytest.approx(2 * 512 * 128 * 512 / 1e12)
    assert one.communication == sum(
        GPUS.costs.seconds(x.kind, x.ranks, x.ranks, x.received_bytes) for x in one.collectives
    )
    assert one.communication
    assert one.seconds == one.compute + one.communication
    (untimed,) = simulate(of_products, mesh=mesh).classes
    assert untimed.compute == 0
    assert untimed.communication


FIX = "Fix: ranks with 1 MiB of memory, smaller microbatches or checkpointed layers."


def test_the_first_lines_say_whether_it_fits() -> None:
    def found(memory: int) -> list[str]:
        topology = replace(CPUS, memory=memory)
        plan = {"weight": Shard(0), "bias": Shard(0)}
        return str(
            simulate(nn.Linear(3, 10), torch.ones(2, 3), mesh=Mesh((4,)), plan=plan, topology=topology)
        ).splitlines()

    assert found(256)[:2] == ["Mesh(0=4): 4 ranks", "All ranks peak at 256 B or less of 256 B: it fits."]
    assert found(255)[1] == "Rank 0-2 peak at 256 B of 255 B: 1 B too much. " + FIX
    assert found(99)[1] == "All ranks peak at 256 B or less of 99 B: 157 B too much. " + FIX
    assert found(255)[2].startswith("A step takes ")
    assert [line.split()[:4] for line in found(255)[5:7]] == [["rank", "0-2", "256", "B"], ["rank", "3", "112", "B"]]
    even = simulate(nn.Linear(3, 8), torch.ones(2, 3), mesh=Mesh((4,)))
    assert str(even).splitlines()[1] == f"All ranks peak at {even.peak_bytes / 1024:.1f} KiB."
    assert even.missing_bytes == 0


def test_many_classes_are_a_few_lines() -> None:
    sizes = tuple(range(1, 13))
    module, plan = nn.Linear(3, sum(sizes)), {"weight": Shard(0, sizes), "bias": Shard(0, sizes)}
    found = simulate(module, torch.ones(2, 3), mesh=Mesh((12,)), plan=plan)
    assert len(found.classes) == 12
    assert "and 4 other classes" in str(found)
    assert "rank 11, at the peak" in str(found)
    assert len(str(found).splitlines()) < 40


def test_a_mesh_of_gpus_needs_none() -> None:
    def build(mesh: Mesh) -> Step:
        model = nn.Linear(64, 64, device="cuda").to(mesh.device_type)
        fully_shard(model, mesh=mesh)
        where = torch.tensor([1, 2], device="cuda:0")

        def step() -> None:
            model(torch.ones(2, 64).cuda() + torch.randn(64, device=torch.device("cuda"))).sum().backward()
            assert where.tolist() == [1, 2]

        return step

    gpus = simulate(build, mesh=Mesh((4,), device_type="cuda"), topology=GPUS).classes[0]
    assert gpus.memory["parameters"] == 65 * 64 * 4 // 4
    assert not torch.cuda.is_initialized()
    assert torch.Tensor.to.__name__ == "to"  # what is replaced inside is back


def test_ranks_and_devices_are_those_of_the_topology() -> None:
    with pytest.raises(MeshError, match="has 5 ranks on cuda, and the topology 4 on cuda"):
        simulate(of_products, mesh=Mesh((5,), device_type="cuda"), topology=GPUS)
    with pytest.raises(MeshError, match=r"4 ranks on cpu, and the topology 4 on cuda. Fix: .*device_type='cuda'"):
        simulate(of_products, mesh=Mesh((4,)), topology=GPUS)


@pytest.mark.parametrize("shape", [(1 << 15,), (1 << 18, 3)])
def test_dropout_takes_the_time_of_its_ops_and_computes_nothing(shape: tuple[int, ...]) -> None:
    mesh = Mesh((2,))

    def seconds(with_values: bool) -> float:
        clock = RankClock(mesh, CPUS)
        with clock.running():
            if with_values:
                cast(Any, clock.memory).has_values = lambda _: True
            x = distribute_tensor(torch.ones(shape), mesh, [Shard(0)], src_data_rank=None)
            before = len(clock.memory.log)
            clock.restart()
            F.dropout(x, 0.1)
            assert with_values or len(clock.memory.log) - before < 20  # else each chunk has its temporary tensors
            return clock.compute

    assert seconds(with_values=False) == pytest.approx(seconds(with_values=True), rel=0.1)


def test_a_lookup_of_many_ids_takes_the_time_of_its_rows_and_its_states_are_those_of_an_optimizer() -> None:
    ids = torch.arange(1 << 20)  # messages of more than 4 Mi bytes

    def build(rows: int, mesh: Mesh) -> Step:
        table = EmbeddingBagConfig(rows, 4, "t", feature_names=["t"])
        collection = EmbeddingBagCollection([table], device="meta")
        sharded = shard_embeddings(collection, {"t": Shard(1)}, mesh, Adam(lr=0.1))
        batch = KeyedJaggedTensor(["t"], ids, lengths=torch.full((1 << 10,), 1 << 10))
        return lambda: sharded(batch).values().sum().backward()

    small, large = (simulate(partial(build, rows), mesh=Mesh((2,)), topology=CPUS) for rows in (1 << 20, 1 << 27))
    assert large.seconds == small.seconds
    assert large.classes[0].memory["parameters"] == (1 << 27) * 2 * 4
    assert large.classes[0].memory["optimizer states"] == 2 * (1 << 27) * 2 * 4


# ---- shapes ---------------------------------------------------------------------------------------------------------

MESH = Mesh((2, 2), names=("dp", "tp"))
SMALL = ModelArgs(n_layers=1, vocab_size=32, dim=16, n_heads=4, dropout_p=0.0, weight_tying=False)
EXPERTS = ModelArgs(**{**vars(SMALL), "num_experts": 4})


def test_the_command_names_all_shapes_and_their_options() -> None:
    assert tuple(SHAPES) == NAMED
    assert {name for shape in SHAPES.values() for name in shape.options} == set(OPTIONS)


def test_sizes_are_those_of_the_models() -> None:
    with torch.device("meta"):
        llama = Transformer(ModelArgs(**{**vars(LLAMA_70B), "n_layers": 1}))
        mixtral = BalancedExperts(MIXTRAL_8X7B.dim, MIXTRAL_8X7B.ffn_dim, MIXTRAL_8X7B.num_experts)
    of_layer = sum(p.numel() for p in llama.layers.parameters())
    assert of_layer * 80 + 2 * 32_000 * 8192 == pytest.approx(68.98e9, rel=2e-3)  # of Llama 2 70B
    assert sum(p.numel() for p in mixtral.parameters()) == 3 * 8 * 4096 * 14_336 + 8 * 4096


@pytest.mark.parametrize("fully_shard", [False, True])
@pytest.mark.parametrize("args", [SMALL, EXPERTS])
def test_transformers_are_sharded(args: ModelArgs, fully_shard: bool) -> None:
    options = Options(context=8, batch_size=3, fully_shard=fully_shard)
    found = simulate(lambda mesh: shapes.transformer(args, options, mesh), mesh=MESH)
    (one,) = found.classes
    full_bytes = sum(p.nbytes for p in Transformer(ModelArgs(**{**vars(args), "max_seq_len": 8})).parameters())
    assert {"dp", "tp"} <= {found.axes(x) for x in one.collectives}
    assert one.memory["parameters"] < full_bytes / (3 if fully_shard else 1.2)


MESHES_OF_SHAPES = [
    (SMALL, Mesh((3,), names=("dp",))),
    (SMALL, Mesh((2,), names=("tp",))),
    (EXPERTS, Mesh((2, 2), names=("dp", "ep"))),
    (EXPERTS, Mesh((2, 2, 2), names=("dp", "ep", "tp"))),
]


@pytest.mark.parametrize(("args", "mesh"), MESHES_OF_SHAPES, ids=lambda x: str(x) if isinstance(x, Mesh) else "")
def test_a_shape_sends_what_a_world_sends(args: ModelArgs, mesh: Mesh) -> None:
    options = Options(context=8, batch_size=2, fully_shard="dp" in (mesh.names or ()))
    assert_same_collectives(lambda mesh: shapes.transformer(args, options, mesh), mesh)


def test_experts_are_sharded_on_their_axis_and_by_features() -> None:
    def parameters(mesh: Mesh) -> int:
        found = simulate(lambda mesh: shapes.transformer(EXPERTS, Options(context=8), mesh), mesh=mesh)
        return found.classes[0].memory["parameters"]

    layer = BalancedExperts(16, EXPERTS.ffn_dim, 4)
    of_experts = EXPERTS.n_layers * (layer.w1.nbytes + layer.w2.nbytes)
    one, of_four = parameters(Mesh((4,), names=("dp",))), parameters(Mesh((4,), names=("ep",)))
    assert one - of_four == of_experts * 3 // 4
    both, of_features = (parameters(Mesh((2, 2), names=(name, "tp"))) for name in ("ep", "dp"))
    assert of_features - both == of_experts // 4


@pytest.mark.parametrize("threads", [1, 2])
def test_tables_of_a_recommender_are_sharded_over_all_ranks(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside a simulation, one thread takes compiled kernels if numba is installed; they read values."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)

    def build(tables: int) -> Callable[[Mesh], Step]:
        return lambda mesh: recommender(Options(batch_size=2), mesh, tables=tables, rows=64, dim=8)

    torch.manual_seed(0)
    few, more = (simulate(build(tables), mesh=Mesh((4,), names=("dp",))).classes[0] for tables in (2, 3))
    top = 8 * 1024 * 4
    assert more.memory["parameters"] - few.memory["parameters"] == 64 * 8 * 4 // 4 + top
    of_tables = [[x.sent_bytes for x in one.collectives if "embedding collection" in x.cause] for one in (few, more)]
    assert [len(sent) for sent in of_tables] == [3, 3]  # ids, results and gradients of all tables at once
    assert sum(of_tables[0]) < sum(of_tables[1])


def test_tokens_choose_experts_equally_often() -> None:
    layer = BalancedExperts(8, 16, 4)
    chosen = layer.route(torch.randn(10, 8)).chosen
    assert chosen.flatten().bincount().tolist() == [5, 5, 5, 5]
    assert (chosen[:, 0] != chosen[:, 1]).all()


def test_costs_of_a_simulation_choose_for_it_alone() -> None:
    def product() -> tuple[object, int]:
        x, weight = (distribute_tensor(torch.ones(n, m), Mesh((4,)), [Shard(0)]) for n, m in ((512, 256), (256, 16)))
        with count_comms() as comms:
            out = cast(DTensor, torch.mm(x, weight))
        return out.placements, comms.total_bytes

    forget()
    expected = world(4).run(product)
    forget()
    free = dict.fromkeys(COLLECTIVES, Cost(0.0, 0.0))
    simulate(lambda _: product, mesh=Mesh((4,)), topology=replace(CPUS, measured=Costs("free", free, free)))
    assert world(4).run(product) == expected


def test_a_module_with_complex_parameters_is_trained() -> None:
    class Spectrum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.ones(8, 5, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.filter).abs()

    found = simulate(Spectrum(), torch.ones(4, 8, dtype=torch.complex64), mesh=Mesh((2,)))
    assert found.classes[0].memory["parameters"] == 8 * 5 * 8
    assert found.classes[0].memory["optimizer states"] >= 2 * 8 * 5 * 8
