"""Try every op of torch's own test list on distributed tensors, in many layouts, beside plain torch.

    python tools/sweep.py                                   # all ops: minutes on two cores
    python tools/sweep.py --ops '^(sort|cum.*)$' --layouts one,sizes --samples 2
    python tools/sweep.py --table sweep.md --json sweep.json
    python tools/sweep.py --accuracy                        # who is farther from float64 than plain torch
    python tools/sweep.py --few --device cuda               # beside plain torch on a GPU, which all ranks share
    python tools/sweep.py --few --shrink                    # strike from tests/sweep_known.json what now passes

Ops run in worker processes, so that a crash or an endless loop in C++ is one case and not the end. The exit status is
1 if any case was worse than a clear error.
"""

import argparse
import json
import multiprocessing
import os
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # this script may run from anywhere

from tools.op_judge import REFUSED, OpJudge, Outcome, Sample, Verdict  # noqa: E402
from tools.opinfo import FAMILIES  # noqa: E402

KNOWN = ROOT / "tests" / "sweep_known.json"
CASE_SECONDS = 60.0  # that a worker may say nothing; ranks that hang in Python are given up earlier
START_SECONDS = 180.0
DEATHS = 3  # of workers on one op, before the rest of its cases are left out


@dataclass(frozen=True)
class Result:
    """One case in words, and what came of it."""

    op: str
    variant: str = ""
    sample: int = 0
    arguments: str = ""
    layouts: str = ""
    outcome: str = ""
    message: str = ""
    implicit: int = 0
    fallbacks: tuple[str, ...] = ()

    @property
    def badness(self) -> int:
        return Outcome(self.outcome).badness

    def __str__(self) -> str:
        return f"{self.outcome} as {self.variant} of ({self.arguments}), {self.layouts}: {self.message}"


@dataclass(frozen=True)
class Plan:
    """What to try of each op: so many samples in these families of layouts, or the few cases that represent it."""

    samples: int = 4
    families: tuple[str, ...] = ()
    few: bool = False
    peer: bool = False  # torch.distributed.tensor instead of this library
    accuracy: bool = False  # the distance to float64, on inputs of several scales, beside that of plain torch
    device: str = "cpu"


# ---- in a worker -----------------------------------------------------------------------------------------------


def work(connection: Connection, plan: Plan) -> None:
    """Send the names of all ops; then judge ops on request, announcing each case before it starts."""
    import torch

    from tools import opinfo

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # it has three digits, and convolutions of shards round otherwise
    connection.send(list(opinfo.operators()))
    while True:
        name, start = connection.recv()
        late = False
        try:
            for number, begun, judge in _judged(name, start, plan):
                connection.send((number, begun))
                result, is_late = judge()
                _end_if_broken(plan.device)
                connection.send((number, result))
                late = late or is_late
        except Exception as error:  # noqa: BLE001 - a broken op must not end the sweep
            _end_if_broken(plan.device)
            connection.send((0, Result(name, outcome=Outcome.CRASH, message=f"{type(error).__name__}: {error}")))
        connection.send(late)
        if late:
            os._exit(0)  # a rank may run for ever in a thread of this process


def _end_if_broken(device: str) -> None:
    """End the process if a kernel failed: an accelerator then refuses every other call of the process."""
    if device == "cpu":
        return
    import torch

    try:
        torch.accelerator.synchronize()
    except RuntimeError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)


def _judged(name: str, start: int, plan: Plan) -> Iterator[tuple[int, Result, Callable[[], tuple[Result, bool]]]]:
    from tools import accuracy, opinfo

    every = opinfo.cases_of(name, plan.samples, plan.families or opinfo.FAMILIES, plan.device)
    cases = opinfo.few_cases_of(name, plan.device) if plan.few else every
    if plan.accuracy:
        cases = accuracy.scaled_cases_of(name, plan.samples, plan.families or accuracy.FAMILIES)
    for number, case, judge in opinfo.judged(cases, start, _judge_of(plan)):
        begun = Result(name, case.variant, case.sample, case.call.arguments, case.label)

        def result(begun: Result = begun, judge: Callable[[], Verdict] = judge) -> tuple[Result, bool]:
            found = judge()
            judged = replace(begun, outcome=str(found.outcome), message=found.message, implicit=found.implicit)
            return replace(judged, fallbacks=tuple(sorted(found.fallbacks))), found.late

        yield number, begun, result


