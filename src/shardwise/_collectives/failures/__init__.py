"""Error propagation: when a rank fails, every rank that waits for it raises, and names it.

Where a failed rank is noticed:

* It raises or exits: `hooks.py` (`sys.excepthook`, exit handlers) calls `reports.report_failure` or `report_exit`,
  which publish it in the failure store before the process ends.
* It is killed: the collective of its peers fails, and `reports.explain` finds that its process is gone.
* It hangs: the collective of its peers times out (`started.StartedCollective`). `reports.explain` asks all ranks
  for their state; the `FailureMonitor` thread of each answers with the collective it waits in or the line it runs.
* It hangs and has the server of the store, which is then silent: `explain` looks at its process.
* It makes another collective: `explain` compares the calls that ranks wait in.

Where the survivors learn of it:

* The `FailureMonitor` thread of each rank polls the store; when a rank has failed it publishes this rank's state, sets
  `monitor.failed` and keeps the report as `monitor.root`.
* A rank that waits in a collective does so in slices (`started.py`). If there is a
  `monitor.root`, it raises `WaitAbortedError`, which `reports.explain` turns into the error of that report.
* A rank that computes, or has caught the error, raises in its next collective, and sends nothing.

`store.py` has the keys in the world's store and what they hold. The first failure is the root: `publish_root` keeps
only one, and every rank raises the error made from it.
"""
