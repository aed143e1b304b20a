"""Whatever makes a plain tensor, an array, a buffer or a number of a DTensor gives the full value, or an error."""

import copy
import ctypes
import io
import json
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close
from torch.utils import dlpack
from torch.utils.data import default_collate

from shardwise import DTensor, Mesh, Partial, Placement, Replicate, Shard, count_comms, distribute_tensor, rank, strict
from shardwise.errors import RuleError, ShardwiseError
from shardwise.testing import world

FULL = torch.arange(1.0, 8.0)
AT = torch.arange(7)
WEIGHTS = {"sum": (3.0, -1.0, -1.0), "avg": (0.0, 1.0, 2.0), "max": (1.0, 0.5, -1.0)}


def zeros() -> Tensor:
    return torch.zeros(7)


def written(write: Callable[[Any], object]) -> Tensor:
    x = zeros()
    write(x)
    return x


class Mine(torch.Tensor):
    pass


def gradient_of_plain(d: Tensor) -> Tensor | None:
    p = zeros().requires_grad_()
    (p * 2).backward(d)
    return p.grad


def loaded(d: Tensor) -> Tensor:
    module = nn.Module()
    module.w = nn.Parameter(zeros())
    module.load_state_dict({"w": d})
    return full(module.w.detach())


def stepped(d: Tensor) -> Tensor:
    p = nn.Parameter(zeros())
    p.grad = torch.ones(7)
    torch.optim.SGD([p], lr=d.sum(), foreach=False).step()
    return p.detach()


def doubled(x: Tensor) -> Tensor:
    return x * 2


def a_node(d: Tensor) -> Any:
    y = d.detach().requires_grad_().sin()
    assert y.grad_fn is not None
    return y.grad_fn if y.grad_fn.name() else None


def sum_of_list(xs: list[Tensor]) -> Tensor:
    return xs[0].sum()


