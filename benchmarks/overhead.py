"""What a distributed tensor costs beside a plain one: small models, single ops, and shapes never seen before.

One process, one rank, tensors so small that the time is the overhead. Three variants take turns: plain torch,
shardwise, and torch.distributed.tensor with the same placements.

    python benchmarks/overhead.py [--quick]
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as peer
import torch.nn.functional as F
from measure import Times, interleaved, machine, print_table, ratio
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

import shardwise.tensor as ours
from shardwise.collectives import init_device_mesh
from shardwise.placement import Replicate, Shard

WIDTH, DEPTH, BATCH = 16, 4, 8


@dataclass(frozen=True)
class System:
    """One way to make a tensor of a plain one, given letters for placements: R, or the dim of a Shard."""

    name: str
    make: Callable[[Tensor, str], Tensor]


def systems() -> list[System]:
    """Plain torch, shardwise, torch.distributed.tensor, on one mesh of one rank."""
    mesh = init_device_mesh("cpu", (1,))

    def of_ours(x: Tensor, letter: str) -> Tensor:
        return ours.distribute_tensor(x, mesh, [Replicate() if letter == "R" else Shard(int(letter))])

    def of_peer(x: Tensor, letter: str) -> Tensor:
        placement = peer.Replicate() if letter == "R" else peer.Shard(int(letter))
        made = peer.distribute_tensor(x.detach(), mesh, [placement])
        return made.requires_grad_(x.requires_grad)

    return [System("plain", lambda x, letter: x), System("ours", of_ours), System("torch", of_peer)]


# ---- whole models -------------------------------------------------------------------------------------------

# placements of the input, and of weight and bias of the layers in turn
PATTERNS = {
    "replicated weights, input Shard(0)": ("0", ["RR"]),
    "weights Shard(0), input Replicate": ("R", ["00"]),
    "weights Shard(0) and Shard(1) in turn": ("R", ["00", "1R"]),
}


def model(system: System, layers: list[str], relu: bool) -> nn.Sequential:
    """Linear layers, each with a ReLU behind it if asked, whose parameters belong to `system`."""
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for i in range(DEPTH):
        linear = nn.Linear(WIDTH, WIDTH)
        letters = layers[i % len(layers)]
        linear.weight = nn.Parameter(system.make(linear.weight.detach(), letters[0]))
        linear.bias = nn.Parameter(system.make(linear.bias.detach(), letters[1]))
        parts += [linear, nn.ReLU()] if relu else [linear]
    return nn.Sequential(*parts)


def step(net: nn.Module, x: Tensor) -> Callable[[], None]:
    """Forward, backward, a look at every gradient."""
    params = list(net.parameters())

    def run() -> None:
        net(x).sum().backward()
        for p in params:
            assert p.grad is not None
            p.grad = None

    return run


def models(rounds: int, calls: int) -> None:
    rows = []
    for kind, relu in (("MLP with ReLU", True), ("linears", False)):
        for pattern, (x_letter, layers) in PATTERNS.items():
            x = torch.randn(BATCH, WIDTH)
            steps = {s.name: step(model(s, layers, relu), s.make(x, x_letter)) for s in systems()}
            rows.append([f"{kind}; {pattern}", *figures(interleaved(steps, rounds, calls))])
    print_table(
        f"Forward and backward of {DEPTH} layers, batch {BATCH}, width {WIDTH}; microseconds, best of {rounds} rounds\n"
        "overhead = variant - plain; the last columns are overhead of ours / overhead of torch",
        ["model", "plain", "ours", "torch", "ours over plain", "torch over plain", "ratio", "ratio of medians"],
        rows,
    )


def figures(times: dict[str, Times]) -> list[str]:
    plain, mine, theirs = times["plain"], times["ours"], times["torch"]
    over = [mine.best - plain.best, theirs.best - plain.best]
    return [
        *(f"{t.best * 1e6:.1f}" for t in (plain, mine, theirs)),
        *(f"{s * 1e6:.1f}" for s in over),
        ratio(*over),
        ratio(mine.median - plain.median, theirs.median - plain.median),
    ]


# ---- single ops ---------------------------------------------------------------------------------------------

Op = Callable[..., Any]
# name: (op, shapes of its operands, their placements, whether they require grad)
OPS: dict[str, tuple[Op, list[tuple[int, ...]], str, bool]] = {
    "add": (torch.add, [(BATCH, WIDTH)] * 2, "00", False),
    "x + y, recorded": (lambda x, y: x + y, [(BATCH, WIDTH)] * 2, "00", True),
    "x * 2.0": (lambda x: x * 2.0, [(BATCH, WIDTH)], "0", False),
    "mul": (torch.mul, [(BATCH, WIDTH)] * 2, "00", False),
    "add_": (lambda x, y: x.add_(y), [(BATCH, WIDTH)] * 2, "00", False),
    "relu": (F.relu, [(BATCH, WIDTH)], "0", False),
    "gelu": (F.gelu, [(BATCH, WIDTH)], "0", False),
    "detach": (lambda x: x.detach(), [(BATCH, WIDTH)], "0", False),
    "view": (lambda x: x.view(BATCH, 4, 4), [(BATCH, WIDTH)], "0", False),
    "x.T": (lambda x: x.t(), [(BATCH, WIDTH)], "0", False),
    "sum": (torch.sum, [(BATCH, WIDTH)], "0", False),
    "sum of dim 1": (lambda x: x.sum(1), [(BATCH, WIDTH)], "0", False),
    "softmax": (lambda x: F.softmax(x, -1), [(BATCH, WIDTH)], "0", False),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (WIDTH,), w, b), [(BATCH, WIDTH), (WIDTH,), (WIDTH,)], "0RR", False),
    "matmul": (torch.matmul, [(BATCH, WIDTH), (WIDTH, WIDTH)], "0R", False),
    "linear": (F.linear, [(BATCH, WIDTH), (WIDTH, WIDTH), (WIDTH,)], "0RR", False),
    "linear, recorded": (F.linear, [(BATCH, WIDTH), (WIDTH, WIDTH), (WIDTH,)], "0RR", True),
    "embedding, ids replicated": (F.embedding, [(BATCH,), (64, WIDTH)], "R0", False),
    "embedding, ids Shard(0)": (F.embedding, [(BATCH,), (64, WIDTH)], "00", False),
    "x.shape": (lambda x: x.shape, [(BATCH, WIDTH)], "0", False),
    "x.requires_grad": (lambda x: x.requires_grad, [(BATCH, WIDTH)], "0", False),
}


def operands(system: System, name: str) -> list[Tensor]:
    _, shapes, letters, recorded = OPS[name]
    torch.manual_seed(0)
    values = [torch.randn(shape) for shape in shapes]
    if name.startswith("embedding"):
        values[0] = torch.randint(64, shapes[0])
    return [system.make(v, letter).requires_grad_(recorded) for v, letter in zip(values, letters, strict=True)]


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
        ["op", "plain", "ours", "torch", "ours over plain", "torch over plain", "ratio", "ratio of medians"],
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
        ["op", "plain", "ours", "torch", "ours over plain", "torch over plain", "ratio", "ratio of medians"],
        rows,
    )


def fresh(op: Op, inputs: Iterator[Tensor], w: Tensor, b: Tensor) -> Callable[[], object]:
    return lambda: op(next(inputs), w, b)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds: shows that it runs, and the order of things")
    parser.add_argument("--only", choices=["models", "ops", "fresh"], help="one of the three tables")
    options = parser.parse_args()
    rounds = 5 if options.quick else 15
    torch.set_num_threads(1)
    print(machine())
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        if options.only in (None, "models"):
            models(rounds, 10 if options.quick else 40)
        if options.only in (None, "ops"):
            single_ops(rounds, 50 if options.quick else 300)
        if options.only in (None, "fresh"):
            fresh_shapes(5 if options.quick else 10, 10)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
