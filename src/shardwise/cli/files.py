"""Files that commands read and write."""

from pathlib import Path

from shardwise.errors import ConfigError


def lines_of(file: str) -> list[str]:
    """The lines of a text file that are not empty, without spaces around them.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{file} cannot be read: {reason}. Fix: name a text file, in UTF-8.") from error
    return [line.strip() for line in text.splitlines() if line.strip()]


def write(file: str, content: str) -> None:
    """Write a file and print so.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        Path(file).write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be written: {error.strerror}. Fix: name a file in a folder that exists."
        ) from error
    print(f"Wrote {file}.")
