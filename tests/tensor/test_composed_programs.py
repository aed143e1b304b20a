"""Short programs of ops that are right on their own: the same values as in one process, or the same error."""

import pytest

from tools.program_judge import Outcome, verdict
from tools.programs import Program

X = "x1 = leaf(4, {shape}, torch.float64, {grad}, Mesh({mesh}), [{placements}])"
AVERAGE = "v2 = redistribute(x1, Mesh((4,)), [Partial('avg')])"
INFINITE = "torch.tensor(float('inf'), dtype=torch.float64)"


def leaf(
    shape: tuple[int, ...], placements: str, grad: bool = True, mesh: tuple[int, ...] = (4,), dtype: str = "float64"
) -> str:
    return X.format(shape=shape, placements=placements, grad=grad, mesh=mesh).replace("float64", dtype)


WHOLE = leaf((4, 3), "Replicate()")

RIGHT = {
    # Gradients of averages: each of the n terms has 1/n of it.
    "an average that gets a gradient": (leaf((4, 3), "Partial('avg')", False), "x1.requires_grad_()", "v2 = x1.exp()"),
    "an average beside a sum": (
        leaf((4, 3), "Partial('avg'), Partial('sum')", mesh=(2, 2)), "v2 = Cube.apply(x1)", "v3 = x1.exp()"
    ),
    "a sharded average": (leaf((4, 3), "Partial('avg'), Shard(1)", mesh=(2, 2)), "v2 = Cube.apply(x1)"),
    "an average in a custom Function": (WHOLE, AVERAGE, "v3 = Cube.apply(v2)", "v4 = v3.exp()"),
    "an average in a checkpoint": (WHOLE, AVERAGE, "v3 = checkpoint(lambda x: Cube.apply(x) + x[0], v2)"),
    "an average in a module with hooks": (WHOLE, AVERAGE, "v3 = hooked(nn.Linear(3, 2).double(), v2, 2)"),
    "an average with a hook": (WHOLE, AVERAGE, "v2.register_hook(lambda g: g * 2)", "v3 = v2.exp()"),
    "an average that keeps its gradient": (WHOLE, AVERAGE, "v2.retain_grad()", "v3 = v2.exp()", "v4 = v2 * 2"),
    "the gradient of an average": (WHOLE, AVERAGE, "v3 = torch.autograd.grad((v2**2).sum(), v2, create_graph=True)[0]"),
    "an average through plain tensors": (WHOLE, AVERAGE, "v3 = boundary(v2)", "v4 = v3.exp()"),
    # Infinite gradients of maxima: elements that are not the maximum get zero in torch.max, and nan in torch.amax.
    "the maximum times infinity": (leaf((6, 2), "Shard(0)"), "v2 = x1.max()", f"v3 = v2 * {INFINITE}"),
    "the minimum of nan": (leaf((6, 2), "Shard(0)"), "v2 = torch.where(x1 > 1, float('nan'), x1)", "v3 = v2.min()"),
    "a maximum along a dim times infinity": (leaf((6, 2), "Shard(0)"), "v2 = x1.amax(0)", f"v3 = v2 * {INFINITE}"),
    "the variance of one maximum": (leaf((6, 2), "Shard(0)"), "v2 = x1.max()", "v3 = v2.var()"),
    # dtypes and gradients of odd operands
    "blocks of a 0-d tensor in double precision": (
        leaf((6,), "Shard(0)", dtype="float32"), "v2 = x1.double().sum()", "v3 = torch.block_diag(x1, v2)"
    ),
    "the median of nothing": (leaf((3, 0), "Shard(0)"), "v2 = x1.median()"),
    "the median of nothing but nan": (leaf((3, 0), "Shard(0)"), "v2 = x1.nanmedian()"),
    "dropout of nothing, which saves nothing": (
        leaf((7, 0), "Replicate()"), "v2 = x1 * 1", "v3 = checkpoint(lambda x: F.dropout(x, 0.3), v2)", "v2.tril_()"
    ),
    "dropout of no truth values": (leaf((4, 0), "Replicate()", False, dtype="bool"), "v2 = F.dropout(x1, 0.3)"),
    # The same object as in torch
    "dropout of nothing": (leaf((4, 0), "Shard(0)", False), "v2 = F.dropout(x1, 0.3)", "v2.unsqueeze_(0)"),
    "dropout of an unbatched input that drops nothing": (
        leaf((4, 3), "Shard(0)", False), "v2 = F.dropout1d(x1, 0.3, False)", "v2.unsqueeze_(0)", "v2.mul_(2)"
    ),
    "real partial maxima, which are their own conjugates": (
        leaf((4, 3), "Partial('max')", False), "v2 = x1.conj()", "v3 = torch.positive(x1)", "v2.mul_(2)", "v3.mul_(2)"
    ),
    "a product of two dtypes, summed over one element": (
        leaf((3, 1), "Shard(1)", dtype="float32"), 'v2 = torch.einsum("ij,kj->ik", torch.ones(2, 1).double(), x1)'
    ),
    "what contiguous returns under saved-tensor hooks": (
        leaf((4,), "Replicate()", False),
        "with torch.autograd.graph.save_on_cpu(): v2 = x1.contiguous()",
        "v2.unsqueeze_(0)",
    ),
    "a hook of a plain leaf in the dtype of a DTensor, which is the leaf itself": (
        WHOLE, "x2 = leaf(7, (5,), torch.float64, True, None)", "v3 = x2.type_as(x1)", "v4 = x2.to(x1)",
        "v3.register_hook(lambda g: g.clamp(-0.5, 1))", "v5 = v4.sin()",
    ),
    "a view of a plain tensor in the shape of a DTensor": (
        WHOLE, "x2 = leaf(7, (12,), torch.float64, False, None)", "v3 = x2.view_as(x1)", "v3.mul_(2)",
        "v4 = x2.reshape_as(x1)", "v4.add_(1)", "v5 = x2[:3].expand_as(x1)",
    ),
    "a gradient of an empty shard, detached in place": (
        leaf((1, 2), "Shard(0)", mesh=(2,)),
        "v2 = torch.autograd.grad((x1[0] ** 2).sum(), [x1], create_graph=True)[0]", "v2.detach_()", "v2.mul_(2)",
    ),
    "a gradient that torch returns as a view": (
        WHOLE, "v2 = torch.autograd.grad((x1.view(12) ** 3).sum(), [x1], create_graph=True)[0]",
        "v3 = torch.autograd.grad((v2 * v2).sum(), [x1])[0]", "v2.mul_(2)",
    ),
    "a hook of attention that was changed without gradients": (
        leaf((1, 2, 4), "Shard(0)"),
        "v2 = F.scaled_dot_product_attention(x1, x1, x1)",
        "with torch.no_grad(): v2.mul_(0.5)",
        "v2.grad_fn; v2.register_hook(lambda g: g * 1)",  # torch crashes if nobody reads it
    ),
}  # fmt: skip