def _judge_of(plan: Plan) -> Callable[[Sample], OpJudge]:
    if plan.accuracy:
        from tools.accuracy import AccuracyJudge

        return AccuracyJudge
    if not plan.peer:
        return OpJudge
    from tools.peer import PeerJudge

    return PeerJudge


# ---- beside the workers ------------------------------------------------------------------------------------------


class Worker:
    """A process that judges ops, replaced when it dies or falls silent."""

    def __init__(self, plan: Plan, serve: Callable[[Connection, Plan], None] = work) -> None:
        self.plan = plan
        self.serve = serve
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=self.serve, args=(theirs, self.plan), daemon=True)
        self.process.start()
        theirs.close()
        if not self.connection.poll(START_SECONDS):
            raise TimeoutError(f"A worker did not start within {START_SECONDS:g} s.")
        self.names: list[str] = self.connection.recv()

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()

    def judge(self, name: str) -> list[Result]:
        """All cases of one op."""
        results: list[Result] = []
        start = 0
        for _ in range(DEATHS):
            self.connection.send((name, start))
            number, current = start, Result(name)
            while not isinstance(message := self._heard(), str):
                if isinstance(message, bool):
                    if message:
                        self._restart()
                    return results
                number, current = message
                if current.outcome:
                    results.append(current)
                    current = Result(name)
            outcome = Outcome.HANG if message.startswith("silent") else Outcome.CRASH
            results.append(replace(current, outcome=str(outcome), message=message))
            self._restart()
            start = number + 1
        return results

    def _restart(self) -> None:
        self.stop()
        self._start()

    def _heard(self) -> tuple[int, Result] | bool | str:
        """A case that began or ended; at the end whether to restart; or what became of the process."""
        if not self.connection.poll(CASE_SECONDS):
            return f"silent for {CASE_SECONDS:g} s"
        try:
            return self.connection.recv()  # type: ignore[no-any-return]
        except (EOFError, ConnectionError):
            self.process.join()
            return f"the process ended with exit code {self.process.exitcode}"


def sweep(plan: Plan, jobs: int, wanted: str = "", report: Callable[[str], None] = lambda line: None) -> list[Result]:
    """The results of all ops whose names match, in the order of torch's list."""
    workers: SimpleQueue[Worker] = SimpleQueue()
    started = list(ThreadPoolExecutor(jobs).map(Worker, [plan] * jobs))
    for worker in started:
        workers.put(worker)
    names = [name for name in started[0].names if re.search(wanted, name)]

    def judge(name: str) -> list[Result]:
        worker = workers.get()
        try:
            results = worker.judge(name)
        finally:
            workers.put(worker)
        report(f"{name}: {', '.join(f'{n} {outcome}' for outcome, n in counted(results).items()) or 'no case'}")
        return results

    try:
        with ThreadPoolExecutor(jobs) as pool:
            return [result for results in pool.map(judge, names) for result in results]
    finally:
        for worker in started:
            worker.stop()


# ---- what it says ------------------------------------------------------------------------------------------------


def counted(results: Iterable[Result]) -> dict[str, int]:
    """How many cases had which outcome, from good to bad."""
    counts = Counter(result.outcome for result in results)
    return {str(outcome): counts[outcome] for outcome in Outcome if counts[outcome]}


def by_op(results: Iterable[Result]) -> dict[str, list[Result]]:
    """The results of each op."""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result.op, []).append(result)
    return found


def cause(message: str) -> str:
    """A message without what differs from case to case."""
    first = re.split(r"\. (?:Fix|Use)\b|\n", message)[0]
    first = re.sub(r"^((?:[a-z ]+: )?\w+Error: )\w+(?= has no row| works| is random|:)", r"\1OP", first)
    first = re.sub(r"aten[.:]+[\w.]+", "aten.OP", first)
    while (shorter := re.sub(r"\([^()]*\)|\[[^\[\]]*\]", "…", first)) != first:
        first = shorter
    return re.sub(r"-?\b\d[\d.e+-]*\b", "N", first)[:160]


def worst(results: Iterable[Result]) -> Result:
    """The first of the worst results."""
    return max(results, key=lambda result: result.badness)


def fallbacks(results: Iterable[Result]) -> dict[str, list[str]]:
    """The ops that fell back to replicated, with the aten ops in them that did."""
    ops = {name: sorted({op for result in found for op in result.fallbacks}) for name, found in by_op(results).items()}
    return {name: found for name, found in ops.items() if found}


