"""A step of a sharded collection: three collectives, and the update of the rows in backward."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._collectives import Collective, Wait
from shardwise._redistribute.buffers import Buffers, Lent
from shardwise._trace import comm_trace
from shardwise._trace.autograd_function import TensorFunction
from shardwise._trace.comm_trace import Cause, CommEvent, Purpose
from shardwise.embedding.exchange.ids import Capacities, Headers, IdMessages, ReceivedIds, id_messages
from shardwise.embedding.exchange.owner import StackRequests, by_rank, by_stack, received_requests
from shardwise.embedding.exchange.requests import BatchIndex, Request, Routes, make_batch_index, make_routes
from shardwise.embedding.exchange.results import ResultIndex
from shardwise.embedding.kernels import Stack
from shardwise.embedding.plan import Plan, requests_of
from shardwise.errors import ConfigError, MismatchError, PlanError, RuleError

Gradients = list[tuple[StackRequests, Tensor]]  # for each stack, runs and the gradients of their sums

SENT = (torch.float32, torch.bfloat16, torch.float16)
MOST_FREE = 4  # buffers that are kept for the next messages
MOST_BATCH_SIZES = 64  # of which the index is kept


@dataclass
class PendingRequest:
    """Message 1 of this rank, prepared or sent.

    Attributes:
        verdict_size: the integers of a verdict.
        wait: for the messages of all ranks; None: it was not started yet.
    """

    results: ResultIndex
    ids: IdMessages
    verdict_size: int
    wait: Wait | None = None


@dataclass(frozen=True)
class ReceivedRequests:
    """Message 1 of all ranks, perhaps without the ends of long ones.

    Attributes:
        verdicts: of each rank.
        counts: what the headers say of the requests of each rank.
    """

    results: ResultIndex
    ids: ReceivedIds
    verdicts: Headers
    counts: Headers


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


@dataclass(frozen=True)
class Exchange:
    """Where the results of this rank's request belong, and what all ranks requested of its stacks."""

    results: ResultIndex
    of_stacks: list[StackRequests]


