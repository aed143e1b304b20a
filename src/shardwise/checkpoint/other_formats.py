"""What reads folders and files of another format than a function reads."""

from collections.abc import Collection, Mapping
from pathlib import PurePath

OF_TORCH_SAVE = (
    "of a file of torch.save, torch.distributed.checkpoint.format_utils.torch_save_to_dcp(file, folder) makes a "
    "folder; import that by import_torch"
)
_OF_WEIGHTS = (
    "from_pretrained(folder).save_pretrained(other) of transformers makes a folder of safetensors of this one, which "
    "import_safetensors or load_safetensors reads"
)
# How a folder is recognised, and what reads it.
_OTHER = {
    ".metadata": "import_torch reads this folder of torch.distributed.checkpoint",
    "model.safetensors.index.json": "import_safetensors or load_safetensors reads this folder of safetensors",
    "model.safetensors": "import_safetensors or load_safetensors reads this folder of safetensors",
    "pytorch_model.bin.index.json": _OF_WEIGHTS,
    "pytorch_model.bin": _OF_WEIGHTS,
}
_CHECKPOINTS = {
    "manifest.json": "restore or load reads this folder, which is a checkpoint of shardwise",
    "latest": "restore or load reads this folder, which has checkpoints of shardwise",
}
_FILES = {
    ".safetensors": "import_safetensors or load_safetensors reads this file",
    ".distcp": "import_torch reads the folder of this file, which is of torch.distributed.checkpoint",
    **dict.fromkeys((".bin", ".ckpt", ".pt", ".pth"), OF_TORCH_SAVE),
}
FROM_URL = "copy it to a local path: "  # before what reads no URLs


def reader_of(names: Collection[str], otherwise: str) -> str:
    """What reads a folder of another format than expected, which has these; `otherwise` if it is not known."""
    return _reader(_OTHER | _CHECKPOINTS, names) or otherwise


def reader_of_no_checkpoint(names: Collection[str]) -> str:
    """What reads a folder that has these, and no checkpoint; "" if it is not known."""
    return _reader(_OTHER, names)


def reader_of_file(file: str | PurePath) -> str:
    """What reads a file where a folder is expected; "" if it is not known."""
    path = PurePath(file)
    of_folder = _reader(_OTHER, [path.name])
    return _FILES.get(path.suffix) or (of_folder and f"name its folder: {of_folder}")


def _reader(readers: Mapping[str, str], names: Collection[str]) -> str:
    return next((reader for name, reader in readers.items() if name in names), "")
