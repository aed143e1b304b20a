"""Values that ranks gather from each other, and checks that all ranks have the same."""

import json
from collections.abc import Sequence
from typing import TypeVar

from shardwise._collectives.api import exchange_messages, rank
from shardwise._collectives.checks.values import stable_digest
from shardwise._collectives.collective_call import Ranks
from shardwise._collectives.transport import gather_json_with, gather_unless_equal
from shardwise._trace.capture_hooks import not_capturable
from shardwise.errors import MismatchError

T = TypeVar("T")


def gather_json(value: T, ranks: Ranks) -> list[T]:
    """Every rank's JSON value, in rank order; nothing is pickled. One collective, or two if a value is long."""
    not_capturable("an exchange of facts among ranks, such as what shapes from_local was given")
    return gather_json_with(exchange_messages, value, ranks)


def gather_json_to_first(value: T, ranks: Ranks) -> list[T]:
    """Every rank's JSON value, in rank order, on the first of `ranks`; [] elsewhere."""
    return [value] if len(ranks) == 1 else gather_json_with(exchange_messages, value, ranks, rank() == ranks[0])


def gather_if_different(what: str, value: T, ranks: Ranks) -> list[T] | None:
    """Every rank's JSON value, in rank order; None if all are equal.

    Costs one small collective of digests; values are sent only if the digests differ.

    Args:
        what: name of the values, for the errors of graph capture.
    """
    if len(ranks) == 1:
        return None
    not_capturable(f"a comparison of {what} among ranks")
    return gather_unless_equal(value, ranks, exchange_messages, stable_digest(_text(value)))


def agree(what: str, value: object, ranks: Ranks, fix: str) -> None:
    """Raise one MismatchError on all `ranks` unless all of them pass an equal JSON `value`.

    Communicates as `gather_if_different`.
    """
    values = gather_if_different(what, value, ranks)
    if values is not None:
        raise disagreement(what, values, ranks, fix)


def disagreement(what: str, values: Sequence[object], ranks: Ranks, fix: str) -> MismatchError:
    """The error with the differences of the ranks' values."""
    by_text: dict[str, list[int]] = {}
    for member, difference in zip(ranks, _differences(values), strict=True):
        by_text.setdefault(difference, []).append(member)
    lines = [f"  rank {', '.join(map(str, members))}: {text}" for text, members in by_text.items()]
    return MismatchError(f"Ranks disagree on {what}:\n" + "\n".join(lines) + f"\n  Fix: {fix}")


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _differences(values: Sequence[object]) -> list[str]:
    """The values as JSON; if all are objects, without items that are equal in all."""
    objects = [value for value in values if isinstance(value, dict)]
    if len(objects) < len(values):
        return [_text(value) for value in values]
    keys = sorted({key for value in objects for key in value})
    differ = [key for key in keys if any(value.get(key) != objects[0].get(key) for value in objects)]
    return [_text({key: value.get(key) for key in differ}) for value in objects]
