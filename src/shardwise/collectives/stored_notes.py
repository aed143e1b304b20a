"""Notes of values in the store of the world: how ranks of several hosts compare them without a collective.

Ranks of one host read each other's notes in memory (`shared_records`), and groups that call collectives compare theirs
in these (`remote_records`). A group on several hosts that calls none, such as all ranks of a `dp` x `tp` mesh with a
plan for `tp` alone, stores its notes each time that it has twice as many as before, or 64 more. Each rank then reads
those of one rank of another host: of the first of the group, or where that is on its own host, of the last that is not.
"""

from collections.abc import Collection, Sequence
from weakref import WeakKeyDictionary

from shardwise.collectives.call_log import CallLog
from shardwise.collectives.digests import stable_digest
from shardwise.collectives.failures.reports import with_store
from shardwise.collectives.failures.store import FailureStore
from shardwise.collectives.remote_records import SentNotes, different_note, notes_of
from shardwise.collectives.value_notes import CHECK_EVERY, Note


class StoredNotes:
    """What this rank has stored of its notes."""

    def __init__(self) -> None:
        self._due: WeakKeyDictionary[CallLog, int] = WeakKeyDictionary()  # how many notes are stored next

    def different_values(
        self, log: CallLog, elsewhere: Collection[int]
    ) -> tuple[Note, dict[int, Sequence[int]]] | None:
        """A note of this rank and that of a rank of another host that differs from it, if there is one.

        Args:
            log: whose notes are stored, if that is due.
            elsewhere: ranks of other hosts.
        """
        others = [rank for rank in log.ranks if rank in elsewhere]
        if not others or log.num_notes < self._due.get(log, 1):
            return None
        self._due[log] = min(2 * log.num_notes, log.num_notes + CHECK_EVERY)
        peer = others[0] if others[0] == log.ranks[0] else others[-1]

        def exchange(store: FailureStore) -> SentNotes | None:
            group = stable_digest(log.ranks)
            store.publish_notes(group, notes_of(log))  # first: of two ranks that do this, one reads the other's
            found: SentNotes | None = store.notes(group, peer)
            return found

        sent = with_store(exchange)
        found = None if sent is None else different_note(log, peer, sent)
        return None if found is None else (found[0], {peer: found[1]})
