"""Versions of installed packages, without importing them."""

from importlib import metadata


def installed(package: str) -> str:
    """The version of `package`, or "not installed"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
