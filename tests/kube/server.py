"""A real API server over a real etcd, on loopback ports of their own, to kill and bring back at will.

There are no controllers and there is no kubelet: what those would do is the tests' own doing (`tests.kube.cluster`).
Who may do what is decided as in any cluster, by RBAC, and tokens of service accounts are the server's own.
"""

import asyncio
import subprocess
from pathlib import Path

import aiohttp

from headrace.local.ports import LOOPBACK, free_ports
from tests.certificates import Made, make
from tests.discoveries import write_kubeconfig

ADMIN_TOKEN = "of-the-tests-alone"
_READY_S = 60.0


class KubeApiServer:
    """Started on entering its context, killed on leaving it; `binaries` is the folder that `build.sh` tells."""

    def __init__(self, binaries: Path, directory: Path) -> None:
        self.port, self._etcd_port, peer_port = free_ports(3)
        self._directory = directory
        self.certificate: Made = make(directory, "apiserver", "rsa")
        tokens = directory / "tokens.csv"
        tokens.write_text(f"{ADMIN_TOKEN},admin,admin,system:masters\n")
        etcd, key = f"http://{LOOPBACK}:{self._etcd_port}", str(self.certificate.key)
        self._etcd_command = [
            str(binaries / "etcd"), "--data-dir", str(directory / "etcd"), "--log-level", "error", "--logger", "zap",
            "--listen-client-urls", etcd, "--advertise-client-urls", etcd,
            "--listen-peer-urls", f"http://{LOOPBACK}:{peer_port}",
        ]  # fmt: skip
        self._command = [
            str(binaries / "kube-apiserver"), "--etcd-servers", etcd, "--bind-address", LOOPBACK,
            "--advertise-address", LOOPBACK, "--endpoint-reconciler-type", "none", "--secure-port", str(self.port),
            "--tls-cert-file", str(self.certificate.cert), "--tls-private-key-file", key,
            "--token-auth-file", str(tokens), "--authorization-mode", "RBAC",
            "--service-account-issuer", "https://kubernetes.default.svc", "--service-account-signing-key-file", key,
            "--service-account-key-file", key, "--api-audiences", "https://kubernetes.default.svc",
            "--service-cluster-ip-range", "10.96.0.0/16",
        ]  # fmt: skip
        self._etcd: subprocess.Popen[bytes] | None = None
        self._server: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> "KubeApiServer":
        try:
            self._etcd = self._start("etcd", self._etcd_command)
            await self.start()
        except BaseException:
            self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._end()

    async def start(self) -> None:
        """Start the API server; what etcd has is there again."""
        self._server = self._start("kube-apiserver", self._command)
        context = self.certificate.client()
        async with asyncio.timeout(_READY_S), aiohttp.ClientSession() as client:
            while True:
                if self._server.poll() is not None:
                    raise RuntimeError(f"kube-apiserver has ended; {self._directory / 'kube-apiserver.log'} has why")
                try:
                    async with client.get(f"https://{LOOPBACK}:{self.port}/readyz", ssl=context) as answer:
                        if answer.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.1)

    def kill(self) -> None:
        """`kill -9` the API server; returns when it is gone."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None

    async def forget(self) -> None:
        """Have etcd forget the past. The server's own memory of it ends with its process."""
        etcd = f"http://{LOOPBACK}:{self._etcd_port}/v3/kv"
        async with asyncio.timeout(10), aiohttp.ClientSession(raise_for_status=True) as client:
            async with client.post(f"{etcd}/range", json={"key": "AA=="}) as answer:
                revision = (await answer.json(content_type=None))["header"]["revision"]
            async with client.post(f"{etcd}/compaction", json={"revision": revision, "physical": True}):
                pass

    def kubeconfig(self, file: Path, namespace: str, *, token: str = ADMIN_TOKEN, port: int | None = None) -> Path:
        """One for `namespace`: with another's token, or the administrator's; through another port, or its own."""
        server = f"https://{LOOPBACK}:{port or self.port}"
        return write_kubeconfig(file, server, namespace, token=token, authority=self.certificate.cert)

    def _start(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        with (self._directory / f"{name}.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, cwd=self._directory)

    def _end(self) -> None:
        self.kill()
        if self._etcd is not None:
            self._etcd.kill()
            self._etcd.wait()


class Cable:
    """Between a client and a server's `port`: a port that can be cut and pulled out."""

    def __init__(self, port: int) -> None:
        self._to = port
        (self.port,) = free_ports(1)
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> "Cable":
        await self.plug()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.pull()

    async def plug(self) -> None:
        """New connections get through."""
        self._server = await asyncio.start_server(self._join, LOOPBACK, self.port)

    def pull(self) -> None:
        """Nothing gets through any more, and what was open is broken."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.cut()

    def cut(self) -> None:
        """Break what is open, in the middle of whatever it says."""
        for writer in self._open:
            writer.transport.abort()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(LOOPBACK, self._to)
        except OSError:
            writer.transport.abort()
            return
        self._open |= {writer, back}
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_carry(reader, back))
                both.create_task(_carry(there, writer))
        finally:
            self._open -= {writer, back}
            writer.transport.abort()
            back.transport.abort()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until either side ends; a broken connection is an end like others."""
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.transport.abort()
