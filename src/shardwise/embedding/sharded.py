"""Sharded collections, and `shard_embeddings`, which makes them."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import reduce
from typing import NoReturn

import torch
from torch import Tensor, nn

from shardwise import _collectives as collectives
from shardwise._collectives import DeviceMesh
from shardwise._layout import Layout, Mesh, Placements, Shard, as_placements, checked
from shardwise._lookups.bad_ids import NO_BATCH
from shardwise._lookups.row_requests import join_requests
from shardwise._tensor import DTensor
from shardwise._tensor.dispatch.hooks import expect_equal_options
from shardwise._tensor.dtensor import as_parameter, check_owners
from shardwise._torch_bridge.module_sharding import named_parameters, refuse_hooks
from shardwise._trace.capture_hooks import tracing_paused
from shardwise._trace.user_stack import call_site
from shardwise.embedding.batch import Batch, code
from shardwise.embedding.batch_lookup import BatchLookup, versions_of
from shardwise.embedding.collections import (
    ROWS,
    BagCollection,
    Collection,
    EmbeddingBagCollection,
    EmbeddingCollection,
    RowCollection,
    look_up,
    rows_by_feature,
)
from shardwise.embedding.configs import resized
from shardwise.embedding.exchange.engine import Engine, Gradients, MessageDtypes, Results
from shardwise.embedding.exchange.owner import RunGradients, dense_gradient, new_stack, rows_of
from shardwise.embedding.exchange.requests import (
    IdRequest,
    needs_gradients,
    pool_weighted,
    request_rows,
    request_weighted,
)
from shardwise.embedding.fused import FusedOptimizer, layout_of_rows
from shardwise.embedding.jagged import JaggedFeatures, JaggedTensor
from shardwise.embedding.kernels import Kernels, Stack, fastest_kernels
from shardwise.embedding.optimizers import RowOptimizer
from shardwise.embedding.plan import Table, make_plan
from shardwise.embedding.resizing import resized_plan, resized_stacks
from shardwise.embedding.tables import (
    Tables,
    ViewOfStack,
    check_no_gradient,
    fill,
    new_rows,
    rows_of_full,
    seed_of_first,
)
from shardwise.errors import ConfigError, PlanError, ShardwiseError

Optimizers = Sequence[RowOptimizer]  # of each table
LISTED = 5  # tables in a warning


class _Sharded(Collection):
    """Tables that are views of stacks, and the exchange: the base of both sharded collections."""

    def __init__(
        self,
        collection: EmbeddingBagCollection | EmbeddingCollection,
        layouts: Sequence[Layout],
        optimizers: Optimizers | None,
        kernels: Kernels | None,
        dtypes: MessageDtypes,
    ) -> None:
        configs = collection._configs
        super().__init__(configs, collection._weighted)
        parameters = [collection.get_parameter(f"{self.kind}.{config.name}.weight") for config in configs]
        sources = [parameter.detach() for parameter in parameters]
        distinct = [] if optimizers is None else list(dict.fromkeys(optimizers))
        of_table = [0] * len(configs) if optimizers is None else [distinct.index(one) for one in optimizers]
        plan = self._plan = make_plan(
            [
                Table(c.name, layout, str(source.dtype).removeprefix("torch."), tuple(c.feature_names), group)
                for c, layout, source, group in zip(configs, layouts, sources, of_table, strict=True)
            ]
        )
        self._compare_arguments(optimizers, dtypes)
        rank, device = collectives.rank(), torch.device(layouts[0].mesh.device_type)
        kernels = kernels or fastest_kernels(device)
        stacks = [new_stack(plan, rank, number, device, kernels, distinct) for number in range(len(plan.keys))]
        tables = []
        seed = seed_of_first(plan.ranks) if any(source.is_meta for source in sources) else 0
        for number, (config, source) in enumerate(zip(configs, sources, strict=True)):
            rows = new_rows(config, seed + number) if source.is_meta else rows_of_full(source)
            for block in plan.blocks_of(rank, number):
                fill(stacks[block.stack].weight[block.first : block.first + len(block.rows)], block, rows)
            weight = self._as_dtensor(number, [stack.weight for stack in stacks])
            tables.append(ViewOfStack(config.name, as_parameter(weight, parameters[number])))
            if distinct:
                tables[-1].weight.requires_grad_(False)
        self.add_module(self.kind, Tables({table.name: table for table in tables}))
        self._tables = tuple(tables)
        self._numbers = {f"{self.kind}.{table.name}.weight": number for number, table in enumerate(tables)}
        self._collected: list[Gradients] | None = None
        self._engine = (
            self._new_engine(stacks, self._step, dtypes, ())
            if distinct
            else self._new_engine(stacks, self._add_to_grad, dtypes, [table.weight for table in tables])
        )
        self.fused_optimizer = self._fused_optimizer(distinct) if distinct else None
        self._dtypes = [
            getattr(torch, plan.tables[t].dtype) for t in plan.table_of
        ]  # the dtype of the table of each feature
        self.offered: BatchLookup | None = None

    def _compare_arguments(self, optimizers: Optimizers | None, dtypes: MessageDtypes) -> None:
        """Raise a MismatchError if ranks make the collection of other tables, optimizers or messages."""
        facts = {"messages": str(dtypes), "is_weighted": str(self._weighted)}
        each: Sequence[RowOptimizer | None] = optimizers or [None] * len(self._configs)
        for config, table, one in zip(self._configs, self._plan.tables, each, strict=True):
            of_config = {field.name: str(getattr(config, field.name)) for field in fields(config)}
            of_config |= {"init_fn": "", "placements": str(table.layout), "optimizer": str(one)}
            facts |= {f"{config.name}.{name}": value for name, value in of_config.items()}
        fix = "the same collection, plan, optimizer and dtypes on all ranks."
        collectives.agree("what shard_embeddings gets", facts, self._plan.ranks, fix)

    def _new_engine(
        self,
        stacks: Sequence[Stack],
        update: Callable[[Gradients], None],
        dtypes: MessageDtypes,
        parameters: Sequence[Tensor],
    ) -> Engine:
        engine = Engine(self.kind, self._plan, stacks, update, self._weighted, dtypes, parameters)
        for table, config in enumerate(self._configs):
            if config.max_norm is not None:
                engine.limit_norm(table, config.max_norm)
            if config.padding_idx is not None and self.kind == ROWS:  # bags leave padding out
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
        self._plan = new
        self._set_configs(configs)
        self._engine = self._new_engine(stacks, engine.update, engine.dtypes, engine.parameters)
        engine.retire()
        for number, table in enumerate(self._tables):
            table.move(self._as_dtensor(number, [stack.weight for stack in stacks]))
        if self.fused_optimizer is not None:
            self.fused_optimizer.replace_states(lambda name: self._states(name, optimizers))

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

    def _fused_optimizer(self, optimizers: Sequence[RowOptimizer]) -> FusedOptimizer:
        groups = [
            [
                (f"{self.kind}.{table.name}.weight", module.weight)
                for table, module in zip(self._plan.tables, self._tables, strict=True)
                if table.group == group
            ]
            for group in range(len(optimizers))
        ]
        return FusedOptimizer(optimizers, groups, lambda name: self._states(name, optimizers))

    def _states(self, parameter: str, optimizers: Sequence[RowOptimizer]) -> dict[str, DTensor]:
        """The states of a table as DTensors, which are views of those of the stacks."""
        number = self._numbers[parameter]
        table, stacks = self._plan.tables[number], self._engine.stacks
        optimizer, nothing = optimizers[table.group], torch.zeros(0, 0, device=stacks[0].weight.device)
        found = {}
        for name in (*optimizer.of_elements, *optimizer.of_rows):
            layout = table.layout if name in optimizer.of_elements else layout_of_rows(table.layout, table.name)
            found[name] = self._local_rows(number, [stack.states.get(name, nothing) for stack in stacks], layout)
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

    def _batch(self, features: JaggedFeatures | None) -> tuple[Batch, ShardwiseError | None]:
        """The ids of a batch; none if it is an error, which is raised after message 1, when all ranks know of it."""
        device, error = self._engine.trigger.device, None
        if features is not None:
            try:
                self._check_tables()
                return self._features.batch(features, self._weighted, device), None
            except ShardwiseError as raised:
                error = raised
        return self._features.no_batch(device), error

    def _check_tables(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # DTensors show no addresses
            for table in self._tables:
                table.check_place()

    def _exchange(self, features: JaggedFeatures, trigger: Tensor) -> tuple[BatchLookup, Tensor]:
        """The lookup, and its results, flat, after messages 1 and 2; backward runs if `trigger` requires grad."""
        lookup = self._take_offered(features)
        if lookup is None:
            lookup = self.prepare(features)
            lookup.finish()
        if lookup.error is not None:
            raise lookup.error
        flat = Results.apply(trigger, self._engine, lookup.index, lookup.requests)
        for one in lookup.following:  # if started earlier, results would wait for it on some backends
            one.start()
        return lookup, flat

    def _request(self, given: Batch, batch: Batch) -> IdRequest:
        """What message 1 of a batch requests; `batch` has its valid ids."""
        raise NotImplementedError

    # ---- for `prefetch` ----

    def feature_names(self) -> tuple[str, ...]:
        """The features that a batch needs."""
        return self._features.names

    def prepare(self, features: JaggedFeatures | None, ahead: int = 0, reason: int = NO_BATCH) -> BatchLookup:
        """A lookup whose message of ids is not sent yet, `ahead` batches before its use.

        Without `features`, this rank has no batch; `reason` is the code of its verdict.
        """
        weights = [table.weight for table in self._tables]
        check_owners("a lookup", [weight._layout for weight in weights if isinstance(weight, DTensor)])
        given, error = self._batch(features)
        batch, verdict = self._rules.apply(given)
        request = self._request(given, batch)
        if error is not None or features is None:
            verdict = code(NO_BATCH if error else reason)
        return BatchLookup(
            features=features,
            batch=batch,
            engine=self._engine,
            rules=self._rules,
            message=self._engine.message(request, verdict, ahead),
            index=request.results,
            error=error,
            by_rows=needs_gradients(batch),
            versions=versions_of(features) if features is not None and ahead and error is None else (),
        )

    def refuse(self, error: ShardwiseError) -> NoReturn:
        """Take part in a lookup without a batch, because of `error`; the other ranks raise a RemoteRankError."""
        with tracing_paused():
            self.prepare(None).arrive()
        raise error

    def offer(self, lookup: BatchLookup) -> None:
        """Use a finished lookup when its batch is looked up, instead of sending the ids again."""
        self.offered = lookup

    def _take_offered(self, features: JaggedFeatures) -> BatchLookup | None:
        """The offered lookup if it is of `features`, once.

        Raises:
            IdTypeError: the batch was changed after its ids were sent, or its weights need gradients since then.
        """
        lookup = self.offered
        if lookup is None or not lookup.is_of(features) or lookup.engine is not self._engine:
            return None
        self.offered, lookup.used = None, True
        self._check_tables()
        if lookup.error is None:
            lookup.check_unchanged()
        return lookup

    def _as_dtensor(self, table: int, stacks: Sequence[Tensor]) -> DTensor:
        """A table, or its gradient, as a DTensor whose local tensor is a view of this rank's `stacks`."""
        dtype = getattr(torch, self._plan.tables[table].dtype)
        return self._local_rows(table, stacks, self._plan.tables[table].layout, dtype)

    def _local_rows(
        self, table: int, stacks: Sequence[Tensor], layout: Layout, dtype: torch.dtype = torch.float32
    ) -> DTensor:
        """This rank's rows of a table in `stacks` as a DTensor."""
        rank = collectives.rank()
        local = rows_of(self._plan, rank, table, stacks).view(layout.local_shape(rank))
        local = local.to(dtype)  # a rank without rows has some stack
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
        self._collected, self._engine.collects = [], True
        try:
            yield
            collected = self._collected
        finally:
            self._collected, self._engine.collects = None, False
        if collected:
            self._step([
                RunGradients(join_requests([one.runs for one in of_stack]), torch.cat([one.values for one in of_stack]))
                for of_stack in zip(*collected, strict=True)
            ])  # fmt: skip

    def _step(self, gradients: Gradients) -> None:
        """Update the rows that were looked up."""
        assert self.fused_optimizer is not None
        if self._collected is not None:
            self._collected.append(
                [RunGradients(one.runs, one.values.clone()) for one in gradients]
            )  # values are in a buffer that is used again
            return
        optimizers = self.fused_optimizer.begin_step()
        for group, (one, _) in enumerate(optimizers):
            expect_equal_options(type(one), vars(one), group, self._plan.ranks)
        for stack, of_runs in zip(self._engine.stacks, gradients, strict=True):
            optimizer, step = optimizers[stack.group]
            optimizer(stack, of_runs.by_row(stack.kernels), of_runs.values, step)

    def _add_to_grad(self, gradients: Gradients) -> None:
        """Add to the gradients of the parameters that are trained."""
        stacks = self._engine.stacks
        dense = [dense_gradient(stack, one) for stack, one in zip(stacks, gradients, strict=True)]
        for table, parameter in enumerate(self._engine.parameters):
            if not parameter.requires_grad:
                continue
            with torch._C._EnableTorchFunction():  # a replay is run where DTensors are plain tensors
                grad = self._as_dtensor(table, dense).to(parameter.grad_dtype or parameter.dtype)
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad


