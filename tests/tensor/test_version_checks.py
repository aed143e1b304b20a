"""In-place changes of views, results and saved tensors, as on one process: the same values, or the same error."""

from typing import Any

import pytest
import torch

from shardwise import DTensor, Mesh, Partial, Shard, distribute_tensor
from shardwise.errors import RuleError
from shardwise.testing import world
from tools.program_judge import Outcome, verdict
from tools.programs import Program

X = "x1 = leaf(4, {shape}, torch.float64, {grad}, Mesh(({n},)), [{placement}])"


def leaf(shape: tuple[int, ...], placement: str, grad: bool = True, n: int = 4) -> str:
    return X.format(shape=shape, placement=placement, grad=grad, n=n)


RIGHT = {
    "the result of a scan that was saved": (leaf((7,), "Shard(0)"), "v2 = x1.logcumsumexp(0)", "v2 -= v2.mean()"),
    "an operand that one rank holds none of": (
        leaf((2, 3), "Shard(0)"), "v2 = x1 * 1", "v3 = v2.max()", "v2.fill_diagonal_(2)"
    ),
    "an operand that was redistributed": (
        leaf((6, 4), "Shard(0)"), "v2 = x1 * 1", "v3 = v2 @ v2.mT", "v2[0] = 1"
    ),
    "on ranks outside the mesh": (
        "x1 = leaf(4, (2, 3), torch.float64, True, Mesh((1,), (1,)), [Replicate()])", "v2 = x1.exp()", "v2.mul_(2)"
    ),
    "what a conversion to the same dtype returns": (
        leaf((4, 2), "Partial('max')", False), "v2 = x1.type_as(x1)", "v2.masked_fill_(v2 > 0, True)"
    ),
    "a flattened conversion": (
        leaf((5,), "Shard(0)", False), "v2 = x1.prod(0)", "v3 = v2.type_as(v2)", "v3.flatten().add_(1)"
    ),
    "a view of a row": (leaf((6, 7), "Shard(0)", False), "v2 = x1.topk(1, -1).values", "v2.t().reshape(-1).add_(1)"),
    "a sorted shard of one element": (leaf((2,), "Shard(0)", False), "v2 = x1.msort()", "v2.contiguous().add_(1)"),
    "a copy of every second row": (leaf((4, 7), "Shard(0)"), "v2 = x1[::2]", "v2.flatten().add_(1)"),
    "a nested checkpoint of an op with indices": (
        leaf((4, 7), "Shard(0)"),
        "v2 = x1 * 1",
        "v3 = checkpoint(lambda x: x.max(0).values * checkpoint(lambda y: y.sum(0), x), v2)",
        "v2.mul_(2)",
    ),
    "what autocast saves a cast of": (
        "x1 = leaf(86, (1, 2), torch.float32, True, Mesh((2,)), [Shard(0)])",
        "v2 = x1 * 1",
        "v3 = autocast(lambda x: F.linear(x, x), v2.float())",
        "v2.mul_(2)",
    ),
    "what instance_norm copies because it is transposed": (
        leaf((3, 1, 2), "Shard(0)"),
        "v2 = (x1 * 1).permute(2, 1, 0)",
        "v3 = F.instance_norm(v2)",
        "v2[..., ::2, ::2].zero_()",
    ),
    "on ranks outside the mesh, what was detached without gradients": (
        "x1 = leaf(18, (4, 7), torch.float32, False, Mesh((1,), (1,)), [Replicate()])",
        "with torch.no_grad(): v2 = x1.detach()",
        "v2.mul_(leaf(3, (4, 7), torch.float32, True, None))",
    ),
    "an operand that was gathered for an op without rows": (
        "x1 = leaf(45, (), torch.float64, True, Mesh((2,)), [Partial()])",
        "v2 = x1.gather(0, x1.argsort(0))",
        "with torch.no_grad(): x1.copy_(torch.tensor(2.0))",
    ),
    "a view without gradients that is written": (
        "x1 = leaf(30, (), torch.float64, True, Mesh((2,)), [Partial()])", "with torch.no_grad(): x1[None] = 3"
    ),
    "a partial minimum that is changed without gradients": (
        leaf((7, 3), "Shard(0)"),
        "v2 = redistribute(x1, Mesh((4,)), [Partial('min')])",
        "with torch.no_grad(): v2.mul_(2)",
    ),
    "data of a partial maximum": (
        leaf((7, 3), "Shard(0)"), "v2 = redistribute(x1, Mesh((4,)), [Partial('max')])", "v2.data.mul_(True)"
    ),
    "indices, which torch has in columns": (
        leaf((3, 4), "Shard(0)", False), "v2 = (x1 > 0).nonzero()", "v2.reshape(-1).add_(1)"
    ),
    "rows of a transposed tensor, by a mask": (
        leaf((3, 4, 2), "Shard(0)", False),
        "v2 = x1.permute(1, 2, 0)",
        "v3 = v2[v2.sum((1, 2)) > -9]",
        "v3.contiguous().add_(1)",
    ),
    "columns of a transposed tensor, by a mask": (
        leaf((3, 4, 2), "Shard(1)", False),
        "v2 = x1.permute(1, 2, 0)",
        "v3 = v2[:, torch.tensor([True, False])]",
        "v3.contiguous().add_(1)",
    ),
    "unique columns": (leaf((3, 4), "Shard(0)", False), "v2 = x1.unique(dim=1)", "v2.contiguous().add_(1)"),
    "a fetched row, transposed in place": (leaf((2,), "Shard(0)", n=2), "v2 = x1 * 1", "v3 = v2[0]", "v3.t_()"),
    "a custom Function that saved it": (leaf((4, 7), "Shard(0)"), "v2 = x1 * 1", "v3 = Cube.apply(v2)", "v2.mul_(2)"),
    "a result that is no view": (leaf((2, 4), "OnRanks(1)", False), "v2 = F.pad(x1, (1, 0))", "v2.detach_()"),
    "a result under saved-tensor hooks, which is no view": (
        leaf((3, 4), "Shard(0)", False), "with torch.autograd.graph.save_on_cpu(): v2 = x1.sign()", "v2.detach_()"
    ),
    "a result of a checkpoint, which is no view": (
        leaf((3, 4), "Shard(0)", False), "v2 = checkpoint(lambda x: x.exp(), x1)", "v2.detach_()"
    ),
    "a custom Function under saved-tensor hooks": (
        leaf((3, 4), "Shard(0)"),
        "with torch.autograd.graph.save_on_cpu(): v2 = Scaled.apply(x1, x1)",
        "v2.detach().add_(1)",
    ),
    "brackets with a number before a new dim": (leaf((4, 3), "Replicate()", False), "v2 = x1 * 1", "v2[3, None] += 1"),
    "a scan that is no view": (leaf((3, 3), "Shard(1)", False), "v2 = x1.cummax(1).values", "v2.detach_()"),
}  # fmt: skip

