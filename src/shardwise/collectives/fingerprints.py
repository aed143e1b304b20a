"""Collective fingerprints: comparing what ranks are about to call; see `fingerprint` and `check_ranks` in `api`."""

import hashlib
import json
import sys
from contextlib import ExitStack
from dataclasses import asdict, replace

import torch

from shardwise.collectives.collective_call import (
    SAME_CALLS,
    CollectiveCall,
    Ranks,
    call_from,
    describing,
    mismatch,
    mismatch_text,
)
from shardwise.collectives.transport import Transport, exchange_of, gather_with
from shardwise.errors import MismatchError
from shardwise.trace import comm_trace
from shardwise.trace.user_stack import call_sites, format_call_sites, frames_of


def switch(here: Transport, on: bool) -> None:
    """Compare the calls of the rank of this transport before its collectives, or stop that."""
    if on and here.fingerprints is None:
        here.fingerprints = ExitStack()
        here.fingerprints.enter_context(comm_trace.listening_with(comm_trace.Listener()))  # so that events have a cause
    elif not on and here.fingerprints is not None:
        here.fingerprints.close()
        here.fingerprints = None


def compare(here: Transport, call: CollectiveCall, ranks: Ranks) -> None:
    """Raise the same MismatchError on all `ranks` unless their calls are one collective."""
    move = comm_trace.current_event()
    if move is not None and not call.purpose:
        call = replace(call, purpose=str(move))
    call.check(ranks)
    number, count = here.calls[ranks], len(ranks)
    line = next((str(site.frame) for site in call_sites(1)), "")
    common = json.dumps([call.must_match, call.purpose, number, line])
    digest = int.from_bytes(hashlib.blake2b(common.encode(), digest_size=7).digest())
    zeros = (0,) * count
    row = torch.tensor([digest, *(call.send_counts or zeros), *(call.recv_counts or zeros)], device="cpu")
    counts = [len(row)] * count
    with describing(lambda: f"comparing the ranks before {call}"):
        every = exchange_of(here)(row.repeat(count), counts, counts, ranks).view(count, -1)
        sent, expected = every[:, 1 : 1 + count], every[:, 1 + count :]
        if bool((every[:, 0] == digest).all()) and torch.equal(sent, expected.t()):
            return
        facts = {
            "call": asdict(call),
            "number": number,
            "line": line,
            "where": format_call_sites(list(frames_of(sys._getframe())), 1),
        }
        all_facts = [json.loads(text) for text in gather_with(exchange_of(here), json.dumps(facts).encode(), ranks)]
    calls = {rank: call_from(facts["call"]) for rank, facts in zip(ranks, all_facts, strict=True)}
    numbers = [facts["number"] for facts in all_facts]
    why = mismatch(ranks, calls, purposes=True)
    if len(set(numbers)) > 1:
        why = f"it is collective {', '.join(f'#{number}' for number in numbers)} to them"
    if why is None and len({facts["line"] for facts in all_facts}) > 1:
        why = "all ranks must make it in the same line"
    lines = {rank: f"{calls[rank]}{facts['where']}" for rank, facts in zip(ranks, all_facts, strict=True)}
    assert why is not None
    raise MismatchError(f"{mismatch_text(ranks, numbers[0], why, lines)}\n  Fix: {SAME_CALLS}.")
