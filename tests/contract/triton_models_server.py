"""A real Triton server that serves the scripted models of `tests/triton_models`, on loopback.

Models are loaded explicitly, so that a test can unload and load one again, and the server can be killed and started
anew on the same ports.
"""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import warnings
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import psutil

from headrace.local.parts import TritonPorts, triton_command, triton_env
from headrace.local.ports import LOOPBACK, free_ports
from headrace.local.run_dir import RunDir
from headrace.local.tether import tethered
from headrace.local.wheels import Wheels, find_wheels

MODELS = Path(__file__).parent.parent / "triton_models"
START_TIMEOUT_S = 60


class TritonModels:
    """The server; `start` and `kill` may be called in turn."""

    def __init__(self, wheels: Wheels, run: RunDir, models: tuple[str, ...], options: tuple[str, ...] = ()) -> None:
        self._wheels = wheels
        self._log = run.logs / "triton-models.log"
        self._ports = TritonPorts(*free_ports(3))
        self._process: asyncio.subprocess.Process | None = None
        repository = run.path / "models"
        for model in models:
            (repository / model / "1").mkdir(parents=True)
            shutil.copyfile(MODELS / model / "config.pbtxt", repository / model / "config.pbtxt")
            own = MODELS / model / "model.py"
            shared = MODELS / ("tokens.py" if model.startswith("raw") else "scripted.py")
            code = own if own.exists() else shared
            shutil.copyfile(code, repository / model / "1" / "model.py")
            shutil.copyfile(MODELS / "phases.py", repository / model / "1" / "phases.py")
        self._command = (
            *triton_command(wheels, repository, self._ports, run.shared_memory_prefix("models")),
            "--model-control-mode=explicit",
            *(f"--load-model={model}" for model in models),
            *options,
        )

    @property
    def grpc(self) -> str:
        return f"{LOOPBACK}:{self._ports.grpc}"

    @property
    def http(self) -> str:
        return f"http://{LOOPBACK}:{self._ports.http}"

    @property
    def pid(self) -> int:
        """Of the running server."""
        assert self._process is not None
        return self._process.pid

    def kill_model(self, model: str) -> None:
        """`kill -9` of the process that runs a Python-backend model."""
        children = psutil.Process(self.pid).children(recursive=True)
        living = (child for child in children if child.status() != psutil.STATUS_ZOMBIE)
        (process,) = (child for child in living if any(f"/{model}/" in argument for argument in child.cmdline()))
        process.kill()

    @property
    def metrics(self) -> str:
        return f"http://{LOOPBACK}:{self._ports.metrics}/metrics"

    async def start(self, *, again: bool = True) -> None:
        """Start the server and wait until it is ready; once `again`, with a warning, if it crashes before that, as
        Triton 2.51 was seen to do beside clients that came back to it."""
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                env=triton_env(self._wheels),
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=tethered(),
            )
        async with asyncio.timeout(START_TIMEOUT_S):
            while not await self._ready():
                if self._process.returncode == -signal.SIGSEGV and again:
                    warnings.warn("Triton crashed while it started and is started again", stacklevel=2)
                    await self.start(again=False)
                    return
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

    async def reload(self, model: str) -> None:
        """Unload and load a model, which is how one comes back whose process has died."""
        async with aiohttp.ClientSession() as session:
            for action in ("unload", "load"):
                async with session.post(f"{self.http}/v2/repository/models/{model}/{action}") as response:
                    assert response.status == 200, await response.text()

    async def cancelled(self, model: str) -> int:
        """Cancellations that `model` has counted."""
        return await self.metric("scripted_cancelled_total", model)

    async def stopped(self, model: str) -> int:
        """Running requests that `model` was told to stop by their id."""
        return await self.metric("scripted_stopped_total", model)

    async def in_phase(self, model: str, phase: str) -> int:
        """Requests of `model` that are `queued`, in `prefill` or in `decode`."""
        return await self.metric("scripted_requests", model, phase=phase)

    async def metric(self, name: str, model: str, **labels: str) -> int:
        """A metric of a model's, 0 if there is none yet."""
        async with aiohttp.ClientSession() as session, session.get(self.metrics) as response:
            page = await response.text()
        asked = {("model", model), *labels.items()}
        for found in re.finditer(rf"^{name}\{{(.*)\}} (\S+)$", page, re.MULTILINE):
            if asked <= set(re.findall(r'(\w+)="(.*?)"', found[1])):
                return int(float(found[2]))
        return 0

    async def _ready(self) -> bool:
        url = f"{self.http}/v2/health/ready"
        try:
            async with aiohttp.ClientSession() as session, session.get(url) as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False


@contextlib.asynccontextmanager
async def triton_models(*models: str, options: tuple[str, ...] = ()) -> AsyncIterator[TritonModels]:
    """A started server with these models of `tests/triton_models`; nothing of it is left afterwards. `options` are for
    the server's command line."""
    with RunDir() as run:
        server = TritonModels(find_wheels(), run, models, options)
        try:
            await server.start()
            yield server
            server.require_alive()
        finally:
            await server.kill()
