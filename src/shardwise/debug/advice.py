"""What to change so that an op sends less for an operand, with the bytes of each choice."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import gcd
from typing import NamedTuple

from shardwise.debug.alternatives import Times, differing
from shardwise.debug.calls import Calls, Change, Source, folded, outputs
from shardwise.debug.uses import Use
from shardwise.layout import REPLICATE, Layout, Partial, Shard
from shardwise.trace.comm_trace import CommEvent

SHOWN = 2  # alternatives


class Choice(NamedTuple):
    """What to change, and what all ranks send then and now for the operand."""

    text: str
    sent_bytes: int
    now: int


class Saving(NamedTuple):
    """What to change, and what all ranks send less in the block."""

    text: str
    saved_bytes: int


def advice(calls: Calls, uses: Sequence[Use], event: CommEvent, backward: int, any_backward: bool) -> str:
    """Other layouts of the operands, each with what all ranks would send in place of what they send now.

    Args:
        calls: of the block.
        uses: one for each time that the operand, or that of an equal module, was redistributed.
        event: of the first of them.
        backward: how often its gradient was redistributed.
        any_backward: some backward ran.
    """
    use, src, dst, name = uses[0], event.src, event.dst, event.cause.operand
    assert src is not None
    assert dst is not None
    call, at, is_named = use.call, use.position, " " not in name
    tensors = len({other.source.number for other in uses})
    times = Times(len(uses), backward, tensors if use.source.is_read and backward else 0)
    now, choices = call.sent_bytes(at, src, dst, times), list[Choice]()
    if len(uses) > tensors and not is_named and not dst.partial_axes:
        once = call.sent_bytes(at, src, dst, Times(tensors, min(tensors, backward), times.read))
        choices.append(Choice(f".redistribute(placements={list(dst.placements)}) of {name} once before", once, now))
    unit = _unit(src, dst) if len(call.operands) == 1 else 1  # others are aligned with one another
    if unit > 1:
        text = f"shard sizes in multiples of {unit}, as by unit={unit} of ColwiseParallel or RowwiseParallel"
        return _text([*choices, Choice(text, 0, now)], backward)
    if any(isinstance(p, Partial) for p in src.placements):
        return _text(choices, backward, _reduced_to_shards(calls, uses, dst, name))
    found = call.alternatives(at, dst, times)
    better = [Choice(text, n, now) for x, n in found if n < now and (text := _where(calls, uses, x))]
    choices += better[: SHOWN if better and better[0].sent_bytes else 1]
    in_call = backward if use.source.has_gradient else len(uses) * (any_backward and use.has_gradient)
    axes = differing(src, dst)
    savings = _of_parameters(calls, uses, axes)
    replicated = next((x for x, _ in found if all(x.placements[axis] == REPLICATE for axis in axes)), None)
    is_best = is_named and times.read and not choices and not savings
    if is_best and replicated and call.bucket_bytes(at, replicated, times) == now:
        units = "; or fully_shard(module), which keeps it sharded" if len(src.shape) > 1 else ""
        return f"{list(replicated.placements)} in the plan, which sends as much in fewer collectives{units}"
    return _text(choices, in_call, savings)


def _text(choices: Sequence[Choice], backward: int, savings: Sequence[Saving] = ()) -> str:
    """Those that send less, with the same bytes now together."""
    parts = []
    for now, group in groupby((x for x in choices if x.sent_bytes < x.now), key=lambda choice: choice.now):
        parts.append(f"{'; or '.join(f'{x.text}: {x.sent_bytes:,} bytes' for x in group)}, in place of {now:,}")
    parts += [f"{x.text}: the step sends {x.saved_bytes:,} bytes less" for x in savings]
    return "; or ".join(parts) + (", gradients included" if parts and backward else "")


def _where(calls: Calls, uses: Sequence[Use], layout: Layout) -> str:
    """Where the user chooses the layout of an operand that is to have this one, and what to choose there.

    Empty if what ops make would have to be replicated there, which costs elsewhere, or if the block would not send less
    with what is chosen; what makes it is not counted.
    """
    origins = [_origin(calls, use, layout) for use in uses]
    source, now, own, via = origins[0]
    moved = zip(now.placements, own.placements, strict=True)
    if (via or source.maker) and any(isinstance(p, Shard) and q == REPLICATE for p, q in moved):
        return ""
    saved = calls.saved_bytes(Change({origin.source.number: origin.layout for origin in origins}))
    if saved is None or saved <= 0:
        return ""
    if source.name:
        return f"{list(own.placements)} {f'for {source.name} ' if via else ''}in the plan"
    return (
        f"have {source.maker} give {list(own.placements)}"
        if source.maker
        else f"{list(own.placements)} where {via or 'it'} is made"
    )


class _Origin(NamedTuple):
    """The tensor from whose layout that of an operand follows: its layout now, and the one that it is to have.

    Args:
        via: the first op that takes it, as which operand; empty if it is the operand itself.
    """

    source: Source
    now: Layout
    layout: Layout
    via: str


def _origin(calls: Calls, use: Use, layout: Layout) -> _Origin:
    """That of an operand that is to have this layout. Ops such as elementwise ones and reshapes are passed."""
    source, now, own, via = use.source, use.call.operands[use.position].layout, layout, ""
    while source.call is not None and (found := calls.followed(source.call, source.result, own)) is not None:
        index, own = found
        via, now = f"operand {index} of {source.maker}", source.call.operands[index].layout
        source = source.operands[index]
    return _Origin(source, now, own, via)


def _reduced_to_shards(calls: Calls, uses: Sequence[Use], dst: Layout, name: str) -> list[Saving]:
    """The shards to which partial sums are reduced in place of `dst` so that the block sends least."""
    call, at = uses[0].call, uses[0].position
    steps = {step.number: step for use in uses for step in calls.like(use.step)}
    found = []
    for layout in call.sharded_sums(at, dst):
        saved = calls.saved_bytes(Change(operands={number: {at: layout} for number in steps}))
        if saved is not None and saved > 0:
            found.append(Saving(f".redistribute(placements={list(layout.placements)}) of {name}", saved))
    return sorted(found, key=lambda saving: -saving.saved_bytes)[:1]


def _of_parameters(calls: Calls, uses: Sequence[Use], axes: Sequence[int]) -> list[Saving]:
    """The layout of another parameter of the op with which the block sends least, if it sends less than now."""
    found = []
    for index, x in enumerate(uses[0].operands):
        names = {use.operands[index].name for use in uses if index < len(use.operands)}
        name = x.name if len(names) == 1 else folded(x.name)
        if x.name and index != uses[0].position and {folded(own) for own in names} == {folded(x.name)}:
            found += list(_of_parameter(calls, uses[0], index, name, axes))
    return [saving for *_, saving in sorted(found, key=lambda choice: choice[:3])[:1]]


def _of_parameter(
    calls: Calls, use: Use, index: int, name: str, axes: Sequence[int]
) -> Iterator[tuple[int, bool, int, Saving]]:
    """Layouts of a parameter that send less, with or without a redistribution of the result, those to prefer first."""
    tensors, now = calls.parameters(name), use.call.recipe([x.layout for x in use.call.operands])
    steps = [step for step in calls.steps if index < len(step.operands) and step.operands[index].number in tensors]
    if now is None or set(tensors.values()) != {use.call.operands[index].layout}:
        return
    for layout, recipe in use.call.others(index, axes):
        (target,), (result,) = outputs(now), outputs(recipe)
        for then in (None,) if result == target or target.partial_axes else (None, target):
            results = {} if then is None else {step.number: then for step in steps}
            saved = calls.saved_bytes(Change(dict.fromkeys(tensors, layout), results=results))
            if saved is None or saved <= 0:
                continue
            what = f"{list(layout.placements)} for {name} in the plan"
            if then is not None:
                what += f" and .redistribute(placements={list(then.placements)}) of the result"
            elif result != target:
                what += f", whose result is then {list(result.placements)}"
            yield -saved, then is not None, len(recipe.redistributed), Saving(what, saved)


def _unit(src: Layout, dst: Layout) -> int:
    """The unit in which shards of `dst` differ from those of `src` that are no multiples of it; 1 if that is not it."""
    units = [
        gcd(*(size for size in dst.shard_sizes(axis) or () if isinstance(size, int)))
        for axis, (p, q) in enumerate(zip(src.placements, dst.placements, strict=True))
        if p != q and isinstance(p, Shard) and isinstance(q, Shard) and p.dim == q.dim
    ]
    return max(units, default=1)
