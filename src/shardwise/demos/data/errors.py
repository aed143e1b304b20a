"""What the data sets raise."""

from shardwise.errors import ShardwiseError


class DataError(ShardwiseError, ValueError):
    """A data file that is missing, damaged, of another format, or not what its header says."""


class PassError(ShardwiseError, RuntimeError):
    """A pass over a data set that cannot begin, be saved or be resumed as it was requested."""


class MissingPackageError(ShardwiseError, ImportError):
    """A package that an extra of shardwise installs is not there."""
