"""One call of an op on distributed tensors, judged beside the same call in one process.

The plain call is made once; then the tensors among the arguments are laid out on simulated ranks in any way, the
op runs forward and backward on every rank, and what the ranks see is compared with what the plain call gave.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import isclose
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import collectives
from shardwise.errors import ShardwiseError
from shardwise.layout import REPLICATE, Layout, Mesh, Placement
from shardwise.tensor import DTensor
from shardwise.testing.failures import DeadlockError
from shardwise.testing.worlds import world

SEED = 1234
REFUSED = "torch raises too"
# Relative to an element and to the largest one: replicas add in another order than one process does.
TOLERANCE = {
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float64: 1e-7,
    torch.complex128: 1e-7,
}
Layouts = Sequence[Layout | None]  # one a tensor argument; None leaves that one plain


class Outcome(StrEnum):
    """What came of a call, from good to bad."""

    RIGHT = "right"
    CLEAR_ERROR = "clear error"
    OTHER_ERROR = "other error"
    WRONG_GRADIENT = "wrong gradient"
    WRONG_KIND = "wrong shape or dtype"
    WRONG_VALUE = "silently wrong value"
    SOME_RANKS = "error on some ranks"
    HANG = "hang"
    CRASH = "crash"

    @property
    def badness(self) -> int:
        return list(Outcome).index(self)


@dataclass(frozen=True)
class Verdict:
    """An outcome, why it is not better, and how many operands the call moved by itself."""

    outcome: Outcome
    message: str = ""
    implicit: int = 0
    late: bool = False  # a rank may still be running: the process should not be used for other calls


@dataclass(frozen=True)
class OpCall:
    """One call of an op.

    Attributes:
        op: the function.
        args, kwargs: its arguments; tensors anywhere among them, `requires_grad` where gradients are wanted.
        in_place: the op changes its first tensor, which is therefore a copy of a leaf.
        defined: what of the result is differentiated, where not all of it is unique.
        valued: False where the result is memory that nobody wrote.
    """

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    in_place: bool = False
    defined: Callable[[Any], Any] = lambda result: result
    valued: bool = True

    @property
    def tensors(self) -> list[Tensor]:
        """The tensor arguments in their order."""
        return [x for x in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(x, Tensor)]

    def on(self, tensors: Sequence[Tensor]) -> Any:
        """The op with other tensors in place of its own."""
        rest = iter(tensors)
        args, kwargs = pytree.tree_map(lambda x: next(rest) if isinstance(x, Tensor) else x, (self.args, self.kwargs))
        return self.op(*args, **kwargs)

    def __str__(self) -> str:
        return ", ".join([*map(_shown, self.args), *(f"{k}={_shown(a)}" for k, a in self.kwargs.items())])


def _shown(a: Any) -> str:
    if isinstance(a, Tensor):
        return f"{str(a.dtype).removeprefix('torch.')}{list(a.shape)}"
    return f"[{', '.join(map(_shown, a))}]" if isinstance(a, list | tuple) else repr(a)


@dataclass
class Seen:
    """What one process or rank saw of a call."""

    values: list[Any] = field(default_factory=list)  # whole tensors and numbers, and what changed in place
    structure: Any = None
    grads: list[Tensor | None] | None = None
    error: Exception | None = None
    stage: str = ""  # where the error was, if not in the op itself
    complaint: str = ""  # how the result contradicts itself
    implicit: int = 0

    @property
    def failure(self) -> str:
        """The error in one line."""
        text = " ".join(str(self.error).split())[:400]
        return f"{f'{self.stage}: ' if self.stage else ''}{type(self.error).__name__}: {text}"


class Judge:
    """Judges one call under any layouts.

    Args:
        call: the call; it is made once in this process, which must not be a rank.
        timeout: seconds after which ranks that still run are given up.
    """

    def __init__(self, call: OpCall, timeout: float = 20.0) -> None:
        self.call = call
        self.timeout = timeout
        torch.manual_seed(SEED)
        self.plain = seen_of(call, [leaf_of(_copy(x), x) for x in call.tensors], backward=True)
        self.is_random = _draws(call)
        if self.plain.stage == "backward":  # torch itself cannot go backward here: compare forward only
            self.plain.error, self.plain.grads = None, None
        self._alone: Seen | None = None

    @property
    def alone(self) -> Seen:
        """What a world of one rank sees: random numbers are compared with those."""
        if self._alone is None:
            self._alone = self.on_ranks([layout_of(x, Mesh((1,)), [REPLICATE]) for x in self.call.tensors], 1)[0]
        return self._alone

    def verdict(self, layouts: Layouts, size: int = 4) -> Verdict:
        """Make the call on `size` ranks with its tensors laid out as `layouts`."""
        try:
            ranks = self.on_ranks(layouts, size)
        except DeadlockError as error:
            return Verdict(Outcome.HANG, str(error), late=True)
        outcome, message = self._judged(ranks)
        return Verdict(outcome, message, ranks[0].implicit)

    def on_ranks(self, layouts: Layouts, size: int) -> Sequence[Seen]:
        """What each of `size` ranks sees; a subclass may ask another library."""
        return world(size, timeout=self.timeout).run(_on_rank, self.call, layouts, self.plain.grads is not None)

    def _judged(self, ranks: Sequence[Seen]) -> tuple[Outcome, str]:
        failed = {rank: seen for rank, seen in enumerate(ranks) if seen.error is not None}
        if failed:
            outcome, message = _of_failures(failed, len(ranks))
            together = outcome in (Outcome.CLEAR_ERROR, Outcome.OTHER_ERROR)
            return (Outcome.RIGHT, REFUSED) if together and self.plain.error is not None else (outcome, message)
        if self.plain.error is not None:
            return Outcome.WRONG_VALUE, f"gives a result where torch raises {self.plain.failure}"
        wanted = self.alone if self.is_random else self.plain
        if wanted.error is not None:
            return Outcome.OTHER_ERROR, f"a world of one rank raises {wanted.failure}"
        found = [x for rank, seen in enumerate(ranks) if (x := self._compared(seen, wanted, rank)) is not None]
        return max(found, key=lambda x: x[0].badness, default=(Outcome.RIGHT, ""))

    def _compared(self, seen: Seen, wanted: Seen, rank: int) -> tuple[Outcome, str] | None:
        why = seen.complaint or _other_kind(seen, self.plain)
        if why:
            return Outcome.WRONG_KIND, f"{why} (rank {rank})"
        if self.call.valued:
            for number, (got, want) in enumerate(zip(seen.values, wanted.values, strict=True)):
                if why := _difference(got, want):
                    return Outcome.WRONG_VALUE, f"result {number} {why} (rank {rank})"
        for number, (grad, due) in enumerate(zip(seen.grads or [], wanted.grads or [], strict=True)):
            if why := _other_gradient(grad, due):
                return Outcome.WRONG_GRADIENT, f"gradient of operand {number} {why} (rank {rank})"
        return None


def _draws(call: OpCall) -> bool:
    """Whether a call draws random numbers; some set the generator back, so each op inside is looked at."""
    drawn: list[Any] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            before = torch.get_rng_state()
            out = func(*args, **(kwargs or {}))
            if not torch.equal(before, torch.get_rng_state()):
                drawn.append(func)
            return out

    with Watch():  # type: ignore[no-untyped-call]
        seen_of(call, [_copy(x) for x in call.tensors], backward=False)
    return bool(drawn)


def _of_failures(failed: dict[int, Seen], size: int) -> tuple[Outcome, str]:
    """Errors are clear if all ranks raise the same one, and it is one of this library."""
    own = {rank: seen for rank, seen in failed.items() if not isinstance(seen.error, DeadlockError)}
    message = next(iter((own or failed).values())).failure
    if not own or "disagree on their collective" in message:
        return Outcome.HANG, message
    if len(own) < size:
        return Outcome.SOME_RANKS, f"ranks {', '.join(map(str, own))}: {message}"
    if not all(isinstance(seen.error, ShardwiseError) for seen in own.values()):
        return Outcome.OTHER_ERROR, message
    if len({seen.failure for seen in own.values()}) > 1:
        return Outcome.OTHER_ERROR, f"a text that differs by rank: {message}"
    return Outcome.CLEAR_ERROR, message


# ---- running ---------------------------------------------------------------------------------------------------


def _on_rank(call: OpCall, layouts: Layouts, backward: bool) -> Seen:
    torch.manual_seed(SEED)
    leaves = [leaf_of(distributed(x.detach(), layout), x) for x, layout in zip(call.tensors, layouts, strict=True)]
    with collectives.count_comms() as comms:
        seen = seen_of(call, leaves, backward)
    seen.implicit = len(comms.implicit)
    return seen


def seen_of(call: OpCall, leaves: Sequence[Tensor], backward: bool) -> Seen:
    """Call, read the result as whole tensors, and go backward from a fixed cotangent."""
    seen = Seen()
    try:
        inputs = [leaves[0].clone(), *leaves[1:]] if call.in_place else leaves
        out = call.on(inputs)
        seen.stage = "reading the result"
        if call.in_place:
            seen.complaint = "" if out is inputs[0] else "the result is not the tensor that was to change"
        flat, seen.structure = pytree.tree_flatten(out)
        everything = [*flat, inputs[0]] if call.in_place else flat
        seen.complaint = next((why for x in everything if (why := _misfit(x))), seen.complaint)
        whole = [_whole(x) for x in everything]
        seen.values = [x.detach().clone() if isinstance(x, Tensor) else x for x in whole]
        if backward:
            seen.stage = "backward"
            result = pytree.tree_unflatten(whole[: len(flat)], seen.structure)
            seen.grads = _gradients(call.defined(result), leaves)
    except Exception as error:  # noqa: BLE001 - any error is an outcome
        seen.error = error
        return seen
    seen.stage = ""
    return seen


def _gradients(result: Any, leaves: Sequence[Tensor]) -> list[Tensor | None]:
    outs = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor) and x.requires_grad]
    if outs:
        torch.autograd.backward(outs, [_cotangent(x) for x in outs])
    grads = [leaf.grad if leaf.requires_grad else None for leaf in leaves]
    return [None if grad is None else _whole(grad).detach() for grad in grads]


def _cotangent(out: Tensor) -> Tensor:
    values = torch.arange(1, out.numel() + 1, dtype=torch.float64).view(out.shape).sin().to(out.dtype)
    return values.to_sparse() if out.layout == torch.sparse_coo else values


def _whole(x: Any) -> Any:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def _misfit(x: Any) -> str:
    """How a distributed tensor contradicts its own layout."""
    if not isinstance(x, DTensor):
        return ""
    expected = x.layout_.local_shape(collectives.rank())
    with torch.no_grad():
        got = tuple(x.to_local().shape)
    return "" if got == expected else f"{x.layout_} means a part of shape {expected}, but the part has {got}"


# ---- operands --------------------------------------------------------------------------------------------------


def _copy(x: Tensor) -> Tensor:
    """With the strides that distributed tensors say they have."""
    x = x.detach()
    return x.clone(memory_format=torch.contiguous_format) if x.layout == torch.strided else x.clone()


def leaf_of(x: Tensor, like: Tensor) -> Tensor:
    return x.requires_grad_(like.requires_grad)


def layout_of(x: Tensor, mesh: Mesh, placements: Sequence[Placement]) -> Layout | None:
    """The layout of an operand; None for one that cannot be laid out, such as a sparse one."""
    return Layout(mesh, placements, x.shape) if x.layout == torch.strided else None


def distributed(x: Tensor, layout: Layout | None) -> Tensor:
    """This rank's part of `x`, as a distributed tensor."""
    if layout is None:
        return x.clone()
    rank = collectives.rank()
    return DTensor.from_local(
        part_of(x, layout, rank), layout.mesh, layout.placements, run_check=False, shape=layout.shape
    )


