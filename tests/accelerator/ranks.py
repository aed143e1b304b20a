"""One rank of the world of test_nccl_alone.py, run as `python -m tests.accelerator.ranks RANK SIZE FOLDER LIBRARY`."""

import inspect
import json
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.accelerator.nccl_rules import DEVICE, register
from tests.accelerator.scenarios import SCENARIOS

TIMEOUT = timedelta(seconds=30)  # of a rank that waits for one that failed alone


def main(rank: int, size: int, folder: Path, library: Path) -> None:
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    else:
        register(library)
    backend = "nccl" if DEVICE == "cuda" else "nccl_rules"
    store = dist.FileStore(str(folder / "store"), size)  # type: ignore[attr-defined]  # torch does not export it
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    outcomes = {}
    for scenario in SCENARIOS:
        try:
            scenario(*[folder] * len(inspect.signature(scenario).parameters))
            outcomes[scenario.__name__] = ""
        except Exception:  # noqa: BLE001 - the test shows it
            outcomes[scenario.__name__] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
