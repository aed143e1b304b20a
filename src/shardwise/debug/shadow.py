"""`shadow`: runs ops again on full tensors in plain torch, and compares the results."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.utils import _pytree as pytree

from shardwise import _collectives as collectives
from shardwise._layout import REPLICATE, Layout, Mesh, checked
from shardwise._rules.registry import RULES, ops_with_rules
from shardwise._rules.row import Args, Kwargs
from shardwise._tensor import DTensor, plain, to_layout
from shardwise._tensor.dispatch.dispatcher import is_op, recipe_of
from shardwise._tensor.dispatch.hooks import Proceed, hook_calls
from shardwise._tensor.dispatch.operands import all_promoted
from shardwise._tensor.dtensor import name_of
from shardwise._trace.comm_trace import muted
from shardwise._trace.user_stack import call_site
from shardwise.debug.compare import Difference, Tolerance, largest_difference, pairs
from shardwise.errors import RuleError, ShadowError

Func = Callable[..., Any]

# Their results are the previous content of memory.
_UNFILLED = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_")


class Shadow:
    """The calls that a `shadow` block has compared so far."""

    def __init__(self, every: int, ops: frozenset[str] | None, tolerance: Tolerance) -> None:
        self.compared: dict[str, int] = {}  # how often, by op
        self.skipped: dict[str, int] = {}  # calls that cannot be compared: random, unfilled or sparse ones
        self._every, self._ops, self._tolerance = every, ops, tolerance
        self._calls: Counter[tuple[Any, tuple[int, ...]]] = (
            Counter()
        )  # calls by op and by the ranks that make it together
        self._comparing = False

    def __call__(self, proceed: Proceed, func: Func, args: Args, kwargs: Kwargs) -> object:
        if self._comparing or not is_op(func) or not (self._ops is None or _names(func) & self._ops):
            return proceed()
        operands = [x for x in pytree.tree_leaves((args, kwargs)) if type(x) is DTensor]
        ranks = tuple(sorted({rank for x in operands for rank in x._layout.mesh.ranks}))
        if collectives.rank() not in ranks:
            return proceed()
        self._calls[func, ranks] += 1
        if (self._calls[func, ranks] - 1) % self._every:
            return proceed()
        if any(_is_sparse(x) for x in operands) or name_of(func).partition(".")[0] in _UNFILLED:
            return self._skip(func, proceed())
        return self._run_twice(proceed, func, args, kwargs, ranks)

    def _run_twice(self, proceed: Proceed, func: Func, args: Args, kwargs: Kwargs, ranks: tuple[int, ...]) -> object:
        with self._untraced():
            copies = _Copies(ranks)
            full_args, full_kwargs = pytree.tree_map(copies.of, (args, kwargs))
        before = torch.get_rng_state()
        out = proceed()
        after = torch.get_rng_state()
        with self._untraced():
            try:
                expected = func(*full_args, **full_kwargs)
            except Exception as error:  # noqa: BLE001 - whatever it is, the op should have raised it too
                expected = f"{type(error).__name__}: {error}"
            drew = not (torch.equal(before, after) and torch.equal(after, torch.get_rng_state()))
            torch.set_rng_state(after)
            generators = any(isinstance(a, torch.Generator) for a in (*args, *kwargs.values()))
            if generators or any(collectives.gather_json(drew, ranks)):  # a rank with an empty shard draws nothing
                return self._skip(func, out)
            # A rule returns what it changed in place even if torch returns nothing.
            result = None if expected is None and id(out) in copies.made else out
            found = [*pairs("the result", result, expected), *copies.changed()]
            worst = largest_difference(found, self._tolerance, ranks)
        if worst is not None:
            raise self._error(func, args, kwargs, out, worst)
        self.compared[name_of(func)] = self.compared.get(name_of(func), 0) + 1
        return out

    def _skip(self, func: Func, out: object) -> object:
        self.skipped[name_of(func)] = self.skipped.get(name_of(func), 0) + 1
        return out

    @contextmanager
    def _untraced(self) -> Iterator[None]:
        """Nothing inside is counted, differentiated or compared."""
        self._comparing = True
        try:
            with muted(), torch.no_grad():
                yield
        finally:
            self._comparing = False

    def _error(self, func: Func, args: Args, kwargs: Kwargs, out: object, worst: Difference) -> ShadowError:
        laid_out = [str(x._layout) for x in pytree.tree_leaves((args, kwargs)) if type(x) is DTensor]
        results = [str(x._layout) for x in pytree.tree_leaves(out) if type(x) is DTensor]
        where = f" at {list(worst.index)}" if worst.count else ""
        held = f" on rank {worst.rank}, where {worst.count:,} elements differ" if worst.count else ""
        return ShadowError(
            f"{name_of(func)} differs from plain torch on full tensors.\n"
            f"  Where: {call_site() or 'unknown'}\n"
            f"  Rows: {_reason(func, args, kwargs)}\n"
            f"  Operands: {', '.join(laid_out)}\n"
            f"  Results: {', '.join(results) or type(out).__name__}\n"
            f"  Largest difference: {worst.size:.6g}, in {worst.what}{where}{held}\n"
            f"  Expected {worst.want}, got {worst.got}\n"
            f"  Fix: correct the rule if it is yours, else report this text; until then redistribute the operands.",
            name_of(func), worst.rank, worst.index, worst.size,
        )  # fmt: skip


def _reason(func: Func, args: Args, kwargs: Kwargs) -> str:
    """The reasons of the rows of `func` on these operands, or why there is none."""
    rule = RULES.get(func)
    if rule is None or not rule.has_rule:
        if rule is None or rule.handler is None:
            return "it has no rule: torch decomposes it into ops that have"
        return f"{name_of(func)} has no rows: its handler runs other ops"
    try:
        args, kwargs = all_promoted(func, args, {k: v for k, v in kwargs.items() if k != "out"})
        return recipe_of(func, args, kwargs).cause.why
    except RuleError as error:
        return str(error)


class _Copies:
    """Full plain copies of the arguments of one call, on each of `ranks`."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.mesh = Mesh((len(ranks),), ranks)
        self.made: dict[int, tuple[Tensor, Tensor, int]] = {}  # the argument, its copy, and that one's version

    def of(self, x: object) -> object:
        if not isinstance(x, Tensor):
            return x
        if id(x) not in self.made:
            copy = self._full(x) if type(x) is DTensor else x.detach().clone()
            self.made[id(x)] = x, copy, _version(copy)
        return self.made[id(x)][1]

    def _full(self, x: DTensor) -> Tensor:
        replicated = x._layout.replicated()
        if set(x._layout.mesh.ranks) != set(self.mesh.ranks):
            replicated = Layout(self.mesh, [REPLICATE], x._layout.shape)
        full = plain(to_layout(x, replicated)).detach()
        return full.clone() if replicated == x._layout else full

    def changed(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Arguments that the op changes in place, with their changed copies."""
        for number, (x, copy, version) in enumerate(self.made.values()):
            if version < 0 or _version(copy) != version:
                yield f"operand {number}", x, copy


def _version(x: Tensor) -> int:
    """The version counter of a tensor; -1 if it has none."""
    return -1 if x.is_inference() else x._version


def _is_sparse(x: DTensor) -> bool:
    with DisableTorchFunctionSubclass():
        return x.is_sparse


def _names(func: Func) -> set[str]:
    """All names of a function: add, add.Tensor, aten.add.Tensor."""
    name = name_of(func)
    return {name, name.strip(".").partition(".")[0], str(func)}


@checked
@contextmanager
def shadow(
    every: int = 1,
    ops: Collection[str | Callable[..., Any]] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> Iterator[Shadow]:
    """Inside, ops also run in plain torch on full copies of their operands, and the results are compared.

    Every rank compares its local shard of results and of operands changed in place, so each replica is checked. A
    function that torch decomposes is compared, and so are its parts. Not compared: ops that draw from a generator
    (dropout in training, `rand_like`, `normal_`, …; detected by the state of torch's generator), unfilled memory
    (`empty_like`, …), sparse tensors, and backward, which runs on local tensors. Gradients, the state of the generator,
    and counts of `count_comms` are unaffected.

    Needs memory for full operands and results on every rank, and time to gather them.

    Args:
        every: compare the first call of each op and then every n-th; 1 compares all.
        ops: names ("matmul", "aten.add.Tensor") to compare, or functions of these names; None compares all.
        rtol, atol: see `Tolerance`.

    Yields:
        The compared and skipped calls, by op.

    Raises:
        ShadowError: the first difference, the same on every rank: op, rows, layouts, the largest difference and where.
        RuleError: `every` below one, a negative tolerance, or an op of a name that torch does not know.
    """
    if every < 1:
        raise RuleError(f"shadow: every is an int of 1 or more, got {every!r}. Fix: 1 compares all calls, 10 a tenth.")
    if any(bound is not None and not bound >= 0 for bound in (rtol, atol)):
        raise RuleError(
            f"shadow: rtol and atol are 0 or more, got {rtol} and {atol}. Fix: leave them out, or such as rtol=1e-4."
        )
    if isinstance(ops, str):
        ops = [ops]
    # A function selects all of its name: torch.add Tensor.add too. An overload selects itself.
    names = [str(op) if isinstance(op, str | torch._ops.OpOverload) else name_of(op) for op in ops or ()]
    unknown = [op for op in ops or () if isinstance(op, str) and not _is_known(op)]
    if unknown:
        raise RuleError(
            f"shadow: torch has no op named {', '.join(map(repr, sorted(unknown)))}. "
            f"Fix: such as 'matmul' or 'aten.add.Tensor', or the function itself."
        )
    seen = Shadow(every, None if ops is None else frozenset(names), Tolerance(rtol, atol))
    with hook_calls(seen):
        yield seen


def _is_known(name: str) -> bool:
    packet, _, overload = name.removeprefix("aten.").partition(".")
    op, modules = getattr(torch.ops.aten, packet, None), (torch, Tensor, F, torch.linalg, torch.special, torch.fft)
    if any(hasattr(module, name.removeprefix(".")) for module in modules):
        return True
    return bool(op and (not overload or hasattr(op, overload))) or any(name in _names(f) for f in ops_with_rules())
