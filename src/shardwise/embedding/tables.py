"""The parameters of tables, and their first values.

A new table is random numbers that do not depend on its layout: it is filled in chunks of rows, each with its seed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from shardwise import _collectives as collectives
from shardwise._collectives import stable_digest
from shardwise._rules.local_tensors import has_values
from shardwise._tensor import DTensor
from shardwise._tensor.handlers.attributes import replace_value
from shardwise.embedding.configs import EmbeddingConfig
from shardwise.embedding.plan import Block
from shardwise.errors import ConfigError, PlanError

CHUNK = 1 << 12  # rows of one seed; a rank makes full chunks, of which it may need a part
RowsBetween = Callable[[int, int], Tensor]  # [rows, all columns] of a table


class TableWeight(nn.Module):
    """The parameter of a table.

    Attributes:
        copies_state: whether a state is copied even with `load_state_dict(..., assign=True)`.
    """

    copies_state = False

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load like any module; the error for another number of rows says how to load them."""
        given, own = state_dict.get(f"{prefix}weight"), self.weight.shape
        if isinstance(given, Tensor) and given.shape != own and given.shape[1:] == own[1:]:
            name, rows = prefix.removesuffix(".").rpartition(".")[2], given.shape[0]
            error_msgs.append(
                f"Table {name} has {own[0]} rows, the state has {rows}. "
                f"Fix: collection.resize_({{{name!r}: {rows}}}) before load_state_dict."
            )
            return
        if self.copies_state:
            local_metadata = local_metadata | {"assign_to_params_buffers": False}
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


class ViewOfStack(TableWeight):
    """A parameter that stays in the memory of its stack."""

    copies_state = True

    def __init__(self, name: str, weight: nn.Parameter) -> None:
        super().__init__(weight)
        self.name = name
        self._note_place()

    def _note_place(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self.first_place = self.place()

    def place(self) -> tuple[int, torch.dtype] | None:
        """The address of this rank's elements, and their dtype; call it where DTensors are plain tensors."""
        weight = self._parameters.get("weight")  # a parametrization takes it away
        return None if weight is None else (torch._C.TensorBase.data_ptr(weight), weight.dtype)

    def move(self, value: DTensor) -> None:
        """Let the parameter be a view of another stack."""
        weight: Tensor = self.weight
        assert isinstance(weight, DTensor)
        replace_value(weight, value)
        self._note_place()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What `to`, `half`, `cuda` and `to_empty` of any module around it call.

        Raises:
            PlanError: `fn` would replace the memory; nothing has changed then.
        """
        probe = torch.empty(0, dtype=self.weight.dtype, device=self.weight.device)
        if fn(probe) is not probe:
            raise PlanError(
                f"Table {self.name} cannot be moved or converted (to(), half(), to_empty()): "
                f"a sharded collection looks up rows in memory of its own.\n"
                f"Nothing of the collection has changed; modules before it in the model may be converted already.\n"
                f"  Fix: convert before shard_embeddings, and then the other modules one by one. "
                f"Exports convert: export_hugging_face(…, dtype=torch.bfloat16)."
            )
        apply: Callable[..., Self] = super()._apply
        return apply(fn, recurse)

    def check_place(self) -> None:
        """Whether it is still a view of the stack; call it where DTensors are plain tensors.

        Raises:
            PlanError: it was replaced.
        """
        if self.place() != self.first_place:
            raise PlanError(
                f"Table {self.name} was replaced (.data =, setattr, a parametrization), "
                f"but a sharded collection looks up rows in memory of its own.\n"
                f"  Fix: change values by copy_() or load_state_dict(); convert before shard_embeddings."
            )


class Tables(nn.Module):
    """Tables by name: `tables["users"]`, `for name in tables`, `len`, `in`.

    `nn.ModuleDict` has methods such as `items`, and so no table of that name.
    """

    def __init__(self, tables: Mapping[str, TableWeight]) -> None:
        super().__init__()
        for name, table in tables.items():
            self.add_module(name, table)

    def __getitem__(self, name: str) -> TableWeight:
        table = self._modules[name]
        assert isinstance(table, TableWeight)
        return table

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def __contains__(self, name: object) -> bool:
        return name in self._modules


def check_no_gradient(name: str, parameter: Tensor) -> None:
    """Raise ConfigError if a table has a gradient, so that it cannot be resized."""
    if parameter.grad is not None:
        raise ConfigError(
            f"Table {name} has a gradient of its {parameter.shape[0]} rows and cannot be resized. "
            f"Fix: optimizer.step() and zero_grad() before resize_."
        )


# ---- first values ---------------------------------------------------------------------------------------------


def draw_seed() -> int:
    """A seed of torch's generator."""
    return int(torch.randint(1 << 62, (1,)))


def seed_of_first(ranks: Sequence[int]) -> int:
    """A seed of torch's generator on the first rank, on all of them."""
    drawn = torch.tensor([draw_seed()], device="cpu").to(collectives.message_device(tuple(ranks)))
    return int(collectives.broadcast(drawn, 1, min(ranks), tuple(ranks)))


def fill(into: Tensor, block: Block, rows: RowsBetween) -> None:
    """Copy a block of a table, some rows at a time."""
    for part in by_chunk(block.rows) if has_values(into) else ():
        found = rows(part.start, part.stop)[:, block.cols.start : block.cols.stop]
        into[part.start - block.rows.start : part.stop - block.rows.start].copy_(found)


def by_chunk(rows: range) -> Iterator[range]:
    """Parts of `rows`, each of one chunk."""
    first = rows.start
    while first < rows.stop:
        yield range(first, end := min(rows.stop, (first // CHUNK + 1) * CHUNK))
        first = end


def rows_of_full(table: Tensor) -> RowsBetween:
    """The rows of a full table."""
    return lambda first, stop: table[first:stop]


def new_rows(config: EmbeddingConfig, seed: int) -> RowsBetween:
    """The rows of a new table, which `config.initialize` fills."""
    return seeded_rows(config.initialize, (config.num_embeddings, config.embedding_dim), config.data_type, seed)


def seeded_rows(
    initialize: Callable[[Tensor], object], shape: Sequence[int], dtype: torch.dtype, seed: int
) -> RowsBetween:
    """The rows of a new tensor, which `initialize` fills on the CPU, `CHUNK` rows at a time, each with its seed."""

    def rows(first: int, stop: int) -> Tensor:
        start = first // CHUNK * CHUNK
        chunk = torch.empty(min(CHUNK, shape[0] - start), *shape[1:], dtype=dtype)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(stable_digest((seed, start)))  # leaves those of accelerators
            initialize(chunk)
        return chunk[first - start : stop - start]

    return rows
