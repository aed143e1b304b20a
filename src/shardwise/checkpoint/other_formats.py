"""What reads folders and files of another format than a function reads."""

from pathlib import Path

# How a folder is recognised, and what reads it.
_OTHER = {
    ".metadata": "import_torch reads this folder of torch.distributed.checkpoint",
    "model.safetensors.index.json": "import_safetensors or load_safetensors reads this folder of safetensors",
    "model.safetensors": "import_safetensors or load_safetensors reads this folder of safetensors",
}
_CHECKPOINTS = {
    "manifest.json": "restore or load reads this folder, which is a checkpoint of shardwise",
    "latest": "restore or load reads this folder, which has checkpoints of shardwise",
}
OF_TORCH_SAVE = (
    "of a file of torch.save, torch.distributed.checkpoint.format_utils.torch_save_to_dcp(file, folder) makes a "
    "folder; import that by import_torch"
)
_FILES = {
    ".safetensors": "import_safetensors or load_safetensors reads this file",
    **dict.fromkeys((".bin", ".ckpt", ".pt", ".pth"), OF_TORCH_SAVE),
}


def reader_of(folder: Path, otherwise: str) -> str:
    """What reads a folder of another format than expected; `otherwise` if it is not known."""
    return _reader(_OTHER | _CHECKPOINTS, folder, otherwise)


def reader_of_no_checkpoint(folder: Path, otherwise: str) -> str:
    """What reads a folder that has no checkpoint; `otherwise` if it is not known."""
    return _reader(_OTHER, folder, otherwise)


def reader_of_file(file: Path, otherwise: str) -> str:
    """What reads a file where a folder is expected; `otherwise` if it is not known."""
    return _FILES.get(file.suffix, otherwise)


def _reader(readers: dict[str, str], folder: Path, otherwise: str) -> str:
    return next((reader for name, reader in readers.items() if (folder / name).exists()), otherwise)
