"""What training raises."""

from shardwise.errors import ShardwiseError


class DivergedError(ShardwiseError, ArithmeticError):
    """The loss is infinite or not a number."""
