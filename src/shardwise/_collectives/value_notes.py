"""Values that should be the same on all ranks: plain tensors beside DTensors, local tensors of Replicate, numbers.

    collectives.expect_equal(x, ranks, "mul: a plain tensor")   # rank 0 notes a digest of x, and communicates nothing
    y.full_tensor()                                             # with its next collective it reads those of the others

Tensors, and the options of optimizers, are noted at calls 1, 2, 4, … 64 of a call site and at every 64th. The numbers
among the arguments of ops are noted if `check_values(numbers=True)` was called, while a rank watches: up to the 65th
collective of a group, and from every 61st to the next one. At other times they cost nothing.

Notes are read with call records (`call_log.py`); of groups that called no collective since, before collectives of other
groups, in memory or from the store of the world (`remote_records.py`). Ranks compare only notes of the same call site
(the innermost frames of the user's code), call number and last collective, so a call that only some ranks make
(`if rank == 0: log(…)`) is compared with nothing. Differences of rounding are none.
"""

import hashlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import inf, isnan, prod
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from shardwise._collectives.collective_call import Ranks
from shardwise._trace.capture_hooks import is_capturing
from shardwise._trace.user_stack import RUN_BACKWARD, CallSite, call_sites

KEPT_NOTES = 1024  # of a group, by each rank: a state dict notes each of its tensors
CHECK_EVERY = 64  # calls of a call site
WATCH_FIRST = 64  # collectives of a group
WATCH_EVERY = 61  # a prime, so that it is not always the same collective of a step
NOTES_OF_NUMBERS = 96  # while a rank watches
MAX_ELEMENTS = 1 << 15  # that a digest reads; of a larger tensor it reads a sample
SAMPLES = 6  # elements that a note has
SIZES = 5  # of dims; the last is the product of all further ones
FRAMES = 4
KEY, COUNT, AFTER, DIGEST, NDIM, TOLERANCE = 0, 1, 2, 3, 4, 5 + SIZES  # positions in a note; sizes follow on NDIM
VALUES = TOLERANCE + 3  # after two sums
WORDS = VALUES + SAMPLES

MASK = (1 << 62) - 1  # of digests
_MULTIPLIER = 0x5851F42D4C957F2D

# Relative differences that are taken for rounding; zero for others.
_ROUNDING = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
_ROUNDING |= {torch.float16: 1e-2, torch.bfloat16: 5e-2}


class Note(NamedTuple):
    """One value of this rank, kept so that it can be described if ranks disagree.

    Attributes:
        words: what is compared.
    """

    ranks: Ranks
    what: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    site: CallSite | None
    words: "array[int]"
    names: tuple[str, ...] = ()  # of numbers
    fix: str = ""


