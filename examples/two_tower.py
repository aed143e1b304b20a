"""A two-tower retriever: a vector of what a user has seen, a vector of each item, and the items nearest to the user.

Both towers look up the same row-wise sharded table. Negatives are the other items of the batch, those of other ranks
included: the item vectors of all ranks are all-gathered, and each rank scores its own users against them. Users are
generated: each one sees items of one of 40 topics, which the model has to find out. On two ranks simulated in this
process, or on two real ones:

    python examples/two_tower.py
    torchrun --nproc-per-node 2 examples/two_tower.py runs/two_tower

prints

    step  1, loss 5.55
    step 40, loss 2.19
    recall@10 of 500 new users: 50%, by chance 1%

With a folder it saves every 20 steps, the table and both optimizers included, and goes on from there, also with another
`--nproc-per-node`.
"""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint import latest, restore, save, state_of
from shardwise.embedding import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    shard_embeddings,
)
from shardwise.launch import under_torchrun
from shardwise.testing import world

TOPICS, ITEMS_OF_TOPIC, SEEN, DIM = 40, 25, 4, 32
ITEMS = TOPICS * ITEMS_OF_TOPIC


class TwoTower(nn.Module):
    """Vectors of users and of items; what a user has seen and the items are looked up together."""

    def __init__(self) -> None:
        super().__init__()
        self.table = EmbeddingBagCollection([EmbeddingBagConfig(ITEMS, DIM, "items", feature_names=["seen", "item"])])
        self.user = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))
        self.item = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))

    def forward(self, seen: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
        """Unit vectors [users, DIM] and [items, DIM], from ids [users, SEEN] and [items] of this rank."""
        lengths = torch.tensor([SEEN] * len(seen) + [1] * len(items))
        per_key = [len(seen), len(items)]
        features = KeyedJaggedTensor(
            ["seen", "item"], torch.cat([seen.flatten(), items]), lengths=lengths, stride_per_key=per_key
        )
        pooled = self.table(features)
        users, items = (of_all_ranks(self, pooled[name]) for name in ("seen", "item"))
        return F.normalize(self.user(users), dim=1), F.normalize(self.item(items), dim=1)


def of_all_ranks(model: TwoTower, local: Tensor) -> Tensor:
    """The rows of all ranks, sharded by rank; in one process, what it is given."""
    weight = model.user[0].weight
    return sw.DTensor.from_local(local, weight.device_mesh, [sw.Shard(0)]) if isinstance(weight, sw.DTensor) else local


def shard(model: TwoTower, mesh: sw.Mesh) -> None:
    """The table row-wise, updated in backward; the layers replicated."""
    table, model.table = model.table, nn.Identity()
    sw.shard_module(model, {}, mesh=mesh)
    model.table = shard_embeddings(table, {"items": sw.Shard(0)}, mesh, RowWiseAdagrad(lr=0.2))


def users(seed: int, count: int) -> tuple[Tensor, Tensor]:
    """What some users have seen [count, SEEN], and what they see next [count]; different items of one topic."""
    random = torch.Generator().manual_seed(seed)
    topics = torch.randint(TOPICS, (count, 1), generator=random)
    found = topics * ITEMS_OF_TOPIC + torch.rand(count, ITEMS_OF_TOPIC, generator=random).argsort(1)[:, : SEEN + 1]
    return found[:, :SEEN], found[:, SEEN]


def in_batch_loss(model: TwoTower, seen: Tensor, items: Tensor, all_items: Tensor) -> Tensor:
    """Cross-entropy of each user's item among all items of the batch.

    Args:
        seen: of the users of this rank.
        items: of the same users.
        all_items: those of all ranks. Another user with the same item is no negative.
    """
    user_vectors, item_vectors = model(seen, items)
    scores = user_vectors @ item_vectors.T / 0.1
    same = all_items[:, None] == all_items
    negatives = torch.zeros(same.shape).masked_fill(same.fill_diagonal_(False), -torch.inf)
    return F.cross_entropy(scores + negatives, torch.arange(len(all_items)))


def recall(model: TwoTower, seen: Tensor, items: Tensor, k: int, ranks: int) -> float:
    """The part of users whose next item is among the k nearest that they have not seen."""
    with torch.no_grad():
        catalogue = torch.arange(ITEMS)
        mine = (x.tensor_split(ranks)[sw.rank()] for x in (seen, catalogue))
        user_vectors, item_vectors = model(*mine)
        scores = (user_vectors @ item_vectors.T).full_tensor()
        nearest = scores.scatter(1, seen, -torch.inf).topk(k).indices
    return (nearest == items[:, None]).any(1).float().mean().item()


def train(
    folder: str | None = None, steps: int = 40, batch: int = 256, save_every: int = 20
) -> tuple[dict[int, float], float]:
    """Losses by step from the last checkpoint of `folder` on, and recall@10 of new users. Runs on every rank."""
    ranks = sw.world_size()
    torch.manual_seed(0)
    model = TwoTower()
    shard(model, sw.Mesh((ranks,)))
    optimizer = torch.optim.Adam([*model.user.parameters(), *model.item.parameters()], lr=3e-3)
    optimizers = {"layers": optimizer, "table": model.table.fused_optimizer}
    first = restore(folder, model, optimizers).step if folder and latest(folder) else 0
    losses = {}
    for step in range(first + 1, steps + 1):
        seen, items = users(step, batch)
        mine = (x.tensor_split(ranks)[sw.rank()] for x in (seen, items))
        loss = in_batch_loss(model, *mine, all_items=items)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[step] = loss.item()
        if folder and step % save_every == 0:
            save(folder, state_of(model, optimizers), step=step, keep=2)
    return losses, recall(model, *users(-1, 500), k=10, ranks=ranks)


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else None
    losses, found = sw.launch(train, folder, nproc=2) if under_torchrun() else world(2).run(train, folder)[0]
    if sw.rank() == 0:
        for step in [*losses][:: max(1, len(losses) - 1)]:
            print(f"step {step:>2}, loss {losses[step]:.2f}")
        print(f"recall@10 of 500 new users: {found:.0%}, by chance {10 / ITEMS:.0%}")
