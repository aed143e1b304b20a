"""Inside `fingerprint`, ranks compare all of a call before they make it, also its line and its number."""

import sys
from contextlib import ExitStack
from dataclasses import asdict, replace

import torch
from torch import Tensor

from shardwise._collectives.checks.calls import CallLog
from shardwise._collectives.checks.ledger import Ledger
from shardwise._collectives.checks.values import stable_digest
from shardwise._collectives.collective_call import (
    SAME_CALLS,
    Collective,
    CollectiveCall,
    DescribedCall,
    Ranks,
    call_from,
    describing,
    mismatch,
    mismatch_text,
)
from shardwise._collectives.transport import Exchange, Transport, exchange_of, gather_json_with
from shardwise._trace import comm_trace
from shardwise._trace.user_stack import call_sites, format_call_sites, frames_of
from shardwise.errors import MismatchError


class _Facts(DescribedCall):
    """The next call of a rank, its number in the group, and its line."""

    number: int
    line: str


def switch_fingerprints(ledger: Ledger, on: bool) -> None:
    """Start or stop comparing complete calls before this rank's collectives."""
    if on and ledger.fingerprints is None:
        ledger.fingerprints = ExitStack()
        listening = comm_trace.listening_with(comm_trace.Listener())  # with a listener, events have a cause
        ledger.fingerprints.enter_context(listening)
    elif not on and ledger.fingerprints is not None:
        ledger.fingerprints.close()
        ledger.fingerprints = None


def compare_in_full(here: Transport, log: CallLog, collective: Collective, compare: Exchange) -> None:
    """Raise one MismatchError on all ranks of a collective unless their calls match.

    Args:
        log: the log to which the call is added next.
        compare: its own collective, recorded as such: ranks that do not compare are found before they receive it.
    """
    ranks, call, event = collective.ranks, collective.described(), comm_trace.current_event()
    if event is not None and not call.purpose:
        call = replace(call, purpose=str(event))
    call.check(ranks)
    line = next((str(site.frame) for site in call_sites(1)), "")
    where = format_call_sites(list(frames_of(sys._getframe())), 1)
    facts: _Facts = {"call": asdict(call), "number": log.latest + 1, "line": line, "where": where}
    before = comm_trace.set_purpose(None)
    try:
        with comm_trace.muted(), describing(lambda: f"comparing the ranks before {call}"):
            if _are_equal(call, (log.latest + 1, line), ranks, compare):
                return
            all_facts = gather_json_with(exchange_of(here), facts, ranks)
    finally:
        comm_trace.set_purpose(before)
    calls = {rank: call_from(facts["call"]) for rank, facts in zip(ranks, all_facts, strict=True)}
    numbers = [facts["number"] for facts in all_facts]
    why = mismatch(ranks, calls, purposes=True) or "all ranks must make it in the same line"
    if len(set(numbers)) > 1:
        why = f"it is collective {', '.join(f'#{number}' for number in numbers)} to them"
    lines = {rank: f"{calls[rank]}{facts['where']}" for rank, facts in zip(ranks, all_facts, strict=True)}
    raise MismatchError(f"{mismatch_text(ranks, numbers[0], why, lines)}\n  Fix: {SAME_CALLS}.")


def _are_equal(call: CollectiveCall, about: tuple[int, str], ranks: Ranks, exchange: Exchange) -> bool:
    count = len(ranks)
    digest, zeros = stable_digest((call.must_match, call.purpose, about)), (0,) * count
    row = torch.tensor([digest, *(call.send_counts or zeros), *(call.recv_counts or zeros)], device="cpu")
    counts = [len(row)] * count
    every: Tensor = exchange(row.repeat(count), counts, counts, ranks).view(count, -1)
    sent, expected = every[:, 1 : 1 + count], every[:, 1 + count :]
    return bool((every[:, 0] == digest).all()) and torch.equal(sent, expected.t())
