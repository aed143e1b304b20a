"""What processes of `test_training_loops.py` run.

-m tests.models.loop_jobs FOLDER      prints as JSON what each job said on two ranks
"""

import json
import os
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from shardwise import Shard, launch, shard_module
from shardwise.errors import ShardwiseError
from shardwise.parallel import fully_shard, parallelize_module, plan_from_transformers


def refusal(call: Callable[[], object]) -> str:
    """Class and text of the error, or that there is none."""
    try:
        call()
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refused_by_accelerate(folder: str) -> dict[str, str]:
    """What `Accelerator` says to each of its methods, for a sharded model and its loss."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    model = shard_module(nn.Linear(4, 4), {"weight": Shard(0)})
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
    loss = model(torch.ones(2, 4)).sum()
    accelerator.backward(loss)
    optimizer.step()
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(32.0).view(8, 4)), batch_size=2))

    def mean_of_a_prepared_loader() -> Tensor:
        return torch.stack([model(x).mean().full_tensor() for (x,) in loader]).mean()

    calls: dict[str, Callable[[], object]] = {
        "prepare": lambda: accelerator.prepare(model),
        "prepare with an optimizer": lambda: accelerator.prepare(model, optimizer),
        "prepare of a unit": lambda: accelerator.prepare(fully_shard(nn.Linear(4, 4))),
        "batches": mean_of_a_prepared_loader,
        "gather": lambda: accelerator.gather(loss.detach()),
        "gather_for_metrics": lambda: accelerator.gather_for_metrics(loss.detach()),
        "reduce": lambda: accelerator.reduce(loss.detach()),
        "save_state": lambda: accelerator.save_state(folder),
        "save_model": lambda: accelerator.save_model(model, folder),
        "save": lambda: accelerator.save(model.state_dict(), f"{folder}/model.pt"),
    }
    return {name: refusal(call) for name, call in calls.items()}


def with_the_trainer(folder: str, sharded: str) -> list[str]:
    """Errors of training, and of the evaluation of a new model, which the Trainer does not wrap; or its loss."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    config = LlamaConfig(
        vocab_size=37, hidden_size=24, intermediate_size=40, num_hidden_layers=1, num_attention_heads=6,
        num_key_value_heads=2,
    )  # fmt: skip
    tokens = [torch.arange(i, i + 6) for i in range(8)]
    data = [{"input_ids": ids, "labels": ids} for ids in tokens]
    args = TrainingArguments(
        folder, use_cpu=True, per_device_train_batch_size=2, per_device_eval_batch_size=2, max_steps=2, report_to=[],
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = LlamaForCausalLM(config).eval()
    expected = sum(plain(input_ids=ids[None], labels=ids[None]).loss.item() for ids in tokens) / len(tokens)
    found = []
    for method in ("train", "evaluate"):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        if sharded == "by layouts":
            shard_module(model, {"**.weight": Shard(0)})
        elif sharded == "by styles":
            parallelize_module(model, None, plan_from_transformers(model))
        else:
            fully_shard(model)
        trainer = Trainer(model, args, train_dataset=data, eval_dataset=data)
        result: dict[str, float] = {}
        found.append(refusal(lambda: result.update(getattr(trainer, method)())))  # noqa: B023 - called at once
        if result:
            found[-1] = f"loss {result['eval_loss'] / expected:.5f} of that of one process"
    return found


def main(folder: str) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Once, before ranks are forked.
    from accelerate import Accelerator  # noqa: F401
    from transformers import LlamaForCausalLM, Trainer  # noqa: F401

    said: dict[str, object] = {
        name: launch(with_the_trainer, f"{folder}/{name}", name, nproc=2)
        for name in ("by styles", "by layouts", "fully")
    }
    said["accelerate"] = launch(refused_by_accelerate, f"{folder}/accelerate", nproc=2)
    sys.stdout.write(f"{json.dumps(said)}\n")


if __name__ == "__main__":
    main(sys.argv[1])
