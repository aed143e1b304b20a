"""Notes of values that must be equal on all ranks: plain tensors beside DTensors, replicas, numbers, options.

A note has a key: the name of the value, its ranks, the innermost frames of user code, the number of the call at this
call site, and the last collective of the ranks. Only notes with one key are compared, so a call that only some ranks
make (`if rank == 0: log(…)`) is not compared. Differences of rounding do not count.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from math import inf, isnan, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from shardwise._collectives.collective_call import Ranks
from shardwise._trace.capture_hooks import is_capturing
from shardwise._trace.user_stack import RUN_BACKWARD, CallSite, call_sites

MAX_ELEMENTS = 1 << 15  # a digest reads so many elements; of a larger tensor it reads a sample
SAMPLES = 6  # elements that a note has
SIZES = 5  # sizes of so many dims; the last is the product of all further ones
FRAMES = 4

MASK = (1 << 62) - 1  # digests have 62 bits
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


class Contents(NamedTuple):
    """The contents of a value for comparison between ranks.

    Attributes:
        digest: equal only for equal values.
        shape: of a tensor.
        tolerance: the relative difference that counts as rounding.
        sums: of the elements, and of their absolute values; for numbers a digest of all but floats, and 0.
        samples: some elements.
    """

    digest: int
    shape: tuple[int, ...]
    tolerance: float
    sums: tuple[float, float]
    samples: tuple[float, ...]


class Note(NamedTuple):
    """The note of one value of a rank.

    Attributes:
        key: by which ranks find each other's notes of a value.
        ranks: that must have an equal value.
        after: the number of their last collective.
        what: name of the value, for the error.
        names: of numbers.
    """

    key: int
    contents: Contents
    ranks: Ranks
    after: int
    what: str
    fix: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    site: CallSite | None
    names: tuple[str, ...] = ()

    @property
    def message(self) -> list[object]:
        """A note as other ranks get it, in JSON; see `note_from`."""
        return [self.key, *self.contents]


Value = Tensor | Mapping[str, complex]  # numbers have names


class DifferentValues(NamedTuple):
    """A note, with the contents on ranks that differ, and on its own rank."""

    note: Note
    contents: dict[int, Contents]


def note_of(value: Value, ranks: Ranks, after: int, what: str, fix: str, key: int, site: CallSite | None) -> Note:
    """The note of a tensor, or of numbers by name; see `Note`."""
    if isinstance(value, Tensor):
        return Note(key, _contents(value), ranks, after, what, fix, tuple(value.shape), value.dtype, site)
    return Note(key, _contents_of_numbers(value), ranks, after, what, fix, (), torch.float64, site, tuple(value))


def note_from(message: Sequence[Any]) -> tuple[int, Contents]:
    """The key and the contents in the message of a note."""
    key, digest, shape, tolerance, sums, samples = message
    return key, Contents(digest, tuple(shape), tolerance, tuple(sums), tuple(samples))


def key_of(what: str, ranks: Ranks, sites: Sequence[CallSite], *numbers: int) -> int:
    """The key of a note; see the docstring of this module."""
    return rolling(stable_digest((what, ranks)), (*(site.digest + site.frame.line for site in sites), *numbers))


def stable_digest(value: object) -> int:
    """A positive number from the `repr` of a value, equal in all processes, unlike `hash`."""
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
    """Whether user code runs in backward, such as a hook; else torch combines tensors, perhaps in a mode."""
    sites = call_sites(FRAMES, inside=RUN_BACKWARD)
    return bool(sites) and all(site.frame.function != "__torch_dispatch__" for site in sites)


def _contents(x: Tensor) -> Contents:
    with torch.no_grad(), DisableTorchFunctionSubclass():
        # A copy, because numpy() makes the storage of its tensor one that FSDP cannot resize.
        seen = _sampled(x.detach()).cpu().clone(memory_format=torch.contiguous_format)
        found = hashlib.blake2b(f"{tuple(x.shape)} {x.dtype}".encode(), digest_size=7)
        found.update(seen.reshape(-1).view(torch.uint8).numpy().tobytes())
        values = torch.view_as_real(seen) if seen.is_complex() else seen
        wide = values.reshape(-1).to(torch.float64)
        samples = wide[:: max(1, wide.numel() // SAMPLES)][:SAMPLES].tolist()
        sums = wide.sum().item(), wide.abs().sum().item()
    shape = (*x.shape[: SIZES - 1], *([prod(x.shape[SIZES - 1 :])] if x.ndim >= SIZES else []))
    return Contents(int.from_bytes(found.digest()), shape, _ROUNDING.get(x.dtype, 0.0), sums, tuple(samples))


def _contents_of_numbers(numbers: Mapping[str, complex]) -> Contents:
    exact = stable_digest([(name, "" if isinstance(x, float | complex) else x) for name, x in numbers.items()]) >> 4
    samples = tuple(_as_float(x) for x in islice(numbers.values(), SAMPLES))
    digest = stable_digest(list(numbers.items()))
    return Contents(digest, (), _ROUNDING[torch.float64], (float(exact), 0.0), samples)


def _as_float(x: complex) -> float:
    try:
        return float(x.real)
    except OverflowError:
        return inf


def _sampled(x: Tensor) -> Tensor:
    """Every k-th element of the longest dims, so that at most about `MAX_ELEMENTS` remain."""
    while x.numel() > 2 * MAX_ELEMENTS:
        dim = max(range(x.ndim), key=lambda d: x.shape[d])
        step = min(x.shape[dim], -(-x.numel() // MAX_ELEMENTS))
        x = x[(slice(None),) * dim + (slice(None, None, step),)]
    return x


def are_different(mine: Contents, theirs: Contents) -> bool:
    """Whether two notes have different values."""
    if mine.digest == theirs.digest:
        return False
    if mine.shape != theirs.shape or not mine.tolerance or mine.tolerance != theirs.tolerance:
        return True
    size, scale = max(mine.sums[1], theirs.sums[1]), max(map(abs, mine.samples), default=0.0)
    return not (
        all(_are_close(a, b, mine.tolerance * size) for a, b in zip(mine.sums, theirs.sums, strict=True))
        and all(
            _are_close(a, b, mine.tolerance * max(abs(a), abs(b), scale))
            for a, b in zip(mine.samples, theirs.samples, strict=False)
        )
    )


def _are_close(a: float, b: float, most: float) -> bool:
    return a == b or (isnan(a) and isnan(b)) or abs(a - b) <= most


def different_values_text(different: DifferentValues) -> str:
    """The text of the error about a note that differs between ranks."""
    note, contents = different
    called = f"\n  called at {note.site.frame}" if note.site else ""
    if note.names:
        return f"{_different_numbers_text(note, contents)}{called}"
    dtype, lines = str(note.dtype).removeprefix("torch."), ""
    have_shapes = len({found.shape for found in contents.values()}) > 1
    for rank, found in sorted(contents.items()):
        count = prod(found.shape)
        parts = [f"{x:g}" for x in found.samples[:count]] + ["…"] * (count > SAMPLES)
        size = f" shape {found.shape}:" if have_shapes else ""
        lines += f"\n  rank {rank}:{size} {', '.join(parts) or 'no elements'}"
    return f"{note.what} of shape {note.shape}, {dtype}, must be the same on all ranks, but is not:{lines}{called}"


def _different_numbers_text(note: Note, contents: Mapping[int, Contents]) -> str:
    values = {rank: found.samples for rank, found in sorted(contents.items())}
    differ = [i for i, several in enumerate(zip(*values.values(), strict=False)) if len(set(several)) > 1]
    name = note.names[differ[0]] if differ else f"the numbers {', '.join(note.names[:SAMPLES])}, …"
    shown = slice(differ[0], differ[0] + 1) if differ else slice(SAMPLES)
    lines = [f"\n  rank {rank}: {', '.join(map(_shown, found[shown]))}" for rank, found in values.items()]
    return f"{note.what}: {name} must be the same on all ranks, but is not:{''.join(lines)}"


def _shown(x: float) -> str:
    return str(int(x)) if x.is_integer() else str(x)
