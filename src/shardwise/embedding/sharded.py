"""Sharded collections; `shard_embeddings` (sharding.py) makes them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import NoReturn

import torch
from torch import Tensor, nn

from shardwise import collectives
from shardwise.embedding.batch import NO_BATCH, Batch, IdRules, Verdict, features_of
from shardwise.embedding.captured import look_up
from shardwise.embedding.collections import (
    BAGS,
    ROWS,
    EmbeddingBagCollection,
    EmbeddingCollection,
    Tables,
    check_no_gradient,
    pooled,
    rows_by_feature,
)
from shardwise.embedding.configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType, resized
from shardwise.embedding.exchange.engine import Arrived, Engine, Gradients, MessageDtypes
from shardwise.embedding.exchange.hot_rows import HotRows, HotRowsReport
from shardwise.embedding.exchange.owner import dense_gradient, joined
from shardwise.embedding.exchange.pooling import PoolingChoice
from shardwise.embedding.exchange.requests import Outgoing, request_bags
from shardwise.embedding.exchange.rows import distinct_rows, request_rows
from shardwise.embedding.exchange.stacks import Stack, make_stacks
from shardwise.embedding.exchange.weighted import needs_gradients, pool_weighted, request_weighted
from shardwise.embedding.fused import FusedOptimizer, layout_of_rows
from shardwise.embedding.jagged import JaggedTensor, KeyedTensor
from shardwise.embedding.jagged.keyed_jagged_tensor import JaggedFeatures
from shardwise.embedding.kernels import Kernels, fastest_kernels
from shardwise.embedding.new_rows import fill, new_rows, rows_of_full, seed_of_first
from shardwise.embedding.optimizers import RowOptimizer
from shardwise.embedding.plan import Plan, Table, make_plan
from shardwise.embedding.resizing import refuse_old_rows, resized_plan, resized_stacks
from shardwise.embedding.sent_batch import ReadyBatch, SentBatch, versions_of
from shardwise.embedding.view_of_stack import ViewOfStack
from shardwise.errors import ConfigError, IdError, PlanError, RemoteRankError, ShardwiseError
from shardwise.layout import Layout, Placements, checked
from shardwise.tensor import DTensor
from shardwise.trace.capture_hooks import RunsInReplays, tracing_paused

Optimizers = Sequence[RowOptimizer]  # of each table


class _Sharded(nn.Module, RunsInReplays):
    """What both sharded collections share: tables that are views of stacks, and the exchange."""

    _configs: tuple[EmbeddingConfig, ...]

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
        self._engine = self._new_engine(plan, stacks, configs, update, dtypes)
        tables = []
        seed = seed_of_first(plan.ranks) if any(source.is_meta for source in sources) else 0
        for number, (config, source) in enumerate(zip(configs, sources, strict=True)):
            rows = new_rows(config, seed + number) if source.is_meta else rows_of_full(source)
            for block in plan.blocks_of(collectives.rank(), number):
                fill(stacks[block.stack].weight[block.first : block.first + len(block.rows)], block, rows)
            weight = self._as_dtensor(number, [stack.weight for stack in stacks])
            tables.append(ViewOfStack(config.name, weight, requires_grad=not distinct))
        self.add_module(kind, Tables({table.name: table for table in tables}))
        self._tables = tuple(tables)
        self._engine.parameters = () if distinct else tuple(table.weight for table in tables)
        self.fused_optimizer = self._fused_optimizer(kind, distinct) if distinct else None
        self._set_configs(configs)
        self._dtypes = [getattr(torch, plan.tables[t].dtype) for t in plan.table_of]  # of the table of each feature
        self.prefetched: ReadyBatch | None = None  # `prefetch` sets it, and
        self.to_start: list[SentBatch] = []  # what is sent after the results of the next lookup

    def _set_configs(self, configs: Sequence[EmbeddingConfig]) -> None:
        self._configs, self._features = tuple(configs), features_of(configs)
        self._rules = IdRules(self._features, skips_padding=self._kind == BAGS)

    def _new_engine(
        self,
        plan: Plan,
        stacks: Sequence[Stack],
        configs: Sequence[EmbeddingConfig],
        update: Callable[[Gradients], None],
        dtypes: MessageDtypes,
    ) -> Engine:
        engine = Engine(self._kind, plan, stacks, update, self._weighted, dtypes)
        for table, config in enumerate(configs):
            if config.max_norm is not None:
                engine.limit_norm(table, config.max_norm)
            if config.padding_idx is not None and self._kind == ROWS:  # bags leave padding out
                engine.freeze(table, config.padding_idx)
        return engine

    @checked
    def resize_(self, sizes: Mapping[str, int], plan: Mapping[str, Placements] | None = None) -> None:
        """Give tables another number of rows, in place. All ranks have to call it.

            collection.resize_({"users": 1200, "items": 50}, plan={"items": Shard(0, (20, 30))})

        Rows that stay keep their values and optimizer states, and are sent to their new owners. New rows are those of a
        new table, as the plain collection makes them if it has the generator of the first rank; their states are zeros.
        Parameters and `fused_optimizer` are the same objects, and hyper-parameters and steps stay. An optimizer of
        `torch.optim` goes on with the new rows, if it has no states of the old ones.

        Args:
            sizes: rows by table.
            plan: new placements of some of these tables; needed for those in boxes, or whose `Shard(0)` has sizes.

        Raises:
            ConfigError: a table that is not there, no row, or a table with a gradient of its old rows.
            PlanError: placements that do not fit, or in `accumulate()`.
            MismatchError: ranks pass different arguments, or only some raise one of these. Nothing changes then.
        """
        given, old, engine = plan or {}, self._plan, self._engine
        refusal = self._refusal(sizes)
        facts = {
            "sizes": dict(sizes),
            "plan": {name: repr(placements) for name, placements in given.items()},
            "refused": str(refusal or ""),
        }
        collectives.agree("what resize_ gets", facts, old.ranks, "the same sizes, plan and gradients on all ranks.")
        if refusal is not None:
            raise refusal
        configs, changed = resized(self._configs, sizes), [t for t, c in enumerate(self._configs) if c.name in sizes]
        optimizers = [] if self.fused_optimizer is None else self.fused_optimizer.optimizers()
        new = resized_plan(old, configs, changed, given, optimizers)
        stacks = resized_stacks(old, new, engine.stacks, changed, configs, optimizers, seed_of_first(old.ranks))
        self._plan, self._engine = new, self._new_engine(new, stacks, configs, engine.update, engine.dtypes)
        self._engine.parameters, engine.update = engine.parameters, refuse_old_rows
        for number, table in enumerate(self._tables):
            table.move(self._as_dtensor(number, [stack.weight for stack in stacks]))
        if self.fused_optimizer is not None:
            order = self._tables_by_group(len(optimizers))
            self.fused_optimizer.replace_states(lambda number: self._states(order[number], optimizers))
        self._set_configs(configs)
        self._choose_requests()

    def _refusal(self, sizes: Mapping[str, int]) -> ShardwiseError | None:
        """Why this rank cannot resize tables; or None."""
        try:
            self._check_tables()
            if self._collected is not None:
                raise PlanError("resize_ in accumulate(): gradients wait there. Fix: resize_ after the block.")
            for table in self._tables:
                if table.name in sizes:
                    check_no_gradient(table.name, table.weight)
        except (ConfigError, PlanError) as error:
            return error
        return None

    def _choose_requests(self) -> None:
        """Begin to choose what is requested of the present engine."""

    def _tables_by_group(self, groups: int) -> list[int]:
        """The tables in the order of the fused optimizer."""
        return [t for group in range(groups) for t, table in enumerate(self._plan.tables) if table.group == group]

    def _fused_optimizer(self, kind: str, optimizers: Sequence[RowOptimizer]) -> FusedOptimizer:
        for stack in self._engine.stacks:
            stack.states = optimizers[stack.key.group].new_states(stack.weight)
        groups = range(len(optimizers))
        tables = [[t for t, table in enumerate(self._plan.tables) if table.group == group] for group in groups]
        names = [[f"{kind}.{self._plan.tables[t].name}.weight" for t in of_group] for of_group in tables]
        parameters = [[self.get_parameter(name) for name in of_group] for of_group in names]
        order = self._tables_by_group(len(optimizers))
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
        except ShardwiseError as error:
            return self._features.no_batch(device), error
        return batch, None

    def _check_tables(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # DTensors show no addresses
            for table in self._tables:
                table.check_place()

    def _exchange(self, features: JaggedFeatures, trigger: Tensor) -> tuple[SentBatch, Tensor]:
        """The batch, and the results, flat, after messages 1 and 2; backward runs if `trigger` requires grad."""
        ready = self._take_prefetched(features)
        if ready is None:
            sent = self.prepare(features)
            ready = self.receive(sent, self.arrive(sent))
        if ready.error is not None:
            raise ready.error
        assert ready.requested is not None
        flat = self._engine.results(ready.requested, trigger)
        for waiting in self.to_start:  # not earlier: on some backends, results would wait for it
            waiting.engine.start(waiting.requesting)
        self.to_start = []
        return ready.sent, flat

    def _outgoing(self, given: Batch, batch: Batch) -> Outgoing:
        """What message 1 of a batch requests; `batch` has its valid ids."""
        raise NotImplementedError

    # ---- for `prefetch` ----

    def feature_names(self) -> tuple[str, ...]:
        """The features that a batch needs."""
        return self._features.names

    def prepare(self, features: JaggedFeatures, ahead: int = 0) -> SentBatch:
        """Prepare message 1, `ahead` batches before the lookup."""
        given, error = self._batch(features)
        batch, verdict = self._rules.apply(given)
        versions = versions_of(features) if ahead and error is None else ()
        requesting = self._engine.prepare(self._outgoing(given, batch), NO_BATCH if error else verdict, ahead)
        return SentBatch(features, versions, given, batch, error, self._engine, requesting, needs_gradients(batch))

    def prepare_no_batch(self, verdict: Verdict, ahead: int) -> SentBatch:
        """Prepare message 1 of a rank whose `verdict` says why it has no batch."""
        batch = self._features.no_batch(self._engine.trigger.device)
        outgoing = request_bags(self._engine.batch_index(batch.bags), batch)
        requesting = self._engine.prepare(outgoing, verdict, ahead)
        return SentBatch(None, (), batch, batch, None, self._engine, requesting)

    def refuse(self, error: ShardwiseError) -> NoReturn:
        """Take part in a lookup without a batch, because of `error`; the other ranks raise a RemoteRankError."""
        with tracing_paused():
            self.arrive(self.prepare_no_batch(NO_BATCH, ahead=0))
        raise error

    def arrive(self, sent: SentBatch) -> Arrived:
        """Wait for message 1 of all ranks."""
        return sent.engine.arrive(sent.requesting)

    def receive(self, sent: SentBatch, arrived: Arrived) -> ReadyBatch:
        """Finish message 1, which has arrived. If the batch of any rank is an error, all ranks get one."""
        error = sent.error
        try:
            self._rules.raise_for(arrived.verdicts, self._plan.ranks)
        except (IdError, RemoteRankError) as of_all:
            error = error or of_all
        return ReadyBatch(sent, None if error else sent.engine.finish(arrived), error)

    def _take_prefetched(self, features: JaggedFeatures) -> ReadyBatch | None:
        """The prefetched batch if it is `features`, once.

        Raises:
            IdTypeError: it was changed after its ids were sent, or its weights need gradients since then.
        """
        ready = self.prefetched
        if ready is None or not ready.sent.is_of(features) or ready.sent.engine is not self._engine:
            return None
        self.prefetched = None
        self._check_tables()
        if ready.error is None:
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
            with torch._C._EnableTorchFunction():  # a replay is run where DTensors are plain tensors
                grad = self._as_dtensor(table, dense)
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad


class ShardedEmbeddingBagCollection(_Sharded):
    """An EmbeddingBagCollection whose tables are sharded; made by `shard_embeddings`."""

    _configs: tuple[EmbeddingBagConfig, ...]

    def __init__(
        self,
        collection: EmbeddingBagCollection,
        layouts: Sequence[Layout],
        optimizers: Optimizers | None,
        kernels: Kernels | None,
        dtypes: MessageDtypes,
        hot_rows: int,
    ) -> None:
        configs = collection.embedding_bag_configs()
        super().__init__(BAGS, collection, configs, layouts, optimizers, kernels, dtypes, collection.is_weighted())
        self._hot_bytes = hot_rows
        self._choose_requests()
        self._means = [c.pooling is PoolingType.MEAN for c in configs for _ in c.feature_names]

    def _choose_requests(self) -> None:
        dtypes, own = self._engine.dtypes, self._plan.ranks.index(collectives.rank())
        sizes = dtypes.forward.itemsize, dtypes.backward.itemsize
        self._hot_rows = HotRows(self._engine.routes, self._hot_bytes, sizes, own) if self._hot_bytes else None
        self._pooling = PoolingChoice(dtypes.forward.itemsize, self._hot_rows)

    def _plain(self) -> EmbeddingBagCollection:
        return EmbeddingBagCollection(self._configs, self._weighted, device="meta")

    def _outgoing(self, given: Batch, batch: Batch) -> Outgoing:
        index = self._engine.batch_index(batch.bags)
        return request_weighted(index, batch) if needs_gradients(batch) else self._pooling.request(index, batch)

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
        flat = look_up(self._look_up, features, self._engine.trigger_of_backward())
        return pooled(self._features, self._features.bags(features), flat)

    def _look_up(self, features: JaggedFeatures, trigger: Tensor) -> Tensor:
        """The sums or means, flat."""
        sent, flat = self._exchange(features, trigger)
        batch = sent.batch
        if sent.by_rows:
            flat = pool_weighted(batch, flat, self._plan.dims, self._dtypes)
        if any(self._means):
            index = self._engine.batch_index(batch.bags)
            of_feature = torch.tensor(self._means, device=flat.device)[index.feature_of_bag]
            divisors = torch.where(of_feature, batch.counted.clamp(min=1), 1)
            flat = (flat.view(-1, self._plan.unit) / divisors[index.bag_of_unit, None]).view(-1)
        return flat.to(reduce(torch.promote_types, self._dtypes))


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
        configs = collection.embedding_configs()
        super().__init__(ROWS, collection, configs, layouts, optimizers, kernels, dtypes, weighted=False)

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
        flat = look_up(self._look_up, features, self._engine.trigger_of_backward())
        lengths = self._features.lengths(features)
        counts = torch.stack([of_bags.sum() for of_bags in lengths]).tolist()
        sizes = [n * dim for n, dim in zip(counts, self._plan.dims, strict=True)]
        parts = [
            part.view(-1, dim).to(dtype)
            for part, dim, dtype in zip(flat.split(sizes), self._plan.dims, self._dtypes, strict=True)
        ]
        return rows_by_feature(self._features, parts, lengths)

    def _look_up(self, features: JaggedFeatures, trigger: Tensor) -> Tensor:
        """The rows of all ids, flat."""
        _, flat = self._exchange(features, trigger)
        return flat
