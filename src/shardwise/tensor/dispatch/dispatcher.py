"""Where every torch function called with a DTensor arrives.

A function with rows or a decomposition runs by its rule (`run_op.py`). One with a handler is answered by that. Torch
decomposes any other into aten ops, each of which arrives here again (`fallback.py`).
"""

from typing import Any

from shardwise.errors import RuleError
from shardwise.rules import RULES, OpRule
from shardwise.rules.registry import FAMILIES
from shardwise.rules.row import Args, Kwargs, Op
from shardwise.tensor.dispatch import run_op
from shardwise.tensor.dispatch.fallback import run_decomposed
from shardwise.tensor.dispatch.operands import all_promoted
from shardwise.tensor.dispatch.run_op import run
from shardwise.tensor.dtensor import name_of

_family_cache: dict[Any, OpRule] = {}  # the entries of functions that `RULES` does not have


def dispatch(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Answer a call of `func` with a DTensor among its arguments."""
    rule = RULES.get(func) or _family_cache.get(func) or entry_of(func)
    if rule.handler is None:
        return run(func, rule, args, kwargs)
    return rule.handler(func, args, kwargs)


def entry_of(func: Op) -> OpRule:
    """The entry of any function: its own, that of its family, or the one of all others."""
    rule = RULES.get(func) or _family_cache.get(func)
    if rule is None:
        rule = _family_cache[func] = next((rule for serves, rule in FAMILIES if serves(func)), DECOMPOSED)
    return rule


def is_op(func: Op) -> bool:
    """Whether a function computes something; not if it reads an attribute, sets a flag or runs backward."""
    rule = entry_of(func)
    return rule.has_rule or rule.is_op


DECOMPOSED = OpRule(handler=run_decomposed, is_op=True)


def reason(func: Op, args: Args, kwargs: Kwargs) -> str:
    """The reasons of the rows that `func` runs by on these operands, or why it has none."""
    rule = RULES.get(func)
    if rule is None or not rule.has_rule:
        if rule is None or rule.handler is None:
            return "it has no rule: torch decomposes it into ops that have"
        return f"{name_of(func)} has no rows: its handler runs other ops"
    try:
        args, kwargs = all_promoted(func, args, {k: v for k, v in kwargs.items() if k != "out"})
        return run_op.recipe_of(func, args, kwargs).recipe.cause.why
    except RuleError as error:
        return str(error)


def forget() -> None:
    """Drop what is cached; needed after an entry of `RULES` was replaced."""
    _family_cache.clear()
    run_op.forget()