def part_of(x: Tensor, layout: Layout, rank: int) -> Tensor:
    """What `rank` holds of `x`, as a tensor of its own."""
    (box,) = layout.boxes(rank)
    return _copy(contribution(x, layout, rank)[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))])


def contribution(x: Tensor, layout: Layout, rank: int) -> Tensor:
    """A summand of `x` for a rank of a layout with Partial sums; all of `x` for one without.

    Of every element one contribution is twice its value, another its negative, the rest 0: the sum is exact
    in any order, so that ops with steps can be compared too.
    """
    everyone = layout.contributions()
    if len(everyone) == 1:
        return x
    generator = torch.Generator().manual_seed(SEED)
    roles = torch.rand((len(everyone), *x.shape), generator=generator).argsort(0)
    role = roles[everyone.index(layout.contribution(rank))]
    safe = (2 * x).isfinite()
    twice, rest = torch.where(safe, 2 * x, x), torch.where(safe, -x, torch.zeros_like(x))
    return torch.where(role == 0, twice, torch.where(role == 1, rest, torch.zeros_like(x)))


# ---- comparing -------------------------------------------------------------------------------------------------


def _other_kind(seen: Seen, wanted: Seen) -> str:
    """How structure, types, shapes or dtypes differ."""
    if seen.structure != wanted.structure or len(seen.values) != len(wanted.values):
        return f"the result is {seen.structure}, torch gives {wanted.structure}"
    for number, (got, want) in enumerate(zip(seen.values, wanted.values, strict=True)):
        have, due = _kind(got), _kind(want)
        if have != due:
            return f"result {number} is {have}, torch gives {due}"
    return ""


