"""What checkpoints survive: faults of processes and disks, damaged files, hostile ones. `python -m tools.faults`."""
