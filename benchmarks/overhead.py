"""What a distributed tensor costs beside a plain one: models, optimisers, single ops, shapes never seen before.

One process, one rank, tensors so small that the time is the overhead. Three variants take turns: plain torch,
shardwise, and torch.distributed.tensor with the same placements.

    python benchmarks/overhead.py [--quick]
"""

import argparse
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measure import interleaved, machine, print_table
from models import BATCH, WIDTH, models, transformers
from optimisers import optimisers
from systems import COLUMNS, System, figures, systems
from torch import Tensor
from torch._C._distributed_c10d import HashStore

# ---- single ops ---------------------------------------------------------------------------------------------

Op = Callable[..., Any]
# name: (op, shapes of its operands, their placements, whether they require grad)
OPS: dict[str, tuple[Op, list[tuple[int, ...]], str, bool]] = {
    "add": (torch.add, [(BATCH, WIDTH)] * 2, "00", False),
    "x + y, with grad": (lambda x, y: x + y, [(BATCH, WIDTH)] * 2, "00", True),
    "x * 2.0": (lambda x: x * 2.0, [(BATCH, WIDTH)], "0", False),
    "mul": (torch.mul, [(BATCH, WIDTH)] * 2, "00", False),
    "add_": (lambda x, y: x.add_(y), [(BATCH, WIDTH)] * 2, "00", False),
    "relu": (F.relu, [(BATCH, WIDTH)], "0", False),
    "gelu": (F.gelu, [(BATCH, WIDTH)], "0", False),
    "detach": (lambda x: x.detach(), [(BATCH, WIDTH)], "0", False),
    "view": (lambda x: x.view(BATCH, 4, 4), [(BATCH, WIDTH)], "0", False),
    "reshape to heads": (lambda x: x.reshape(BATCH, 2, 4, WIDTH // 4), [(BATCH, 2, WIDTH)], "0", False),
    "x[:, -1]": (lambda x: x[:, -1], [(BATCH, WIDTH)], "0", False),
    "chunk": (lambda x: x.chunk(2, -1), [(BATCH, WIDTH)], "0", False),
    "x.T": (lambda x: x.t(), [(BATCH, WIDTH)], "0", False),
    "sum": (torch.sum, [(BATCH, WIDTH)], "0", False),
    "sum of dim 1": (lambda x: x.sum(1), [(BATCH, WIDTH)], "0", False),
    "softmax": (lambda x: F.softmax(x, -1), [(BATCH, WIDTH)], "0", False),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (WIDTH,), w, b), [(BATCH, WIDTH), (WIDTH,), (WIDTH,)], "0RR", False),
    "mse_loss": (F.mse_loss, [(BATCH, WIDTH)] * 2, "00", False),
    "matmul": (torch.matmul, [(BATCH, WIDTH), (WIDTH, WIDTH)], "0R", False),
    "linear": (F.linear, [(BATCH, WIDTH), (WIDTH, WIDTH), (WIDTH,)], "0RR", False),
    "linear, with grad": (F.linear, [(BATCH, WIDTH), (WIDTH, WIDTH), (WIDTH,)], "0RR", True),
    "embedding, ids replicated": (F.embedding, [(BATCH,), (64, WIDTH)], "R0", False),
    "embedding, ids Shard(0)": (F.embedding, [(BATCH,), (64, WIDTH)], "00", False),
    "x.shape": (lambda x: x.shape, [(BATCH, WIDTH)], "0", False),
    "x.requires_grad": (lambda x: x.requires_grad, [(BATCH, WIDTH)], "0", False),
}


def operands(system: System, name: str) -> list[Tensor]:
    _, shapes, letters, with_grad = OPS[name]
    torch.manual_seed(0)
    values = [torch.randn(shape) for shape in shapes]
    if name.startswith("embedding"):
        values[0] = torch.randint(64, shapes[0])
    return [system.make(v, letter).requires_grad_(with_grad) for v, letter in zip(values, letters, strict=True)]


def single_ops(rounds: int, calls: int) -> None:
    rows = []
    for name, (op, *_) in OPS.items():
        runs = {s.name: called(op, operands(s, name)) for s in systems()}
        try:
            rows.append([name, *figures(interleaved(runs, rounds, calls))])
        except Exception as error:  # noqa: BLE001 - a peer without the op is a finding, not a failure
            rows.append([name, *["-"] * 6, f"fails: {type(error).__name__}"])
    print_table(
        f"Single warm ops on ({BATCH}, {WIDTH}); microseconds, the best of {rounds} rounds",
        ["op", *COLUMNS],
        rows,
    )


def called(op: Op, args: list[Tensor]) -> Callable[[], object]:
    return lambda: op(*args)


# ---- shapes never seen before ----------------------------------------------------------------------------------

FRESH: dict[str, Op] = {
    "relu": lambda x, w, b: torch.relu(x),
    "x + x": lambda x, w, b: x + x,
    "linear": F.linear,
    "sum": lambda x, w, b: x.sum(),
}


def fresh_shapes(rounds: int, calls: int) -> None:
    """Each call meets a batch size for the first time in this process."""
    rows = []
    for name, op in FRESH.items():
        sizes = count(BATCH)
        runs = {}
        for s in systems():
            w, b = s.make(torch.randn(WIDTH, WIDTH), "R"), s.make(torch.randn(WIDTH), "R")
            inputs = iter([s.make(torch.randn(next(sizes), WIDTH), "0") for _ in range(rounds * calls + 3)])
            runs[s.name] = fresh(op, inputs, w, b)
        rows.append([name, *figures(interleaved(runs, rounds, calls))])
    print_table(
        f"An op on a batch size never seen before; microseconds, the best of {rounds} rounds of {calls}",
        ["op", *COLUMNS],
        rows,
    )


def fresh(op: Op, inputs: Iterator[Tensor], w: Tensor, b: Tensor) -> Callable[[], object]:
    return lambda: op(next(inputs), w, b)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds: shows that it runs, and the order of things")
    parser.add_argument("--only", choices=["models", "optimisers", "ops", "fresh"], help="a part of it")
    options = parser.parse_args()
    rounds = 5 if options.quick else 15
    torch.set_num_threads(1)
    print(machine())
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        if options.only in (None, "models"):
            models(rounds, 10 if options.quick else 40)
            transformers(rounds, 3 if options.quick else 10)
        if options.only in (None, "optimisers"):
            optimisers(rounds, 5 if options.quick else 20)
        if options.only in (None, "ops"):
            single_ops(rounds, 50 if options.quick else 300)
        if options.only in (None, "fresh"):
            fresh_shapes(5 if options.quick else 10, 10)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
