"""Values that ranks gather from each other, and checks that all ranks have the same."""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from shardwise.collectives.api import exchange_messages, transport
from shardwise.collectives.collective_call import Ranks
from shardwise.collectives.transport import gather_with
from shardwise.collectives.value_notes import stable_digest
from shardwise.errors import MismatchError
from shardwise.trace.capture_hooks import not_capturable

T = TypeVar("T")


def gather_bytes(data: bytes, ranks: Ranks) -> list[bytes]:
    """Every rank's `data`, in rank order. Two collectives: lengths, then contents."""
    not_capturable("an exchange of facts among ranks, such as what shapes from_local was given")
    return gather_with(exchange_messages, data, ranks)


def gather_json(value: T, ranks: Ranks) -> list[T]:
    """Every rank's JSON value, in rank order; nothing is pickled."""
    return [json.loads(data) for data in gather_bytes(json.dumps(value).encode(), ranks)]


def gather_if_different(what: str, value: T, ranks: Ranks) -> list[T] | None:
    """Every rank's JSON value, in rank order; None if all are equal.

    Costs one small collective of digests; the values are sent only if those differ.

    Args:
        what: the values are about, for the errors of graph capture.
    """
    count = len(ranks)
    if count == 1:
        return None
    not_capturable(f"a comparison of {what} among ranks")
    digest = stable_digest(_text(value))
    ones = [1] * count
    digests = exchange_messages(torch.tensor([digest] * count, device="cpu"), ones, ones, ranks).tolist()
    return None if len(set(digests)) == 1 else gather_json(value, ranks)


def agree(what: str, value: object, ranks: Ranks, fix: str) -> None:
    """Raise the same MismatchError on all `ranks` unless all of them pass an equal JSON `value`.

    Sends what `gather_if_different` sends.
    """
    values = gather_if_different(what, value, ranks)
    if values is not None:
        raise disagreement(what, values, ranks, fix)


def disagreement(what: str, values: Sequence[object], ranks: Ranks, fix: str) -> MismatchError:
    """The error that says where the values of ranks differ."""
    by_text: dict[str, list[int]] = {}
    for member, difference in zip(ranks, _differences(values), strict=True):
        by_text.setdefault(difference, []).append(member)
    lines = [f"  rank {', '.join(map(str, members))}: {text}" for text, members in by_text.items()]
    return MismatchError(f"Ranks disagree on {what}:\n" + "\n".join(lines) + f"\n  Fix: {fix}")


def agree_if_checked(what: str, value: Callable[[], object], ranks: Ranks, fix: str) -> None:
    """`agree` while `fingerprint` or `check_ranks` is on; otherwise `value` is not called.

    For comparisons that cost too much to make always, such as the `contents` of a plain tensor that should be
    the same on all ranks.
    """
    if transport().fingerprints is not None:
        agree(what, value(), ranks, fix)


def contents(x: Tensor) -> dict[str, object]:
    """Dtype, shape and a digest of the elements of a tensor, for `agree_if_checked`."""
    copy = x.detach().cpu().clone(memory_format=torch.contiguous_format)  # numpy() forbids to resize the storage
    data = copy.reshape(-1).view(torch.uint8).numpy().tobytes()
    digest = hashlib.blake2b(data, digest_size=8).hexdigest()
    return {"dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape), "digest": digest}


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _differences(values: Sequence[object]) -> list[str]:
    """The values as JSON; if all are objects, without the items that are equal in all of them."""
    objects = [value for value in values if isinstance(value, dict)]
    if len(objects) < len(values):
        return [_text(value) for value in values]
    keys = sorted({key for value in objects for key in value})
    differ = [key for key in keys if any(value.get(key) != objects[0].get(key) for value in objects)]
    return [_text({key: value.get(key) for key in differ}) for value in objects]
