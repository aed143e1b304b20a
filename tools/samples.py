"""Small calls of the keys of the table of rules: recorded while plain torch runs other calls, or taken from siblings.

A key is a function, a method or an overload. Whatever runs under `Recorder.listening` leaves a sample for every key
it passes on its way: what users call, and the aten ops it is made of. A key that nothing passes takes a sample of a
sibling, which is a key of the same name or of the same rule, if torch takes it.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise._rules import OpRule
from shardwise._rules.registry import ops_with_rules
from shardwise.testing.local_shards import SEED
from tools import opinfo
from tools.op_judge import Sample, plain_run, tensors_in

LARGEST = 500  # elements of all operands of a sample
CANDIDATES = 24  # of a key, before the best are chosen
PER_OP, PER_METHOD = 8, 3  # of torch's own samples of an op
TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float32: 1e-4, torch.complex64: 1e-4}
DTYPES = (torch.float64, torch.int64, torch.bool, torch.complex128)
STEPS = {torch.float64: 2.0**20, torch.float32: 2.0**10}
CRASHES = {"weight_norm"}  # where torch ends the process for tensors without elements
UNWRITTEN = {name.rstrip("_") for name in opinfo.UNWRITTEN}
PLAIN = (
    int, float, bool, str, type(None), type(...), slice, torch.dtype, torch.device, torch.memory_format, torch.layout
)  # fmt: skip
Key = Any
Samples = dict[Key, list[Sample]]


def name_of_key(key: Key) -> str:
    """The name by which users, or torch, call a key."""
    if isinstance(key, OpOverload):
        return str(key)
    if type(key).__name__ == "method_descriptor":
        return f"Tensor.{key.__name__}"
    if type(key).__name__ == "method-wrapper":
        return f"Tensor.{key.__self__.__name__}"
    home = getattr(key, "__module__", None) or "torch"
    name = getattr(key, "__qualname__", str(key))
    name = f"{home}.{key.__name__ if '<locals>' in name else name}".replace("._VariableFunctionsClass", "")
    return re.sub(r"^torch\.(_tensor\.Tensor|TensorBase)\b", "Tensor", name)


def bare_name(key: Key) -> str:
    """The name that all variants of an op share, without module, underscores, overload and in-place suffix."""
    if isinstance(key, OpOverload):
        name = key._schema.name.split("::")[1]
    else:
        name = key.__self__.__name__ if type(key).__name__ == "method-wrapper" else getattr(key, "__name__", str(key))
    if dunder := re.fullmatch(r"__[ir]?(\w+?)__", name):
        return dunder[1]
    return re.sub(r"^(linalg_|special_|_)", "", name).rstrip("_")


# ---- recording -------------------------------------------------------------------------------------------------


class Recorder:
    """Samples of the keys of a table of rules, found while other calls run."""

    def __init__(self, rules: Mapping[Key, OpRule] | None = None) -> None:
        self.rules = ops_with_rules() if rules is None else rules
        self._found: dict[Key, dict[frozenset[object], Sample]] = {}

    @property
    def samples(self) -> Samples:
        return {key: list(found.values()) for key, found in self._found.items()}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take samples of all calls of plain torch inside."""
        with _Ops(self), _Functions(self):
            yield

    def add(self, sample: Sample) -> None:
        """Take a sample whose function is a key; of two with the same features the smaller one is kept."""
        if self._wants(sample):
            sample = sample.on([rounded(x) for x in sample.tensors()])
            self._found.setdefault(sample.op, {})[features_of(sample)] = sample

    def _wants(self, sample: Sample) -> bool:
        if self.rules[sample.op].random and any(x.is_complex() for x in sample.tensors()):
            return False  # random numbers are real here: anything else is refused by name
        found = self._found.get(sample.op, {})
        known = found.get(features_of(sample))
        return len(found) < CANDIDATES if known is None else _size(sample) < _size(known)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call that a mode has caught, and take it as a sample."""
        sample = None
        if func in self.rules and is_usable(args, kwargs):
            sample = Sample(func, args, kwargs)
            with DisableTorchFunction():
                sample = copied(sample) if self._wants(sample) else None
        out = func(*args, **kwargs)
        if sample is not None:
            with DisableTorchFunction():
                if _keeps_its_promise(sample, args, out):
                    self.add(sample)
        return out


def copied(sample: Sample) -> Sample:
    """The same call of tensors of its own."""
    return sample.on([x.detach().clone() for x in sample.tensors()])


def rounded(x: Tensor) -> Tensor:
    """Floats with so few digits that their partial sums and averages are exact."""
    if x.dtype not in STEPS:
        return x
    return torch.where(x.abs() < 100, (x * STEPS[x.dtype]).round() / STEPS[x.dtype], x)


class _Functions(TorchFunctionMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.recorder.run(func, tuple(args), kwargs or {})


class _Ops(TorchDispatchMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what skips it costs more than the calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.recorder.run(func, tuple(args), kwargs or {})


def is_usable(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call can be a sample: small real tensors, beside plain values and at most one list deep."""
    leaves = [x for a in (*args, *kwargs.values()) for x in (a if type(a) in (list, tuple) else (a,))]
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    return (
        bool(tensors)
        and all(isinstance(x, (Tensor, *PLAIN)) for x in leaves)
        and all(x.layout == torch.strided and x.device.type == "cpu" for x in tensors)
        and sum(x.numel() for x in tensors) <= LARGEST
        and kwargs.get("out") is None
    )


