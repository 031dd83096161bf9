"""`headrace gateway` as a process: what an operator sees when an address is taken."""

import asyncio
import socket
import sys
from pathlib import Path

import pytest

from headrace.local.ports import LOOPBACK, free_ports


@pytest.mark.parametrize(("taken", "variable"), [("http", "HEADRACE_HTTP"), ("admin", "HEADRACE_ADMIN_LISTEN")])
async def test_an_address_in_use_is_one_sentence_that_names_the_variable_to_change(
    tmp_path: Path, taken: str, variable: str
) -> None:
    with socket.socket() as other:
        other.bind((LOOPBACK, 0))
        other.listen()
        (free,) = free_ports(1)
        addresses = {"http": f"{LOOPBACK}:{free}", "admin": f"{LOOPBACK}:{free}"}
        addresses[taken] = f"{LOOPBACK}:{other.getsockname()[1]}"
        file = tmp_path / "fleet.yaml"
        file.write_text(f"fleet: demo\ngateway: {{http: '{addresses['http']}', admin: '{addresses['admin']}'}}\n")
        gateway = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "headrace", "gateway", "--config", str(file)), stderr=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(30):
            _, stderr = await gateway.communicate()
    assert gateway.returncode == 1
    sentence = stderr.decode().splitlines()[-1]
    assert sentence.startswith(f"Cannot listen on {addresses[taken]} (gateway.{taken}): it is in use")
    assert sentence.endswith(f"Choose another address in the fleet file or with {variable}.")
    assert "Traceback" not in stderr.decode()
