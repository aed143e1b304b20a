"""What ranks with an accelerator do in a world whose only backend takes what NCCL takes.

One rank of the world of test_nccl_alone.py is `python -m tests.accelerator.scenarios RANK SIZE FOLDER LIBRARY`.
"""

import copy
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from inspect import isfunction, signature
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend

import shardwise
from shardwise import Mesh, OnRanks, Partial, Placement, Replicate, Shard, distribute_tensor
from shardwise import _collectives as collectives
from shardwise._collectives import rank
from shardwise._collectives.processes import TORCH_TRANSPORT
from shardwise._tensor import DTensor
from shardwise.checkpoint import load, save
from shardwise.data import BatchLoader
from shardwise.embedding import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    PoolingType,
    RowWiseAdagrad,
    shard_embeddings,
)
from shardwise.errors import MismatchError
from shardwise.parallel import ColwiseParallel, CPUOffloadPolicy, RowwiseParallel, fully_shard, parallelize_module
from tests.accelerator.steps import check_steps

DEVICE = os.environ.get("SHARDWISE_TEST_DEVICE", "fake")  # see device.cpp
# Of torch's table of NCCL's dtypes.
MOVED = {torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2}
ADDED = {torch.int8, torch.uint8, torch.int32, torch.int64}
FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
LOADED: list[Path] = []  # the library of the device
SEEDS: list[int] = []  # that the generator of the device was given


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


def register(library: Path) -> None:
    """Make the device and the backend known to torch, in this process."""
    rename_privateuse1_backend(DEVICE)
    torch.ops.load_library(library)
    LOADED.append(library)
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


EVERYONE = (0, 1, 2, 3)
LINE, GRID = Mesh((4,), (), None, DEVICE), Mesh((2, 2), (), None, DEVICE)
SPARSE = (False, True) if DEVICE == "cuda" else (False,)  # the other device has no sparse tensors
RESHARD = DEVICE == "cuda"  # the other device has no `set_`, by which memory is filled again
S0, S1, R, P = Shard(0), Shard(1), Replicate(), Partial()


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sharded(x: Tensor, placements: Sequence[Placement], mesh: Mesh = LINE) -> DTensor:
    return distribute_tensor(x, mesh, list(placements))


def full(x: Tensor) -> Tensor:
    assert isinstance(x, DTensor)
    assert x.device.type == DEVICE
    return x.full_tensor().cpu()


