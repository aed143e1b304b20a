"""Expert parallelism: a token is sent only to ranks that hold experts it chose, and their weighted sum comes back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from shardwise._layout import PARTIAL, REPLICATE, Count, Placement, Shard, checked, checked_init
from shardwise._lookups.bad_ids import id_axes, raise_bad_ids, refuse_bad_ids, verdict_on
from shardwise._rules import Meta, OpRule, Row
from shardwise._rules.local_context import LocalContext
from shardwise._rules.local_tensors import has_values
from shardwise._rules.registry import register
from shardwise._rules.row_exchange import route_rows
from shardwise.errors import ConfigError, IdError, IdTypeError, LayoutError, PlanError
from shardwise.parallel.styles import (
    InputFn,
    ModuleContext,
    ModuleInputs,
    OutputFn,
    ParallelStyle,
    PlacementsLike,
    first_input,
    forward_arguments,
)

Span = tuple[int, int]
BY_TOKENS = Shard(0)
Compute = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
IDS_OF_WIDTH = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of an element of a token


@checked
def mix_experts(
    chosen: Tensor, w1: Tensor, w2: Tensor, tokens: Tensor, weights: Tensor, *, compute: Compute | None = None
) -> Tensor:
    """out[t] = the sum over j of weights[t, j] · w2[e] · gelu(w1[e] · tokens[t]), with e = chosen[t, j].

    Every token gets all the experts it chose: there is no capacity, and none is dropped.

    Args:
        chosen: indices of experts, (tokens, k), int64.
        w1, w2: weights of the experts, (experts, hidden, dim) and (experts, dim, hidden).
        tokens: (tokens, dim), of the dtype of the experts.
        weights: of the chosen experts, (tokens, k); converted to the dtype of the tokens.
        compute: other experts than those of the formula. It gets plain tensors of pairs, sorted by expert: experts
            (pairs,), w1 and w2 of this rank, tokens (pairs, dim), weights (pairs,); and returns weighted outputs,
            (pairs, dim), that depend on all that needs a gradient. w1 and w2 may then have any dims after the first.

    Returns:
        (tokens, dim). If tokens and experts are sharded on an axis, both along their first dim and in any sizes, a
        token goes once to every rank that has experts of it, and one sum comes back. If only the experts are sharded,
        by experts or by hidden features, the result is Partial, and nothing is sent.

    Sends: for every token, to every other rank with experts of it, a row of dim + 2 k elements, and a row of dim
        elements back; before these, 24 bytes to each other rank. The gradients: equal rows, without the 24 bytes.

    Raises:
        IdError: a number that is not an expert; the same on every rank that takes part.
        IdTypeError: dtypes that do not fit together.
        LayoutError: shapes, or layouts of `w1` and `w2`, that do not fit together.
    """
    operands = (chosen, w1, w2, tokens, weights)
    if has_torch_function(operands):
        options: dict[str, Any] = {} if compute is None else {"compute": compute}
        return handle_torch_function(mix_experts, operands, *operands, **options)
    _check_shapes([x.shape for x in operands], compute is not None)
    _check(*operands)
    chosen = _with_values(chosen, len(w1))
    bad = ((chosen < 0) | (chosen >= len(w1))).nonzero().tolist()
    if bad:
        row, column = bad[0]
        raise IdError(
            f"mix_experts: there is no expert {int(chosen[row, column])}, chosen at {(row, column)}. "
            f"Experts are 0 to {len(w1) - 1}. Fix: choose by a topk over {len(w1)} scores of a token."
        )
    return _mixed(chosen, w1, w2, tokens, weights, compute or _two_products)


def _check(chosen: Tensor, w1: Tensor, w2: Tensor, tokens: Tensor, weights: Tensor) -> None:
    if chosen.dtype != torch.int64:
        raise IdTypeError(f"mix_experts: chosen experts are int64, got {chosen.dtype}. Fix: chosen.long().")
    if not w1.dtype == w2.dtype == tokens.dtype:
        raise IdTypeError(
            f"mix_experts: tokens and experts share a dtype, got {tokens.dtype}, {w1.dtype} and {w2.dtype}. "
            f"Fix: convert the tokens."
        )


def _check_shapes(shapes: Sequence[Sequence[int]], any_experts: bool) -> None:
    chosen, w1, w2, tokens, weights = shapes
    n, k = chosen if len(chosen) == 2 else (-1, -1)
    count, hidden, dim = w1 if len(w1) == 3 else (-1, -1, -1)
    fit = tuple(w2) == (count, dim, hidden)
    if any_experts:
        fit, dim = tuple(w1[:1]) == tuple(w2[:1]), tokens[-1] if tokens else -1
    if not fit or tuple(tokens) != (n, dim) or tuple(weights) != (n, k):
        raise LayoutError(
            "mix_experts wants chosen (tokens, k), w1 (experts, hidden, dim), w2 (experts, dim, hidden), tokens "
            f"(tokens, dim) and weights (tokens, k); got {', '.join(str(tuple(s)) for s in shapes)}. "
            f"Fix: tokens.flatten(0, -2) for a batch of sequences; weights stacked along dim 0, one expert after the "
            f"other."
        )


def _mixed(chosen: Tensor, w1: Tensor, w2: Tensor, tokens: Tensor, weights: Tensor, compute: Compute) -> Tensor:
    """The weighted sums of the experts of this rank; indices of other experts add nothing."""
    rows, columns = ((chosen >= 0) & (chosen < len(w1))).nonzero(as_tuple=True)
    order = chosen[rows, columns].argsort(stable=True)
    rows, columns = rows[order], columns[order]
    x, factors = tokens[rows], weights[rows, columns].to(tokens.dtype)
    if len(rows):
        made = compute(chosen[rows, columns], w1, w2, x, factors)
    else:  # a rank without tokens stays in the graph, as its backward takes part in collectives
        made = (x + (w1.sum() + w2.sum())) * factors.unsqueeze(1)
    return torch.zeros_like(tokens).index_add(0, rows, made)


def _two_products(experts: Tensor, w1: Tensor, w2: Tensor, tokens: Tensor, weights: Tensor) -> Tensor:
    counts = torch.bincount(experts, minlength=len(w1)).tolist()
    each = [F.gelu(y @ a.t()) @ b.t() for y, a, b in zip(tokens.split(counts), w1, w2, strict=True)]
    return torch.cat(each) * weights.unsqueeze(1)


# ---- on distributed tensors ---------------------------------------------------------------------------------


def _rows(chosen: Meta, w1: Meta, w2: Meta, tokens: Meta, weights: Meta, compute: Compute | None = None) -> list[Row]:
    _check_shapes([x.shape for x in (chosen, w1, w2, tokens, weights)], compute is not None)
    shard, full = Shard(0), REPLICATE

    def row(ids: Placement, first: Placement, second: Placement, out: Placement, why: str) -> Row:
        align = (0, 3, 4) if ids == shard else (1, 2)
        return Row((ids, first, second, ids, ids), out, why, _on_locals, align, layout_from=3)

    by_features = row(full, Shard(1), Shard(2), PARTIAL, "each rank sums over its hidden features for all tokens")
    return [
        row(full, full, full, full, "every rank has all tokens and all experts"),
        row(shard, full, full, shard, "each rank has some tokens and all experts"),
        row(full, shard, shard, PARTIAL, "each rank sums the outputs of its experts for all tokens"),
        *([by_features] if compute is None else []),
        row(shard, shard, shard, shard, "tokens are sent to their experts and back"),
    ]


def _on_locals(
    ctx: LocalContext,
    chosen: Tensor,
    w1: Tensor,
    w2: Tensor,
    tokens: Tensor,
    weights: Tensor,
    compute: Compute | None = None,
) -> Tensor:
    _check(chosen, w1, w2, tokens, weights)
    ids, table = ctx.layouts[:2]
    chosen = _with_values(chosen, table.shape[0])
    axes = tuple(
        axis
        for axis, (a, b) in enumerate(zip(ids.placements, table.placements, strict=True))
        if ids.mesh.shape[axis] > 1 and a.is_shard(0) and b.is_shard(0)
    )
    if axes:
        return _exchanged(ctx, ctx.ranks(axes), chosen, w1, w2, tokens, weights, compute or _two_products)
    refuse_bad_ids(ctx, chosen, None)
    return _mixed(chosen - _experts_of(ctx, ctx.rank)[0], w1, w2, tokens, weights, compute or _two_products)


def balanced_choices(count: int, top_k: int, experts: int) -> Tensor:
    """Balanced experts of tokens in a simulation, (count, top_k).

    Experts of one token are far from each other, so a token goes to as many ranks as possible.
    """
    first = torch.arange(count).unsqueeze(1)
    return (first + torch.arange(top_k) * (experts // top_k)) % experts


def _with_values(chosen: Tensor, experts: int) -> Tensor:
    """The choices of a router, or, in a simulation of a rank, balanced ones."""
    if has_values(chosen) or chosen.is_meta:
        return chosen
    count, top_k = chosen.shape
    return balanced_choices(count, top_k, experts)


def _experts_of(ctx: LocalContext, rank: int) -> Span:
    """The range of experts on a rank: first, last + 1."""
    if ctx.layouts[1].shard_sizes(0) != ctx.layouts[2].shard_sizes(0):
        raise LayoutError(
            f"mix_experts: w1 and w2 must be sharded alike, got {ctx.layouts[1]} and {ctx.layouts[2]}. "
            f"Fix: w2.redistribute(placements=w1.placements)."
        )
    boxes = ctx.layouts[1].boxes(rank)
    return (boxes[0].offsets[0], boxes[0].offsets[0] + boxes[0].sizes[0]) if boxes else (0, 0)


def _exchanged(
    ctx: LocalContext,
    ranks: tuple[int, ...],
    chosen: Tensor,
    w1: Tensor,
    w2: Tensor,
    tokens: Tensor,
    weights: Tensor,
    compute: Compute,
) -> Tensor:
    """Tokens go to the ranks with their experts, with weights and indices, and sums come back."""
    (num, dim), k = tokens.shape, chosen.shape[1]
    spans = [_experts_of(ctx, rank) for rank in ranks]
    masks = [(chosen >= first) & (chosen < last) for first, last in spans]
    rows = [mask.any(1).nonzero().squeeze(1) for mask in masks]
    everyone = ctx.ranks(id_axes(ctx))  # all ranks with different tokens raise for a bad expert
    counts, verdict = [len(r) for r in rows], verdict_on(ctx, chosen, None)
    route, verdicts = route_rows(ctx.exchange(ranks), counts, verdict, chosen.device, ctx.exchange(everyone))
    raise_bad_ids(ctx, verdicts, everyone)
    experts = [torch.where(mask, chosen - first, -1)[r] for mask, (first, _), r in zip(masks, spans, rows, strict=True)]
    senders = torch.cat(rows)
    # Numbers of experts are sent as the bits of elements: nobody computes with them on the way.
    bits = torch.cat(experts).to(IDS_OF_WIDTH[tokens.element_size()]).view(tokens.dtype)
    received = route.send(torch.cat([tokens[senders], weights[senders].to(tokens.dtype), bits], 1))
    experts_here = received[:, dim + k :].detach().contiguous().view(IDS_OF_WIDTH[tokens.element_size()]).long()
    if not has_values(received):  # on a simulated rank, to which every rank sends what it sends to itself
        experts_here = experts[ranks.index(ctx.rank)].repeat(len(ranks), 1)
    mixed = _mixed(experts_here, w1, w2, received[:, :dim], received[:, dim : dim + k], compute)
    return tokens.new_zeros(num, dim).index_add(0, senders, route.answer(mixed))


register(OpRule(_rows, shape=lambda *operands, **_: operands[3].shape, replicated_impl=_on_locals), mix_experts)


# ---- in a plan ----------------------------------------------------------------------------------------------


@checked_init
@dataclass(frozen=True, kw_only=True)
class ExpertParallel(ParallelStyle):
    """Every rank holds some of the experts of a layer, whose parameters `w1` and `w2` are stacked by experts.

    Other parameters, such as those of a router, are replicated. The layer may also be one of transformers: its forward
    takes `hidden_states`, `top_k_index` and `top_k_weights`, and its only parameters are two stacks. Then each rank
    runs the layer's own forward with its experts.

    Args:
        input_layouts: the layout of a plain input. Shard(0): the tokens of each rank are sent to their experts;
            Replicate(): each rank computes the outputs of its own experts.
        output_layouts: the layout that the output is redistributed to.
        use_local_output: return this rank's local tensor.
        sizes: number of experts on every rank; None divides them as `torch.chunk`.
    """

    input_layouts: PlacementsLike = BY_TOKENS
    output_layouts: PlacementsLike = BY_TOKENS
    use_local_output: bool = True
    sizes: tuple[int, ...] | None = None

    def parameters(self, module: nn.Module, context: ModuleContext) -> Mapping[str, PlacementsLike]:
        return dict.fromkeys(stacked_experts(module), Shard(0, self.sizes))

    def shards_batch(self, context: ModuleContext) -> bool:
        return context.axes(self.input_layouts)[context.axis] != REPLICATE

    def input_fn(self, module: nn.Module, context: ModuleContext) -> InputFn:
        if not is_dispatched(module):
            return first_input(module, context.redistribution(self.input_layouts, None))
        each = [context.redistribution(self.input_layouts, None, what=f"{name}, an input") for name in DISPATCHED]
        return ModuleInputs(each, dict(zip(DISPATCHED, each, strict=True)))

    def forward_fn(self, module: nn.Module, context: ModuleContext) -> Callable[..., Tensor] | None:
        return _DispatchedForward(module, type(module), stacked_experts(module)) if is_dispatched(module) else None

    def output_fn(self, module: nn.Module, context: ModuleContext) -> OutputFn:
        return context.redistribution(
            None, self.output_layouts, use_local_output=self.use_local_output, what="the output"
        )


# ---- layers of transformers ---------------------------------------------------------------------------------

DISPATCHED = ("hidden_states", "top_k_index", "top_k_weights")  # arguments of their forward


def is_dispatched(module: nn.Module) -> bool:
    """Whether a layer gets tokens with their experts, as those of transformers do, and has no router."""
    return hasattr(module, "num_experts") and tuple(forward_arguments(module).positional) == DISPATCHED


def stacked_experts(module: nn.Module) -> tuple[str, str]:
    """The names of the two parameters of a layer that are stacked by experts.

    Raises:
        PlanError: the layer has other parameters.
    """
    dispatched = is_dispatched(module)
    names = [
        name
        for name, p in module.named_parameters()
        if dispatched or (name.rpartition(".")[2] in ("w1", "w2") and p.ndim == 3)
    ]
    if len(names) != 2 or (dispatched and {p.shape[0] for p in module.parameters()} != {module.num_experts}):
        raise PlanError(
            f"ExpertParallel knows layers with one w1 and one w2, each of three dims, stacked by experts, and layers "
            f"of transformers with two stacks; {type(module).__name__} has {names}. "
            f"Fix: name such a layer in the plan, or write a style for this one."
        )
    return names[0], names[1]


@dataclass(frozen=True)
class _DispatchedForward:
    """The forward of a layer of transformers whose experts are sharded."""

    module: nn.Module
    kind: type[nn.Module]
    names: tuple[str, str]

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        w1, w2 = (getattr(self.module, name) for name in self.names)
        compute = _OwnForward(self.kind, self.names, ref(self.module))
        return mix_experts(top_k_index, w1, w2, hidden_states, top_k_weights, compute=compute)


@dataclass(frozen=True)
class _OwnForward:
    """The forward of a layer's class with the experts of one rank. Layers of a class have equal keys in caches."""

    kind: type[nn.Module]
    names: tuple[str, str]
    module: "ref[nn.Module]" = field(compare=False)

    def __call__(self, experts: Tensor, w1: Tensor, w2: Tensor, tokens: Tensor, weights: Tensor) -> Tensor:
        layer: Any = object.__new__(self.kind)
        own = dict(zip(self.names, (w1, w2), strict=True))
        vars(layer).update({**vars(self.module()), "_parameters": own, "num_experts": len(w1)})
        out: Tensor = self.kind.forward(layer, tokens, experts.unsqueeze(1), weights.unsqueeze(1))
        return out


