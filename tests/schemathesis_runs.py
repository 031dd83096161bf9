"""Runs of schemathesis: requests made up from an OpenAPI document, some as it asks for and some as it forbids, and
every answer held to it.

It runs in a process of its own, where its settings of hypothesis are nobody else's. In the suite it is short and makes
the same requests every time; with SCHEMATHESIS_SECONDS it goes on for so long, with requests that differ from run to
run (its report names the seed), at most SCHEMATHESIS_RATE of them a second where that is set.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

SECONDS = float(os.environ.get("SCHEMATHESIS_SECONDS", "0"))
RATE = os.environ.get("SCHEMATHESIS_RATE")
_SHORT_S = 120.0
"""When a short run hangs; it takes some seconds of processor time."""
_REPORT = "report.json"
_MORE_S = 120.0
"""How long a run may go on after its time, to end and to find the smallest example of what failed."""


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    passed: bool
    report: str
    """As schemathesis prints it, for people."""
    operations: int
    """How many of the document's operations were tested."""
    requests: int
    """How many requests were made of them."""


async def schemathesis_run(
    document: str,
    url: str,
    folder: Path,
    *,
    headers: Mapping[str, str] | None = None,
    checks: Sequence[str] = ("all",),
    without: Sequence[str] = (),
    examples: int = 10,
    seconds: float = SECONDS,
) -> Outcome:
    """Test the server at `url` against `document`, an OpenAPI document's file or URL. `checks` and `without` are names
    of schemathesis's checks, `examples` how many requests a short run makes up for each operation, at most; what is
    written goes into `folder`."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", document, "--url", url, "--no-color"]
    command += ["--report", "json", "--report-json-path", str(folder / _REPORT), "--suppress-health-check", "all"]
    command += ["--request-timeout", "10", "--checks", ",".join(checks)]
    if without:
        command += ["--exclude-checks", ",".join(without)]
    if seconds:
        command += ["--generation-database", "none", "--max-time", f"{seconds:g}", "--continue-on-failure"]
        command += ["--rate-limit", f"{RATE}/s"] if RATE else []
    else:
        command += ["--generation-deterministic", "--seed", "1", "--max-examples", str(examples)]
        command += ["--phases", "examples,coverage,fuzzing", "--no-shrink"]
    for name, value in (headers or {}).items():
        command += ["--header", f"{name}:{value}"]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(seconds + _MORE_S if seconds else _SHORT_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    text = output.decode(errors="replace")
    if process.returncode not in (0, 1):
        raise AssertionError(f"schemathesis did not run: {text}")
    counted = msgspec.json.decode((folder / _REPORT).read_bytes())
    return Outcome(process.returncode == 0, text, counted["operations"]["tested"], counted["test_cases"]["generated"])
