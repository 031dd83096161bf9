"""What the image holds, installed into a plain folder: the gateway of the chart, with its arguments, its environment
and its mounted files, as the first process of a container."""

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.local.ports import LOOPBACK, free_ports
from tests.harness import EngineConnection, ScriptedEngine
from tests.helm import ROOT, Helm

KEY = "open-sesame"
KEY_SHA256 = hashlib.sha256(KEY.encode()).hexdigest()
NEW_PROCESS_IDS = ["unshare", "--pid", "--fork", "--kill-child"]


def can_be_first() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*NEW_PROCESS_IDS, "true"], capture_output=True, check=False, timeout=10).returncode == 0


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in the place of /opt/headrace."""
    folder = tmp_path_factory.mktemp("image")
    for command in (
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--ignore-installed"],
    ):
        if "pip" in command:
            (wheel,) = folder.glob("*.whl")
            command += ["--disable-pip-version-check", "--prefix", str(folder), str(wheel)]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    return folder


def packages(installed: Path) -> Path:
    (folder,) = installed.glob("lib/python*/site-packages")
    return folder


@pytest.fixture(scope="module")
def helm() -> Iterator[Helm]:
    with Helm() as helm:
        yield helm


@dataclass
class Container:
    """A gateway as the chart runs it."""

    process: asyncio.subprocess.Process
    pid: int
    """In our own namespace."""
    http_port: int

    async def line(self) -> str:
        """The next one of its log."""
        assert self.process.stderr is not None
        return (await self.process.stderr.readline()).decode()

    async def exit_code(self) -> int:
        async with asyncio.timeout(30):
            await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode


def _first_child(pid: int) -> int | None:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else None


def mount(folder: Path, files: dict[str, str]) -> None:
    """As the kubelet does with a volume: links to a folder that is exchanged."""
    (folder / "..data").mkdir()
    for name, text in files.items():
        (folder / "..data" / name).write_text(text)
        (folder / name).symlink_to(Path("..data") / name)


@asynccontextmanager
async def container(installed: Path, helm: Helm, mounted: Path, engine_port: int) -> AsyncIterator[Container]:
    """The chart's gateway in front of an engine at `engine_port`."""
    endpoint = {"id": "e", "http": f"http://{LOOPBACK}:{engine_port}"}
    fleet = {
        "pools": {"p": {"protocol": "openai", "model": "m", "endpoints": [endpoint]}},
        "routes": {"r": {"pool": "p"}},
        "gateway": {"drain": {"settle": "0s"}},
    }
    documents = helm.documents({"fleet": fleet, "tenantsSecret": "tenants", "redis": {"bundled": False}})
    (data,) = [one["data"] for one in documents if one["kind"] == "ConfigMap"]
    (spec,) = [one["spec"]["template"]["spec"] for one in documents if one["kind"] == "Deployment"]
    (gateway,) = spec["containers"]
    tenants = {"tenants": {"t": {"keys": [{"sha256": KEY_SHA256}]}}}
    mount(mounted, {**data, "tenants.yaml": yaml.safe_dump(tenants)})
    http, grpc, admin = free_ports(3)
    ports = {":8000": http, ":8001": grpc, ":9090": admin}
    variables = {
        one["name"]: f"{LOOPBACK}:{ports[one['value']]}" if one["value"] in ports else one["value"]
        for one in gateway["env"]
    }
    arguments = [str(mounted) if argument == "/etc/headrace/fleet" else argument for argument in gateway["args"]]
    process = await asyncio.create_subprocess_exec(
        *(*NEW_PROCESS_IDS, str(installed / "bin" / "headrace"), *arguments),
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(packages(installed)), **variables},
        cwd="/",
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(10):
            while not (found := _first_child(process.pid)):  # noqa: ASYNC110 - a fork is no event
                await asyncio.sleep(0.01)
        yield Container(process, found, http)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


pytestmark = pytest.mark.skipif(
    not can_be_first(),
    reason="needs to make a process namespace (unshare), for which root or user namespaces are needed",
)


async def test_the_charts_gateway_serves_from_its_mounted_files_and_drains_when_it_is_told_to_stop(
    installed: Path, helm: Helm, tmp_path: Path
) -> None:
    go_on = asyncio.Event()

    async def script(connection: EngineConnection) -> None:
        await connection.events(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n')
        await go_on.wait()
        await connection.chunk(b"data: [DONE]\n\n")
        await connection.end()

    body = json.dumps({"model": "r", "stream": True, "messages": [{"role": "user", "content": "hi"}]})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\nx-api-key: {KEY}\r\ncontent-length: {len(body)}\r\n\r\n"
    async with ScriptedEngine(script) as engine, container(installed, helm, tmp_path, engine.port) as gateway:
        async with asyncio.timeout(30):
            status = b""
            while b"200" not in status:  # until it listens, and has found its engine
                await asyncio.sleep(0.05)
                with contextlib.suppress(OSError):
                    reader, writer = await asyncio.open_connection(LOOPBACK, gateway.http_port)
                    writer.write(head.encode() + body.encode())
                    status = await reader.readline()
                    assert b"401" not in status
            assert b'"content":"a"' in await reader.readuntil(b"}]}")
            os.kill(gateway.pid, signal.SIGTERM)
            while "stopping" not in await gateway.line():
                pass
            go_on.set()
            rest = await reader.read()
            assert b"data: [DONE]" in rest
            writer.close()
        assert await gateway.exit_code() == 0


async def test_a_gateway_that_is_told_to_stop_before_it_serves_ends(
    installed: Path, helm: Helm, tmp_path: Path
) -> None:
    async with container(installed, helm, tmp_path, free_ports(1)[0]) as gateway:
        async with asyncio.timeout(30):
            assert "fleet headrace" in await gateway.line()
            os.kill(gateway.pid, signal.SIGTERM)
        assert await gateway.exit_code() in (0, 128 + signal.SIGTERM)


def test_what_is_installed_is_the_wheel_and_nothing_of_this_folder(installed: Path) -> None:
    site = packages(installed)
    asked = "import headrace, gateway, router, k8s; print(*{m.__file__ for m in (headrace, gateway, router, k8s)})"
    command, environment = [sys.executable, "-c", asked], {"PYTHONPATH": str(site)}
    done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=30, check=True)
    found: list[Any] = done.stdout.split()
    assert len(found) == 4
    assert all(Path(path).is_relative_to(site) for path in found)
