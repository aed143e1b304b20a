"""The files of examples/launch: they parse, torchrun has their options, and the script they start trains and goes on.

A substitute for Slurm runs the batch script on this machine; no cluster, and neither Kubernetes nor Ray, is here.
"""

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # its stubs are another package
from torch.distributed.run import get_args_parser

from shardwise.testing import world

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "launch"
PAGES = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
TRAIN = runpy.run_path(str(FOLDER / "train.py"))["train"]


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text(encoding="utf-8")))


def commands_of(text: str) -> list[list[str]]:
    """The words of each command `torchrun …` in a script or page, its lines joined."""
    joined = text.replace("\\\n", " ")
    return [shlex.split(line) for line in re.findall(r"^(?:srun )?(torchrun .*)$", joined, re.MULTILINE)]


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


@pytest.mark.processes
def test_the_batch_script_of_slurm_trains_under_torchrun(tmp_path: Path) -> None:
    """With `srun` that runs its command here, and `scontrol` that knows this host."""
    for name, text in (("srun", 'exec "$@"'), ("scontrol", "echo localhost")):
        command = tmp_path / name
        command.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        command.chmod(0o755)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "1"}
    environment = {
        **os.environ,
        **slurm,
        "PATH": path,
        "RANKS_PER_NODE": "2",
        "STEPS": "20",
        "PYTHONPATH": str(ROOT / "src"),
    }
    done = subprocess.run(
        ["bash", str(FOLDER / "slurm.sbatch")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("steps 0 to 20 on 2 ranks")
    assert (tmp_path / "runs" / slurm["SLURM_JOB_ID"] / "step-00000020").is_dir()
