"""The first SIGTERM or Ctrl-C lets a run save and end; a second one ends it at once."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from types import FrameType

import torch

from shardwise import collectives

Handler = Callable[[int, FrameType | None], object] | int | None

SIGNALS = (int(signal.SIGTERM), int(signal.SIGINT))
ONE_SIGNAL_SECONDS = 3.0  # in which one signal may come twice: to the process group and from the launcher


@contextmanager
def postponed_signals() -> Iterator[Callable[[], bool]]:
    """Inside, the first signal is only noted; when the block ends, it has its effect, on every rank.

    Yields a function for all ranks to call at the same step: whether one of them was signalled.
    """
    received: list[tuple[int, float]] = []
    agreed = 0

    def note(number: int, frame: FrameType | None) -> None:
        if received and monotonic() - received[0][1] > ONE_SIGNAL_SECONDS:
            _deliver(number, before[number])
        if not received and collectives.rank() == 0:
            os.write(2, b"Saving after this step, then ending. Once more ends at once.\n")
        received.append((number, monotonic()))

    def was_signalled() -> bool:
        nonlocal agreed
        ranks = tuple(range(collectives.world_size()))
        mine = torch.tensor(received[0][0] if received else 0, device=collectives.message_device(ranks))
        agreed = int(collectives.all_reduce(mine, "max", ranks).item())
        return agreed > 0

    before: dict[int, Handler] = {}
    try:
        if threading.current_thread() is threading.main_thread():  # only this one may set handlers
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # as Ctrl-C on ranks whose launcher handles it
                    before[number] = signal.signal(number, note)
        yield was_signalled
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if agreed in before:
        signal.raise_signal(agreed)


def _deliver(number: int, handler: Handler) -> None:
    signal.signal(number, handler)
    signal.raise_signal(number)
