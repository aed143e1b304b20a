"""Does an op on DTensors equal one process? Results, dtypes, gradients and errors of one call on every rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import isclose
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import _collectives as collectives
from shardwise._layout import REPLICATE, Layout, Mesh, Partial
from shardwise._rules.registry import rule_of
from shardwise._rules.row import Args, Kwargs
from shardwise._tensor import DTensor
from shardwise.debug.compare import Bounds, mismatched
from shardwise.errors import ShardwiseError
from shardwise.testing.failures import DeadlockError
from shardwise.testing.local_shards import SEED, dtensor_from_full
from shardwise.testing.process_state import generator_states
from shardwise.testing.worlds import world

T = TypeVar("T")
Layouts = Sequence[Layout | None]  # one for each tensor argument; None leaves that one plain
_ASSERT_CLOSE = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.complex64: (1.3e-6, 1e-5),
}
_RELATIVE = {torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float32: 1e-4, torch.complex64: 1e-4}


SUMS = (Partial("sum"), Partial("avg"))
REFUSED = "torch raises too"


class Outcome(StrEnum):
    """What came of a call or a program, from good to bad."""

    RIGHT = "right"
    UNSTABLE = "unstable"  # a program differs, but in plain torch rounding, or what it does not define, does as much
    CLEAR_ERROR = "clear error"  # of this library, the same on every rank
    LENIENT = "lenient"  # a program runs where torch raises
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


GOOD = (Outcome.RIGHT, Outcome.UNSTABLE, Outcome.CLEAR_ERROR)


@dataclass(frozen=True)
class Verdict:
    """An outcome.

    Attributes:
        message: why it is not better.
        implicit: operands that the call redistributed by itself.
        fallbacks: aten ops that ran replicated.
        late: a rank may still be running: the process should not be used for other calls.
    """

    outcome: Outcome
    message: str = ""
    implicit: int = 0
    fallbacks: frozenset[str] = frozenset()
    late: bool = False

    def __str__(self) -> str:
        return f"{self.outcome}: {self.message}"


@dataclass(frozen=True)
class Sample:
    """One call of an op.

    Attributes:
        op: the function.
        args, kwargs: its arguments; tensors anywhere among them.
        gradients: floating point and complex tensors take gradients.
        constant: indices of tensors that take none.
        tolerance: relative and absolute; None is that of `torch.testing.assert_close`.
        initialized: False if the result is uninitialized memory.
        mutates: the op changes its first tensor; None reads that from the op's rule.
        differentiated: from the gathered result to what is differentiated; None differentiates the result itself.
    """

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    gradients: bool = True
    constant: tuple[int, ...] = ()
    tolerance: float | None = None
    initialized: bool = True
    mutates: bool | None = None
    differentiated: Callable[[Any], Any] | None = None

    def __str__(self) -> str:
        return f"{getattr(self.op, '__name__', str(self.op))}({self.arguments})"

    @property
    def arguments(self) -> str:
        return ", ".join([*map(_shown, self.args), *(f"{k}={_shown(a)}" for k, a in self.kwargs.items())])

    @property
    def in_place(self) -> bool:
        rule = rule_of(self.op)
        return (rule is not None and rule.in_place) if self.mutates is None else self.mutates

    def tensors(self) -> list[Tensor]:
        """The tensor arguments in their order."""
        return tensors_in((self.args, self.kwargs))

    def on(self, tensors: Sequence[object]) -> "Sample":
        """The sample with other tensors, or anything, in place of its tensors."""
        rest = iter(tensors)
        args, kwargs = pytree.tree_map(lambda x: next(rest) if isinstance(x, Tensor) else x, (self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs)

    def call(self, tensors: Sequence[object]) -> object:
        """The op with other tensors in place of its own."""
        other = self.on(tensors)
        return self.op(*other.args, **other.kwargs)

    def leaf(self, x: Tensor, number: int) -> Tensor:
        """`x` as operand `number`, which takes a gradient where the sample says so.

        A product of several ranks' values is not a leaf, which it has no gradient for: the local values are.
        """
        differentiable = x.is_floating_point() or x.is_complex()
        if not (self.gradients and differentiable and number not in self.constant):
            return x
        if isinstance(x, DTensor) and any(p.is_partial("product") for p in x.placements):
            local = x.to_local().requires_grad_()
            return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False, shape=x.shape)
        return x.requires_grad_()


def tensors_in(tree: object) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts, in order."""
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def _shown(a: object) -> str:
    if isinstance(a, Tensor):
        return f"{str(a.dtype).removeprefix('torch.')}{list(a.shape)}"
    return f"[{', '.join(map(_shown, a))}]" if isinstance(a, list | tuple) else repr(a)


# ---- running ---------------------------------------------------------------------------------------------------


