"""The language model that `shardwise train lm` trains: a transformer that reads bytes, on a mesh of any axes.

Nothing is imported here, so that the command line can read a configuration without torch.
"""
