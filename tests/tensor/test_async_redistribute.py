"""An asynchronous redistribution: the first use waits for it, wherever a DTensor is taken. Also torch's."""

import copy
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.tensor as theirs
from torch import Tensor, nn
from torch.testing import assert_close

import shardwise as sw
from shardwise import DTensor, Mesh, Partial, Placement, Replicate, Shard, distribute_tensor, init_device_mesh, rank
from shardwise.errors import RemoteRankError
from shardwise.parallel import ColwiseParallel, fully_shard
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.tensor.test_conversion import FULL, S0, S1, P, R
from tests.test_nonsense import CALLS, RANKS, saved, saved_once
from tests.test_torch_objects import evidence, outcome

__all__ = ["saved", "saved_once"]  # fixtures

VALUE = torch.arange(12.0).view(4, 3)
MESH = Mesh((RANKS,))


def running(value: Any) -> Any:
    """`value` with results of asynchronous redistributions for its DTensors; itself if it has none."""
    if isinstance(value, DTensor):
        return value.redistribute(placements=[Replicate()]).redistribute(placements=value.placements, async_op=True)
    if isinstance(value, Mapping):
        made: Any = {key: running(item) for key, item in value.items()}
        return made if any(made[key] is not item for key, item in value.items()) else value
    if type(value) in (list, tuple):
        made = type(value)(running(item) for item in value)
        return made if any(new is not old for new, old in zip(made, value, strict=True)) else value
    return value


def outcomes(name: str) -> dict[str, tuple[object, object]]:
    found = {}
    for argument, value in CALLS[name]()[1].items():
        if running(value) is not value:
            found[argument] = outcome(name, argument, lambda x: x), outcome(name, argument, running)
            sw.collectives.barrier(tuple(range(RANKS)))
    return found


@pytest.mark.usefixtures("saved")
def test_every_function_that_takes_a_dtensor_takes_one_that_is_running() -> None:
    tried = 0
    for name in CALLS:
        for by_argument in world(RANKS, timeout=60).run(outcomes, name):
            for argument, (ended, found) in by_argument.items():
                assert found == ended, (name, argument)
                tried += 1
    assert tried >= 8 * RANKS


def x(*, grad: bool = False) -> DTensor:
    return distribute_tensor(VALUE, MESH, [Shard(0)]).requires_grad_(grad)


def redistributed(source: DTensor, async_op: bool) -> DTensor:
    return source.redistribute(placements=[Replicate()], async_op=async_op)


def _in_place(y: Any) -> object:
    source = y
    y.add_(1)
    y[0] = 5.0
    y *= y
    return y, source


def _of_leaf(use: Callable[[Any, DTensor], object]) -> Callable[[DTensor], object]:
    """The gradient of a leaf of which `use` makes something, with the tensor."""

    def run(y: DTensor) -> object:
        leaf = x(grad=True)
        use(leaf, y)
        return leaf.grad

    return run


def _hooked(leaf: DTensor, y: DTensor) -> None:
    product: Any = 3 * leaf
    product.register_hook(lambda g: y)
    product.sum().backward()


def _written(write: Callable[[Any], object], target: Tensor) -> Tensor:
    write(target)
    return target


def _through(layer: nn.Module, y: DTensor) -> object:
    for p in layer.parameters():
        p.data.fill_(0.5)
    if isinstance(layer, nn.Linear):
        return sw.parallelize_module(layer, MESH, ColwiseParallel(output_layouts=Replicate()))(y)
    fully_shard(layer, mesh=MESH)
    return layer(y)


def _loaded(y: DTensor) -> object:
    layer = nn.Linear(3, 4)
    layer.load_state_dict({"weight": y, "bias": torch.zeros(4)})
    sharded = sw.shard_module(nn.Linear(3, 4), {"weight": Shard(1)}, mesh=MESH)
    sharded.load_state_dict({"weight": y, "bias": torch.zeros(4)})
    return layer, sharded


