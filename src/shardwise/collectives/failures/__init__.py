"""Error propagation between ranks: the failure store, the monitor thread, and the reports."""
