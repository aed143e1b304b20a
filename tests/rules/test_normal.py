"""Softmax and normalizations of sharded dims exchange moments, not elements."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import Mesh, OnRanks, Partial, Placement, Replicate, Shard, distribute_tensor
from shardwise import _collectives as collectives
from shardwise.errors import RuleError
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.rules.operands import Draw, calls, sent
from tools.op_judge import Sample

R, S0, S1 = Replicate(), Shard(0), Shard(1)
INF = float("inf")
draw = Draw(6)
normal = draw.normal
X, IMAGES, CUBE, W4, W6 = normal(5, 4), normal(3, 6, 2, 3), normal(2, 3, 5), normal(4), normal(6)
aten: Any = torch.ops.aten
SOFT = [
    *calls(F.softmax, (X, 1), (X, -2, {"dtype": torch.float32}), (normal(0, 3), 1), (normal(3, 0), 1),
           (torch.tensor(2.0), 0)),
    *calls(torch.softmax, (X.float(), {"dim": 1, "dtype": torch.float64})),
    *calls(Tensor.softmax, (CUBE, 1)),
    *(Sample(op, (X, 1)) for op in (F.log_softmax, F.softmin)), *calls(Tensor.log_softmax, (X * 1000, 0)),
    *(Sample(op, (X, 0)) for op in (torch.special.softmax, torch.special.log_softmax)),
    *calls(aten._softmax.default, (X, 1, False), gradients=False),
    *calls(aten._safe_softmax.default, (X, 1, torch.float32)),
]  # fmt: skip
NORMS = [
    *calls(F.layer_norm, (X, (4,)), (X, [4], W4, normal(4), 0.1), (X, (4,), None, W4), (normal(0, 4), (4,), W4),
           (normal(5, 1), (1,), normal(1))),
    *calls(F.layer_norm, (X + 1e6, X.shape), tolerance=1e-6),
    *calls(torch.layer_norm, (CUBE, (3, 5), normal(3, 5), normal(3, 5))),
    *calls(F.rms_norm, (X, (4,), W4), (CUBE, (3, 5), {"eps": 0.2})),
    *calls(F.group_norm, (IMAGES, 2), (IMAGES, 3, W6, normal(6), 0.1), (IMAGES, 1, W6)),
    *calls(torch.group_norm, (normal(5, 6), 2, W6, normal(6))),
    *calls(F.instance_norm, IMAGES, (normal(2, 4, 3), {"weight": W4, "bias": normal(4)})),
    *calls(F.instance_norm, (IMAGES, W6, W6.abs(), {"use_input_stats": False}), constant=(1, 2)),
    *calls(F.batch_norm, (IMAGES, None, None, W6, normal(6), True), (normal(5, 3), None, None, {"training": True})),
    *calls(F.batch_norm, (normal(5, 3), normal(3), normal(3).abs(), normal(3), normal(3)), constant=(1, 2)),
    *calls(torch.batch_norm, (normal(5, 3), normal(3), normal(3), None, None, True, 0.1, 0.1, False)),
    *calls(torch._weight_norm, (X, normal(5, 1)), (normal(4, 3, 2), normal(1, 3, 1), 1), (X, normal(), -1)),
    *calls(F.local_response_norm, (normal(2, 7, 3), 4, {"k": 0.5}), (IMAGES, 3, 0.1, 0.5)),
    *calls(F.local_response_norm, (torch.arange(9).view(1, 3, 3), 2), gradients=False),
    *calls(F.normalize, X, (X, 1.0, 0)),
    *calls(F.cosine_similarity, (X, normal(5, 4), {"dim": 0})),
    *calls(F.pairwise_distance, (X, normal(5, 4))),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [S0, S1, Shard(1, [0, 3, 1])], ids=str)
@pytest.mark.parametrize(
    "op",
    [F.softmax, F.log_softmax, aten._safe_softmax.default],
    ids=["softmax", "log_softmax", "_safe_softmax"],
)
def test_infinite_scores_are_treated_as_in_one_process(op: Callable[..., Tensor], sharded: Placement) -> None:
    """Pieces that are all -inf, rows that are, and rows with +inf; gradients where a row has a finite score."""
    x = normal(5, 4)
    x[0, :3], x[1, 1:], x[2], x[3, 1] = -INF, -INF, -INF, INF

    def run(scores: Any) -> list[Tensor]:
        finite = scores[: 3 if "safe" in str(op) else 2].detach().requires_grad_()
        out = op(finite, 1)
        (torch.where(out.isfinite(), out, 0.0) * probe).sum().backward()
        return [op(scores, 1), out, finite.grad]

    probe = normal(3 if "safe" in str(op) else 2, 4)
    want = run(x)

    def body() -> list[Tensor]:
        return [as_dtensor(a.detach()).full_tensor() for a in run(distribute_tensor(x, Mesh((3,)), [sharded]))]

    for got in world(3).run(body):
        torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "op", [F.softmax, F.log_softmax, F.layer_norm, F.rms_norm, F.group_norm], ids=lambda f: f.__name__
)
def test_sums_of_short_floats_are_taken_in_32_bits(op: Callable[..., Tensor], dtype: torch.dtype) -> None:
    x = (torch.randn(2, 3000, generator=draw.generator) * 30).to(dtype)
    argument = (3000,) if op in (F.layer_norm, F.rms_norm) else 1

    def body() -> Tensor:
        return as_dtensor(op(distribute_tensor(x, Mesh((3,)), [S1]), argument)).full_tensor()

    want = op(x.double(), argument)
    for got in world(3).run(body):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("sharded", [S0, S1], ids=str)
@world(2)
def test_a_wrong_normalized_shape_is_refused_even_where_rows_are_cut(sharded: Placement) -> None:
    right, wrong = (distribute_tensor(normal(5, n), Mesh((2,)), [sharded]) for n in (4, 6))
    F.layer_norm(right, (4,))
    with pytest.raises(RuntimeError, match=r"Given normalized_shape=\[4\], .*\[5, 6\]"):
        F.layer_norm(wrong, (4,))
    with pytest.raises(RuntimeError, match=r"Given normalized_shape=\[4\], .*\[\(6,\)\]"):
        F.layer_norm(right, (4,), normal(6))


@world(2)
def test_integers_are_refused_even_after_floats_of_the_same_layout() -> None:
    """How to run is kept under layouts, which have no dtype."""
    ops: list[Callable[[Tensor], Tensor]] = [
        lambda x: F.softmax(x, 1),
        lambda x: F.rms_norm(x, (4,), eps=0.1),
        lambda x: F.group_norm(x, 1),
    ]
    for op in ops:
        op(distribute_tensor(normal(5, 4), Mesh((2,)), [S1]))
        with pytest.raises(RuntimeError, match="not implemented for"):
            op(distribute_tensor(normal(5, 4).long(), Mesh((2,)), [S1]))


KEPT = [R, S0, Shard(0, [1, 5, 0]), OnRanks(2)]
OPS = [F.batch_norm, torch.instance_norm]


LINE, GRID = Mesh((3,)), Mesh((2, 2))
SHARDED: list[tuple[Mesh, Sequence[Placement]]] = [
    *((LINE, [p]) for p in (R, S1, Shard(1, [0, 4, 2]), Shard(2), Shard(0, [0, 1, 2]))),
    *((GRID, [p, q]) for p, q in ((S0, S1), (S1, Shard(2)), (Shard(3), S0), (S1, S1))),
]


@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize(("mesh", "sharded"), SHARDED, ids=str)
@pytest.mark.parametrize("op", OPS, ids=lambda f: f.__name__)
def test_running_statistics_are_those_of_all_ranks(
    op: Callable[..., Tensor], mesh: Mesh, sharded: Sequence[Placement], kept: Placement
) -> None:
    full = [IMAGES, normal(6), normal(6).abs(), normal(6), normal(6)]
    order = [0, 3, 4, 1, 2] if op is torch.instance_norm else [0, 1, 2, 3, 4]
    rest = (True, 0.3, 0.01, False)[: 4 if op is torch.instance_norm else 3]
    plain = [x.clone() for x in full]
    want = op(*(plain[i] for i in order), *rest)

    def body() -> list[Tensor]:
        of_kept, of_bias = ([kept], [S0]) if mesh is LINE else ([R, S0], [S0, R])
        placements: list[Sequence[Placement]] = [sharded, of_kept, of_kept, [R] * mesh.ndim, of_bias]
        x = [distribute_tensor(a.clone(), mesh, p) for a, p in zip(full, placements, strict=True)]
        before = [as_dtensor(a).placements for a in x]
        out = op(*(x[i] for i in order), *rest)
        assert [as_dtensor(a).placements for a in x] == before
        return [as_dtensor(a).full_tensor() for a in (out, x[1], x[2])]

    for got in world(mesh.size()).run(body):
        torch.testing.assert_close(got, [want, plain[1], plain[2]])


@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("sharded", [R, S1, Shard(0, [0, 1, 2])], ids=str)
@pytest.mark.parametrize("change", [False, True])
@pytest.mark.parametrize("op", [F.batch_norm, F.instance_norm], ids=lambda f: f.__name__)
def test_two_calls_before_a_backward_share_running_statistics_as_in_one_process(
    op: Callable[..., Tensor], change: bool, sharded: Placement, kept: Placement
) -> None:
    """Calls change no version that a backward checks; a change by the program is an error, also outside the mesh."""

    def run(x: Any, *statistics: Any) -> tuple[str, list[Any]]:
        outs = [op(y, *statistics, None, None, True).pow(3).sum() for y in (x.requires_grad_(), x * 2)]
        if change:
            statistics[0].add_(1)
        try:
            (outs[0] + outs[1]).backward()
        except RuntimeError as error:
            return str(error)[:80], []
        return "", [x.grad, *(s._version for s in statistics)]

    full = [IMAGES, torch.zeros(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)]
    error, want = run(*(x.clone() for x in full))

    def body() -> tuple[str, list[Any]]:
        placements = [sharded, kept, kept]
        x = [distribute_tensor(x.clone(), Mesh((3,)), [p]) for x, p in zip(full, placements, strict=True)]
        error, got = run(*x)
        return error, [as_dtensor(x).full_tensor() if isinstance(x, Tensor) else x for x in got]

    gots = world(4).run(body)
    assert [got[0] for got in gots] == [error] * 4
    for _, got in gots[:3]:
        torch.testing.assert_close(got, want)


@world(2)
def test_statistics_that_could_not_change_in_place_and_one_value_a_channel_are_refused() -> None:
    mesh = Mesh((2,))
    x = distribute_tensor(IMAGES, mesh, [S0])
    kept = [distribute_tensor(torch.zeros(6, dtype=torch.float64), mesh, [Partial()]) for _ in range(2)]
    with pytest.raises(RuleError, match=r"neither Partial .* got \(6,\) as Partial\('sum'\)"):
        F.batch_norm(x, kept[0], kept[1], training=True)
    mesh = Mesh((2,))
    x = distribute_tensor(normal(2, 3), mesh, [S0])
    assert F.batch_norm(x, None, None, training=True).shape == (2, 3)
    with pytest.raises(ValueError, match=r"Expected more than 1 value per channel .* \[1, 3\]"):
        F.batch_norm(distribute_tensor(normal(1, 3), mesh, [S0]), None, None, training=True)


MODULES: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (lambda: nn.LayerNorm(4), (5, 4)),
    (lambda: nn.BatchNorm1d(4, momentum=None), (5, 4, 3)),
    (lambda: nn.BatchNorm2d(4, affine=False), (2, 4, 3, 2)),
    (lambda: nn.BatchNorm3d(4, track_running_stats=False), (2, 4, 1, 3, 2)),
    (lambda: nn.InstanceNorm2d(4, track_running_stats=True), (2, 4, 3, 2)),
    (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), (5, 4)),
]


def steps(module: nn.Module, batches: list[Any], probe: Tensor) -> list[Any]:
    """Outputs in training and evaluation, gradients, and buffers afterwards."""
    outs: list[Any] = []
    for x in batches:
        outs.append(module.train()(x))
        (outs[-1] * probe).sum().backward()
    outs.append(module.eval()(batches[0]))
    return (
        outs
        + [p.grad for p in [*batches, *module.parameters()]]
        + [b for b in module.buffers() if b.is_floating_point()]
    )


@pytest.mark.slow
@pytest.mark.parametrize("spread", [True, False], ids=["DTensor parameters", "plain parameters"])
@pytest.mark.parametrize("sharded", [S0, S1], ids=str)
@pytest.mark.parametrize(("make", "shape"), MODULES, ids=lambda m: str(m()) if callable(m) else str(m))
def test_modules_train_and_evaluate_as_in_one_process(
    make: Callable[[], nn.Module], shape: tuple[int, ...], sharded: Placement, spread: bool
) -> None:
    torch.manual_seed(0)
    plain = make().double()
    for p in plain.parameters():
        nn.init.normal_(p)
    batches = [normal(*shape).requires_grad_(), normal(*shape).requires_grad_()]
    probe = normal(*plain(batches[0]).shape)
    copies = [copy.deepcopy(plain) for _ in range(3)]
    want = steps(plain, batches, probe)

    def body() -> list[Tensor]:
        mesh, module = Mesh((3,)), copies[collectives.rank()]
        if spread:
            module = distribute_parameters(module, mesh)
        got = steps(module, [distribute_tensor(x.detach(), mesh, [sharded]).requires_grad_() for x in batches], probe)
        return [x.detach().full_tensor() if hasattr(x, "full_tensor") else x.detach() for x in got]

    for got in world(3).run(body):
        torch.testing.assert_close(got, want)


def distribute_parameters(module: nn.Module, mesh: Mesh) -> nn.Module:
    for part in module.modules():
        for name, p in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [R if p.ndim == 0 else S0])))
        for name, b in list(part.named_buffers(recurse=False)):
            setattr(part, name, distribute_tensor(b, mesh, [R]))
    return module


@pytest.mark.parametrize(
    ("op", "sharded", "numbers"),
    [
        (lambda x: F.softmax(x, -1), Shard(2), 2 * 8 * 40),
        (lambda x: F.layer_norm(x, (60,)), Shard(2), 2 * 3 * 8 * 40),  # moments are in float64
        (lambda x: F.rms_norm(x, (60,)), Shard(2), 8 * 40),
        (lambda x: F.group_norm(x, 4), Shard(2), 2 * 3 * 8 * 4),
        (lambda x: F.group_norm(x, 4), S1, 0),
        (F.instance_norm, S1, 0),
        (lambda x: F.batch_norm(x, None, None, training=True), S0, 2 * 3 * 40),
        (lambda x: F.batch_norm(x, None, None, training=True), S1, 0),
        (lambda x: F.softmax(x, -1), S0, 0),
        (lambda x: F.layer_norm(x, (60,)), S1, 0),
        (lambda x: F.local_response_norm(x, 3), S1, 8 * 60),
    ],
)
def test_moments_travel_in_one_exchange_and_nothing_else_does(
    op: Callable[..., Tensor], sharded: Placement, numbers: int
) -> None:
    for placements, exchanges, num_bytes in sent(Mesh((4,)), op, (torch.ones(8, 40, 60), sharded)):
        assert (placements, exchanges) == ((sharded,), numbers > 0)
        assert num_bytes <= 4 * 3 * numbers
