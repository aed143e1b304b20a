"""Random tensors depend on the seed and on the place in the whole, not on ranks or layouts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import (
    Boxes,
    DTensor,
    Mesh,
    OnRanks,
    Partial,
    Placement,
    Replicate,
    Shard,
    collectives,
    distribute_tensor,
    empty,
    full,
    ones,
    rand,
    randn,
    random,
    shard_module,
    zeros,
)
from shardwise.errors import LayoutError, MismatchError, RuleError
from shardwise.layout import Layout
from shardwise.testing import world
from shardwise.testing.truth import as_dtensor

R, S0, S1 = Replicate(), Shard(0), Shard(1)
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
    "trunc_normal_": filled(nn.init.trunc_normal_),
}
LAYOUTS: list[tuple[Mesh, list[Placement]]] = [
    (Mesh((3,), (2, 0, 1)), [R]),
    (Mesh((3,), (2, 0, 1)), [S0]),
    (Mesh((3,)), [Shard(0, [0, 8, 1])]),
    (Mesh((3,)), [OnRanks(1)]),
    (Mesh((3,)), [Boxes([[((0, 0), (2, 7)), ((5, 3), (4, 4))], [], [((2, 0), (3, 7)), ((5, 0), (4, 3))]])]),
    (Mesh((5,)), [S1]),
    (Mesh((2, 2)), [S0, S1]),
    (Mesh((2, 2)), [S0, S0]),
    (Mesh((2, 2)), [OnRanks(1), S0]),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MAKES)
def test_the_same_seed_gives_the_same_tensor_for_any_world_and_layout(name: str, dtype: torch.dtype) -> None:
    if name == "trunc_normal_" and dtype in (torch.float16, torch.bfloat16):
        dtype = torch.float32  # torch has no erfinv of halves on every build

    def body(mesh: Mesh, placements: list[Placement]) -> tuple[Tensor, Tensor]:
        torch.manual_seed(7)
        first = MAKES[name](mesh, placements, dtype).full_tensor()
        return first, MAKES[name](mesh, placements, dtype).full_tensor()

    ((first, second),) = world(1).run(body, Mesh((1,)), [R])
    assert first.dtype == dtype
    assert not torch.equal(first, second)
    assert first.unique().numel() > 30
    for mesh, placements in LAYOUTS:
        for got in world(mesh.size()).run(body, mesh, placements):
            assert torch.equal(got[0], first), (mesh, placements)
            assert torch.equal(got[1], second), (mesh, placements)


@pytest.mark.parametrize("module", [nn.Linear(7, 9), nn.Embedding(9, 7), nn.EmbeddingBag(9, 7)], ids=repr)
def test_reset_parameters_gives_the_same_module_for_any_world_and_layout(module: nn.Module) -> None:
    def body(mesh: Mesh, placements: list[Placement]) -> dict[str, Tensor]:
        torch.manual_seed(3)
        with torch.device("meta"):
            kind = type(module)
            twin = kind(7, 9) if kind is nn.Linear else kind(9, 7)
        shard_module(twin, {"weight": placements}, mesh=mesh)
        return {name: as_dtensor(p.detach()).full_tensor() for name, p in twin.named_parameters()}

    (expected,) = world(1).run(body, Mesh((1,)), [R])
    assert expected["weight"].shape == (9, 7)
    for mesh, placements in LAYOUTS:
        for got in world(mesh.size()).run(body, mesh, placements):
            assert all(torch.equal(got[name], value) for name, value in expected.items())


def test_one_box_of_a_tensor_larger_than_memory_is_made_alone() -> None:
    """200,000,000 x 10,000 doubles are 16 TB; one rank of 10,000 makes two columns of its rows."""
    shape, columns = (200_000_000, 10_000), 1_000_000
    box = ((199_999_990, 9_998), (5, 2))
    rest = [((0, 0), (199_999_990, 10_000)), ((199_999_990, 0), (5, 9_998)), ((199_999_995, 0), (5, 10_000))]
    layout = Layout(Mesh((2,)), [Boxes([[box], rest])], shape)
    local = torch.empty(5, 2, dtype=torch.float64)
    random.fill(local, layout, 11, random.uniform)
    index = torch.arange(199_999_990, 199_999_995).view(5, 1) * 10_000 + torch.tensor([9_998, 9_999])
    assert torch.equal(local, random.uniform(index, 11, torch.float64))
    thousand = Layout(Mesh((1000,)), [Shard(0)], (200_000, 10_000))
    piece = torch.empty(thousand.local_shape(0))
    random.fill(piece, thousand, 11, random.normal)
    assert piece.numel() == 2 * columns
    whole = random.normal(torch.arange(2 * columns), 11, torch.float32)
    assert torch.equal(piece.view(-1), whole)


def test_ranks_with_different_seeds_are_told_so() -> None:
    def body() -> str:
        torch.manual_seed(collectives.rank() % 2)
        with pytest.raises(MismatchError) as caught:
            rand(4)
        return str(caught.value)

    (text,) = set(world(3).run(body))
    assert text.startswith("Ranks disagree on the random seed:\n  rank 0, 2: ")
    assert "torch.manual_seed with the same number on every rank" in text


@world(2)
def test_torchs_generator_governs_the_seed() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = rand(8, placements=[S0]).full_tensor()
    torch.set_rng_state(state)
    assert torch.equal(rand(8, placements=[R]).full_tensor(), first)
    assert not torch.equal(rand(8).full_tensor(), first)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_numbers_look_random(dtype: torch.dtype) -> None:
    index = torch.arange(200_000)
    flat, bell = (make(index, 1, dtype).double() for make in (random.uniform, random.normal))
    assert flat.min() >= 0
    assert flat.max() < 1
    assert flat.mean().item() == pytest.approx(0.5, abs=5e-3)
    assert flat.std().item() == pytest.approx(12**-0.5, abs=5e-3)
    histogram = torch.histc(flat, 16, 0, 1) / len(index)
    assert (histogram - 1 / 16).abs().max() < 3e-3
    assert bell.mean().item() == pytest.approx(0, abs=1e-2)
    assert bell.std().item() == pytest.approx(1, abs=1e-2)
    assert ((bell.abs() < 1).double().mean() - 0.6827).abs() < 5e-3
    assert (bell.pow(4).mean() - 3).abs() < 0.1
    for numbers in (flat, bell):
        for lag in (1, 2, 64, 10_000):
            assert torch.corrcoef(torch.stack([numbers[lag:], numbers[:-lag]]))[0, 1].abs() < 0.01
    other = random.uniform(index, 2, dtype).double()
    assert torch.corrcoef(torch.stack([flat, other]))[0, 1].abs() < 0.01


@world(3)
def test_what_has_no_random_values_is_refused() -> None:
    summands = DTensor.from_local(torch.ones(4), Mesh((3,)), [Partial()])
    with pytest.raises(RuleError, match="no summands"):
        summands.uniform_()
    with pytest.raises(RuleError, match="no summands"):
        randn(4, placements=[Partial()])
    with pytest.raises(TypeError, match="Random numbers need one of"):
        rand(4, dtype=torch.int64)
    with pytest.raises(RuleError, match="generator="):
        nn.init.normal_(ones(4), generator=torch.Generator())


@world(3)
def test_constants_have_the_shapes_and_dtypes_of_torch() -> None:
    kinds: dict[str, Any] = {"device_mesh": Mesh((3,)), "placements": [S0]}
    assert torch.equal(zeros(5, 2, **kinds).full_tensor(), torch.zeros(5, 2))
    assert torch.equal(ones((5, 2), **kinds, dtype=torch.int64).full_tensor(), torch.ones(5, 2, dtype=torch.int64))
    for value in (3, 2.5, True, 1 + 2j):
        assert torch.equal(full((5,), value, **kinds).full_tensor(), torch.full((5,), value))
    assert ones(3, requires_grad=True, **kinds).requires_grad
    assert empty(0, 3, **kinds).shape == (0, 3)
    with pytest.raises(LayoutError, match="no summands"):
        full((3,), 1.0, placements=[Partial()])
    with pytest.raises(LayoutError, match="Only dense"):
        empty(3, layout=torch.sparse_coo)
    filled_again = distribute_tensor(torch.zeros(5), Mesh((3,)), [S0])
    nn.init.constant_(filled_again, 4.0)
    assert filled_again.full_tensor().tolist() == [4.0] * 5


@world(4, real=True)
def test_real_processes_make_the_tensor_of_one() -> None:
    torch.manual_seed(7)
    everywhere = randn(*SHAPE, dtype=torch.float64)
    torch.manual_seed(7)
    cut = randn(*SHAPE, dtype=torch.float64, device_mesh=Mesh((2, 2)), placements=[S0, S1])
    assert torch.equal(cut.full_tensor(), everywhere.to_local())
