"""Is a lookup in a distributed table what torch.nn gives? Tables x ids x modes x options, forward, backward, in place.

    python -m tools.embedding_matrix                     # every three choices together: minutes on two cores
    python -m tools.embedding_matrix --strength 2        # every two choices together: what the test suite runs
    python -m tools.embedding_matrix --only 'boxes.*max' # cases whose description matches

A case is a choice for each of `CHOICES`. Its lookup runs once in plain torch and once on simulated ranks; compared
are the result, the gradients of the table and of the weights, the table afterwards, and errors by their type. Numbers
are such that sums are exact in every order, so whatever only adds, copies or picks is compared bit for bit. A case is
also wrong when the table, or its gradient, moves as a whole. The exit status is 1 if any case was wrong.
"""

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, product
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import DTensor, Mesh, count_comms, distribute_tensor, rank
from shardwise._layout import Boxes, OnRanks, Placement, Replicate, Shard
from shardwise._lookups.rules import embedding_bags
from shardwise._tensor import tag
from shardwise.errors import RuleError
from shardwise.sharded_tensor import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor

sys.path.append(str(Path(__file__).parents[1]))  # this script may run from anywhere

from tools.op_judge import tensor_difference

ROWS, COLS = 7, 5
R, S0, S1 = Replicate(), Shard(0), Shard(1)
Place = tuple[Mesh, Sequence[Placement], Sequence[int] | None]  # mesh, placements, order of cutting


def _places() -> dict[str, Place]:
    found: dict[str, Place] = {"one rank": (Mesh((1,)), [S0], None)}
    for n in (2, 3, 4, 5):
        found[f"rows of {n}"] = (Mesh((n,)), [S0], None)
    for name, placement in {
        "whole": R,
        "rows by hand": Shard(0, [1, 6, 0]),
        "columns": S1,
        "columns by hand": Shard(1, [0, 4, 1]),
        "table": OnRanks(1),
        "row boxes": Boxes([[((5, 0), (2, 5))], [], [((0, 0), (5, 5))]]),
    }.items():
        found[name] = (Mesh((3,)), [placement], None)
    for dim, name in enumerate(("rows", "columns")):
        ranks = [f"rank:{r}/cpu" for r in (2, 0, 1)]
        layout = ChunkShardingSpec(dim, ranks).layout((ROWS, COLS), (0, 1, 2))
        found[f"{name} in another order"] = (layout.mesh, layout.placements, None)
    pieces = [((0, 0), (3, 2), 0), ((0, 2), (4, 3), 2), ((3, 0), (4, 2), 2), ((4, 2), (3, 3), 0)]
    shards = [ShardMetadata(list(at), list(sizes), f"rank:{rank}/cpu") for at, sizes, rank in pieces]
    layout = EnumerableShardingSpec(shards).layout((ROWS, COLS), (0, 1, 2))
    found["boxes, none on a rank"] = (layout.mesh, layout.placements, None)
    grid = Mesh((2, 2))
    boxes = Boxes([[((0, 0), (7, 1)), ((0, 4), (7, 1))], [((0, 1), (7, 3))]])
    for first, second in [(S0, S1), (S1, S0), (S0, S0), (S1, S1), (R, S0), (S0, R), (R, S1), (R, boxes), (boxes, R)]:
        found[f"grid {_letter(first)}{_letter(second)}"] = (grid, [first, second], None)
    for first, second in [(OnRanks(1), S0), (S1, OnRanks(0)), (R, OnRanks(1)), (OnRanks(0), OnRanks(1))]:
        found[f"grid {_letter(first)}{_letter(second)}"] = (grid, [first, second], None)
    found["grid rows, inner axis first"] = (grid, [S0, S0], [1, 0])
    found["grid rows by hand"] = (grid, [Shard(0, [2, 5]), Shard(0, [[0, 2], [4, 1]])], None)
    found["grid in another order"] = (Mesh((2, 2), (3, 1, 2, 0)), [Shard(0, [6, 1]), Shard(1, [1, 4])], None)
    return found


def _letter(placement: Placement) -> str:
    return {R: "R", S0: "0", S1: "1"}.get(placement, "T" if isinstance(placement, OnRanks) else "B")


