"""Random tensors depend on the seed and on global indices, not on ranks or layouts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import Boxes, DTensor, Mesh, Partial, Placement, Shard, empty, ones, rand, randn
from shardwise import _collectives as collectives
from shardwise._collectives.checks.ledger import SAMPLE_EVERY
from shardwise._layout import Layout
from shardwise._rules import counter_rng
from shardwise.errors import LayoutError, MismatchError
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.tensor.test_conversion import same_error

R, S0, S1 = sw.Replicate(), Shard(0), Shard(1)
SHAPE = (9, 7)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
Make = Callable[[Mesh, list[Placement], torch.dtype], DTensor]


def filled(fill: Callable[[Tensor], object]) -> Make:
    def make(mesh: Mesh, placements: list[Placement], dtype: torch.dtype) -> DTensor:
        x = empty(*SHAPE, device_mesh=mesh, placements=placements, dtype=dtype)
        fill(x)
        return x

    return make


MAKES: dict[str, Make] = {
    "rand": lambda mesh, placements, dtype: rand(*SHAPE, device_mesh=mesh, placements=placements, dtype=dtype),
    "randn": lambda mesh, placements, dtype: randn(SHAPE, device_mesh=mesh, placements=placements, dtype=dtype),
    "uniform_": filled(lambda x: x.uniform_(-2, 3)),
    "normal_": filled(lambda x: x.normal_(mean=1.0, std=0.5)),
    "init.uniform_": filled(lambda x: nn.init.uniform_(x, -1, 1)),
    "init.normal_": filled(lambda x: nn.init.normal_(x, std=0.02)),
    "kaiming_uniform_": filled(lambda x: nn.init.kaiming_uniform_(x, a=5**0.5)),
    "kaiming_normal_": filled(nn.init.kaiming_normal_),
    "xavier_uniform_": filled(nn.init.xavier_uniform_),
    "xavier_normal_": filled(nn.init.xavier_normal_),
    "trunc_normal_": filled(nn.init.trunc_normal_),
    "trunc_normal_ of a tail": filled(lambda x: nn.init.trunc_normal_(x, a=1.0, b=3.0)),
    "sparse_": filled(lambda x: nn.init.sparse_(x, 0.4)),
}
LAYOUTS: list[tuple[Mesh, list[Placement]]] = [
    (Mesh((3,), (2, 0, 1)), [R]),
    (Mesh((3,), (2, 0, 1)), [S0]),
    (Mesh((3,)), [Shard(0, [0, 8, 1])]),
    (Mesh((3,)), [sw.OnRanks(1)]),
    (Mesh((3,)), [Boxes([[((0, 0), (2, 7)), ((5, 3), (4, 4))], [], [((2, 0), (3, 7)), ((5, 0), (4, 3))]])]),
    (Mesh((5,)), [S1]),
    (Mesh((2, 2)), [S0, S1]),
    (Mesh((2, 2)), [S0, S0]),
    (Mesh((2, 2)), [sw.OnRanks(1), S0]),
]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MAKES)
def test_the_same_seed_gives_the_same_tensor_for_any_world_and_layout(name: str, dtype: torch.dtype) -> None:
    def body(mesh: Mesh, placements: list[Placement]) -> tuple[Tensor, Tensor]:
        torch.manual_seed(7)
        first = MAKES[name](mesh, placements, dtype).full_tensor()
        return first, MAKES[name](mesh, placements, dtype).full_tensor()

    ((first, second),) = world(1).run(body, Mesh((1,)), [R])
    assert first.dtype == dtype
    assert not torch.equal(first, second)
    assert first.unique().numel() > 20
    for mesh, placements in LAYOUTS:
        for got in world(mesh.size()).run(body, mesh, placements):
            assert torch.equal(got[0], first), (mesh, placements)
            assert torch.equal(got[1], second), (mesh, placements)


def test_one_box_of_a_tensor_larger_than_memory_is_made_alone() -> None:
    """200,000,000 x 10,000 doubles are 16 TB; one rank of 10,000 makes two columns of its rows."""
    shape, columns = (200_000_000, 10_000), 1_000_000
    rest = [((0, 0), (199_999_990, 10_000)), ((199_999_990, 0), (5, 9_998)), ((199_999_995, 0), (5, 10_000))]
    layout = Layout(Mesh((2,)), [Boxes([[((199_999_990, 9_998), (5, 2))], rest])], shape)
    local = torch.empty(5, 2, dtype=torch.float64)
    counter_rng.fill(local, layout.boxes(0), shape, 11, counter_rng.uniform)
    index = torch.arange(199_999_990, 199_999_995).view(5, 1) * 10_000 + torch.tensor([9_998, 9_999])
    assert torch.equal(local, counter_rng.uniform(index, 11, torch.float64))
    thousand = Layout(Mesh((1000,)), [Shard(0)], (200_000, 10_000))
    local = torch.empty(thousand.local_shape(0))
    counter_rng.fill(local, thousand.boxes(0), thousand.shape, 11, counter_rng.normal)
    assert local.numel() == 2 * columns
    assert torch.equal(local.view(-1), counter_rng.normal(torch.arange(2 * columns), 11, torch.float32))


@world(2)
def test_torchs_generator_governs_the_seed() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, second = rand(8, placements=[S0]).full_tensor(), rand(8).full_tensor()
    assert not torch.equal(second, first)
    torch.set_rng_state(state)
    with torch.random.fork_rng():
        torch.manual_seed(99)
        rand(8)
    assert torch.equal(rand(8, placements=[R]).full_tensor(), first)
    assert torch.equal(rand(8).full_tensor(), second)


def test_a_saved_state_is_restored_on_another_number_of_ranks() -> None:
    def save() -> tuple[Tensor, Tensor]:
        torch.manual_seed(5)
        rand(3)
        return torch.get_rng_state(), as_dtensor(F.dropout(ones(50, placements=[S0]))).full_tensor()

    def restore(state: Tensor) -> Tensor:
        torch.manual_seed(collectives.rank())
        torch.set_rng_state(state)
        return as_dtensor(F.dropout(ones(50, placements=[S0]))).full_tensor()

    state, expected = world(2).run(save)[0]
    for size in (1, 2, 3, 5):
        assert all(torch.equal(got, expected) for got in world(size).run(restore, state))


def test_drawing_costs_no_communication_once_ranks_are_known_to_agree() -> None:
    def body() -> list[int]:
        torch.manual_seed(1)
        x, talked = ones(4, placements=[S0]), []
        for draw in range(1, 4 * SAMPLE_EVERY + 1):
            with collectives.count_comms() as comms:
                F.dropout(x)
            talked += [draw] * comms.total_calls
        return talked

    assert world(3).run(body) == [[1, 2, 4, 8, 16, 32, 64, 128, 192, 256]] * 3


@pytest.mark.parametrize("at", [0, 1, 5, 100])
def test_a_rank_that_draws_differently_is_noticed_in_time(at: int) -> None:
    def body() -> tuple[int, str, bool]:
        torch.manual_seed(1)
        for draw in range(at + SAMPLE_EVERY):
            if draw == at and collectives.rank() == 1:
                torch.rand(1)
            try:
                rand(4)
            except MismatchError as error:
                found = draw, str(error)
                break
        torch.manual_seed(2)  # from here on all is well again
        values = [rand(4, placements=[p]).full_tensor() for p in (R, S0)]
        torch.manual_seed(2)
        return *found, all(torch.equal(rand(4).full_tensor(), value) for value in values)

    ((draw, text, well),) = set(world(3).run(body))
    assert at <= draw < at + SAMPLE_EVERY
    assert text.startswith("Ranks disagree on the random seed:\n  rank 0, 2: ")
    assert "torch.random.fork_rng()" in text
    assert well


def test_ranks_outside_a_mesh_keep_step_without_taking_part() -> None:
    def drawn(mesh: Mesh) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        x = rand(6, device_mesh=mesh, placements=[S0])
        F.dropout(x)
        every = Mesh((collectives.world_size(),))
        return x.redistribute(every, [R]).to_local(), rand(5, placements=[S0]).full_tensor()

    (expected,) = world(1).run(drawn, Mesh((1,)))
    for found in world(3).run(drawn, Mesh((2,), (0, 2))):
        assert all(map(torch.equal, found, expected))


GENERATED: dict[str, Callable[[DTensor, torch.Generator], Any]] = {
    "uniform_": lambda x, g: x.uniform_(generator=g),
    "normal_": lambda x, g: x.normal_(0, 1, generator=g),
    "random_": lambda x, g: x.random_(0, 9, generator=g),
    "bernoulli_": lambda x, g: x.bernoulli_(0.5, generator=g),
    "bernoulli_(tensor)": lambda x, g: x.bernoulli_(torch.tensor(0.5), generator=g),
    "bernoulli": lambda x, g: torch.bernoulli(x / 9, generator=g),
    "rand_like": lambda x, g: torch.rand_like(x, generator=g),
    "normal": lambda x, g: torch.normal(x, 1.0, generator=g),
    "multinomial": lambda x, g: torch.multinomial(x, 3, generator=g),
    "rrelu": lambda x, g: torch.rrelu(-x, 0.1, 0.9, True, g),
    "poisson": torch.poisson,
    "gamma, replicated": torch._standard_gamma,
    "init.xavier_normal_": lambda x, g: nn.init.xavier_normal_(x, generator=g),
    "init.trunc_normal_": lambda x, g: nn.init.trunc_normal_(x, generator=g),
    "init.kaiming_uniform_": lambda x, g: nn.init.kaiming_uniform_(x, generator=g),
}


@pytest.mark.parametrize("name", GENERATED)
def test_a_given_generator_is_used_and_moves_on(name: str) -> None:
    def body(mesh: Mesh, placements: list[Placement]) -> tuple[list[Tensor], bool]:
        generator, before = torch.Generator().manual_seed(4), torch.get_rng_state()
        values = torch.arange(1.0, 8).expand(9, 7)
        found = [
            as_dtensor(GENERATED[name](sw.distribute_tensor(values.clone(), mesh, placements), generator)).full_tensor()
            for _ in range(2)
        ]
        return [*found, generator.get_state()], torch.equal(torch.get_rng_state(), before)

    ((expected, untouched),) = world(1).run(body, Mesh((1,)), [R])
    assert untouched
    assert not torch.equal(expected[0], expected[1])
    for mesh, placements in LAYOUTS:
        for got, alone in world(mesh.size()).run(body, mesh, placements):
            assert alone
            assert all(map(torch.equal, got, expected)), (mesh, placements)


def test_generators_in_different_states_are_noticed_at_once() -> None:
    def body() -> None:
        torch.manual_seed(1)
        for _ in range(20):
            rand(3)
        ones(3).uniform_(generator=torch.Generator().manual_seed(collectives.rank() % 2))

    text = same_error(3, MismatchError, body)
    assert text.startswith("Ranks disagree on the random seed:\n  rank 0, 2: ")
    assert "torch.manual_seed with the same number on every rank" in text


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_neighboring_numbers_and_those_of_other_seeds_do_not_correlate(dtype: torch.dtype) -> None:
    """tests/rules/test_random.py compares their distributions."""
    index = torch.arange(200_000)
    flat, bell, other = (
        make(index, seed, dtype).double()
        for make, seed in ((counter_rng.uniform, 1), (counter_rng.normal, 1), (counter_rng.uniform, 2))
    )
    pairs = [(x[lag:], x[:-lag]) for x in (flat, bell) for lag in (1, 2, 64, 10_000)]
    for a, b in [*pairs, (flat, other)]:
        assert torch.corrcoef(torch.stack([a, b]))[0, 1].abs() < 0.01


@world(3)
def test_constants_have_the_shapes_and_dtypes_of_torch_and_nothing_random_is_partial() -> None:
    kinds: dict[str, Any] = {"device_mesh": Mesh((3,)), "placements": [S0]}
    assert torch.equal(sw.zeros(5, 2, **kinds).full_tensor(), torch.zeros(5, 2))
    assert torch.equal(ones((5, 2), **kinds, dtype=torch.int64).full_tensor(), torch.ones(5, 2, dtype=torch.int64))
    for value in (3, 2.5, True, 1 + 2j):
        assert torch.equal(sw.full((5,), value, **kinds).full_tensor(), torch.full((5,), value))
    assert ones(3, requires_grad=True, **kinds).requires_grad
    assert empty(0, 3, **kinds).shape == (0, 3)
    again = sw.distribute_tensor(torch.zeros(5), Mesh((3,)), [S0])
    nn.init.constant_(again, 4.0)
    assert again.full_tensor().tolist() == [4.0] * 5
    refused: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (LayoutError, "Partial", lambda: sw.full((3,), 1.0, placements=[Partial()])),
        (LayoutError, "Only dense", lambda: empty(3, layout=torch.sparse_coo)),
        (LayoutError, "Partial", lambda: randn(4, placements=[Partial()])),
        (TypeError, "not implemented for 'Long'", lambda: rand(4, dtype=torch.int64)),
        (TypeError, "Random numbers need one of", lambda: counter_rng.normal(torch.arange(3), 0, torch.int64)),
    ]
    for error, text, make in refused:
        with pytest.raises(error, match=text):
            make()


def drawn_often() -> None:
    for _ in range(SAMPLE_EVERY):
        rand(3)


@pytest.mark.processes
@world(4, real=True)
def test_real_processes_make_the_tensor_of_one() -> None:
    torch.manual_seed(7)
    everywhere = randn(*SHAPE, dtype=torch.float64)
    torch.manual_seed(7)
    sharded = randn(*SHAPE, dtype=torch.float64, device_mesh=Mesh((2, 2)), placements=[S0, S1])
    assert torch.equal(sharded.full_tensor(), everywhere.to_local())
    torch.manual_seed(8)
    kept = as_dtensor(F.dropout(everywhere, 0.4)).to_local()
    torch.manual_seed(8)
    assert torch.equal(as_dtensor(F.dropout(sharded, 0.4)).full_tensor(), kept)
    torch.manual_seed(collectives.rank())
    with pytest.raises(MismatchError, match="disagree on the random seed"):
        drawn_often()


@world(2)
def test_recomputation_without_the_state_drops_something_else() -> None:
    torch.manual_seed(3)
    x = ones(1000, placements=[S0], requires_grad=True)
    y = checkpoint(F.dropout, x, use_reentrant=False, preserve_rng_state=False)
    checkpoint(lambda y: y * y, y, use_reentrant=False).sum().backward()
    kept = as_dtensor(y.detach()).full_tensor() != 0
    assert not torch.equal(as_dtensor(x.grad).full_tensor() != 0, kept)


INITS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "orthogonal_": ((9, 7), nn.init.orthogonal_),
    "orthogonal_ of a wide one": ((4, 7), lambda x: nn.init.orthogonal_(x, gain=2)),
    "orthogonal_ of a kernel": ((6, 3, 2, 2), nn.init.orthogonal_),
    "eye_": ((9, 7), nn.init.eye_),
    "dirac_": ((6, 3, 3), nn.init.dirac_),
    "dirac_ in groups": ((6, 3, 3, 2), lambda x: nn.init.dirac_(x, groups=2)),
    "xavier_uniform_ of a kernel": ((6, 3, 2, 2), nn.init.xavier_uniform_),
    "kaiming_normal_ of a kernel": ((6, 3, 2, 2), lambda x: nn.init.kaiming_normal_(x, mode="fan_out")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", INITS)
def test_initialisations_give_one_tensor_for_any_world_and_layout(name: str) -> None:
    shape, init = INITS[name]

    def body(mesh: Mesh, placements: list[Placement]) -> Tensor:
        torch.manual_seed(7)
        x = empty(*shape, device_mesh=mesh, placements=placements, dtype=torch.float64)
        assert init(x) is x
        assert x.placements == empty(*shape, device_mesh=mesh, placements=placements).placements
        return x.full_tensor()

    (expected,) = world(1).run(body, Mesh((1,)), [R])
    if "eye" in name or "dirac" in name:
        assert torch.equal(expected, init(torch.empty(shape, dtype=torch.float64)))
    elif "orthogonal" in name:
        flat = expected.flatten(1)
        flat = flat if flat.shape[0] < flat.shape[1] else flat.t()
        gain = 2 if "wide" in name else 1
        assert_close(flat @ flat.t(), gain**2 * torch.eye(len(flat), dtype=torch.float64))
    halves = [((0,) * len(shape), (1, *shape[1:])), ((2, *(0,) * (len(shape) - 1)), (shape[0] - 2, *shape[1:]))]
    middle = ((1, *(0,) * (len(shape) - 1)), (1, *shape[1:]))
    layouts: list[tuple[Mesh, list[Placement]]] = [
        *(LAYOUTS[i] for i in (0, 1, 3, 5, 6, 7, 8)),  # those that fit any shape
        (Mesh((3,)), [Shard(0, [0, shape[0] - 1, 1])]), (Mesh((3,)), [Boxes([halves, [], [middle]])]),
    ]  # fmt: skip
    for mesh, placements in layouts:
        if name == "orthogonal_ of a kernel" and isinstance(placements[0], Boxes):
            continue  # torch writes to a view with other dims, and boxes have none
        for got in world(mesh.size()).run(body, mesh, placements):
            assert torch.equal(got, expected), (mesh, placements)
