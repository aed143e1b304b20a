"""Safetensors files into sharded modules: values, the bytes that each rank reads, memory, and files that do not fit."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import Mesh, Replicate, Shard, shard_module
from shardwise import _collectives as collectives
from shardwise.checkpoint import load_safetensors, sources
from shardwise.errors import CheckpointError, MismatchError
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.checkpoint.states import counted_reads, failed, full

INDEX = "model.safetensors.index.json"
R, S0, S1 = Replicate(), Shard(0), Shard(1)


class Net(nn.Module):
    """Parameters of 0 to 3 dims, one tied, one empty, and a buffer. A row of `wide` has 12 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False)
        self.head.weight = self.table.weight
        self.wide, self.stack = nn.Linear(3072, 5), nn.Parameter(torch.randn(3, 4, 2))
        self.scale, self.none = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.randn(0, 4))
        self.register_buffer("seen", torch.tensor([True, False]))


PLAN = {"table.weight": S1, "wide.weight": S1, "stack": Shard(1, (3, 0, 1)), "wide.bias": S0, "none": S0}


def written(folder: Path, state: dict[str, Tensor], num_files: int = 3) -> Path:
    """An index and its files, with a tied parameter once."""
    folder.mkdir(exist_ok=True)
    once = {name: x.contiguous() for name, x in state.items() if name != "head.weight"}
    file_of = {name: f"model-{number % num_files}.safetensors" for number, name in enumerate(once)}
    for file in set(file_of.values()):
        save_file({name: x for name, x in once.items() if file_of[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": file_of}))
    return folder


@pytest.fixture(params=[1 << 22, 9], ids=["at once", "9 bytes at a time"])
def window_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "WINDOW_BYTES", request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sharded_module_gets_the_values_of_the_files(dtype: torch.dtype, window_bytes: None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    stored, other = Net(), Net()
    state = {name: x.to(dtype) if x.is_floating_point() else x for name, x in stored.state_dict().items()}
    state["wide.weight"] = state["wide.weight"][:, :30] if window_bytes else state["wide.weight"]
    folder = written(tmp_path / "files", state)
    want = {name: x.float() if x.is_floating_point() else x for name, x in state.items()}

    def body() -> None:
        model = shard_module(deepcopy(other), PLAN)
        assert load_safetensors(folder, model) == ([], [])
        assert model.head.weight is model.table.weight
        assert {name: full(x) for name, x in model.state_dict().items()}.keys() == want.keys()
        for name, x in model.state_dict().items():
            assert_close(full(x), want[name], rtol=0, atol=0)

    world(3).run(body)


def headers_and_index(folder: Path) -> int:
    index = (folder / "model.safetensors.index.json").stat().st_size
    return index + sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("size", "mesh", "plan"),
    [
        (4, Mesh((2, 2), names=("dp", "tp")), {"wide.weight": {"tp": S1}, "table.weight": {"tp": S0},
                                               "stack": {"dp": S0, "tp": S0}}),
        (8, None, {"table.weight": S0, "wide.weight": S0, "wide.bias": S0, "stack": S0, "none": S0}),
        (3, None, {"table.weight": Shard(0, (0, 7, 0)), "wide.bias": Shard(0, (5, 0, 0))}),
        (6, Mesh((3, 2), names=("dp", "tp")), {"table.weight": {"dp": S0, "tp": S0}, "wide.bias": {"dp": S0, "tp": R},
                                               "stack": {"tp": S0}}),
    ],
    ids=["two axes", "more ranks than rows", "explicit sizes, some empty", "sharded and replicated, empty on some"],
)  # fmt: skip
def test_a_rank_reads_no_more_than_the_bytes_of_its_shards(
    size: int, mesh: Mesh | None, plan: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Beside the headers, which every rank reads."""
    torch.manual_seed(0)
    stored, other = Net(), Net()
    want = stored.state_dict()
    folder = written(tmp_path / "files", want)
    read = counted_reads(monkeypatch)

    def body() -> int:
        model = shard_module(deepcopy(other), plan, mesh=mesh)
        assert load_safetensors(folder, model) == ([], [])
        assert model.head.weight is model.table.weight
        for name, x in model.state_dict().items():
            assert_close(full(x), want[name], rtol=0, atol=0)
        local = sum(as_dtensor(p).to_local().nbytes for p in model.parameters())
        return int(local + model.get_buffer("seen").nbytes)

    held = world(size).run(body)
    assert [read[rank] - headers_and_index(folder) for rank in range(size)] == held
    assert min(held) < max(held) or max(held) < 0.6 * sum(x.nbytes for x in want.values())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False)
        self.head.weight = self.table.weight


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("names", [["table.weight"], ["head.weight"], ["head.weight", "table.weight"]], ids=repr)
def test_a_tied_parameter_stays_tied_whatever_names_files_have(names: list[str], device: str, tmp_path: Path) -> None:
    """Those of Hugging Face have one. A plain parameter on the meta device gets memory in all modules that share it."""
    torch.manual_seed(0)
    weight = torch.randn(7, 6)
    save_file({name: weight.clone() for name in names}, tmp_path / "model.safetensors")
    with torch.device(device):
        tied = Tied()

    def body() -> None:
        model = deepcopy(tied)
        load_safetensors(tmp_path, model)
        assert model.head.weight is model.table.weight
        assert_close(full(model.table.weight), weight)

    world(2).run(body)


def test_names_of_a_tied_parameter_with_different_values_are_refused(tmp_path: Path) -> None:
    """They are of a model that does not tie them. NaN is equal to itself."""
    weight = torch.full((7, 6), torch.nan)
    other = weight.clone()

    def load() -> None:
        load_safetensors(tmp_path, shard_module(Tied(), {"table.weight": S0}))

    save_file({"table.weight": weight, "head.weight": other}, tmp_path / "model.safetensors")
    world(3).run(load)
    other[6] = 1.0  # on the last rank
    save_file({"table.weight": weight, "head.weight": other}, tmp_path / "model.safetensors")

    text = failed(load, size=3)
    assert "rank 2: 'table.weight' and 'head.weight' are one parameter of the module, but have different" in text


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that an op made on this rank."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        if type(out) is Tensor and not out.is_meta:
            self.nbytes = max(self.nbytes, out.nbytes)
        return out


def test_no_rank_ever_holds_a_full_copy_from_the_meta_device_on(tmp_path: Path) -> None:
    """Built on the meta device, parallelised there, then loaded; what the plan leaves out is replicated and small."""
    torch.manual_seed(0)
    stored = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.LayerNorm(4096), nn.Linear(4096, 64, bias=False))
    folder = written(tmp_path / "files", stored.state_dict())
    x = torch.randn(2, 64)
    expected = stored(x)
    empty = deepcopy(stored).to("meta")
    plan = {"0": ColwiseParallel(output_layouts=R), "3": RowwiseParallel(input_layouts=R)}

    def body() -> int:
        model = deepcopy(empty)
        parallelize_module(model, None, plan)
        with Largest() as seen:
            load_safetensors(folder, model)
        assert not any(p.is_meta for p in model.parameters())
        assert_close(model(x), expected)
        return int(seen.nbytes)

    assert max(world(4).run(body)) == (2 * 64 + 1) * 4096 * 4 // 4  # bytes of a quarter of all that is sharded


def refused(folder: Path, model: nn.Module) -> str:
    """The error of loading on two ranks, which is the same; nothing changes."""

    def body() -> None:
        sharded = shard_module(deepcopy(model), {"wide.bias": S0})
        before = {name: full(x).clone() for name, x in sharded.state_dict().items()}
        try:
            load_safetensors(folder, sharded)
        finally:
            assert all(full(x).equal(before[name]) for name, x in sharded.state_dict().items())

    return failed(body)


def test_names_and_shapes_that_do_not_fit_are_refused_together(tmp_path: Path) -> None:
    net = Net()
    state = net.state_dict()
    state["wide.biass"] = state.pop("wide.bias")
    state["stack"] = torch.zeros(3, 4)
    folder = written(tmp_path / "files", state)
    text = refused(folder, net)
    assert "'stack': shape (3, 4) in the files, (3, 4, 2) in the module" in text
    assert "missing in the files: 'wide.bias' (did you mean 'wide.biass'?)" in text
    assert "only in the files: 'wide.biass'" in text
    assert "Fix: strict=False" in text
    state["wide.bias"] = state.pop("wide.biass")
    for name, dtype, of_module in [("stack", torch.complex64, "float32"), ("seen", torch.float16, "bool")]:
        state["stack"] = net.stack.detach()
        folder = written(tmp_path / "files", state | {name: state[name].to(dtype)})
        said = f"{name!r}: {dtype} in the files, which is no kind of torch.{of_module} as in the module"
        assert said in refused(folder, net)

    state["wide.biass"] = state.pop("wide.bias")
    folder = written(tmp_path / "files", state)

    def body() -> None:
        model = shard_module(Net(), {"wide.bias": S0})
        assert load_safetensors(folder, model, strict=False) == (["wide.bias"], ["wide.biass"])
        assert_close(full(model.wide.weight), net.wide.weight.detach())

    world(2).run(body)


def test_files_that_are_missing_damaged_or_not_the_same_on_all_ranks_are_refused(tmp_path: Path) -> None:
    net = Net()
    folder = written(tmp_path / "files", net.state_dict())
    assert "has neither model.safetensors.index.json nor model.safetensors" in refused(tmp_path, net)
    file = folder / "model-1.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "model-1.safetensors: has" in refused(folder, net)
    file.unlink()
    assert "model-1.safetensors" in refused(folder, net)

    def other_files() -> None:
        net = Net().bfloat16() if collectives.rank() else Net()
        load_safetensors(written(tmp_path / f"of {collectives.rank()}", net.state_dict()), Net())

    assert "ranks disagree on" in failed(other_files, MismatchError)
    folder = written(tmp_path / "less", {name: x for name, x in net.state_dict().items() if name != "stack"})
    on_meta = deepcopy(net)
    on_meta.stack = nn.Parameter(net.stack.to("meta"))
    with pytest.raises(CheckpointError, match="'stack' is on the meta device, and the files do not have it"):
        load_safetensors(folder, on_meta, strict=False)
