"""Changing layouts: plans with exact bytes, and running them."""
