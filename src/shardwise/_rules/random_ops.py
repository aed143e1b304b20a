"""Random ops: the number of an element comes from its global index (`counter_rng`), in any layout.

Every row, also the replicated one, runs a local implementation of this file, which draws one seed and generates the
numbers of the local shard. Torch checks the arguments on one element before anything is drawn. Errors that depend on
values (a probability above 1) are agreed on with ranks of other values in one small collective.

All values of a Partial tensor get one dropout mask, so dropout needs no reduction; its gradient is that of a product
with the mask.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise._layout import REPLICATE, Box, Layout, OnRanks, Partial, Shard
from shardwise._rules import counter_rng
from shardwise._rules.counter_rng import Sampler
from shardwise._rules.local_context import LocalContext, local_with
from shardwise._rules.pointwise import PARTIALS, SUMS, broadcast, filled_like, nonlinear, shape_of_first, shard_rows
from shardwise._rules.registry import OpRule, RowsFunction, forms_of, functions_named, register
from shardwise._rules.row import Kwargs, LocalFunction, Meta, Op, Row
from shardwise._trace.capture_hooks import allow_in_graph

aten = torch.ops.aten

# Distribution and its parameters with their defaults, by the name of the op.
DISTRIBUTIONS: dict[str, tuple[Callable[..., Tensor], dict[str, float | None]]] = {
    "uniform": (counter_rng.uniform_between, {"from": 0.0, "to": 1.0}),
    "normal": (counter_rng.normal_with, {"mean": 0.0, "std": 1.0}),
    "log_normal": (counter_rng.log_normal, {"mean": 1.0, "std": 2.0}),
    "cauchy": (counter_rng.cauchy, {"median": 0.0, "sigma": 1.0}),
    "exponential": (counter_rng.exponential, {"lambd": 1.0}),
    "geometric": (counter_rng.geometric, {"p": None}),
    "bernoulli": (counter_rng.bernoulli, {"p": 0.5}),
    "rand_like": (counter_rng.uniform_between, {"from": 0.0, "to": 1.0}),
    "randn_like": (counter_rng.normal_with, {"mean": 0.0, "std": 1.0}),
}
OPTIONS = ("dtype", "device", "pin_memory")  # options of a new tensor


# ---- rows ---------------------------------------------------------------------------------------------------


def check_arguments(op: Op, *args: object, **kwargs: object) -> None:
    """Check the arguments by torch on one element (one row of categories), without a change of its generator."""
    kwargs = {k: None if k == "generator" else v for k, v in kwargs.items() if k != "device"}
    try:
        _try(op, args, kwargs, {})
    except NotImplementedError:
        try:  # torch has some ops in half precision on other devices only
            _try(op, args, kwargs, {torch.float16: torch.float32, torch.bfloat16: torch.float32})
        except NotImplementedError as error:  # from a rule, NotImplementedError means that no row fits
            raise TypeError(f"{error}") from error


def _try(op: Op, args: Sequence[Any], kwargs: Kwargs, dtypes: dict[torch.dtype, torch.dtype]) -> None:
    def one_element(x: Any) -> Any:
        if isinstance(x, Meta):
            categories = x.shape[-1:] if op in MULTINOMIAL else (1,) * min(x.ndim, 1)
            return torch.ones((*(1,) * (x.ndim - 1), *categories), dtype=dtypes.get(x.dtype, x.dtype))
        return None if isinstance(x, torch.Generator) else x

    with torch.random.fork_rng(devices=[]):
        op(*map(one_element, args), **{k: one_element(v) for k, v in kwargs.items()})


def _checked(op: Op, rows: RowsFunction, local: LocalFunction, *args: object, **kwargs: object) -> list[Row]:
    """Rows of a random op, all with its local implementation."""
    check_arguments(op, *args, **kwargs)
    return [replace(row, local_impl=local) for row in rows(*args, **kwargs)]


def _refilled(x: Meta, *args: object, **kwargs: object) -> list[Row]:
    """x becomes random; its values are not read."""
    return [*shard_rows([x]), *(Row((p,), p, "one Partial value holds the random numbers") for p in PARTIALS)]


def _bernoulli_rows(x: Meta, *args: object, **kwargs: object) -> list[Row]:
    """out is shaped like x, which holds the probabilities unless they are given."""
    return (filled_like if args or "p" in kwargs else nonlinear)(x)


def _multinomial_rows(x: Meta, *args: object, **kwargs: object) -> list[Row]:
    """out[i, j]: a category of row i, so categories are not sharded."""
    rows = [Row((Shard(0),), Shard(0), "sharded rows")] if x.ndim == 2 else []
    if isinstance(x.placement, OnRanks):
        rows.append(Row((x.placement,), x.placement, "the rank that stores the rows draws"))
    return rows


# ---- local numbers ------------------------------------------------------------------------------------------


def fill(
    out: Tensor, ctx: LocalContext, layout: Layout, sampler: Sampler, generator: torch.Generator | None = None
) -> Tensor:
    """`out`, filled as the local tensor of a random tensor of this layout."""
    counter_rng.fill(out, layout.boxes(ctx.rank), layout.shape, ctx.draw_seed(generator), sampler)
    return out


def _numbers(
    ctx: LocalContext, sampler: Sampler, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None
) -> Tensor:
    """The local tensor of a random tensor with the layout of the op's result."""
    out = torch.empty(ctx.output.local_shape(ctx.rank), dtype=dtype, device=device)
    return fill(out, ctx, ctx.output, sampler, generator)


