"""Kernels compiled by numba for one CPU thread: the extra `numba`.

    kernels = CompiledKernels()

Ids are sorted by a radix sort, and rows that are needed soon are prefetched, which hides most of the time of random
accesses. Sums are torch's, which are faster. The machine code is cached beside this file, or where
`NUMBA_CACHE_DIR` says. All arrays of the loops are C-contiguous; rows are valid.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.base import BaseContext as Context
from numba.core.typing.templates import Signature
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from shardwise.embedding.kernels.plain import (
    LARGEST_INT32,
    Allocate,
    ByRow,
    Kernels,
    RowIndex,
    RowUses,
    RunIndex,
    Runs,
    Stack,
    plain_kind,
)

AHEAD = 12  # rows between the one that is used and the one that is prefetched
LINE_BYTES = 64  # bytes of a cache line
MOST_LINES = 8  # cache lines of a row that are prefetched; the hardware finds the others
BITS = 11  # sorted by at once: the counts of all values stay in the innermost cache
MASK = (1 << BITS) - 1
MANY = 1 << 18  # ids that are sorted by high bits first, as they exceed the caches
FEW_BITS = 9  # sorted by last of so many

Array = NDArray[Any]
Loop = Callable[..., Any]
Values = Sequence[ir.Value]
compiled: Callable[[Loop], Loop] = njit(
    nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"}
)


def _prefetch(_context: Context, table: types.Array, _row: types.Integer) -> tuple[Signature, Loop]:
    """Begin to read `table[row]`, a row of a 2-D array."""

    def generate(context: Context, builder: ir.IRBuilder, signature: Signature, arguments: Values) -> ir.Value:
        kind = signature.args[0]
        array = context.make_array(kind)(context, builder, arguments[0])
        zero = context.get_constant(types.intp, 0)
        place = cgutils.get_item_pointer(context, builder, kind, array, [arguments[1], zero], wraparound=False)
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        place = builder.bitcast(place, byte)
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [byte, number, number, number]), "llvm.prefetch.p0"
        )
        read, keep, data = (ir.Constant(number, value) for value in (0, 3, 1))
        with cgutils.for_range(builder, _lines(context, builder, array, kind)) as line:
            offset = builder.mul(line.index, context.get_constant(types.intp, LINE_BYTES))
            builder.call(function, [builder.gep(place, [offset]), read, keep, data])
        return context.get_dummy_value()

    return types.void(table, types.intp), generate


prefetch: Loop = intrinsic(_prefetch)


def _lines(context: Context, builder: ir.IRBuilder, array: ir.Value, kind: types.Array) -> ir.Value:
    """How many lines of a row are prefetched."""
    columns = cgutils.unpack_tuple(builder, array.shape, 2)[1]
    row_bytes = builder.mul(columns, context.get_constant(types.intp, kind.dtype.bitwidth // 8))
    line, most = (context.get_constant(types.intp, value) for value in (LINE_BYTES, MOST_LINES))
    lines = builder.sdiv(builder.add(row_bytes, context.get_constant(types.intp, LINE_BYTES - 1)), line)
    return builder.select(builder.icmp_signed("<", lines, most), lines, most)


@compiled
def sort_few(rows: Array, offsets: Array, keys: Array, to: Array) -> tuple[Array, Array]:
    """Integers of row and bag in order, and memory that is free: `keys` and `to`. A stable radix sort by row.

    Row and bag are one integer, so that each pass writes to as few pages as there are values.
    """
    n, passes, largest = len(rows), 0, np.int32(0)
    for i in range(n):
        largest = max(largest, rows[i])
    while largest >> (passes * BITS) > 0:
        passes += 1
    ends = np.zeros((passes, 1 << BITS), np.int32)
    for bag in range(len(offsets) - 1):
        for i in range(offsets[bag], offsets[bag + 1]):
            row = rows[i]
            keys[i] = (np.int64(row) << 32) | bag
            for p in range(passes):
                ends[p, (row >> (p * BITS)) & MASK] += 1
    for p in range(passes):
        place, shift, total = ends[p], 32 + p * BITS, 0
        for value in range(1 << BITS):
            total, place[value] = total + place[value], total
        for i in range(n):
            key = keys[i]
            value = (key >> shift) & MASK
            to[place[value]] = key
            place[value] += 1
        keys, to = to, keys
    return keys, to


@compiled
def sort_many(rows: Array, offsets: Array, keys: Array, grouped: Array) -> tuple[Array, Array]:
    """The same as `sort_few`, by the high bits of rows first.

    The ids of a table follow each other, and differ little in these: the first pass writes to few places, and then the
    ids with the same high bits stay in the cache.
    """
    n, size, largest = len(rows), 1 << FEW_BITS, np.int32(0)
    for i in range(n):
        largest = max(largest, rows[i])
    first = np.zeros((largest >> FEW_BITS) + 2, np.int32)
    for i in range(n):
        first[(rows[i] >> FEW_BITS) + 1] += 1
    for high in range(len(first) - 1):
        first[high + 1] += first[high]
    place = first.copy()
    for bag in range(len(offsets) - 1):
        for i in range(offsets[bag], offsets[bag + 1]):
            high = rows[i] >> FEW_BITS
            grouped[place[high]] = (np.int64(rows[i]) << 32) | bag
            place[high] += 1
    ends = np.empty(size, np.int32)
    for high in range(len(first) - 1):
        begin, end = first[high], first[high + 1]
        if begin == end:
            continue
        ends[:] = 0
        for i in range(begin, end):
            ends[(grouped[i] >> 32) & (size - 1)] += 1
        total = begin
        for value in range(size):
            total, ends[value] = total + ends[value], total
        for i in range(begin, end):
            value = (grouped[i] >> 32) & (size - 1)
            keys[ends[value]] = grouped[i]
            ends[value] += 1
    return keys, grouped


@compiled
def distinct_rows(keys: Array, starts: Array, bags: Array) -> int:
    """How many rows there are in sorted integers of row and bag, whose beginning becomes these rows.

    `starts` becomes where the bags of each row start in `bags`, and their number.
    """
    n, count, last = len(keys), 0, np.int64(-1)
    for i in range(n):
        key = keys[i]
        bags[i] = key & 0xFFFFFFFF
        if key >> 32 != last:
            last = key >> 32
            keys[count], starts[count] = last, i
            count += 1
    starts[count] = n
    return count


@compiled
def make_runs(
    values: Array,
    lengths: Array,
    bag_ends: Array,
    interval_size: Array,
    first_interval: Array,
    position: Array,
    cell_shift: Array,
    cell_bounds: Array,
    at: Array,
    shift: Array,
) -> tuple[Array, Array, Array]:
    """See `Kernels.runs`."""
    num_positions = len(position)
    positions, cells = np.empty(len(values), np.int32), np.zeros(cell_bounds[num_positions], np.int32)
    i, bag = 0, 0
    for feature in range(len(bag_ends)):
        first, size = first_interval[feature], interval_size[feature]
        while bag < bag_ends[feature]:
            for _ in range(lengths[bag]):
                interval = first + np.uint32(values[i]) // np.uint32(size)
                positions[i] = position[interval]
                cells[cell_shift[interval] + bag] += 1
                i += 1
            bag += 1
    ends = np.zeros(num_positions + 1, np.int64)
    for p in range(num_positions):
        ends[p + 1] = ends[p]
        for cell in range(cell_bounds[p], cell_bounds[p + 1]):
            ends[p + 1] += cells[cell]
    cursor = ends[:num_positions].copy()
    grouped = np.empty(len(values), np.int32)
    for i in range(len(values)):
        grouped[cursor[positions[i]]] = values[i]
        cursor[positions[i]] += 1
    counts = np.empty(len(at), np.int64)
    num_ids, num_runs = 0, 0
    for request in range(len(at)):
        p = at[request]
        counts[request] = ends[p + 1] - ends[p]
        num_ids += counts[request]
        num_runs += cell_bounds[p + 1] - cell_bounds[p]
    rows, run_lengths = np.empty(num_ids, np.int32), np.empty(num_runs, np.int32)
    num_ids, num_runs = 0, 0
    for request in range(len(at)):
        p, add = at[request], np.int32(shift[request])
        for i in range(ends[p], ends[p + 1]):
            rows[num_ids] = grouped[i] + add
            num_ids += 1
        for cell in range(cell_bounds[p], cell_bounds[p + 1]):
            run_lengths[num_runs] = cells[cell]
            num_runs += 1
    return rows, run_lengths, counts


@compiled
def rows_in_order(values: Array, feature: Array, base: Array) -> tuple[Array, Array, Array, Array]:
    """Distinct rows over all features, where the ids of each start in the third, the ids, and the row of each id."""
    n, count, last = len(values), 0, np.int64(-1)
    rows = np.empty(n, np.int32)
    for i in range(n):
        rows[i] = values[i] + base[feature[i]]
    each = np.arange(n + 1)
    free, more = np.empty(n, np.int64), np.empty(n, np.int64)
    keys, _ = sort_few(rows, each, free, more) if n <= MANY else sort_many(rows, each, free, more)
    distinct, begin = np.empty(n, np.int64), np.empty(n + 1, np.int64)
    ids, inverse = np.empty(n, np.int64), np.empty(n, np.int64)
    for i in range(n):
        if keys[i] >> 32 != last:
            last = keys[i] >> 32
            distinct[count], begin[count] = last, i
            count += 1
        ids[i] = keys[i] & 0xFFFFFFFF
        inverse[ids[i]] = count - 1
    begin[count] = n
    return distinct[:count], begin[: count + 1], ids, inverse


@compiled
def first_units(distinct: Array, starts: Array, feature_of: Array, dims: Array) -> tuple[Array, Array]:
    """The first distinct row of each interval, and the first unit of each distinct row, as if all were here."""
    count, row, total = len(distinct), 0, 0
    bounds, units = np.empty(len(starts) + 1, np.int64), np.empty(count + 1, np.int64)
    for interval in range(len(starts)):
        bounds[interval] = row
        while row < count and (interval + 1 == len(starts) or distinct[row] < starts[interval + 1]):
            units[row] = total
            total += dims[feature_of[interval]]
            row += 1
    bounds[len(starts)], units[count] = count, total
    return bounds, units


@compiled
def make_row_uses(
    values: Array,
    feature: Array,
    first: Array,
    num_units: int,
    base: Array,
    dims: Array,
    starts: Array,
    feature_of: Array,
    interval: Array,
    column: Array,
    widths: Array,
    shift: Array,
    replies: Array,
) -> tuple[Array, Array, Array, Array, Array, Array, bool]:
    """See `Kernels.row_uses`; the last is whether each unit of the output has one source."""
    distinct, begin, ids, inverse = rows_in_order(values, feature, base)
    bounds, units = first_units(distinct, starts, feature_of, dims)
    counts, num_sent, num_targets = np.empty(len(interval), np.int64), 0, 0
    for r in range(len(interval)):
        low, high = bounds[interval[r]], bounds[interval[r] + 1]
        counts[r] = high - low
        num_sent += (high - low) * widths[r]
        num_targets += (begin[high] - begin[low]) * widths[r]
    rows, targets = np.empty(counts.sum(), np.int32), np.empty(num_targets, np.int64)
    target_offsets, reply_of = np.empty(num_sent, np.int64), np.empty(units[len(distinct)], np.int64)
    num_rows, num_sent, num_targets, num_replies = 0, 0, 0, 0
    for r in range(len(interval)):
        for row in range(bounds[interval[r]], bounds[interval[r] + 1]):
            rows[num_rows] = distinct[row] + shift[r]
            num_rows += 1
            for unit in range(column[r], column[r] + widths[r]):
                target_offsets[num_sent] = num_targets
                num_sent += 1
                for i in range(begin[row], begin[row + 1]):
                    targets[num_targets] = first[ids[i]] + unit
                    num_targets += 1
                if replies[r]:
                    reply_of[units[row] + unit] = num_replies
                    num_replies += 1
    ends, num_sources = np.zeros(num_units, np.int64), 0
    for i in range(len(values)):
        for unit in range(dims[feature[i]]):
            ends[first[i] + unit] += 1
    once = True
    for unit in range(num_units):
        once = once and ends[unit] == 1
        num_sources, ends[unit] = num_sources + ends[unit], num_sources
    offsets, sources = ends.copy(), np.empty(num_sources, np.int64)
    for i in range(len(values)):
        for unit in range(dims[feature[i]]):
            place = first[i] + unit
            sources[ends[place]] = reply_of[units[inverse[i]] + unit]
            ends[place] += 1
    return rows, counts, targets, target_offsets, sources, offsets, once


# ---- optimizers: the formulas of optimizers.py for distinct rows and the sums of their gradients -----------------


@compiled
def sgd(rows: Array, gradient: Array, weight: Array, lr: float) -> None:
    """w -= lr g."""
    last, step = len(rows) - 1, np.float32(-lr)
    for i in range(len(rows)):
        prefetch(weight, rows[min(i + AHEAD, last)])
        for k in range(weight.shape[1]):
            weight[rows[i], k] += step * gradient[i, k]


@compiled
def adagrad(rows: Array, gradient: Array, weight: Array, total: Array, lr: float, eps: float) -> None:
    """s += g², w -= lr g / (√s + eps)."""
    last, step, small = len(rows) - 1, np.float32(-lr), np.float32(eps)
    for i in range(len(rows)):
        prefetch(weight, rows[min(i + AHEAD, last)])
        prefetch(total, rows[min(i + AHEAD, last)])
        row = rows[i]
        for k in range(weight.shape[1]):
            square = total[row, k] + gradient[i, k] * gradient[i, k]
            total[row, k] = square
            weight[row, k] += step * (gradient[i, k] / (np.sqrt(square) + small))


@compiled
def row_wise_adagrad(rows: Array, gradient: Array, weight: Array, total: Array, lr: float, eps: float) -> None:
    """s += mean(g²), w -= lr g / (√s + eps)."""
    last, step, small = len(rows) - 1, np.float32(-lr), np.float32(eps)
    columns = np.float32(weight.shape[1])
    for i in range(len(rows)):
        prefetch(weight, rows[min(i + AHEAD, last)])
        prefetch(total, rows[min(i + AHEAD, last)])
        row, squares = rows[i], np.float32(0)
        for k in range(weight.shape[1]):
            squares += gradient[i, k] * gradient[i, k]
        total[row, 0] += squares / columns
        factor = step / (np.sqrt(total[row, 0]) + small)
        for k in range(weight.shape[1]):
            weight[row, k] += factor * gradient[i, k]


FORMULAS = {"SGD": sgd, "Adagrad": adagrad, "RowWiseAdagrad": row_wise_adagrad}


class CompiledKernels(Kernels):
    """Faster sorting, and updates by SGD, Adagrad and RowWiseAdagrad of float32 tables."""

    name = "numba"

    def by_row(
        self, rows: Tensor, offsets: Tensor, scale: Tensor | None = None, empty: Allocate | None = None
    ) -> ByRow:
        n = len(rows)
        if rows.dtype != torch.int32 or scale is not None or n > LARGEST_INT32:
            return super().by_row(rows, offsets, scale)
        size = 2 * n + n // 2 + 1
        memory: Array = (torch.empty(size, dtype=torch.int64) if empty is None else empty(size)).numpy()
        sort = sort_few if n <= MANY else sort_many
        keys, free = sort(rows.numpy(), offsets.numpy(), memory[:n], memory[n : 2 * n])
        ends, of_ids = memory[2 * n :].view(np.int32), free.view(np.int32)[:n]
        count = distinct_rows(keys, ends, of_ids)
        distinct, starts, bags = map(torch.from_numpy, (keys[:count], ends[: count + 1], of_ids))
        return ByRow(distinct, starts, bags, None)

    def runs(self, index: RunIndex, values: Tensor, lengths: Tensor) -> Runs:
        rows, of_runs, counts = map(torch.from_numpy, make_runs(values.numpy(), lengths.numpy(), *index))
        return rows, of_runs, counts, None

    def row_uses(
        self, index: RowIndex, values: Tensor, feature: Tensor, first: Tensor, num_units: int
    ) -> RowUses | None:
        *arrays, once = make_row_uses(values.numpy(), feature.numpy(), first.numpy(), num_units, *index)
        rows, counts, targets, target_offsets, sources, offsets = map(torch.from_numpy, arrays)
        return RowUses(rows, counts, targets, target_offsets, sources, None if once else offsets)

    def update(self, optimizer: object, stack: Stack, by_row: ByRow, gradient: Tensor) -> bool:
        formula = FORMULAS.get(plain_kind(optimizer))
        if formula is None or stack.weight.dtype != torch.float32:
            return False
        options = [getattr(optimizer, name) for name in ("lr", "eps") if hasattr(optimizer, name)]
        arrays = [stack.weight.numpy(), *(state.numpy() for state in stack.states.values())]
        for distinct, sums in self.sums_by_row(by_row, gradient):
            formula(distinct.numpy(), sums.numpy(), *arrays, *options)
        return True
