"""Checkpoints without the ranks that saved them: one process verifies, compares, reshards and converts.

    manifest, problems = verify("runs/1")
    reshard("runs/1", "runs/1-of-8", 8, {"items.weight": Layout(Mesh((8,)), [Shard(0)], (1000, 16))})

Data is read and written some MiB at a time, so the memory needed does not depend on the size of a checkpoint.
`shardwise checkpoint` does this on the command line.
"""

from shardwise.checkpoint.offline.reading import diff, find, verify
from shardwise.checkpoint.offline.resharding import reshard
from shardwise.checkpoint.offline.safetensors_format import export_file, export_hugging_face, import_safetensors
from shardwise.checkpoint.offline.torch_format import export_torch, import_torch

__all__ = [
    "diff", "export_file", "export_hugging_face", "export_torch", "find", "import_safetensors", "import_torch",
    "reshard", "verify",
]  # fmt: skip
