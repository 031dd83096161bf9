"""`headrace gateway` as a process: what an operator sees when an address is taken."""

import asyncio
import json
import socket
import sys
from pathlib import Path

import pytest

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