class ShardedEmbeddingBagCollection(_Sharded, BagCollection):
    """An EmbeddingBagCollection whose tables are sharded; made by `shard_embeddings`."""

    def _plain(self) -> EmbeddingBagCollection:
        return EmbeddingBagCollection(self._configs, self._weighted, device="meta")

    def _request(self, given: Batch, batch: Batch) -> IdRequest:
        index = self._engine.batch_index(batch.bags)
        if needs_gradients(batch):
            return request_weighted(index, batch)
        return self._engine.pooling.request(index, batch)

    def _operands(self) -> tuple[Tensor, ...]:
        return (self._engine.trigger_of_backward(),)

    def _look_up(self, features: JaggedFeatures, *tables: Tensor) -> Tensor:
        lookup, flat = self._exchange(features, *tables)
        batch = lookup.batch
        if lookup.by_rows:
            flat = pool_weighted(batch, flat, self._plan.dims, self._dtypes)
        if any(self._features.means):
            index = self._engine.batch_index(batch.bags)
            of_feature = torch.tensor(self._features.means, device=flat.device)[index.feature_of_bag]
            divisors = torch.where(of_feature, batch.counted.clamp(min=1), 1)
            flat = (flat.view(-1, self._plan.unit) / divisors[index.bag_of_unit, None]).view(-1)
        return flat.to(reduce(torch.promote_types, self._dtypes))


