"""Optimiser steps and gradient clipping over a hundred parameters."""

from collections.abc import Callable
from typing import Any

import torch
from measure import interleaved, print_table
from systems import COLUMNS, System, figures, systems
from torch import Tensor, nn

COUNT, SHAPE = 100, (16, 16)

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
KINDS: dict[str, Make] = {
    f"{name}, {how}": lambda ps, kind=kind, how=how, more=more: kind(ps, lr=1e-3, **{how: True}, **more)  # type: ignore[misc]
    for name, kind, more in (
        ("Adam", torch.optim.Adam, {}),
        ("SGD with momentum", torch.optim.SGD, {"momentum": 0.9}),
        ("Adagrad", torch.optim.Adagrad, {}),
    )
    for how in ("foreach", "fused")
}


def parameters(system: System) -> list[nn.Parameter]:
    """Each with a gradient, sharded along dim 0."""
    torch.manual_seed(0)
    found = []
    for _ in range(COUNT):
        p = nn.Parameter(system.make(torch.randn(SHAPE), "0"))
        p.grad = system.make(torch.randn(SHAPE), "0")
        found.append(p)
    return found


def clip(params: list[nn.Parameter]) -> Callable[[], Tensor]:
    return lambda: nn.utils.clip_grad_norm_(params, 1e9)


def optimisers(rounds: int, calls: int) -> None:
    """The full table."""
    rows: list[list[Any]] = []
    runs: dict[str, Callable[[System], Callable[[], object]]] = {
        name: lambda s, make=make: make(parameters(s)).step  # type: ignore[misc]
        for name, make in KINDS.items()
    }
    runs["clip_grad_norm_"] = lambda s: clip(parameters(s))
    for name, run_of in runs.items():
        rows.append([name, *timed(run_of, rounds, calls)])
    print_table(f"A step over {COUNT} parameters of {SHAPE}; microseconds", ["optimiser", *COLUMNS], rows)


def timed(run_of: Callable[[System], Callable[[], object]], rounds: int, calls: int) -> list[str]:
    """The figures; where the peer cannot, what it says and ours beside plain torch."""
    variants, said = {}, ""
    for s in systems():
        try:
            run = run_of(s)
            run()
            variants[s.name] = run
        except Exception as error:  # noqa: BLE001 - a peer that cannot is a finding, not a failure
            said = f"{s.name} fails: {type(error).__name__}"
    times = interleaved(variants, rounds, calls)
    if not said:
        return figures(times)
    plain, mine = times["plain"].best * 1e6, times["ours"].best * 1e6
    return [f"{plain:.1f}", f"{mine:.1f}", "-", f"{mine - plain:.1f}", "-", "-", said]
