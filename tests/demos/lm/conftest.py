"""A short text and a small model."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from shardwise.demos.data import PydocTopics, load_pydoc_topics
from shardwise.demos.lm.config import LanguageModelConfig


@pytest.fixture(scope="session")
def topics() -> PydocTopics:
    """The real text; of what is not learnt from, a hundred bytes."""
    data = load_pydoc_topics()
    return replace(data, validation=data.validation[:123], test=data.test[:123])


@pytest.fixture(scope="session")
def tiny() -> Callable[..., LanguageModelConfig]:
    """The smallest model that has every part; sizes that no mesh divides."""

    def config(**values: Any) -> LanguageModelConfig:
        small: dict[str, Any] = {
            "dim": 21, "heads": 3, "layers": 2, "context": 18, "batch_size": 5, "steps": 20, "warmup_steps": 4,
            "learning_rate": 1e-2, "sample_bytes": 12,
        }  # fmt: skip
        return LanguageModelConfig(**small | values)

    return config
