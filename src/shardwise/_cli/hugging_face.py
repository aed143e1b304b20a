"""The model of a Hugging Face config, on meta, and a batch for it. Nothing is downloaded."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise._cli.common import read_text
from shardwise.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CONTEXT = 4096  # tokens of an example, unless the model takes fewer
OF_EXAMPLES = ("SequenceClassification", "ImageClassification")  # models with one label for each example


class ConfiguredModel(NamedTuple):
    """A module, inputs by name, and a function from both to the loss, as `plan_module` takes them."""

    module: nn.Module
    inputs: dict[str, Tensor]
    forward: Callable[..., object]


def read_model(what: str, batch_size: int, context: int | None) -> ConfiguredModel:
    """The model of a `config.json` or of a folder with one, in the dtype of the config.

    Args:
        context: tokens of an example; None: CONTEXT, or as many as the model takes.

    Raises:
        ConfigError: it cannot be read, or transformers has no such model.
    """
    file = str(Path(what, "config.json") if Path(what).is_dir() else what)
    text = read_text(file)
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}. Fix: the config.json of a Hugging Face model.") from error
    if not isinstance(content, dict) or not {"model_type", "architectures"} <= content.keys():
        raise ConfigError(
            f"{file} has no model_type or no architectures. Fix: the config.json of a Hugging Face model."
        )
    module, config = _module(file, content)
    return ConfiguredModel(module, _inputs(file, module, config, batch_size, context), _loss)


def _loss(module: nn.Module, **inputs: Tensor) -> object:
    """The loss; the first result of the model if it takes no labels."""
    result = module(**inputs)
    return result.loss if "labels" in inputs else result[0]


def _module(file: str, content: dict[str, Any]) -> "tuple[nn.Module, PretrainedConfig]":
    try:
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError:
        raise ConfigError(
            "Models of Hugging Face need transformers, which is not installed. Fix: pip install transformers."
        ) from None
    transformers.logging.set_verbosity_error()
    kind, name = content["model_type"], str([*content["architectures"], ""][0])
    if kind not in CONFIG_MAPPING:
        meant = did_you_mean(str(kind), CONFIG_MAPPING.keys())
        raise ConfigError(f"{file}: transformers has no model_type {kind!r}.{meant} Fix: one that it has.")
    cls = getattr(transformers, name, None)
    if cls is None:
        raise ConfigError(
            f"{file}: transformers has no architecture {name!r}. Fix: architectures with one that it has."
        )
    try:
        config = CONFIG_MAPPING[kind].from_dict(content)
        config.use_cache = False  # as in training
        with torch.device("meta"):
            return cls._from_config(config), config
    except Exception as error:
        text = " ".join(str(error).split())
        raise ConfigError(f"{file}: transformers cannot make {name}: {text}. Fix: correct the config.") from error


def _inputs(
    file: str, module: nn.Module, config: "PretrainedConfig", batch_size: int, context: int | None
) -> dict[str, Tensor]:
    """A batch on meta; labels if the model takes them."""
    name = type(module).__name__
    if module.main_input_name == "pixel_values":
        size = config.image_size
        height, width = size if isinstance(size, list | tuple) else (size, size)
        x = torch.empty(batch_size, config.num_channels, height, width, dtype=config.dtype, device="meta")
    else:
        most = getattr(config, "max_position_embeddings", None) or CONTEXT
        if context is not None and context > most:
            raise ConfigError(f"--context is {context}, and {file} has {most} positions. Fix: --context {most}.")
        x = torch.empty(batch_size, context or min(most, CONTEXT), dtype=torch.int64, device="meta")
    inputs = {str(module.main_input_name): x}
    if "labels" in inspect.signature(module.forward).parameters:
        shape = x.shape[:1] if name.endswith(OF_EXAMPLES) else x.shape
        inputs["labels"] = torch.empty(shape, dtype=torch.int64, device="meta")
    return inputs