def _sampler(name: str, dtype: torch.dtype, args: Sequence[Any], kwargs: Kwargs) -> Sampler:
    if name in ("random", "randint_like"):
        return partial(counter_rng.integers, *_range(dtype, args, kwargs))
    distribution, defaults = DISTRIBUTIONS[name]
    given = defaults | dict(zip(defaults, args, strict=False)) | {k: kwargs[k] for k in defaults if k in kwargs}
    return partial(distribution, *given.values())


def _range(dtype: torch.dtype, args: Sequence[Any], kwargs: Kwargs) -> tuple[int, int]:
    """The range of `(high)` or `(low, high)`; without high, the largest range of exact integers of the dtype."""
    low, high = (kwargs.get("from", kwargs.get("low")), kwargs.get("to", kwargs.get("high")))
    if len(args) == 1 and high is None:
        high = args[0]
    elif args:
        low, high = (*args, high)[:2]
    if high is None and dtype.is_floating_point:
        high = int(2 / torch.finfo(dtype).eps) + 1
    elif high is None:
        high = 2 if dtype == torch.bool else torch.iinfo(dtype).max + 1
    return int(low or 0), int(high)


@allow_in_graph
def refuse(ctx: LocalContext, bad: Tensor, message: str) -> None:
    """Raise on every rank if a value is bad on any; communicates only with ranks of other values."""
    mesh, found = ctx.layouts[0].mesh, bad.any().long().view(1)
    axes = [a for a in range(mesh.ndim) if any(not x.placements[a].is_replicate() for x in ctx.layouts)]
    ranks = ctx.ranks(axes) if mesh.coordinate(ctx.rank) is not None else ()
    if len(ranks) > 1:
        found = ctx.all_gather(found, ranks)
    if found.any():
        raise RuntimeError(message)


def without_gradient(values: Tensor, *sources: object) -> Tensor:
    """Random values whose gradient with respect to their parameters is zero, as in torch."""
    yes = torch.ones((), dtype=torch.bool, device=values.device)
    for x in sources:
        if isinstance(x, Tensor) and x.requires_grad:
            values = torch.where(yes, values, x).to(values.dtype)
    return values


# ---- local functions ----------------------------------------------------------------------------------------


def _refill(name: str, ctx: LocalContext, x: Tensor, *args: object, **kwargs: Any) -> Tensor:
    layout, generator = ctx.layouts[0], kwargs.get("generator")
    # Autograd must record one op that changes x, not one for each chunk.
    new = torch.empty_like(x) if x.requires_grad and torch.is_grad_enabled() else x
    fill(new, ctx, layout, _sampler(name, x.dtype, args, kwargs), generator)
    identity = layout.identity_element(ctx.rank)
    if identity is not None:
        new.fill_(identity)
    return x if new is x else x.copy_(new)