def summary(results: Sequence[Result]) -> str:
    """Totals, for people."""
    ops = by_op(results)
    right = sum(worst(found).badness == 0 for found in ops.values())
    moved = sum(result.implicit > 0 for result in results)
    fallen = len(fallbacks(results))
    refused = sum(result.message == REFUSED for result in results)
    lines = [f"{n:7} {outcome}" for outcome, n in counted(results).items()]
    lines += [f"{len(results):7} cases; {moved} moved operands by themselves, {refused} are refused by torch as well"]
    lines += [f"{right:7} of {len(ops)} ops are right in every case; {fallen} run replicated in some case"]
    return "\n".join(lines)


def table(results: Sequence[Result]) -> str:
    """Causes with their ops, then every op that is not right in all cases, as Markdown."""
    causes: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        if result.badness:
            causes.setdefault((result.outcome, cause(result.message)), []).append(result)
    lines = ["# Ops on distributed tensors beside plain torch", "", "```text", summary(results), "```", ""]
    lines += ["## Causes", "", "| outcome | cases | ops | message | which |", "| --- | --: | --: | --- | --- |"]
    for (outcome, text), found in sorted(causes.items(), key=lambda x: (-Outcome(x[0][0]).badness, -len(x[1]))):
        names = list(by_op(found))
        lines.append(f"| {outcome} | {len(found)} | {len(names)} | {_cell(text)} | {_cell(' '.join(names[:12]))} |")
    lines += ["", "## Ops", "", "| op | outcomes | first of the worst |", "| --- | --- | --- |"]
    for name, found in sorted(by_op(results).items(), key=lambda x: -worst(x[1]).badness):
        if worst(found).badness:
            outcomes = ", ".join(f"{n} {outcome}" for outcome, n in counted(found).items())
            lines.append(f"| {_cell(name)} | {outcomes} | {_cell(str(worst(found)))} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:400]


# ---- what is known not to work ---------------------------------------------------------------------------------


def known() -> dict[str, str]:
    """Ops that are known not to be right in the case that represents them: outcome and reason, by name."""
    return dict(json.loads(KNOWN.read_text(encoding="utf-8")))


def shrunk(listed: Mapping[str, str], results: Iterable[Result]) -> dict[str, str]:
    """The list without ops that are right now; it never grows."""
    right = {name for name, found in by_op(results).items() if worst(found).badness == 0}
    return {name: reason for name, reason in listed.items() if name not in right}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ops", default="", metavar="REGEX", help="only ops whose names match")
    parser.add_argument("--samples", type=int, default=4, help="samples an op (default 4)")
    parser.add_argument("--layouts", default="", metavar="FAMILIES", help="such as one,sizes,nested; default all")
    parser.add_argument("--few", action="store_true", help="only what the tests run: one sample in one layout")
    parser.add_argument("--peer", action="store_true", help="sweep torch.distributed.tensor, in layouts that it has")
    parser.add_argument("--device", default="cpu", help="of the tensors, such as cuda (default cpu)")
    parser.add_argument("--accuracy", action="store_true", help="compare the distance to float64 with plain torch's")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every result that is not right")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write a Markdown table of ops that are not right")
    parser.add_argument("--shrink", action="store_true", help=f"with --few: strike ops from {KNOWN.name}")
    options = parser.parse_args(arguments)
    families = tuple(filter(None, options.layouts.split(",")))
    if unknown := set(families) - set(FAMILIES):
        parser.error(f"--layouts knows {', '.join(FAMILIES)}, got {', '.join(sorted(unknown))}")
    if options.device != "cpu" and (options.peer or options.accuracy):
        parser.error("--peer and --accuracy run on the cpu")
    if options.shrink and not options.few:
        parser.error("--shrink needs --few: the list is about the few cases that the tests run")
    began = time.monotonic()
    if options.peer:
        families = families or ("replicated", "one", "all")  # one axis, sharded as by torch.chunk
    plan = Plan(options.samples, families, options.few, options.peer, options.accuracy, options.device)
    results = sweep(plan, options.jobs, options.ops, lambda line: print(line, file=sys.stderr, flush=True))
    if not results:
        parser.error(f"--ops: no op with a tensor operand matches {options.ops!r}")
    print(summary(results))
    print(f"{time.monotonic() - began:7.0f} s")
    if options.json:
        records = [asdict(result) for result in results if result.badness]
        options.json.write_text(json.dumps({"totals": counted(results), "cases": records}, indent=1) + "\n")
    if options.table:
        options.table.write_text(table(results))
    if options.shrink:
        KNOWN.write_text(json.dumps(shrunk(known(), results), indent=1) + "\n", encoding="utf-8")
    return int(any(result.badness > Outcome.CLEAR_ERROR.badness for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
