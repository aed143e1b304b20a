"""Four workers of a Ray cluster: `python examples/launch/ray_train.py`, after `pip install 'ray[train]'`.

Ray starts one process a worker and joins them to a process group of torch, which is then the world of shardwise.
"""

import argparse
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def worker(config: dict[str, Any]) -> None:
    """One rank. It has joined already, so `launch` is not needed."""
    from train import train  # beside this file; Ray copies the folder to all nodes

    print(train(**config))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on the workers of a Ray cluster, or go on with it.")
    parser.add_argument("--folder", default="runs/ray", help="of the checkpoints, which all nodes reach")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=4)
    arguments = parser.parse_args()
    ray.init(runtime_env={"working_dir": str(Path(__file__).parent)})
    trainer = TorchTrainer(
        worker,
        train_loop_config={"folder": str(Path(arguments.folder).absolute()), "steps": arguments.steps},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=arguments.workers),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
