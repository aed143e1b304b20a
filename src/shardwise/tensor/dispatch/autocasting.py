"""Calls without memory, as autocast makes them.

Torch's meta device knows no autocast: there `F.linear` of float32 gives float32, and saves its operands, not casts of
them. Fake tensors do, and cost more, so they are used only while autocast is on.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch


class Autocast(NamedTuple):
    """Whether autocast is on for a device type, and to which dtype."""

    device_type: str
    dtype: torch.dtype | None

    @classmethod
    def of(cls, device_type: str) -> "Autocast":
        """That of this thread."""
        on = torch.is_autocast_enabled(device_type)
        return cls(device_type, torch.get_autocast_dtype(device_type) if on else None)

    @contextmanager
    def without_memory(self) -> Iterator[str]:
        """Yield the device for tensors without memory, with which calls inside give what calls with memory give."""
        if self.dtype is None:
            yield "meta"
            return
        from torch._subclasses.fake_tensor import FakeTensorMode  # takes a second to import

        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode, torch.autocast(self.device_type, self.dtype):
            yield self.device_type
