"""Call sites: the frames of the user's code on a stack or in a traceback."""

import hashlib
import linecache
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import ParamSpec, TypeVar

import torch

from shardwise._trace.capture_hooks import current

P = ParamSpec("P")
T = TypeVar("T")

_STDLIB = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = sysconfig.get_path("purelib") + os.sep  # lies inside _STDLIB and may hold the user's code
_MACHINERY = tuple(str(folder) + os.sep for folder in (Path(__file__).parents[1], Path(torch.__file__).parent))


@dataclass(frozen=True)
class StackFrame:
    """A file, line and function."""

    file: str
    line: int
    function: str

    @property
    def is_user_code(self) -> bool:
        """Whether it is not code of shardwise, torch or the standard library."""
        in_stdlib = self.file.startswith(_STDLIB) and not self.file.startswith(_INSTALLED)
        return not in_stdlib and not self.file.startswith((*_MACHINERY, "<"))

    @property
    def short(self) -> str:
        """The text without the folders of the file, which differ between hosts."""
        return f"{Path(self.file).name}:{self.line} in {self.function}"

    def __str__(self) -> str:
        return f"{self.file.removeprefix(str(Path.cwd()) + os.sep)}:{self.line} in {self.function}"


@dataclass(frozen=True)
class CallSite:
    """A call in the user's code, and a digest of the text of its expression, such as `x.sum()`; equal on all ranks."""

    frame: StackFrame
    digest: int


MAX_DEPTH = 64  # frames between a collective and the user's code
_is_user_file: dict[str, bool] = {}
MAX_CALL_SITES = 1 << 14
_call_sites: dict[
    tuple[int, int], tuple[CallSite, CodeType]
] = {}  # keys: the id of a code object, which is kept, and the instruction


RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__


_traced_in: set[CodeType] = set()


def traced_inside(function: Callable[P, T]) -> Callable[P, T]:
    """A function inside which graph capture traces. Its calls have the call sites of a replay."""
    _traced_in.add(function.__code__)
    return function


def _outside_of_trace(frame: FrameType | None) -> FrameType | None:
    """The frame that would call a replay: one rank may replay what another traces."""
    at = frame
    while at is not None and at.f_code not in _traced_in:
        at = at.f_back
    return frame if at is None else at


def call_sites(limit: int = 2, inside: CodeType | None = None) -> tuple[CallSite, ...]:
    """The innermost calls in user code. Takes microseconds: it is called for every collective.

    Args:
        inside: only calls inside a call of this code.
    """
    found: list[CallSite] = []
    frame: FrameType | None = sys._getframe(1)
    if current.tracer is not None:
        frame = _outside_of_trace(frame)
    for _ in range(MAX_DEPTH):
        if frame is None:
            break
        code = frame.f_code
        if code is inside:
            break
        file = code.co_filename
        is_user = _is_user_file.get(file)
        if is_user is None:
            is_user = is_user_file(file)
        if is_user:
            site = _call_sites.get((id(code), frame.f_lasti))
            if site is None:
                site = _add_call_site(frame)
            found.append(site[0])
            if len(found) == limit:
                break
        frame = frame.f_back
    return tuple(found)


def is_user_file(file: str) -> bool:
    """`StackFrame.is_user_code`, cached."""
    found = _is_user_file.get(file)
    if found is None:
        found = _is_user_file[file] = StackFrame(file, 0, "").is_user_code
    return found


def _add_call_site(frame: FrameType) -> tuple[CallSite, CodeType]:
    code, line = frame.f_code, frame.f_lineno
    digest = hashlib.blake2b(expression_of(frame).encode(), digest_size=7).digest()
    if len(_call_sites) >= MAX_CALL_SITES:
        _call_sites.clear()
    site = CallSite(StackFrame(code.co_filename, line, code.co_name), int.from_bytes(digest)), code
    _call_sites[id(code), frame.f_lasti] = site
    return site


def expression_of(frame: FrameType) -> str:
    """The text of the expression in `frame`, without spaces; file and line without a source."""
    code = frame.f_code
    first, last, start, end = next(islice(code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    lines = linecache.getlines(code.co_filename)
    if first is None or last is None or start is None or end is None or last > len(lines):
        return f"{code.co_filename}:{frame.f_lineno}"
    rows = [row.encode() for row in lines[first - 1 : last]]
    rows[-1] = rows[-1][:end]
    rows[0] = rows[0][start:]
    return "".join(b"".join(rows).decode(errors="replace").split())


def frames_of(frame: FrameType | None) -> Iterator[StackFrame]:
    """The stack of `frame`, innermost first."""
    while frame is not None:
        yield StackFrame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back


def is_called_by(package: str) -> bool:
    """Whether the innermost frame outside of shardwise is in `package` or a module of it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_in(frame, "shardwise"):
        frame = frame.f_back
    return frame is not None and _is_in(frame, package)


def _is_in(frame: FrameType, package: str) -> bool:
    return f"{frame.f_globals.get('__name__')}.".startswith(f"{package}.")


def user_call_site(trace: TracebackType | None) -> str:
    """The innermost user frame in a traceback, or its innermost frame; "" if it is empty."""
    frames = []
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.append(StackFrame(code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    in_user_code = [frame for frame in frames if frame.is_user_code] or frames
    return str(in_user_code[-1]) if in_user_code else ""


def call_site() -> StackFrame | None:
    """The innermost user frame on the stack, or a line typed at a prompt."""
    prompt = None
    for frame in frames_of(sys._getframe(1)):
        if frame.is_user_code:
            return frame
        if prompt is None and frame.file.startswith("<") and not frame.file.startswith("<frozen"):
            prompt = frame
    return prompt


def format_call_sites(stack: Sequence[StackFrame], limit: int = 3) -> str:
    """The innermost user frames, one a line, indented below `  rank 0: …`."""
    in_user_code = [frame for frame in stack if frame.is_user_code] or list(stack)
    shown = enumerate(in_user_code[:limit])
    return "".join(f"\n      {'called at' if i == 0 else '     from'} {frame}" for i, frame in shown)


def format_running(stack: Sequence[StackFrame]) -> str:
    """Format as `format_call_sites`, after the innermost frame if it is not user code."""
    if not stack:
        return "running, and gave no stack"
    inside = "" if stack[0].is_user_code else f" {stack[0]}"
    return f"running{inside}{format_call_sites(stack)}"
