"""`kubectl headrace`: a real kubectl and a real admin API, on both sides of a fake API server."""

import asyncio
import json
import os
import shutil
import sys
import tomllib
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from tests.cluster_proxy import NAMESPACE, FakeCluster
from tests.contract.admin_gateway import Gateway, call, serving
from tests.valkey import ValkeyProcess, servers_here

KUBECTL = shutil.which("kubectl")
needs_kubectl = pytest.mark.skipif(KUBECTL is None, reason="no kubectl on the PATH")
TOKEN = "open sesame"
ROOT = Path(__file__).parents[2]


@dataclass
class Ran:
    code: int
    stdout: str
    stderr: str


COMMAND = (sys.executable, "-m", "headrace.cli.kubectl")


async def plugin(
    home: Path,
    *arguments: str,
    token: str = TOKEN,
    path: str = os.environ["PATH"],
    command: Sequence[str] = COMMAND,
) -> Ran:
    """What the plugin says that is run with a kubeconfig at `home`."""
    environment = {
        "HOME": str(home), "KUBECONFIG": str(home / "config"), "TMPDIR": str(home), "PATH": path,
        "HEADRACE_ADMIN_TOKEN": token, "PYTHONPATH": str(ROOT), "NO_PROXY": "*",
    }  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        *command, *arguments, env=environment, stdin=DEVNULL, stdout=PIPE, stderr=PIPE
    )
    async with asyncio.timeout(60):
        stdout, stderr = await process.communicate()
    assert process.returncode is not None
    return Ran(process.returncode, stdout.decode(), stderr.decode())


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with FakeCluster() as cluster:
        (tmp_path / "config").write_text(cluster.kubeconfig())
        yield cluster


@pytest_asyncio.fixture
async def gateway(tmp_path: Path, cluster: FakeCluster) -> AsyncIterator[Gateway]:
    (folder := tmp_path / "valkey").mkdir()
    async with ValkeyProcess(servers_here()[0], folder) as valkey, serving(valkey.url, TOKEN) as gateway:
        cluster.put_service("headrace-admin", gateway.url)
        cluster.put_gateway("headrace-1", ready=True)
        cluster.put_gateway("headrace-2", ready=False)
        yield gateway


@needs_kubectl
async def test_a_fleet_is_shown_and_drained_through_the_api_server(
    tmp_path: Path, cluster: FakeCluster, gateway: Gateway
) -> None:
    def drains() -> bool:
        return gateway.fleet.endpoints["pool/pod"].spec.drain

    ran = await plugin(tmp_path, "status")
    assert (ran.code, ran.stderr) == (0, "")
    assert "llm/headrace-admin: 1 of 2 gateways are ready.\nOne of them says: not ready\nreason: No route" in ran.stdout
    assert ran.stdout.splitlines()[-1].split() == ["p", "starting", "1", "0"]

    shown = json.loads((await plugin(tmp_path, "status", "-n", NAMESPACE, "--json")).stdout)
    assert shown["gateways"] == {"headrace-1": True, "headrace-2": False}
    assert shown["readiness"]["status"] == "not_ready"
    assert shown["endpoints"] == [{"pool": "p", "phase": "starting", "endpoints": 1, "in_flight": 0}]

    new = {"id": "pool/pod", "pool": "p", "http": "http://127.0.0.1:9"}
    assert (await call(gateway, "POST", "/admin/v1/endpoints", new, **{"x-headrace-admin-token": TOKEN}))[0] < 300
    ran = await plugin(tmp_path, "drain", "pool/pod", "--context", "here")
    assert (ran.code, ran.stderr) == (0, "")
    assert "Endpoint pool/pod drains" in ran.stdout
    assert drains()
    rows = json.loads((await plugin(tmp_path, "endpoints", "--json")).stdout)
    assert {row["id"]: row["drain"] for row in rows} == {"a": None, "pool/pod": "drained"}
    assert (await plugin(tmp_path, "undrain", "pool/pod")).code == 0
    assert not drains()
    assert not [name for name in os.listdir(tmp_path) if name.startswith("headrace-")], "no socket is left"  # noqa: PTH208


