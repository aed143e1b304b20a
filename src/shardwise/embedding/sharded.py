"""Sharded collections: `shard_embeddings`."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, reduce
from typing import NoReturn

import torch
from torch import Tensor, nn

from shardwise import collectives
from shardwise.collectives import DeviceMesh
from shardwise.embedding.batch import NO_BATCH, Batch, IdRules, Verdict, features_of
from shardwise.embedding.collections import (
    BAGS,
    ROWS,
    EmbeddingBagCollection,
    EmbeddingCollection,
    Tables,
    TableWeight,
    pooled,
    rows_by_feature,
)
from shardwise.embedding.configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from shardwise.embedding.exchange.engine import Arrived, Engine, Gradients, MessageDtypes
from shardwise.embedding.exchange.hot_rows import HotRows, HotRowsReport, check_hot_rows
from shardwise.embedding.exchange.owner import dense_gradient, joined
from shardwise.embedding.exchange.pooling import PoolingChoice
from shardwise.embedding.exchange.requests import Outgoing, request_bags
from shardwise.embedding.exchange.rows import distinct_rows, request_rows
from shardwise.embedding.exchange.stacks import make_stacks
from shardwise.embedding.fused import FusedOptimizer, layout_of_rows
from shardwise.embedding.jagged import JaggedTensor, KeyedTensor
from shardwise.embedding.jagged.keyed_jagged_tensor import JaggedFeatures
from shardwise.embedding.kernels import Kernels, fastest_kernels
from shardwise.embedding.new_rows import fill, new_rows, rows_of_full
from shardwise.embedding.optimizers import RowOptimizer
from shardwise.embedding.plan import Table, make_plan
from shardwise.embedding.sent_batch import ReadyBatch, SentBatch, versions_of
from shardwise.errors import IdError, IdTypeError, PlanError, RemoteRankError, ShardwiseError
from shardwise.layout import Layout, Mesh, Placements, as_placements, checked
from shardwise.tensor import DTensor

Optimizers = Sequence[RowOptimizer]  # of each table


class _ViewOfStack(TableWeight):
    """A parameter that stays in the memory of its stack."""

    def __init__(self, name: str, weight: DTensor, requires_grad: bool) -> None:
        super().__init__(weight, requires_grad)
        self.name = name
        with torch._C.DisableTorchFunctionSubclass():
            self.first_place = self.place()

    def place(self) -> tuple[int, torch.dtype] | None:
        """The address of this rank's elements, and their dtype; call it where DTensors are plain tensors."""
        weight = self._parameters["weight"]
        return None if weight is None else (torch._C.TensorBase.data_ptr(weight), weight.dtype)

    def _load_from_state_dict(
        self, state_dict: dict[str, object], prefix: str, local_metadata: dict[str, object], *rest: object
    ) -> None:
        """Copy, also with `assign=True`."""
        copies = local_metadata | {"assign_to_params_buffers": False}
        super()._load_from_state_dict(state_dict, prefix, copies, *rest)


