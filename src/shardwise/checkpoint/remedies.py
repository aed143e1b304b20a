"""What a user can do about a file that is damaged or does not answer, in the same words wherever it is found."""

from shardwise.errors import CheckpointError

DAMAGED = (
    ". Fix: copy the file again from where it is sound, or load an earlier step by its path, step-…; "
    "`shardwise checkpoint verify` lists all damage"
)
FOREIGN = ". Fix: copy or download the file again, or save it once more with the program that wrote it"
UNREACHABLE = ". Fix: try again when the place answers; look at the network, the credentials and the permissions"


def damaged(text: str) -> CheckpointError:
    """The error of a file of a checkpoint that is missing, or is not what was saved."""
    return CheckpointError(text + DAMAGED)


def foreign(text: str) -> CheckpointError:
    """The error of a file of another format that cannot be read."""
    return CheckpointError(text + FOREIGN)


def without_remedy(error: CheckpointError) -> str:
    """The text of an error that is one line of a report, which says at its end what to do."""
    return str(error).replace(DAMAGED, "").replace(UNREACHABLE, "")
