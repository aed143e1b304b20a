"""`shardwise doctor`: the resources of this machine, and whether ranks can communicate on it."""

import argparse
import os
import platform
import shutil
from pathlib import Path
from time import perf_counter

from shardwise._cli.common import Exit, SubParsers, add_command, check_folder, installed, progress_bar
from shardwise.errors import ConfigError

ELEMENTS = 1 << 18  # int32 that a rank sends to each rank: 1 MiB
REPEATS = 5
COSTS = "shardwise-costs.json"


def add_parser(subparsers: SubParsers) -> None:
    """Describe `doctor` to argparse."""
    parser = add_command(subparsers, "doctor", "check this installation and let two ranks exchange data", run)
    parser.add_argument("--nproc", type=int, default=2, metavar="N", help="ranks to start (default: 2)")
    text = "measure what collectives cost here, and write a file of that"
    parser.add_argument("--calibrate", action="store_true", help=text)
    text = f"of --calibrate (default: {COSTS})"
    parser.add_argument("--output", metavar="FILE", help=text)


def run(args: argparse.Namespace) -> int:
    """Print versions, cores, memory and free disk; then start ranks and time an all_to_all."""
    from shardwise._launch import launch

    if args.calibrate:
        return _calibrate(args.output or COSTS, args.nproc)
    if args.output is not None:
        raise ConfigError("--output is for --calibrate. Fix: add --calibrate, or leave it out.")
    for name, finding in _machine().items():
        print(f"{name:<10} {finding}", flush=True)
    start = perf_counter()
    exchange_seconds = launch(exchange, ELEMENTS, nproc=args.nproc, timeout_seconds=120.0)
    times = f"{exchange_seconds * 1e3:.1f} ms; started and ended in {perf_counter() - start:.1f} s"
    print(f"{'ranks':<10} {args.nproc} exchanged {ELEMENTS * 4 >> 20} MiB each way in {times}")
    return Exit.OK


def _calibrate(output: str, nproc: int) -> int:
    from rich.progress import SpinnerColumn, TimeElapsedColumn

    from shardwise._cli.calibration import calibrate
    from shardwise._launch import launch

    check_folder(output)
    with progress_bar(SpinnerColumn(), TimeElapsedColumn()) as update:
        update(description=f"measuring collectives of {nproc} ranks")
        table = launch(calibrate, Path(output).absolute(), nproc=nproc, timeout_seconds=120.0)
    print(table)
    return Exit.OK


def _machine() -> dict[str, str]:
    from shardwise._pictures.labels import bytes_text

    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    kibibytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    available, total = (bytes_text(1024 * kibibytes[kind]) for kind in ("MemAvailable", "MemTotal"))
    return {
        "shardwise": installed("shardwise"),
        "torch": installed("torch"),
        "python": platform.python_version(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{available} available of {total}",
        "disk": f"{bytes_text(shutil.disk_usage('.').free)} free in {Path.cwd()}",
    }


def exchange(elements: int) -> float:
    """The fastest of some all_to_alls in seconds, each checked. Runs on ranks."""
    import torch

    from shardwise import _collectives as collectives
    from shardwise.errors import MismatchError

    rank, world = collectives.rank(), tuple(range(collectives.world_size()))
    counts = [elements] * len(world)
    # What rank a sends to rank b says so; hence a wrong sender or receiver shows.
    sent = torch.tensor([[rank, to] for to in world], dtype=torch.int32).repeat(1, elements // 2).flatten()
    expected = torch.tensor([[of, rank] for of in world], dtype=torch.int32).repeat(1, elements // 2).flatten()
    times = []
    for _ in range(REPEATS):
        collectives.barrier(world)
        start = perf_counter()
        received = collectives.all_to_all(sent, counts, counts, world)
        times.append(perf_counter() - start)
        if not torch.equal(received, expected):
            raise MismatchError(
                f"rank {rank} of {len(world)} received other data than was sent to it. "
                f"Fix: do not train here; check the memory and the network of this machine, and reinstall torch."
            )
    return min(times)
