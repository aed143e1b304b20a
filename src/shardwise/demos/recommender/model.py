"""The recommender: a `torch.nn` module as anybody would write it. It knows of no ranks and imports nothing of ours."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MAX_ARGS = 15  # functions with more arguments share an embedding


class Recommender(nn.Module):
    """Which identifier is missing from a function?

    score[b, i] = items[i] · (mean of context[j] over the visible identifiers j of b + num_args[b]) + log p[i]

    where p is the popularity of an identifier in training: the model starts as the baseline it has to beat.

    Args:
        counts: (identifiers,) how many training functions use each.
        dim: columns of the tables.
        init_std: standard deviation of the initial context and item embeddings.
    """

    log_popularity: Tensor

    def __init__(self, counts: Tensor, dim: int, init_std: float) -> None:
        super().__init__()
        self.context = nn.EmbeddingBag(len(counts), dim, mode="mean")
        self.num_args = nn.Embedding(MAX_ARGS + 1, dim)
        self.items = nn.Embedding(len(counts), dim)
        nn.init.normal_(self.context.weight, std=init_std)
        nn.init.normal_(self.items.weight, std=init_std)
        nn.init.zeros_(self.num_args.weight)
        share = counts.clamp(min=1) / counts.clamp(min=1).sum()
        self.register_buffer("log_popularity", share.log().to(torch.get_default_dtype()))

    def forward(self, context_ids: Tensor, offsets: Tensor, num_args: Tensor) -> Tensor:
        """Scores of shape (rows, identifiers), the higher the likelier.

        Args:
            context_ids: (ids of all rows,) the visible identifiers.
            offsets: (rows,) where each row's identifiers begin.
            num_args: (rows,) from 0 to MAX_ARGS.
        """
        hidden = self.context(context_ids, offsets) + self.num_args(num_args)
        return F.linear(hidden, self.items.weight, self.log_popularity)
