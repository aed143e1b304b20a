"""Whether a plan fits: the first line of its text, and the error if it does not."""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from math import ceil

import numpy as np
import torch

from shardwise._pictures.labels import bytes_text, count_text, milliseconds_text
from shardwise.embedding.optimizers import Adagrad, Adam, Lamb, RowWiseAdagrad, RowWiseAdam, RowWiseLamb
from shardwise.errors import TooLargeError
from shardwise.plan.assignment import Floats
from shardwise.plan.table_request import Request

AT_BOUND = 5e-4  # a smaller gap is 0.0 %
MIB = 1 << 20
MOST_NAMED = 3  # tables
SMALLER = {Adagrad: RowWiseAdagrad, Adam: RowWiseAdam, Lamb: RowWiseLamb}

Least = Callable[[Request], tuple[Floats, Floats]]
"""The bytes of the smallest sharding of each table, on all ranks together and on its fullest rank."""


def fits_text(needed: float, memory: float, ranks: int, seconds: float, gap: float | None) -> str:
    """`Fits: 31.2 GiB of 72.0 GiB on the fullest of 8 ranks, 2.4 ms a step, at most 1.6 % above the bound.`

    Args:
        gap: None if there is no bound.
    """
    above = ""
    if gap is not None:
        above = f", at most {100 * gap:.1f} % above the bound" if gap > AT_BOUND else ", at the bound"
    fits = "Fits" if needed <= memory else "Does not fit"
    used = f"{bytes_text(needed)} of {bytes_text(memory)} on the fullest of {count_text(ranks, 'rank')}"
    return f"{fits}: {used}, {milliseconds_text(seconds)} a step{above}."


def refusal(request: Request, least: Least, fits: Callable[[Request], bool]) -> TooLargeError:
    """The error of tables that do not fit: which, the missing bytes, and the smallest change that fits.

    Args:
        fits: whether a search finds a plan.
    """
    total, fullest = least(request)
    ranks, memory = request.topology.ranks, request.memory
    alone = np.flatnonzero(fullest > memory)
    each = fullest if len(alone) else total / ranks
    need = max(float(total.sum()) / ranks, float(fullest.max()))
    order = [int(table) for table in np.argsort(-each, kind="stable")[:MOST_NAMED] if not len(alone) or table in alone]
    names = ", ".join(f"{request.names[table]} ({bytes_text(float(each[table]))} of a rank)" for table in order)
    what = "In the smallest sharding that is allowed" if len(alone) else "Those that need most"
    changes = _changes(request, total, fullest)
    fix = next((text for text, change in changes if fits(change)), "more memory")
    if need <= memory:
        missing = "no placement was found in which every rank has enough memory"
    else:
        missing = (
            f"a rank has {bytes_text(memory)} for tables and needs {bytes_text(need)}, "
            f"so {bytes_text(need - memory)} are missing"
        )
    return TooLargeError(f"Does not fit on {count_text(ranks, 'rank')}: {missing}. {what}: {names}. Fix: {fix}.")


def _changes(request: Request, total: Floats, fullest: Floats) -> Iterator[tuple[str, Request]]:
    """Changes that may fit, the smallest first."""
    for full, by_row in SMALLER.items():
        if type(request.optimizer) is full:
            options = vars(request.optimizer)
            known = {field.name for field in fields(by_row)}
            smaller = by_row(**{name: value for name, value in options.items() if name in known})
            yield (
                f"the optimizer {by_row.__name__}, which has a state for each row",
                replace(request, optimizer=smaller),
            )
    order = np.argsort(-total, kind="stable")
    wide = [int(table) for table in order if request.tables[table].data_type == torch.float32]
    weight = np.array([4.0 * c.num_embeddings * c.embedding_dim for c in request.tables])
    missing = float(total.sum()) - request.memory * request.topology.ranks
    saved = np.cumsum(weight[wide]) / 2
    count = int(np.searchsorted(saved, missing)) + 1
    if wide and count <= len(wide):
        half = {request.names[table] for table in wide[:count]}
        tables = [replace(c, data_type=torch.bfloat16) if c.name in half else c for c in request.tables]
        named = ", ".join(request.names[table] for table in wide[:count][:MOST_NAMED])
        more = f" and {count - MOST_NAMED} more" if count > MOST_NAMED else ""
        yield f"data_type bfloat16 for {named}{more}", replace(request, tables=tables)
    per_host = request.topology.ranks_per_host
    if request.pinned:
        yield "no pinned tables", replace(request, pinned={})
    else:
        first = max(request.topology.hosts + 1, ceil(float(total.sum()) / (per_host * request.memory)))
        for hosts in sorted({first, first + 1, 2 * first}):
            larger = replace(request.topology, hosts=hosts)
            yield f"{hosts} hosts of {per_host} ranks", replace(request, topology=larger)
    largest = float(max(total.sum() / request.topology.ranks, fullest.max()))
    for share in (1.0, 1.1, 1.5):
        enough = ceil(share * largest / (1 - request.head_room) / MIB)
        larger = replace(request.topology, memory=enough * MIB)
        yield f"ranks with {enough} MiB of memory", replace(request, topology=larger)
