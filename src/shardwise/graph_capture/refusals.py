"""Errors of graph capture, which name the lines of the user's code."""

import sys

from shardwise.errors import CaptureError
from shardwise.trace.user_stack import format_call_sites, frames_of


def refusal(what: str, fix: str) -> CaptureError:
    """What cannot be captured, where the user's code does it, and what to do instead."""
    where = format_call_sites([*frames_of(sys._getframe(1))])
    return CaptureError(f"capture: {what}.{where}\n  Fix: {fix}.")
