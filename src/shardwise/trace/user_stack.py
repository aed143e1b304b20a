"""Where a rank stands, in the terms of the person who wrote the code that runs on it."""

import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

import torch

_STDLIB = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = sysconfig.get_path("purelib") + os.sep  # lies inside _STDLIB and may hold the user's code
_MACHINERY = tuple(str(folder) + os.sep for folder in (Path(__file__).parents[1], Path(torch.__file__).parent))


@dataclass(frozen=True)
class StackFrame:
    """One line of a stack."""

    file: str
    line: int
    function: str

    @property
    def is_users(self) -> bool:
        """Whether this is code that uses shardwise: not its own, torch's or the standard library's."""
        in_stdlib = self.file.startswith(_STDLIB) and not self.file.startswith(_INSTALLED)
        return not in_stdlib and not self.file.startswith((*_MACHINERY, "<"))

    def __str__(self) -> str:
        return f"{self.file.removeprefix(str(Path.cwd()) + os.sep)}:{self.line} in {self.function}"


def frames_of(frame: FrameType | None) -> Iterator[StackFrame]:
    """The stack that ends in `frame`, innermost first."""
    while frame is not None:
        yield StackFrame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back


def user_call_site(trace: TracebackType | None) -> str:
    """The innermost line of the user's code in a traceback, or its innermost line; "" if it is empty."""
    places = []
    while trace is not None:
        code = trace.tb_frame.f_code
        places.append(StackFrame(code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    users = [place for place in places if place.is_users] or places
    return str(users[-1]) if users else ""


def call_site() -> StackFrame | None:
    """The innermost line of the user's code on the stack; a line typed at a prompt where there is none."""
    typed = None
    for place in frames_of(sys._getframe(1)):
        if place.is_users:
            return place
        if typed is None and place.file.startswith("<") and not place.file.startswith("<frozen"):
            typed = place
    return typed


def format_call_sites(stack: Sequence[StackFrame], limit: int = 3) -> str:
    """The innermost lines of the user's code, one a line, indented to stand under `  rank 0: …`."""
    users = [place for place in stack if place.is_users] or list(stack)
    return "".join(f"\n      {'called at' if i == 0 else '     from'} {place}" for i, place in enumerate(users[:limit]))


def format_running(stack: Sequence[StackFrame]) -> str:
    """As `called_at`, after the line that runs now where that is not the user's own."""
    if not stack:
        return "running, and gave no stack"
    inside = "" if stack[0].is_users else f" {stack[0]}"
    return f"running{inside}{format_call_sites(stack)}"