USES: dict[str, Callable[[Any], object]] = {
    "in place": _in_place,
    "as gradient": _of_leaf(lambda leaf, y: setattr(leaf, "grad", y)),
    "as cotangent": _of_leaf(lambda leaf, y: (2 * leaf).backward(gradient=y)),
    "as data": lambda y: _written(lambda target: setattr(target, "data", y), torch.zeros_like(x())),
    "into plain": lambda y: _written(lambda target: target[1:].copy_(y[1:]), torch.zeros(4, 3)),
    "returned by a hook": _of_leaf(_hooked),
    "of a parallel module": lambda y: _through(nn.Linear(3, 4), y),
    "of a fully sharded module": lambda y: _through(nn.Sequential(nn.Linear(3, 4)), y),
    "loaded": _loaded,
    "set_": lambda y: torch.zeros_like(x()).set_(y),
    "a parameter": nn.Parameter,
    "deepcopy": copy.deepcopy,
    "detached": lambda y: y.detach(),
    "converted": lambda y: (y.to(torch.float16), y.half(), y.double()),
    "lists": lambda y: torch._foreach_add([y, y], [y, y]),
    "beside plain": lambda y: torch.ones(4, 3) + y,
    "an index": lambda y: torch.arange(12)[y[:, 0].long()],
    "a number": lambda y: (torch.tensor(y[1, 1]), y[1, 1].item(), f"{y.sum()}", bool(y.sum()), y.tolist()),
    "metadata": lambda y: (y.shape, y.stride(), y.dtype, y.device, len(y), y.nbytes, y.ndim, y.is_contiguous()),
    "what it is": lambda y: (str(y.layout_), y.placements, str(y.device_mesh), repr(y), isinstance(y, DTensor)),
    "moved on": lambda y: (y.redistribute(placements=[Shard(1)]), y.redistribute(placements=[Shard(0)], async_op=True)),
    "local_map": sw.experimental.local_map(lambda z: 2 * z, [Replicate()]),
}
GRADIENTS: dict[str, Callable[[Any], Tensor]] = {
    "an op": lambda y: (y * y).sum(),
    "full_tensor": lambda y: y.full_tensor().pow(2).sum(),
    "full_tensor, Partial": lambda y: y.full_tensor(grad_placements=[Partial()]).pow(2).sum(),
    "to_local": lambda y: y.to_local().pow(2).sum(),
    "to_local, Partial": lambda y: y.to_local(grad_placements=[Partial()]).pow(2).sum(),
    "a dtype": lambda y: y.double().pow(2).sum(),
    "in place": lambda y: y.mul_(2).pow(2).sum(),
    "checkpointed": lambda y: torch.utils.checkpoint.checkpoint(torch.exp, y, use_reentrant=False).sum(),
}


@pytest.mark.parametrize("use", USES)
def test_a_running_redistribution_is_used_as_one_that_has_ended(use: str) -> None:
    def both() -> list[object]:
        return [evidence(USES[use](redistributed(x(), async_op))) for async_op in (False, True)]

    for expected, found in world(RANKS).run(both):
        assert found == expected


@pytest.mark.parametrize("loss", GRADIENTS)
def test_gradients_flow_back_through_a_running_redistribution(loss: str) -> None:
    def gradient(async_op: bool) -> object:
        source = x(grad=True)
        GRADIENTS[loss](redistributed(source, async_op)).backward()
        return evidence(source.grad)

    for expected, found in world(RANKS).run(lambda: (gradient(False), gradient(True))):
        assert found == expected


MAX, MIN, PRODUCT, AVG = Partial("max"), Partial("min"), Partial("product"), Partial("avg")
LATER: list[tuple[Placement, Placement]] = [(S0, R), (S0, S1), (P, R), (P, S0), (R, S0), (MAX, R), (S0, S0)]
LATER += [(AVG, R), (AVG, S0), (AVG, P), (S0, AVG), (R, AVG), (MAX, S1), (S1, MAX)]


def arrives_later() -> None:
    mesh = Mesh((sw.world_size(),))
    for src, dst in LATER:
        x = as_dtensor(distribute_tensor(FULL, mesh, [R]).redistribute(placements=[src]).detach().requires_grad_())
        looks: list[Callable[[DTensor], Tensor]] = [
            lambda y: y.full_tensor(),
            lambda y: as_dtensor(y * 1).full_tensor(),
            lambda y: as_dtensor(torch.stack([y, y])[0]).full_tensor(),
            lambda y: DTensor.from_local(
                y.to_local(), mesh, y.placements, run_check=False, shape=y.shape
            ).full_tensor(),
        ]
        for look in looks:
            y = x.redistribute(placements=[dst], async_op=True)
            other = x.redistribute(placements=[R], async_op=True)
            assert_close(look(y), FULL)
            assert type(y) is DTensor
            assert_close(look(other), FULL)
        y = x.redistribute(placements=[dst], async_op=True)
        (y * y).sum().backward()
        assert x.grad is not None
        assert_close(x.grad.full_tensor(), 2 * FULL)


@world(3)
def test_moves_may_be_waited_for_at_the_first_look() -> None:
    arrives_later()


def nobody_looks() -> None:
    full = VALUE.clone()
    x = distribute_tensor(full, MESH, [S0])
    for _ in range(3):
        x.redistribute(placements=[R], async_op=True)
    assert torch.equal(x.full_tensor(), full)


def the_source_may_change_meanwhile() -> None:
    full = torch.ones(512, 4096)
    moves = [(S0, R), (S0, S1), (S1, S0), (P, R), (P, S0), (P, S1), (S0, S0)]
    moves += [(MAX, R), (MAX, S0), (MIN, R), (MIN, S1), (PRODUCT, S0), (AVG, R), (AVG, P)]
    for src, dst in moves:
        x = as_dtensor(distribute_tensor(full, MESH, [R]).redistribute(placements=[src]))
        y = x.redistribute(placements=[dst], async_op=True)
        x.zero_()
        assert torch.equal(y.full_tensor(), full)