PLACES = _places()
MATRIX = [[3, 3, 0], [6, 1, 3], [0, 0, 0], [5, 2, 1], [3, 6, 6]]
LINE = [3, 3, 0, 6, 1, 5, 0, 2, 0]
# The ids; for bags also where they start (None: bags are rows), and whether the end of the last one is told.
FORMS: dict[str, tuple[list[Any], list[int] | None, bool]] = {
    "matrix": (MATRIX, None, False),
    "bags": (LINE, [0, 3, 3, 4, 8], False),
    "bags and end": (LINE, [0, 3, 3, 4, 8, 9], True),
    "bags and early end": (LINE, [0, 2, 2, 7], True),
    "one bag": (LINE, [0], False),
    "empty bags": ([], [0, 0, 0], False),
    "no bags": ([], [], False),
    "no rows": ([], None, False),
    "line": (LINE, None, False),
    "number": (4, None, False),  # type: ignore[dict-item]
    "cube": ([[[3, 0], [6, 1]], [[0, 0], [5, 3]], [[2, 2], [4, 0]]], None, False),
}
ONLY_EMBEDDING = ("line", "number", "cube")
CHOICES: dict[str, tuple[Any, ...]] = {
    "table": tuple(PLACES),
    "mode": ("embedding", "sum", "mean", "max"),
    "ids": tuple(FORMS),
    "cut": ("plain", "whole", "first axis", "last axis", "all axes", "by hand", "other mesh", "dim 1", "one rank"),
    "padding_idx": (None, 3, 0, -1, -7),
    "max_norm": (None, (2.0, 2.0), (3.0, 1.0), (1.5, float("inf")), (8.0, 0.5)),
    "scale_grad_by_freq": (False, True),
    "sparse": (False, True),
    "weights": (None, "like ids", "whole", "constant"),
    "dtype": (torch.float64, torch.float32, torch.bfloat16),
    "id_dtype": (torch.int64, torch.int32),
    "graded": (True, False),  # whether the table takes a gradient
    "by": ("function", "module", "together"),
}


@dataclass(frozen=True)
class Case:
    """A choice for each of `CHOICES`."""

    table: str
    mode: str
    ids: str
    cut: str
    padding_idx: int | None = None
    max_norm: tuple[float, float] | None = None
    scale_grad_by_freq: bool = False
    sparse: bool = False
    weights: str | None = None
    dtype: torch.dtype = torch.float64
    id_dtype: torch.dtype = torch.int64
    graded: bool = True
    by: str = "function"

    def __str__(self) -> str:
        return "; ".join(f"{name} {getattr(self, name)}" for name in CHOICES)

    @property
    def bags(self) -> bool:
        return self.mode != "embedding"

    @property
    def mesh(self) -> Mesh:
        return PLACES[self.table][0]


# What torch refuses, and for what reason it says so.
REFUSED: tuple[dict[str, Any], ...] = (
    {"mode": "mean", "weights": "like ids"},
    {"mode": "max", "weights": "constant"},
    {"mode": "max", "sparse": True},
    {"mode": "max", "scale_grad_by_freq": True},
    {"scale_grad_by_freq": True, "sparse": True, "graded": True, "ids": "matrix"},
)


def refused(case: Mapping[str, Any]) -> bool:
    """Whether torch does not do this."""
    get = case.get
    if get("scale_grad_by_freq") and get("sparse"):
        return True
    return (get("mode") == "max" and bool(get("sparse") or get("scale_grad_by_freq"))) or (
        get("mode") in ("mean", "max") and get("weights") is not None
    )


def sensible(case: Mapping[str, Any]) -> bool:
    """Whether a (partial) choice can be written down at all."""
    get = case.get
    mode, ids, cut = get("mode"), get("ids"), get("cut")
    if mode == "embedding" and ((ids and FORMS[ids][1] is not None) or get("weights")):
        return False
    if ids in ONLY_EMBEDDING and (mode not in (None, "embedding") or get("weights") or get("by") == "together"):
        return False
    if ids and cut == "dim 1" and ids not in ("matrix", "cube"):
        return False
    if ids == "number" and (cut not in (None, "plain", "whole") or get("sparse")):
        return False  # of one id torch has no sparse gradient, by mistake
    if get("by") == "together":  # which has no other options
        plain = all(get(name) is None for name in ("padding_idx", "max_norm", "weights"))
        ends = ids is not None and FORMS[ids][2]
        if mode == "embedding" or not plain or get("scale_grad_by_freq") or ends:
            return False
    return True


# ---- one case ------------------------------------------------------------------------------------------------

Values = dict[str, Tensor | None]


