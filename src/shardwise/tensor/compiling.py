"""`torch.compile` cannot trace a DTensor: one error that says what can."""

from functools import cache

from torch._guards import TracingContext

from shardwise.errors import CaptureError


def refuse_compilation() -> None:
    """Raise if `torch.compile` is tracing.

    The compiler does not trace this function, but calls it where traced code does, such as in a hook of a module.

    Raises:
        CaptureError: with the line of the user's code.
    """
    if TracingContext.try_get() is not None:
        raise _compile_error()(
            "torch.compile cannot trace a DTensor. Fix: shardwise.capture(module, backend='inductor'), which "
            "captures the step and compiles its local ops."
        )


vars(refuse_compilation)["_dynamo_marked_constant"] = True  # `assume_constant_result`, which takes seconds to import


@cache
def _compile_error() -> type[CaptureError]:
    """A CaptureError that torch.compile passes on as it is, with the line of the user's code; others it wraps."""
    from torch._dynamo.exc import TorchRuntimeError

    return type("CaptureError", (CaptureError, TorchRuntimeError), {"__module__": CaptureError.__module__})