def _like(name: str, ctx: LocalContext, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    out = torch.empty_like(x.detach(), **{k: v for k, v in kwargs.items() if k in OPTIONS})
    fill(out, ctx, ctx.output, _sampler(name, out.dtype, args, kwargs), kwargs.get("generator"))
    return out.requires_grad_(kwargs.get("requires_grad", False))


def _bernoulli(
    ctx: LocalContext, x: Tensor, p: float | Tensor | None = None, *, generator: torch.Generator | None = None
) -> Tensor:
    if isinstance(p, float | int):
        return without_gradient(_like("bernoulli", ctx, x, p, generator=generator), x)
    probability = x.detach()
    refuse(ctx, ~((probability >= 0) & (probability <= 1)), "bernoulli expects probabilities from 0 to 1.")
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return without_gradient(
        (_numbers(ctx, counter_rng.uniform, wide, x.device, generator) < probability).to(x.dtype), x
    )


def _normal(ctx: LocalContext, mean: Any, std: Any = 1.0, *, generator: torch.Generator | None = None) -> Tensor:
    if isinstance(std, Tensor):
        refuse(ctx, ~(std >= 0), "normal expects all elements of std >= 0.0")
    like = mean if isinstance(mean, Tensor) else std
    scale, shift = (x.detach() if isinstance(x, Tensor) else x for x in (std, mean))
    numbers = _numbers(ctx, counter_rng.normal, like.dtype, like.device, generator)
    return without_gradient((numbers * scale + shift).to(like.dtype), mean, std)


def _rrelu(
    ctx: LocalContext,
    x: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    if not training:
        return F.leaky_relu(x, (lower + upper) / 2)
    slopes = _numbers(ctx, partial(counter_rng.uniform_between, lower, upper), x.dtype, x.device, generator)
    return x * slopes.masked_fill_(~(x.detach() <= 0), 1)


def _multinomial(
    ctx: LocalContext,
    x: Tensor,
    num_samples: int,
    replacement: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    p = x.detach().double()
    refuse(ctx, ~(p >= 0) | p.isinf(), "probability tensor contains either `inf`, `nan` or element < 0")
    here = bool(ctx.layouts[0].boxes(ctx.rank))  # an empty shard sums to 0
    refuse(ctx, (p.sum(-1) == 0) & here, "invalid multinomial distribution (sum of probabilities <= 0)")
    if not replacement:  # the categories with the smallest exponential variables of rate p
        times = fill(torch.empty_like(p), ctx, ctx.layouts[0], partial(counter_rng.exponential, 1.0), generator)
        return torch.sort(p / times, dim=-1, descending=True, stable=True)[1][..., :num_samples].contiguous()
    sums = p.cumsum(-1)
    total = sums[..., -1:]
    at = _numbers(ctx, counter_rng.uniform, torch.float64, x.device, generator) * total
    at = torch.minimum(
        at, torch.nextafter(total, torch.zeros_like(total))
    )  # rounding up must not pass the last category
    return torch.searchsorted(sums, at, right=True)


# ---- dropout --------------------------------------------------------------------------------------------------

SELU_SCALE = (
    1.7580993408473766  # -alpha times scale of SELU (arXiv 1706.02515): the value of units that alpha dropout drops
)


def _dropout_rows(linear: bool, results: int, x: Meta, p: float, train: bool | None = True) -> list[Row]:
    """out[i] = x[i] or 0, scaled; alpha dropout adds a constant, so it is not linear."""
    rows = list(shard_rows([x]))
    off = train is False or p == 0
    rows += [Row((q,), q, "one mask for all Partial values") for q in (PARTIALS if off else SUMS if linear else ())]
    if results == 1:
        return rows
    masks = [REPLICATE if isinstance(row.output, Partial) else row.output for row in rows]
    return [replace(row, output=(row.output, mask)) for row, mask in zip(rows, masks, strict=True)]  # type: ignore[arg-type]


def _dropout(alpha: bool, features: bool, ctx: LocalContext, x: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0 or not prod(ctx.output.shape):
        return x
    noise = _kept(ctx, x, p, features)
    if p == 1:
        return x * noise
    if not alpha:
        return x * noise.div_(1 - p)
    a = ((SELU_SCALE**2 * p + 1) * (1 - p)) ** -0.5
    shift = (noise - 1).mul_(SELU_SCALE * a).add_(SELU_SCALE * a * p)
    return x * noise.mul_(a) + shift


def _kept(ctx: LocalContext, x: Tensor, p: float, features: bool) -> Tensor:
    """1 for a kept element (or channel, by the first two dims), else 0; broadcasts to x."""
    sampler, layout = partial(counter_rng.bernoulli, 1 - p), ctx.layouts[0]
    boxes, shape = layout.boxes(ctx.rank), layout.shape
    if not features:
        return fill(torch.empty_like(x.detach()), ctx, layout, sampler)
    seed, masks = ctx.draw_seed(), []
    for box in boxes:
        mask = x.new_empty(box.sizes[:2])
        counter_rng.fill(mask, [Box(box.offsets[:2], box.sizes[:2])], shape[:2], seed, sampler)
        masks.append(mask.view(*box.sizes[:2], *(1,) * (len(shape) - 2)))
    if len(boxes) == 1:
        return masks[0]
    flat = [mask.expand(box.sizes).reshape(-1) for mask, box in zip(masks, boxes, strict=True)]
    return torch.cat(flat) if flat else torch.empty_like(x.detach())


def _native_dropout(ctx: LocalContext, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if not prod(ctx.output.shape):
        return x.clone(), torch.empty_like(x)  # torch's mask of an empty tensor is not boolean
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    noise = _kept(ctx, x, p, False)
    mask = noise.bool()
    return x * (noise.div_(1 - p) if p < 1 else noise), mask


# ---- the table ----------------------------------------------------------------------------------------------

MULTINOMIAL = (torch.multinomial, Tensor.multinomial, aten.multinomial.default)


def register_random(ops: Sequence[Op], rows: RowsFunction, local: LocalFunction, **kwargs: Any) -> None:
    for op in ops:
        register(OpRule(partial(_checked, op, rows, local), replicated_impl=local, random=True, **kwargs), op)


register_random([aten.bernoulli_.float], _refilled, local_with(_refill, "bernoulli"), in_place=True)
for _name in ("uniform", "normal", "log_normal", "cauchy", "exponential", "geometric", "random"):
    for _op, _in_place in forms_of(_name):
        if _in_place:
            register_random([_op], _refilled, local_with(_refill, _name), in_place=True)
        elif _name != "normal":
            register_random([_op], filled_like, local_with(_like, _name), shape=shape_of_first)
for _name in ("rand_like", "randn_like", "randint_like"):
    _ops = [op for op in functions_named(_name) if "Tensor" not in str(op)]
    register_random(_ops, filled_like, local_with(_like, _name), shape=shape_of_first)
_bernoullis: list[Op] = [torch.bernoulli, Tensor.bernoulli, aten.bernoulli.default, aten.bernoulli.p]
register_random(_bernoullis, _bernoulli_rows, _bernoulli, shape=shape_of_first)
_normals: list[Op] = [torch.normal, aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor]
register_random(_normals, nonlinear, _normal, shape=broadcast)
register_random([torch.rrelu], nonlinear, _rrelu, shape=shape_of_first)
register_random(
    MULTINOMIAL, _multinomial_rows, _multinomial, shape=lambda x, num_samples, *_, **__: (*x.shape[:-1], num_samples)
)
for _op, _alpha, _features in (
    (torch.dropout, False, False), (torch.feature_dropout, False, True),
    (torch.alpha_dropout, True, False), (torch.feature_alpha_dropout, True, True),
):  # fmt: skip
    _local = local_with(_dropout, _alpha, _features)
    register_random([_op], partial(_dropout_rows, not _alpha, 1), _local, shape=shape_of_first)
_natives = torch.native_dropout, aten.native_dropout.default
register_random(_natives, partial(_dropout_rows, True, 2), _native_dropout, shape=lambda x, *_: [x.shape] * 2)
