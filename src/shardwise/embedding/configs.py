"""The configs of the tables of collections, with the names of TorchRec."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import sqrt
from typing import Annotated, TypeVar

import torch
from torch import Tensor, nn

from shardwise._layout import Kind, checked_init
from shardwise.errors import ConfigError

POLICIES = ("error", "clip", "hash", "zero")
Policy = Annotated[str, Kind("'error', 'clip', 'hash' or 'zero'", lambda x: isinstance(x, str) and x in POLICIES)]


class PoolingType(Enum):
    """The pooling of a bag: the sum of its rows, or their mean."""

    SUM = "SUM"
    MEAN = "MEAN"


@checked_init
@dataclass(frozen=True)
class EmbeddingConfig:
    """A table of an EmbeddingCollection.

    Args:
        num_embeddings: number of rows.
        embedding_dim: number of columns.
        name: of the table, without dots.
        data_type: of the table: float32, bfloat16 or float16.
        feature_names: features whose ids are rows of the table.
        weight_init_max, weight_init_min: bounds of the uniform values of a new table; None: 1 / √rows and its negative.
        init_fn: fills some rows of a new table in place, [rows, columns]; replaces the uniform values.
        padding_idx: an id that is not trained, and is not part of bags.
        max_norm: the largest 2-norm to which rows are scaled at a lookup.
        bad_ids: what happens to ids that are not in the table: an IdError, the nearest valid id ("clip"), the remainder
            by the rows ("hash"), or zeros ("zero").

    Raises:
        ConfigError: impossible values.
    """

    num_embeddings: int
    embedding_dim: int
    name: str
    data_type: torch.dtype = torch.float32
    feature_names: Sequence[str] = ()
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    init_fn: Callable[[Tensor], object] | None = None
    padding_idx: int | None = None
    max_norm: float | None = None
    bad_ids: Policy = "error"

    def __post_init__(self) -> None:
        object.__setattr__(self, "feature_names", tuple(self.feature_names))
        if self._wrong():
            raise ConfigError(f"Table {self.name!r}: {self._wrong()}.")

    def _wrong(self) -> str:
        if not self.name or "." in self.name:
            name = next(x for x in (self.name.replace(".", "_"), *self.feature_names, "table") if x)
            return (
                f"a name has at least one letter, and no dot, because it is part of the parameter's name. Fix: {name!r}"
            )
        if hasattr(nn.Module, self.name):
            return f"nn.Module has an attribute of this name. Fix: {self.name + '_table'!r}"
        if self.num_embeddings < 1 or self.embedding_dim < 1:
            return (
                f"{self.num_embeddings} rows of {self.embedding_dim} columns, expected 1 or more of each. "
                f"Fix: num_embeddings above the largest id, embedding_dim such as 64"
            )
        if not self.feature_names:
            return f"no features. Fix: feature_names=[{self.name!r}]"
        if len(set(self.feature_names)) != len(self.feature_names):
            return f"the features {list(self.feature_names)} name one twice. Fix: each once"
        if not self.data_type.is_floating_point:
            return f"data_type {self.data_type} has no gradients. Fix: torch.float32, or another floating-point dtype"
        if self.padding_idx is not None and not 0 <= self.padding_idx < self.num_embeddings:
            return (
                f"padding_idx {self.padding_idx} is not in 0 to {self.num_embeddings - 1}. "
                f"Fix: one of these, or None for no padding"
            )
        if self.max_norm is not None and not self.max_norm > 0:
            return f"max_norm {self.max_norm} is not positive. Fix: above 0, or None for no limit"
        return ""

    def initialize(self, rows: Tensor) -> None:
        """Fill some rows of a new table in place."""
        if self.init_fn is not None:
            self.init_fn(rows)
            return
        bound = 1 / sqrt(self.num_embeddings)
        low, high = self.weight_init_min, self.weight_init_max
        rows.uniform_(-bound if low is None else low, bound if high is None else high)


@checked_init
@dataclass(frozen=True)
class EmbeddingBagConfig(EmbeddingConfig):
    """A table of an EmbeddingBagCollection: an EmbeddingConfig, and how bags are pooled."""

    pooling: PoolingType = PoolingType.SUM


Config = TypeVar("Config", bound=EmbeddingConfig)


def resized(configs: Sequence[Config], sizes: Mapping[str, int]) -> tuple[Config, ...]:
    """The configs with other numbers of rows, by name.

    Raises:
        ConfigError: an unknown table, or an impossible number of rows.
    """
    names = [config.name for config in configs]
    for name in sizes:
        if name not in names:
            raise ConfigError(
                f"There is no table {name!r} to resize; the tables are {', '.join(names)}. Fix: one of these names."
            )
    return tuple(replace(config, num_embeddings=sizes.get(config.name, config.num_embeddings)) for config in configs)
