"""Comparisons between ranks: the calls that they make, and values that must be equal on all of them.

    ledger.log(ranks).add(Collective("all_reduce", x, ranks, x.shape))   # a call, before rank 0 sends anything
    ledger.add(x, (0, 1), "mul: a plain tensor", number, fix)           # a value; nothing is sent

Each rank has one `Ledger` in its world (`ledger.py`), of calls by group (`calls.py`) and of notes of values
(`values.py`). Before each collective it reads the ledgers of other ranks: those of its host in memory
(`shared_memory.py`), those of other hosts by an exchange now and then, or in the store (`other_hosts.py`).

Values that must be compared at once are compared by a collective (`agree` in `agreement.py`): arguments, seeds, the
parameters of a bucket, and complete calls inside `fingerprint` (`fingerprints.py`).
"""
