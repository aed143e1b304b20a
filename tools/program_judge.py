"""Runs a program of `tools.programs` on simulated ranks and on plain torch, and says what came of it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from shardwise import DTensor, Layout, Mesh, Placement, capture, rank, world_size
from shardwise.debug.compare import Bounds, mismatched
from shardwise.errors import ShardwiseError
from shardwise.testing import DeadlockError, world
from shardwise.testing.local_shards import dtensor_from_full
from tools.op_judge import Outcome, Verdict, full_of, relative_to_largest
from tools.programs import NAMES, PLAIN, Program, plain_leaf

SECONDS = 20.0  # that the ranks of one program may take


@dataclass
class Seen:
    """What one process or rank saw of a program."""

    values: dict[str, Tensor] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    error: Exception | None = None
    at: str = ""  # the line, or what was done after the last one

    @property
    def failure(self) -> str:
        return f"{self.at}: {type(self.error).__name__}: {' '.join(str(self.error).split())[:500]}"


# ---- on ranks ----------------------------------------------------------------------------------------------------


def _leaf(seed: int, shape: Sequence[int], dtype: torch.dtype, grad: bool, *at: Any) -> Tensor:
    value = plain_leaf(seed, shape, dtype, grad)
    if at == (None,):
        return value
    mesh, placements = at
    return dtensor_from_full(value.detach(), Layout(mesh, placements, tuple(shape)), seed + 1).requires_grad_(grad)


def _redistribute(x: Any, mesh: Mesh, placements: Sequence[Placement]) -> Tensor:
    return _clone(x.redistribute(mesh, placements) if isinstance(x, DTensor) else x)


def _clone(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _boundary(x: Any) -> Tensor:
    if not isinstance(x, DTensor):
        return x.clone()  # type: ignore[no-any-return]
    return DTensor.from_local(x.to_local(), x.device_mesh, x.placements, run_check=False, shape=x.shape).clone()


def _captured(function: Any, *args: Any) -> Any:
    """What the replay of a captured function returns."""
    recorded = capture(function)
    recorded(*args)
    return recorded(*args)


RANKS: dict[str, Any] = {"leaf": _leaf, "redistribute": _redistribute, "boundary": _boundary, "captured": _captured}


# ---- running -----------------------------------------------------------------------------------------------------


def seen_of(lines: Sequence[str], functions: dict[str, Any]) -> Seen:
    """Run the lines and read everything they made; then go backward from all of it."""
    seen = Seen()
    env = {**NAMES, **functions}
    torch.manual_seed(0)
    try:
        for line in lines:
            seen.at = line
            exec(line, env)  # noqa: S102 - a line of a program
        tensors = {name: x for name, x in env.items() if isinstance(x, Tensor)}
        silent = _has_silent_views(lines)
        for name, x in tensors.items():
            seen.at = f"reading {name}"
            seen.kinds[name] = f"{tuple(x.shape)} {x.dtype} requires_grad={silent or x.requires_grad}"
            if _is_here(x):
                seen.values[name] = full_of(x).detach().clone()
        seen.at = "the last backward"
        parts = [_total(x, name) for name, x in tensors.items() if x.requires_grad and not x.is_complex()]
        if parts:
            torch.autograd.backward(parts)
        for name, x in tensors.items():
            if x.is_leaf and x.requires_grad:
                seen.at = f"reading {name}.grad"
                grad = x.grad
                seen.kinds[f"{name}.grad"] = str(None if grad is None else (tuple(grad.shape), grad.dtype))
                if grad is not None and _is_here(x):
                    seen.values[f"{name}.grad"] = full_of(grad).detach().clone()
    except Exception as error:  # noqa: BLE001 - any error is an outcome
        seen.error = error
    return seen


def _has_silent_views(lines: Sequence[str]) -> bool:
    """Whether there may be views made without gradients: of these torch says that they require grad."""
    return any(line.startswith("with torch.no_grad(): v") for line in lines)


def _total(x: Tensor, name: str) -> Tensor:
    """Something to go backward from: sometimes a plain tensor."""
    total = (x * _weights(x)).sum()
    everywhere = isinstance(total, DTensor) and total.layout_.mesh.size() == world_size()
    return full_of(total) if everywhere and int(name[1:]) % 2 else total


def _is_here(x: Tensor) -> bool:
    """A rank outside its mesh holds nothing of a tensor."""
    return not isinstance(x, DTensor) or x.layout_.mesh.coordinate(rank()) is not None


def _weights(x: Tensor) -> Tensor:
    return torch.arange(1, x.numel() + 1, dtype=torch.float64).sin().to(x.dtype).view(x.shape)


def _on_plain(lines: Sequence[str], noise: float = 0.0) -> Seen:
    def leaf(seed: int, shape: Sequence[int], dtype: torch.dtype, grad: bool, *at: Any) -> Tensor:
        x = plain_leaf(seed, shape, dtype, False)
        if noise and x.is_floating_point():
            x = x * (1 + noise * torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(seed)))
        return x.requires_grad_(grad)

    return seen_of(lines, {**PLAIN, "leaf": leaf})


COPYING = "torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x)"


def _as_saved(lines: Sequence[str], functions: dict[str, Any] | None = None) -> Seen:
    """On plain tensors, or with other `functions`; what is saved for backward are copies, which no line can change.

    So gradients are true where torch refuses to compute them, and where it computes them from memory that was changed
    without its notice: through `.data`, or where hooks of a line keep the tensor itself, as `save_on_cpu` does of one
    on a CPU (torch compares no versions under hooks).
    """
    lines = [line.replace("torch.autograd.graph.save_on_cpu()", COPYING) for line in lines]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x):
        return _on_plain(lines) if functions is None else seen_of(lines, functions)


def _where_changed(lines: Sequence[str]) -> Seen:
    """On plain tensors; of what was saved for backward, torch's version counts, copies are where it would raise."""

    def packed(x: Tensor) -> tuple[Tensor, int, Tensor]:
        return x, x._version, x.detach().clone()

    def unpacked(saved: tuple[Tensor, int, Tensor]) -> Tensor:
        x, version, copy = saved
        return x if x._version == version else copy

    with torch.autograd.graph.saved_tensors_hooks(packed, unpacked):
        return _on_plain(lines)


