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

from headrace.bench.figures import BenchError
from headrace.bench.kserve.load import Load
from headrace.bench.processes import environment
from headrace.local.ports import LOOPBACK
from headrace.local.tether import tethered

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
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headrace.bench.relay.bare_reader"),
        *(f"--{name}={value}" for name, value in options.items()),
        env=dict(environment()),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=tethered(),
    )
    try:
        async with asyncio.timeout(_READ_S):
            printed, said = await process.communicate()
    except TimeoutError:
        raise BenchError(f"the bare gRPC client did not end within {_READ_S:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise BenchError(f"the bare gRPC client failed: {said.decode(errors='replace').strip()[-1000:]}")
    return float(json.loads(printed)["cpu_s"])


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
