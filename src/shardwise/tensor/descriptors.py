"""Attributes of `DTensor` that raise or wait: registered by a module not imported yet, not offered, or pending."""

from typing import Any, NoReturn


class Registered:
    """A method of `DTensor` that a higher module gives with `register_method`."""

    def __init__(self, module: str) -> None:
        self.module = module

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, x: object, owner: type | None = None) -> Any:
        raise AttributeError(f"DTensor.{self.name} is registered by {self.module}. Fix: import {self.module}.")


class NotOffered:
    """An attribute of `torch.Tensor` that `DTensor` does not have."""

    def __init__(self, why: str) -> None:
        self.why = why

    def __get__(self, x: object, owner: type | None = None) -> NoReturn:
        raise AttributeError(self.why)


class PendingLayout:
    """The layout of a `DTensor` whose redistribution is running: to read it waits. Other instances have their own."""

    def __get__(self, x: object, owner: type | None = None) -> object:
        own: dict[str, Any] = {} if x is None else vars(x)
        if (settle := own.get("_settle")) is not None:
            return settle(x)
        if "_layout" in own:  # another thread has waited meanwhile
            return own["_layout"]
        raise AttributeError("_layout")