class Routing(NamedTuple):
    """The output of a router.

    Attributes:
        chosen: indices of experts, (tokens, k), the most probable first.
        weights: of the chosen experts, (tokens, k); those of a token add up to 1.
        probabilities: of all experts, (tokens, experts).
    """

    chosen: Tensor
    weights: Tensor
    probabilities: Tensor


@checked_init
class MixtureOfExperts(nn.Module):
    """The weighted sum of the `top_k` most probable experts of each token, none of which is dropped.

    Plain torch in one process. On several ranks, shard `w1` and `w2` along dim 0, with `shard_module` or
    `shardwise.parallel.ExpertParallel`; see `mix_experts` for its communication.

    Args:
        dim: width of a token.
        hidden_dim: width inside an expert.
        num_experts: number of experts.
        top_k: number of experts per token.
    """

    def __init__(self, dim: Count, hidden_dim: Count, num_experts: Count, top_k: Count = 2) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ConfigError(
                f"top_k must be from 1 to {num_experts}, the number of experts, got {top_k}. "
                f"Fix: top_k={min(max(top_k, 1), num_experts)}."
            )
        self.num_experts = num_experts
        self.top_k = top_k
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights with standard deviation 1 / sqrt(inputs)."""
        for weight in (self.router.weight, self.w1, self.w2):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    def route(self, tokens: Tensor) -> Routing:
        """The experts that compute tokens, (tokens, dim)."""
        probabilities = F.softmax(self.router(tokens), -1)
        weights, chosen = probabilities.topk(self.top_k, -1)
        return Routing(chosen, weights / weights.sum(-1, keepdim=True), probabilities)

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)."""
        tokens = x.flatten(0, -2)
        routing = self.route(tokens)
        return mix_experts(routing.chosen, self.w1, self.w2, tokens, routing.weights).view(x.shape)


@checked
def balance_loss(routing: Routing) -> Tensor:
    """1 if experts are chosen equally often, up to the number of experts if not.

    num_experts · Σ_e (fraction of choices of e) · (mean probability of e)
    (Fedus et al., Switch Transformers, 2021, equation 4). Gradient: to the probabilities.
    """
    probabilities = routing.probabilities
    count = probabilities.shape[-1]
    shares = F.one_hot(routing.chosen, count).sum(1).to(probabilities.dtype).mean(0) / routing.chosen.shape[-1]
    return count * (shares * probabilities.mean(0)).sum()
