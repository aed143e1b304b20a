"""Ranks outside the mesh of an op have the graph and the errors of the others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import Mesh, Replicate, Shard, distribute_tensor, rank
from shardwise.errors import RuleError
from shardwise.testing import world
from tools.program_judge import Outcome, verdict
from tools.programs import Program

X = "x1 = leaf(4, (3, 4), torch.float64, {}, Mesh((2,), (1, 0)), [{}])"
GRAD, NONE = X.format(True, "Shard(0)"), X.format(False, "Shard(0)")

SAME = {
    "an operand that the op itself changes": (GRAD, "v2 = x1.sum()", "v2.addcmul_(v2, v2.mean())"),
    "a result that was saved and changed": (GRAD, "v2 = x1.exp()", "v2.mul_(2)"),
    "an assignment to what was saved": (GRAD, "v2 = x1 * 1", "v3 = v2.sin()", "v2[1:] = 2"),
    "one of several views": (GRAD, "v2 = x1 * 1", "v2.unbind(0)[1].add_(1)"),
    "what detach() returns": (GRAD, "v2 = (x1.abs() + 1).sqrt()", "v2.detach().add_(1)"),
    "a contiguous tensor itself": (NONE.replace("Shard(0)", "OnRanks(0)"), "v2 = x1.contiguous()", "v3 = v2.mT"),
    "the only one of several views": (GRAD, "v2 = x1 * 1", "v2[:1].unbind(0)[0].add_(1)"),
    "one of several views without gradients": (NONE, "v2 = x1.chunk(2)[1]", "v2.add_(1)", "x1.mul_(2)"),
    "a leaf": (GRAD, "x1[0] = 1"),
    "a detached result": (GRAD, "v2 = x1.amax(0)", "v3 = v2 * 1", "v2.detach_()"),
    "one tensor as its own result": (GRAD, "v2 = x1.double()", "v2.requires_grad_()"),
    "a dtype that a kernel does not take": (
        X.format(False, "Replicate()"), "v2 = x1 > 0", "v3 = v2.argmin()"),
    "a result of autocast": (
        "x1 = leaf(4, (7, 5), torch.float32, True, Mesh((1,), (1,)), [Replicate()])",
        "v2 = autocast(lambda x: F.linear(x, x).softmax(-1), x1 * 2)",
        "v3 = torch.autograd.grad(v2.float().square().sum(), [x1])[0]"),
    "an op in place that a kernel does not take": (NONE, "v2 = (x1 > 0).long()", "v2.erfinv_()"),
}  # fmt: skip


@pytest.mark.parametrize("lines", SAME.values(), ids=SAME)
def test_a_rank_outside_raises_or_goes_on_as_the_others_do(lines: tuple[str, ...]) -> None:
    found = verdict(Program(3, lines))
    assert found.outcome is Outcome.RIGHT, found


def test_a_graph_of_a_backward_is_refused_on_ranks_outside_the_mesh() -> None:
    """Torch's engine stops, so the other ranks learn of it where they need this one."""

    def body() -> str:
        x = distribute_tensor(torch.ones(3), Mesh((2,)), [Replicate()]).redistribute(Mesh((1,), (1,)), [Replicate()])
        x = x.detach().requires_grad_()
        if rank() == 1:
            (slope,) = torch.autograd.grad((x.sin() ** 3).sum(), x, create_graph=True)
            return str(torch.autograd.grad(slope.sum(), x)[0].shape)
        with pytest.raises(
            RuleError, match=r"rank 0 is outside Mesh.* create_graph=True .* Fix: call it there"
        ) as caught:
            torch.autograd.grad((x.sin() ** 3).sum(), x, create_graph=True)
        assert x.grad is None
        return str(caught.value).split(":")[0]

    assert world(2).run(body) == ["sum", "torch.Size([3])"]
    lines = GRAD, "v3 = torch.autograd.grad((x1 ** 3).sum(), [x1], create_graph=True)[0]", "v4 = v3 * 2"
    assert verdict(Program(3, lines)).outcome is Outcome.REFUSED


WRITES: dict[str, Callable[[Tensor, Any], object]] = {
    "copy_": lambda p, x: p.copy_(x),
    "add_": lambda p, x: p.add_(x),
    "x[...] =": lambda p, x: p.__setitem__(0, x[0]),
    "a decomposed function": lambda p, x: torch.vander(x),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@world(2)
def test_no_plain_tensor_is_written_from_a_mesh_that_this_rank_is_outside_of(
    write: Callable[[Tensor, Any], object],
) -> None:
    x = distribute_tensor(torch.ones(3), Mesh((2,)), [Replicate()]).redistribute(Mesh((1,), (1,)), [Replicate()])
    if rank() == 1:
        write(torch.zeros(3), x)
    else:
        with pytest.raises(RuleError, match="is outside Mesh"):
            write(torch.zeros(3), x)


@torch.library.custom_op("shardwise_tests::double_", mutates_args=("x",))
def double_(x: torch.Tensor) -> None:
    x.mul_(2)


@double_.register_fake
def _(x: torch.Tensor) -> None:
    return None


@world(2)
def test_calls_that_do_not_depend_on_data_go_on_outside_the_mesh() -> None:
    x = distribute_tensor(torch.ones(3), Mesh((1,), (1,)), [Shard(0)]).requires_grad_()
    other = torch.ones(2, dtype=torch.float64)
    for y in (x.to("cpu", torch.float64), x.to(torch.device("cpu"), torch.float64), x.to(other), x.type_as(other)):
        assert y.dtype == torch.float64
        assert y.shape == (3,)
    torch.autograd.backward([(x * x).sum(), x * x], [torch.tensor(2.0), torch.ones(3)])
    assert x.grad is not None
    (grad,) = torch.autograd.grad([x * x], [x], [torch.ones(3)])
    assert grad.shape == (3,)
    assert double_(x.detach()) is None


@world(2)
def test_a_gradient_of_another_shape_is_refused_outside_the_mesh_too() -> None:
    x = distribute_tensor(torch.ones(3), Mesh((1,), (1,)), [Shard(0)]).requires_grad_()
    with pytest.raises(RuntimeError, match="Mismatch in shape"):
        torch.autograd.backward([x * x], [torch.ones(2)])
