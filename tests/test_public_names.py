"""The public names: few, documented, and those of torch for what is the same."""

import importlib
import inspect
import pydoc
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed.tensor as theirs
import torch.distributed.tensor.debug as their_debug
import torch.distributed.tensor.experimental as their_experimental
import torch.distributed.tensor.parallel as their_parallel

import shardwise
from shardwise import DTensor, debug, experimental, parallel

# A name is public if it is in `__all__` of one of these, and of errors.py every class. All others are private: their
# module or package begins with an underscore, or they are in a file of a public package.
MODULES = """
    shardwise shardwise.checkpoint shardwise.checkpoint.offline shardwise.collectives shardwise.data shardwise.debug
    shardwise.embedding shardwise.errors shardwise.experimental shardwise.parallel shardwise.sharded_tensor
    shardwise.plan shardwise.simulation shardwise.testing
""".split()
MOST = 212
ROOT = Path(__file__).parents[1]


def public_names(module: ModuleType) -> list[str]:
    names: list[str] = getattr(module, "__all__", None) or [
        name for name, value in vars(module).items() if isinstance(value, type) and value.__module__ == module.__name__
    ]
    return names


def test_public_names_are_few() -> None:
    homes = {name: importlib.import_module(name) for name in MODULES}
    found = {(name, id(getattr(module, name))) for module in homes.values() for name in public_names(module)}
    assert 150 < len(found) <= MOST


def test_what_is_not_listed_is_private_by_name() -> None:
    beside = {
        path.stem for path in (ROOT / "src" / "shardwise").iterdir() if not path.name.startswith(("_", "py.typed"))
    }
    assert beside == {name.split(".")[1] for name in MODULES[1:]}


def test_each_module_has_a_page_of_the_reference() -> None:
    pages = {page.stem for page in (ROOT / "docs" / "reference").glob("*.md")} - {"torch-patches"}
    assert pages == {name.split(".")[min(1, name.count("."))] for name in MODULES}


PAIRS: list[tuple[str, Any, Any]] = [
    *((name, getattr(theirs, name), getattr(shardwise, name)) for name in theirs.__all__),
    *((name, getattr(their_debug, name), getattr(debug, name)) for name in their_debug.__all__),
    *((name, getattr(their_experimental, name), getattr(experimental, name)) for name in their_experimental.__all__),
    *((name, getattr(their_parallel, name), getattr(parallel, name)) for name in their_parallel.__all__),
    *(
        (f"DTensor.{name}", getattr(theirs.DTensor, name), getattr(DTensor, name))
        for name in ("from_local", "to_local", "full_tensor", "redistribute")
    ),
    *(
        (f"CommDebugMode.{name}", getattr(their_debug.CommDebugMode, name), getattr(debug.CommDebugMode, name))
        for name in dir(their_debug.CommDebugMode)
        if name.startswith(("get_", "generate_", "log_"))
    ),
]

# Not offered: `spmd_types` runs a checker from a package of that name.
NOT_OFFERED = {("local_map", "spmd_types")}


@pytest.mark.parametrize(("name", "peer", "ours"), PAIRS, ids=[name for name, *_ in PAIRS])
def test_public_names_take_the_arguments_that_torch_takes(name: str, peer: Any, ours: Any) -> None:
    if (inspect.isclass(peer) and peer.__module__ != their_parallel.style.__name__) or not callable(peer):
        return
    have = inspect.signature(ours).parameters
    extra = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in have.values())
    for wanted in inspect.signature(peer).parameters.values():
        assert wanted.name in have or extra or (name, wanted.name) in NOT_OFFERED, (
            f"{name} has no argument {wanted.name}"
        )


def test_placements_answer_the_questions_that_torch_s_answer() -> None:
    for placement in (shardwise.Shard(1), shardwise.Replicate(), shardwise.Partial("max")):
        peer = getattr(theirs, type(placement).__name__)(
            *(getattr(placement, k) for k in ("dim", "reduce_op") if hasattr(placement, k))
        )
        assert placement.is_shard() == peer.is_shard()
        assert placement.is_shard(1) == peer.is_shard(1)
        assert placement.is_replicate() == peer.is_replicate()
        assert placement.is_partial() == peer.is_partial()
        assert placement.is_partial("max") == peer.is_partial("max")


@pytest.mark.parametrize("size", [0, 1, 5, 8, 9])
def test_shard_sizes_and_offsets_are_those_of_torch(size: int) -> None:
    for count, rank in ((n, i) for n in (1, 2, 4) for i in range(n)):
        assert shardwise.Shard.local_shard_size_and_offset(size, count, rank) == (
            theirs.Shard.local_shard_size_and_offset(size, count, rank)
        )


def test_help_shows_what_an_argument_must_be_and_no_addresses() -> None:
    lines = pydoc.plain(pydoc.render_doc(shardwise.launch)).splitlines()
    assert "nproc: Optional[Annotated[int, 'a number of ranks, an integer from 1 to 4096']]" in lines[2]
    for module in (shardwise, debug, experimental, parallel):
        for name in module.__all__:
            public = getattr(module, name)
            if inspect.isfunction(public):
                assert " at 0x" not in str(inspect.signature(public)), name


def test_what_explains_communication_is_beside_what_counts_it() -> None:
    assert vars(debug)["explain"] is shardwise.explain
    assert {"explain", "count_comms", "no_implicit_comm"} <= set(shardwise.__all__) & set(dir(shardwise))