class WithWeight(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


def scripted_before(value: Tensor) -> Tensor:
    module = torch.jit.script(WithWeight(nn.Parameter(zeros())))
    module.weight = value
    return full(module(zeros()))


def appended(d: Tensor) -> Tensor:
    several = torch.jit.script([zeros()])
    several.append(d)
    return full(torch.jit.script(sum_of_list)(several))


# With strict() the plain tensors beside DTensors among these are refused.
GIVES_THE_VALUE: dict[str, Callable[[Any], Any]] = {
    "tensor": lambda d: torch.tensor(d, dtype=None),
    "tensor of another dtype": lambda d: torch.tensor(d, dtype=torch.float64),
    "tensor that requires grad": lambda d: torch.tensor(d, requires_grad=True),
    "tensor of numbers": lambda d: torch.tensor([d.sum(), d.max()]),
    "tensor of integers": lambda d: torch.tensor([d.sum().long(), 1]),
    "as_tensor of rows of integers": lambda d: torch.as_tensor(([d.sum().int()], (d.max().long(),))),
    "tensor of complex numbers": lambda d: torch.tensor([d.sum() * 1j, 2]),
    "tensor of a number": lambda d: torch.tensor(d.sum()),
    "as_tensor": lambda d: torch.as_tensor(d, dtype=None),
    "as_tensor of another dtype": lambda d: torch.as_tensor(d, dtype=torch.float64),
    "asarray": lambda d: torch.asarray(d, dtype=None),
    "asarray of another dtype": lambda d: torch.asarray(d, dtype=torch.int64),
    "Tensor of numbers": lambda d: torch.Tensor([d.sum(), d.max()]),
    "new_tensor": lambda d: zeros().double().new_tensor(d),
    "new_tensor of numbers": lambda d: zeros().new_tensor([d.sum()]),
    "new_tensor of integers": lambda d: zeros().new_tensor([d.sum().long()]),
    "new_tensor of itself": lambda d: d.new_tensor(d),
    "scalar_tensor": lambda d: torch.scalar_tensor(d.sum()),
    "full": lambda d: torch.full((2,), d.sum()),
    "full_like": lambda d: torch.full_like(zeros(), d.sum()),
    "new_full": lambda d: zeros().new_full((2,), d.sum()),
    "arange": lambda d: torch.arange(d.max().long()),
    "eye": lambda d: torch.eye(d.long().sum()),
    "tril_indices": lambda d: torch.tril_indices(3, col=d.long().sum()),
    "linspace": lambda d: torch.linspace(d[0], d[6], 5),
    "type": lambda d: d.type(torch.DoubleTensor),
    "copy_": lambda d: written(lambda x: x.copy_(d)),
    "out": lambda d: written(lambda x: torch.mul(d, 2, out=x)),
    "x[:] =": lambda d: written(lambda x: x.__setitem__(slice(None), d)),
    "x[0] =": lambda d: written(lambda x: x.__setitem__(0, d.sum())),
    "index_put_": lambda d: written(lambda x: x.index_put_((AT,), d)),
    "fill_": lambda d: written(lambda x: x.fill_(d.sum())),
    "load_state_dict": loaded,
    "gradient": gradient_of_plain,
    "collate": lambda d: default_collate([d, d]),
    "parameters_to_vector": lambda d: nn.utils.parameters_to_vector([d, d]),
    "Parameter": lambda d: nn.Parameter(d.detach()),
    "deepcopy": lambda d: copy.deepcopy(d.detach()),
    "data": lambda d: d.data,
    "tolist": lambda d: d.tolist(),
    "unbound tolist": torch.Tensor.tolist,
    "item": lambda d: d.sum().item(),
    "format": lambda d: f"{d.sum():.3f}",
    "float": lambda d: float(d.sum()),
    "int": lambda d: int(d.sum()),
    "bool": lambda d: bool(d.sum() > 20),
    "index": lambda d: list(range(99))[d.sum().long()],
    "iter": lambda d: [float(x) for x in d],
}
IS_REFUSED: dict[str, Callable[[Any], Any]] = {
    "Tensor": torch.Tensor,
    "a subclass": Mine,
    "as_subclass": lambda d: d.as_subclass(Mine),
    "new": lambda d: zeros().new(d),
    "set_": lambda d: zeros().set_(d),
    "data =": lambda d: written(lambda x: setattr(x, "data", d)),
    "data of a parameter =": lambda d: setattr(nn.Parameter(zeros()), "data", d),
    "vector_to_parameters": lambda d: nn.utils.vector_to_parameters(d, [nn.Parameter(zeros())]),
    "option of an optimizer": lambda d: stepped(d.detach()),
    "sparse values": lambda d: torch.sparse_coo_tensor(AT[None], d, (7,)),
    "sparse indices": lambda d: torch.sparse_coo_tensor(indices=d.long()[None] - 1, values=FULL, size=(7,)),
    "sparse blocks": lambda d: torch.sparse_compressed_tensor([0, 7], AT, d, (1, 7), layout=torch.sparse_csr),
    "sparse rows": lambda d: torch.sparse_csr_tensor([0, 7], AT, d, (1, 7)),
    "nested": lambda d: torch.nested.nested_tensor([d, d]),
    "numpy": lambda d: d.detach().numpy(),
    "unbound numpy": torch.Tensor.numpy,
    "asarray of numpy": lambda d: np.asarray(d.detach()),
    "array": lambda d: np.array([d.detach().sum()]),
    "ufunc": lambda d: np.add(d.detach(), 1),
    "beside an array": lambda d: d.detach() * np.ones(7),
    "dlpack": lambda d: dlpack.from_dlpack(d.detach()),
    "dlpack of numpy": lambda d: np.from_dlpack(d.detach()),
    "to_dlpack": lambda d: dlpack.to_dlpack(d.detach()),  # type: ignore[attr-defined]
    "unbound dlpack": lambda d: torch.Tensor.__dlpack__(d.detach()),
    "data_ptr": lambda d: d.data_ptr(),
    "unbound data_ptr": lambda d: (ctypes.c_float * 7).from_address(torch.Tensor.data_ptr(d)),
    "storage": lambda d: d.untyped_storage(),
    "shared memory": lambda d: d.share_memory_(),
    "queue": lambda d: torch.multiprocessing.SimpleQueue().put(d),
    "pickle": pickle.dumps,
    "save": lambda d: torch.save({"x": [d]}, io.BytesIO()),
    "save of numpy": lambda d: np.save(io.BytesIO(), d.detach()),
    "trace": lambda d: torch.jit.trace(doubled, d.detach()),
    "trace of a function that uses one": lambda d: torch.jit.trace(lambda x: x * d.detach(), FULL),
    "trace of a module": lambda d: torch.jit.trace(WithWeight(nn.Parameter(d.detach())), FULL),
    "trace of a method": lambda d: torch.jit.trace_module(WithWeight(nn.Parameter(d.detach())), {"forward": FULL}),
    "script of a module with a parameter": lambda d: torch.jit.script(WithWeight(nn.Parameter(d.detach()))),
    "parameter of a scripted module =": lambda d: scripted_before(nn.Parameter(d.detach())),
    "element of a scripted list": appended,
    "make_fx": lambda d: make_fx(doubled)(d.detach()),
    "make_fx of a function that uses one": lambda d: make_fx(lambda x: x * d.detach())(FULL),
    "functionalize": lambda d: torch.func.functionalize(doubled)(d.detach()),
    "hook of a node": lambda d: a_node(d).register_hook(lambda inputs, outputs: None),
    "prehook of a node": lambda d: a_node(d).register_prehook(lambda outputs: None),
    "edge of the graph": lambda d: torch.autograd.graph.get_gradient_edge((d * 1).requires_grad_()),
    "scripted": lambda d: torch.jit.script(doubled)(d.detach()),
    "scripted with a list": lambda d: torch.jit.script(sum_of_list)([d.detach()]),
    "scripted module": lambda d: torch.jit.script(nn.ReLU())(d.detach()),
    "apply_": lambda d: d.detach().apply_(lambda value: value * 2),
    "map_": lambda d: d.detach().map_(zeros(), lambda a, b: a + b),
    "map_ of a plain tensor": lambda d: zeros().map_(d.detach(), lambda a, b: a + b),
    "list of plain tensors written": lambda d: torch._foreach_copy_([zeros()], [d.detach()]),
}
FAILS_AS_IN_TORCH: dict[str, Callable[[Any], Any]] = {
    "tensor of vectors": lambda d: torch.tensor([d, d]),
    "item": lambda d: d.item(),
    "from_numpy": torch.from_numpy,
    "buffer": lambda d: torch.frombuffer(d, dtype=torch.float32),
    "memoryview": memoryview,
    "json": json.dumps,
}


def sharded(placement: Placement) -> Callable[[], DTensor]:
    return lambda: distribute_tensor(FULL, Mesh((3,)), [placement])


def pending(reduce_op: str) -> DTensor:
    local = FULL * WEIGHTS[reduce_op][rank()]
    return DTensor.from_local(local, Mesh((3,)), [Partial(reduce_op)])


OPERANDS: dict[str, Callable[[], DTensor]] = {
    "even": sharded(Shard(0)),
    "uneven, one empty": sharded(Shard(0, [3, 0, 4])),
    "replicated": sharded(Replicate()),
    **{f"partial {op}": partial(pending, op) for op in WEIGHTS},
}


def outcome(take: Callable[[Any], Any], x: Tensor) -> Any:
    """What `take` gives for `x`, gathered if it is a DTensor; the error that it raises."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a construction is slow, or deprecated
            found = take(x)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return error
    return found.full_tensor() if type(found) is DTensor else found


def outcomes(take: Callable[[Any], Any], grad: bool = False, is_strict: bool = False) -> list[tuple[Any, ...]]:
    """What `take` gives for each of the operands, on each rank."""

    def run() -> list[Any]:
        with strict() if is_strict else nullcontext():
            return [outcome(take, make().requires_grad_(grad)) for make in OPERANDS.values()]

    return list(zip(*world(3).run(run), strict=True))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize("name", GIVES_THE_VALUE)
def test_a_plain_value_of_a_distributed_tensor_is_the_full_value(name: str, is_strict: bool, grad: bool) -> None:
    want = outcome(GIVES_THE_VALUE[name], FULL.clone().requires_grad_(grad))
    for got in (x for ranks in outcomes(GIVES_THE_VALUE[name], grad, is_strict) for x in ranks):
        if isinstance(want, Exception):
            assert type(got) is type(want) or isinstance(got, RuleError)
        elif isinstance(got, Exception):
            assert is_strict, got
            assert "strict" in str(got), got
        elif isinstance(want, str):
            assert got == want
        else:
            assert_close(got, want)
            assert not isinstance(want, Tensor) or got.requires_grad == want.requires_grad


@pytest.mark.parametrize("name", IS_REFUSED)
def test_what_would_give_the_local_shard_is_refused_with_the_same_error_on_every_rank(name: str) -> None:
    for grad in (False, True):
        for found in outcomes(IS_REFUSED[name], grad):
            assert all(isinstance(error, RuleError) for error in found), found
            assert len({str(error) for error in found}) == 1
            assert "Fix: " in str(found[0])


@pytest.mark.parametrize("name", FAILS_AS_IN_TORCH)
def test_what_torch_refuses_of_a_plain_tensor_is_refused_with_the_same_error_on_every_rank(name: str) -> None:
    assert isinstance(outcome(FAILS_AS_IN_TORCH[name], FULL), Exception) or name == "from_numpy"
    for found in outcomes(FAILS_AS_IN_TORCH[name]):
        assert all(isinstance(error, Exception) for error in found), found
        assert len({str(error) for error in found}) == 1


def test_ranks_outside_the_mesh_get_nothing_or_an_error_and_the_others_the_full_value() -> None:
    def run(take: Callable[[Any], Any]) -> tuple[Any, Any]:
        return outcome(take, distribute_tensor(FULL, Mesh((2,), ranks=(0, 2)), [Shard(0)])), rank()

    for name in ("tensor", "as_tensor of another dtype", "tensor of a number", "full", "new_tensor", "type", "tolist"):
        want = outcome(GIVES_THE_VALUE[name], FULL)
        for got, at in world(3).run(run, GIVES_THE_VALUE[name]):
            if at == 1:
                assert isinstance(got, ShardwiseError) or torch.as_tensor(got).numel() in (0, 1), got
            else:
                assert_close(got, want)


def full(x: Any) -> Tensor:
    return x.full_tensor() if type(x) is DTensor else x


@pytest.mark.filterwarnings("ignore:To copy construct:UserWarning")
@world(2)
def test_history_is_kept_where_torch_keeps_it_and_a_value_stays_in_its_layout() -> None:
    x, p = distribute_tensor(FULL, placements=[Shard(0)]).requires_grad_(), FULL.clone().requires_grad_()
    for leaf in (x, p):
        torch.as_tensor(leaf, dtype=torch.float64).square().sum().backward()
        torch.asarray(leaf, copy=True, requires_grad=True).square().sum().backward()
        assert not torch.asarray(leaf, requires_grad=False).requires_grad
        assert not torch.tensor(leaf.detach()).requires_grad
    assert_close(full(x.grad), full(p.grad))
    with count_comms() as comms:
        made = torch.tensor(x.detach(), dtype=torch.float64)
        assert isinstance(made, DTensor)
        assert made.placements == (Shard(0),)
        made.zero_()
    assert comms.total_calls == 0
    assert_close(x.full_tensor(), FULL)


S0, R = Shard(0), Replicate()


def make_np(x: object) -> Any:
    """What `SummaryWriter.add_scalar` makes of its argument, read from torch, as tensorboard may not be installed."""
    found = spec_from_file_location("convert", Path(torch.__file__).parent / "utils" / "tensorboard" / "_convert_np.py")
    assert found is not None
    assert found.loader is not None
    module = module_from_spec(found)
    found.loader.exec_module(module)
    return module.make_np(x)


@world(2)
def test_tensorboard_takes_a_replicated_number_without_communication() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        x: Any = distribute_tensor(torch.tensor([2, 3], dtype=dtype), Mesh((2,)), [S0])
        loss = x.sum().redistribute(placements=[R])
        with count_comms() as comms:
            assert float(make_np(loss).squeeze()) == 5
            array = loss.numpy() if dtype != torch.bfloat16 else make_np(loss)
        assert comms.total_calls == 0
        array[...] = 7  # a copy: replicas stay equal
        assert loss.item() == 5
    x = distribute_tensor(torch.ones(()), Mesh((2,)), [R]).requires_grad_()
    with pytest.raises(RuntimeError, match=r"requires grad"):
        x.numpy()
    assert make_np(x) == 1


@world(2)
def test_what_one_rank_does_not_have_is_refused() -> None:
    mesh, one = Mesh((2,)), Mesh((1,))
    for x in (
        DTensor.from_local(torch.tensor(1.0), mesh, [Partial()]),
        distribute_tensor(torch.ones(1), mesh, [S0]),
        distribute_tensor(torch.ones(2), mesh, [R]),
        distribute_tensor(torch.ones(()), one, [R]).redistribute(Mesh((1,), (1,)), [R]),
    ):
        if x.layout_.mesh.size() == 1 and x.to_local().numel():
            continue  # the rank that has it
        with pytest.raises(RuleError, match=r"numpy\(\) would show only the local shard .* full_tensor\(\)"):
            make_np(x)