def verdict(what: Program) -> Verdict:
    """Run a program on plain tensors and on ranks, and compare."""
    try:
        ranks = world(what.world, timeout=SECONDS).run(seen_of, what.lines, RANKS)
        alone, one = _alone(what.lines), world(1, timeout=SECONDS)
        wanted = one.run(seen_of, alone, RANKS)[0] if what.draws else None  # the same numbers as on any ranks
    except DeadlockError as error:
        return Verdict(Outcome.HANG, str(error))
    plain = _on_plain(what.lines)
    failed = [seen for seen in ranks if seen.error is not None]
    if failed:
        return _of_failures(failed, what, wanted or plain)
    if wanted is not None and wanted.error is not None:
        return Verdict(
            Outcome.RIGHT if plain.error is not None else Outcome.OTHER_ERROR, f"on one rank: {wanted.failure}"
        )
    reference = wanted or plain
    if reference.error is not None and not _is_of_saved(reference, what.lines):
        return Verdict(Outcome.LENIENT, f"torch raises {plain.failure}")
    saved: Seen | None = None
    scale = 5e4 if what.is_coarse else 1.0
    for number, seen in enumerate(ranks):
        why = f"torch raises {plain.failure}" if reference.error is not None else _difference(seen, reference, scale)
        if not why:
            continue
        if saved is None:
            saved = _as_saved(what.lines) if wanted is None else one.run(_as_saved, alone, RANKS)[0]
            if saved.error is not None and reference.error is not None:
                return Verdict(Outcome.LENIENT, f"torch raises {plain.failure}")
        if differs := _difference(seen, saved, scale):
            if plain.error is not None and not _difference(seen, _where_changed(what.lines), scale):
                return Verdict(Outcome.LENIENT, f"torch raises {plain.failure}")
            if plain.error is None:
                unstable = _unstable(what, seen, plain, saved, why)
            else:
                unstable = _is_undefined(what, plain, saved, differs)
            return Verdict(Outcome.UNSTABLE if unstable else Outcome.WRONG_VALUE, f"rank {number}: {why}")
    return Verdict(Outcome.RIGHT)


