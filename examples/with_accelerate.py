"""A sharded model in a training loop of Hugging Face's accelerate, on two processes.

Run with `python examples/with_accelerate.py`, after `pip install accelerate`. Three rules:

* shard the model, and do not prepare it: gradients of DTensors are reduced without a wrapper;
* load batches by `BatchLoader`, as DTensors: a prepared `DataLoader` gives each rank other plain tensors;
* prepare the optimizer only; a prepared scheduler steps once for each process. Save by `shardwise.checkpoint`.

Wrappers, plain batches that differ between ranks, `gather` and `save_state` are refused at once.
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import TensorDataset

import shardwise as sw
from shardwise.data import BatchLoader

PLAN = {"0.weight": sw.Shard(0), "0.bias": sw.Shard(0), "2.weight": sw.Shard(1)}


def data() -> TensorDataset:
    """50 points of a function; the last batch of 16 has 2."""
    x = torch.linspace(-2, 2, 50).unsqueeze(1)
    return TensorDataset(x, torch.sin(2 * x))


def make_model() -> nn.Module:
    """The same values on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 33), nn.Tanh(), nn.Linear(33, 1))


def train(sharded: bool) -> list[float]:
    """The mean loss of each epoch."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = sw.shard_module(make_model(), PLAN) if sharded else make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    optimizer = accelerator.prepare(optimizer)
    loader = BatchLoader(data(), 16, shuffle=True, seed=1)
    losses = []
    for _ in range(4):
        total = 0.0
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.item() * len(x)
        scheduler.step()
        losses.append(total / 50)
    return losses


def main() -> None:
    """Two processes, beside one with the plain model."""
    alone = sw.launch(train, False, nproc=1)
    together = sw.launch(train, True, nproc=2)
    torch.testing.assert_close(together, alone, rtol=1e-3, atol=0.0)
    print("loss", *(f"{loss:.3f}" for loss in together))


if __name__ == "__main__":
    main()
