"""Comparing what ranks are about to do, before each collective; see `fingerprint` and `check_ranks`."""

import hashlib
import json
import sys
from dataclasses import asdict
from weakref import WeakSet

import torch

from shardwise.collectives.calls import Call, Ranks, call_from, describing, disagreement, disagreement_text
from shardwise.collectives.transport import Transport, gather_with
from shardwise.errors import MismatchError
from shardwise.places import called_at, places_of

_checked: WeakSet[Transport] = WeakSet()  # simulated ranks are told apart by their transport


def switch(here: Transport, on: bool) -> None:
    """Compare, or do not compare, what the rank of this transport does from now on."""
    (_checked.add if on else _checked.discard)(here)


def are_on(here: Transport) -> bool:
    return bool(_checked) and here in _checked


def compare(here: Transport, call: Call, ranks: Ranks) -> None:
    """Raise the same MismatchError on all `ranks` unless they are about to make one and the same collective."""
    call.check(ranks)
    number, count = here.calls[ranks], len(ranks)
    alike = [call.reduce_op, call.dtype, call.shape if call.reduce_op else (), call.purpose, number]
    digest = int.from_bytes(hashlib.blake2b(json.dumps(alike).encode(), digest_size=7).digest())
    zeros = (0,) * count
    row = torch.tensor([digest, *(call.send_counts or zeros), *(call.recv_counts or zeros)])
    counts = [len(row)] * count
    with describing(lambda: f"comparing the ranks before {call}"):
        every = here.all_to_all(row.repeat(count), counts, counts, ranks).view(count, -1)
        sent, expected = every[:, 1 : 1 + count], every[:, 1 + count :]
        if bool((every[:, 0] == digest).all()) and torch.equal(sent, expected.t()):
            return
        facts = {"call": asdict(call), "number": number, "where": called_at(list(places_of(sys._getframe())), 1)}
        said = [json.loads(text) for text in gather_with(here.all_to_all, json.dumps(facts).encode(), ranks)]
    calls = {rank: call_from(facts["call"]) for rank, facts in zip(ranks, said, strict=True)}
    numbers = [facts["number"] for facts in said]
    why = disagreement(ranks, calls, purposes=True)
    if len(set(numbers)) > 1:
        why = f"it is collective {', '.join(f'#{number}' for number in numbers)} to them"
    lines = {rank: f"{calls[rank]}{facts['where']}" for rank, facts in zip(ranks, said, strict=True)}
    assert why is not None
    raise MismatchError(disagreement_text(ranks, numbers[0], why, lines))