def _keeps_its_promise(sample: Sample, args: Sequence[Any], out: Any) -> bool:
    """Changes its first operand if its rule says so, and only then (`inplace=True` is a rule of another key)."""
    tensors = tensors_in(out)
    if sample.in_place:
        return bool(args) and out is args[0] and out.shape == sample.args[0].shape
    changed = bool(args) and any(x is args[0] for x in tensors) and not _same(args[0], sample.args[0])
    return bool(tensors) and not changed and not any(x.layout != torch.strided for x in tensors)


def _same(a: Any, b: Any) -> bool:
    return not isinstance(a, Tensor) or (a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num()))


def _size(sample: Sample) -> int:
    return sum(x.numel() for x in sample.tensors())


def features_of(sample: Sample) -> frozenset[object]:
    """What makes samples of one key different: kinds of operands, and the values of what is not a measured number."""
    found: set[object] = set()
    for slot, a in [*enumerate(sample.args), *sample.kwargs.items()]:
        parts = a if isinstance(a, list | tuple) else [a]
        for number, x in enumerate(parts):
            if isinstance(x, Tensor):
                found.add((slot, number, x.ndim, x.dtype, 0 in x.shape, 1 in x.shape))
            else:
                found.add((slot, number, type(x) if isinstance(x, float) else repr(x)))
    return frozenset(found)


# ---- sources ---------------------------------------------------------------------------------------------------


def torchs_own_calls() -> Iterator[Callable[[], Any]]:
    """Calls of every op on torch's list for its own tests, as function, as method and in place, in a few dtypes."""
    for op in opinfo.operators().values():
        torch.default_generator.manual_seed(SEED)
        supported = op.supported_dtypes("cpu")
        dtypes = [dtype for dtype in DTYPES if dtype in supported] or [torch.float32][: torch.float32 in supported]
        for dtype, count in zip(dtypes, (PER_OP, 2, 2, 2), strict=False):
            for number, sample in enumerate(islice(op.sample_inputs("cpu", dtype), count)):
                others = (op.get_method(), op.get_inplace()) if number < PER_METHOD else ()
                yield from (partial(_call, variant, sample) for variant in (op.op, *others) if variant is not None)


def _call(variant: Callable[..., Any], sample: Any) -> Any:
    args, kwargs = pytree.tree_map_only(Tensor, torch.clone, ((sample.input, *sample.args), sample.kwargs))
    return variant(*args, **kwargs)


def record(calls: Iterable[Callable[[], Any]], recorder: Recorder) -> None:
    """Run calls in plain torch; what torch refuses leaves what it was made of until then."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in calls:
            with suppress(Exception), recorder.listening():
                call()


# ---- siblings --------------------------------------------------------------------------------------------------


def function_of(rule: OpRule) -> Callable[..., Any]:
    """The function that makes the rows, without what was fixed for one op."""
    found: Any = rule.rows
    while inner := found.func if isinstance(found, partial) else getattr(found, "__wrapped__", None):
        found = inner
    return found  # type: ignore[no-any-return]


def derive(samples: Samples, rules: Mapping[Key, OpRule] | None = None, count: int = 3) -> None:
    """Give keys without a sample some of their siblings' ones."""
    rules = ops_with_rules() if rules is None else rules
    names: dict[object, dict[object, Sample]] = {}
    functions: dict[object, dict[object, Sample]] = {}
    for key, found in samples.items():
        for sample in found:
            kind = features_of(sample)
            names.setdefault(bare_name(key), {}).setdefault(kind, sample)
            functions.setdefault(function_of(rules[key]), {}).setdefault(kind, sample)
    for key, rule in rules.items():
        if key not in samples:
            pools = names.get(bare_name(key), {}), functions.get(function_of(rule), {})
            siblings = (sample for pool in pools for sample in pool.values())
            taken = list(islice(filter(None, (_taken_by(key, sample) for sample in siblings)), count))
            if taken:
                samples[key] = taken