def _is_of_saved(seen: Seen, lines: Sequence[str]) -> bool:
    """Whether the error is that a saved tensor was changed in place; copies of it may have the values it had.

    Under hooks torch compares no versions: if one keeps the tensor itself, backward meets the changed one.
    """
    if seen.at == "the last backward" and any("save_on_cpu" in line for line in lines):
        return True
    texts = (
        "needed for gradient computation has been modified by an inplace",
        "saved tensor that has been detached in-place",
        "is a view and its base or another view of its base has been modified inplace",
    )
    return any(text in str(seen.error) for text in texts)


def _alone(lines: Sequence[str]) -> list[str]:
    """The same program on one rank."""
    return [re.sub(LAYOUT, "Mesh((1,)), [Replicate()]", line) for line in lines]


LAYOUT = r"Mesh\(\([\d, ]*\)(?:, \([\d, ]*\))?\), \[(?:[A-Z]\w+\([^()]*\)(?:, )?)+\]"


def _of_failures(failed: Sequence[Seen], what: Program, plain: Seen) -> Verdict:
    size = what.world
    own = [seen for seen in failed if not isinstance(seen.error, DeadlockError)]
    first = (own or failed)[0]
    if not own or "disagree on their collective" in first.failure:
        return Verdict(Outcome.HANG, first.failure)
    if any("is outside Mesh" in seen.failure for seen in own):
        return Verdict(Outcome.CLEAR_ERROR, first.failure)
    of_no_grad = "does not require grad and does not have a grad_fn", "a tensor that doesn't require gradient"
    if _has_silent_views(what.lines) and any(text in first.failure for text in of_no_grad):
        return Verdict(Outcome.CLEAR_ERROR, first.failure)
    together = len({seen.at for seen in own}) == 1
    # Where torch draws other numbers, data-dependent shapes may be others, and so the line that fails.
    at_the_same = what.draws or plain.at == first.at or plain.at.startswith("the last")
    same = plain.error is not None and together and at_the_same
    late = first.at == "the last backward"  # a rank that has no error of its own gets that of the others
    if same and len(failed if late else own) == size:
        return Verdict(Outcome.RIGHT)
    if len(own) < size or len({seen.failure for seen in own}) > 1:
        return Verdict(Outcome.SOME_RANKS, f"{len(own)} of {size}: " + " / ".join({seen.failure for seen in own}))
    clear = isinstance(first.error, ShardwiseError)
    return Verdict(Outcome.CLEAR_ERROR if clear else Outcome.OTHER_ERROR, first.failure)


def _unstable(what: Program, seen: Seen, plain: Seen, saved: Seen, why: str) -> bool:
    """Whether rounding, or what torch does not define, makes a difference: such programs prove nothing."""
    if _is_of_equals(what, seen, plain, why) or _is_undefined(what, plain, saved, why):
        return True
    eps = 2 * torch.finfo(torch.float64).eps
    if any(not _difference(seen, _sums_rounded(what.lines, factor)) for factor in (1 + eps, 1 - eps)):
        return True
    short = any("float32" in line or ".float()" in line for line in what.lines)
    for sign in (1, -1):
        nudged = _on_plain(what.lines, sign * (1e-3 if what.is_coarse else 1e-6 if short else 1e-11))
        if nudged.error is not None or _difference(nudged, plain, 0.01):
            return True
    error = 1e-6 if short else 1e-15
    if any(not _difference(seen, _rounded(what.lines, error, seed)) for seed in range(8)):
        return True
    less, more = (_rounded(what.lines, scale * error) for scale in (1, 64))
    name = re.split(r"[\[ ]", why, maxsplit=1)[0]
    if not all(name in seen.values for seen in (plain, less, more)) or not _difference(more, plain, 0.01):
        return False
    near, far = (_distance(seen.values[name], plain.values[name]) for seen in (less, more))
    return far > 8 * near  # a comparison of equal numbers jumps as far for both


