"""The yardstick for reading tokens over gRPC: a client that opens streams with grpc.aio, reads what comes, and does
nothing with it.

It runs on the gateway's event loop (uvloop) and prints one JSON line with its own CPU time, that of the process's start
left out.
"""

import argparse
import asyncio
import json
import sys
import time
from typing import Final

import uvloop

from headrace.bench.kserve.load import Load
from headrace.bench.processes import output_of
from headrace.local.ports import LOOPBACK

_READ_S: Final = 120.0


async def read(engine: str, streams: int, at_once: int, messages: int) -> float:
    """CPU seconds for `streams` streams of `messages` messages each, after a few that are not counted."""
    load = Load("engine", engine)
    try:
        await load.streams(at_once, at_once, messages)
        before = time.process_time()
        await load.streams(streams, at_once, messages)
        return time.process_time() - before
    finally:
        await load.close()


async def read_bare(port: int, streams: int, at_once: int, messages: int) -> float:
    """`read` in a process of its own, from the engine on `port`.

    Raises:
        BenchError: it failed.
    """
    options = {"engine": f"{LOOPBACK}:{port}", "streams": streams, "at-once": at_once, "messages": messages}
    module = (sys.executable, "-m", "headrace.bench.relay.bare_reader")
    command = (*module, *(f"--{name}={value}" for name, value in options.items()))
    return float(json.loads(await output_of("the bare gRPC client", command, _READ_S))["cpu_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", required=True)
    for name in ("streams", "at-once", "messages"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        cpu_s = runner.run(read(options.engine, options.streams, options.at_once, options.messages))
    print(json.dumps({"cpu_s": cpu_s}))


if __name__ == "__main__":
    main()
