"""The bundled data set, read once."""

import pytest

from shardwise.demos.data import PyIdent, load_pyident


@pytest.fixture(scope="session")
def pyident() -> PyIdent:
    return load_pyident()