def _is_of_equals(what: Program, seen: Seen, plain: Seen, why: str) -> bool:
    """Whether truth values or indices differ only where numbers are compared that are equal up to rounding.

    An average of n equal terms is n * x / n, and the gradient of a replicated tensor a sum of n terms: not always x.
    """
    name = re.split(r"[\[ ]", why, maxsplit=1)[0]
    if name not in seen.values or seen.values[name].is_floating_point():
        return False
    error = 2 * torch.finfo(torch.float64).eps
    found = [_sums_rounded(what.lines, factor).values.get(name) for factor in (1 + error, 1 - error)]
    got, want = seen.values[name], plain.values[name]
    may_differ = [x != want for x in found if x is not None and x.shape == want.shape == got.shape]
    return len(may_differ) == len(found) and bool((may_differ[0] | may_differ[1] | (got == want)).all())


def _sums_rounded(lines: Sequence[str], factor: float) -> Seen:
    """With `factor` times what is redistributed, perhaps a sum, and times the gradients that lines compute."""

    def redistributed(x: Tensor, mesh: Mesh, placements: Sequence[Placement]) -> Tensor:
        return _clone(x) * factor if x.is_floating_point() else _clone(x)

    def grad(*args: Any, **kwargs: Any) -> list[Tensor]:
        return [g * factor for g in torch.autograd.grad(*args, **kwargs)]

    lines = [line.replace("torch.autograd.grad(", "grad(") for line in lines]
    return seen_of(lines, {**PLAIN, "redistribute": redistributed, "grad": grad})


