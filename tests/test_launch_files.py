"""The files of examples/launch: they parse, torchrun has their options, and what they start trains and goes on.

Substitutes for Slurm and for the job controller of Kubernetes start two nodes on this machine; no cluster, and no Ray.
"""

import os
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # its stubs are another package
from torch.distributed.run import get_args_parser

from shardwise.testing import world
from tests.sessions import session
from tests.timeouts import PATIENCE_SECONDS

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "launch"
PAGES = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
TRAIN = runpy.run_path(str(FOLDER / "train.py"))["train"]


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text(encoding="utf-8")))


def commands_of(text: str) -> list[list[str]]:
    """The words of each command `torchrun …` in a script or page, its lines joined."""
    joined = text.replace("\\\n", " ")
    return [shlex.split(line) for line in re.findall(r"^(?:srun .*?)?(torchrun .*)$", joined, re.MULTILINE)]


OF_FILES = [
    *commands_of((FOLDER / "slurm.sbatch").read_text(encoding="utf-8")),
    manifests()[1]["spec"]["template"]["spec"]["containers"][0]["command"],
]
OF_PAGES = [
    command for page in PAGES for command in commands_of(page.read_text(encoding="utf-8")) if "…" not in command
]


@pytest.mark.parametrize("command", [*OF_FILES, *OF_PAGES], ids=" ".join)
def test_torchrun_has_the_options_and_the_script_is_there(command: list[str]) -> None:
    parsed = get_args_parser().parse_args(command[1:])
    if parsed.module:
        assert parsed.training_script == "shardwise"
    else:
        assert parsed.training_script == "train.py" or (ROOT / parsed.training_script).exists()


def test_commands_of_files_and_pages_are_found() -> None:
    assert len(OF_FILES) == 2
    assert len(OF_PAGES) > 5


def test_the_pods_of_the_job_are_as_many_as_torchrun_expects_and_have_the_name_of_the_rendezvous() -> None:
    service, job = manifests()
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    parsed = get_args_parser().parse_args(pod["containers"][0]["command"][1:])
    name = f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert (job["kind"], spec["completionMode"]) == ("Job", "Indexed")
    assert int(parsed.nnodes) == spec["completions"] == spec["parallelism"]
    assert parsed.rdzv_endpoint.partition(":")[0] == name
    assert (service["metadata"]["name"], service["spec"]["clusterIP"]) == (pod["subdomain"], "None")
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == volumes


def test_the_script_of_ray_compiles() -> None:
    compile((FOLDER / "ray_train.py").read_text(encoding="utf-8"), "ray_train.py", "exec")


def test_the_script_goes_on_from_its_checkpoint_as_if_it_had_not_been_interrupted(tmp_path: Path) -> None:
    interrupted, at_once = str(tmp_path / "interrupted"), str(tmp_path / "at_once")
    world(2).run(TRAIN, interrupted, 10)
    assert world(2).run(TRAIN, interrupted, 20) == [
        said.replace("steps 0", "steps 10") for said in world(2).run(TRAIN, at_once, 20)
    ]
    assert world(3).run(TRAIN, interrupted, 30)[0].startswith("steps 20 to 30 on 3 ranks")


# ---- two nodes --------------------------------------------------------------------------------------------------

# A task for each node of the allocation, with the variables that the manual of srun names.
SRUN = r"""
import os, subprocess, sys
cores, *command = sys.argv[2:]
assert sys.argv[1] == "--cpus-per-task" and cores == os.environ["SLURM_CPUS_PER_TASK"], "srun 22.05 has no other way"
ids = ({"SLURM_PROCID": i, "SLURM_NODEID": i, "SLURM_LOCALID": "0"} for i in map(str, range(2)))
tasks = [subprocess.Popen(command, env={**os.environ, **each}) for each in ids]
sys.exit(max(abs(task.wait()) for task in tasks))
"""
# A line for each node of `show hostnames 127.0.0.[1-2]`, and time for a reader of the first line to end.
SCONTROL = r"""
import re, sys, time
assert sys.argv[1:3] == ["show", "hostnames"]
name, first, last = re.fullmatch(r"(.*)\[(\d+)-(\d+)\]", sys.argv[3]).groups()
for number in range(int(first), int(last) + 1):
    print(f"{name}{number}", flush=True)
    time.sleep(0.2)
"""


