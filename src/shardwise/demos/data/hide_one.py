"""The task on PyIdent: one identifier of a function is hidden, predict it from the others.

For orientation, measured in one process with full softmax, Adagrad with a learning rate of 0.1 and batches of
256: popularity finds 25 % of the held-out identifiers among its first ten (MRR 0.18); the mean of 128-wide
embeddings of the context, started with a standard deviation of 0.1, against an output table with the logarithm
of the popularity as bias, 43 % after one pass and 44 % after four (MRR 0.30). An embedding of `num_args` added
to it, or half the columns, was no better on files kept back from training.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.data.shuffling import epoch_order
from shardwise.demos.data.pyident import PyIdent

GOLDEN = 0x9E3779B97F4A7C15  # Fibonacci hashing; Knuth, TAOCP 3, section 6.4


@dataclass(frozen=True, eq=False)
class Batch:
    """Some examples, int64. The context of row `i` is `context_ids[offsets[i]:offsets[i + 1]]`.

    There is no padding: feed it to `nn.EmbeddingBag(..., include_last_offset=True)`, or take some rows
    with `rows`.
    """

    context_ids: Tensor
    """(ids of all rows,) the visible identifiers, ascending in each row, at least one a row."""
    offsets: Tensor
    """(rows + 1,), starting with 0."""
    target: Tensor
    """(rows,) the hidden identifier; never in the row's own context."""
    module: Tensor
    """(rows,) see `PyIdent` for what this is worth on held-out files."""
    package: Tensor
    """(rows,) seen in training for most held-out files."""
    num_args: Tensor
    """(rows,)"""

    def __len__(self) -> int:
        return len(self.target)

    @property
    def context_rows(self) -> Tensor:
        """(ids of all rows,) the row of each of `context_ids`."""
        return torch.arange(len(self)).repeat_interleave(self.offsets.diff())

    def rows(self, start: int, stop: int) -> "Batch":
        """Rows `start` to `stop`, clipped as a slice is: one rank's share, maybe empty. Shares the memory.

        Joining the rows of consecutive ranges gives the batch again.
        """
        start, stop, _ = slice(start, stop).indices(len(self))
        stop = max(start, stop)
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        kept = slice(start, stop)
        return Batch(
            context_ids=self.context_ids[first:last],
            offsets=self.offsets[start : stop + 1] - first,
            target=self.target[kept],
            module=self.module[kept],
            package=self.package[kept],
            num_args=self.num_args[kept],
        )


@dataclass(frozen=True, eq=False)
class Examples:
    """The examples of one split; made by `examples`."""

    data: PyIdent
    function: Tensor
    """(examples,) the function of each."""
    hidden: Tensor
    """(examples,) the position of the target in `data.bags.values`."""

    def __len__(self) -> int:
        return len(self.hidden)

    def batch(self, which: Tensor) -> Batch:
        """The examples with these indices, in this order: `which` has shape (rows,) and integers."""
        values, offsets = self.data.bags
        function, hidden = self.function[which], self.hidden[which]
        start = offsets[function]
        length = offsets[function + 1] - start - 1  # without the hidden one
        bounds = F.pad(length.cumsum(0), (1, 0))
        row = torch.arange(len(length)).repeat_interleave(length)
        position = torch.arange(len(row)) + (start - bounds[:-1])[row]
        position += position >= hidden[row]  # step over the hidden one
        return Batch(
            context_ids=values[position],
            offsets=bounds,
            target=values[hidden],
            module=self.data.module_of[function],
            package=self.data.package_of[function],
            num_args=self.data.num_args[function],
        )

    def batches(
        self, size: int, *, seed: int | None = None, epoch: int = 0, skip: int = 0, drop_last: bool = False
    ) -> Iterator[Batch]:
        """One pass over all examples in batches of `size` rows; the last may have fewer.

        Args:
            size: rows a batch, at least 1.
            seed: shuffle with this; None keeps the order of the functions. The same seed and epoch give the same
                batches on every rank, whatever else draws random numbers.
            epoch: the number of the pass; each has an order of its own.
            skip: leave out this many batches at the beginning, to resume within a pass.
            drop_last: leave out a last batch of fewer rows.

        Raises:
            ValueError: `size` is less than 1 or `skip` is negative.
        """
        if size < 1 or skip < 0:
            raise ValueError(
                f"size is {size} and skip is {skip}, expected size >= 1 and skip >= 0. "
                f"Fix: the examples of a batch, and the batches of the epoch that were used"
            )
        order = epoch_order(len(self), seed, epoch)
        stop = len(self) - len(self) % size if drop_last else len(self)
        return (self.batch(order[i : min(i + size, stop)]) for i in range(skip * size, stop, size))


def examples(data: PyIdent, split: Literal["train", "test"]) -> Examples:
    """The examples of a split.

    - "train": every identifier of every training function, so that a pass hides each interaction once.
    - "test": one for each held-out function. Its target is one of the function's identifiers that occur in
      training, chosen by a hash of the function's index, so it never changes; a function with no such
      identifier is left out.

    Raises:
        ValueError: another split.
    """
    values, offsets = data.bags
    owner = torch.arange(data.num_functions).repeat_interleave(offsets.diff())
    if split == "train":
        hidden = (~data.is_test[owner]).nonzero().squeeze(1)
        return Examples(data, owner[hidden], hidden)
    if split == "test":
        candidates = (data.is_test[owner] & (data.train_counts[values] > 0)).nonzero().squeeze(1)
        function, counts = owner[candidates].unique_consecutive(return_counts=True)
        choice = torch.tensor(
            [(int(f) * GOLDEN >> 32) % (1 << 32) % int(n) for f, n in zip(function, counts, strict=True)],
            dtype=torch.int64,
        )
        return Examples(data, function, candidates[counts.cumsum(0) - counts + choice])
    raise ValueError(f'split is {split!r}, expected "train" or "test". Fix: one of these')


@dataclass(frozen=True)
class Quality:
    """How well hidden identifiers were found among all that are not in the context."""

    hit_rate_10: float
    """The share of targets among the first ten."""
    mrr: float
    """The mean of 1 / place."""
    num_examples: int
    """How many targets there were."""


def places(scores: Tensor, batch: Batch) -> Tensor:
    """The place of each target among the identifiers outside its context: shape (rows,), 1 is best.

    Args:
        scores: (rows, identifiers), higher is better; not changed.
        batch: the examples that were scored.

    An identifier with the same score as the target counts as ahead of it, so a constant score, or one that is
    nan, is the worst.
    """
    target = scores.gather(1, batch.target.unsqueeze(1))
    ahead = ~(scores < target)  # not `>=`: a nan is then the worst and never the best
    ahead[batch.context_rows, batch.context_ids] = False
    return ahead.sum(1)  # the target itself is the 1


def quality(places: Tensor) -> Quality:
    """Hit rate at 10 and mean reciprocal rank of `places`, shape (examples,), at least one.

    Raises:
        ValueError: no places.
    """
    if not len(places):
        raise ValueError("no places: the quality of nothing is not defined. Fix: the places of at least one example")
    return Quality(
        hit_rate_10=float((places <= 10).double().mean()),
        mrr=float(places.double().reciprocal().mean()),
        num_examples=len(places),
    )


def popularity_baseline(data: PyIdent) -> Quality:
    """What guessing by frequency in training, whatever the context, reaches on the held-out functions."""
    popularity = data.train_counts.expand(256, -1)
    test = examples(data, "test").batches(256)
    return quality(torch.cat([places(popularity[: len(batch)], batch) for batch in test]))