class _Sharded(nn.Module):
    """What both sharded collections share: tables that are views of stacks, and the exchange."""

    def __init__(
        self,
        kind: str,
        collection: EmbeddingBagCollection | EmbeddingCollection,
        configs: Sequence[EmbeddingConfig],
        layouts: Sequence[Layout],
        optimizers: Optimizers | None,
        kernels: Kernels | None,
        dtypes: MessageDtypes,
        weighted: bool,
    ) -> None:
        super().__init__()
        sources = [collection.get_parameter(f"{kind}.{config.name}.weight").detach() for config in configs]
        distinct = [] if optimizers is None else list(dict.fromkeys(optimizers))
        of_table = [0] * len(configs) if optimizers is None else [distinct.index(one) for one in optimizers]
        plan = self._plan = make_plan(
            [
                Table(c.name, layout, str(source.dtype).removeprefix("torch."), tuple(c.feature_names), group)
                for c, layout, source, group in zip(configs, layouts, sources, of_table, strict=True)
            ]
        )
        device = torch.device(layouts[0].mesh.device_type)
        stacks = make_stacks(plan, collectives.rank(), device, kernels or fastest_kernels(device))
        self._kind, self._weighted = kind, weighted
        update = self._step if distinct else self._add_to_grad
        self._collected: list[Gradients] | None = None
        self._engine = Engine(kind, plan, stacks, update, weighted, dtypes)
        tables = []
        seed = _seed(plan.ranks) if any(source.is_meta for source in sources) else 0
        for number, (config, source) in enumerate(zip(configs, sources, strict=True)):
            rows = new_rows(config, seed + number) if source.is_meta else rows_of_full(source)
            for block in plan.blocks_of(collectives.rank(), number):
                fill(stacks[block.stack].weight[block.first : block.first + len(block.rows)], block, rows)
            weight = self._as_dtensor(number, [stack.weight for stack in stacks])
            tables.append(_ViewOfStack(config.name, weight, requires_grad=not distinct))
            if config.max_norm is not None:
                self._engine.limit_norm(number, config.max_norm)
        self.add_module(kind, Tables({table.name: table for table in tables}))
        self._tables = tuple(tables)
        self._engine.parameters = () if distinct else tuple(table.weight for table in tables)
        self.fused_optimizer = self._fused_optimizer(kind, distinct) if distinct else None
        self._features = features_of(configs)
        self._rules = IdRules(self._features, skips_padding=kind == BAGS)
        self.prefetched: ReadyBatch | None = None  # `prefetch` sets it

    def _fused_optimizer(self, kind: str, optimizers: Sequence[RowOptimizer]) -> FusedOptimizer:
        for stack in self._engine.stacks:
            stack.states = optimizers[stack.key.group].new_states(stack.weight)
        groups = range(len(optimizers))
        tables = [[t for t, table in enumerate(self._plan.tables) if table.group == group] for group in groups]
        names = [[f"{kind}.{self._plan.tables[t].name}.weight" for t in of_group] for of_group in tables]
        parameters = [[self.get_parameter(name) for name in of_group] for of_group in names]
        order = [t for of_group in tables for t in of_group]
        return FusedOptimizer(optimizers, parameters, names, lambda number: self._states(order[number], optimizers))

    def _states(self, number: int, optimizers: Sequence[RowOptimizer]) -> dict[str, DTensor]:
        """The states of a table as DTensors, which are views of those of the stacks."""
        table, rank, stacks = self._plan.tables[number], collectives.rank(), self._engine.stacks
        optimizer = optimizers[table.group]
        found = {}
        for name in (*optimizer.of_elements, *optimizer.of_rows):
            layout = table.layout if name in optimizer.of_elements else layout_of_rows(table.layout, table.name)
            nothing = torch.zeros(0, 0, device=stacks[0].weight.device)  # of a group without the state
            local = self._engine.rows_of(number, [stack.states.get(name, nothing) for stack in stacks])
            local = local.view(layout.local_shape(rank))
            found[name] = DTensor.from_local(local, layout.mesh, layout.placements, run_check=False, shape=layout.shape)
        return found

    @cached_property
    def _dtypes(self) -> list[torch.dtype]:
        """Of the table of each feature."""
        return [getattr(torch, self._plan.tables[t].dtype) for t in self._plan.table_of]

    def unshard(self) -> EmbeddingBagCollection | EmbeddingCollection:
        """The plain collection with the full tables, on every rank. All ranks have to call it."""
        tables: dict[str, DTensor] = self.state_dict()
        plain = self._plain()
        plain.load_state_dict({name: value.full_tensor() for name, value in tables.items()}, assign=True)
        return plain

    def _plain(self) -> EmbeddingBagCollection | EmbeddingCollection:
        """On the meta device."""
        raise NotImplementedError

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise PlanError(
            "A sharded collection has no copy, because its tables are views of shared memory. "
            "Fix: shard_embeddings(collection.unshard(), …)."
        )

    def _batch(self, features: JaggedFeatures) -> tuple[Batch, ShardwiseError | None]:
        """The ids of a batch; none if it is an error, which is raised after message 1, when all ranks know of it."""
        device = self._engine.trigger.device
        try:
            self._check_tables()
            batch = self._features.batch(features, self._weighted, device)
            self._check_weights(batch)
        except ShardwiseError as error:
            return self._features.no_batch(device), error
        return batch, None

    def _check_weights(self, batch: Batch) -> None:
        if batch.weights is not None and batch.weights.requires_grad and torch.is_grad_enabled():
            raise IdTypeError("A sharded collection has no gradients for weights of ids. Fix: weights.detach().")

    def _check_tables(self) -> None:
        """Whether the tables are still views of the stacks.

        Raises:
            PlanError: a table was replaced.
        """
        with torch._C.DisableTorchFunctionSubclass():  # DTensors show no addresses
            for table in self._tables:
                if table.place() != table.first_place:
                    raise PlanError(
                        f"Table {table.name} was moved, converted or replaced (to(), half(), to_empty(), .data =), "
                        f"but a sharded collection looks up rows in memory of its own.\n"
                        f"  Fix: change values by copy_() or load_state_dict(); convert before shard_embeddings."
                    )

    def _lookup(self, features: JaggedFeatures) -> tuple[Batch, Batch, Tensor]:
        """The batch, its valid ids, and the results, flat, after messages 1 and 2."""
        ready = self._take_prefetched(features)
        if ready is None:
            sent = self.send(features)
            ready = self.receive(sent, self.arrive(sent))
        if ready.error is not None:
            raise ready.error
        assert ready.requested is not None
        return ready.sent.given, ready.sent.batch, self._engine.results(ready.requested)

    def _outgoing(self, given: Batch, batch: Batch) -> Outgoing:
        """What message 1 of a batch requests; `batch` has its valid ids."""
        raise NotImplementedError

    # ---- for `prefetch` ----

    def feature_names(self) -> tuple[str, ...]:
        """The features that a batch needs."""
        return self._features.names

    def send(self, features: JaggedFeatures, ahead: int = 0) -> SentBatch:
        """Start message 1, `ahead` batches before the lookup."""
        given, error = self._batch(features)
        batch, verdict = self._rules.apply(given)
        versions = versions_of(features) if ahead and error is None else ()
        requesting = self._engine.start(self._outgoing(given, batch), NO_BATCH if error else verdict, ahead)
        return SentBatch(features, versions, given, batch, error, self._engine, requesting)

    def send_no_batch(self, verdict: Verdict, ahead: int) -> SentBatch:
        """Start message 1 of a rank whose `verdict` says why it has no batch."""
        batch = self._features.no_batch(self._engine.trigger.device)
        outgoing = request_bags(self._engine.batch_index(batch.bags), batch)
        requesting = self._engine.start(outgoing, verdict, ahead)
        return SentBatch(None, (), batch, batch, None, self._engine, requesting)

    def arrive(self, sent: SentBatch) -> Arrived:
        """Wait for message 1 of all ranks."""
        return sent.engine.arrive(sent.requesting)

    def receive(self, sent: SentBatch, arrived: Arrived) -> ReadyBatch:
        """Finish message 1. If the batch of any rank is an error, all ranks get one."""
        error = sent.error
        try:
            self._rules.raise_for(arrived.verdicts, self._plan.ranks)
        except (IdError, RemoteRankError) as of_all:
            error = error or of_all
        return ReadyBatch(sent, None if error else sent.engine.finish(arrived), error)

    def _take_prefetched(self, features: JaggedFeatures) -> ReadyBatch | None:
        """The prefetched batch if it is `features`, once.

        Raises:
            IdTypeError: it was changed after its ids were sent, or its weights need gradients.
        """
        ready = self.prefetched
        if ready is None or ready.sent.features is not features or ready.sent.engine is not self._engine:
            return None
        self.prefetched = None
        self._check_tables()
        if ready.error is None:
            self._check_weights(ready.sent.given)
            ready.sent.check_unchanged()
        return ready

    def _as_dtensor(self, table: int, stacks: Sequence[Tensor]) -> DTensor:
        """A table, or its gradient, as a DTensor whose local tensor is a view of this rank's `stacks`."""
        name_of_dtype, layout = self._plan.tables[table].dtype, self._plan.tables[table].layout
        local = self._engine.rows_of(table, stacks).view(layout.local_shape(collectives.rank()))
        local = local.to(getattr(torch, name_of_dtype))  # a rank without rows has some stack
        return DTensor.from_local(local, layout.mesh, layout.placements, run_check=False, shape=layout.shape)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """All backwards in the block are one step: rows are updated when it ends, with the sums of their gradients.

            with sharded.accumulate():
                for part in parts:
                    loss_of(sharded(part)).backward()

        Until then ranks keep the gradients that they are sent. If the block raises, nothing is updated. Without an
        optimizer, gradients are added in `.grad` in any case.
        """
        if self._collected is not None:  # part of another such block
            yield
            return
        self._collected = []
        try:
            yield
            collected = self._collected
        finally:
            self._collected = None
        if collected:
            self._step(joined(collected))

    def _step(self, gradients: Gradients) -> None:
        """Update the rows that were looked up."""
        assert self.fused_optimizer is not None
        if self._collected is not None:
            self._collected.append([(requests, grad.clone()) for requests, grad in gradients])  # of a buffer
            return
        optimizers = self.fused_optimizer.begin_step()
        for stack, (requests, grad) in zip(self._engine.stacks, gradients, strict=True):
            optimizer, step = optimizers[stack.key.group]
            optimizer(stack, requests.rows, requests.offsets, grad, requests.weights, step)

    def _add_to_grad(self, gradients: Gradients) -> None:
        """Add to the gradients of the parameters that are trained."""
        stacks = self._engine.stacks
        dense = [dense_gradient(*of_stack, stack.weight) for stack, of_stack in zip(stacks, gradients, strict=True)]
        for table, parameter in enumerate(self._engine.parameters):
            if not parameter.requires_grad:
                continue
            grad = self._as_dtensor(table, dense)
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad


class ShardedEmbeddingBagCollection(_Sharded):
    """An EmbeddingBagCollection whose tables are sharded; made by `shard_embeddings`."""

    def __init__(
        self,
        collection: EmbeddingBagCollection,
        layouts: Sequence[Layout],
        optimizers: Optimizers | None,
        kernels: Kernels | None,
        dtypes: MessageDtypes,
        hot_rows: int,
    ) -> None:
        configs = self._configs = collection.embedding_bag_configs()
        super().__init__(BAGS, collection, configs, layouts, optimizers, kernels, dtypes, collection.is_weighted())
        sizes, own = (dtypes.forward.itemsize, dtypes.backward.itemsize), self._plan.ranks.index(collectives.rank())
        self._hot_rows = HotRows(self._engine.routes, hot_rows, sizes, own) if hot_rows else None
        self._pooling = PoolingChoice(dtypes.forward.itemsize, self._hot_rows)
        self._means = [c.pooling is PoolingType.MEAN for c in configs for _ in c.feature_names]

    def _plain(self) -> EmbeddingBagCollection:
        return EmbeddingBagCollection(self._configs, self._weighted, device="meta")

    def _outgoing(self, given: Batch, batch: Batch) -> Outgoing:
        return self._pooling.request(self._engine.batch_index(batch.bags), batch)

    def embedding_bag_configs(self) -> tuple[EmbeddingBagConfig, ...]:
        """Those of the tables, in their order."""
        return self._configs

    def is_weighted(self) -> bool:
        """Whether rows are multiplied by the weights of the input."""
        return self._weighted

    def hot_rows_report(self) -> HotRowsReport:
        """What `hot_rows` of `shard_embeddings` saved on this rank.

        Raises:
            PlanError: there are none.
        """
        if self._hot_rows is None:
            raise PlanError("The collection has no hot rows. Fix: shard_embeddings(…, hot_rows=1 << 20).")
        return self._hot_rows.report

    def forward(self, features: JaggedFeatures) -> KeyedTensor:
        """The sums or means of this rank's bags. All ranks have to call it, each with its own batch.

        Returns:
            [bags, columns of all features]; flat, if features have different numbers of bags.

        Raises:
            IdError: an id outside its table, on some rank; the same error on all.
            IdTypeError: what this rank passes is no batch of the collection; other ranks raise a RemoteRankError.
        """
        _, batch, flat = self._lookup(features)
        if any(self._means):
            index = self._engine.batch_index(batch.bags)
            of_feature = torch.tensor(self._means, device=flat.device)[index.feature_of_bag]
            divisors = torch.where(of_feature, batch.counted.clamp(min=1), 1)
            flat = (flat.view(-1, self._plan.unit) / divisors[index.bag_of_unit, None]).view(-1)
        flat = flat.to(reduce(torch.promote_types, self._dtypes))
        return pooled(self._features, batch.bags, flat)


