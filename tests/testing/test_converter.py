"""The converter: torch's combinations of placements, and those that torch leaves to do."""

from collections.abc import Callable
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.testing._internal.distributed._tensor.common_dtensor as theirs
from torch import Tensor, nn

from shardwise import DTensor, Mesh, Partial, Replicate, Shard, rank
from shardwise.testing import DTensorConverter, world

SHAPES = [(), (1,), (4,), (6, 4), (3, 8, 5), (0, 4), (12, 1, 4)]


class Tagged(Tensor):
    pass


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_without_switches_the_choices_are_torch_s(size: int) -> None:
    def check() -> None:
        for shape in SHAPES:
            for dtype in (torch.float32, torch.int64, torch.bool):
                for only in (False, True):
                    x = torch.zeros(shape, dtype=dtype)
                    ours = DTensorConverter(Mesh((size,)), (x,), {}, only).gen_sharding_choices_for_arg(x)
                    mesh: Any = SimpleNamespace(size=lambda: size)  # all that torch's asks of a mesh
                    peer = theirs.DTensorConverter(mesh, (x,), {}, only).gen_sharding_choices_for_arg(x)
                    assert [getattr(p, "dim", None) for p in ours] == [getattr(p, "dim", None) for p in peer]

    world(size).run(check)


@world(2)
def test_every_combination_comes_once_and_keeps_the_value() -> None:
    x, y, z = torch.randn(4, 6), torch.arange(8).view(4, 2), torch.tensor(2.0)
    converter = DTensorConverter(Mesh((2,)), (x, [y, "text"]), {"z": z, "n": 3})
    seen = []
    for (dx, (dy, text)), kwargs in converter:
        assert (text, kwargs["n"]) == ("text", 3)
        assert converter.successful()
        for d, plain in ((dx, x), (dy, y), (kwargs["z"], z)):
            assert isinstance(d, DTensor)
            assert torch.equal(d.full_tensor(), plain)
        seen.append((dx.placements[0], dy.placements[0], kwargs["z"].placements[0]))
    cuts = (Replicate(), Shard(0), Shard(1))
    assert seen == [(a, b, Replicate()) for a in cuts for b in cuts]
    assert (converter.hit, converter.miss) == (27, 0)


def lengths(d: DTensor) -> set[tuple[int, ...]]:
    """The shapes that the ranks of a simulated world hold."""
    return {d.layout_.local_shape(rank) for rank in d.layout_.mesh.ranks}


SWITCHES: list[dict[str, bool]] = [{}, {"uneven": True}, {"empty": True}, {"uneven": True, "empty": True}]


@pytest.mark.parametrize("mesh", [Mesh((2,)), Mesh((3,)), Mesh((4,)), Mesh((2, 2))], ids=str)
@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_each_switch_adds_the_cuts_it_names(mesh: Mesh, switches: dict[str, bool]) -> None:
    def check() -> None:
        for shape in SHAPES:
            x = torch.arange(torch.Size(shape).numel()).view(shape)
            kinds = set()
            for (d,), _ in DTensorConverter(mesh, (x,), {}, **switches):
                assert torch.equal(d.full_tensor(), x)
                held = lengths(d)
                kinds.add("even" if len(held) == 1 else "empty" if any(0 in part for part in held) else "uneven")
            assert "even" in kinds
            assert kinds <= {"even", *(name for name, on in switches.items() if on)}
            if any(length > mesh.size() for length in shape) and 0 not in shape:
                assert kinds == {"even", *(name for name, on in switches.items() if on)}

    world(mesh.size()).run(check)


@world(4)
def test_a_mesh_of_two_axes_gets_all_pairs_of_choices() -> None:
    x = torch.randn(8, 4)
    converter = DTensorConverter(Mesh((2, 2)), (x,), {}, partial=True)
    cuts = (Replicate(), Shard(0), Shard(1), Partial())
    assert [d.placements for (d,), _ in converter] == [(a, b) for a in cuts for b in cuts]


