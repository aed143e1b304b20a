"""What runs on the local tensors of DTensors that already lie as an op wants them."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks as hooks_of_saved

from shardwise import collectives
from shardwise.layout import Layout
from shardwise.rules.row import specialization
from shardwise.tensor.dispatch import resolve
from shardwise.tensor.dispatch.keys import PLAIN_VALUES
from shardwise.tensor.dispatch.local_context import RankContext
from shardwise.tensor.dtensor import DTensor, _as_subclass
from shardwise.tensor.handlers.copies import copied
from shardwise.trace.capture_hooks import tracing_paused


class Looks:
    """Runs an op, and looks at the layouts of its operands for that."""

    __slots__ = ()


class OnLocals(Looks):
    """An op that wants plain local tensors: Python code, or a row's local function."""

    __slots__ = ("op", "outputs", "ready", "recipe")

    def __init__(self, recipe: resolve.Recipe, op: Callable[..., Any]) -> None:
        self.recipe = recipe
        self.op = op
        self.outputs = known_outputs(recipe)
        # By rank, for simulated ones share this: what the local function comes to, and whether that is Python code.
        self.ready: dict[int, tuple[Callable[..., Any] | None, bool]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recipe = self.recipe
        if recipe.local_impl is None:
            locals_ = [a if type(a) in PLAIN_VALUES else _local(a) for a in args]
            return self.op(*locals_, **{k: a if type(a) in PLAIN_VALUES else _local(a) for k, a in kwargs.items()})
        rank = collectives.rank()
        if rank not in self.ready:
            with tracing_paused():
                self.ready[rank] = specialization(recipe.local_impl, self._site([]))
        ready, python = self.ready[rank]
        if ready is not None and not python:
            out = ready(*args, **kwargs)
            if out is not NotImplemented:
                return out
        operands: list[DTensor] = []
        locals_ = [_local(a, operands) for a in args]
        named = {k: _local(a, operands) for k, a in kwargs.items()}
        if ready is not None and python:
            out = ready(*locals_, **named)
            if out is not NotImplemented:
                return out
        return recipe.local_impl(self._site(operands), *locals_, **named)

    def _site(self, operands: list[DTensor]) -> RankContext:
        recipe = self.recipe
        return RankContext(self.op, recipe.layouts, self.outputs, recipe.local_axes, operands, recipe.cause)


class Copying(Looks):
    """An op that gives copies where torch gives views."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return copied(self.call(*args, **kwargs), first(args, kwargs))


def watched(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], in_place: bool) -> Any:
    """Run an op while there may be hooks on what is saved for backward: operands without a gradient go in plain.

    Torch saves an operand as the Python object it is. A hook meets it inside the op, where its shape is the local one,
    and may keep it; later its shape is that of the whole. Checkpointing compares the two.
    """
    if hooks_of_saved(True) is None or isinstance(call, Looks):
        return call(*args, **kwargs)
    changed = args[0] if in_place else None

    def shown(a: Any) -> Any:
        if type(a) is list or type(a) is tuple:
            return type(a)(map(shown, a))
        hidden = type(a) is DTensor and a is not changed and not (a.requires_grad or a.is_sparse)
        return _as_subclass(a, Tensor) if hidden else a

    return call(*map(shown, args), **{k: shown(a) for k, a in kwargs.items()})


def first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    return next(a for a in (*args, *kwargs.values()) if type(a) is DTensor)


def _local(x: Any, seen: list[DTensor] | None = None) -> Any:
    """An argument with local tensors for DTensors, which are added to `seen`; for where DTensors count as local."""
    kind = type(x)
    if kind is DTensor:
        if seen is not None:
            seen.append(x)
        return x.detach() if x.is_sparse else _as_subclass(x, Tensor)
    return [_local(y, seen) for y in x] if kind is list or kind is tuple else x


def known_outputs(recipe: resolve.Recipe) -> tuple[Layout, ...]:
    outputs = recipe.output if isinstance(recipe.output, tuple) else (recipe.output or recipe.layouts[0],)
    return tuple(layout for layout in outputs if layout is not None)