def same(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(full(got), expected)


def cpu_tensors_are_refused() -> None:
    with pytest.raises(RuntimeError, match="cpu"):
        collectives.all_to_all(torch.ones(4), [1] * 4, [1] * 4, EVERYONE)


def ranks_agree() -> None:
    collectives.barrier(EVERYONE)
    assert collectives.gather_json({"rank": rank()}, EVERYONE) == [{"rank": r} for r in EVERYONE]
    collectives.agree("a number", 3, EVERYONE, "pass one")
    with pytest.raises(MismatchError, match="rank 0, 1: 0"):
        collectives.agree("a number", rank() // 2, EVERYONE, "pass one")


def ranks_without_a_group_agree() -> None:
    if rank() in {0, 2, 3}:
        ranks = (0, 2, 3)
        assert collectives.gather_json(rank(), ranks) == [0, 2, 3]
        x = torch.arange(6.0, device=DEVICE)
        assert (
            collectives.reduce_scatter(x, (1, 2, 3), ranks).tolist()
            == {0: [0.0], 2: [3.0, 6.0], 3: [9.0, 12.0, 15.0]}[rank()]
        )


def fingerprints_are_compared() -> None:
    with collectives.fingerprint():
        same(sharded(values(5, 3), [S0]).redistribute(placements=[S1]), values(5, 3))


def records_of_other_hosts_are_compared() -> None:
    records = TORCH_TRANSPORT._memory
    assert records is not None
    records.elsewhere.update(set(EVERYONE) - {rank()})
    try:
        for _ in range(130):
            collectives.barrier(EVERYONE)
    finally:
        records.elsewhere.clear()


def every_dtype_is_sent() -> None:
    for dtype in (torch.bool, torch.int8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.complex64):
        x = values(5, 4, dtype=dtype)
        flat = x.flatten()
        own = flat.to(DEVICE)
        many = 4 if dtype != torch.bool else 1
        counts = (5, 5, 5, 5)
        assert torch.equal(collectives.all_reduce(own, "sum", EVERYONE).cpu(), (flat * many).to(dtype))
        shares = collectives.reduce_scatter(own, counts, EVERYONE)
        assert torch.equal(shares.cpu(), (flat * many).to(dtype)[5 * rank() : 5 * rank() + 5])
        assert torch.equal(
            collectives.all_gather(own[: rank()], EVERYONE, EVERYONE).cpu(), torch.cat([flat[:r] for r in EVERYONE])
        )
        assert torch.equal(collectives.broadcast(own, 20, 2, EVERYONE).cpu(), flat)
        same(sharded(x, [S0]).redistribute(placements=[S1]), x)


def every_layout_is_redistributed() -> None:
    kinds: list[Placement] = [S0, S1, R, P, OnRanks(1)]
    x = values(5, 4)
    for mesh, src, dst in [
        *((LINE, (a,), (b,)) for a, b in product([*kinds, Shard(0, sizes=(1, 0, 4, 0))], repeat=2)),
        *((GRID, a, b) for a, b in product(product(kinds, repeat=2), [(S0, S1), (R, R), (R, S0), (P, R)])),
    ]:
        if P in src:
            source = DTensor.from_local(x.to(DEVICE) / 4, mesh, [P] * mesh.ndim, run_check=False)  # the sum of four
        else:
            source = sharded(x, src, mesh)
        same(source.redistribute(placements=list(dst)), x)


def device_meshes_are_taken() -> None:
    mesh = shardwise.init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
    x = distribute_tensor(values(6, 4), mesh, [S0, S1])
    same(x @ distribute_tensor(values(4, 3), mesh, [R, S0]), values(6, 4) @ values(4, 3))
    same(x.redistribute(placements=[S1, R]), values(6, 4))


def ops_and_gradients_are_right() -> None:
    w, x = values(4, 6, seed=1).requires_grad_(), values(7, 4)
    loss = F.layer_norm(torch.softmax(x @ w, -1), (6,)).square().sum() + (x @ w).max()
    loss.backward()
    assert w.grad is not None
    for placements in ([R], [S0], [S1]):
        leaf = sharded(w.detach(), placements).requires_grad_()
        y = sharded(x, [S0]) @ leaf
        got = F.layer_norm(torch.softmax(y, -1), (6,)).square().sum() + y.max()
        got.backward()
        same(got, loss.detach())
        assert leaf.grad is not None
        same(leaf.grad, w.grad)


def shapes_depend_on_data() -> None:
    x = values(9, 3)
    got = sharded(x, [S0])
    same(got[got > 0], x[x > 0])
    same(got.nonzero(), x.nonzero())
    same(got.sort(0).values, x.sort(0).values)
    same(got.topk(2, 0).values, x.topk(2, 0).values)


def tables_are_looked_up() -> None:
    table, ids = values(11, 4, seed=2), torch.tensor([0, 10, 3, 3, 7, 1, 9, 2])
    offsets = torch.tensor([0, 2, 2, 5])
    plain = table.clone().requires_grad_()
    F.embedding(ids, plain).square().sum().backward()
    bags = F.embedding_bag(ids, table, offsets, mode="sum")
    assert plain.grad is not None
    for placements in ([S0], [S1], [OnRanks(2)], [R]):
        for sparse in SPARSE:
            weight = sharded(table, placements).requires_grad_()
            got = F.embedding(sharded(ids, [S0]), weight, sparse=sparse)
            got.square().sum().backward()
            assert weight.grad is not None
            same(weight.grad.to_dense() if sparse else weight.grad, plain.grad)
        weight = sharded(table, placements)
        same(F.embedding_bag(sharded(ids, [S0]), weight, sharded(offsets, [S0]), mode="sum"), bags)
        with pytest.raises(IndexError):
            F.embedding(sharded(ids + 4, [S0]), weight)


def collections_are_trained() -> None:
    tables = [
        EmbeddingBagConfig(11, 4, "t", feature_names=["f"]),
        EmbeddingBagConfig(3, 4, "u", feature_names=["g"], pooling=PoolingType.MEAN, padding_idx=0),
    ]
    ids = KeyedJaggedTensor(["f", "g"], torch.tensor([0, 10, 3, 1, 0]), lengths=torch.tensor([2, 1, 0, 2]))
    for placement in (S0, S1, OnRanks(2), R):
        collection = EmbeddingBagCollection(tables, device="meta")
        module = shard_embeddings(collection, {"t": placement, "u": placement}, LINE, RowWiseAdagrad(lr=0.1))
        plain = module.unshard().cpu()
        before = plain.state_dict()
        pooled = module(ids.to(DEVICE))
        assert pooled.values().device.type == DEVICE
        torch.testing.assert_close(pooled.values().detach().cpu(), plain(ids).values().detach())
        pooled.values().sum().backward()
        after = module.state_dict()["embedding_bags.t.weight"]
        changed = (full(after) != before["embedding_bags.t.weight"]).any(1).nonzero().flatten()
        assert changed.tolist() == [0, 3, 10]
        with pytest.raises(IndexError, match="id 11 at position 1 of sample 0 of rank 0"):
            module(KeyedJaggedTensor(["f", "g"], torch.tensor([0, 11]), lengths=torch.tensor([2, 0])).to(DEVICE))


def steps_wait_where_they_may() -> None:
    if DEVICE == "fake" and rank() < 2:
        check_steps(LOADED[0], DEVICE)


def a_model_is_trained() -> None:
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
    model.load_state_dict(plain.state_dict())
    model = model.to(DEVICE)
    shardwise.shard_module(model, {"0.weight": [S0], "2.weight": [S1]}, mesh=LINE)
    for net in (plain, model):
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        for step in range(3):
            x = values(8, 4, seed=step)
            out = net(x if net is plain else sharded(x, [S0]))
            out.square().mean().backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in plain.state_dict().items():
        same(model.state_dict()[name], parameter)


def plain_local_tensors_are_joined() -> None:
    linear, x = torch.nn.Linear(8, 6), values(6, 8)
    with torch.no_grad():
        linear.weight.copy_(values(6, 8))
        linear.bias.copy_(values(6))
    expected = linear(x)
    parallel = parallelize_module(linear.to(DEVICE), LINE, ColwiseParallel(input_layouts=S0, output_layouts=R))
    local = x.split([0, 1, 2, 3])[rank()]
    torch.testing.assert_close(parallel(local.to(DEVICE)).cpu(), expected.detach())


def random_numbers_are_those_of_any_layout() -> None:
    torch.manual_seed(3)
    first = shardwise.randn(5, 4, device_mesh=LINE, placements=[S0]).full_tensor()
    torch.manual_seed(3)
    assert torch.equal(first, shardwise.randn(5, 4, device_mesh=LINE, placements=[S1]).full_tensor())
    dropped = full(F.dropout(sharded(torch.ones(8, 8), [S0]), 0.5))
    assert set(dropped.flatten().tolist()) == {0.0, 2.0}


def first_values_leave_the_generator_of_the_device() -> None:
    seeds = list(SEEDS)
    tables = [EmbeddingBagConfig(11, 4, "t", feature_names=["f"])]
    shard_embeddings(EmbeddingBagCollection(tables, device="meta"), {"t": S0}, LINE)
    list(BatchLoader([1, 2, 3], 2, mesh=LINE, seed=0, pin_memory=DEVICE == "cuda"))
    assert seeds == SEEDS


def a_checkpoint_is_read_again(folder: Path) -> None:
    save(folder / "checkpoint", {"x": sharded(values(5, 4), [S0])}, step=1)
    target = {"x": sharded(torch.zeros(5, 4), [S1])}
    load(folder / "checkpoint", target)
    same(target["x"], values(5, 4))


def parameters_are_offloaded() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
    want, x = copy.deepcopy(model), torch.randn(8, 3)
    policy = CPUOffloadPolicy(pin_memory=DEVICE == "cuda")
    for prefetch in (0, 1):
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=LINE, offload_policy=policy, reshard_after_forward=RESHARD, prefetch=prefetch)
        for each, inputs in ((model, x.chunk(4)[rank()].to(DEVICE)), (want, x)):
            optimizer = torch.optim.Adam(each.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                out = each(inputs)
                out.square().mean().backward()
                optimizer.step()
            assert out.device == inputs.device
        for p, q in zip(model.parameters(), want.parameters(), strict=True):
            assert isinstance(p, DTensor)
            assert isinstance(p.grad, DTensor)
            shards = [*q.detach().chunk(4), *[q.detach()[:0]] * 4]
            assert {p.to_local().device.type, p.grad.to_local().device.type} == {"cpu"}
            assert p.to_local().is_pinned() == (DEVICE == "cuda" and p.to_local().numel() > 0)
            torch.testing.assert_close(p.detach().to_local(), shards[rank()])
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
        want = copy.deepcopy(model)


def parameters_on_another_axis_are_offloaded() -> None:
    torch.manual_seed(0)
    layers = torch.nn.Linear(3, 6), torch.nn.Linear(6, 5, bias=False)  # which would be replicated on tp
    want, x = torch.nn.Sequential(*layers), torch.randn(4, 3)
    model, mesh = copy.deepcopy(want).to(DEVICE), Mesh((2, 2), (), ("dp", "tp"), DEVICE)
    at = mesh.coordinate(rank())
    assert at is not None
    parallelize_module(model, mesh.submesh("tp", rank()), {"0": ColwiseParallel(), "1": RowwiseParallel()})
    policy = CPUOffloadPolicy(pin_memory=DEVICE == "cuda")
    fully_shard(model, mesh=mesh.submesh("dp", rank()), offload_policy=policy, reshard_after_forward=RESHARD)
    for each, inputs in ((model, x.chunk(2)[at[0]].to(DEVICE)), (want, x)):
        optimizer = torch.optim.Adam(each.parameters(), lr=0.1)
        each(inputs).square().mean().backward()
        optimizer.step()
    expected = dict(want.named_parameters())["1.weight"].detach().chunk(2, 1)[at[1]].chunk(2)[at[0]]
    weight = dict(model.named_parameters())["1.weight"]
    assert isinstance(weight, DTensor)
    torch.testing.assert_close(weight.detach().to_local(), expected)


# All functions of this module that take nothing, or a folder.
SCENARIOS: list[Callable[..., None]] = [
    found
    for found in [*globals().values()]
    if isfunction(found) and found.__module__ == __name__ and {*signature(found).parameters} <= {"folder"}
]

TIMEOUT = timedelta(seconds=30)  # of a rank that waits for one that failed alone


def main(rank: int, size: int, folder: Path, library: Path) -> None:
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    else:
        register(library)
    backend = "nccl" if DEVICE == "cuda" else "nccl_rules"
    store = dist.FileStore(str(folder / "store"), size)  # type: ignore[attr-defined]  # torch does not export it
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    outcomes = {}
    for scenario in SCENARIOS:
        try:
            scenario(*[folder] * len(signature(scenario).parameters))
            outcomes[scenario.__name__] = ""
        except Exception:  # noqa: BLE001 - the test shows it
            outcomes[scenario.__name__] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
