"""Training that is killed, stopped and resumed at random takes the steps of a run that is not: `python -m tools.soak`.

    python -m tools.soak --seconds 60 --seed 0

Each round is a run of `tools.soak_job` that is disturbed until it has taken its last step: SIGKILL of a rank or of all
processes; SIGSTOP of a rank, which is continued soon or never; SIGTERM. That happens after some steps and a random
time; every third time, while a checkpoint is being written. The job starts its ranks again after the failure of one;
where all its processes have ended, it is started again here.

In half of the rounds it always has the ranks and the plan of the uninterrupted run: every loss has to be equal to the
bit. In the others each start has another number of ranks or another plan: the losses may differ by `TOLERANCE`.

The disturbances end after `--seconds`; the round that is under way then goes to its end. The exit code is 1 if a loss
differs, if a step is missing, or if the job ends, hangs or fails as it should not.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle
from math import inf
from pathlib import Path
from time import monotonic, sleep

from tools.soak_job import FOLDER, SAVE_EVERY, TIMEOUT_SECONDS

ROOT = Path(__file__).parents[1]

# Other ranks and layouts add the same float32 numbers in another order. Each sum then differs by some 6e-8 of it, and
# training carries that on from step to step: after 150 steps of this job, losses differ by up to 2e-7.
TOLERANCE = 1e-6  # of a loss, relative

PATIENCE_SECONDS = 240.0  # without a step: neither the job nor its timeouts do what they should
POLL_SECONDS = 0.02
SAVING_POLL_SECONDS = 0.001  # a save takes some 20 ms
AT_A_SAVE, SOON_SECONDS = 1 / 3, 0.3
KILLED_ALL, TERMINATED = -signal.SIGKILL, 143

# Options of a start: the numbers of ranks, in turn, and the plans of tables and layers.
SAME = ("--ranks 2 --tables row --layers fully", "--ranks 2 --tables table --layers tensor")
OTHERS = (
    "--ranks 3 1 --tables table --layers fully",
    "--ranks 1 --tables row --layers replicate",
    "--ranks 2 1 --tables column --layers replicate",
    "--ranks 3 2 --tables replicate --layers tensor",
)
ROUNDS = (SAME[0], "", SAME[1], "")
EVENTS = ("kill a rank", "kill a rank", "kill all", "stop and continue", "stop for good", "SIGTERM")


class SoakError(Exception):
    """The run did not survive."""


@dataclass
class Counts:
    """What was done, and what came of it."""

    events: Counter[str] = field(default_factory=Counter)
    saving: int = 0
    restarts: int = 0
    resumes: int = 0
    other_ranks: int = 0
    other_plans: int = 0
    runs: int = 0
    steps: int = 0
    again: int = 0
    largest: dict[bool, float] = field(default_factory=dict[bool, float])
    """The largest difference of a loss, on the same ranks or not."""

    def add(self, said: str) -> None:
        """Count what a job said of itself."""
        self.restarts += len(re.findall(r"^Restart \d", said, re.MULTILINE))
        resumed = re.findall(r"^Resumed from step \d+ of (\d) ranks, (.*); now (\d) ranks, (.*)$", said, re.MULTILINE)
        self.resumes += len(resumed)
        self.other_ranks += sum(before != now for before, _, now, _ in resumed)
        self.other_plans += sum(before != now for _, before, _, now in resumed)

    def __str__(self) -> str:
        same, other = (f"{self.largest[same]:.1e}" if same in self.largest else "no run" for same in (True, False))
        rows = {f"disturbances: {name}": self.events[name] for name in dict.fromkeys(EVENTS)} | {
            "disturbances while a checkpoint was written": self.saving,
            "restarts of the ranks by the job": self.restarts,
            "resumes from a checkpoint": self.resumes,
            "resumes on another number of ranks": self.other_ranks,
            "resumes with another plan": self.other_plans,
            "runs that ended": self.runs,
            "steps, with those taken again": self.steps,
            "steps taken again": self.again,
            "largest relative difference of a loss, same ranks": same,
            "largest relative difference of a loss, changing ranks and plans": other,
        }
        return "\n| | |\n| --- | --- |\n" + "\n".join(f"| {name} | {value} |" for name, value in rows.items())


class Command:
    """The job in a session of its own, in a folder.

    Attributes:
        stopped: the process id of a rank that was stopped for good.
    """

    stopped = 0

    def __init__(self, folder: Path, options: str) -> None:
        self._folder, self.losses, self._said = folder, folder / "losses", folder / "said"
        with self._said.open("ab") as said:
            self._begin = said.tell()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tools.soak_job", str(self.losses), *options.split()],
                cwd=folder,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self._said.read_bytes()[self._begin :].decode(errors="replace")

    def num_losses(self) -> int:
        return self.losses.read_bytes().count(b"\n") if self.losses.exists() else 0

    def drafts(self) -> set[Path]:
        """The checkpoints that are being written or removed, or were when a rank was killed."""
        return set(self._folder.glob(f"{FOLDER}/.tmp-step-*"))

    def wait_for_save(self, earlier: set[Path]) -> None:
        """Return while a checkpoint is being written, if one is soon."""
        until = monotonic() + PATIENCE_SECONDS / 20
        while self.process.poll() is None and monotonic() < until and self.drafts() <= earlier:
            sleep(SAVING_POLL_SECONDS)

    def ranks(self) -> list[int]:
        """The process ids of the ranks."""
        with suppress(OSError):
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
            return [pid for pid in map(int, children.split()) if "spawn_main" in _command_line(pid)]
        return []

    def wait(self, num_losses: float = inf) -> int | None:
        """The exit code, or None when there are so many losses."""
        seen, until = self.num_losses(), monotonic() + PATIENCE_SECONDS
        while self.process.poll() is None and seen < num_losses:
            if self.ranks() == [self.stopped]:  # the others have taken the last step, and nobody waits for it
                with suppress(ProcessLookupError):
                    os.kill(self.stopped, signal.SIGCONT)
            if (found := self.num_losses()) != seen:
                seen, until = found, monotonic() + PATIENCE_SECONDS
            if monotonic() > until:
                raise SoakError(f"no step in {PATIENCE_SECONDS:g} s:\n{self.said}")
            sleep(POLL_SECONDS)
        return self.process.poll()

    def kill(self) -> None:
        """All processes, at once."""
        ranks = self.ranks()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        until = monotonic() + PATIENCE_SECONDS
        while any(map(_lives, ranks)) and monotonic() < until:
            sleep(POLL_SECONDS)


@contextmanager
def started(folder: Path, options: str) -> Iterator[Command]:
    """A job; no process of it outlives the block."""
    command = Command(folder, options)
    try:
        yield command
    finally:
        command.kill()


def disturb(command: Command, event: str, rng: random.Random) -> bool:
    """Do it; False where the command has no ranks at the moment."""
    ranks = command.ranks()
    if not ranks or (event == "stop for good" and len(ranks) == 1):  # nobody waits for a rank that is alone
        return False
    rank = rng.choice(ranks)
    if event == "kill all":
        command.kill()
    elif event == "SIGTERM":
        command.process.terminate()
    else:
        command.stopped = rank if event == "stop for good" else 0
        with suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL if event == "kill a rank" else signal.SIGSTOP)
            if event == "stop and continue":
                sleep(rng.uniform(0.1, TIMEOUT_SECONDS / 8))
                os.kill(rank, signal.SIGCONT)
    return True


def shuffled(rng: random.Random) -> Iterator[str]:
    """All events in a random order, then in another: a short soak has each of them."""
    while True:
        yield from rng.sample(EVENTS, len(EVENTS))


def survive(
    folder: Path, options: str, until: float, rng: random.Random, events: Iterator[str], counts: Counts
) -> None:
    """Train to the last step through all that happens.

    Args:
        options: of every start; "": others at each.
    """
    before, code = "", None
    while code != 0:
        now = options or rng.choice([each for each in (SAME[0], *OTHERS) if each != before])
        with started(folder, now) as command:
            code, event = None, ""
            while code is None:
                earlier = command.drafts()
                more = rng.randint(2, 35) if monotonic() < until else inf
                code = command.wait(command.num_losses() + more)
                if code is None and monotonic() < until:
                    if rng.random() < AT_A_SAVE:
                        command.wait_for_save(earlier)
                    else:
                        sleep(rng.uniform(0, SOON_SECONDS))
                    event = next(events)
                    if disturb(command, event, rng):
                        counts.events[event] += 1
                        counts.saving += not command.drafts() <= earlier
                        if event in ("kill all", "SIGTERM"):
                            code = command.wait()
            counts.add(command.said)
            before = now
            if code != 0 and (event, code) not in {("kill all", KILLED_ALL), ("SIGTERM", TERMINATED)}:
                raise SoakError(f"{now} ended with {code} after {event or 'nothing'}:\n{command.said}")


def recorded(losses: Path) -> list[tuple[int, float]]:
    """The steps that were taken, some of them several times, with their losses."""
    lines = [line.split() for line in losses.read_text(encoding="ascii").splitlines()]
    return [(int(step), float.fromhex(loss)) for step, loss in lines]


def difference(found: Sequence[tuple[int, float]], wanted: Mapping[int, float]) -> float:
    """The largest relative difference of a loss.

    Raises:
        SoakError: another set of steps was taken; or a complete checkpoint was passed over.
    """
    highest = 0
    for step, _ in found:
        saved = (highest - 1) // SAVE_EVERY * SAVE_EVERY  # before the step that was taken next
        if step <= saved:
            raise SoakError(f"step {step} was taken again, although a checkpoint of step {saved} was complete")
        highest = max(highest, step)
    if {step for step, _ in found} != wanted.keys():
        raise SoakError(f"steps {sorted({step for step, _ in found} ^ wanted.keys())} were taken in one run only")
    return max(abs(loss - wanted[step]) / abs(wanted[step]) for step, loss in found)


def uninterrupted(folder: Path, options: str) -> dict[int, float]:
    """The losses of a run that nothing happens to."""
    folder.mkdir()
    with started(folder, options) as command:
        if command.wait() != 0:
            raise SoakError(f"{options} failed on its own:\n{command.said}")
    return dict(recorded(folder / "losses"))


def soak(folder: Path, seconds: float, seed: int, counts: Counts) -> None:
    """Round after round.

    Raises:
        SoakError: a run did not survive, or a loss differs.
    """
    rng, until = random.Random(seed), monotonic() + seconds
    events = shuffled(rng)
    wanted: dict[str, dict[int, float]] = {}
    print("| ranks and plans | steps | last loss | uninterrupted | largest relative difference |")
    print("| --- | --- | --- | --- | --- |")
    for options in cycle(ROUNDS):
        same = options or SAME[0]
        if same not in wanted:
            wanted[same] = uninterrupted(folder / f"uninterrupted-{len(wanted)}", same)
        run = folder / f"{counts.runs}"
        run.mkdir()
        survive(run, options, until, rng, events, counts)
        found, expected = recorded(run / "losses"), wanted[same]
        largest, last = difference(found, expected), max(expected)
        counts.runs, counts.steps = counts.runs + 1, counts.steps + len(found)
        counts.again += len(found) - len(expected)
        counts.largest[bool(options)] = max(counts.largest.get(bool(options), 0.0), largest)
        print(
            f"| {options or 'changing'} | {len(found)} | {dict(found)[last]:.9f} | {expected[last]:.9f} | "
            f"{largest:.1e} |",
            flush=True,
        )
        if largest > (0 if options else TOLERANCE):
            raise SoakError(f"a loss differs by {largest:.1e} from that of the uninterrupted run")
        if monotonic() >= until:
            return


def main(arguments: Sequence[str]) -> int:
    """Soak, and say in tables what was done."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    counts = Counts()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        try:
            soak(Path(folder), args.seconds, args.seed, counts)
        except SoakError as error:
            print(f"{counts}\nSoakError: {error}")
            return 1
    print(counts)
    return 0


def _command_line(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")
    return ""


def _lives(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
