"""Sharded collections: `shard_embeddings`."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from math import sqrt
from typing import Annotated, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from shardwise import collectives
from shardwise.collectives import DeviceMesh
from shardwise.embedding import kernels as torch_kernels
from shardwise.embedding.exchange.batch import POLICIES, Batch, IdRules, Verdict, make_batch, raise_bad_ids
from shardwise.embedding.exchange.engine import Engine, Gradients
from shardwise.embedding.exchange.owner import dense_gradient
from shardwise.embedding.exchange.pooling import PoolingChoice
from shardwise.embedding.exchange.requests import Outgoing
from shardwise.embedding.exchange.rows import distinct_rows, request_rows
from shardwise.embedding.exchange.stacks import Pooling, Stack, make_stacks
from shardwise.embedding.plan import Block, Table, make_plan
from shardwise.errors import IdTypeError, PlanError
from shardwise.layout import Kind, Layout, Mesh, Placements, as_placements
from shardwise.tensor import DTensor

Policy = Annotated[str, Kind("'error', 'clip', 'hash' or 'zero'", lambda x: isinstance(x, str) and x in POLICIES)]


class JaggedIds(Protocol):
    """A batch: ids of several features, by feature and bag."""

    def keys(self) -> Sequence[str]: ...
    def values(self) -> Tensor: ...
    def lengths(self) -> Tensor: ...
    def weights_or_none(self) -> Tensor | None: ...
    def stride_per_key(self) -> Sequence[int]: ...
    def permute(self, indices: list[int]) -> "JaggedIds": ...


class TableConfig(Protocol):
    """What is known of a table; `pooling` is only read of bags."""

    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: Sequence[str]
    padding_idx: int | None
    max_norm: float | None


class BagCollection(Protocol):
    """A collection that pools."""

    def is_weighted(self) -> bool: ...


class RowOptimizer(Protocol):
    """Updates the rows of a stack in place; `rows` and `offsets` are bags, `grad` is that of their sums."""

    def __call__(self, stack: Stack, rows: Tensor, offsets: Tensor, grad: Tensor, scale: Tensor | None) -> None: ...


class PooledRows(NamedTuple):
    """The results of bags: [bags, columns of all features], or those of each feature, flat, after each other."""

    features: tuple[str, ...]
    lengths: tuple[int, ...]  # columns of each feature; elements, if features have different numbers of bags
    values: Tensor


class RowsOfIds(NamedTuple):
    """The rows of the ids of one feature."""

    values: Tensor
    lengths: Tensor  # ids of each bag


class _TableModule(nn.Module):
    """Holds the parameter of a table under its name."""

    def __init__(self, weight: DTensor, requires_grad: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad)


class _Sharded(nn.Module):
    """What both sharded collections share: tables that are views of stacks, and the exchange."""

    def __init__(
        self,
        collection: nn.Module,
        tables: str,
        configs: Sequence[TableConfig],
        layouts: Sequence[Layout],
        optimizer: RowOptimizer | None,
        kernels: Pooling,
        weighted: bool,
        policy: str,
    ) -> None:
        super().__init__()
        self._make_plain = partial(copy.deepcopy, _without_memory(collection))  # no module: it has no state
        sources = [collection.get_parameter(f"{tables}.{config.name}.weight") for config in configs]
        plan = self._plan = make_plan(
            [
                Table(config.name, layout, str(source.dtype).removeprefix("torch."), tuple(config.feature_names))
                for config, layout, source in zip(configs, layouts, sources, strict=True)
            ]
        )
        device = torch.device(layouts[0].mesh.device_type)
        stacks = make_stacks(plan, collectives.rank(), device)
        self._optimizer = optimizer
        self._engine = Engine(
            tables, plan, stacks, kernels, self._accumulate if optimizer is None else self._step, weighted
        )
        modules = {}
        for number, (table, source) in enumerate(zip(plan.tables, sources, strict=True)):
            for block in plan.blocks_of(collectives.rank(), number):
                _fill(stacks[block.stack].weight[block.first : block.first + len(block.rows)], block, source.detach())
            weight = self._as_dtensor(number, [stack.weight for stack in stacks])
            modules[table.name] = _TableModule(weight, requires_grad=optimizer is None)
        for number, config in enumerate(configs):
            if config.max_norm is not None:
                self._engine.limit_norm(number, config.max_norm)
        self.add_module(tables, nn.ModuleDict(modules))
        padding = [-1 if config.padding_idx is None else config.padding_idx for config in configs]
        self._rules = IdRules(
            torch.tensor([plan.tables[t].layout.shape[0] for t in plan.table_of], device=device),
            (policy,) * len(plan.features),
            tuple(padding[t] for t in plan.table_of),
        )

    @property
    def _dtypes(self) -> list[torch.dtype]:
        """Of the table of each feature."""
        return [getattr(torch, self._plan.tables[t].dtype) for t in self._plan.table_of]

    def unshard(self) -> nn.Module:
        """The plain collection with the full tables, on every rank. All ranks have to call it."""
        plain = self._make_plain().to_empty(device=self._engine.stacks[0].weight.device)
        tables: dict[str, DTensor] = self.state_dict()
        plain.load_state_dict({name: value.full_tensor() for name, value in tables.items()})
        return plain

    def _batch(self, features: JaggedIds) -> Batch:
        """The batch in the order of the features of the plan."""
        keys = list(features.keys())
        missing = [name for name in self._plan.features if name not in keys]
        if missing:
            raise IdTypeError(f"The input has no feature {missing[0]!r}; it has {', '.join(map(repr, keys))}.")
        if keys != list(self._plan.features):
            features = features.permute([keys.index(name) for name in self._plan.features])
        weights = features.weights_or_none() if self._engine.weighted else None
        if self._engine.weighted and weights is None:
            raise IdTypeError("The collection is weighted, but the input has no weights.")
        if weights is not None and weights.requires_grad and torch.is_grad_enabled():
            raise IdTypeError("A sharded collection has no gradients for weights of ids. Fix: weights.detach().")
        return make_batch(features.values(), features.lengths(), weights, features.stride_per_key())

    def _results(self, outgoing: Outgoing, verdict: Verdict) -> Tensor:
        """The results of a request, flat, after messages 1 and 2."""
        return self._engine.results(self._engine.request(outgoing, verdict, self._check))

    def _as_dtensor(self, table: int, stacks: Sequence[Tensor]) -> DTensor:
        """A table, or its gradient, as a DTensor whose local tensor is a view of this rank's `stacks`."""
        name_of_dtype, layout = self._plan.tables[table].dtype, self._plan.tables[table].layout
        local = self._engine.rows_of(table, stacks).view(layout.local_shape(collectives.rank()))
        local = local.to(getattr(torch, name_of_dtype))  # a rank without rows has some stack
        return DTensor.from_local(local, layout.mesh, layout.placements, run_check=False, shape=layout.shape)

    def _step(self, gradients: Gradients) -> None:
        """Update the rows that were looked up."""
        assert self._optimizer is not None
        for stack, (requests, grad) in zip(self._engine.stacks, gradients, strict=True):
            stack.step += 1
            self._optimizer(stack, requests.rows, requests.offsets, grad, requests.weights)

    def _accumulate(self, gradients: Gradients) -> None:
        """Add to the gradients of the parameters."""
        stacks = self._engine.stacks
        dense = [dense_gradient(*of_stack, stack.weight) for stack, of_stack in zip(stacks, gradients, strict=True)]
        for table, parameter in enumerate(self.parameters()):
            grad = self._as_dtensor(table, dense)
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad

    def _check(self, verdicts: Sequence[Sequence[int]]) -> None:
        raise_bad_ids(self._plan, verdicts)


