"""A real Triton server that serves the scripted models of `tests/triton_models`, on loopback.

Models are loaded explicitly, so that a test can unload and load one again, and the server can be killed and started
anew on the same ports.
"""

import asyncio
import contextlib
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp

from headrace.local.ports import LOOPBACK, free_ports
from headrace.local.run_dir import RunDir
from headrace.local.tether import tethered
from headrace.local.wheels import Wheels, find_wheels, python_libraries

MODELS = Path(__file__).parent.parent / "triton_models"
START_TIMEOUT_S = 60


class TritonModels:
    """The server; `start` and `kill` may be called in turn."""

    def __init__(self, wheels: Wheels, run: RunDir, models: tuple[str, ...]) -> None:
        self.models = models
        self._wheels = wheels
        self._log = run.logs / "triton-models.log"
        self._prefix = run.shared_memory_prefix("models")
        self._http, self._grpc, self._metrics = free_ports(3)
        self._process: asyncio.subprocess.Process | None = None
        self._repository = run.path / "models"
        for model in models:
            (self._repository / model / "1").mkdir(parents=True)
            shutil.copyfile(MODELS / model / "config.pbtxt", self._repository / model / "config.pbtxt")
            shutil.copyfile(MODELS / "scripted.py", self._repository / model / "1" / "model.py")
        backend = run.path / "backends" / "python"
        shutil.copytree(wheels.triton_backend, backend)
        shutil.copyfile(wheels.triton_stub, backend / wheels.triton_stub.name)
        (backend / wheels.triton_stub.name).chmod(0o755)
        self._backends = backend.parent

    @property
    def grpc(self) -> str:
        return f"{LOOPBACK}:{self._grpc}"

    @property
    def metrics(self) -> str:
        return f"http://{LOOPBACK}:{self._metrics}/metrics"

    async def start(self) -> None:
        """Start the server and wait until it is ready."""
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                str(self._wheels.triton),
                f"--model-repository={self._repository}",
                f"--backend-directory={self._backends}",
                "--model-control-mode=explicit",
                *(f"--load-model={model}" for model in self.models),
                *(f"--{api}-address={LOOPBACK}" for api in ("http", "grpc", "metrics")),
                *(f"--http-port={self._http}", f"--grpc-port={self._grpc}", f"--metrics-port={self._metrics}"),
                "--allow-gpu-metrics=false",
                "--disable-auto-complete-config",
                "--exit-timeout-secs=3",
                f"--backend-config=python,shm-region-prefix-name={self._prefix}",
                "--backend-config=python,shm-default-byte-size=1048576",
                env={
                    **os.environ,
                    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
                    "LD_LIBRARY_PATH": os.pathsep.join([str(self._wheels.triton_libraries), python_libraries()]),
                },
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=tethered(),
            )
        async with asyncio.timeout(START_TIMEOUT_S):
            while not await self._ready():
                self.require_alive()
                await asyncio.sleep(0.1)

    def require_alive(self) -> None:
        """Raise, with the end of its log, if the server has ended by itself."""
        if self._process is not None and self._process.returncode is not None:
            log = self._log.read_text(errors="replace")[-4000:]
            raise RuntimeError(f"Triton ended with {self._process.returncode}:\n{log}")

    async def kill(self) -> None:
        """`kill -9` of the server and its models' processes."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, 9)
            await self._process.wait()
            self._process = None

    async def cancelled(self, model: str) -> int:
        """Cancellations that `model` has counted."""
        async with aiohttp.ClientSession() as session, session.get(self.metrics) as response:
            page = await response.text()
        found = re.search(rf'^scripted_cancelled_total\{{model="{model}"\}} (\S+)', page, re.MULTILINE)
        return int(float(found[1])) if found else 0

    async def _ready(self) -> bool:
        url = f"http://{LOOPBACK}:{self._http}/v2/health/ready"
        try:
            async with aiohttp.ClientSession() as session, session.get(url) as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False


@contextlib.asynccontextmanager
async def triton_models(*models: str) -> AsyncIterator[TritonModels]:
    """A started server with these models of `tests/triton_models`; nothing of it is left afterwards."""
    with RunDir() as run:
        server = TritonModels(find_wheels(), run, models)
        try:
            await server.start()
            yield server
            server.require_alive()
        finally:
            await server.kill()