def _kind(x: Any) -> str:
    if not isinstance(x, Tensor):
        return type(x).__name__
    return _shown(x) + ("" if x.layout == torch.strided else f" {x.layout}")


def _other_gradient(got: Tensor | None, want: Tensor | None) -> str:
    if want is None:
        return "" if got is None or not got.any() else "is not None as in torch"
    if got is None:
        return "is None"
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return f"is {_shown(got)}, torch gives {_shown(want)}"
    return _difference(got, want)


def _difference(got: Any, want: Any) -> str:
    """Where two values differ by more than rounding; "" if they do not."""
    if not isinstance(want, Tensor):
        alike = isclose(got, want, rel_tol=1e-4, abs_tol=1e-5) if isinstance(want, float) else got == want
        both_nan = isinstance(want, float) and got != got and want != want  # noqa: PLR0124 - how nan is told
        return "" if alike or both_nan else f"is {got}, torch gives {want}"
    got, want = (x if x.layout == torch.strided else x.to_dense() for x in (got, want))
    if got.shape != want.shape:
        return f"has shape {tuple(got.shape)}, not {tuple(want.shape)}"
    same = _close(got, want)
    if bool(same.all()):
        return ""
    at = tuple((~same).nonzero()[0].tolist())
    return f"differs in {int((~same).sum())} of {same.numel()} elements, at {at} {got[at].item()} not {want[at].item()}"


def _close(got: Tensor, want: Tensor) -> Tensor:
    relative = TOLERANCE.get(want.dtype)
    if relative is None:
        return got == want
    size = want.abs()
    largest = size[size.isfinite()].max().item() if bool(size.isfinite().any()) else 0.0
    return torch.isclose(got, want, rtol=relative, atol=relative * max(largest, 0.1), equal_nan=True)