class ShardedEmbeddingBagCollection(_Sharded):
    """An EmbeddingBagCollection whose tables are sharded; made by `shard_embeddings`."""

    def __init__(
        self,
        collection: nn.Module,
        configs: Sequence[TableConfig],
        layouts: Sequence[Layout],
        optimizer: RowOptimizer | None,
        kernels: Pooling,
        policy: str,
        weighted: bool,
        means: Sequence[bool],
    ) -> None:
        super().__init__(collection, "embedding_bags", configs, layouts, optimizer, kernels, weighted, policy)
        self._pooling = PoolingChoice()
        self._means = [means[t] for t in self._plan.table_of]

    def forward(self, features: JaggedIds) -> PooledRows:
        """The sums or means of this rank's bags. All ranks have to call it, each with its own batch.

        Raises:
            IdError: an id outside its table, on some rank; the same error on all.
        """
        batch, verdict = self._rules.apply(self._batch(features))
        index = self._engine.batch_index(batch.bags)
        outgoing = self._pooling.request(index, batch)
        flat = self._results(outgoing, verdict)
        if any(self._means):
            of_feature = torch.tensor(self._means, device=flat.device)[index.feature_of_bag]
            divisors = torch.where(of_feature, batch.counted.clamp(min=1), 1)
            flat = (flat.view(-1, self._plan.unit) / divisors[index.bag_of_unit, None]).view(-1)
        flat = flat.to(reduce(torch.promote_types, self._dtypes))
        names, dims = self._plan.features, self._plan.dims
        if len(set(batch.bags)) == 1:
            return PooledRows(names, dims, flat.view(batch.bags[0], sum(dims)))
        return PooledRows(names, tuple(n * dim for n, dim in zip(batch.bags, dims, strict=True)), flat)


