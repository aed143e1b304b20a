"""A sharded model in Lightning's Trainer, on two processes.

Run with `python examples/with_lightning.py`, after `pip install lightning`. shardwise makes the world; to the Trainer
each rank is one device, so it wraps and divides nothing. It gets batches of `BatchLoader`, and a sharded module.
"""

import logging
import warnings

import torch
import torch.nn.functional as F
from lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shardwise as sw
from shardwise.data import BatchLoader

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Regression(LightningModule):
    """Learns a function of one number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(1, 33), nn.Tanh(), nn.Linear(33, 1))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], step: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.03)


def data() -> TensorDataset:
    """50 points of a function; the last batch of 16 has 2."""
    x = torch.linspace(-2, 2, 50).unsqueeze(1)
    return TensorDataset(x, torch.sin(2 * x))


def train(sharded: bool) -> list[float]:
    """The loss of each step."""
    warnings.filterwarnings("ignore", module="lightning")
    module = Regression()
    if sharded:
        plan = {"net.0.weight": sw.Shard(0), "net.0.bias": sw.Shard(0), "net.2.weight": sw.Shard(1)}
        sw.shard_module(module, plan)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,  # of this rank
        max_epochs=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,  # save by shardwise.checkpoint
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, BatchLoader(data(), 16, shuffle=True, seed=1))
    return module.losses


def main() -> None:
    """Two processes, beside one with the plain model."""
    alone, together = sw.launch(train, False, nproc=1), sw.launch(train, True, nproc=2)
    torch.testing.assert_close(together, alone, rtol=1e-3, atol=0.0)
    print("loss", *(f"{loss:.3f}" for loss in together))


if __name__ == "__main__":
    main()
