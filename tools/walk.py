"""How far calls go through the library: Python frames and files of one call on two gloo ranks.

    python -m tools.walk               # a table
    python -m tools.walk redistribute  # also the frames of the last call of this name

A frame is the call of a Python function, also of one in torch. A return is a frame in a file of the library that an
earlier frame was in, after one in another file. Each call is made several times with equal layouts.
"""

import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import shardwise
from shardwise import Mesh, Replicate, Shard, distribute_tensor, launch
from shardwise.checkpoint import load, save
from shardwise.embedding import (
    SGD,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    KeyedTensor,
    shard_embeddings,
)
from shardwise.parallel import fully_shard

RANKS, TIMES = 2, 5
ROOT = Path(shardwise.__file__).parent


class Frame(NamedTuple):
    """The call of one function."""

    file: str
    function: str


def frames_of(call: Callable[[], object]) -> list[Frame]:
    """The frames of `call`, in order, without its own one and those of imports."""
    frames: list[Frame] = []

    def profile(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and "importlib" not in frame.f_code.co_filename:
            frames.append(Frame(frame.f_code.co_filename, frame.f_code.co_qualname))

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return frames[1:]


def returns(frames: list[Frame]) -> int:
    """How often the way leaves a file of the library for one that it was in before."""
    files = [frame.file for frame in frames if ROOT in Path(frame.file).parents]
    seen, count = set(files[:1]), 0
    for before, file in pairwise(files):
        count += file != before and file in seen
        seen.add(file)
    return count


def calls(folder: str) -> dict[str, Callable[[], object]]:
    """The calls, by name; checkpoints are written to `folder`."""
    return op_calls() | layer_calls() | checkpoint_calls(folder)


def layer_calls() -> dict[str, Callable[[], object]]:
    """A sharded collection of two tables, and a unit of `fully_shard`."""
    mesh = Mesh((RANKS,))
    configs = [EmbeddingBagConfig(8, 4, name, feature_names=[name]) for name in ("users", "items")]
    tables = shard_embeddings(
        EmbeddingBagCollection(configs), {config.name: Shard(0) for config in configs}, mesh, SGD(lr=0.1)
    )
    batch = KeyedJaggedTensor(
        keys=["users", "items"], values=torch.tensor([1, 2, 3, 4, 5]), lengths=torch.tensor([2, 0, 1, 2])
    )
    layer = torch.nn.Linear(6, 4)
    fully_shard(layer, mesh=mesh)
    x = torch.randn(3, 6)
    pooled, sums = list[Tensor](), list[Tensor]()

    def look_up() -> None:
        result = tables(batch)
        assert isinstance(result, KeyedTensor)
        pooled.append(result.values())

    return {
        "lookup of a collection": look_up,
        "its backward": lambda: pooled.pop().sum().backward(),
        "forward of a unit": lambda: sums.append(layer(x)),
        "its backward and reduction": lambda: sums.pop().sum().backward(),
    }


def checkpoint_calls(folder: str) -> dict[str, Callable[[], object]]:
    """Save and load of a sharded tensor."""
    state = {"x": distribute_tensor(torch.randn(8, 6), Mesh((RANKS,)), [Shard(0)])}
    steps = iter(range(TIMES))
    return {
        "save": lambda: save(folder, state, step=next(steps)),
        "load": lambda: load(folder, state),
    }


def op_calls() -> dict[str, Callable[[], object]]:
    """Ops, their backward and an optimizer step."""
    mesh = Mesh((RANKS,))
    w = torch.randn(6, 4)
    rows = distribute_tensor(torch.randn(8, 6), mesh, [Shard(0)])
    full, gathered = distribute_tensor(w, mesh, [Replicate()]), distribute_tensor(w, mesh, [Shard(0)])
    ids = distribute_tensor(torch.arange(6).view(3, 2), mesh, [Shard(0)])
    leaf = distribute_tensor(w, mesh, [Shard(0)]).requires_grad_()
    losses = iter([(rows @ leaf).sum() for _ in range(TIMES)])
    parameters = [torch.nn.Parameter(distribute_tensor(w, mesh, [Shard(0)])) for _ in range(2)]
    for p in parameters:
        p.grad = p.detach().clone()
    return {
        "matmul": lambda: rows @ full,
        "gathering matmul": lambda: rows @ gathered,
        "redistribute": lambda: rows.redistribute(placements=[Replicate()]),
        "embedding_bag": lambda: F.embedding_bag(ids, gathered),
        "x[2:5]": lambda: rows[2:5],
        "backward of a gathered leaf": lambda: next(losses).backward(),
        "AdamW step": torch.optim.AdamW(parameters).step,
    }


def walks(folder: str) -> dict[str, list[list[Frame]]]:
    """The frames of every call of rank 0, each time that it was made, by name."""
    made = calls(folder)
    rounds = [{name: frames_of(call) for name, call in made.items()} for _ in range(TIMES)]
    return {name: [frames[name] for frames in rounds] for name in made}


def main(names: list[str]) -> None:
    """Print the table, and the frames of the calls of these names."""
    with tempfile.TemporaryDirectory() as folder:
        found = launch(walks, folder, nproc=RANKS)
    print(f"{'frames in files, first call to':30}" + "".join(f"{n:>12}." for n in range(1, TIMES + 1)) + "     returns")
    for name, times in found.items():
        counts = [f"{len(frames)} in {len({frame.file for frame in frames})}" for frames in times]
        print(f"{name:30}" + "".join(f"{count:>13}" for count in counts) + f"{returns(times[-1]):>12}")
    for name in names:
        print(f"\n{name}")
        for file, function in found[name][-1]:
            print(f"  {Path(file).relative_to(ROOT) if ROOT in Path(file).parents else file}: {function}")


if __name__ == "__main__":
    main(sys.argv[1:])