class ShardedEmbeddingCollection(_Sharded):
    """An EmbeddingCollection whose tables are sharded; made by `shard_embeddings`."""

    def __init__(
        self,
        collection: nn.Module,
        configs: Sequence[TableConfig],
        layouts: Sequence[Layout],
        optimizer: RowOptimizer | None,
        kernels: Pooling,
        policy: str,
    ) -> None:
        super().__init__(collection, "embeddings", configs, layouts, optimizer, kernels, False, policy)
        self._rules = replace(self._rules, padding=())
        for table, config in enumerate(configs):
            if config.padding_idx is not None:
                self._engine.freeze(table, config.padding_idx)

    def forward(self, features: JaggedIds) -> dict[str, RowsOfIds]:
        """The row of every id of this rank's batch. All ranks have to call it, each with its own batch.

        Raises:
            IdError: an id outside its table, on some rank; the same error on all.
        """
        given = self._batch(features)
        batch, verdict = self._rules.apply(given)
        routes, feature_of = self._engine.routes, self._engine.batch_index(batch.bags).feature_of_bag
        feature, dims = feature_of[batch.bag], routes.dims[feature_of[given.bag]]
        first = dims.cumsum(0) - dims
        num_units, first = int(dims.sum()), first if batch.kept is None else first[batch.kept]
        outgoing = request_rows(routes, distinct_rows(routes, batch.values, feature), feature, first, num_units)
        flat = self._results(outgoing, verdict)
        sizes = [int(n.sum()) for n in given.lengths.split(given.bags)]
        parts = flat.split([n * dim for n, dim in zip(sizes, self._plan.dims, strict=True)])
        return {
            name: RowsOfIds(part.view(-1, dim).to(dtype), lengths)
            for name, part, dim, dtype, lengths in zip(
                self._plan.features,
                parts,
                self._plan.dims,
                self._dtypes,
                given.lengths.split(given.bags),
                strict=True,
            )
        }


def shard_embeddings(
    collection: nn.Module,
    plan: Mapping[str, Placements],
    mesh: Mesh | DeviceMesh,
    optimizer: RowOptimizer | None = None,
    *,
    kernels: Pooling = torch_kernels,
    bad_ids: Policy = "error",
) -> ShardedEmbeddingBagCollection | ShardedEmbeddingCollection:
    """The collection with its tables sharded over `mesh`. A training step has three collectives for all tables.

    Args:
        collection: an `EmbeddingBagCollection` or `EmbeddingCollection` with the same values on all ranks.
        plan: the placements of each table by its name; tables that it does not name are replicated.
        mesh: all ranks that call the collection, each with its own batch.
        optimizer: updates the rows that a batch has looked up, in its backward. None: the parameters get dense
            gradients, for any optimizer of `torch.optim`.
        kernels: of local lookups.
        bad_ids: what becomes of ids outside their table: an IdError, the nearest valid id ("clip"), the remainder
            ("hash"), or a row of zeros ("zero").

    Raises:
        PlanError: a plan that does not fit the collection.
    """
    of_bags = getattr(collection, "embedding_bag_configs", None)
    configs_of = of_bags or getattr(collection, "embedding_configs", None)
    if configs_of is None:
        raise PlanError(f"shard_embeddings takes a collection of tables, got {type(collection).__name__}.")
    configs: Sequence[TableConfig] = configs_of()
    names = [config.name for config in configs]
    unknown = [name for name in plan if name not in names]
    if unknown:
        raise PlanError(f"The plan has {unknown[0]!r}, but the tables are {', '.join(names)}.")
    where = collectives.as_mesh(mesh)
    layouts = [
        Layout(where, as_placements(where, plan.get(c.name)), (c.num_embeddings, c.embedding_dim)) for c in configs
    ]
    if of_bags is None:
        return ShardedEmbeddingCollection(collection, configs, layouts, optimizer, kernels, bad_ids)
    means, weighted = (
        [config.pooling.name == "MEAN" for config in of_bags()],
        cast(BagCollection, collection).is_weighted(),
    )
    return ShardedEmbeddingBagCollection(collection, configs, layouts, optimizer, kernels, bad_ids, weighted, means)


def _without_memory(module: nn.Module) -> nn.Module:
    """A copy of a module whose parameters are on the meta device."""
    memo = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in module.parameters()}
    return copy.deepcopy(module, memo)


def _fill(rows: Tensor, block: Block, full: Tensor) -> None:
    """Copy a block of a table; one without memory gets the values of a new table."""
    if full.is_meta:
        generator = torch.Generator(rows.device).manual_seed(hash((block.table, block.rows.start, block.cols.start)))
        bound = 1 / sqrt(full.shape[0])
        rows.uniform_(-bound, bound, generator=generator)
    else:
        rows.copy_(full[block.rows.start : block.rows.stop, block.cols.start : block.cols.stop])
