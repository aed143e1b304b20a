"""The three collectives of a step: ids to the owners of their rows, results back, gradients to the owners.

    message 1   for each owner and stack: runs of ids of one bag, as rows of the owner's stack (`requests.py`, `ids.py`)
    message 2   one sum of rows for each run (`owner.py`), which the requesting rank adds into its output (`results.py`)
    message 3   the gradient of each of these sums, the other way; then the owner updates its rows

While message 2 is on its way, a rank computes the sums that it needs itself. While message 3 is, the rest of backward
runs; when it ends, the rank sorts the ids by row, waits for the message and updates the rows.

An owner knows neither features nor batch sizes: it gets runs, and returns a row for each. What a run is, a full bag,
the part of a bag that the owner holds, or one distinct row, is for the requesting rank to choose.
"""
