"""What processes of `test_training_loops.py` run."""

import os
from collections.abc import Callable

import torch
from torch import nn

from shardwise import Shard, shard_module
from shardwise.errors import ShardwiseError
from shardwise.parallel import parallelize_module, plan_from_transformers


def refusal(call: Callable[[], object]) -> str:
    """Class and text of the error, or that there is none."""
    try:
        call()
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refused_by_accelerate(folder: str) -> list[str]:
    """A wrapped model, a gathered loss, a saved optimizer and a saved model."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    model = shard_module(nn.Linear(4, 4), {"weight": Shard(0)})
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
    loss = model(torch.ones(2, 4)).sum()
    accelerator.backward(loss)
    optimizer.step()
    calls: list[Callable[[], object]] = [
        lambda: accelerator.prepare(model),
        lambda: accelerator.gather(loss.detach()),
        lambda: accelerator.save_state(folder),
    ]
    return [refusal(call) for call in calls]


def refused_by_the_trainer(folder: str, by_layouts: bool) -> list[str]:
    """Training, and then evaluation of a new model, which the Trainer does not wrap."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    config = LlamaConfig(
        vocab_size=37, hidden_size=24, intermediate_size=40, num_hidden_layers=1, num_attention_heads=6,
        num_key_value_heads=2,
    )  # fmt: skip
    data = [{"input_ids": torch.arange(i, i + 6), "labels": torch.arange(i, i + 6)} for i in range(8)]
    args = TrainingArguments(
        folder, use_cpu=True, per_device_train_batch_size=2, per_device_eval_batch_size=2, max_steps=2, report_to=[],
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    found = []
    for method in ("train", "evaluate"):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        if by_layouts:
            shard_module(model, {"**.weight": Shard(0)})
        else:
            parallelize_module(model, None, plan_from_transformers(model))
        found.append(refusal(getattr(Trainer(model, args, train_dataset=data, eval_dataset=data), method)))
    return found
