"""A rank's batch before message 1: ids that are not in their table, padding, and what means divide by."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwise.embedding.plan import Plan
from shardwise.errors import IdError, IdTypeError

POLICIES = ("error", "clip", "hash", "zero")
Verdict = tuple[int, int, int, int]  # feature, sample, position in the sample, and the id; VALID if all are valid
VALID: Verdict = (-1, 0, 0, 0)


@dataclass(frozen=True)
class Batch:
    """The ids of all features.

    Attributes:
        values: int64, by feature and bag.
        bag: of each id, numbered over all features.
        lengths: of all bags.
        weights: of each id, or None.
        bags: how many each feature has.
        kept: which ids of the input these are; None: all.
        counted: ids of each bag that a mean divides by.
    """

    values: Tensor
    bag: Tensor
    lengths: Tensor
    weights: Tensor | None
    bags: tuple[int, ...]
    counted: Tensor
    kept: Tensor | None = None

    def where(self, keep: Tensor) -> "Batch":
        """Only some of the ids; `counted` stays as it is."""
        lengths = torch.bincount(self.bag[keep], minlength=self.lengths.numel())
        weights = None if self.weights is None else self.weights[keep]
        return replace(self, values=self.values[keep], bag=self.bag[keep], lengths=lengths, weights=weights, kept=keep)


def make_batch(values: Tensor, lengths: Tensor, weights: Tensor | None, bags: Sequence[int]) -> Batch:
    """The batch of ids and the lengths of bags, both by feature.

    Raises:
        IdTypeError: the lengths are not those of the ids.
    """
    lengths = lengths.long()
    bag = torch.repeat_interleave(lengths)
    if bag.numel() != values.numel() or lengths.numel() != sum(bags):
        raise IdTypeError(
            f"{values.numel()} ids have {lengths.numel()} lengths with the sum {bag.numel()}, for {sum(bags)} bags."
        )
    return Batch(values.long(), bag, lengths, weights, tuple(bags), lengths)


@dataclass(frozen=True)
class IdRules:
    """What ids of each feature are valid, and what becomes of others.

    Attributes:
        rows: of the table of each feature.
        policies: one of `POLICIES` for each feature.
        padding: the id that is not looked up, for each feature; -1: none.
    """

    rows: Tensor
    policies: tuple[str, ...]
    padding: tuple[int, ...]

    def apply(self, batch: Batch) -> tuple[Batch, Verdict]:
        """The batch with valid ids only, and the verdict on it: the first id that is an error.

        If there is one, the batch is empty.
        """
        verdict = VALID
        keep: Tensor | None = None
        if batch.values.numel() and self._has_bad(batch.values):
            rows = self._of_ids(self.rows, batch)
            bad = (batch.values < 0) | (batch.values >= rows)
            of_error, of_clip, of_hash, of_zero = (bad & self._with(policy, batch) for policy in POLICIES)
            if bool(of_error.any()):
                verdict = self._verdict(batch, int(of_error.nonzero()[0]))
                nothing = torch.zeros_like(of_error)
                return batch.where(nothing), verdict
            clipped = torch.minimum(batch.values.clamp(min=0), rows - 1)
            values = torch.where(of_clip, clipped, torch.where(of_hash, batch.values.remainder(rows), batch.values))
            batch, keep = replace(batch, values=values), ~of_zero
        if max(self.padding, default=-1) >= 0:
            is_padding = batch.values == self._of_ids(torch.tensor(self.padding, device=batch.values.device), batch)
            padded = torch.bincount(batch.bag[is_padding], minlength=batch.lengths.numel())
            batch = replace(batch, counted=batch.lengths - padded)
            keep = ~is_padding if keep is None else keep & ~is_padding
        return (batch if keep is None else batch.where(keep)), verdict

    def _has_bad(self, values: Tensor) -> bool:
        """Whether an id may be outside its table: cheap where all are in the smallest one."""
        low, high = torch.aminmax(values)
        return int(low) < 0 or int(high) >= int(self.rows.min())

    def _of_ids(self, of_features: Tensor, batch: Batch) -> Tensor:
        sizes = torch.tensor(batch.bags, device=batch.bag.device)
        return torch.repeat_interleave(of_features, sizes)[batch.bag]

    def _with(self, policy: str, batch: Batch) -> Tensor:
        chosen = torch.tensor([p == policy for p in self.policies], device=batch.bag.device)
        return self._of_ids(chosen, batch)

    def _verdict(self, batch: Batch, number: int) -> Verdict:
        bag, value = int(batch.bag[number]), int(batch.values[number])
        position = number - int(batch.lengths[:bag].sum())
        feature = 0
        while bag >= batch.bags[feature]:
            bag -= batch.bags[feature]
            feature += 1
        return feature, bag, position, value


def raise_bad_ids(plan: Plan, verdicts: Sequence[Sequence[int]]) -> None:
    """Raise for the first rank with a bad id; `verdicts` are those of all ranks.

    Raises:
        IdError: the same on every rank.
    """
    for rank, (feature, sample, position, value) in zip(plan.ranks, verdicts, strict=True):
        if feature >= 0:
            table = plan.tables[plan.table_of[feature]]
            raise IdError(
                f"Table {table.name}, feature {plan.features[feature]}: id {value}, at position {position} of sample "
                f"{sample} of rank {rank}, is not in the table, whose valid ids are 0 to {table.layout.shape[0] - 1}. "
                f"Nothing was looked up.\n  Fix: correct the ids, or bad_ids='clip', 'hash' or 'zero'."
            )