@dataclass
class Observed:
    """What one process or rank saw of a call."""

    values: list[Any] = field(default_factory=list)  # full tensors and numbers
    structure: pytree.TreeSpec | None = None
    grads: list[Tensor | None] | None = None
    error: Exception | None = None
    stage: str = ""  # where the error was, if not in the op itself
    complaint: str = ""  # how the result contradicts itself
    implicit: int = 0  # redistributions that the op made by itself
    fallbacks: frozenset[str] = frozenset()  # aten ops that ran replicated, though an operand was not

    @property
    def failure(self) -> str:
        """The error in one line."""
        text = " ".join(str(self.error).split())[:400]
        return f"{f'{self.stage}: ' if self.stage else ''}{type(self.error).__name__}: {text}"


def observe(sample: Sample, leaves: Sequence[Tensor], backward: bool = True) -> Observed:
    """Call the op on `leaves`, gather the result, and run backward from a fixed cotangent."""
    seen = Observed()
    try:
        inputs = [leaves[0].clone(), *leaves[1:]] if sample.in_place else leaves
        out = sample.call(inputs)
        seen.stage = "reading the result"
        if sample.in_place and out is not inputs[0]:
            seen.complaint = "the result is not the tensor that was to change"
        flat, seen.structure = pytree.tree_flatten(out)
        distributed = any(isinstance(x, DTensor) for x in leaves)
        seen.complaint = next((why for x in flat if (why := _layout_error(x, distributed))), seen.complaint)
        full = [full_of(x) for x in flat]
        seen.values = [x.detach().clone() if isinstance(x, Tensor) else x for x in full]
        if backward:
            seen.stage = "backward"
            if sample.differentiated is not None:
                out = sample.differentiated(pytree.tree_unflatten(full, seen.structure))
            seen.grads = _gradients(out, leaves)
    except Exception as error:  # noqa: BLE001 - any error is an outcome
        seen.error = error
        return seen
    seen.stage = ""
    return seen


def _gradients(result: object, leaves: Sequence[Tensor]) -> list[Tensor | None]:
    outs = [x for x in tensors_in(result) if x.requires_grad]
    if outs:
        torch.autograd.backward(outs, list(map(cotangent, outs)))
    grads = [leaf.grad if leaf.requires_grad and leaf.is_leaf else None for leaf in leaves]
    return [None if grad is None else full_of(grad).detach() for grad in grads]


def cotangent(out: Tensor) -> Tensor:
    """A plain gradient for `out`, without regularity; of so few digits that it is equal in all dtypes."""
    numbers = torch.arange(1, out.numel() + 1, dtype=torch.float64).view(out.shape)
    sin, cos = ((x * 128).round() / 128 for x in (numbers.sin(), numbers.cos()))
    values = (torch.complex(sin, cos) if out.is_complex() else sin).to(out.device, out.dtype)
    return values.to_sparse() if out.layout == torch.sparse_coo else values


def full_of(x: T) -> T:
    return x.full_tensor() if hasattr(x, "full_tensor") else x  # a DTensor, or that of another library


def _layout_error(x: object, distributed: bool) -> str:
    """How a result contradicts its own layout, or has none although the operands have; integers may be read as such."""
    if not isinstance(x, DTensor):
        return f"a plain {x.dtype}" if distributed and isinstance(x, Tensor) and x.dtype != torch.int64 else ""
    expected = x.layout_.local_shape(collectives.rank())
    with torch.no_grad():
        got = tuple(x.to_local().shape)
    return "" if got == expected else f"{x.layout_} means a local shape of {expected}, but the local tensor has {got}"


def contiguous_copy(x: Tensor) -> Tensor:
    """With the strides that DTensors report."""
    x = x.detach()
    return x.clone(memory_format=torch.contiguous_format) if x.layout == torch.strided else x.clone()


def plain_run(sample: Sample) -> Observed:
    """What one process sees."""
    return observe(sample, [sample.leaf(contiguous_copy(x), i) for i, x in enumerate(sample.tensors())])


def observe_rank(sample: Sample, layouts: Layouts, backward: bool = True) -> Observed:
    """What this rank sees of a call with its tensors laid out as `layouts`."""
    leaves = _leaves_on(sample, layouts)
    with collectives.count_comms() as comms:
        seen = observe(sample, leaves, backward)
    seen.implicit, seen.fallbacks = len(comms.implicit), frozenset(comms.fallbacks)
    return seen


def _leaves_on(sample: Sample, layouts: Layouts) -> list[Tensor]:
    seed_generators(SEED)
    pairs = zip(sample.tensors(), layouts, strict=True)
    return [sample.leaf(dtensor_from_full(x.detach(), layout), i) for i, (x, layout) in enumerate(pairs)]


