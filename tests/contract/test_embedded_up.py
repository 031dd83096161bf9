"""`headrace up` as a newcomer runs it: the whole fleet with the gateway, and every way it ends."""

import asyncio
import json
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from headrace.local.parts import PACKAGE_ROOT
from headrace.local.ports import free_ports
from headrace.local.run_dir import clear_dead_runs
from tests.contract.test_embedded_run import gone_within, processes_of

START_DEADLINE_S = 60


@asynccontextmanager
async def up(tmp_path: Path, *options: str) -> AsyncIterator[asyncio.subprocess.Process]:
    http, admin = free_ports(2)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headrace", "up", "--http-port", str(http), "--admin-port", str(admin), *options),
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(PACKAGE_ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
        clear_dead_runs(tmp_path / f"headrace-{os.getuid()}")  # what a killed run leaves in shared memory


async def until_it_serves(process: asyncio.subprocess.Process) -> str:
    """Standard output up to its last line of advice."""
    assert process.stdout
    text = ""
    async with asyncio.timeout(START_DEADLINE_S):
        async for line in process.stdout:
            text += line.decode()
            if "Ctrl-C" in text:
                return text
    raise AssertionError(text)


def run_name(tmp_path: Path) -> str:
    return next((tmp_path / f"headrace-{os.getuid()}").iterdir()).name


def gateway_pid(name: str) -> int:
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in processes_of(name)}
    return next(pid for pid, command in commands.items() if b"gateway" in command)


async def test_a_question_is_answered_twice_and_standard_output_is_one_json_object(tmp_path: Path) -> None:
    async with up(tmp_path, "--ask", "What is the capital of France?", "--json") as process:
        async with asyncio.timeout(START_DEADLINE_S):
            out, err = await process.communicate()

    assert process.returncode == 0, err.decode()
    report = json.loads(out)
    assert set(report) == {"ready_s", "requests"}
    assert len(report["requests"]) == 2
    for answer in report["requests"]:
        assert "Paris" in answer["text"]
        assert answer["finish_reason"] == "stop"
        assert answer["prompt_tokens"] > 0
        assert answer["completion_tokens"] > 0
        assert 0 < answer["ttft_ms"] <= answer["total_ms"]
        assert answer["endpoint"]
    for part in ("valkey", "triton-a", "triton-b", "llama-a", "gateway"):
        assert f"{part:<9} ready in" in err.decode()
    assert list((tmp_path / f"headrace-{os.getuid()}").iterdir()) == []


async def test_the_end_of_the_gateway_ends_everything_and_says_how_it_ended(tmp_path: Path) -> None:
    async with up(tmp_path) as process:
        advice = await until_it_serves(process)
        assert "curl -N http://127.0.0.1:" in advice
        name = run_name(tmp_path)
        os.kill(gateway_pid(name), signal.SIGKILL)
        async with asyncio.timeout(20):
            _, err = await process.communicate()

        assert process.returncode == 1
        assert "gateway was ended by SIGKILL; the end of its log" in err.decode()
        assert "Traceback" not in err.decode()
        assert await gone_within(1, name, [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
async def test_no_signal_to_the_command_leaves_a_process_behind(tmp_path: Path, number: signal.Signals) -> None:
    async with up(tmp_path) as process:
        await until_it_serves(process)
        name = run_name(tmp_path)
        process.send_signal(number)
        async with asyncio.timeout(20):
            await process.communicate()

        assert process.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 0)
        assert await gone_within(3, name, [])


async def test_a_signal_says_what_it_waits_for_and_lets_a_stream_end(tmp_path: Path) -> None:
    async with up(tmp_path) as process:
        url = re.search(r"http://127\.0\.0\.1:\d+/v1", await until_it_serves(process))
        assert url
        body = {"model": "smollm2-llama", "prompt": "Once upon a time", "max_tokens": 24, "stream": True}
        async with aiohttp.ClientSession() as http, http.post(f"{url[0]}/completions", json=body) as response:
            await response.content.readline()
            process.send_signal(signal.SIGINT)
            text = await response.text()
        async with asyncio.timeout(20):
            _, err = await process.communicate()

    assert process.returncode == 0
    assert text.endswith("data: [DONE]\n\n")
    assert "stopping: 1 request still running, up to 10 s; Ctrl-C again to cut them" in err.decode()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ask", ""], "--ask is empty"),
        (["--ask", "x", "--model", "nope"], "choose from smollm2, smollm2-triton, smollm2-llama"),
        (["--model", "smollm2"], "give both or none"),
        (["--json"], "give both or none"),
    ],
)
async def test_what_cannot_be_asked_is_refused_before_anything_starts(
    tmp_path: Path, options: list[str], said: str
) -> None:
    async with up(tmp_path, *options) as process:
        async with asyncio.timeout(20):
            out, err = await process.communicate()
    assert (process.returncode, out) == (2, b"")
    assert said in err.decode()
    assert err.decode().count("\n") == 1
    assert not (tmp_path / f"headrace-{os.getuid()}").exists()


async def test_a_port_in_use_is_one_sentence_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        async with up(tmp_path, "--llama-port", str(port)) as process:
            async with asyncio.timeout(20):
                out, err = await process.communicate()

    assert process.returncode == 2
    assert out == b""
    assert err.decode() == (
        f"headrace up: port {port} for the llama.cpp server is in use: end the program that listens there or choose "
        "another with --llama-port\n"
    )
