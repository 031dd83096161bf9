"""A pytest plugin (`-p tests.pure_relay`) that runs tests as if nothing had been compiled."""

import sys

sys.modules["gateway.relay._steady"] = None  # type: ignore[assignment]  # importing it fails
