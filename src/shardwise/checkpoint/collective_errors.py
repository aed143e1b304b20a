"""Work that all ranks do, and that fails on all of them alike if it fails on one."""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from shardwise import _collectives as collectives
from shardwise.errors import CheckpointError, MismatchError, ShardwiseError

T = TypeVar("T")

SHOWN = 5  # of a long list, how many an error names


def all_ranks() -> tuple[int, ...]:
    """Every rank of the world."""
    return tuple(range(collectives.world_size()))


def on_all_ranks(what: str, work: Callable[[], T]) -> list[T]:
    """Do `work` on every rank; its JSON results in rank order.

    Args:
        what: begins the text of the error; that of rank 0 counts.

    Raises:
        CheckpointError: the work failed somewhere; the same text on every rank says where and why.
        MismatchError: ranks do other work, as where one loads and the others save.
    """
    cause: Exception | None = None
    said: dict[str, Any]
    try:
        said = {"done": work()}
    except Exception as error:  # noqa: BLE001 - whatever it is, the peers must learn of it and not wait
        cause, said = error, {"failed": text_of(error)}
    about: dict[str, Any] = {"what": what, "work": getattr(work, "__qualname__", "")}
    answers = collectives.gather_json(about | said, all_ranks())
    if len({answer["work"] for answer in answers}) > 1:
        is_same = len({answer["what"] for answer in answers}) == 1
        by = {rank: f", by {x['work'].partition('.')[0]}" * is_same for rank, x in enumerate(answers)}
        calls = _by_rank({rank: f"{answers[rank]['what']}{by[rank]}" for rank in by}, len(answers))
        raise MismatchError(f"ranks make different calls{calls}\n  Fix: make the same call on every rank.") from cause
    failed = {rank: str(answer["failed"]) for rank, answer in enumerate(answers) if "failed" in answer}
    if failed:
        raise CheckpointError(f"{answers[0]['what']} failed{_by_rank(failed, len(answers))}") from cause
    return [answer["done"] for answer in answers]


def digest(facts: Mapping[str, str]) -> str:
    """A short text that is equal where `facts` are."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def require_same(what: str, facts: Mapping[str, str], digests: list[str]) -> None:
    """Raise the same MismatchError on every rank unless all have the same `facts`, whose digests are known."""
    if len(set(digests)) == 1:
        return
    every = collectives.gather_json(dict(facts), all_ranks())
    lines = []
    for name in sorted(set().union(*every)):
        answers = {rank: one.get(name, "nothing") for rank, one in enumerate(every)}
        if len(set(answers.values())) > 1:
            lines.append(f"  {name!r}{_by_rank(answers, len(every), indent='    ')}")
    raise MismatchError(
        f"{what}: ranks disagree on\n{listed(lines)}\n  Fix: pass the same state and arguments on every rank."
    )


def listed(lines: list[str]) -> str:
    """The first few of `lines`, and how many more there are."""
    more = [f"  … and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "\n".join(lines[:SHOWN] + more)


def _by_rank(said: Mapping[int, str], world_size: int, indent: str = "  ") -> str:
    """ ": text" if all ranks say the same, else a line for each text with the ranks that say it."""
    ranks: dict[str, list[int]] = {}
    for rank, text in said.items():
        ranks.setdefault(text, []).append(rank)
    if len(ranks) == 1 and len(said) == world_size:
        return f": {next(iter(ranks))}"
    lines = [f"{indent}rank {', '.join(map(str, who))}: {text}" for text, who in ranks.items()]
    return ":\n" + "\n".join(lines)


def text_of(error: Exception) -> str:
    """What an error says, without a traceback."""
    if isinstance(error, ShardwiseError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{where}. Fix: see that the place exists, has room and may be read and written"
    return f"{type(error).__name__}: {error}"
