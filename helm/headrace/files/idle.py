"""Waits until an engine has no more requests, as its metrics say: what a pod does before its engine is told to stop.

vLLM and trtllm-serve break off what they work on when they are told to stop. When a pod is deleted gateways learn of it
within a second and send it nothing new, so its requests become fewer by themselves; Kubernetes waits for this script
before it tells the engine. It ends at once when the engine does not answer, or has no such metric.

Usage: idle.py URL METRIC SECONDS. Runs in the engines' images, so it uses Python's own library only.
"""

import sys
import time
import urllib.request

SETTLE_S = 5
"""Until every gateway has noticed."""
EVERY_S = 1


def running(text, metric):
    """What the series of `metric` come to in Prometheus' text format; None if there are none."""
    series = [line for line in text.splitlines() if line.startswith((metric + "{", metric + " "))]
    return sum(float(line.rpartition("}")[2].removeprefix(metric).split()[0]) for line in series) if series else None


def wait(url, metric, seconds, settle=SETTLE_S):
    """Wait for `settle` seconds, and then until nothing runs any more, `seconds` in all at most."""
    deadline = time.monotonic() + seconds
    time.sleep(settle)
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                left = running(answer.read().decode(), metric)
        except OSError:
            return
        if not left:
            return
        time.sleep(EVERY_S)


if __name__ == "__main__":
    wait(sys.argv[1], sys.argv[2], float(sys.argv[3]))