class Engine:
    """The exchange of one collection on one rank.

    Args:
        name: of the collection, for the communication trace.
        update: called in backward, with the runs and gradients of each stack.

    Attributes:
        parameters: those that `update` gives gradients; none, if it trains the stacks.
    """

    def __init__(
        self,
        name: str,
        plan: Plan,
        stacks: Sequence[Stack],
        update: Callable[[Gradients], None],
        weighted: bool,
        dtypes: MessageDtypes = MessageDtypes(),
    ) -> None:
        self.name, self.plan, self.stacks, self.update = name, plan, list(stacks), update
        self.dtypes = dtypes
        self.weighted = weighted
        self.parameters: tuple[Tensor, ...] = ()
        self.rank = collectives.rank()
        device = stacks[0].weight.device
        self.routes: Routes = make_routes(plan, requests_of(plan, self.rank), device, stacks[0].kernels)
        self._buffers = Buffers(MOST_FREE)
        self.capacities = Capacities(len(plan.ranks))
        self.trigger = torch.zeros(0, device=device, requires_grad=True)
        self._indices: dict[tuple[int, ...], BatchIndex] = {}
        mesh = plan.tables[0].layout.mesh
        coordinates = [mesh.coordinate(rank) or () for rank in plan.ranks]
        own = mesh.coordinate(self.rank) or ()
        self._answered = [  # the ranks that each stack answers, by position
            [i for i, other in enumerate(coordinates) if all(other[a] == own[a] for a in key.replicated)]
            for key in plan.keys
        ]

    def rows_of(self, table: int, stacks: Sequence[Tensor]) -> Tensor:
        """This rank's rows of a table among those of all stacks; the blocks of a table follow each other."""
        blocks = self.plan.blocks_of(self.rank, table)
        if not blocks:
            return stacks[0][:0, :0]
        first, last = blocks[0], blocks[-1]
        return stacks[first.stack][first.first : last.first + len(last.rows)]

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
        blocks = self.plan.blocks
        if (blocks.cols[blocks.table == table] < self.plan.tables[table].layout.shape[1]).any():
            name = self.plan.tables[table].name
            raise PlanError(f"Table {name} has a max_norm, which needs full rows. Fix: shard no columns of it.")
        for block in self.plan.blocks_of(self.rank, table):
            stack = self.stacks[block.stack]
            if stack.max_norm is None:
                stack.max_norm = torch.full((stack.weight.shape[0],), torch.inf, device=stack.weight.device)
            stack.max_norm[block.first : block.first + len(block.rows)] = max_norm

    def batch_index(self, bags: tuple[int, ...]) -> BatchIndex:
        """The index of a batch with `bags` of each feature."""
        found = self._indices.get(bags)
        if found is None:
            if len(self._indices) >= MOST_BATCH_SIZES:
                self._indices.pop(next(iter(self._indices)))
            found = self._indices[bags] = make_batch_index(self.routes, bags)
        return found

    def prepare(self, request: Request, verdict: Sequence[int], ahead: int = 0) -> PendingRequest:
        """Message 1, to be started. All ranks prepare, start and finish messages in the same order, or leave them.

        Args:
            verdict: of this rank on its ids, as many integers on each rank.
            ahead: how many batches before its use; 0: it is used at once.
        """
        count = len(self.plan.ranks)
        headers = [[ahead, *verdict, *header] for header in request.headers(count)]
        ids = id_messages(self.capacities, self.plan.ranks, request.messages(count), headers)
        return PendingRequest(request.results, ids, len(verdict))

    def start(self, pending: PendingRequest) -> Wait:
        """Start message 1, unless it was started."""
        if pending.wait is None:
            with self._sending("ids", pending.ids.sent_bytes):
                pending.wait = pending.ids.start()
        return pending.wait

    def arrive(self, pending: PendingRequest) -> ReceivedRequests:
        """Wait for message 1 of all ranks.

        Raises:
            MismatchError: they prepared it for another number of batches ahead.
        """
        ids, stop = pending.ids.read(self.start(pending)()), 1 + pending.verdict_size
        for rank, header in zip(self.plan.ranks, ids.headers, strict=True):
            if header[0] != ids.headers[0][0]:
                said = [f"prefetches {n} ahead" if n else "does not prefetch" for n in (ids.headers[0][0], header[0])]
                raise MismatchError(
                    f"Rank {self.plan.ranks[0]} {said[0]} the batch of a collection, and rank {rank} {said[1]}. "
                    f"Nothing was looked up.\n"
                    f"  Fix: on all ranks the same prefetch(…, depth=…), and the same lookups outside it."
                )
        verdicts, counts = [h[1:stop] for h in ids.headers], [h[stop:] for h in ids.headers]
        return ReceivedRequests(pending.results, ids, verdicts, counts)

    def finish(self, received: ReceivedRequests) -> Exchange:
        """The requests of all ranks."""
        ids = received.ids
        self.capacities.saw(ids.sent.lengths, ids.lengths)
        messages = ids.beginnings
        if ids.is_longer:
            with self._sending("rest of the ids", [n * messages[0].element_size() for n in ids.rest_sizes()[0]]):
                messages = ids.with_rest()
        return Exchange(received.results, received_requests(messages, received.counts, len(self.stacks), self.weighted))

    def trigger_of_backward(self) -> Tensor:
        """An empty tensor that requires grad if the tables are trained: the operand of `results`."""
        trains = not self.parameters or any(parameter.requires_grad for parameter in self.parameters)
        return self.trigger if trains else self.trigger.detach()

    def results(self, exchange: Exchange, trigger: Tensor) -> Tensor:
        """The sums of all runs in their places: flat, float32. Backward calls `update` if `trigger` requires grad."""
        return _Results.apply(trigger, self, exchange)

    def answer(self, exchange: Exchange) -> Tensor:
        """Message 2: the sums that this rank requested, in its output."""
        for stack, requests in zip(self.stacks, exchange.of_stacks, strict=True):
            stack.renorm(requests.rows)
        replies = [r.only(ranks) for r, ranks in zip(exchange.of_stacks, self._answered, strict=True)]
        made = self._lend(torch.float32)
        sums = [
            stack.kernels.pool(stack.weight, reply.rows, reply.offsets, reply.weights, made.empty)
            for stack, reply in zip(self.stacks, replies, strict=True)
        ]
        runs = self._runs(exchange, answered_only=True)
        cols, results = [key.cols for key in self.plan.keys], exchange.results
        sizes = [sum(n * width for n, width in zip(of_rank, cols, strict=True)) for of_rank in zip(*runs, strict=True)]
        message = by_rank(sums, runs, made.empty).to(self.dtypes.forward)
        lent = self._lend(message.dtype)
        with self._sending("results", sizes, message.element_size()):
            received = self._exchange(message, sizes, results.received, lent)
        output = results.combine(received.float())
        made.give_back()
        lent.give_back()
        return output

    def update_rows(self, exchange: Exchange, grad: Tensor) -> None:
        """Message 3, and the update of the rows."""
        lent = self._lend(grad.dtype)
        self.update(self.gradients(exchange, grad, lent))
        lent.give_back()

    def gradients(self, exchange: Exchange, grad: Tensor, lent: Lent) -> Gradients:
        """Message 3: for each stack, the runs of all ranks and the gradients of their sums, of that of the output."""
        runs, cols, results = self._runs(exchange), [key.cols for key in self.plan.keys], exchange.results
        sizes = [sum(n * width for n, width in zip(of_rank, cols, strict=True)) for of_rank in zip(*runs, strict=True)]
        message = results.spread(grad, lent.empty).to(self.dtypes.backward)
        arriving = lent if message.dtype == grad.dtype else self._lend(message.dtype)
        with self._sending("gradients", results.sent, message.element_size(), backward=True):
            message = self._exchange(message, results.sent, sizes, arriving)
        per_stack = zip(self.stacks, exchange.of_stacks, by_stack(message.float(), runs, cols), strict=True)
        return [_without_frozen(stack, requests, sums) for stack, requests, sums in per_stack]

    def _lend(self, dtype: torch.dtype) -> Lent:
        """Memory of messages."""
        return self._buffers.lend(dtype, self.trigger.device)

    def _exchange(self, message: Tensor, sent: Sequence[int], received: Sequence[int], lent: Lent) -> Tensor:
        ranks, empty = self.plan.ranks, lent.empty
        return collectives.start(Collective("all_to_all", message, ranks, (), sent, received, allocate=empty))()

    def _runs(self, exchange: Exchange, answered_only: bool = False) -> list[list[int]]:
        """How many runs each rank requested of each stack."""
        return [
            [n if not answered_only or i in answered else 0 for i, n in enumerate(requests.runs)]
            for requests, answered in zip(exchange.of_stacks, self._answered, strict=True)
        ]

    @contextmanager
    def _sending(
        self, what: str, sizes: Sequence[int], element_size: int = 1, backward: bool = False
    ) -> Iterator[None]:
        """Say to listeners of the communication trace, and in errors, what is sent: elements to each rank."""
        cause = Cause("internal", f"{what} of an embedding collection", self.name, backward=backward)
        before = comm_trace.set_purpose(Purpose(cause))
        try:
            if not comm_trace.listening():
                yield
                return
            to_others = (sum(sizes) - sizes[self.plan.ranks.index(self.rank)]) * element_size
            with comm_trace.emitting(CommEvent(cause, None, None, self.plan.ranks, to_others, None)):
                yield
        finally:
            comm_trace.set_purpose(before)