@pytest.mark.parametrize("lines", RIGHT.values(), ids=RIGHT)
def test_programs_give_what_they_give_in_one_process(lines: tuple[str, ...]) -> None:
    found = verdict(Program(4, lines))
    assert found.outcome is Outcome.RIGHT, found


def test_a_view_in_place_that_needs_a_redistribution_does_not_hide_later_changes() -> None:
    x = leaf((7, 1, 5), "Replicate(), Shard(1)", False, (2, 2))
    for change in ("x1.mul_(2)", "v2.mul_(2)"):
        found = verdict(Program(4, (x, "v2 = x1.detach()", "v2.squeeze_()", change)))
        assert found.outcome is Outcome.REFUSED, found


OVERLAPPING = {
    "a row of the tensor": (leaf((5, 3), "Shard(1)", False), "x1.addcmul_(x1, x1[0])"),
    "a row of a rotated tensor": (leaf((5, 2), "Shard(0)", False), "v2 = x1.rot90()", "v2 *= v2[0]"),
    "another view of all of it": (leaf((1, 5), "Shard(1)", False), "v2 = x1.squeeze(1)",
                                  "x1.scatter_add_(0, x1.argsort(0), v2)"),
    "a part that is moved": (leaf((3, 5), "Shard(0)", False), "v2 = x1[:, 1:]", "v2.copy_(x1[:, :-1])"),
}  # fmt: skip


@pytest.mark.parametrize("lines", OVERLAPPING.values(), ids=OVERLAPPING)
def test_operands_that_share_memory_with_what_is_changed_are_read_first_on_every_rank(lines: tuple[str, ...]) -> None:
    """Torch raises, or does not define it; by the strides of a shard it would do so on some ranks only."""
    found = verdict(Program(4, lines))
    assert found.outcome in (Outcome.RIGHT, Outcome.LENIENT, Outcome.UNSTABLE), found
