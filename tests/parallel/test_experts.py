"""A mixture of experts whose experts live on several ranks equals the plain layer, and sends tokens, not everything."""

import copy
import re
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import Mesh, Partial, Placement, Replicate, Shard, count_comms, distribute_tensor, rank, shard_module
from shardwise.debug import explain, no_implicit_comm, shadow
from shardwise.errors import IdError, IdTypeError, LayoutError, PlanError, RuleError
from shardwise.parallel import (
    ExpertParallel,
    MixtureOfExperts,
    balance_loss,
    fully_shard,
    mix_experts,
    parallelize_module,
)
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.parallel.one_process import assert_same_parameters, compare, full, raised

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
Places = Sequence[Placement]


def layer(experts: int, top_k: int = 2, seed: int = 0) -> MixtureOfExperts:
    torch.manual_seed(seed)
    return MixtureOfExperts(6, 7, experts, top_k).double()


def tokens(count: int) -> Tensor:
    return torch.randn(count, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(count))


def check(
    plain: MixtureOfExperts, x: Tensor, mesh: Mesh, x_at: Places, w_at: Places, w2_at: Places | None = None
) -> tuple[tuple[Placement, ...], Tensor]:
    """Output, and gradients of tokens, router and experts, equal those of the plain layer."""
    module, plain = copy.deepcopy(plain), copy.deepcopy(plain)
    shard_module(module, {"w1": w_at, "w2": w2_at or w_at}, mesh=mesh)
    out = as_dtensor(compare(module, plain, distribute_tensor(x, mesh, x_at), x, part_of_input=lambda grad: grad))
    assert plain.w1.grad is not None
    return out.placements, plain.w1.grad


