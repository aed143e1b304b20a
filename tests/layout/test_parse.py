"""What people write is read as Python would, and nothing in it is run."""

import pytest
import torch
from hypothesis import given

from shardwise._layout import (
    ITEMSIZES,
    Boxes,
    Mesh,
    OnRanks,
    Partial,
    Placement,
    Replicate,
    Shard,
    parse_integers,
    parse_itemsize,
    parse_mesh,
    parse_placement,
    parse_placements,
)
from shardwise.errors import PlanError
from tests.strategies import Written, laws, layouts


@pytest.mark.parametrize(
    ("text", "placement"),
    [
        ("Shard(0)", Shard(0)),
        (" Shard( dim=1 ) ", Shard(1)),
        ("Shard(-1)", Shard(-1)),
        ("Shard(0, sizes=(3, 0))", Shard(0, (3, 0))),
        ("S(0, [3, 0])", Shard(0, (3, 0))),
        ("Shard(0, sizes=[[1, 2], [3, 0]])", Shard(0, ((1, 2), (3, 0)))),
        ("OnRanks(2)", OnRanks(2)),
        ("Replicate()", Replicate()),
        ("Replicate", Replicate()),
        ("R", Replicate()),
        ("P", Partial()),
        ("Partial()", Partial()),
        ("Partial('max')", Partial("max")),
        ("Partial(max)", Partial("max")),
        ('P(reduce_op="avg")', Partial("avg")),
    ],
)
def test_placements_are_spelled_as_in_python_or_short(text: str, placement: Placement) -> None:
    assert parse_placement(text) == placement


def test_several_placements_are_one_string_a_list_or_a_table_by_axis_name() -> None:
    assert parse_placements("Shard(0), S(1, [2, 1]), R") == [Shard(0), Shard(1, (2, 1)), Replicate()]
    assert parse_placements(["Shard(0)", "P"]) == [Shard(0), Partial()]
    by_name = {"dp": Shard(1, (2, 1)), "tp": Replicate()}
    assert parse_placements("dp=S(1, [2, 1]), tp=R") == by_name
    assert parse_placements({"dp": "Shard(1, sizes=[2, 1])", "tp": "Replicate()"}) == by_name


@laws
@given(layouts())
def test_placements_are_read_as_they_print(written: Written) -> None:
    placements = [p for p in written.layout.placements if not isinstance(p, Boxes)]
    if placements:
        assert parse_placements(", ".join(map(str, placements))) == placements


NONE = [
    "", "Shard", "Shard()", "Shard('0')", "Shard(0, [1, 'x'])", "Shard(0, sizes=[-1, 2])", "Shard(0, size=[1])",
    "shard(0)", "Partial('mean')", "Partial(1)", "OnRanks('x')", "OnRanks(True)", "OnRanks()", "Replicate(0)",
    "Shard(0); 1", "Shard(0", "Shard(0)(1)", "__import__('os').system('exit')", "Shard(open('/etc/passwd').fileno())",
    "Shard(0)), placements(Shard(1)", "Shard(0))(Shard(1)", "dp=S(0), dp=R", "dp=S(0), **R", "S(0), dp=R", "dp=0",
    "Shard(*[0])", "Shard(**{'dim': 0})", "(" * 500, "Shard(0)], [Shard(1)", "Shard(x)", "S(0) for x in y", "[S(0)]",
    0, None, True, 1.5, ["Shard(0)", 1], {"dim": 0},
]  # fmt: skip


@pytest.mark.parametrize("text", NONE)
def test_nothing_else_is_a_placement(text: object) -> None:
    with pytest.raises(PlanError, match="is not a placement"):
        parse_placements(text)


@pytest.mark.parametrize("text", ["Shard(0), Shard(1)", ["Shard(0)"], ""])
def test_one_placement_is_one(text: object) -> None:
    with pytest.raises(PlanError, match="is not a placement"):
        parse_placement(text)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("4,2", (4, 2)), (" 4 x 2 ", (4, 2)), ("4×2", (4, 2)), ("7", (7,)), ("", ()), ([4, 2], (4, 2)), ([], ())],
)
def test_integers(text: object, numbers: tuple[int, ...]) -> None:
    assert parse_integers(text, "shape") == numbers


@pytest.mark.parametrize("text", ["4;2", "4,", "four", "1.5", [1.5], [True], [None], None, 3, {"a": 1}, "1" * 30])
def test_nothing_else_is_integers(text: object) -> None:
    with pytest.raises(PlanError, match="is not a shape"):
        parse_integers(text, "shape")


@pytest.mark.parametrize(
    ("text", "mesh"),
    [
        ("2,3", Mesh((2, 3))),
        (4, Mesh((4,))),
        ([2, 3], Mesh((2, 3))),
        ("dp=2, tp=3", Mesh((2, 3), names=("dp", "tp"))),
        ({"dp": 2, "tp": 3}, Mesh((2, 3), names=("dp", "tp"))),
    ],
)
def test_meshes(text: object, mesh: Mesh) -> None:
    assert parse_mesh(text) == mesh


@pytest.mark.parametrize(
    "text", ["", "0", "2,-1", "dp=2,3", "=2", "dp=2,dp=2", "dp=x", [], ["x"], None, True, "99999,99999"]
)
def test_nothing_else_is_a_mesh(text: object) -> None:
    with pytest.raises(PlanError, match="is not a mesh"):
        parse_mesh(text)


@pytest.mark.parametrize("text", ["dp=two", "dp=2,tp", "dp=2,=", "dp=2 tp=2", "dp=--2"])
def test_a_mesh_with_names_that_makes_no_sense_is_shown_whole(text: str) -> None:
    with pytest.raises(PlanError, match=rf"'{text}' is not a mesh.*Fix: write 2,2 or dp=2,tp=2"):
        parse_mesh(text)


def test_ranks_of_a_mesh_are_as_many_as_its_positions() -> None:
    assert parse_mesh("2", [5, 3]) == Mesh((2,), (5, 3))
    with pytest.raises(PlanError, match="positions"):
        parse_mesh("2", [1, 2, 3])


def test_bytes_of_elements_are_those_of_torch() -> None:
    for name, size in ITEMSIZES.items():
        assert getattr(torch, name).itemsize == size
    assert parse_itemsize("torch.bfloat16") == 2
    with pytest.raises(PlanError, match="'float' is not a dtype"):
        parse_itemsize("float")
