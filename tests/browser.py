"""The browser of tests that open pages; they are marked `browser`."""

import os
import shutil

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell")
BROWSER = os.environ.get("SHARDWISE_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
NOT_RUN = "no Chromium on the path, and SHARDWISE_BROWSER names none. Fix: apt-get install chromium"
