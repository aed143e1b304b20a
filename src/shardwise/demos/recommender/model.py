"""The recommender: two towers over one collection of tables, and the identifiers that a target is compared with."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.data.shuffling import generator
from shardwise.demos.data import Batch
from shardwise.embedding import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType

MAX_ARGS = 15  # functions with more arguments share an embedding
FEATURES = ("context", "num_args", "target", "negatives")
POWER = 0.75  # of popularity, with which negatives are drawn: Mikolov et al., 2013, arXiv:1310.4546


def tables(num_identifiers: int, dim: int, init_std: float) -> EmbeddingBagCollection:
    """The tables of `FEATURES`, on the meta device: they are initialised when they are sharded."""
    normal, zeros = partial(nn.init.normal_, std=init_std), nn.init.zeros_
    configs = [
        EmbeddingBagConfig(
            num_identifiers, dim, "context", feature_names=["context"], init_fn=normal, pooling=PoolingType.MEAN
        ),
        EmbeddingBagConfig(MAX_ARGS + 1, dim, "num_args", feature_names=["num_args"], init_fn=zeros),
        EmbeddingBagConfig(num_identifiers, dim, "items", feature_names=["target", "negatives"], init_fn=normal),
    ]
    return EmbeddingBagCollection(configs, device="meta")


class Recommender(nn.Module):
    """Which identifier is missing from a function?

    score[b, i] = items[i] · (mean of context[j] over the visible identifiers j of b + num_args[b]) + log p[i]

    where p is the popularity of an identifier in training: the model starts as the baseline it has to beat. In training
    the score of a target is compared with those of `negatives` identifiers of each step, instead of all: a sampled
    softmax (Bengio and Senécal, 2008), whose expected sum of exponentials is that of all identifiers. Those of the
    context are left out, because none of them is hidden.

    Args:
        tables: those of `tables`, in one process or sharded.
        counts: (identifiers,) how many training functions use each.
        negatives: identifiers of a step that targets are compared with; as many as there are, or more: all.
    """

    log_popularity: Tensor
    log_chance: Tensor
    _ends: Tensor

    def __init__(self, tables: nn.Module, counts: Tensor, negatives: int) -> None:
        super().__init__()
        self.tables, self.num_negatives = tables, min(negatives, len(counts))
        counts = counts.clamp(min=1).double()
        chance = chances(counts**POWER, self.num_negatives)
        dtype = torch.get_default_dtype()
        self.register_buffer("log_popularity", (counts / counts.sum()).log().to(dtype), persistent=False)
        self.register_buffer("log_chance", chance.log().to(dtype), persistent=False)
        self.register_buffer("_ends", chance.cumsum(0), persistent=False)

    def negatives(self, seed: int, step: int) -> Tensor:
        """Those of a step: (num_negatives,) distinct identifiers, ascending, the same on every rank.

        Each identifier is among them with its chance: one number between 0 and 1, and all that are larger by an
        integer, fall into intervals as long as the chances (systematic sampling).
        """
        start = torch.rand(1, dtype=torch.float64, generator=generator(seed, step))
        points = start + torch.arange(self.num_negatives)
        return torch.searchsorted(self._ends, points, right=True).clamp(max=len(self._ends) - 1)

    def table(self, name: str) -> nn.Parameter:
        """The rows of a table, (rows, dim)."""
        return self.tables.get_parameter(f"embedding_bags.{name}.weight")

    def hidden(self, batch: Batch) -> Tensor:
        """What the items are multiplied with: (rows, dim)."""
        nothing = batch.target[:0]
        return _hidden(self._lookup(batch, nothing, nothing))

    def forward(self, batch: Batch, negatives: Tensor) -> Tensor:
        """The sampled cross entropy of each row, (rows,); `negatives` are distinct and ascending."""
        found = self._lookup(batch, batch.target, negatives)
        hidden = _hidden(found)
        target = (hidden * found["target"]).sum(1, keepdim=True) + self.log_popularity[batch.target, None]
        others = F.linear(hidden, found["negatives"], (self.log_popularity - self.log_chance)[negatives])
        others[_known(batch, negatives)] = -torch.inf
        scores = torch.cat([target, others], 1)
        return F.cross_entropy(scores, torch.zeros_like(batch.target), reduction="none")

    def _lookup(self, batch: Batch, target: Tensor, negatives: Tensor) -> dict[str, Tensor]:
        ids = [batch.context_ids, batch.num_args.clamp(max=MAX_ARGS), target, negatives]
        lengths = [batch.offsets.diff(), *(torch.ones_like(one) for one in ids[1:])]
        features = KeyedJaggedTensor(
            FEATURES, torch.cat(ids), lengths=torch.cat(lengths), stride_per_key=[len(bags) for bags in lengths]
        )
        found: dict[str, Tensor] = self.tables(features).to_dict()
        return found


def _known(batch: Batch, negatives: Tensor) -> tuple[Tensor, Tensor]:
    """The row and the place among `negatives` of each identifier of the context, or target, that is among them."""
    row = torch.cat([batch.context_rows, torch.arange(len(batch))])
    ids = torch.cat([batch.context_ids, batch.target])
    place = torch.searchsorted(negatives, ids).clamp(max=len(negatives) - 1)
    found = negatives[place] == ids
    return row[found], place[found]


def _hidden(found: dict[str, Tensor]) -> Tensor:
    return found["context"] + found["num_args"]


def chances(weights: Tensor, count: int) -> Tensor:
    """The numbers min(1, c * weights) that sum to `count`, which is at most the number of weights, all positive."""
    if count == len(weights):
        return torch.ones_like(weights)
    ordered = weights.sort(descending=True).values
    scale = (count - torch.arange(len(weights))) / ordered.flip(0).cumsum(0).flip(0)  # if so many are certain
    return (weights * scale[(scale * ordered <= 1).nonzero()[0]]).clamp(max=1)