class ShardedEmbeddingCollection(_Sharded):
    """An EmbeddingCollection whose tables are sharded; made by `shard_embeddings`."""

    def __init__(
        self,
        collection: EmbeddingCollection,
        layouts: Sequence[Layout],
        optimizers: Optimizers | None,
        kernels: Kernels | None,
        dtypes: MessageDtypes,
    ) -> None:
        configs = self._configs = collection.embedding_configs()
        super().__init__(ROWS, collection, configs, layouts, optimizers, kernels, dtypes, weighted=False)
        for table, config in enumerate(configs):
            if config.padding_idx is not None:
                self._engine.freeze(table, config.padding_idx)

    def _plain(self) -> EmbeddingCollection:
        return EmbeddingCollection(self._configs, device="meta")

    def _outgoing(self, given: Batch, batch: Batch) -> Outgoing:
        routes, feature_of = self._engine.routes, self._engine.batch_index(batch.bags).feature_of_bag
        feature, dims = feature_of[batch.bag], routes.dims[feature_of[given.bag]]
        first = dims.cumsum(0) - dims
        num_units, first = int(dims.sum()), first if batch.kept is None else first[batch.kept]
        return request_rows(routes, distinct_rows(routes, batch.values, feature), feature, first, num_units)

    def embedding_configs(self) -> tuple[EmbeddingConfig, ...]:
        """Those of the tables, in their order."""
        return self._configs

    def forward(self, features: JaggedFeatures) -> dict[str, JaggedTensor]:
        """The row of every id of this rank's batch. All ranks have to call it, each with its own batch.

        Returns:
            For each feature values of [ids, columns], with the lengths of the input.

        Raises:
            IdError: an id outside its table, on some rank; the same error on all.
            IdTypeError: what this rank passes is no batch of the collection; other ranks raise a RemoteRankError.
        """
        given, _, flat = self._lookup(features)
        lengths = given.lengths.split(given.bags)
        sizes = [n * dim for n, dim in zip(given.sizes, self._plan.dims, strict=True)]
        parts = [
            part.view(-1, dim).to(dtype)
            for part, dim, dtype in zip(flat.split(sizes), self._plan.dims, self._dtypes, strict=True)
        ]
        return rows_by_feature(self._features, parts, lengths)