def exact_numbers(*shape: int, step: float, seed: int) -> Tensor:
    """Small multiples of `step`, of which sums of products are exact in any order, in bfloat16 too."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).double() * step


@dataclass
class Inputs:
    """What a lookup is given, whole."""

    table: Tensor
    ids: Tensor
    offsets: Tensor | None
    weights: Tensor | None
    last: bool
    truncated: bool = False  # whether to leave out ids after the last bag

    @classmethod
    def of(cls, case: Case) -> "Inputs":
        numbers, starts, last = FORMS[case.ids]
        ids = torch.tensor(numbers, dtype=case.id_dtype)
        if case.ids == "no rows":
            ids = ids.view(0, 3)
        weights = exact_numbers(*ids.shape, step=0.5, seed=2).to(case.dtype) if case.weights else None
        offsets = None if starts is None else torch.tensor(starts, dtype=case.id_dtype)
        return cls(exact_numbers(ROWS, COLS, step=0.5, seed=1).to(case.dtype), ids, offsets, weights, last)


def look_up(case: Case, x: Inputs, leaf: Any) -> Any:
    """The lookup that the case describes; `leaf` is the table."""
    norm, norm_type = case.max_norm or (None, 2.0)
    options: dict[str, Any] = {"padding_idx": case.padding_idx, "max_norm": norm, "norm_type": norm_type}
    options |= {"scale_grad_by_freq": case.scale_grad_by_freq, "sparse": case.sparse}
    if x.truncated:  # what torch's kernels make of ids after the last bag depends on the dtype
        assert x.offsets is not None
        if norm is not None:
            torch.embedding_renorm_(leaf.detach(), x.ids, norm, norm_type)
        options["max_norm"], end = None, int(x.offsets[-1])
        x = Inputs(x.table, x.ids[:end], x.offsets, None if x.weights is None else x.weights[:end], x.last)
    extra: dict[str, Any] = {"mode": case.mode, "include_last_offset": x.last} if case.bags else {}
    if case.by == "module" and not x.truncated:
        kind = nn.EmbeddingBag if case.bags else nn.Embedding
        module = kind(ROWS, COLS, **options, **extra, _weight=torch.empty(ROWS, COLS))
        module.weight = leaf
        return module(x.ids, *((x.offsets, x.weights) if case.bags else ()))
    if not case.bags:
        return F.embedding(x.ids, leaf, **options)
    if case.by == "together":
        return embedding_bags([x.ids], [leaf], [x.offsets], mode=case.mode, sparse=case.sparse)[0]
    return F.embedding_bag(x.ids, leaf, x.offsets, per_sample_weights=x.weights, **options, **extra)


def run(case: Case, x: Inputs, whole: Callable[[Any], Tensor]) -> Values:
    """Forward and backward, as whole tensors. `x` holds leaves."""
    leaf = nn.Parameter(x.table, requires_grad=case.graded)
    out = look_up(case, x, leaf)
    if out.requires_grad:
        factor = exact_numbers(*out.shape, step=1.0, seed=3).to(case.dtype)
        (out * factor).sum().backward()
    found: Values = {"result": whole(out.detach()), "table afterwards": whole(leaf.detach())}
    for name, tensor in (("gradient of the table", leaf), ("gradient of the weights", x.weights)):
        grad = None if tensor is None else tensor.grad
        found[name] = None if grad is None else whole(grad)
        if name == "gradient of the table" and grad is not None:
            found["is sparse"] = torch.tensor(grad.is_sparse)
    return found


def in_one_process(case: Case) -> Values | Exception:
    """What plain torch gives, or why it refuses."""
    x = Inputs.of(case)
    x.truncated = case.ids == "bags and early end"
    if x.weights is not None:
        x.weights.requires_grad_(case.weights != "constant")
    # Torch's kernel of bags for CPUs takes the frequencies of other rows, so what it gives without is divided here.
    divided = case.bags and case.scale_grad_by_freq and case.mode != "max" and not case.sparse
    asked = Case(**{**vars(case), "scale_grad_by_freq": False}) if divided else case
    asked = Case(**{**vars(asked), "by": "function" if case.by == "together" else case.by})
    try:
        found = run(asked, x, lambda t: t.to_dense() if t.is_sparse else t)
    except Exception as error:  # noqa: BLE001 - whatever torch says no with
        return error
    grad = found["gradient of the table"]
    if divided and grad is not None:
        found["gradient of the table"] = grad / x.ids.flatten().bincount(minlength=ROWS).clamp(min=1).unsqueeze(1)
    return found


def on_this_rank(case: Case) -> Values:
    """What one rank of many gives."""
    x = Inputs.of(case)
    mesh, placements, order = PLACES[case.table]
    x.table = distribute_tensor(x.table, mesh, placements, shard_order=order)
    if case.cut != "plain":
        ids, offsets = cuts_of(case, x)
        if x.weights is not None:
            x.weights = ids(x.weights) if case.weights == "like ids" else x.weights
        x.ids = ids(x.ids)
        x.offsets = None if x.offsets is None else offsets(x.offsets)
    if x.weights is not None:
        if case.weights == "whole":
            x.weights = distribute_tensor(x.weights, mesh, [R] * mesh.ndim)
        x.weights.requires_grad_(case.weights != "constant")
    with count_comms() as comms:
        found = run(case, x, _whole)
    moved = [move for move in comms.implicit if f"({ROWS}, {COLS})" in str(move)]
    assert not moved, f"the table moved: {moved}"
    return found


def _whole(x: Any) -> Tensor:
    if not isinstance(x, DTensor):
        return x.to_dense() if x.is_sparse else x  # type: ignore[no-any-return]
    local = x.to_local()
    assert tuple(local.shape) == x.layout_.local_shape(rank()), f"local shape {local.shape} under {x.layout_}"
    if local.is_sparse:
        return as_dtensor(tag(local.to_dense(), x.layout_)).full_tensor()
    return x.full_tensor()


Cut = Callable[[Tensor], DTensor]


def cuts_of(case: Case, x: Inputs) -> tuple[Cut, Cut]:
    """How the ids, and how the offsets, are distributed."""
    mesh, n = case.mesh, case.mesh.ndim
    first, last = mesh.shape[0], mesh.shape[-1]
    if case.cut == "other mesh":
        other = Mesh((mesh.size(),), tuple(sorted(mesh.ranks, reverse=True)))
        return (lambda t: distribute_tensor(t, other, [S0]),) * 2
    dim = 1 if case.cut == "dim 1" else 0
    placements: dict[str, list[Placement]] = {
        "whole": [R] * n,
        "first axis": [S0, *[R] * (n - 1)],
        "last axis": [*[R] * (n - 1), S0],
        "all axes": [S0] * n,
        "dim 1": [Shard(dim), *[R] * (n - 1)],
        "one rank": [OnRanks(first - 1), *[R] * (n - 1)],
    }
    if case.cut in placements:
        return (lambda t: distribute_tensor(t, mesh, placements[case.cut]),) * 2
    bags = [lopsided(len(t), last) for t in (x.ids, x.offsets) if t is not None]
    if x.offsets is not None:  # between the same bags
        ends = [*x.offsets.tolist(), len(x.ids)]
        at = [sum(bags[1][:i]) for i in range(last)]
        at = [0 if i == 0 else ends[min(b, len(ends) - 1)] for i, b in enumerate(at)]
        bags[0] = [b - a for a, b in zip(at, [*at[1:], len(x.ids)], strict=True)]
    ids, offsets = ([*[R] * (n - 1), Shard(0, sizes)] for sizes in (bags[0], bags[-1]))
    return (lambda t: distribute_tensor(t, mesh, ids)), (lambda t: distribute_tensor(t, mesh, offsets))


def lopsided(length: int, positions: int) -> list[int]:
    """Most on the first position, nothing on the second, the rest at the end."""
    rest = length // 3
    if positions == 1:
        return [length]
    return [length - rest, *[0] * (positions - 2), rest]


def exactly(case: Case, name: str) -> bool:
    """Whether this outcome is made of sums of exact numbers, copies and choices only."""
    columns_cut = any(not isinstance(p, Shard) or p.dim for p in PLACES[case.table][1] if p != R)
    rescaled = case.max_norm is not None
    if name == "table afterwards":
        return not rescaled or not columns_cut
    if name.startswith("gradient") and case.mesh.size() in (3, 5):
        return False  # each rank starts from its share of a replicated sum, and thirds are not exact
    if name == "gradient of the table":
        return case.mode != "mean" and not case.scale_grad_by_freq
    return case.mode != "mean" and not rescaled


TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2}


def wrong(case: Case, real: bool = False) -> str | None:
    """What is wrong with the case on simulated (or real) ranks; None for nothing."""
    want = in_one_process(case)
    several = any(len(boxes) > 1 for p in PLACES[case.table][1] if isinstance(p, Boxes) for boxes in p.boxes)
    if several and case.sparse and case.graded and not isinstance(want, Exception):
        want = RuleError()  # its part is not a table, so there are no rows of it that a gradient could list
    try:
        got = world(case.mesh.size(), real=real).run(on_this_rank, case)
    except Exception as error:  # noqa: BLE001 - told as what is wrong
        if isinstance(want, Exception) and isinstance(error, type(want)):
            return None
        expected = f" instead of {type(want).__name__}" if isinstance(want, Exception) else ""
        return f"{type(error).__name__}{expected}: {str(error).splitlines()[0]}"
    if isinstance(want, Exception):
        return f"no {type(want).__name__}: {str(want).splitlines()[0]}"
    for number, found in enumerate(got):
        for name, wanted in want.items():
            if complaint := differs(found.get(name), wanted, 0.0 if exactly(case, name) else TOLERANCE[case.dtype]):
                return f"{name} on rank {number}: {complaint}"
    return None


def differs(got: Tensor | None, want: Tensor | None, limit: float) -> str | None:
    """How two outcomes differ by more than `limit`, relative or absolute; None for not at all."""
    if got is None or want is None:
        return None if got is want else f"{got} instead of {want}"
    return tensor_difference(got, want, lambda _: (limit, limit)) or None


# ---- which cases ---------------------------------------------------------------------------------------------


def refusals(seed: int = 0) -> Iterator[Case]:
    """What torch refuses, on every table; the other choices are drawn."""
    rng = Random(seed)
    for table, asked in product(PLACES, REFUSED):
        case: dict[str, Any] = {}
        while len(case) < len(CHOICES):
            drawn = {name: rng.choice(options) for name, options in CHOICES.items()} | asked | {"table": table}
            case = drawn if sensible(drawn) else {}
        yield Case(**case)


def covering(strength: int, seed: int = 0) -> Iterator[Case]:
    """Cases among which every possible combination of `strength` choices occurs, found greedily."""
    rng, names = Random(seed), list(CHOICES)
    missing: dict[tuple[str, ...], dict[tuple[Any, ...], None]] = {}
    for group in combinations(names, strength):
        every = [v for v in product(*(CHOICES[n] for n in group)) if possible(dict(zip(group, v, strict=True)))]
        rng.shuffle(every)
        missing[group] = dict.fromkeys(every)
    for group, values in missing.items():
        while values:
            first = next(iter(values))
            case = _completed(dict(zip(group, first, strict=True)), missing, rng)
            if case is None:  # possible by itself only
                del values[first]
                continue
            for other, left in missing.items():
                left.pop(tuple(case[n] for n in other), None)
            yield Case(**case)


def possible(case: Mapping[str, Any]) -> bool:
    """Whether a (partial) choice can be written down, and torch does it."""
    return sensible(case) and not refused(case)


def _completed(
    chosen: dict[str, Any], missing: Mapping[tuple[str, ...], Mapping[tuple[Any, ...], None]], rng: Random
) -> dict[str, Any] | None:
    """The other choices, each the one that brings most combinations that are still missing."""
    best, most = None, -1
    for _ in range(3):
        case, rest = dict(chosen), [n for n in CHOICES if n not in chosen]
        rng.shuffle(rest)
        for name in rest:
            options = [v for v in CHOICES[name] if possible({**case, name: v})]
            if not options:
                break
            rng.shuffle(options)
            touched = [g for g in missing if name in g and missing[g] and all(n == name or n in case for n in g)]
            case[name] = max(options, key=lambda v: sum(_at(g, case, name, v) in missing[g] for g in touched))
        else:
            gain = sum(tuple(case[n] for n in g) in left for g, left in missing.items())
            if gain > most:
                best, most = case, gain
    return best


def _at(group: tuple[str, ...], case: dict[str, Any], name: str, value: Any) -> tuple[Any, ...]:
    return tuple(value if n == name else case[n] for n in group)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases; print how many there were and which are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strength", type=int, default=3, help="how many choices meet in every combination")
    parser.add_argument("--only", default="", help="regular expression of descriptions")
    parser.add_argument("--share", default="0/1", help="i/n: every n-th case, from number i")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    part, parts = map(int, asked.share.split("/"))
    start, cases, no, bad = time.monotonic(), 0, 0, 0
    for number, case in enumerate(chain(refusals(asked.seed), covering(asked.strength, asked.seed))):
        if number % parts != part or not re.search(asked.only, str(case)):
            continue
        cases += 1
        no += isinstance(in_one_process(case), Exception)
        if complaint := wrong(case):
            bad += 1
            print(f"wrong: {case}\n       {complaint}", flush=True)
    seconds = time.monotonic() - start
    print(f"{cases} cases, {no} of them refused by torch.nn; {bad} wrong; {seconds:.0f} seconds")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
