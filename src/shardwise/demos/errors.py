"""What training raises."""

from shardwise.errors import ShardwiseError


class DivergedError(ShardwiseError, ArithmeticError):
    """The loss, a parameter or an optimizer state is infinite or not a number."""
