"""Notes of values in the store of the world: how ranks of several hosts compare them without a collective.

Ranks of one host read each other's notes in memory (`shared_records`), and groups that call collectives compare theirs
in these (`remote_records`). A group on several hosts that calls none, such as all ranks of a `dp` x `tp` mesh with a
plan for `tp` alone, stores its notes: each of the first 64, and later once a second. Each rank then reads those of one
rank of another host: of the first of the group, or where that is on its own host, of the last that is not.
"""

from collections.abc import Collection, Sequence
from time import monotonic

from shardwise.collectives.call_log import CallLog
from shardwise.collectives.digests import stable_digest
from shardwise.collectives.failures.reports import with_store
from shardwise.collectives.failures.store import FailureStore
from shardwise.collectives.remote_records import SentNotes, different_note, notes_of
from shardwise.collectives.value_notes import Note

STORED_AT_ONCE = 64  # notes of a group
EVERY_SECONDS = 1.0  # later ones


class StoredNotes:
    """What this rank has stored of its notes."""

    def __init__(self) -> None:
        self._last: dict[CallLog, tuple[int, float]] = {}  # how many notes a log had, and when

    def different_values(
        self, log: CallLog, elsewhere: Collection[int]
    ) -> tuple[Note, dict[int, Sequence[int]]] | None:
        """A note of this rank and that of a rank of another host that differs from it, if there is one.

        Args:
            log: whose notes are stored, if that is due.
            elsewhere: ranks of other hosts.
        """
        if not elsewhere or not self._is_due(log):
            return None
        others = [rank for rank in log.ranks if rank in elsewhere]
        if not others:
            return None
        peer = others[0] if others[0] == log.ranks[0] else others[-1]
        group, mine = stable_digest(log.ranks), notes_of(log)

        def exchange(store: FailureStore) -> SentNotes | None:
            store.publish_notes(group, mine)  # first: of two ranks that do this, one reads the other's
            found: SentNotes | None = store.notes(group, peer)
            return found

        sent = with_store(exchange)
        found = None if sent is None else different_note(log, peer, sent)
        return None if found is None else (found[0], {peer: found[1]})

    def _is_due(self, log: CallLog) -> bool:
        """Whether there are notes to store; if so, they are counted as stored."""
        now = monotonic()
        stored, before = self._last.get(log, (0, now))
        due = log.num_notes > stored and (stored < STORED_AT_ONCE or now >= before + EVERY_SECONDS)
        if due:
            self._last[log] = log.num_notes, now
        return due