@pytest.mark.parametrize("mesh", [Mesh((3,)), Mesh((2, 2))], ids=str)
def test_contributions_differ_between_ranks_and_add_up_exactly(mesh: Mesh) -> None:
    x = torch.randn(5, 3)

    def check() -> None:
        found = [d for (d,), _ in DTensorConverter(mesh, (x,), {}, partial=True) if Partial() in d.placements]
        assert len(found) == (1 if mesh.ndim == 1 else 3)
        for d in found:
            assert torch.equal(d.full_tensor(), x)
            assert not torch.equal(d.to_local(), x)
        full = [d for (d,), _ in DTensorConverter(mesh, (torch.arange(5),), {}, partial=True)]
        assert all(Partial() not in d.placements for d in full)

    world(mesh.size()).run(check)


@world(2)
def test_truth_values_are_cut_on_request() -> None:
    x = torch.tensor([True, False, True, True])
    assert [d.placements for (d,), _ in DTensorConverter(Mesh((2,)), (x,), {})] == [(Replicate(),)]
    sharded = DTensorConverter(Mesh((2,)), (x,), {}, bools=True)
    assert [d.placements for (d,), _ in sharded] == [(Replicate(),), (Shard(0),)]


UNSUPPORTED: dict[str, Callable[[], Tensor]] = {
    "sparse": lambda: torch.eye(2).to_sparse(),
    "rows": lambda: torch.eye(2).to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "mkldnn": lambda: torch.ones(2, 2).to_mkldnn(),
    "nested": lambda: torch.nested.as_nested_tensor([torch.ones(2)], layout=torch.jagged),
    "conjugated": lambda: torch.ones(2, 2, dtype=torch.complex64).conj(),
    "negated": lambda: torch.ones(2, 2, dtype=torch.complex64).conj().imag,
    "meta": lambda: torch.ones(2, device="meta"),
    "subclass": lambda: torch.ones(2).as_subclass(Tagged),
}


@pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*:DeprecationWarning")
@pytest.mark.parametrize("kind", UNSUPPORTED)
@world(2)
def test_what_cannot_be_converted_is_a_miss_and_left_as_it_is(kind: str) -> None:
    x = UNSUPPORTED[kind]()
    converter = DTensorConverter(Mesh((2,)), (x, torch.ones(2)), {}, replicate_only=True)
    ((same, d),) = [args for args, _ in converter]
    assert same is x
    assert isinstance(d, DTensor)
    assert (converter.hit, converter.miss, converter.successful()) == (1, 1, False)


def test_nothing_to_convert_is_no_success() -> None:
    converter = DTensorConverter(Mesh((1,)), (1, "text"), {})
    assert list(converter) == [((1, "text"), {})]
    assert not converter.successful()
    with pytest.raises(TypeError, match="to make a DTensor of; got int"):
        converter.to_dist_tensor(3, Mesh((1,)), [Replicate()])  # type: ignore[arg-type]


@world(2)
def test_parameters_stay_parameters_and_leaves_stay_leaves() -> None:
    given = (nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4), False), torch.ones(4, requires_grad=True))
    for args, _ in DTensorConverter(Mesh((2,)), given, {}, partial=True):
        assert [isinstance(d, nn.Parameter) for d in args] == [True, True, False]
        assert [d.requires_grad for d in args] == [True, False, True]
        assert all(d.is_leaf and isinstance(d, DTensor) for d in args)
        (args[0] * args[2]).sum().backward()
        assert torch.equal(args[0].grad.full_tensor(), torch.ones(4))


@world(3)
def test_ranks_outside_the_mesh_take_part() -> None:
    x = torch.arange(6.0)
    for (d,), _ in islice(DTensorConverter(Mesh((2,)), (x,), {}, uneven=True), 4):
        total = d.sum().full_tensor()
        assert torch.equal(total, x.sum()) if rank() < 2 else not total.numel()
