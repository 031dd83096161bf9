"""Running the load program and reading what it reports."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from headrace.bench.figures import BenchError
from headrace.bench.relay.stretches import MODEL, Stretch, make_request
from headrace.local.tether import tethered

PATIENCE_S: Final = 60.0
"""How long the last answers may take beyond their time before they count as lost: slow sides are measured too."""
_LAST_WORDS_S: Final = 10.0


class Report(msgspec.Struct, frozen=True):
    """What the load program says at its end."""

    streams: int
    """Complete answers."""
    errors: int
    first_error: str
    pieces: int
    bytes: int
    most_open: int
    """Streams that had begun at the same time."""
    seconds: float
    cpu_s: float
    """The load's own CPU time."""
    p50_us: float
    p99_us: float
    """How long pieces were on their way, from the engine's write to the load's read."""


@dataclass(frozen=True, slots=True)
class Load:
    """A way to put load on a side."""

    program: Path
    folder: Path
    """For the requests."""

    async def run(
        self,
        port: int,
        stretch: Stretch,
        *,
        seconds: float = 0.0,
        streams: int | None = None,
        ramp_s: float = 0.0,
        piece: str | None = None,
        model: str = MODEL,
        headers: Sequence[str] = (),
        when_open: Callable[[], Awaitable[None]] | None = None,
    ) -> Report:
        """Begin streams for `seconds`, or `streams` of them, and see all of them end; `piece` is the text that each
        chunk of another engine than the bench's own holds. `when_open` is awaited once every connection has a stream
        that has begun.

        Raises:
            BenchError: the program failed; not for wrong answers, which it counts.
        """
        request = self.folder / f"{stretch.name}-{model}.http"
        request.write_bytes(make_request(stretch, model, *headers))
        one = stretch.chunks * stretch.gap_us / 1e6
        options = {
            "port": port,
            "request": request,
            "connections": stretch.connections,
            "chunks": stretch.chunks,
            "ramp-ms": round(ramp_s * 1000),
            "deadline": seconds + ramp_s + one + PATIENCE_S,
            **({"seconds": seconds} if streams is None else {"streams": streams}),
            **({} if piece is None else {"piece": piece}),
        }
        process = await asyncio.create_subprocess_exec(
            str(self.program),
            *(f"--{name}={value}" for name, value in options.items()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            preexec_fn=tethered(),
        )
        assert process.stdout is not None and process.stderr is not None
        try:
            async with asyncio.timeout(float(str(options["deadline"])) + _LAST_WORDS_S):
                last = b""
                while line := await process.stdout.readline():
                    last = line
                    if when_open is not None and line.startswith(b'{"open"'):
                        await when_open()
                said = await process.stderr.read()
                await process.wait()
            return msgspec.json.decode(last, type=Report)
        except TimeoutError:
            raise BenchError("the load did not come to its end in time") from None
        except msgspec.DecodeError:
            raise BenchError(f"the load ended without a report: {said.decode(errors='replace').strip()}") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
