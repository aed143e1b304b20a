"""Notes of values that should be the same on all ranks: plain tensors beside DTensors, replicas, numbers, options.

A note has a key: what it is, its ranks, the innermost frames of the user's code, the number of this call among those of
the call site, and the last collective of the ranks. Notes with one key are compared, so a call that only some ranks
make (`if rank == 0: log(…)`) is compared with nothing. Differences of rounding are none.
"""

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from math import inf, isnan, prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from shardwise._collectives.collective_call import Ranks
from shardwise._trace.capture_hooks import is_capturing
from shardwise._trace.user_stack import RUN_BACKWARD, CallSite, call_sites

MAX_ELEMENTS = 1 << 15  # that a digest reads; of a larger tensor it reads a sample
SAMPLES = 6  # elements that a note has
SIZES = 5  # of dims; the last is the product of all further ones
FRAMES = 4
KEY, DIGEST, NDIM, TOLERANCE = 0, 1, 2, 3 + SIZES  # positions in the words of a note; sizes follow on NDIM
WORDS = TOLERANCE + 3 + SAMPLES  # two sums follow on the tolerance

MASK = (1 << 62) - 1  # of digests
_MULTIPLIER = 0x5851F42D4C957F2D

# Relative differences that are taken for rounding; zero for others.
_ROUNDING = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
_ROUNDING |= {torch.float16: 1e-2, torch.bfloat16: 5e-2}

FIX_NUMBERS = (
    "pass the same number on all ranks. What differs between ranks belongs in local tensors: x.to_local(), then "
    "DTensor.from_local(y, mesh, placements)."
)
FIX_OPTIONS = (
    "make the same optimizer with the same options on all ranks; a scheduler that looks at a loss needs the loss of all"
)
FIX_VALUES = (
    "if each rank has its own part, DTensor.from_local(x, mesh, [Shard(0)]); if one rank has the values for all, "
    "distribute_tensor(x, mesh, [Replicate()]); if ranks of one tensor-parallel group have read different batches, "
    "read by the rank in the data axis, mesh['dp'].get_local_rank()"
)


class Note(NamedTuple):
    """One value of a rank.

    Attributes:
        rank: which noted it.
        ranks: that should have the same.
        after: the number of their last collective.
        what: it is, for the error.
        words: what is compared, so that ranks can read it in memory.
        names: of numbers.
    """

    rank: int
    ranks: Ranks
    after: int
    what: str
    fix: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    site: CallSite | None
    words: "array[int]"
    names: tuple[str, ...] = ()


Value = Tensor | Mapping[str, complex]  # numbers have names


class DifferentValues(NamedTuple):
    """A note, and the words of the ranks that noted something else, and of its own rank."""

    note: Note
    words: dict[int, Sequence[int]]


def note_of(
    value: Value, rank: int, ranks: Ranks, after: int, what: str, fix: str, key: int, site: CallSite | None
) -> Note:
    """The note of a tensor, or of numbers by name; see `Note`."""
    if isinstance(value, Tensor):
        words = array("q", (key, *_contents(value)))
        return Note(rank, ranks, after, what, fix, tuple(value.shape), value.dtype, site, words)
    words = array("q", (key, *_contents_of_numbers(value)))
    return Note(rank, ranks, after, what, fix, (), torch.float64, site, words, tuple(value))


def key_of(what: str, ranks: Ranks, sites: Sequence[CallSite], *numbers: int) -> int:
    """The key of a note; see the text of this module."""
    return rolling(stable_digest((what, ranks)), (*(site.digest + site.frame.line for site in sites), *numbers))


def stable_digest(value: object) -> int:
    """A positive number from the `repr` of a value, the same in all processes, unlike `hash`."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest())


def rolling(digest: int, values: Iterable[int]) -> int:
    """A digest of a sequence of numbers, continued from the `digest` of the numbers before."""
    for value in values:
        digest = (digest * _MULTIPLIER + value) & MASK
    return digest


def has_values(x: Tensor, explicit: bool) -> bool:
    """Whether the values of `x` can be read here; beside DTensors a tensor of one element counts as a number."""
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and (explicit or x.numel() != 1)
        and x.layout == torch.strided
        and x.device.type != "meta"
        and not is_capturing()
        and (explicit or torch._C._current_graph_task_id() == -1 or _is_user_in_backward())
        and torch._C._len_torch_dispatch_stack() == 0  # a user's mode would see how the digest is made
        and not (x.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _is_user_in_backward() -> bool:
    """Whether the user's code runs in backward, such as a hook; else torch combines tensors, perhaps in a mode."""
    sites = call_sites(FRAMES, inside=RUN_BACKWARD)
    return bool(sites) and all(site.frame.function != "__torch_dispatch__" for site in sites)


