"""Fixes in errors of checkpoints: for damaged files, other formats and other prefixes of names."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePath

from shardwise.errors import CheckpointError

DAMAGED = (
    ". Fix: copy the file again from where it is sound, or load an earlier step by its path, step-…; "
    "`shardwise checkpoint verify` lists all damage"
)
FOREIGN = ". Fix: copy or download the file again, or save it once more with the program that wrote it"
UNREACHABLE = ". Fix: try again when the place answers; look at the network, the credentials and the permissions"
FROM_URL = "copy it to a local path: "  # before what reads no URLs
OF_TORCH_SAVE = (
    "of a file of torch.save, torch.distributed.checkpoint.format_utils.torch_save_to_dcp(file, folder) makes a "
    "folder; import that by import_torch"
)
_OF_SAFETENSORS = "import_safetensors or load_safetensors reads this folder of safetensors"
_OF_WEIGHTS = (
    "from_pretrained(folder).save_pretrained(other) of transformers makes a folder of safetensors of this one, which "
    "import_safetensors or load_safetensors reads"
)
# A file by which a folder is recognized, and what reads the folder.
_OTHER = {
    ".metadata": "import_torch reads this folder of torch.distributed.checkpoint",
    "model.safetensors.index.json": _OF_SAFETENSORS,
    "model.safetensors": _OF_SAFETENSORS,
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


def damaged(text: str) -> CheckpointError:
    """The error of a checkpoint file that is missing or changed."""
    return CheckpointError(text + DAMAGED)


def foreign(text: str) -> CheckpointError:
    """The error of a file of another format that cannot be read."""
    return CheckpointError(text + FOREIGN)


def without_remedy(error: CheckpointError) -> str:
    """The text of an error as one line of a report; the report's end has the fix."""
    return str(error).replace(DAMAGED, "").replace(UNREACHABLE, "")


def reader_of(names: Collection[str], otherwise: str) -> str:
    """The reader for a folder of another format, which has these names; `otherwise` if unknown."""
    return _reader(_OTHER | _CHECKPOINTS, names) or otherwise


def reader_of_no_checkpoint(names: Collection[str]) -> str:
    """The reader for a folder with these names and no checkpoint; "" if unknown."""
    return _reader(_OTHER, names)


def reader_of_file(file: str | PurePath) -> str:
    """The reader for a file where a folder is expected; "" if unknown."""
    path = PurePath(file)
    of_folder = _reader(_OTHER, [path.name])
    return _FILES.get(path.suffix) or (of_folder and f"name its folder: {of_folder}")


def _reader(readers: Mapping[str, str], names: Collection[str]) -> str:
    return next((reader for name, reader in readers.items() if name in names), "")


def extra_prefix(expected: Sequence[Collection[str]], found: Collection[str]) -> str:
    """The prefix, up to a dot, that one name of each expected tensor has in `found`; "" if there is no such prefix."""
    there = set(found)
    firsts = tuple(f".{name}" for name in expected[0]) if expected else ()
    for name in found:
        for first in firsts:
            prefix = name.removesuffix(first[1:])
            if name.endswith(first) and all(any(prefix + one in there for one in same) for same in expected):
                return prefix
    return ""