def _taken_by(key: Key, sample: Sample) -> Sample | None:
    """The sample as one of `key`, if torch takes it."""
    if not _fits(key, sample.args):
        return None
    taken = copied(replace(sample, op=key))
    tensors = [x.clone() for x in taken.tensors()]
    with suppress(Exception):
        if _keeps_its_promise(taken, taken.on(tensors).args, taken.call(tensors)):
            return taken
    return None


def _fits(key: Key, args: Sequence[Any]) -> bool:
    """Torch takes a number for a truth value or a dtype, where it can crash, and the other way round; no user does."""
    wanted = [str(a.real_type) for a in key._schema.arguments] if isinstance(key, OpOverload) else []
    return all(
        a is None or isinstance(a, torch.dtype)
        if "ScalarType" in kind
        else "Scalar" in kind or (kind == "bool") == (type(a) is bool)
        for kind, a in zip(wanted, args, strict=False)
    )


# ---- choosing --------------------------------------------------------------------------------------------------


def chosen(found: Sequence[Sample], count: int = 2, corners: bool = True) -> list[Sample]:
    """Samples that can be sharded and cover the most kinds of arguments; and corner cases: dims of 0 and 1, no dim."""
    best = _most_features([sample for sample in found if _can_be_sharded(sample)], count) or _most_features(
        found, count
    )
    if not best or not corners:
        return best
    for length in (0, 1):
        if not any(_has_dim(sample, length) for sample in best):
            thin = [sample for sample in found if _has_dim(sample, length)]
            best += _most_features([*thin, *thinned(best[0], length)], 1)
    if any(sample.tensors()[0].ndim == 0 for sample in best):
        return best
    return best + _most_features([sample for sample in found if sample.tensors()[0].ndim == 0], 1)


def _most_features(found: Iterable[Sample], count: int) -> list[Sample]:
    left, best = list(found), list[Sample]()
    shown: set[object] = set()
    while left and len(best) < count:
        number = max(range(len(left)), key=lambda i: (len(features_of(left[i]) - shown), -_size(left[i])))
        settled = settle(left.pop(number))
        if settled is not None:
            best.append(settled)
            shown |= features_of(settled)
    return best


def _can_be_sharded(sample: Sample) -> bool:
    """Unevenly, with something on each of three ranks."""
    return any(n > 3 for x in sample.tensors() for n in x.shape) and not _has_dim(sample, 0)


def _has_dim(sample: Sample, length: int) -> bool:
    return any(length in x.shape for x in sample.tensors())


def thinned(sample: Sample, length: int) -> Iterator[Sample]:
    """The sample with `length` left of a dim of its first tensor, and of the dims that seem to be the same one.

    Not for integers that may be indices into other operands: torch does not check all of them before it reads.
    """
    tensors = sample.tensors()
    if bare_name(sample.op) in CRASHES or len({x.is_floating_point() for x in tensors}) > 1:
        return
    for dim, size in enumerate(tensors[0].shape):
        if size <= length:
            continue
        from_the_left = [x.narrow(dim, 0, length) if x.ndim > dim and x.shape[dim] == size else x for x in tensors]
        back = dim - tensors[0].ndim
        from_the_right = [
            x.narrow(back, 0, length) if x.ndim >= -back and x.shape[back] == size else x for x in tensors
        ]
        only = [tensors[0].narrow(dim, 0, length), *tensors[1:]]
        for narrowed in (from_the_left, from_the_right, only):
            taken = _taken_by(sample.op, sample.on(narrowed))
            if taken is not None:
                yield taken


def settle(sample: Sample) -> Sample | None:
    """The sample as it can be compared: with gradients where torch has them, as exactly as its dtypes allow."""
    initialized = bare_name(sample.op) not in UNWRITTEN
    for gradients in (sample.gradients, False):
        candidate = replace(sample, gradients=gradients, initialized=initialized)
        with suppress(Exception):
            seen = plain_run(candidate)
            if seen.error is None:
                dtypes = {x.dtype for x in (*candidate.tensors(), *tensors_in(seen.values))}
                rough = max(TOLERANCE.get(dtype, 0.0) for dtype in dtypes)
                return replace(candidate, tolerance=sample.tolerance or rough or None)
    return None