def _without_frozen(stack: Stack, requests: StackRequests, grad: Tensor) -> tuple[StackRequests, Tensor]:
    """Runs and gradients without those of rows that are not trained. Then each run has one row."""
    if stack.frozen is None:
        return requests, grad
    keep = ~torch.isin(requests.rows, stack.frozen)
    rows = requests.rows[keep]
    offsets = torch.arange(rows.numel() + 1, dtype=rows.dtype, device=rows.device)
    return StackRequests(rows, offsets, None, (rows.numel(),), (rows.numel(),)), grad[keep]


class _Context(Protocol):
    args: tuple[Engine, Exchange]
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _Results(TensorFunction):
    @staticmethod
    def forward(ctx: _Context, trigger: Tensor, engine: Engine, exchange: Exchange) -> Tensor:
        ctx.args = engine, exchange
        ctx.save_for_backward(trigger)
        with _without_autocast(trigger):
            return engine.answer(exchange)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[None, None, None]:
        (trigger,) = ctx.saved_tensors  # an error after a backward that did not retain the graph
        engine, exchange = ctx.args
        if engine.parameters and torch.is_grad_enabled():
            raise RuleError(
                "Gradients of the tables of a sharded collection have no gradients. Fix: backward() without "
                "create_graph=True."
            )
        with torch.no_grad(), _without_autocast(trigger):
            engine.update_rows(exchange, grads[0])
        return None, None, None


def _without_autocast(like: Tensor) -> torch.autocast:
    """Sums and updates stay in float32, also if backward is called in a region of autocast."""
    return torch.autocast(like.device.type, enabled=False)
