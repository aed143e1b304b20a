"""What collectives cost: by which the planner compares sequences of them."""

from typing import NamedTuple


class Cost(NamedTuple):
    """Of one collective.

    Attributes:
        latency: of a collective of no bytes, in bytes that an all-to-all could send meanwhile.
        per_byte: of a byte that the busiest rank sends or receives, by that of an all-to-all.
    """

    latency: float
    per_byte: float


# gloo on one host, medians at 2 and 4 ranks on 2 cores, 1 KB to 64 MB, torch 2.13 (`benchmarks/collectives.py`). An
# all-to-all of up to 16 KiB takes as long as one of 64 KiB. Bytes are those that the busiest rank sends: of an
# all-to-all and an all-gather (n - 1) / n of the result, of a broadcast all of it.
COSTS = {
    "all_to_all": Cost(65536, 1.0),
    "all_to_all and sum": Cost(65536, 1.02),  # of full tensors; slower than an all-reduce from 4 MB on
    "all_reduce": Cost(131072, 1.0),
    "all_gather": Cost(131072, 0.95),
    "reduce_scatter": Cost(131072, 2.5),
    "broadcast": Cost(32768, 0.25),
}
