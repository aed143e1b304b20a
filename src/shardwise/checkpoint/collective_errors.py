"""Work that all ranks do. If it fails on one rank, all ranks raise the same error.

    version = decide("Saving", write, commit)    # `write` on every rank; rank 0 commits with what all have returned

Rank 0 gets one message of each rank, decides, and sends one verdict to all. The size of the verdict does not grow with
the number of ranks.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch

from shardwise import _collectives as collectives
from shardwise._trace.capture_hooks import not_capturable
from shardwise.errors import CheckpointError, MismatchError, NotFiniteError, ShardwiseError

T = TypeVar("T")
R = TypeVar("R")

SHOWN = 5  # items of a long list that an error names
SHORT_BYTES = 512  # largest verdict of one broadcast; a longer one takes two
_ERRORS = {kind.__name__: kind for kind in (CheckpointError, MismatchError, NotFiniteError)}


def all_ranks() -> tuple[int, ...]:
    """Every rank of the world."""
    return tuple(range(collectives.world_size()))


def on_all_ranks(what: str, work: Callable[[], T]) -> list[T]:
    """Do `work` on every rank; its JSON results in rank order, on every rank. Raises as `decide`."""
    return decide(what, work, lambda results: results)


def decide(what: str, work: Callable[[], T], verdict: Callable[[list[T]], R]) -> R:
    """Do `work` on every rank, and `verdict` on rank 0 with the results in rank order; its result on every rank.

    Args:
        what: the beginning of an error's text; rank 0's is used.
        work: returns JSON.
        verdict: returns JSON. It may raise a MismatchError or NotFiniteError with a text of its own.

    Raises:
        CheckpointError: the work or the verdict failed; the same text on every rank says where and why.
        MismatchError: ranks do different work, for example one loads and the others save.
    """
    not_capturable("work of checkpoints that all ranks do")
    cause: Exception | None = None
    answer: dict[str, Any] = {"what": what, "work": getattr(work, "__qualname__", "")}
    try:
        answer["done"] = work()
    except Exception as error:  # noqa: BLE001 - whatever it is, the peers must learn of it and not wait
        cause, answer["failed"] = error, text_of(error)
    data, ranks = b"", all_ranks()
    if answers := collectives.gather_json_to_first(answer, ranks):
        said: dict[str, Any]
        try:
            _require_done(answers)
            said = {"decided": verdict([one["done"] for one in answers])}
        except (MismatchError, NotFiniteError) as error:
            said = {"error": type(error).__name__, "text": str(error)}
        except Exception as error:  # noqa: BLE001 - as above
            failed = error.texts if isinstance(error, RanksError) else {0: text_of(error)}
            said = {"error": "CheckpointError", "text": f"{what} failed{_by_rank(failed, len(answers))}"}
            cause = cause or error
        data = json.dumps(said).encode()
    found = json.loads(_broadcast(data, ranks))
    if "error" in found:
        raise _ERRORS[found["error"]](found["text"]) from cause
    return cast(R, found["decided"])  # the result of `verdict`


class RanksError(Exception):
    """Work failed on some ranks. A verdict raises this with the text of each of them."""

    def __init__(self, texts: Mapping[int, str]) -> None:
        super().__init__()
        self.texts = texts


def _require_done(answers: Sequence[Mapping[str, Any]]) -> None:
    if len({answer["work"] for answer in answers}) > 1:
        is_same = len({answer["what"] for answer in answers}) == 1
        by = [f", by {answer['work'].partition('.')[0]}" * is_same for answer in answers]
        calls = _by_rank({rank: f"{answer['what']}{by[rank]}" for rank, answer in enumerate(answers)}, len(answers))
        raise MismatchError(f"ranks make different calls{calls}\n  Fix: make the same call on every rank.")
    failed = {rank: str(answer["failed"]) for rank, answer in enumerate(answers) if "failed" in answer}
    if failed:
        raise RanksError(failed)


def _broadcast(data: bytes, ranks: tuple[int, ...]) -> bytes:
    """The value that rank 0 passes."""
    if len(ranks) == 1:
        return data

    def sent(part: bytes, count: int) -> bytes:
        block = torch.frombuffer(bytearray(part.ljust(count, b"\0")), dtype=torch.uint8)
        return (
            collectives.broadcast(block.to(collectives.message_device(ranks)), count, 0, ranks).cpu().numpy().tobytes()
        )

    first = sent(len(data).to_bytes(8, "little") + data[:SHORT_BYTES], 8 + SHORT_BYTES)
    length, begun = int.from_bytes(first[:8], "little"), first[8:]
    return begun[:length] if length <= SHORT_BYTES else begun + sent(data[SHORT_BYTES:], length - SHORT_BYTES)


def digest(facts: Mapping[str, str]) -> str:
    """A short text, equal for equal `facts`."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def require_same(what: str, facts: Mapping[str, str], digests: list[str]) -> None:
    """Raise one MismatchError on every rank unless all have equal `facts`, whose digests are given."""
    if len(set(digests)) > 1:
        raise difference(what, facts)


def difference(what: str, facts: Mapping[str, str]) -> MismatchError:
    """The error for ranks with different `facts`; all ranks call this."""

    def lines(every: list[dict[str, str]]) -> str:
        found = []
        for name in sorted(set().union(*every)):
            answers = {rank: one.get(name, "nothing") for rank, one in enumerate(every)}
            if len(set(answers.values())) > 1:
                found.append(f"  {name!r}{_by_rank(answers, len(every), indent='    ')}")
        return listed(found)

    said = decide(what, lambda: dict(facts), lines)
    return MismatchError(f"{what}: ranks disagree on\n{said}\n  Fix: pass the same state and arguments on every rank.")


def listed(lines: list[str]) -> str:
    """The first few of `lines`, and how many more there are."""
    more = [f"  … and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "\n".join(lines[:SHOWN] + more)


def _by_rank(said: Mapping[int, str], world_size: int, indent: str = "  ") -> str:
    """ ": text" if all ranks have one text, else a line for each text with its ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, text in said.items():
        ranks.setdefault(text, []).append(rank)
    if len(ranks) == 1 and len(said) == world_size:
        return f": {next(iter(ranks))}"
    lines = [f"{indent}rank {', '.join(map(str, who))}: {text}" for text, who in ranks.items()]
    return ":\n" + "\n".join(lines)


def text_of(error: Exception) -> str:
    """The text of an error, without a traceback."""
    if isinstance(error, ShardwiseError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{where}. Fix: see that the place exists, has room and may be read and written"
    return f"{type(error).__name__}: {error}"