def several_threads_may_look_at_once() -> None:
    full = torch.arange(600.0 * 500).view(600, 500)
    x = distribute_tensor(full, MESH, [S0])
    for _ in range(20):
        y = x.redistribute(placements=[R], async_op=True)
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda _, y=y: (tuple(y.shape), y.to_local().clone()), range(4)))
        for shape, local in found:
            assert shape == full.shape
            assert torch.equal(local, full)


def use_after_a_failure() -> list[str]:
    x = distribute_tensor(FULL, MESH, [S0])
    if rank() == 1:
        raise ValueError("boom")
    y = x.redistribute(placements=[R], async_op=True)
    found = []
    for _ in range(2):
        with pytest.raises(RemoteRankError) as caught:
            y.to_local()
        found.append(str(caught.value).splitlines()[0])
    raise RuntimeError(str(found))


PAIRS: list[tuple[Any, Any]] = [
    (theirs.Shard(0), theirs.Replicate()),
    (theirs.Shard(0), theirs.Shard(1)),
    (theirs.Partial(), theirs.Replicate()),
    (theirs.Partial(), theirs.Shard(0)),
    (theirs.Replicate(), theirs.Shard(1)),
]
DTYPES = (None, torch.bfloat16, torch.float64)


def as_torch_does() -> None:
    """Values, dtypes and gradients of asynchronous redistributions."""
    mesh = init_device_mesh("cpu", (2,))
    local = torch.arange(16.0).view(4, 4) / 4  # exact in every dtype, and so are its sums
    for (src, dst), forward, backward in product(PAIRS, DTYPES, DTYPES):
        options: Any = {"async_op": True, "forward_dtype": forward, "backward_dtype": backward}
        results = []
        for cls in (theirs.DTensor, DTensor):
            leaf = local.clone().requires_grad_()
            source: Any = cls.from_local(leaf, mesh, [src], run_check=False)
            y = source.redistribute(mesh, [dst], **options)
            found = y.to_local()
            (2 * found + 0).sum().backward()
            results.append((found + 0, leaf.grad))
        (their_value, their_gradient), (value, gradient) = results
        case = f"{src} to {dst}, {forward}, {backward}"
        assert value.dtype == their_value.dtype, case
        assert_close(value, their_value, msg=case)
        assert gradient is not None
        assert gradient.dtype == torch.float32, case
        assert_close(gradient, their_gradient, msg=case)


def collectives_of_torch() -> None:
    """An `AsyncCollectiveTensor` is waited for, whichever way it comes."""
    mesh = init_device_mesh("cpu", (2,))
    group: Any = dist.group.WORLD
    rows = VALUE[2 * sw.rank() : 2 * sw.rank() + 2]

    def gathered() -> Tensor:
        made = funcol.all_gather_tensor(rows, 0, group)
        assert type(made) is funcol.AsyncCollectiveTensor
        return made

    takes: list[tuple[Callable[[Tensor], Any], Tensor]] = [
        (lambda t: DTensor.from_local(t, mesh, [Replicate()]), VALUE),
        (lambda t: distribute_tensor(t, mesh, [Shard(1)]), VALUE),
        (lambda t: x() + t, 2 * VALUE),
        (lambda t: x().copy_(t), VALUE),
        (
            lambda t: sw.shard_module(nn.ParameterDict({"w": nn.Parameter(t + 0)}), {"w": [Shard(0)]}, mesh=mesh)["w"],
            VALUE,
        ),
    ]
    for take, expected in takes:
        assert_close(take(gathered()).full_tensor(), expected)
    leaf = rows.clone().requires_grad_()
    made = funcol.all_gather_tensor_autograd(leaf, 0, group)
    DTensor.from_local(made, mesh, [Replicate()]).pow(2).sum().backward()
    assert leaf.grad is not None
    assert_close(leaf.grad, 2 * 2 * rows)  # each rank's copy of the loss counts, as in torch
    theirs_running: Any = theirs.distribute_tensor(VALUE, mesh, [theirs.Shard(0)]).redistribute(
        mesh, [theirs.Replicate()], async_op=True
    )
    assert_close(DTensor.from_torch_dtensor(theirs_running).full_tensor(), VALUE)
    y = x().redistribute(placements=[Replicate()], async_op=True)
    assert_close(funcol.wait_tensor(y.to_local()), VALUE)  # programs that wait before use go on


@pytest.mark.processes
def test_on_real_ranks() -> None:
    ranks = world(2, real=True)
    on_ranks = arrives_later, nobody_looks, the_source_may_change_meanwhile, several_threads_may_look_at_once
    for body in (*on_ranks, as_torch_does, collectives_of_torch):
        ranks.run(body)


@pytest.mark.processes
def test_every_use_of_a_move_that_failed_raises_why() -> None:
    with pytest.raises((ValueError, RuntimeError)) as caught:
        world(2, real=True).run(use_after_a_failure)
    text = str([caught.value, *caught.value.__notes__])
    assert text.count("Rank 1 failed: ValueError: boom") == 2
