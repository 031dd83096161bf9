"""`headrace gateway` as a process: what an operator sees when an address is taken."""

import asyncio
import json
import os
import socket
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.local.ports import LOOPBACK, free_ports


@pytest.mark.parametrize(
    ("taken", "variable", "workers"),
    [
        ("http", "HEADRACE_HTTP", "1"),
        ("admin", "HEADRACE_ADMIN_LISTEN", "1"),
        ("http", "HEADRACE_HTTP", "2"),
        ("grpc", "HEADRACE_GRPC", "2"),
    ],
)
async def test_an_address_in_use_is_one_sentence_that_names_the_variable_to_change(
    tmp_path: Path, taken: str, variable: str, workers: str
) -> None:
    with socket.socket() as other:
        other.bind((LOOPBACK, 0))
        other.listen()
        addresses = {
            what: f"{LOOPBACK}:{port}" for what, port in zip(("http", "grpc", "admin"), free_ports(3), strict=True)
        }
        addresses[taken] = f"{LOOPBACK}:{other.getsockname()[1]}"
        file = tmp_path / "fleet.yaml"
        file.write_text(json.dumps({"fleet": "demo", "gateway": addresses}))
        gateway = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "headrace", "gateway", "--config", str(file), "--workers", workers),
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(30):
            _, stderr = await gateway.communicate()
    assert gateway.returncode == 1
    sentence = stderr.decode().splitlines()[-1]
    assert sentence.startswith(f"Cannot listen on {addresses[taken]} (gateway.{taken}): it is in use")
    assert sentence.endswith(f"Choose another address in the fleet file or with {variable}.")
    assert "Traceback" not in stderr.decode()


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_the_configuration_in_force_is_told_with_its_origins_and_without_secrets(
    tmp_path: Path, workers: str
) -> None:
    http, admin = (f"{LOOPBACK}:{port}" for port in free_ports(2))
    file = tmp_path / "fleet.yaml"
    fleet: dict[str, object] = {"fleet": "demo", "gateway": {"http": http, "drain": {"settle": "0s"}}}
    file.write_text(json.dumps(fleet))
    secret = "open-sesame"
    environment = {"HEADRACE_ADMIN_LISTEN": admin, "HEADRACE_ADMIN_TOKEN": secret, "HEADRACE_LOG_LEVEL": "warning"}
    gateway = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headrace", "gateway", "--config", str(file), "--workers", workers),
        env={**os.environ, **environment},
        stderr=asyncio.subprocess.DEVNULL,
    )

    async def told(*arguments: str) -> dict[str, tuple[object, str, str | None]]:
        command = ["config", "--json", *arguments]
        options = {"HEADRACE_ADMIN": f"http://{admin}", "HEADRACE_ADMIN_TOKEN": secret}
        result = await asyncio.to_thread(CliRunner().invoke, app, command, env=options)
        if result.exit_code:
            return {}
        assert secret not in result.stdout
        return {one["path"]: (one["value"], one["origin"], one["where"]) for one in json.loads(result.stdout)}

    async def until_told(path: str, *expected: object) -> None:
        async with asyncio.timeout(30):
            while (await told(path)).get(path) != expected:  # noqa: ASYNC110 - what the command says is no event
                await asyncio.sleep(0.05)

    try:
        await until_told("gateway.http", http, "file", str(file))
        settings = await told()
        assert settings["gateway.admin"] == (admin, "environment", "HEADRACE_ADMIN_LISTEN")
        assert settings["gateway.drain.grace"] == ("300s", "default", None)
        assert settings["admin_token"] == ("***", "environment", "HEADRACE_ADMIN_TOKEN")
        assert settings["log_level"] == ("warning", "environment", "HEADRACE_LOG_LEVEL")
        assert settings["log_format"] == ("text", "default", None)
        assert settings["config"] == (str(file), "flag", "--config")
        assert settings["workers"] == (int(workers), "flag", "--workers")
        if workers == "1":  # what is in `gateway` stays until a restart, and so does where it comes from
            file.write_text(json.dumps({"fleet": "demo", "gateway": {"http": http}}))
            options = {"HEADRACE_ADMIN": f"http://{admin}", "HEADRACE_ADMIN_TOKEN": secret}
            assert (await asyncio.to_thread(CliRunner().invoke, app, ["reload"], env=options)).exit_code == 0
            assert (await told("gateway.drain"))["gateway.drain.settle"] == ("0s", "file", str(file))
    finally:
        gateway.terminate()
        async with asyncio.timeout(30):
            await gateway.wait()
