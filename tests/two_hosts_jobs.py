"""What `test_two_hosts.py` runs on two hosts of two ranks each; each rank writes down what became of it.

torchrun … -m tests.two_hosts_jobs FOLDER TIMEOUT JOB [ARGUMENT]
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import DTensor, Mesh, Placement, Replicate, Shard, distribute_tensor, launch, shard_module
from shardwise import _collectives as collectives
from shardwise._collectives import all_reduce, barrier, check_values, rank
from tests.timeouts import PATIENCE_SECONDS

WORLD = (0, 1, 2, 3)
FOLDER = ""  # where ranks write; set by the command line
Training = tuple[list[float], dict[str, list[Any]]]


class Broken(Exception):  # noqa: N818 - the name is of no matter
    pass


class Scorer(nn.Module):
    """11 rows on 4 ranks, 5 features on 2, a last weight of 3 rows on 4: all uneven, one rank has none."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(11, 6, mode="mean")
        self.hidden = nn.Linear(6, 5)
        self.out = nn.Linear(5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.out(torch.tanh(self.hidden(self.items(ids))))
        return scores


def steps(mesh: Mesh | None) -> Training:
    """Losses and parameters of four steps; of plain torch without a mesh."""
    torch.manual_seed(0)
    model = Scorer().double()
    ids, labels = torch.randint(11, (7, 4)), torch.randn(7, 3, dtype=torch.double)
    if mesh is not None:
        replicated, both, local = [Replicate()] * 2, [Shard(0)] * 2, [Replicate(), Shard(0)]
        plan: dict[str, Sequence[Placement]] = {
            "items.weight": both,
            "hidden.*": local,
            "out.weight": both,
            "out.bias": replicated,
        }
        shard_module(model, plan, mesh=mesh)
        ids, labels = (distribute_tensor(x, mesh, [Shard(0), Replicate()]) for x in (ids, labels))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = F.mse_loss(model(ids), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    full = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in model.named_parameters()}
    return losses, {name: x.tolist() for name, x in full.items()}


def train() -> Training:
    return steps(Mesh((2, 2), names=("host", "local")))


def train_on_hosts() -> tuple[Training, list[int]]:
    """What came of the steps, and which ranks this one takes for ranks of other hosts."""
    return train(), peers()


def fail(how: str) -> None:
    """A few collectives, then something ends, mostly on the second host, while the others go on."""
    for _ in range(3):
        all_reduce(torch.ones(5), "sum", WORLD)
    if rank() == (0 if how == "first host" else 3):
        match how:
            case "raise":
                raise Broken("no such row")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "host" | "first host":
                os.kill(os.getppid(), signal.SIGKILL)  # its agent, with which the host ends
                time.sleep(600)
            case "link":
                subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
    all_reduce(torch.ones(5), "sum", WORLD)


def disagree() -> None:
    """The ranks of the hosts make different calls of the same size from the third on."""
    for number in range(200):
        all_reduce(torch.ones(5), "max" if number > 1 and rank() > 1 else "sum", WORLD)


def differ() -> None:
    """The hosts have different replicated values."""
    mesh = Mesh((4,))
    x = distribute_tensor(torch.ones(8), mesh, [Shard(0)])
    for _ in range(200):
        (x + torch.full((8,), float(rank() > 1))).sum().item()


def evaluate_apart() -> None:
    """Plain batches, equal on both hosts and then not; no collective has ranks of both until the end."""
    mesh = Mesh((2, 2), names=("host", "local"))
    w = DTensor.from_local(torch.ones(3, 4), mesh, [Replicate(), Shard(0)], run_check=False)
    for i in range(50):
        (torch.full((3, 6), float(i)) @ w).sum().item()
    for i in range(500):
        (torch.full((3, 6), float(i - (rank() > 1))) @ w).sum().item()
    (Path(FOLDER) / f"found nothing {rank()}").touch()
    barrier(WORLD)


def evaluate_apart_at_another_pace() -> None:
    """Equal batches, numbers and rows on both hosts, of which the second falls behind for a while."""
    check_values(numbers=True)
    mesh = Mesh((2, 2), names=("host", "local"))
    w = DTensor.from_local(torch.ones(3, 4), mesh, [Replicate(), Shard(0)], run_check=False)
    for i in range(100):
        (torch.full((3 + i % 2, 6), float(i)) @ w * float(i)).sum().item()
        if i < 20 and rank() > 1:
            time.sleep(0.02)


def stop_the_first_launcher() -> None:
    """It has the server of the store, and goes on when the ranks that wait for rank 3 have failed."""
    time.sleep(2)  # for the monitors to see who has the server
    launcher = os.getppid()
    if rank() == 0:
        os.kill(launcher, signal.SIGSTOP)
    try:
        if rank() == 3:
            until_failed((1, 2))
        else:
            barrier(WORLD)
    finally:
        if rank() == 0:
            until_failed((1, 2))
            os.kill(launcher, signal.SIGCONT)


def until_failed(ranks: tuple[int, ...]) -> None:
    """Wait until these ranks have written down what became of them."""
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until and not all((Path(FOLDER) / f"outcome-{other}").exists() for other in ranks):
        time.sleep(0.1)


def sleep() -> None:
    os.write(1, b"asleep\n")
    time.sleep(600)


def peers() -> list[int]:
    from shardwise._collectives.processes import TORCH_TRANSPORT

    barrier(WORLD)
    barrier(WORLD)
    assert TORCH_TRANSPORT._memory is not None
    return sorted(TORCH_TRANSPORT._memory.elsewhere)


JOBS = {
    job.__name__: job
    for job in (
        train,
        train_on_hosts,
        fail,
        disagree,
        differ,
        evaluate_apart,
        evaluate_apart_at_another_pace,
        stop_the_first_launcher,
        sleep,
    )
}


def run(what: list[str]) -> None:
    # torchrun sends it to the ranks of a host as soon as it sees that one has ended; here each is to say why it ends.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    started = time.monotonic()
    outcome: dict[str, Any] = {"returned": None, "error": "", "text": ""}
    try:
        collectives.barrier(WORLD)
        outcome["returned"] = JOBS[what[0]](*what[1:])
    except BaseException as error:
        outcome |= {"error": type(error).__name__, "text": str(error)}
        raise
    finally:
        outcome["seconds"] = time.monotonic() - started
        written = Path(FOLDER) / f"outcome-{rank()}"
        written.with_suffix(".part").write_text(json.dumps(outcome), encoding="utf-8")
        written.with_suffix(".part").rename(written)


if __name__ == "__main__":
    FOLDER, seconds, *what = sys.argv[1:]
    launch(run, what, nproc=4, timeout_seconds=float(seconds))
