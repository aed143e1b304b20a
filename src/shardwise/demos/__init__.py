"""What `shardwise train` trains: a folder a job, and here what the jobs share.

A job is an ordinary model and an ordinary optimizer whose parameters live on many ranks. `loop.Job` is what a
job says of itself; the loop, the ledger, checkpoints and what keeps two runs apart are the same for all.

Nothing is imported here, so that the command line can read a configuration without torch.
"""
