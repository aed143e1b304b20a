"""A DLRM: 26 sharded embedding tables, two replicated MLPs, and the dot products of all pairs of embeddings.

Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems", 2019. Each rank
reads its own lines of clicks in Criteo's format; a sample of 300 invented lines is bundled, which the model learns by
heart. On two ranks simulated in this process, or on two real ones:

    python examples/dlrm.py
    torchrun --nproc-per-node 2 examples/dlrm.py runs/dlrm

prints

    pass 1, loss 0.71
    pass 2, loss 0.43
    pass 3, loss 0.04
    collectives of a step: 4 all_to_all

Three of these are for all tables, and one reduces the gradients of the layers. With a folder each pass is saved, tables
and both optimizers included, and the same command goes on from there, also on another number of ranks.
`shardwise train dlrm` has measures on held-out lines, other data and a resume in mid-pass as well.
"""

import sys
from collections import Counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint import latest, restore, save, state_of
from shardwise.demos.data import CriteoDataset
from shardwise.demos.data.criteo import DENSE_NAMES, KEYS, SAMPLE
from shardwise.embedding import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    shard_embeddings,
)
from shardwise.launch import under_torchrun
from shardwise.testing import world

ROWS, DIM, BATCH = 1000, 16, 32


class DLRM(nn.Module):
    """Log-odds of a click."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection([EmbeddingBagConfig(ROWS, DIM, key, feature_names=[key]) for key in KEYS])
        self.bottom = nn.Sequential(nn.Linear(len(DENSE_NAMES), 64), nn.ReLU(), nn.Linear(64, DIM), nn.ReLU())
        vectors = 1 + len(KEYS)
        self.top = nn.Sequential(nn.Linear(DIM + vectors * (vectors - 1) // 2, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """[examples], from dense [examples, 13] and one id of each of 26 features."""
        pooled = self.tables(features).values()  # of the examples of this rank
        if isinstance(dense, sw.DTensor):
            shape = (len(dense), pooled.shape[1])  # known: ranks need not compare
            pooled = sw.DTensor.from_local(pooled, dense.device_mesh, dense.placements, run_check=False, shape=shape)
        x = self.bottom(dense)
        vectors = torch.cat([x, pooled], 1).unflatten(1, (-1, DIM))
        first, second = torch.tril_indices(vectors.shape[1], vectors.shape[1], offset=-1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)[:, first * vectors.shape[1] + second]
        logits: Tensor = self.top(torch.cat([x, products], 1)).squeeze(1)
        return logits


def shard(model: DLRM, mesh: sw.Mesh) -> None:
    """Each table row-wise, updated in backward; the layers replicated."""
    tables, model.tables = model.tables, nn.Identity()
    sw.shard_module(model, {}, mesh=mesh)
    model.tables = shard_embeddings(tables, dict.fromkeys(KEYS, sw.Shard(0)), mesh, RowWiseAdagrad(lr=0.1))


def train(passes: int = 3, folder: str | None = None) -> tuple[list[float], Counter[str]]:
    """The mean loss of each pass that `folder` has not, and the collectives of a step. Runs on every rank."""
    ranks = sw.world_size()
    mesh = sw.Mesh((ranks,))
    torch.manual_seed(0)
    model = DLRM()
    shard(model, mesh)
    layers = [parameter for name, parameter in model.named_parameters() if not name.startswith("tables")]
    optimizer = torch.optim.Adagrad(layers, lr=0.02)
    optimizers = {"layers": optimizer, "tables": model.tables.fused_optimizer}
    first = restore(folder, model, optimizers).step if folder and latest(folder) else 0
    lines = CriteoDataset(SAMPLE, BATCH // ranks, num_embeddings=ROWS, seed=0, drop_last=True)
    means, calls = [], Counter[str]()
    for number in range(first, passes):
        lines.set_epoch(number)
        losses = []
        for batch in lines:
            ids = batch.ids.T.flatten()
            features = KeyedJaggedTensor(list(KEYS), ids, lengths=torch.ones(len(ids), dtype=torch.int64))
            dense, labels = (sw.DTensor.from_local(x, mesh, [sw.Shard(0)]) for x in (batch.dense, batch.labels))
            with sw.count_comms() as comms:
                loss = F.binary_cross_entropy_with_logits(model(dense, features), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            losses.append(loss.item())
            calls = Counter(comms.calls)
        means.append(sum(losses) / len(losses))
        if folder:
            save(folder, state_of(model, optimizers), step=number + 1, keep=2)
    return means, calls


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else None
    means, calls = sw.launch(train, 3, folder, nproc=2) if under_torchrun() else world(2).run(train, 3, folder)[0]
    if sw.rank() == 0:
        for number, mean in enumerate(means, 4 - len(means)):
            print(f"pass {number}, loss {mean:.2f}")
        if calls:
            print("collectives of a step:", ", ".join(f"{count} {name}" for name, count in calls.items()))
