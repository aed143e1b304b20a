"""`python -m shardwise`."""

import sys

from shardwise.cli import main

if __name__ == "__main__":
    sys.exit(main())