REFUSED = {
    "a copy of a view that was made under saved-tensor hooks": (
        leaf((4, 2), "Shard(0)", False), "with torch.autograd.graph.save_on_cpu(): v2 = x1.unbind(0)[1]", "x1.mul_(2)"
    ),
    "a copy that ranks without elements cannot know of": (
        leaf((3, 6), "OnRanks(2)"), "v2 = x1.t()", "v2.flatten().add_(1)"
    ),
    "expanded partial sums": (leaf((5,), "Partial('sum')", False), "v2 = x1.expand(2, 5)", "v2.add_(1)"),
    "overlapping windows of partial sums": (
        leaf((4, 4), "Partial('sum')", False), "v2 = x1 * 1", "v2.unfold(0, 2, 1).add_(1)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("lines", RIGHT.values(), ids=RIGHT)
@pytest.mark.parametrize("n", [2, 4])
def test_a_change_in_place_does_what_it_does_in_one_process(lines: tuple[str, ...], n: int) -> None:
    lines = tuple(line.replace("Mesh((4,))", f"Mesh(({n},))") for line in lines)
    assert verdict(Program(n, lines)).outcome is Outcome.RIGHT, verdict(Program(n, lines))


def test_a_vector_in_boxes_is_its_own_flattened_form() -> None:
    boxes = "x1 = leaf(4, (6,), torch.float64, True, Mesh((2,)), [Boxes([[[[2], [4]]], [[[0], [2]]]])])"
    lines = boxes, "v2 = x1.flatten()", "torch.optim.SGD([v2], 0.1, momentum=0.5).step()"
    assert verdict(Program(2, lines)).outcome is Outcome.RIGHT, verdict(Program(2, lines))


@pytest.mark.parametrize("lines", REFUSED.values(), ids=REFUSED)
def test_what_no_rank_can_do_alone_is_one_error_on_all(lines: tuple[str, ...]) -> None:
    found = verdict(Program(4, lines))
    assert found.outcome in (Outcome.REFUSED, Outcome.RIGHT), found


def test_the_error_names_the_op_and_holds_no_memory() -> None:
    def body() -> str:
        x = distribute_tensor(torch.ones(2, 3), Mesh((4,)), [Shard(0)]).requires_grad_()
        y = x * 1
        z = y.amax()
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as error:
            z.backward()
        return str(error.value)

    assert any("amax saved is at version 1; expected version 0" in text for text in world(4).run(body))


@world(3)
def test_the_gradient_of_a_leaf_of_partial_maxima_is_that_of_the_maximum() -> None:
    x: Any = distribute_tensor(torch.arange(6.0).view(3, 2), Mesh((3,)), [Shard(0)]).amax(0).requires_grad_()
    (x * torch.tensor([2.0, 3.0])).sum().backward()
    assert x.grad.full_tensor().tolist() == [2, 3]


@world(2)
def test_factors_of_a_product_have_no_gradient_of_it() -> None:
    x = distribute_tensor(torch.tensor([2.0, 3.0]), Mesh((2,)), [Partial("product")])
    with pytest.raises(RuleError, match="each rank would have that of its factor"):
        x.requires_grad_()
    own = torch.tensor([2.0, 3.0], requires_grad=True)
    product: Any = DTensor.from_local(own, Mesh((2,)), [Partial("product")])
    product.sum().backward()
    assert own.grad is not None
    assert own.grad.tolist() == [2, 3]  # the gradient of the factor
    with pytest.raises(RuleError, match="each rank would have that of its factor"):
        torch.autograd.grad(product.sum(), product)


@world(2)
def test_finding_out_what_is_saved_draws_no_random_numbers() -> None:
    """A rank that knows the call already would draw others."""
    x = distribute_tensor(torch.ones(7, dtype=torch.float64), placements=[Shard(0, [7, 0])]).requires_grad_()
    torch.manual_seed(0)
    first = torch.randn_like(x, dtype=torch.float64, device="cpu").tolist()
    torch.manual_seed(0)
    assert torch.randn_like(x, dtype=torch.float64, device="cpu").tolist() == first
