"""Nothing of the embedded fleet outlives its run, and everything in it comes back after a crash."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis.asyncio as redis

from headrace.local.parts import PACKAGE_ROOT
from headrace.local.run_dir import SHARED_MEMORY, RunDir
from tests.engines import Llama, Triton, Valkey

RUN = """
import asyncio, json, sys
from headrace.local.parts import TritonPorts, llama_part, triton_part, valkey_part
from headrace.local.ports import free_ports
from headrace.local.progress import PlainProgress
from headrace.local.run_dir import RunDir
from headrace.local.supervisor import Supervisor
from headrace.local.wheels import find_wheels
from rich.console import Console


async def main(run):
    wheels, ports = find_wheels(), free_ports(5)
    parts = [
        valkey_part(wheels.valkey, run, ports[0]),
        llama_part(wheels, run, ports[1]),
        triton_part(wheels, run, "triton-a", TritonPorts(*ports[2:])),
    ]
    async with Supervisor(PlainProgress(Console(stderr=True))) as supervisor:
        starting = asyncio.ensure_future(supervisor.start(parts))
        if sys.argv[1] == "ready":
            await starting
            pids = [supervisor.pid(part.name) for part in parts] + [int(parts[2].helper_pid.read_text())]
            print(json.dumps({"name": run.path.name, "pids": pids}), flush=True)
        else:
            await asyncio.sleep(float(sys.argv[1]))
            print(json.dumps({"name": run.path.name, "pids": []}), flush=True)
        await asyncio.sleep(60)


with RunDir() as run:
    asyncio.run(main(run))
"""


@asynccontextmanager
async def a_run(tmp_path: Path, moment: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str, list[int]]]:
    """A supervisor with Valkey, llama.cpp and Triton, in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", RUN, moment),
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(PACKAGE_ROOT)},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout
        async with asyncio.timeout(40):
            report = json.loads(await process.stdout.readline())
        yield process, report["name"], report["pids"]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def alive(pids: Iterable[int]) -> list[int]:
    """Those that run; a zombie does not, it waits to be counted by a parent that is not ours."""
    return [pid for pid in pids if _state(pid) not in ("", "Z", "X")]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def first_child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def processes_of(run_name: str) -> list[int]:
    """Processes whose command line or environment names the run's folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if run_name.encode() in text:
                found.append(int(entry.name))
    return found


async def gone_within(seconds: float, run_name: str, pids: list[int]) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not alive(pids) and not processes_of(run_name):
            return True
        await asyncio.sleep(0.05)
    return False


@pytest.mark.parametrize("moment", ["ready", "0.1", "0.2", "0.4", "0.8"])
async def test_kill_9_of_the_supervisor_leaves_no_process_and_the_next_run_clears_the_rest(
    tmp_path: Path, moment: str
) -> None:
    async with a_run(tmp_path, moment) as (process, name, pids):
        assert len(alive(pids)) == len(pids)
        assert processes_of(name)
        process.kill()
        await process.wait()
        assert await gone_within(15, name, pids)  # each looks once a second or so, when it gets to run

    with RunDir(tmp_path / f"headrace-{os.getuid()}"):
        pass
    assert not list(SHARED_MEMORY.glob(f"{name}*"))
    assert [path.name for path in (tmp_path / f"headrace-{os.getuid()}" / name).iterdir()] == ["logs"]


async def test_an_orderly_end_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    async with a_run(tmp_path, "ready") as (process, name, pids):
        process.send_signal(signal.SIGINT)  # asyncio's runner cancels the main task
        async with asyncio.timeout(15):
            await process.wait()
        assert not alive(pids)
        assert not processes_of(name)
        assert not list(SHARED_MEMORY.glob(f"{name}*"))


async def test_a_triton_whose_model_process_died_is_restarted(triton_b: Triton) -> None:
    """Triton itself goes on saying that it is ready, so only the supervisor can notice."""
    server = triton_b.pid
    stub = first_child(server)
    os.kill(stub, signal.SIGKILL)
    async with asyncio.timeout(10):
        while triton_b.pid == server:  # noqa: ASYNC110 (the supervisor replaces it)
            await asyncio.sleep(0.02)
    await triton_b.until_ready()
    assert not alive([server, stub])


async def test_a_killed_valkey_and_a_killed_llama_come_back_on_their_ports(valkey: Valkey, llama: Llama) -> None:
    async with redis.Redis.from_url(valkey.url) as client:
        assert await client.ping()
    await asyncio.gather(valkey.kill(), llama.kill())
    await asyncio.gather(valkey.until_ready(), llama.until_ready())
    async with redis.Redis.from_url(valkey.url) as client:
        assert await client.ping()