def environment_of(commands: Path) -> dict[str, str]:
    """Of a node whose programs find shardwise, and first the commands in a folder."""
    path = f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def wait_for(file: Path, program: "subprocess.Popen[str]") -> None:
    """Until a program has written a file."""
    give_up = time.monotonic() + PATIENCE_SECONDS
    while not file.exists():
        assert program.poll() is None, program.communicate()[1]
        assert time.monotonic() < give_up
        time.sleep(0.01)


@pytest.mark.processes
@pytest.mark.slow
def test_the_batch_script_of_slurm_goes_on_after_a_rank_was_killed(tmp_path: Path) -> None:
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        command = tmp_path / name
        command.write_text(f"#!{sys.executable}\n{text}", encoding="utf-8")
        command.chmod(0o755)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    text = (FOLDER / "slurm.sbatch").read_text(encoding="utf-8")
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", text, re.MULTILINE))
    assert (asked["nodes"], asked["ntasks-per-node"]) == ("2", "1")
    slurm = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "127.0.0.[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": asked["cpus-per-task"],
        "RANKS_PER_NODE": "1",
        "STEPS": "200",
    }
    folder = tmp_path / "runs" / slurm["SLURM_JOB_ID"]
    with session(["bash", str(FOLDER / "slurm.sbatch")], tmp_path, environment_of(tmp_path) | slurm) as job:
        wait_for(folder / "step-00000010", job)
        os.kill(ranks_of(f"runs/{slurm['SLURM_JOB_ID']}")[-1], signal.SIGKILL)
        out, err = job.communicate(timeout=PATIENCE_SECONDS)
    assert job.returncode == 0, err
    assert_resumed(out, err)


def ranks_of(folder: str) -> list[int]:
    """The processes of the ranks that save in `folder`; torchrun starts them with `python -u`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().decode().split("\0")
            if words[1:3] == ["-u", "examples/launch/train.py"] and folder in words:
                found.append(int(process.name))
    return sorted(found)


def assert_resumed(out: str, err: str) -> None:
    """That rank 0 trained from a checkpoint to the end."""
    (first,) = re.findall(r"^steps (\d+) to 200 on 2 ranks, loss 0\.\d\d$", out, re.MULTILINE)
    assert 10 <= int(first) < 200, err


@pytest.mark.processes
@pytest.mark.slow
def test_the_job_of_kubernetes_goes_on_after_a_pod_was_lost(tmp_path: Path) -> None:
    """The command of the manifest, but for numbers, the folder, and the name of the first pod, which a cluster has.

    As here both pods have the address of the first, either may have the store; the other ends with it.
    """
    spec = manifests()[1]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    folder = tmp_path / "checkpoints"
    changed = {"--nproc-per-node": "1", "--rdzv-endpoint": f"127.0.0.1:{port}", "--steps": "200", "--folder": folder}
    names = [word.partition("=")[0] for word in container["command"]]
    assert {*changed} < {*names}
    command = [
        f"{name}={changed[name]}" if name in changed else word
        for name, word in zip(names, container["command"], strict=True)
    ]
    environment = environment_of(tmp_path) | {each["name"]: each["value"] for each in container["env"]}
    with ExitStack() as pods:

        def pod(index: int) -> "subprocess.Popen[str]":
            return pods.enter_context(session(command, ROOT, environment | {"JOB_COMPLETION_INDEX": str(index)}))

        running, ended, failed = {index: pod(index) for index in range(2)}, [], 0
        wait_for(folder / "step-00000010", running[0])
        os.killpg(running[1].pid, signal.SIGKILL)
        while running and failed <= spec["backoffLimit"]:
            for index, process in [*running.items()]:
                if process.poll() == 0:
                    ended.append(running.pop(index))
                elif process.poll() is not None:  # as restartPolicy is Never, the job makes the pod again
                    running[index], failed = pod(index), failed + 1
            time.sleep(0.05)
        out, err = ("".join(texts) for texts in zip(*(process.communicate() for process in ended), strict=True))
    assert failed in (1, 2)
    assert_resumed(out, err)
