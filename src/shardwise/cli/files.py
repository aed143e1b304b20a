"""Files that commands write."""

from pathlib import Path

from shardwise.errors import ConfigError


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
