"""Sharded collections, and `shard_embeddings`, which makes them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import reduce
from typing import NoReturn

import torch
from torch import Tensor, nn

from shardwise import _collectives as collectives
from shardwise._collectives import DeviceMesh
from shardwise._layout import Layout, Mesh, Placements, as_placements, checked
from shardwise._tensor import DTensor
from shardwise._tensor.dispatch.hooks import expect_equal_options
from shardwise._tensor.dtensor import as_parameter, check_owners
from shardwise._torch_bridge.module_sharding import named_parameters, refuse_hooks
from shardwise._trace.capture_hooks import RunsInReplays, tracing_paused
from shardwise.embedding.batch import NO_BATCH, Batch, IdRules, Verdict, features_of
from shardwise.embedding.collections import (
    BAGS,
    ROWS,
    EmbeddingBagCollection,
    EmbeddingCollection,
    look_up,
    pooled,
    rows_by_feature,
)
from shardwise.embedding.configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType, resized
from shardwise.embedding.exchange.engine import (
    Engine,
    Exchange,
    Gradients,
    MessageDtypes,
    PendingRequest,
    ReceivedRequests,
)
from shardwise.embedding.exchange.owner import dense_gradient, joined, make_stacks
from shardwise.embedding.exchange.requests import (
    PoolingChoice,
    Request,
    needs_gradients,
    pool_weighted,
    request_bags,
    request_rows,
    request_weighted,
)
from shardwise.embedding.fused import FusedOptimizer, layout_of_rows
from shardwise.embedding.jagged import JaggedFeatures, JaggedTensor, version_of
from shardwise.embedding.kernels import Kernels, Stack, fastest_kernels
from shardwise.embedding.keyed_tensor import KeyedTensor
from shardwise.embedding.optimizers import RowOptimizer
from shardwise.embedding.plan import Plan, Table, make_plan
from shardwise.embedding.resizing import refuse_old_rows, resized_plan, resized_stacks
from shardwise.embedding.tables import (
    Tables,
    ViewOfStack,
    check_no_gradient,
    fill,
    new_rows,
    rows_of_full,
    seed_of_first,
)
from shardwise.errors import ConfigError, IdError, IdTypeError, PlanError, RemoteRankError, ShardwiseError

Optimizers = Sequence[RowOptimizer]  # of each table
Versions = tuple[tuple[Tensor, int], ...]  # tensors, and how often each had been changed in place


# ---- a batch between messages 1 and 2 -------------------------------------------------------------------------


@dataclass(frozen=True)
class PendingBatch:
    """A batch whose ids are on their way, or will be.

    Attributes:
        features: the input; None: the rank has none.
        versions: of a prefetched input.
        given: the ids of the input.
        batch: its valid ids.
        error: why the input is no batch; or None.
        by_rows: whether a row of each id was requested, because weights of ids need gradients.
    """

    features: JaggedFeatures | None
    versions: Versions
    given: Batch
    batch: Batch
    error: ShardwiseError | None
    engine: Engine
    request: PendingRequest
    by_rows: bool = False

    def is_of(self, features: JaggedFeatures) -> bool:
        """Whether `features` is the input, or has its tensors, as in a captured graph, and no gradients of weights."""
        own = self.features
        if own is features or own is None:
            return own is features
        keys = list(own.keys()), list(own.stride_per_key())
        if not isinstance(features, JaggedFeatures) or keys != (list(features.keys()), list(features.stride_per_key())):
            return False
        pairs = [(own.values(), features.values()), (own.lengths(), features.lengths())]
        weights = own.weights_or_none(), features.weights_or_none()
        if weights != (None, None):
            if weights[0] is None or weights[1] is None or weights[0].requires_grad or weights[1].requires_grad:
                return False
            pairs.append((weights[0], weights[1]))
        return all(x.dtype == y.dtype and x.is_set_to(y) for x, y in pairs)

    def check_unchanged(self) -> None:
        """Compare the input with what was sent.

        Raises:
            IdTypeError: it was changed in place, or its weights need gradients since then.
        """
        assert self.features is not None
        now = versions_of(self.features)
        same = [x is y and version == v for (x, version), (y, v) in zip(self.versions, now, strict=False)]
        if len(now) != len(self.versions) or not all(same):
            raise IdTypeError(
                "A prefetched batch was changed after its ids were sent. Nothing was looked up.\n"
                "  Fix: change batches in the loader, before prefetch gets them."
            )
        weights = self.features.weights_or_none() if self.given.weights is not None else None
        if weights is not None and weights.requires_grad and torch.is_grad_enabled() and not self.by_rows:
            raise IdTypeError(
                "The weights of ids of a prefetched batch need gradients since its ids were sent. Nothing was looked "
                "up.\n  Fix: requires_grad_() in the loader, before prefetch gets the batch."
            )


@dataclass(frozen=True)
class ReadyBatch:
    """A batch whose ids have arrived.

    Attributes:
        exchange: None if there is an error.
        error: the same on all ranks, or, where the batch of a rank is none, its own and a RemoteRankError on others.
    """

    pending: PendingBatch
    exchange: Exchange | None
    error: ShardwiseError | None


def versions_of(features: JaggedFeatures) -> Versions:
    """The versions of the ids, lengths and weights."""
    tensors = (features.values(), features.lengths(), features.weights_or_none())
    return tuple((x, version_of(x)) for x in tensors if x is not None)


# ---- collections ----------------------------------------------------------------------------------------------


class _Sharded(nn.Module, RunsInReplays):
    """Tables that are views of stacks, and the exchange: the base of both sharded collections."""

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
        parameters = [collection.get_parameter(f"{kind}.{config.name}.weight") for config in configs]
        sources = [parameter.detach() for parameter in parameters]
        distinct = [] if optimizers is None else list(dict.fromkeys(optimizers))
        of_table = [0] * len(configs) if optimizers is None else [distinct.index(one) for one in optimizers]
        plan = self._plan = make_plan(
            [
                Table(c.name, layout, str(source.dtype).removeprefix("torch."), tuple(c.feature_names), group)
                for c, layout, source, group in zip(configs, layouts, sources, of_table, strict=True)
            ]
        )
        self._compare_arguments(configs, optimizers, dtypes, weighted)
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
            tables.append(ViewOfStack(config.name, as_parameter(weight, parameters[number])))
            if distinct:
                tables[-1].weight.requires_grad_(False)
        self.add_module(kind, Tables({table.name: table for table in tables}))
        self._tables = tuple(tables)
        self._engine.parameters = () if distinct else tuple(table.weight for table in tables)
        self.fused_optimizer = self._fused_optimizer(kind, distinct) if distinct else None
        self._set_configs(configs)
        self._dtypes = [getattr(torch, plan.tables[t].dtype) for t in plan.table_of]  # of the table of each feature
        self.prefetched: ReadyBatch | None = None  # `prefetch` sets it, and
        self.to_start: list[PendingBatch] = []  # what is sent after the results of the next lookup

    def _compare_arguments(
        self,
        configs: Sequence[EmbeddingConfig],
        optimizers: Optimizers | None,
        dtypes: MessageDtypes,
        weighted: bool,
    ) -> None:
        """Raise a MismatchError if ranks make the collection of other tables, optimizers or messages."""
        facts = {"messages": str(dtypes), "is_weighted": str(weighted)}
        each: Sequence[RowOptimizer | None] = optimizers or [None] * len(configs)
        for config, table, one in zip(configs, self._plan.tables, each, strict=True):
            of_config = {field.name: str(getattr(config, field.name)) for field in fields(config)}
            of_config |= {"init_fn": "", "placements": str(table.layout), "optimizer": str(one)}
            facts |= {f"{config.name}.{name}": value for name, value in of_config.items()}
        fix = "the same collection, plan, optimizer and dtypes on all ranks."
        collectives.agree("what shard_embeddings gets", facts, self._plan.ranks, fix)

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
            stack.states = optimizers[stack.group].new_states(stack.weight)
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
        """The plain collection on the meta device."""
        raise NotImplementedError

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise PlanError(
            "A sharded collection cannot be deep-copied, because its tables are views of shared memory. "
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

    def _exchange(self, features: JaggedFeatures, trigger: Tensor) -> tuple[PendingBatch, Tensor]:
        """The batch, and the results, flat, after messages 1 and 2; backward runs if `trigger` requires grad."""
        ready = self._take_prefetched(features)
        if ready is None:
            pending = self.prepare(features)
            ready = self.receive(pending, self.arrive(pending))
        if ready.error is not None:
            raise ready.error
        assert ready.exchange is not None
        flat = self._engine.results(ready.exchange, trigger)
        for waiting in self.to_start:  # not earlier: on some backends, results would wait for it
            waiting.engine.start(waiting.request)
        self.to_start = []
        return ready.pending, flat

    def _request(self, given: Batch, batch: Batch) -> Request:
        """What message 1 of a batch requests; `batch` has its valid ids."""
        raise NotImplementedError

    # ---- for `prefetch` ----

    def feature_names(self) -> tuple[str, ...]:
        """The features that a batch needs."""
        return self._features.names

    def prepare(self, features: JaggedFeatures, ahead: int = 0) -> PendingBatch:
        """Prepare message 1, `ahead` batches before the lookup."""
        weights = [table.weight for table in self._tables]
        check_owners("a lookup", [weight._layout for weight in weights if isinstance(weight, DTensor)])
        given, error = self._batch(features)
        batch, verdict = self._rules.apply(given)
        versions = versions_of(features) if ahead and error is None else ()
        request = self._engine.prepare(self._request(given, batch), NO_BATCH if error else verdict, ahead)
        return PendingBatch(features, versions, given, batch, error, self._engine, request, needs_gradients(batch))

    def prepare_no_batch(self, verdict: Verdict, ahead: int) -> PendingBatch:
        """Prepare message 1 of a rank whose `verdict` says why it has no batch."""
        batch = self._features.no_batch(self._engine.trigger.device)
        request = request_bags(self._engine.batch_index(batch.bags), batch)
        return PendingBatch(None, (), batch, batch, None, self._engine, self._engine.prepare(request, verdict, ahead))

    def refuse(self, error: ShardwiseError) -> NoReturn:
        """Take part in a lookup without a batch, because of `error`; the other ranks raise a RemoteRankError."""
        with tracing_paused():
            self.arrive(self.prepare_no_batch(NO_BATCH, ahead=0))
        raise error

    def arrive(self, pending: PendingBatch) -> ReceivedRequests:
        """Wait for message 1 of all ranks."""
        return pending.engine.arrive(pending.request)

    def receive(self, pending: PendingBatch, received: ReceivedRequests) -> ReadyBatch:
        """Finish message 1, which has arrived. If the batch of any rank is an error, all ranks get one."""
        error = pending.error
        try:
            self._rules.raise_for(received.verdicts, self._plan.ranks)
        except (IdError, RemoteRankError) as of_all:
            error = error or of_all
        return ReadyBatch(pending, None if error else pending.engine.finish(received), error)

    def _take_prefetched(self, features: JaggedFeatures) -> ReadyBatch | None:
        """The prefetched batch if it is `features`, once.

        Raises:
            IdTypeError: it was changed after its ids were sent, or its weights need gradients since then.
        """
        ready = self.prefetched
        if ready is None or not ready.pending.is_of(features) or ready.pending.engine is not self._engine:
            return None
        self.prefetched = None
        self._check_tables()
        if ready.error is None:
            ready.pending.check_unchanged()
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
        for group, (one, _) in enumerate(optimizers):
            expect_equal_options(type(one), vars(one), group, self._plan.ranks)
        for stack, (requests, grad) in zip(self._engine.stacks, gradients, strict=True):
            optimizer, step = optimizers[stack.group]
            optimizer(stack, requests.rows, requests.offsets, grad, requests.weights, step)

    def _add_to_grad(self, gradients: Gradients) -> None:
        """Add to the gradients of the parameters that are trained."""
        stacks = self._engine.stacks
        dense = [dense_gradient(*of_stack, stack.weight) for stack, of_stack in zip(stacks, gradients, strict=True)]
        for table, parameter in enumerate(self._engine.parameters):
            if not parameter.requires_grad:
                continue
            with torch._C._EnableTorchFunction():  # a replay is run where DTensors are plain tensors
                grad = self._as_dtensor(table, dense).to(parameter.grad_dtype or parameter.dtype)
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
    ) -> None:
        configs = collection.embedding_bag_configs()
        super().__init__(BAGS, collection, configs, layouts, optimizers, kernels, dtypes, collection.is_weighted())
        self._choose_requests()
        self._means = [c.pooling is PoolingType.MEAN for c in configs for _ in c.feature_names]

    def _choose_requests(self) -> None:
        self._pooling = PoolingChoice(self._engine.dtypes.forward.itemsize)

    def _plain(self) -> EmbeddingBagCollection:
        return EmbeddingBagCollection(self._configs, self._weighted, device="meta")

    def _request(self, given: Batch, batch: Batch) -> Request:
        index = self._engine.batch_index(batch.bags)
        return request_weighted(index, batch) if needs_gradients(batch) else self._pooling.request(index, batch)

    def embedding_bag_configs(self) -> tuple[EmbeddingBagConfig, ...]:
        """The configs of the tables, in their order."""
        return self._configs

    def is_weighted(self) -> bool:
        """Whether rows are multiplied by the weights of the input."""
        return self._weighted

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
        pending, flat = self._exchange(features, trigger)
        batch = pending.batch
        if pending.by_rows:
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

    def _request(self, given: Batch, batch: Batch) -> Request:
        routes, feature_of = self._engine.routes, self._engine.batch_index(batch.bags).feature_of_bag
        feature, dims = feature_of[batch.bag], routes.dims[feature_of[given.bag]]
        first = dims.cumsum(0) - dims
        num_units, first = int(dims.sum()), first if batch.kept is None else first[batch.kept]
        return request_rows(routes, batch.values, feature, first, num_units)

    def embedding_configs(self) -> tuple[EmbeddingConfig, ...]:
        """The configs of the tables, in their order."""
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


def _refuse_frozen(parameters: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            raise PlanError(
                f"{name} does not require grad, but the optimizer would train it in backward. Fix: shard without an "
                f"optimizer, and pass the parameters that require grad to one of torch.optim."
            )


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

    Raises:
        ConfigError: another dtype.
        PlanError: a plan or optimizers that do not fit the collection, such as one for a table that does not require
            grad; or parameters with hooks, which would not run.
        MismatchError: ranks pass other tables, placements, optimizers or dtypes.
    """
    dtypes = MessageDtypes(forward_dtype, backward_dtype)
    configs = (
        collection.embedding_bag_configs()
        if isinstance(collection, EmbeddingBagCollection)
        else collection.embedding_configs()
    )
    names = [config.name for config in configs]
    if unknown := [name for name in plan if name not in names]:
        raise PlanError(f"The plan has {unknown[0]!r}, but the tables are {', '.join(names)}. Fix: use their names.")
    if isinstance(optimizer, Mapping) and set(optimizer) != set(names):
        odd = min(set(optimizer) ^ set(names))
        raise PlanError(
            f"optimizer has {'no' if odd in names else 'an'} entry {odd!r}; the tables are {', '.join(names)}. "
            f"Fix: one entry for each table, or one optimizer for all."
        )
    optimizers = [optimizer[n] if isinstance(optimizer, Mapping) else optimizer for n in names] if optimizer else None
    parameters = named_parameters(collection)
    refuse_hooks(parameters, parameters)
    if optimizers:
        _refuse_frozen(parameters)
    where = collectives.as_mesh(mesh)
    layouts = [
        Layout(where, as_placements(where, plan.get(c.name)), (c.num_embeddings, c.embedding_dim)) for c in configs
    ]
    if isinstance(collection, EmbeddingBagCollection):
        return ShardedEmbeddingBagCollection(collection, layouts, optimizers, kernels, dtypes)
    return ShardedEmbeddingCollection(collection, layouts, optimizers, kernels, dtypes)
