"""Checkpoints: complete and verified or not there, for any number of ranks and any layout; never pickle.

    path = save("runs/1", state_of(module, optimizer) | {"epoch": 3}, step=1200, keep=2)

    progress = {"epoch": 0}
    manifest = restore("runs/1", module, optimizer, extra=progress)

A checkpoint is a folder of safetensors files, which any tool can read, and a `manifest.json` that says which
box of which tensor is where, with checksums.
"""

from shardwise.checkpoint.export import export_table
from shardwise.checkpoint.loading import load
from shardwise.checkpoint.locations import latest, read_manifest
from shardwise.checkpoint.resizing import Rows
from shardwise.checkpoint.retention import Keep
from shardwise.checkpoint.safetensors_loading import load_safetensors
from shardwise.checkpoint.saving import save
from shardwise.checkpoint.saving_async import PendingSave, save_async
from shardwise.checkpoint.training import restore, state_of
from shardwise.checkpoint.writer_lock import lock

__all__ = [
    "Keep", "PendingSave", "Rows", "export_table", "latest", "load", "load_safetensors", "lock", "read_manifest",
    "restore", "save", "save_async", "state_of",
]  # fmt: skip