def _contents(x: Tensor) -> tuple[int, ...]:
    """Digest, dims and sizes of `x`, tolerance, two sums and samples, floats as the integers of their bits."""
    with torch.no_grad(), DisableTorchFunctionSubclass():
        # A copy, because numpy() makes the storage of its tensor one that FSDP cannot resize.
        seen = _sampled(x.detach()).cpu().clone(memory_format=torch.contiguous_format)
        found = hashlib.blake2b(f"{tuple(x.shape)} {x.dtype}".encode(), digest_size=7)
        found.update(seen.reshape(-1).view(torch.uint8).numpy().tobytes())
        values = torch.view_as_real(seen) if seen.is_complex() else seen
        wide = values.reshape(-1).to(torch.float64)
        few = wide[:: max(1, wide.numel() // SAMPLES)][:SAMPLES]
        floats = [_ROUNDING.get(x.dtype, 0.0), wide.sum().item(), wide.abs().sum().item(), *few.tolist()]
    sizes = [*x.shape[: SIZES - 1], *([prod(x.shape[SIZES - 1 :])] if x.ndim >= SIZES else [])]
    return int.from_bytes(found.digest()), x.ndim, *sizes, *[0] * (SIZES - len(sizes)), *_bits(floats)


def _contents_of_numbers(numbers: Mapping[str, complex]) -> tuple[int, ...]:
    """What `_contents` has of a tensor, of numbers. The first sum is a digest of all but floats; the second is 0."""
    digest = stable_digest(list(numbers.items()))
    exact = stable_digest([(name, "" if isinstance(x, float | complex) else x) for name, x in numbers.items()]) >> 4
    values = [_as_float(x) for x in islice(numbers.values(), SAMPLES)]
    return digest, *[0] * (1 + SIZES), *_bits([_ROUNDING[torch.float64], float(exact), 0.0, *values])


def _bits(floats: Sequence[float]) -> "array[int]":
    return array("q", array("d", [*floats, *[0.0] * (3 + SAMPLES - len(floats))]).tobytes())


def _as_float(x: complex) -> float:
    try:
        return float(x.real)
    except OverflowError:
        return inf


def _sampled(x: Tensor) -> Tensor:
    """Every k-th element of the longest dims, so that at most about `MAX_ELEMENTS` are left."""
    while x.numel() > 2 * MAX_ELEMENTS:
        dim = max(range(x.ndim), key=lambda d: x.shape[d])
        step = min(x.shape[dim], -(-x.numel() // MAX_ELEMENTS))
        x = x[(slice(None),) * dim + (slice(None, None, step),)]
    return x


def are_different(mine: Sequence[int], theirs: Sequence[int]) -> bool:
    """Whether two notes are of different values."""
    if mine[DIGEST] == theirs[DIGEST]:
        return False
    if _shape_of(mine) != _shape_of(theirs):
        return True
    tolerance, *floats = _floats(mine)
    other_tolerance, *others = _floats(theirs)
    if not tolerance or tolerance != other_tolerance:
        return True
    scale = max(map(abs, floats[2:]), default=0.0)
    size = max(floats[1], others[1])
    return not all(
        a == b or (isnan(a) and isnan(b)) or abs(a - b) <= tolerance * (size if i < 2 else max(abs(a), abs(b), scale))
        for i, (a, b) in enumerate(zip(floats, others, strict=True))
    )


def _floats(words: Sequence[int]) -> list[float]:
    return array("d", array("q", list(words[TOLERANCE:WORDS])).tobytes()).tolist()


def _shape_of(words: Sequence[int]) -> tuple[int, ...]:
    return tuple(words[NDIM + 1 : NDIM + 1 + min(words[NDIM], SIZES)])


def different_values_text(different: DifferentValues) -> str:
    """The text of the error about a note that differs between ranks."""
    note, words = different
    called = f"\n  called at {note.site.frame}" if note.site else ""
    if note.names:
        return f"{_different_numbers_text(note, words)}{called}"
    dtype, lines = str(note.dtype).removeprefix("torch."), ""
    shapes = {rank: _shape_of(found) for rank, found in sorted(words.items())}
    for rank, shape in shapes.items():
        count = prod(shape)
        parts = [f"{x:g}" for x in _floats(words[rank])[3 : 3 + count]] + ["…"] * (count > SAMPLES)
        size = f" shape {shape}:" if len({*shapes.values()}) > 1 else ""
        lines += f"\n  rank {rank}:{size} {', '.join(parts) or 'no elements'}"
    return f"{note.what} of shape {note.shape}, {dtype}, must be the same on all ranks, but is not:{lines}{called}"


def _different_numbers_text(note: Note, words: Mapping[int, Sequence[int]]) -> str:
    values = {rank: _floats(found)[3:] for rank, found in sorted(words.items())}
    differ = [i for i, several in enumerate(zip(*values.values(), strict=True)) if len(set(several)) > 1]
    name = note.names[differ[0]] if differ else f"the numbers {', '.join(note.names[:SAMPLES])}, …"
    shown = differ[:1] or range(SAMPLES)
    lines = [f"\n  rank {rank}: {', '.join(_shown(found[i]) for i in shown)}" for rank, found in values.items()]
    return f"{note.what}: {name} must be the same on all ranks, but is not:{''.join(lines)}"


def _shown(x: float) -> str:
    return str(int(x)) if x.is_integer() else str(x)