@needs_kubectl
async def test_kubectl_finds_the_plugin_and_an_admin_port_with_a_certificate_is_asked_by_https(
    tmp_path: Path, cluster: FakeCluster, gateway: Gateway
) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    (name,) = [name for name, target in scripts.items() if target == "headrace.cli.kubectl:main"]
    (script := tmp_path / name).write_text(f'#!/bin/sh\nexec {" ".join(COMMAND)} "$@"\n')
    script.chmod(0o755)
    cluster.put_service("secure-admin", gateway.url, tls=True)
    path = f"{tmp_path}:{os.environ['PATH']}"
    arguments = ["routes", "--service", "secure-admin", "-n", NAMESPACE]
    ran = await plugin(tmp_path, *arguments, path=path, command=["kubectl", "headrace"])
    assert (ran.code, ran.stderr) == (0, "")
    assert "p=1" in ran.stdout


@needs_kubectl
async def test_what_cannot_be_done_is_said_in_a_sentence(
    tmp_path: Path, cluster: FakeCluster, gateway: Gateway
) -> None:
    async def fails(*arguments: str, token: str = TOKEN) -> str:
        ran = await plugin(tmp_path, *arguments, token=token)
        assert ran.code == 1
        assert "Traceback" not in ran.stderr
        return ran.stderr

    cluster.put_service("other-admin")
    several, nobody_ready, unknown = await asyncio.gather(
        fails("routes"), fails("routes", "--service", "other-admin"), fails("routes", "--service", "nobody")
    )
    assert "several fleets in the namespace of the context: say --service with one of headrace-admin, " in several
    assert "no endpoints available" in nobody_ready
    assert "a gateway must be ready" in nobody_ready
    assert "kubectl cannot get the Service nobody" in unknown
    cluster.delete("services", "other-admin", NAMESPACE)

    none, no_token, wrong_token, no_endpoint, away, no_config = await asyncio.gather(
        fails("status", "-n", "empty"),
        fails("routes", token=""),
        fails("routes", token="wrong"),
        fails("drain", "nobody"),
        fails("status", "--context", "away"),
        fails("status", "--kubeconfig", str(tmp_path / "none")),
    )
    assert "no Service of headrace's chart in namespace empty" in none
    assert no_token.endswith("--admin-token or HEADRACE_ADMIN_TOKEN.\n")
    assert "not the one this gateway was started with" in wrong_token
    assert "no endpoint 'nobody'" in no_endpoint
    assert "refused" in away
    assert "kubectl cannot get Services in the namespace of the context, and says above why: check" in no_config


@needs_kubectl
async def test_a_right_that_is_missing_is_named(tmp_path: Path, cluster: FakeCluster, gateway: Gateway) -> None:
    with cluster.refusing("services/proxy create"):
        looks, drains = await asyncio.gather(plugin(tmp_path, "endpoints"), plugin(tmp_path, "drain", "a"))
    assert (looks.code, drains.code) == (0, 1)
    assert 'cannot create resource "services/proxy"' in drains.stderr
    assert "verbs get, to look, and create, to drain" in drains.stderr
    with cluster.refusing("services"):
        ran = await plugin(tmp_path, "status")
    assert ran.code == 1
    assert "services is forbidden" in ran.stderr
    assert not gateway.fleet.endpoints["a"].spec.drain


async def test_an_address_needs_neither_a_cluster_nor_kubectl(tmp_path: Path) -> None:
    async with serving(None, TOKEN) as gateway:
        ran = await plugin(tmp_path, "status", "--address", gateway.url, path="/nowhere")
        assert (ran.code, ran.stderr) == (0, "")
        assert ran.stdout.startswith("The gateway says: not ready\n")
    ran = await plugin(tmp_path, "status", path="/nowhere")
    assert (ran.code, ran.stdout) == (1, "")
    assert ran.stderr.startswith("kubectl is not on the PATH")
    ran = await plugin(tmp_path, "status", "--address", "http://127.0.0.1:1", "--service", "x")
    assert (ran.code, ran.stderr.count("\n")) == (1, 1)
