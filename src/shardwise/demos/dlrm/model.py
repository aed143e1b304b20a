"""The layers of a DLRM as anybody would write them. They know of no ranks and import nothing of ours.

Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems", 2019.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Interaction(nn.Module):
    """Log-odds of a click, from numbers and the embeddings of categories.

    The numbers become one more embedding; the dot products of all pairs, beside it, are what the last layers get.

    Args:
        num_dense: numbers of an example.
        num_tables: embeddings of an example.
        dim: of an embedding.
        hidden: features of the hidden layers.
    """

    pairs: Tensor

    def __init__(self, num_dense: int, num_tables: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.dim, count = dim, num_tables + 1
        self.bottom = nn.ModuleList([nn.Linear(num_dense, hidden), nn.Linear(hidden, dim)])
        self.top = nn.ModuleList([nn.Linear(dim + count * (count - 1) // 2, hidden), nn.Linear(hidden, 1)])
        first, second = torch.tril_indices(count, count, offset=-1)
        self.register_buffer("pairs", first * count + second, persistent=False)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """Log-odds, [examples].

        Args:
            dense: [examples, num_dense].
            embeddings: [examples, num_tables * dim].
        """
        x = F.relu(self.bottom[1](F.relu(self.bottom[0](dense))))
        vectors = torch.cat([x, embeddings], 1).unflatten(1, (-1, self.dim))
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        logits: Tensor = self.top[1](F.relu(self.top[0](torch.cat([x, products], 1))))
        return logits.squeeze(1)
