"""Exit codes of the command line, and the type of what sub-commands add their parsers to."""

import argparse
from enum import IntEnum
from typing import TypeAlias

from shardwise import errors
from shardwise.errors import ArgumentError, CheckpointError, ConfigError, LaunchError, RankFailedError, RemoteRankError

SubParsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


class Exit(IntEnum):
    """What a shell sees; 128 and more are the number of the signal that ended the command, plus 128."""

    OK = 0
    DIFFERENT = 1  # of what `checkpoint diff` compares
    USAGE = 2
    DATA = 3
    CHECKPOINT = 4
    RANK = 5
    INTERRUPTED = 130
    BROKEN_PIPE = 141
    TERMINATED = 143


def exit_code(error: errors.ShardwiseError) -> Exit:
    """The code for `error`; a rank that failed with an error of ours counts as that error."""
    kind = type(error)
    if isinstance(error, RankFailedError):
        kind = getattr(errors, error.error_type, kind)
    if issubclass(kind, ArgumentError | ConfigError | LaunchError):
        return Exit.USAGE
    if issubclass(kind, CheckpointError):
        return Exit.CHECKPOINT
    if issubclass(kind, RankFailedError | RemoteRankError):
        return Exit.RANK
    return Exit.DATA
