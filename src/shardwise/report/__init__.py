"""What people look at: pictures of layouts."""

from shardwise.report.picture import picture

__all__ = ["picture"]
