"""What benches do with the processes they start: their environment, what one of them prints, and work that ends when
one of them does."""

import asyncio
import os
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Final

from headrace.bench.figures import BenchError
from headrace.local.parts import PACKAGE_ROOT
from headrace.local.supervisor import Supervisor
from headrace.local.tether import tethered

_SETTLE_S: Final = 1.0
"""How long after a failed call a side's end may show itself."""


def environment() -> Mapping[str, str]:
    """This process's, without settings of a gateway, and with this `headrace` to import."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    paths = [str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**env, "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths)}


async def output_of(what: str, command: Sequence[str], within_s: float) -> bytes:
    """What a program prints.

    Raises:
        BenchError: it failed, or did not end within so many seconds.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        env=dict(environment()),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=tethered(),
    )
    try:
        async with asyncio.timeout(within_s):
            printed, said = await process.communicate()
    except TimeoutError:
        raise BenchError(f"{what} did not end within {within_s:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise BenchError(f"{what} failed: {said.decode(errors='replace').strip()[-1000:]}")
    return printed


async def unless_ended(supervisor: Supervisor, work: Coroutine[Any, Any, None]) -> None:
    """Do the work, unless a side ends meanwhile: then its log says more than the call that broke."""
    working = asyncio.create_task(work, name="rounds")
    ending = asyncio.create_task(supervisor.wait(), name="a side ends")
    try:
        done, _ = await asyncio.wait([working, ending], return_when=asyncio.FIRST_COMPLETED)
        if ending not in done and working.exception():
            await asyncio.wait([ending], timeout=_SETTLE_S)
        if ending.done():
            ending.result()
        working.result()
    finally:
        working.cancel()
        ending.cancel()
        await asyncio.wait([working, ending])
