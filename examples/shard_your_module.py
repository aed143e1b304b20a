"""An ordinary module, its table on two ranks: run with `python examples/shard_your_module.py`, or under torchrun."""

import torch
from torch import nn

import shardwise as sw


class Scorer(nn.Module):
    """Mean of the embeddings of some ids, then one number."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(100_000, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        score: torch.Tensor = self.head(self.items(ids))
        return score


def train() -> list[float]:
    """Five steps; each rank has its own 32 examples."""
    torch.manual_seed(0)
    model = sw.shard_module(Scorer(), {"items.weight": sw.Shard(0)})
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    torch.manual_seed(sw.rank())
    ids = sw.DTensor.from_local(torch.randint(0, 100_000, (32, 8)), placements=[sw.Shard(0)])
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (model(ids) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print([round(loss, 4) for loss in sw.launch(train, nproc=2)])