class ShardedEmbeddingCollection(_Sharded, RowCollection):
    """An EmbeddingCollection whose tables are sharded; made by `shard_embeddings`."""

    def _plain(self) -> EmbeddingCollection:
        return EmbeddingCollection(self._configs, device="meta")

    def _request(self, given: Batch, batch: Batch) -> IdRequest:
        routes, feature_of = self._engine.routes, self._engine.batch_index(batch.bags).feature_of_bag
        feature, dims = feature_of[batch.bag], routes.dims[feature_of[given.bag]]
        first = dims.cumsum(0) - dims
        num_units, first = int(dims.sum()), first if batch.kept is None else first[batch.kept]
        return request_rows(routes, batch.values, feature, first, num_units)

    def forward(self, features: JaggedFeatures) -> dict[str, JaggedTensor]:
        """The row of every id of this rank's batch. All ranks have to call it, each with its own batch.

        Returns:
            For each feature values of [ids, columns], with the lengths of the input.

        Raises:
            IdError: an id outside its table, on some rank; the same error on all.
            IdTypeError: what this rank passes is not a batch of the collection; other ranks raise a RemoteRankError.
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


def _warn_of_local_columns(names: Sequence[str], layouts: Sequence[Layout], optimizers: Optimizers) -> None:
    """Say once which tables are trained otherwise than in one process."""
    found = [
        name
        for name, layout, one in zip(names, layouts, optimizers, strict=True)
        if one.reads_all_columns
        and any(
            isinstance(placement, Shard) and placement.dim == 1 and size > 1
            for placement, size in zip(layout.placements, layout.mesh.shape, strict=True)
        )
    ]
    if found:
        listed, site = ", ".join(found[:LISTED]) + ", …" * (len(found) > LISTED), call_site()
        text = (
            f"{listed}: sharded along columns, and the optimizer takes norms or means of rows: of the columns that a "
            f"rank holds, as in fbgemm, so the weights are not those of one process. Fix: shard rows, keep full "
            f"tables by OnRanks, or use SGD, Adagrad or Adam."
        )
        warnings.warn_explicit(text, UserWarning, *((site.file, site.line) if site else (__file__, 1)))


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
    configs = collection._configs
    names = [config.name for config in configs]
    known = set(names)
    if unknown := [name for name in plan if name not in known]:
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
    if optimizers:
        _warn_of_local_columns(names, layouts, optimizers)
    if isinstance(collection, EmbeddingBagCollection):
        return ShardedEmbeddingBagCollection(collection, layouts, optimizers, kernels, dtypes)
    return ShardedEmbeddingCollection(collection, layouts, optimizers, kernels, dtypes)