@checked
def shard_embeddings(
    collection: EmbeddingBagCollection | EmbeddingCollection,
    plan: Mapping[str, Placements],
    mesh: Mesh | DeviceMesh,
    optimizer: RowOptimizer | Mapping[str, RowOptimizer] | None = None,
    *,
    forward_dtype: torch.dtype = torch.float32,
    backward_dtype: torch.dtype = torch.float32,
    kernels: Kernels | None = None,
    hot_rows: int = 0,
) -> ShardedEmbeddingBagCollection | ShardedEmbeddingCollection:
    """The collection with its tables sharded over `mesh`. A training step has three collectives for all tables.

        sharded = shard_embeddings(collection, {"users": Shard(0), "items": Shard(1)}, mesh, RowWiseAdagrad(lr=0.1))

    Args:
        collection: has the same values on all ranks; or is on the meta device, and is initialised with random numbers
            that do not depend on the layout, from the generator of the first rank.
        plan: the placements of each table by its name; tables that it does not name are replicated.
        mesh: all ranks that call the collection, each with its own batch.
        optimizer: updates the rows that a batch has looked up, in its backward; or one for each table, by name. The
            result's `fused_optimizer` has its learning rate and states. None: the parameters get dense gradients, for
            any optimizer of `torch.optim`.
        forward_dtype, backward_dtype: in which results, and their gradients, are sent: float32, bfloat16 or float16.
            Each is rounded once, also what a rank sends to itself, and summed in float32.
        kernels: of local lookups and updates; None: the fastest that are installed.
        hot_rows: bytes of a message. Each rank requests the rows that are in many of its bags once, and adds them
            itself: the most frequent ones, as many as save bytes, and at most these. Only for pooled tables without
            weights of ids. 0: none.

    Raises:
        ConfigError: another dtype, or negative `hot_rows`.
        PlanError: a plan, optimizers or `hot_rows` that do not fit the collection.
    """
    dtypes = MessageDtypes(forward_dtype, backward_dtype)
    check_hot_rows(hot_rows, isinstance(collection, EmbeddingBagCollection), collection._weighted)
    configs = (
        collection.embedding_bag_configs()
        if isinstance(collection, EmbeddingBagCollection)
        else collection.embedding_configs()
    )
    names = [config.name for config in configs]
    unknown = [name for name in plan if name not in names]
    if unknown:
        raise PlanError(f"The plan has {unknown[0]!r}, but the tables are {', '.join(names)}.")
    if isinstance(optimizer, Mapping) and set(optimizer) != set(names):
        odd = min(set(optimizer) ^ set(names))
        raise PlanError(
            f"optimizer has {'no' if odd in names else 'an'} entry {odd!r}; the tables are {', '.join(names)}."
        )
    optimizers = [optimizer[n] if isinstance(optimizer, Mapping) else optimizer for n in names] if optimizer else None
    where = collectives.as_mesh(mesh)
    layouts = [
        Layout(where, as_placements(where, plan.get(c.name)), (c.num_embeddings, c.embedding_dim)) for c in configs
    ]
    if isinstance(collection, EmbeddingBagCollection):
        return ShardedEmbeddingBagCollection(collection, layouts, optimizers, kernels, dtypes, hot_rows)
    return ShardedEmbeddingCollection(collection, layouts, optimizers, kernels, dtypes)


def _seed(ranks: Sequence[int]) -> int:
    """A seed of torch's generator on the first rank, on all of them."""
    drawn = torch.randint(1 << 62, (1,)).to(collectives.message_device(tuple(ranks)))
    return int(collectives.broadcast(drawn, 1, min(ranks), tuple(ranks)))
