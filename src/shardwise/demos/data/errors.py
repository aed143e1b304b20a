"""What the data sets raise."""

from shardwise.errors import ShardwiseError


class DataError(ShardwiseError, ValueError):
    """A data file that is damaged, of another format, or not what its header says."""