def last_saved(sample: Sample, layouts: Layouts) -> int | None:
    """After how many collectives of a call this rank saves the last tensor for backward; None if it saves none.

    The call must raise no error.
    """
    leaves, calls = _leaves_on(sample, layouts), collectives.transport().ledger
    found: list[int] = []

    def pack(x: Tensor) -> Tensor:
        found.append(calls.num_calls)
        return x

    inputs = [leaves[0].clone(), *leaves[1:]] if sample.in_place else leaves
    before = calls.num_calls
    with saved_tensors_hooks(pack, lambda x: x):
        sample.call(inputs)
    return found[-1] - before if found else None


def seed_generators(seed: int) -> None:
    """What `torch.manual_seed` does, in a hundredth of the time where there is no accelerator.

    That notes the stack for each kind of accelerator, in case one is there later.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def draws_random(sample: Sample) -> bool:
    """Whether a call draws random numbers; some calls reset the generator, so each op inside is checked."""
    drew: list[object] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Callable[..., object], types: object, args: Args = (), kwargs: Kwargs | None = None
        ) -> object:
            before = generator_states()
            out = func(*args, **(kwargs or {}))
            if not all(map(torch.equal, before, generator_states())):
                drew.append(func)
            return out

    with Watch():  # type: ignore[no-untyped-call]
        observe(sample, [contiguous_copy(x) for x in sample.tensors()], backward=False)
    return bool(drew)


# ---- judging ---------------------------------------------------------------------------------------------------


def assert_close_bounds(tolerance: float | None) -> Bounds:
    """One tolerance for all dtypes, or that of `torch.testing.assert_close`."""
    if tolerance is not None:
        return lambda want: (tolerance, tolerance)
    return lambda want: _ASSERT_CLOSE.get(want.dtype, (1e-7, 1e-7))


def relative_to_largest(want: Tensor, relative: float) -> tuple[float, float]:
    """Bounds relative to an element, and to the largest one."""
    sizes = want.abs()
    sizes = sizes[sizes.isfinite()]
    return relative, relative * max(sizes.max().item() if sizes.numel() else 0.0, 0.1)


def relative_bounds(want: Tensor) -> tuple[float, float]:
    """Relative to an element and to the largest one: ranks add in another order than one process does."""
    return relative_to_largest(want, _RELATIVE.get(want.dtype, 1e-7))


class Judge:
    """Compares what ranks see of one call with the same call in one process.

    The call is made once in this process, which must not be a rank.
    """

    exact_structure = False  # whether a list instead of a tuple is a difference: aten overloads return either

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        seed_generators(SEED)
        self.plain = plain_run(sample)
        self.is_random = draws_random(sample)
        self._one_rank: Observed | None = None

    @property
    def expected(self) -> Observed:
        """What one process sees; of random numbers, which are our own, what a world of one rank sees."""
        if not self.is_random:
            return self.plain
        if self._one_rank is None:
            layouts = [layout_of(x, Mesh((1,))) for x in self.sample.tensors()]
            self._one_rank = self.on_ranks(layouts, 1)[0]
        return self._one_rank

    def on_ranks(self, layouts: Layouts, size: int) -> Sequence[Observed]:
        """What each of `size` ranks sees."""
        return world(size).run(observe_rank, self.sample, layouts)

    def difference(self, seen: Observed, layouts: Layouts, rank: int, bounds: Bounds) -> tuple[Outcome, str] | None:
        """How what a rank saw differs from one process; None if it does not."""
        if why := seen.complaint or _other_kind(seen, self.plain, self.exact_structure):
            return Outcome.WRONG_KIND, f"{why} (rank {rank})"
        if self.sample.initialized:
            for number, (got, want) in enumerate(zip(seen.values, self.expected.values, strict=True)):
                if why := _difference(got, want, bounds):
                    return Outcome.WRONG_VALUE, f"result {number} {why} (rank {rank})"
        for number, (grad, due) in enumerate(zip(seen.grads or [], self.expected.grads or [], strict=True)):
            if _has_gradient(layouts[number]) and (why := _other_gradient(grad, due, bounds)):
                return Outcome.WRONG_GRADIENT, f"gradient of operand {number} {why} (rank {rank})"
        return None


class OpJudge(Judge):
    """Judges one call under any layouts.

    Args:
        sample: see `Judge`.
        timeout: seconds after which ranks that still run are given up.
    """

    exact_structure = True

    def __init__(self, sample: Sample, timeout: float = 20.0) -> None:
        self.timeout = timeout
        super().__init__(sample)
        if self.plain.stage == "backward":  # torch itself cannot differentiate this: compare forward only
            self.plain.error, self.plain.grads = None, None

    def verdict(self, layouts: Layouts, size: int = 4) -> Verdict:
        """Make the call on `size` ranks with its tensors laid out as `layouts`."""
        try:
            ranks = self.on_ranks(layouts, size)
        except DeadlockError as error:
            return Verdict(Outcome.HANG, str(error), late=True)
        outcome, message = self._judged(ranks, layouts)
        return Verdict(outcome, message, ranks[0].implicit, ranks[0].fallbacks)

    def on_ranks(self, layouts: Layouts, size: int) -> Sequence[Observed]:
        """What each of `size` ranks sees; a subclass may run another library."""
        backward = self.plain.grads is not None
        return world(size, timeout=self.timeout).run(observe_rank, self.sample, layouts, backward)

    def _judged(self, ranks: Sequence[Observed], layouts: Layouts) -> tuple[Outcome, str]:
        failed = {rank: seen for rank, seen in enumerate(ranks) if seen.error is not None}
        if failed:
            outcome, message = _of_failures(failed, len(ranks))
            on_all = outcome in (Outcome.CLEAR_ERROR, Outcome.OTHER_ERROR)
            return (Outcome.RIGHT, REFUSED) if on_all and self.plain.error is not None else (outcome, message)
        if self.plain.error is not None:
            return Outcome.WRONG_VALUE, f"gives a result where torch raises {self.plain.failure}"
        if self.expected.error is not None:
            return Outcome.OTHER_ERROR, f"a world of one rank raises {self.expected.failure}"
        found = [self.difference(seen, layouts, rank, relative_bounds) for rank, seen in enumerate(ranks)]
        return max(filter(None, found), key=lambda x: x[0].badness, default=(Outcome.RIGHT, ""))


def _of_failures(failed: dict[int, Observed], size: int) -> tuple[Outcome, str]:
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


def layout_of(x: Tensor, mesh: Mesh, placements: Sequence[Any] = (REPLICATE,)) -> Layout | None:
    """The layout of an operand; None for one that cannot be laid out, such as a sparse one."""
    if x.layout != torch.strided:
        return None
    return Layout(replace(mesh, device_type=x.device.type), placements, x.shape)


def _has_gradient(layout: Layout | None) -> bool:
    """Of maxima that are equal on several ranks others are chosen than in one process; factors have gradients apart."""
    return layout is None or not any(p.is_partial() and p not in SUMS for p in layout.placements)


def _other_kind(seen: Observed, want: Observed, exact_structure: bool) -> str:
    """How structure, types, shapes or dtypes differ."""
    if (exact_structure and seen.structure != want.structure) or len(seen.values) != len(want.values):
        return f"the result is {seen.structure}, torch gives {want.structure}"
    for number, pair in enumerate(zip(seen.values, want.values, strict=True)):
        got, due = map(_kind, pair)
        if got != due:
            return f"result {number} is {got}, torch gives {due}"
    return ""


def _kind(x: object) -> str:
    if not isinstance(x, Tensor):
        return type(x).__name__
    return _shown(x) + ("" if x.layout == torch.strided else f" {x.layout}")


def _other_gradient(got: Tensor | None, want: Tensor | None, bounds: Bounds) -> str:
    if want is None:
        return "" if got is None or not got.any() else "is not None as in torch"
    if got is None:
        return "is None" if want.numel() else ""
    return tensor_difference(got, want, bounds)


def tensor_difference(got: Tensor, want: Tensor, bounds: Bounds) -> str:
    """How two tensors differ in shape, dtype, or by more than `bounds`; "" if they do not."""
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return f"is {_shown(got)}, torch gives {_shown(want)}"
    return _difference(got, want, bounds)


def _difference(got: Any, want: object, bounds: Bounds) -> str:
    if not isinstance(want, Tensor):
        same = isclose(got, want, rel_tol=1e-4, abs_tol=1e-5) if isinstance(want, float) else got == want
        both_nan = isinstance(want, float) and got != got and want != want  # noqa: PLR0124 - nan differs from itself
        return "" if same or both_nan else f"is {got}, torch gives {want}"
    got, want = (x if x.layout == torch.strided else x.to_dense() for x in (got, want))
    if got.shape != want.shape:
        return f"has shape {tuple(got.shape)}, not {tuple(want.shape)}"
    wrong = mismatched(got, want, bounds)
    if not wrong.any():
        return ""
    at = tuple(wrong.nonzero()[0].tolist())
    return (
        f"differs in {int(wrong.sum())} of {wrong.numel()} elements, at {at} {got[at].item()} not {want[at].item()}: "
        f"got {_first(got)}, expected {_first(want)}"
    )


def _first(x: Tensor) -> str:
    return f"[{', '.join(f'{n:.4g}' for n in x.flatten()[:6].tolist())}{', …' * (x.numel() > 6)}]"
