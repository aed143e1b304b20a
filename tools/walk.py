"""How far calls go through the library: Python frames and files of one call on two gloo ranks.

    python -m tools.walk               # a table
    python -m tools.walk redistribute  # also the frames of the last call of this name

A frame is the call of a Python function, also of one in torch. Each call is made several times with equal layouts.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
import torch.nn.functional as F

import shardwise
from shardwise import Mesh, Replicate, Shard, distribute_tensor, launch

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


def calls() -> dict[str, Callable[[], object]]:
    """The calls, by name."""
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


def walks() -> dict[str, list[list[Frame]]]:
    """The frames of every call of rank 0, each time that it was made, by name."""
    return {name: [frames_of(call) for _ in range(TIMES)] for name, call in calls().items()}


def main(names: list[str]) -> None:
    """Print the table, and the frames of the calls of these names."""
    found = launch(walks, nproc=RANKS)
    print(f"{'frames in files, first call to':30}" + "".join(f"{n:>12}." for n in range(1, TIMES + 1)))
    for name, times in found.items():
        counts = [f"{len(frames)} in {len({frame.file for frame in frames})}" for frames in times]
        print(f"{name:30}" + "".join(f"{count:>13}" for count in counts))
    for name in names:
        print(f"\n{name}")
        for file, function in found[name][-1]:
            print(f"  {Path(file).relative_to(ROOT) if ROOT in Path(file).parents else file}: {function}")


if __name__ == "__main__":
    main(sys.argv[1:])
