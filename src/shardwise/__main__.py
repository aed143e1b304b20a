"""`python -m shardwise`."""

import sys

from shardwise._cli import main

if __name__ == "__main__":
    sys.exit(main())
