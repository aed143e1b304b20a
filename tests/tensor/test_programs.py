"""Short programs of ops that are right on their own: the same values as in one process, or the same error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import DTensor, Mesh, Partial, Replicate, Shard, distribute_tensor, rank
from shardwise.errors import RuleError
from shardwise.testing import world
from tools.op_judge import Outcome
from tools.program_judge import verdict
from tools.programs import Program

X = "x1 = leaf(4, {shape}, torch.float64, {grad}, Mesh({mesh}), [{placements}])"
AVERAGE = "v2 = redistribute(x1, Mesh((4,)), [Partial('avg')])"
INFINITE = "torch.tensor(float('inf'), dtype=torch.float64)"
OUT, OUT_NONE = (
    f"x1 = leaf(4, (3, 4), torch.float64, {grad}, Mesh((2,), (1, 0)), [Shard(0)])" for grad in (True, False)
)


def leaf(
    shape: tuple[int, ...], placements: str, grad: bool = True, mesh: tuple[int, ...] = (4,), dtype: str = "float64"
) -> str:
    return X.format(shape=shape, placements=placements, grad=grad, mesh=mesh).replace("float64", dtype)


WHOLE = leaf((4, 3), "Replicate()")

RIGHT = {
    # Gradients of averages: each of the n terms has 1/n of it.
    "an average that gets a gradient": (leaf((4, 3), "Partial('avg')", False), "x1.requires_grad_()", "v2 = x1.exp()"),
    "an average beside a sum": (
        leaf((4, 3), "Partial('avg'), Partial('sum')", mesh=(2, 2)), "v2 = Cube.apply(x1)", "v3 = x1.exp()"),
    "a sharded average": (leaf((4, 3), "Partial('avg'), Shard(1)", mesh=(2, 2)), "v2 = Cube.apply(x1)"),
    "an average in a custom Function": (WHOLE, AVERAGE, "v3 = Cube.apply(v2)", "v4 = v3.exp()"),
    "an average in a checkpoint": (WHOLE, AVERAGE, "v3 = checkpoint(lambda x: Cube.apply(x) + x[0], v2)"),
    "an average in a module with hooks": (WHOLE, AVERAGE, "v3 = hooked(nn.Linear(3, 2).double(), v2, 2)"),
    "an average with a hook": (WHOLE, AVERAGE, "v2.register_hook(lambda g: g * 2)", "v3 = v2.exp()"),
    "the gradient of an average": (WHOLE, AVERAGE, "v3 = torch.autograd.grad((v2**2).sum(), v2, create_graph=True)[0]"),
    "an average through plain tensors": (WHOLE, AVERAGE, "v3 = boundary(v2)", "v4 = v3.exp()"),
    # Infinite gradients of maxima: elements that are not the maximum get zero in torch.max, and nan in torch.amax.
    "the maximum times infinity": (leaf((6, 2), "Shard(0)"), "v2 = x1.max()", f"v3 = v2 * {INFINITE}"),
    "the minimum of nan": (leaf((6, 2), "Shard(0)"), "v2 = torch.where(x1 > 1, float('nan'), x1)", "v3 = v2.min()"),
    "a maximum along a dim times infinity": (leaf((6, 2), "Shard(0)"), "v2 = x1.amax(0)", f"v3 = v2 * {INFINITE}"),
    "the variance of one maximum": (leaf((6, 2), "Shard(0)"), "v2 = x1.max()", "v3 = v2.var()"),
    # dtypes and gradients of odd operands
    "blocks of a 0-d tensor in double precision": (
        leaf((6,), "Shard(0)", dtype="float32"), "v2 = x1.double().sum()", "v3 = torch.block_diag(x1, v2)"),
    "the median of nothing": (leaf((3, 0), "Shard(0)"), "v2 = x1.median()"),
    "dropout of nothing, which saves nothing": (
        leaf((7, 0), "Replicate()"), "v2 = x1 * 1", "v3 = checkpoint(lambda x: F.dropout(x, 0.3), v2)", "v2.tril_()"),
    # The same object as in torch
    "dropout of an unbatched input that drops nothing": (
        leaf((4, 3), "Shard(0)", False), "v2 = F.dropout1d(x1, 0.3, False)", "v2.unsqueeze_(0)", "v2.mul_(2)"),
    "real partial maxima, which are their own conjugates": (
        leaf((4, 3), "Partial('max')", False), "v2 = x1.conj()", "v3 = torch.positive(x1)", "v2.mul_(2)", "v3.mul_(2)"),
    "a product of two dtypes, summed over one element": (
        leaf((3, 1), "Shard(1)", dtype="float32"), 'v2 = torch.einsum("ij,kj->ik", torch.ones(2, 1).double(), x1)'),
    "what contiguous returns under saved-tensor hooks": (
        leaf((4,), "Replicate()", False), "with torch.autograd.graph.save_on_cpu(): v2 = x1.contiguous()",
        "v2.unsqueeze_(0)"),
    "a hook of a plain leaf in the dtype of a DTensor, which is the leaf itself": (
        WHOLE, "x2 = leaf(7, (5,), torch.float64, True, None)", "v3 = x2.type_as(x1)", "v4 = x2.to(x1)",
        "v3.register_hook(lambda g: g.clamp(-0.5, 1))", "v5 = v4.sin()"),
    "a view of a plain tensor in the shape of a DTensor": (
        WHOLE, "x2 = leaf(7, (12,), torch.float64, False, None)", "v3 = x2.view_as(x1)", "v3.mul_(2)",
        "v4 = x2.reshape_as(x1)", "v4.add_(1)", "v5 = x2[:3].expand_as(x1)"),
    "a gradient of an empty shard, detached in place": (
        leaf((1, 2), "Shard(0)"), "v2 = torch.autograd.grad((x1[0] ** 2).sum(), [x1], create_graph=True)[0]",
        "v2.detach_()", "v2.mul_(2)"),
    "a gradient that torch returns as a view": (
        WHOLE, "v2 = torch.autograd.grad((x1.view(12) ** 3).sum(), [x1], create_graph=True)[0]",
        "v3 = torch.autograd.grad((v2 * v2).sum(), [x1])[0]", "v2.mul_(2)"),
    "a hook of attention that was changed without gradients": (
        leaf((1, 2, 4), "Shard(0)"),
        "v2 = F.scaled_dot_product_attention(x1, x1, x1)",
        "with torch.no_grad(): v2.mul_(0.5)",
        "v2.grad_fn; v2.register_hook(lambda g: g * 1)",  # torch crashes if nobody reads it
    ),
}  # fmt: skip
CHANGES = {
    "the result of a scan that was saved": (leaf((7,), "Shard(0)"), "v2 = x1.logcumsumexp(0)", "v2 -= v2.mean()"),
    "an operand that one rank holds none of": (
        leaf((2, 3), "Shard(0)"), "v2 = x1 * 1", "v3 = v2.max()", "v2.fill_diagonal_(2)"),
    "saved by batch_norm": (
        leaf((3, 2, 3), "Shard(0)"), "v2 = x1 * 1", "v3 = F.batch_norm(v2, None, None, training=True)", "v2.mul_(2)"),
    "saved by instance_norm": (leaf((3, 2, 3), "Shard(2)"), "v2 = x1 * 1", "v3 = F.instance_norm(v2)", "v2.mul_(2)"),
    "saved by layer_norm": (leaf((3, 2, 3), "Shard(0)"), "v2 = x1 * 1", "v3 = F.layer_norm(v2, (2, 3))", "v2.mul_(2)"),
    "saved by group_norm": (leaf((3, 2, 3), "Shard(1)"), "v2 = x1 * 1", "v3 = F.group_norm(v2, 2)", "v2.mul_(2)"),
    "saved by rms_norm": (leaf((3, 2, 3), "Shard(2)"), "v2 = x1 * 1", "v3 = F.rms_norm(v2, (2, 3))", "v2.mul_(2)"),
    "saved by attention": (
        leaf((2, 4, 5, 3), "Shard(0)"), "v2 = x1 * 1", "v3 = F.scaled_dot_product_attention(v2, v2, v2)", "v3.mul_(2)"),
    "saved by attention with a mask": (
        leaf((2, 5, 3), "Shard(0)"), "v2 = x1 * 1",
        "v3 = F.scaled_dot_product_attention(v2, v2, v2, torch.ones(5, 5).tril().bool())", "v3.mul_(2)"),
    "saved by nll_loss": (
        leaf((3, 2, 3), "Shard(0)"), "v2 = x1 * 1", "v3 = F.nll_loss(v2, torch.zeros(3, 3, dtype=torch.int64))",
        "v2.mul_(2)"),
    "an operand that was redistributed": (leaf((6, 4), "Shard(0)"), "v2 = x1 * 1", "v3 = v2 @ v2.mT", "v2[0] = 1"),
    "on ranks outside the mesh": (
        "x1 = leaf(4, (2, 3), torch.float64, True, Mesh((1,), (1,)), [Replicate()])", "v2 = x1.exp()", "v2.mul_(2)"),
    "what a conversion to the same dtype returns": (
        leaf((4, 2), "Partial('max')", False), "v2 = x1.type_as(x1)", "v2.masked_fill_(v2 > 0, True)"),
    "a flattened conversion": (
        leaf((5,), "Shard(0)", False), "v2 = x1.prod(0)", "v3 = v2.type_as(v2)", "v3.flatten().add_(1)"),
    "a view of a row": (leaf((6, 7), "Shard(0)", False), "v2 = x1.topk(1, -1).values", "v2.t().reshape(-1).add_(1)"),
    "a sorted shard of one element": (leaf((2,), "Shard(0)", False), "v2 = x1.msort()", "v2.contiguous().add_(1)"),
    "a nested checkpoint of an op with indices": (
        leaf((4, 7), "Shard(0)"), "v2 = x1 * 1",
        "v3 = checkpoint(lambda x: x.max(0).values * checkpoint(lambda y: y.sum(0), x), v2)", "v2.mul_(2)"),
    "what autocast saves a cast of": (
        "x1 = leaf(86, (1, 2), torch.float32, True, Mesh((2,)), [Shard(0)])", "v2 = x1 * 1",
        "v3 = autocast(lambda x: F.linear(x, x), v2.float())", "v2.mul_(2)"),
    "what instance_norm copies because it is transposed": (
        leaf((3, 1, 2), "Shard(0)"), "v2 = (x1 * 1).permute(2, 1, 0)", "v3 = F.instance_norm(v2)",
        "v2[..., ::2, ::2].zero_()"),
    "on ranks outside the mesh, what was detached without gradients": (
        "x1 = leaf(18, (4, 7), torch.float32, False, Mesh((1,), (1,)), [Replicate()])",
        "with torch.no_grad(): v2 = x1.detach()", "v2.mul_(leaf(3, (4, 7), torch.float32, True, None))"),
    "an operand that was gathered for an op without rows": (
        "x1 = leaf(45, (), torch.float64, True, Mesh((2,)), [Partial()])", "v2 = x1.gather(0, x1.argsort(0))",
        "with torch.no_grad(): x1.copy_(torch.tensor(2.0))"),
    "a view without gradients that is written": (
        "x1 = leaf(30, (), torch.float64, True, Mesh((2,)), [Partial()])", "with torch.no_grad(): x1[None] = 3"),
    "data of a partial maximum": (
        leaf((7, 3), "Shard(0)"), "v2 = redistribute(x1, Mesh((4,)), [Partial('max')])", "v2.data.mul_(True)"),
    "indices, which torch has in columns": (
        leaf((3, 4), "Shard(0)", False), "v2 = (x1 > 0).nonzero()", "v2.reshape(-1).add_(1)"),
    "rows of a transposed tensor, by a mask": (
        leaf((3, 4, 2), "Shard(0)", False), "v2 = x1.permute(1, 2, 0)", "v3 = v2[v2.sum((1, 2)) > -9]",
        "v3.contiguous().add_(1)"),
    "a fetched row, transposed in place": (leaf((2,), "Shard(0)", mesh=(2,)), "v2 = x1 * 1", "v3 = v2[0]", "v3.t_()"),
    "a custom Function that saved it": (leaf((4, 7), "Shard(0)"), "v2 = x1 * 1", "v3 = Cube.apply(v2)", "v2.mul_(2)"),
    "a result that is not a view": (leaf((2, 4), "OnRanks(1)", False), "v2 = F.pad(x1, (1, 0))", "v2.detach_()"),
    "a result under saved-tensor hooks, which is not a view": (
        leaf((3, 4), "Shard(0)", False), "with torch.autograd.graph.save_on_cpu(): v2 = x1.sign()", "v2.detach_()"),
    "a custom Function under saved-tensor hooks": (
        leaf((3, 4), "Shard(0)"), "with torch.autograd.graph.save_on_cpu(): v2 = Scaled.apply(x1, x1)",
        "v2.detach().add_(1)"),
    "brackets with a number before a new dim": (leaf((4, 3), "Replicate()", False), "v2 = x1 * 1", "v2[3, None] += 1"),
    "a scan that is not a view": (leaf((3, 3), "Shard(1)", False), "v2 = x1.cummax(1).values", "v2.detach_()"),
}  # fmt: skip
# Ranks outside the mesh have the graph and the errors of the others.
OUTSIDE = {
    "an operand that the op itself changes": (OUT, "v2 = x1.sum()", "v2.addcmul_(v2, v2.mean())"),
    "a result that was saved and changed": (OUT, "v2 = x1.exp()", "v2.mul_(2)"),
    "an assignment to what was saved": (OUT, "v2 = x1 * 1", "v3 = v2.sin()", "v2[1:] = 2"),
    "one of several views": (OUT, "v2 = x1 * 1", "v2.unbind(0)[1].add_(1)"),
    "what detach() returns": (OUT, "v2 = (x1.abs() + 1).sqrt()", "v2.detach().add_(1)"),
    "a contiguous tensor itself": (OUT_NONE.replace("Shard(0)", "OnRanks(0)"), "v2 = x1.contiguous()", "v3 = v2.mT"),
    "a leaf": (OUT, "x1[0] = 1"),
    "a detached result": (OUT, "v2 = x1.amax(0)", "v3 = v2 * 1", "v2.detach_()"),
    "one tensor as its own result": (OUT, "v2 = x1.double()", "v2.requires_grad_()"),
    "a dtype that a kernel does not take": (
        OUT_NONE.replace("Shard(0)", "Replicate()"), "v2 = x1 > 0", "v3 = v2.argmin()"),
    "a result of autocast": (
        "x1 = leaf(4, (7, 5), torch.float32, True, Mesh((1,), (1,)), [Replicate()])",
        "v2 = autocast(lambda x: F.linear(x, x).softmax(-1), x1 * 2)",
        "v3 = torch.autograd.grad(v2.float().square().sum(), [x1])[0]"),
}  # fmt: skip
REFUSED = {
    "a copy of a view that was made under saved-tensor hooks": (
        leaf((4, 2), "Shard(0)", False), "with torch.autograd.graph.save_on_cpu(): v2 = x1.unbind(0)[1]", "x1.mul_(2)"),
    "a copy that ranks without elements cannot know of": (
        leaf((3, 6), "OnRanks(2)"), "v2 = x1.t()", "v2.flatten().add_(1)"),
    "expanded partial sums": (leaf((5,), "Partial('sum')", False), "v2 = x1.expand(2, 5)", "v2.add_(1)"),
    "overlapping windows of partial sums": (
        leaf((4, 4), "Partial('sum')", False), "v2 = x1 * 1", "v2.unfold(0, 2, 1).add_(1)"),
    "the graph of a backward outside the mesh": (
        OUT, "v3 = torch.autograd.grad((x1 ** 3).sum(), [x1], create_graph=True)[0]", "v4 = v3 * 2"),
    "changes of a copy of a view that became it in place": (
        leaf((7, 1, 5), "Replicate(), Shard(1)", False, (2, 2)), "v2 = x1.detach()", "v2.squeeze_()", "x1.mul_(2)"),
    "changes of a view in place that became a copy": (
        leaf((7, 1, 5), "Replicate(), Shard(1)", False, (2, 2)), "v2 = x1.detach()", "v2.squeeze_()", "v2.mul_(2)"),
}  # fmt: skip
# Torch raises, or does not define it; by the strides of a shard it would do so on some ranks only.
OVERLAPPING = {
    "a row of the tensor": (leaf((5, 3), "Shard(1)", False), "x1.addcmul_(x1, x1[0])"),
    "a row of a rotated tensor": (leaf((5, 2), "Shard(0)", False), "v2 = x1.rot90()", "v2 *= v2[0]"),
    "another view of all of it": (
        leaf((1, 5), "Shard(1)", False), "v2 = x1.squeeze(1)", "x1.scatter_add_(0, x1.argsort(0), v2)"),
    "a part that is moved": (leaf((3, 5), "Shard(0)", False), "v2 = x1[:, 1:]", "v2.copy_(x1[:, :-1])"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "lines"), [*((4, x) for x in RIGHT.values()), *((3, x) for x in OUTSIDE.values())], ids=[*RIGHT, *OUTSIDE]
)
def test_programs_give_what_they_give_in_one_process(ranks: int, lines: tuple[str, ...]) -> None:
    found = verdict(Program(ranks, lines))
    assert found.outcome is Outcome.RIGHT, found


@pytest.mark.parametrize("lines", CHANGES.values(), ids=CHANGES)
def test_a_change_in_place_does_what_it_does_in_one_process(lines: tuple[str, ...]) -> None:
    for n in (2, 4):
        found = verdict(Program(n, tuple(line.replace("Mesh((4,))", f"Mesh(({n},))") for line in lines)))
        assert found.outcome is Outcome.RIGHT, (n, found)


@pytest.mark.parametrize("lines", REFUSED.values(), ids=REFUSED)
def test_what_no_rank_can_do_alone_is_one_error_on_all(lines: tuple[str, ...]) -> None:
    found = verdict(Program(4, lines))
    assert found.outcome in (Outcome.CLEAR_ERROR, Outcome.RIGHT), found


@pytest.mark.parametrize("lines", OVERLAPPING.values(), ids=OVERLAPPING)
def test_operands_that_share_memory_with_what_is_changed_are_read_first_on_every_rank(lines: tuple[str, ...]) -> None:
    found = verdict(Program(4, lines))
    assert found.outcome in (Outcome.RIGHT, Outcome.LENIENT, Outcome.UNSTABLE), found


def test_a_vector_in_boxes_is_its_own_flattened_form() -> None:
    boxes = "x1 = leaf(4, (6,), torch.float64, True, Mesh((2,)), [Boxes([[[[2], [4]]], [[[0], [2]]]])])"
    lines = boxes, "v2 = x1.flatten()", "torch.optim.SGD([v2], 0.1, momentum=0.5).step()"
    assert verdict(Program(2, lines)).outcome is Outcome.RIGHT, verdict(Program(2, lines))


def test_the_error_names_the_op_and_holds_no_memory() -> None:
    def body() -> str:
        x = distribute_tensor(torch.ones(2, 3), Mesh((4,)), [Shard(0)]).requires_grad_()
        y = x * 1
        z = y.amax()
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as error:
            z.backward()
        return str(error.value)

    (text,) = set(world(4).run(body))
    assert "a DTensor of shape (2, 3) that amax saved is at version 1; expected version 0" in text


@world(3)
def test_the_gradient_of_a_leaf_of_partial_maxima_is_that_of_the_maximum() -> None:
    x: Any = distribute_tensor(torch.arange(6.0).view(3, 2), Mesh((3,)), [Shard(0)]).amax(0).requires_grad_()
    (x * torch.tensor([2.0, 3.0])).sum().backward()
    assert x.grad.full_tensor().tolist() == [2, 3]


@world(2)
def test_factors_of_a_product_have_no_gradient_of_it_and_what_is_saved_is_found_without_random_numbers() -> None:
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
    x = distribute_tensor(torch.ones(7, dtype=torch.float64), placements=[Shard(0, [7, 0])]).requires_grad_()
    torch.manual_seed(0)
    first = torch.randn_like(x, dtype=torch.float64, device="cpu").tolist()
    torch.manual_seed(0)
    assert torch.randn_like(x, dtype=torch.float64, device="cpu").tolist() == first


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
    x = distribute_tensor(torch.ones(3), Mesh((1,), (1,)), [Shard(0)]).requires_grad_()
    with pytest.raises(RuntimeError, match="Mismatch in shape"):
        torch.autograd.backward([x * x], [torch.ones(2)])