# ---- values --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("count", [9, 2, 0])
@pytest.mark.parametrize(("experts", "top_k"), [(5, 2), (2, 1), (2, 2), (1, 1)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_experts_on_any_number_of_ranks_equal_the_plain_layer(ranks: int, experts: int, top_k: int, count: int) -> None:
    """Uneven experts, ranks without any, ranks without tokens."""
    line = Mesh((ranks,))
    at, _ = world(ranks).run(check, layer(experts, top_k), tokens(count), line, [S0], [S0])[0]
    assert at == (S0,) or not count


@pytest.mark.parametrize("w_at", [S0, Shard(0, [0, 4, 1]), Shard(0, [0, 0, 5]), R])
@pytest.mark.parametrize("x_at", [S0, Shard(0, [0, 7, 2]), Shard(0, [9, 0, 0]), R])
def test_tokens_and_experts_may_be_cut_by_hand_or_whole(x_at: Placement, w_at: Placement) -> None:
    at, _ = world(3).run(check, layer(5), tokens(9), Mesh((3,)), [x_at], [w_at])[0]
    assert at == ((Partial(),) if x_at == R and w_at != R else (x_at,))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("x_at", "w_at", "w2_at"),
    [
        ([S0, S0], [R, S0], [R, S0]),  # data and experts
        ([S0, R], [R, S0], [R, S0]),
        ([S0, S0], [S0, S0], [S0, S0]),  # experts over all ranks
        ([S0, R], [S0, S0], [S0, S0]),
        ([R, S0], [S0, S0], [S0, S0]),
        ([S0, R], [S0, S1], [S0, S2]),  # experts, and hidden features of each
        ([S0, S0], [S0, R], [S0, R]),
    ],
)
def test_a_mesh_of_data_and_experts_equals_the_plain_layer(x_at: Places, w_at: Places, w2_at: Places) -> None:
    world(4).run(check, layer(5), tokens(9), Mesh((2, 2)), x_at, w_at, w2_at)


@pytest.mark.slow
def test_processes_equal_the_plain_layer() -> None:
    world(2, real=True).run(check, layer(5), tokens(9), Mesh((2,)), [S0], [S0])


@pytest.mark.parametrize("favourite", [0, 2])
def test_experts_that_nobody_chooses_have_a_gradient_of_zeros(favourite: int) -> None:
    plain = layer(3, 1)
    with torch.no_grad():
        plain.router.weight.zero_()[favourite] = 1
    x = tokens(7).abs()
    _, grad = world(3).run(check, plain, x, Mesh((3,)), [S0], [S0])[0]
    assert [bool(g.any()) for g in grad] == [e == favourite for e in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@world(3)
def test_numbers_of_experts_travel_unchanged_beside_tokens_of_any_width(dtype: torch.dtype) -> None:
    """There are more experts than a half has exact integers."""
    count = 2500
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(count, 1, 1, generator=generator).to(dtype)
    chosen = torch.randint(count, (30, 2), generator=generator)
    x, weights = torch.ones(30, 1, dtype=dtype), torch.rand(30, 2, generator=generator)
    want = mix_experts(chosen, w, w.abs(), x, weights)
    places = [distribute_tensor(t, Mesh((3,)), [S0]) for t in (chosen, w, w.abs(), x, weights)]
    got = mix_experts(places[0], places[1], places[2], places[3], places[4])
    assert got.dtype == dtype
    assert_close(as_dtensor(got).full_tensor(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.slow
def test_the_plain_layer_is_the_formula() -> None:
    plain, x = layer(4, 2), tokens(5)
    probabilities = F.softmax(x @ plain.router.weight.t(), -1)
    for token, p, got in zip(x, probabilities, plain(x), strict=True):
        best = sorted(range(4), key=lambda e: -p[e].item())[:2]
        parts = [p[e] / p[best].sum() * (plain.w2[e] @ F.gelu(plain.w1[e] @ token)) for e in best]
        assert_close(got, parts[0] + parts[1])
    assert plain(x.view(5, 1, 6)).shape == (5, 1, 6)


def elsewhere(plain: MixtureOfExperts, x: Tensor, sharding: Sequence[int], experts: Sequence[int], me: int) -> int:
    """For how many pairs of a token of this rank and another rank the rank holds experts of the token."""
    owner = torch.repeat_interleave(torch.arange(len(experts)), torch.tensor(experts))
    own = x.split(list(sharding))[me]
    chosen = owner[plain.route(own).chosen]
    return sum(len({r for r in row if r != me}) for row in chosen.tolist())


def sends_only_tokens(x: Tensor) -> None:
    plain, mesh = layer(5, 2), Mesh((3,))
    sharding, experts = [4, 2, 3], [2, 1, 2]
    module = shard_module(copy.deepcopy(plain), {"w1": [Shard(0, experts)], "w2": [Shard(0, experts)]}, mesh=mesh)
    mine = distribute_tensor(x, mesh, [Shard(0, sharding)]).requires_grad_()
    with count_comms() as forward:
        out = module(mine)
    away = [elsewhere(plain, x, sharding, experts, r) for r in range(3)]
    owner = torch.repeat_interleave(torch.arange(3), torch.tensor(experts))
    visitors = [
        sum(
            rank() in set(owner[row].tolist())
            for r, own in enumerate(x.split(sharding))
            if r != rank()
            for row in plain.route(own).chosen
        )
    ]
    row, back, head = (6 + 2 * 2) * 8, 6 * 8, 2 * 3 * 8
    assert forward.calls == {"all_to_all": 3}
    assert forward.total_bytes == away[rank()] * row + visitors[0] * back + head
    with count_comms() as backward:
        as_dtensor(out).to_local().sum().backward()
    assert backward.calls == {"all_to_all": 2}
    assert backward.total_bytes == away[rank()] * back + visitors[0] * row


def test_a_token_goes_once_to_each_rank_that_has_experts_of_it_and_nowhere_else() -> None:
    world(3).run(sends_only_tokens, tokens(9))


@world(4)
def test_experts_of_whole_tokens_send_nothing() -> None:
    module = shard_module(layer(5), {"w1": [S0], "w2": [S0]}, mesh=Mesh((4,)))
    x = distribute_tensor(tokens(9), Mesh((4,)), [R])
    with count_comms() as forward:
        module(x)
    assert forward.total_calls == 0


def trained(module: nn.Module, x: Tensor) -> Tensor:
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    for _ in range(4):
        optimizer.zero_grad()
        routing = module.route(x)  # type: ignore[operator]
        ((module(x) - x).square().mean() + 0.1 * balance_loss(routing)).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
    return full(module(x))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh((3,)), Mesh((2, 2))], ids=str)
def test_steps_of_training_with_a_loss_of_balance_equal_the_plain_layer(mesh: Mesh) -> None:
    def body() -> None:
        plan = {"w1": [R, S0][-mesh.ndim :], "w2": [R, S0][-mesh.ndim :]}
        module = shard_module(layer(5), plan, mesh=mesh)
        x = distribute_tensor(tokens(9), mesh, [S0] * mesh.ndim)
        assert_close(trained(module, x), trained(layer(5), tokens(9)))

    world(mesh.size()).run(body)


def test_the_loss_of_balance_is_one_for_equal_shares_and_the_number_of_experts_for_one_expert() -> None:
    plain = layer(4, 1)
    with torch.no_grad():
        plain.router.weight.zero_()[2] = 100
    assert_close(balance_loss(plain.route(tokens(5).abs())).item(), 4.0)
    even = torch.full((4, 4), 0.25, dtype=torch.float64)
    routing = plain.route(tokens(4))._replace(chosen=torch.arange(4).unsqueeze(1), probabilities=even)
    assert_close(balance_loss(routing).item(), 1.0)


class Gated(nn.Module):
    """A layer as those of transformers: tokens come with their experts."""

    def __init__(self, num_experts: int, bias: bool = False) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up, self.down = nn.Parameter(torch.randn(num_experts, 14, 6)), nn.Parameter(torch.randn(num_experts, 6, 7))
        self.bias = nn.Parameter(torch.randn(7)) if bias else None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        every = torch.stack([F.glu(hidden_states @ a.t()) @ b.t() for a, b in zip(self.up, self.down, strict=True)], 1)
        taken = every.gather(1, top_k_index.unsqueeze(-1).expand(-1, -1, 6))
        return (taken * top_k_weights.unsqueeze(-1)).sum(1)


@pytest.mark.parametrize("experts", [5, 2])  # on 3 ranks, one of which then has none
@world(3)
def test_a_layer_of_transformers_runs_its_own_forward_with_the_experts_of_a_rank(experts: int) -> None:
    torch.manual_seed(0)
    plain = Gated(experts).double()
    module = copy.deepcopy(parallelize_module(copy.deepcopy(plain), Mesh((3,)), ExpertParallel()))
    x, weights = tokens(8), torch.rand(8, 2, dtype=torch.double)
    chosen = torch.stack([torch.randperm(experts)[:2] for _ in range(8)])
    theirs = [x.requires_grad_(), weights.requires_grad_()]
    mine = [t.detach().split([5, 0, 3])[rank()].clone().requires_grad_() for t in theirs]
    out = module(mine[0], chosen.split([5, 0, 3])[rank()], top_k_weights=mine[1])
    want = plain(theirs[0], chosen, theirs[1])
    assert_close(out, want.split([5, 0, 3])[rank()])
    out.square().sum().backward()
    want.square().sum().backward()
    for a, b in zip(mine, theirs, strict=True):
        assert_close(a.grad, full(b.grad).split([5, 0, 3])[rank()])
    assert_same_parameters(module, plain)


@world(2)
def test_a_layer_of_transformers_with_other_parameters_is_refused() -> None:
    with pytest.raises(PlanError, match=r"two stacks; Gated has \['up', 'down', 'bias'\]"):
        parallelize_module(Gated(4, bias=True), Mesh((2,)), ExpertParallel())


# ---- plans and bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharding", [True, False])
@world(3)
def test_a_plan_names_the_layer_and_plain_parts_come_and_go(sharding: bool) -> None:
    plain = nn.Sequential(nn.Linear(6, 6).double(), layer(5))
    style = ExpertParallel(sizes=(1, 3, 1)) if sharding else ExpertParallel(input_layouts=R, output_layouts=R)
    module = copy.deepcopy(plain)
    parallelize_module(module, Mesh((3,)), {"1": style})
    theirs = tokens(9).requires_grad_()
    mine = (theirs.detach().split(3)[rank()] if sharding else theirs.detach()).clone().requires_grad_()
    out, want = module(mine), plain(theirs)
    assert_close(out, want.split(3)[rank()] if sharding else want)
    out.square().sum().backward()
    want.square().sum().backward()
    assert_close(mine.grad, full(theirs.grad).split(3)[rank()] if sharding else theirs.grad)
    assert_same_parameters(module[1], plain[1])
    assert as_dtensor(module[1].w1).placements == ((Shard(0, [1, 3, 1]),) if sharding else (S0,))


@world(2)
def test_a_style_on_another_layer_says_what_it_knows() -> None:
    with pytest.raises(PlanError, match=r"one w1 and one w2.*Linear has \[\]"):
        parallelize_module(nn.Linear(3, 3), Mesh((2,)), ExpertParallel())


def operands(mesh: Mesh | None = None, x_at: Places = (), w_at: Places = (), w2_at: Places = ()) -> list[Tensor]:
    plain, x = layer(5), tokens(8)
    routing = plain.route(x)
    found = [t.detach().clone() for t in (routing.chosen, plain.w1, plain.w2, x, routing.weights)]
    found[0][5, 1] = 5
    if mesh is None:
        return found
    places = [x_at, w_at, w2_at or w_at, x_at, x_at]
    return [distribute_tensor(t, mesh, p) for t, p in zip(found, places, strict=True)]


@pytest.mark.parametrize(
    ("shape", "x_at", "w_at"),
    [
        ((4,), [S0], [S0]),
        ((4,), [S0], [R]),
        ((4,), [R], [S0]),
        ((2, 2), [S0, S0], [R, S0]),
        ((2, 2), [S0, R], [R, S0]),
        ((2, 2), [S0, S0], [S0, S0]),
    ],
)
def test_an_expert_that_is_not_there_is_one_error_on_every_rank(
    shape: tuple[int, ...], x_at: Places, w_at: Places
) -> None:
    def act() -> None:
        ids, w1, w2, x, weights = operands(Mesh(shape), x_at, w_at)
        mix_experts(ids, w1, w2, x, weights)

    assert re.search(r"id 5 at position \(5, 1\).*0 to 4", raised(IdError, act, 4))


@world(2)
def test_bad_operands_are_refused_alone_and_on_ranks() -> None:
    ids, w1, w2, x, weights = operands()
    with pytest.raises(IdError, match=r"no expert 5, chosen at \(5, 1\)\. Experts are 0 to 4"):
        mix_experts(ids, w1, w2, x, weights)
    ids = ids.clamp(max=4)
    with pytest.raises(IdTypeError, match=r"int64, got torch\.int32"):
        mix_experts(ids.int(), w1, w2, x, weights)
    with pytest.raises(IdTypeError, match="share a dtype"):
        mix_experts(ids, w1, w2, x.float(), weights)
    with pytest.raises(LayoutError, match=r"got .*\(5, 6, 7\)"):
        mix_experts(ids, w2, w2, x, weights)
    with pytest.raises(ValueError, match="top_k must be from 1 to 3"):
        MixtureOfExperts(2, 2, 3, 4)
    ids, w1, w2, x, weights = operands(Mesh((2,)), [S0], [S0], [Shard(0, [1, 4])])
    with pytest.raises(LayoutError, match="w1 and w2 must be sharded alike"):
        mix_experts(ids, w1, w2, x, weights)
    with pytest.raises(LayoutError, match=r"got .*\(5, 6, 7\)"):
        mix_experts(ids, w2, w2, x, weights)
    with pytest.raises(IdTypeError, match=r"int64, got torch\.int32"):
        mix_experts(ids.int(), w1, w1.transpose(1, 2), x, weights)


@world(4)
def test_a_plan_on_a_mesh_of_data_and_experts_takes_parts_along_both() -> None:
    plain, mesh = layer(5), Mesh((2, 2), (), ("dp", "ep"))
    module = copy.deepcopy(plain)
    parallelize_module(module, mesh, ExpertParallel())
    compare(module, plain, tokens(8).split(2)[rank()], tokens(8), lambda want: want.split(2)[rank()])
    assert as_dtensor(module.w1).placements == (R, S0)


@pytest.mark.parametrize("shape", [(2, 2), (4,)], ids=str)
@pytest.mark.parametrize("alone", [True, False])
@world(4)
def test_experts_beside_fully_shard_are_averaged_over_the_ranks_of_both_axes(
    alone: bool, shape: tuple[int, ...]
) -> None:
    plain, mesh = nn.Sequential(nn.Linear(6, 6).double(), layer(3)), Mesh((2, 2), (), ("edp", "ep"))
    module, x = copy.deepcopy(plain), tokens(8)
    parallelize_module(module[1], mesh.submesh("ep", rank()), ExpertParallel())
    fully_shard(module[1], mesh=mesh.submesh("edp", rank()))
    fully_shard(module, mesh=Mesh(shape))
    if alone:
        module[1](x.split(2)[rank()])
    module(x.split(2)[rank()]).square().mean().backward()
    plain(x).square().mean().backward()
    assert_same_parameters(module, plain)


@world(3)
def test_tools_see_the_op_and_what_it_sends() -> None:
    mesh, generator = Mesh((3,)), torch.Generator().manual_seed(0)

    def sharded(*shape: int, dim: int = 0) -> Tensor:
        return distribute_tensor(torch.randn(*shape, generator=generator), mesh, [Shard(dim)])

    chosen = distribute_tensor(torch.arange(10).view(5, 2) % 4, mesh, [Shard(0)])
    w1, w2, x, weights = sharded(4, 7, 6), sharded(4, 6, 7), sharded(5, 6), sharded(5, 2)
    with explain() as report, shadow() as shadowed:
        mix_experts(chosen, w1, w2, x, weights)
    assert shadowed.compared["mix_experts"] == 1
    assert [event.cause.op for event in report.events] == ["mix_experts"] * 3
    assert {event.cause.why for event in report.events} == {"tokens are sent to their experts and back"}
    assert report.sent_bytes == sum(event.sent_bytes for event in report.events) > 0
    with no_implicit_comm():
        mix_experts(chosen, w1, w2, x, weights)
    with pytest.raises(RuleError, match="Implicit communication"), no_implicit_comm():
        mix_experts(chosen, w1, sharded(4, 6, 7, dim=2), x, weights)