class _Undefined(TorchDispatchMode):
    """Does otherwise what torch does not define.

    Ops that may choose any of equal elements choose another one. `index_put` of repeated indices writes the first
    value last. An op in place reads its operands before it writes, also those that overlap with what it writes.
    """

    CHOOSING = tuple(
        getattr(getattr(torch.ops.aten, name), overload)
        for name, overload in [("kthvalue", "default"), ("median", "dim"), ("nanmedian", "dim"), ("mode", "default"),
                               ("topk", "default"), ("sort", "default"), ("sort", "stable")]
    )  # fmt: skip

    PUTTING = (
        torch.ops.aten.index_put.default,
        torch.ops.aten.index_put_.default,
        torch.ops.aten._index_put_impl_.default,
    )

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.CHOOSING and args[0].ndim and not kwargs.get("stable"):
            return self._chosen(func, args, kwargs)
        if func in self.PUTTING and not any(args[3:4]) and not kwargs.get("accumulate"):
            return self._put(args[0], args[1], args[2], func._schema.is_mutable)
        if func._schema.is_mutable:
            written = [a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments]
            pairs = zip(args, written, strict=False)
            args = tuple(a if to or not isinstance(a, Tensor) else a.clone() for a, to in pairs)
        return func(*args, **kwargs)

    @staticmethod
    def _put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, in_place: bool) -> Tensor:
        where = tuple(slice(None) if index is None else index for index in indices)
        positions = torch.arange(x.numel()).reshape(x.shape)[where]
        out = x.flatten().clone()
        out[positions.flatten().flip(0)] = values.expand(positions.shape).flatten().flip(0)
        return x.copy_(out.reshape(x.shape)) if in_place else out.reshape(x.shape)

    @staticmethod
    def _chosen(func: Any, args: Any, kwargs: Any) -> Any:
        """The values and indices of an op that meets the elements in another order; nearly equal ones change places."""
        x, names = args[0], [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        dim = given.get("dim", -1)
        numbers = torch.Generator().manual_seed(0)
        order = torch.randperm(x.shape[dim], generator=numbers)
        if x.is_floating_point():
            x = x.nextafter(torch.randn(x.shape, generator=numbers, dtype=x.dtype).sign() * torch.inf)
        values, indices = func(x.index_select(dim, order), *args[1:], **kwargs)
        return values, order[indices]


def _is_undefined(what: Program, plain: Seen, saved: Seen, why: str) -> bool:
    """Whether the value depends on what torch does not define.

    Such as which of equal elements `kthvalue` chooses; a gradient after a change through `.data` of what was saved, of
    which backward meets what is an alias of it (on ranks other tensors are aliases: one operand of `x * x` may be);
    a gradient of a view whose `.data` has other strides, with which torch differentiates the view; or a tensor that
    was also passed to `backward`, which torch may keep as a `.grad` and change in the next backward.
    """
    name = re.split(r"[\[ ]", why, maxsplit=1)[0]
    with _Undefined():
        other = _on_plain(what.lines)
    lines = [re.sub(r"(\w+)\.data = (.*)", r"set_data(\1, \2)", line) for line in what.lines]
    lines = [re.sub(r"\.backward\((\w+),", r".backward(\1.clone(),", line) for line in lines]
    defined = seen_of(lines, {**PLAIN, "set_data": _set_data})
    variants = (other, defined, saved)
    return name in plain.values and any(name in x.values and _difference_of(name, x, plain) for x in variants)


def _set_data(x: Tensor, data: Tensor) -> None:
    """`x.data = data`, in memory with the strides and the offset of `x`."""
    size = x.untyped_storage().nbytes() // x.element_size()
    x.data = data.new_empty(size).as_strided(x.shape, x.stride(), x.storage_offset()).copy_(data)


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().nan_to_num().max()) if a.shape == b.shape and a.is_floating_point() else 0.0


class _Rounding(TorchDispatchMode):
    """Changes the results of all ops, backward too, by a relative error."""

    def __init__(self, error: float, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.error = error
        self.numbers = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.is_mutable or any(a.alias_info is not None for a in func._schema.arguments):
            return out

        def rounded(x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.is_floating_point():
                return x
            return x * (1 + self.error * torch.randn(x.shape, dtype=torch.float64, generator=self.numbers)).to(x.dtype)

        return tree_map(rounded, out)


def _rounded(lines: Sequence[str], error: float, seed: int = 0) -> Seen:
    with _Rounding(error, seed):
        return _on_plain(lines)


def _difference(seen: Seen, wanted: Seen, scale: float = 1.0) -> str:
    for name, want in wanted.kinds.items():
        if seen.kinds.get(name, want) != want:  # a view of a leaf may be the leaf itself, which has a gradient
            return f"{name} is {seen.kinds.get(name)}, torch gives {want}"
    for name in wanted.values:
        if name in seen.values and (why := _difference_of(name, seen, wanted, scale)):
            return why
    return ""


def _difference_of(name: str, seen: Seen, wanted: Seen, scale: float = 1.0) -> str:
    """How a value differs from the wanted one."""
    got, value = seen.values[name], wanted.values[name]
    if got.shape != value.shape or got.dtype != value.dtype:
        return f"{name} holds {tuple(got.shape)} {got.dtype}, torch gives {tuple(value.shape)} {value.dtype}"
    wrong = mismatched(got, value, _bounds(scale))
    if not wrong.any():
        return ""
    at = tuple(wrong.nonzero()[0].tolist())
    return f"{name}[{at}] is {got[at].item()}, torch gives {value[at].item()}"


def _bounds(scale: float) -> Bounds:
    def bounds(want: Tensor) -> tuple[float, float]:
        relative = 1e-6 if want.dtype in (torch.float64, torch.complex128) else 2e-3
        return relative_to_largest(want, min(relative * scale, 0.05))

    return bounds
