"""A step of a sharded collection: three collectives, and the update of the rows in backward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NoReturn

import torch
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._lookups.row_requests import RowRequests, read_requests
from shardwise._redistribute.buffers import Buffers, Lent
from shardwise._redistribute.transfers import Exchange
from shardwise._rules.row_exchange import IdMessage, IdReply, id_message
from shardwise._trace.autograd_function import Context, TensorFunction
from shardwise._trace.comm_trace import Cause
from shardwise.embedding.exchange.owner import RunGradients, by_rank, by_stack
from shardwise.embedding.exchange.requests import IdRequest, PoolingChoice, make_batch_index
from shardwise.embedding.exchange.results import ResultIndex
from shardwise.embedding.exchange.routes import Routes, make_routes
from shardwise.embedding.kernels import Stack
from shardwise.embedding.plan import Plan
from shardwise.errors import ConfigError, MismatchError, PlanError, RuleError

Gradients = list[RunGradients]  # of each stack

SENT = (torch.float32, torch.bfloat16, torch.float16)
FIRST_CAPACITY = 1024  # integers of a message of ids, before lengths are known
SPARE = 4  # the capacity for later messages is longer than a message by a part of so many
MOST_FREE = 8  # buffers that are kept for the next messages
MOST_BATCH_SIZES = 64  # the indexes of so many batch sizes are kept


@dataclass(frozen=True)
class MessageDtypes:
    """In which sums are sent in message 2, and their gradients in message 3. Both are added up in float32."""

    forward: torch.dtype = torch.float32
    backward: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for direction, dtype in vars(self).items():
            if dtype not in SENT:
                raise ConfigError(
                    f"{direction}_dtype is {dtype}, expected {', '.join(map(str, SENT))}. "
                    f"Fix: torch.bfloat16 to send half the bytes, or leave it out."
                )


class Capacities:
    """How many integers the next message of ids between each pair of ranks has, apart from its header.

    Both ranks derive them from the lengths of earlier messages. Several messages may be on their way: each keeps the
    capacities of when it was prepared, and they are adapted when it is finished. All ranks do both in the same order.
    """

    def __init__(self, num_ranks: int) -> None:
        self.sent = [FIRST_CAPACITY] * num_ranks
        self.received = [FIRST_CAPACITY] * num_ranks

    def adapt(self, sent: Sequence[int], received: Sequence[int]) -> None:
        """Adapt to the lengths of messages, which sender and receiver both know."""
        self.sent = list(map(_next_capacity, self.sent, sent))
        self.received = list(map(_next_capacity, self.received, received))


def _next_capacity(capacity: int, length: int) -> int:
    """A quarter more than the last length; a larger capacity shrinks by an eighth, as lengths vary."""
    return max(length + length // SPARE, capacity - capacity // 8)


class Engine:
    """The exchange of one collection on one rank.

    Args:
        name: of the collection, for the communication trace.
        update: called in backward, with the gradients of each stack.
        parameters: those that `update` gives gradients; none, if it trains the stacks.

    Attributes:
        pooling: whether this rank requests bags or rows.
        collects: whether `update` keeps gradients for later.
        batch_index: the index of a batch, of the bags of each feature.
    """

    def __init__(
        self,
        name: str,
        plan: Plan,
        stacks: Sequence[Stack],
        update: Callable[[Gradients], None],
        weighted: bool,
        dtypes: MessageDtypes = MessageDtypes(),
        parameters: Sequence[Tensor] = (),
    ) -> None:
        self.name, self.plan, self.stacks, self.update = name, plan, list(stacks), update
        self.dtypes, self.weighted, self.parameters = dtypes, weighted, tuple(parameters)
        self.collects = False
        self.pooling = PoolingChoice(dtypes.forward.itemsize)
        self.rank = collectives.rank()
        self._cols = [key.cols for key in plan.keys]
        device = stacks[0].weight.device
        self.routes: Routes = make_routes(plan, self.rank, device, stacks[0].kernels)
        self._buffers = Buffers(MOST_FREE)
        self.capacities = Capacities(len(plan.ranks))
        self.trigger = torch.zeros(0, device=device, requires_grad=True)
        self.batch_index = lru_cache(MOST_BATCH_SIZES)(partial(make_batch_index, self.routes))
        mesh = plan.tables[0].layout.mesh
        coordinates = [mesh.coordinate(rank) or () for rank in plan.ranks]
        own = mesh.coordinate(self.rank) or ()
        self._answered = [  # the ranks that each stack answers, by position
            [i for i, other in enumerate(coordinates) if all(other[a] == own[a] for a in key.replicated)]
            for key in plan.keys
        ]

    def freeze(self, table: int, row: int) -> None:
        """Do not train a row of a table that is looked up without pooling."""
        for block in self.plan.blocks_of(self.rank, table):
            if row in block.rows:
                stack = self.stacks[block.stack]
                known = stack.weight.new_empty(0, dtype=torch.int64) if stack.frozen is None else stack.frozen
                stack.frozen = torch.cat([known, known.new_tensor([block.first + row - block.rows.start])])

    def limit_norm(self, table: int, max_norm: float) -> None:
        """Scale rows of a table to at most `max_norm` before they are looked up.

        Raises:
            PlanError: no rank has full rows of the table.
        """
        if table in self.plan.in_columns:
            name = self.plan.tables[table].name
            raise PlanError(f"Table {name} has a max_norm, which needs full rows. Fix: shard no columns of it.")
        for block in self.plan.blocks_of(self.rank, table):
            stack = self.stacks[block.stack]
            if stack.max_norm is None:
                stack.max_norm = torch.full((stack.weight.shape[0],), torch.inf, device=stack.weight.device)
            stack.max_norm[block.first : block.first + len(block.rows)] = max_norm

    def message(self, request: IdRequest, verdict: Sequence[int], ahead: int = 0) -> IdMessage:
        """Message 1, to be started. All ranks make, start and receive messages in the same order, or leave them.

        Args:
            verdict: of this rank on its ids, as many integers on each rank.
            ahead: how many batches before its use; 0: it is used at once.
        """
        count = len(self.plan.ranks)
        headers = [[ahead, *verdict, *header] for header in request.headers(count)]
        sent, received = self.capacities.sent, self.capacities.received
        messages, lent = request.messages(count), self._lend(request.rows.dtype)
        return id_message(self._exchange("ids"), messages, headers, sent, received, lent)

    def check_ahead(self, reply: IdReply) -> None:
        """Raise a MismatchError if ranks sent message 1 for different numbers of batches ahead."""
        first = reply.headers[0][0]
        for rank, (ahead, *_) in zip(self.plan.ranks, reply.headers, strict=True):
            if ahead != first:
                said = [f"prefetches {n} ahead" if n else "does not prefetch" for n in (first, ahead)]
                raise MismatchError(
                    f"Rank {self.plan.ranks[0]} {said[0]} the batch of a collection, and rank {rank} {said[1]}. "
                    f"Nothing was looked up.\n"
                    f"  Fix: on all ranks the same prefetch(…, depth=…), and the same lookups outside it."
                )

    def receive(self, reply: IdReply) -> list[RowRequests]:
        """What all ranks requested of each stack of this one."""
        self.capacities.adapt(reply.message.lengths, reply.lengths)
        counts = [header[-3 * len(self.stacks) :] for header in reply.headers]
        requests = read_requests(reply.messages(), counts, self.weighted)
        if reply.message.lent is not None:
            reply.message.lent.give_back()
        return requests

    def retire(self) -> None:
        """Refuse backwards of earlier lookups: the rows of the plan may be elsewhere now."""

        def refuse(gradients: object) -> NoReturn:
            raise PlanError(
                "The collection was resized between forward and backward, so these gradients are of rows that may be "
                "elsewhere now. Nothing was updated. Fix: backward() before resize_."
            )

        self.update = refuse

    def trigger_of_backward(self) -> Tensor:
        """An empty tensor that requires grad if the tables are trained: the operand of `Results`."""
        trains = not self.parameters or any(parameter.requires_grad for parameter in self.parameters)
        return self.trigger if trains else self.trigger.detach()

    def answer(self, index: ResultIndex, requests: Sequence[RowRequests]) -> Tensor:
        """Message 2: the sums that this rank requested, in its output."""
        for stack, of_stack in zip(self.stacks, requests, strict=True):
            stack.renorm(of_stack.rows)
        own, made = index.own, self._lend(torch.float32)
        others = [[rank for rank in answered if rank != own] for answered in self._answered]
        sums = [
            _pool(stack, of_stack.only(ranks), made.empty)
            for stack, of_stack, ranks in zip(self.stacks, requests, others, strict=True)
        ]
        runs = []
        for of_stack, ranks in zip(requests, others, strict=True):
            of_ranks = [0] * len(of_stack.runs)
            for i in ranks:
                of_ranks[i] = of_stack.runs[i]
            runs.append(of_ranks)
        message = by_rank(sums, runs, made.empty).to(self.dtypes.forward)
        lent = self._lend(message.dtype)
        found = lent.empty(sum(index.received))
        counts = [n if i != own else 0 for i, n in enumerate(index.received)]
        arriving = sum(counts)
        wait = self._exchange("results").start(message, self._sizes(runs), counts, lambda n: found[:n])
        self._pool_own(requests, own, found[arriving:])  # while the message is on its way
        received = wait()
        if arriving and received.data_ptr() != found.data_ptr():  # some transports do not receive into given memory
            found = torch.cat([received, found[arriving:]])
        output = index.combine(found.float())
        made.give_back()
        lent.give_back()
        return output

    def _pool_own(self, requests: Sequence[RowRequests], own: int, out: Tensor) -> None:
        """The sums that this rank requested of itself, in the memory `out`, in its dtype."""
        made = self._lend(torch.float32)
        parts = out.split([of_stack.runs[own] * cols for of_stack, cols in zip(requests, self._cols, strict=True)])
        for stack, of_stack, part in zip(self.stacks, requests, parts, strict=True):
            sums = _pool(
                stack, of_stack.only([own]), partial(_same, part) if out.dtype == torch.float32 else made.empty
            )
            if sums.data_ptr() != part.data_ptr():
                part.copy_(sums.view(-1))
        made.give_back()

    def start_update(self, index: ResultIndex, requests: Sequence[RowRequests], grad: Tensor) -> Callable[[], None]:
        """Start message 3: the gradients of the sums of all runs, of that of the output.

        Returns:
            A function that waits for it and updates the rows; it may be called after other collectives were started.
        """
        runs, lent = [of_stack.runs for of_stack in requests], self._lend(grad.dtype)
        ordered = self._lend(torch.int64)
        message = index.spread(grad, lent.empty).to(self.dtypes.backward)
        arriving = lent if message.dtype == grad.dtype else self._lend(message.dtype)
        exchange = self._exchange("gradients", backward=True)
        wait = exchange.start(message, index.sent, self._sizes(runs), arriving.empty)

        def finish() -> None:
            known = [  # while the message is on its way
                None
                if self.collects or stack.frozen is not None
                else stack.kernels.by_row(of_stack.rows, of_stack.offsets, of_stack.weights, ordered.empty)
                for stack, of_stack in zip(self.stacks, requests, strict=True)
            ]
            values = by_stack(wait().float(), runs, self._cols, lent.empty)
            per_stack = map(RunGradients, requests, values, known)
            self.update([_without_frozen(*of_stack) for of_stack in zip(self.stacks, per_stack, strict=True)])
            for memory in (lent, arriving, ordered):
                memory.give_back()

        return finish

    def _exchange(self, what: str, backward: bool = False) -> Exchange:
        """An exchange with the ranks of the plan, and what it sends for the communication trace."""
        cause = Cause("internal", f"{what} of an embedding collection", self.name, backward=backward)
        return Exchange(self.plan.ranks, cause)

    def _sizes(self, runs: Sequence[Sequence[int]]) -> list[int]:
        """The elements of a message with so many `runs` of each stack, for each rank."""
        return [
            sum(n * cols for n, cols in zip(of_rank, self._cols, strict=True)) for of_rank in zip(*runs, strict=True)
        ]

    def _lend(self, dtype: torch.dtype) -> Lent:
        """Memory of messages."""
        return self._buffers.lend(dtype, self.trigger.device)


def _pool(stack: Stack, requests: RowRequests, empty: Callable[[int], Tensor]) -> Tensor:
    """The sums of runs."""
    return stack.kernels.pool(stack.weight, requests.rows, requests.offsets, requests.weights, empty)


def _same(memory: Tensor, _: int) -> Tensor:
    return memory


def _without_frozen(stack: Stack, of_runs: RunGradients) -> RunGradients:
    """Gradients without those of rows that are not trained. Then each run has one row."""
    if stack.frozen is None:
        return of_runs
    keep = ~torch.isin(of_runs.runs.rows, stack.frozen)
    rows = of_runs.runs.rows[keep]
    kept = RowRequests(rows, torch.ones_like(rows), None, (rows.numel(),), (rows.numel(),))
    return RunGradients(kept, of_runs.values[keep])


class Results(TensorFunction):
    """The sums of all runs in their places: flat, float32. Backward calls `update` if `trigger` requires grad.

    `index` says where the sums that this rank requested belong; `requests` are those of all ranks.
    """

    @staticmethod
    def forward(
        ctx: Context, trigger: Tensor, engine: Engine, index: ResultIndex, requests: Sequence[RowRequests]
    ) -> Tensor:
        ctx.args = engine, index, requests
        ctx.save_for_backward(trigger)
        with _without_autocast(trigger):
            return engine.answer(index, requests)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[None, None, None, None]:
        (trigger,) = ctx.saved_tensors  # an error after a backward that did not retain the graph
        engine, index, requests = ctx.args
        if engine.parameters and torch.is_grad_enabled():
            raise RuleError(
                "Gradients of the tables of a sharded collection have no gradients. Fix: backward() without "
                "create_graph=True."
            )
        with torch.no_grad(), _without_autocast(trigger):
            finish = engine.start_update(index, requests, grads[0])
        at_end = torch.no_grad()(_without_autocast(trigger)(finish))  # called in the state of backward()
        torch.autograd.Variable._execution_engine.queue_callback(at_end)
        return None, None, None, None


def _without_autocast(like: Tensor) -> torch.autocast:
    """Sums and updates stay in float32, also if backward is called in a region of autocast."""
    return torch.autocast(like.device.type, enabled=False)
