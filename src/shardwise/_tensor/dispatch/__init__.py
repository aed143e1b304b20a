"""Dispatch: how a call with a DTensor finds its rule and runs on local tensors."""
