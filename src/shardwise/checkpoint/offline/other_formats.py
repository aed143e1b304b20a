"""Folders of another format than a function reads."""

from pathlib import Path

# How a folder is recognised, and what reads it.
READERS = {
    ".metadata": "import_torch reads this folder of torch.distributed.checkpoint",
    "model.safetensors.index.json": "import_safetensors or load_safetensors reads this folder of safetensors",
    "model.safetensors": "import_safetensors or load_safetensors reads this folder of safetensors",
    "manifest.json": "restore or load reads this folder, which is a checkpoint of shardwise",
    "latest": "restore or load reads this folder, which has checkpoints of shardwise",
}


def reader_of(folder: Path, otherwise: str) -> str:
    """What reads a folder of another format than expected; `otherwise` if it is not known."""
    return next((reader for name, reader in READERS.items() if (folder / name).exists()), otherwise)