class ValueNotes:
    """The notes of one rank."""

    def __init__(self, on: bool = True, numbers: bool = False) -> None:
        self.on = on
        self.numbers = numbers
        self.watching = False
        self._counts: dict[tuple[object, ...], int] = {}  # by call site and what it is
        self._watched: dict[Ranks, dict[int, int]] = {}  # the same for numbers, since the last collective of a group
        self._num_watched = 0
        self._early: deque[Note] = deque(maxlen=KEPT_NOTES)

    def watch_after(self, number: int, ranks: Ranks = ()) -> None:
        """Watch up to the next collective, if that of this number is one of those after which ranks do; 0 is none.

        Args:
            number: of a collective of `ranks`.
            ranks: of no other group are calls counted anew, or two notes of it might have one key.
        """
        if self._watched:
            self._watched.pop(ranks, None)
        watching = self.on and self.numbers and (number <= WATCH_FIRST or number % WATCH_EVERY == 0)
        if watching:
            self._num_watched = 0
        if watching != self.watching:
            self._set_watching(watching)

    def stop(self) -> None:
        """Watch no longer: the rank has enough notes, or leaves its world."""
        if self.watching:
            self._set_watching(False)

    def _set_watching(self, watching: bool) -> None:
        self.watching = watching
        (_watching.add if watching else _watching.discard)(self)
        for listener in _listeners:
            listener(bool(_watching))

    def note_numbers(self, numbers: Mapping[str, complex], ranks: Ranks, what: str) -> Note | None:
        """The note of the numbers of a call, by name, while this rank watches; None if this call is not due."""
        sites = call_sites(FRAMES)
        key = _key(what, ranks, sites)
        counts = self._watched.setdefault(ranks, {})
        count = counts[key] = counts.get(key, 0) + 1
        if count.bit_count() != 1:
            return None
        self._num_watched += 1
        if self._num_watched == NOTES_OF_NUMBERS:
            self.stop()
        words = array("q", (key, count, 0, *_contents_of_numbers(numbers)))
        return Note(ranks, what, (), torch.float64, sites[0] if sites else None, words, tuple(numbers))

    def same(self, numbers: Mapping[str, complex], ranks: Ranks, what: str, fix: str) -> Note:
        """The note of numbers by which all ranks choose what they send."""
        words = array("q", (stable_digest((what, ranks)), 1, 0, *_contents_of_numbers(numbers)))
        return Note(ranks, what, (), torch.float64, None, words, tuple(numbers), fix)

    def note(self, x: Tensor, ranks: Ranks, what: str, explicit: bool = False, fix: str = "") -> Note | None:
        """Count one more call of this call site; its note if it is due."""
        count = self._count_if_due(what, ranks)
        if not count or not _has_values(x, explicit):
            return None
        sites = call_sites(FRAMES)
        words = array("q", (_key(what, ranks, sites), count, 0, *_contents(x)))
        return Note(ranks, what, tuple(x.shape), x.dtype, sites[0] if sites else None, words, fix=fix)

    def note_options(
        self, options: Callable[[], Mapping[str, complex]], group: int, ranks: Ranks, what: str
    ) -> Note | None:
        """Count one more step of a parameter group at this call site; the note of its options if it is due."""
        count = self._count_if_due(f"group {group}", ranks)
        if not count:
            return None
        sites, numbers = call_sites(FRAMES), options()
        words = array("q", (_key(f"group {group}", ranks, sites), count, 0, *_contents_of_numbers(numbers)))
        return Note(ranks, what, (), torch.float64, sites[0] if sites else None, words, tuple(numbers), FIX_OPTIONS)

    def _count_if_due(self, what: str, ranks: Ranks) -> int:
        """The number of this call among those of its call site; 0 if it is not noted."""
        local_key = (what, ranks, *map(id, call_sites(1)))  # the note's own key takes longer to make
        count = self._counts[local_key] = self._counts.get(local_key, 0) + 1
        return 0 if count % CHECK_EVERY and (count > CHECK_EVERY or count.bit_count() != 1) else count

    def keep(self, note: Note) -> None:
        """Keep a note for groups that have called no collective yet."""
        self._early.append(note)

    def early(self, ranks: Ranks) -> Iterator[Note]:
        """The notes that concern a group that calls its first collective."""
        return (note for note in self._early if set(ranks) <= set(note.ranks))


# Those who change what runs while a rank of this process watches, and the ranks that do.
_listeners: list[Callable[[bool], None]] = []
_watching: WeakSet[ValueNotes] = WeakSet()


def when_watching(listener: Callable[[bool], None]) -> None:
    """Call `listener` whenever a rank of this process begins or ends to watch, with whether any does."""
    _listeners.append(listener)


def stable_digest(value: object) -> int:
    """A positive number from the `repr` of a value, the same in all processes, unlike `hash`."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest())


def rolling(digest: int, values: Iterable[int]) -> int:
    """A digest of a sequence of numbers, continued from the `digest` of the numbers before."""
    for value in values:
        digest = (digest * _MULTIPLIER + value) & MASK
    return digest


def _key(what: str, ranks: Ranks, sites: Sequence[CallSite]) -> int:
    return rolling(stable_digest((what, ranks)), (site.digest + site.frame.line for site in sites))


def _has_values(x: Tensor, explicit: bool) -> bool:
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
        sums = [wide.sum().item(), wide.abs().sum().item()]
        padded = [*few.tolist(), *[0.0] * (SAMPLES - few.numel())]
    sizes = [*x.shape[: SIZES - 1], *([prod(x.shape[SIZES - 1 :])] if x.ndim >= SIZES else [])]
    bits = array("q", array("d", [_ROUNDING.get(x.dtype, 0.0), *sums, *padded]).tobytes())
    return int.from_bytes(found.digest()), x.ndim, *sizes, *[0] * (SIZES - len(sizes)), *bits


def _contents_of_numbers(numbers: Mapping[str, complex]) -> tuple[int, ...]:
    """What `_contents` has of a tensor, of numbers. The first sum is a digest of all but floats; the second is 0."""
    digest = stable_digest(list(numbers.items()))
    exact = stable_digest([(name, "" if isinstance(x, float | complex) else x) for name, x in numbers.items()]) >> 4
    values = [_as_float(x) for x in islice(numbers.values(), SAMPLES)]
    floats = [_ROUNDING[torch.float64], float(exact), 0.0, *values, *[0.0] * (SAMPLES - len(values))]
    return digest, *[0] * (1 + SIZES), *array("q", array("d", floats).tobytes())


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


def different_values_text(note: Note, words: Mapping[int, Sequence[int]]) -> str:
    """The text of the error about a note that differs between ranks; `words` has those of the known ranks."""
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


def fix_of(note: Note) -> str:
    """What to write so that ranks have the same values, or may have different ones."""
    return note.fix or (FIX_NUMBERS if note.names else FIX_VALUES)


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
