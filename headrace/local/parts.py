"""The parts of the embedded fleet and how each is started: Valkey, Triton, llama.cpp's server, the gateway.

Everything listens on loopback. Ports are fixed before anything starts, so that a restarted part comes back where the
gateway expects it.
"""

import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import headrace
from headrace.local.ensemble_signature import MODEL, VERSION, render_config
from headrace.local.part import Part
from headrace.local.ports import LOOPBACK
from headrace.local.probe import http_probe, redis_probe
from headrace.local.run_dir import RunDir
from headrace.local.wheels import Wheels, python_libraries

GATEWAY_STOP_S: Final = 10.0
"""How long requests may go on after Ctrl-C: this is a place to try things, not one to wait for streams of minutes."""

PACKAGE_ROOT = Path(headrace.__file__).parent.parent
"""Where `headrace` is imported from, for children that run in another folder."""


@dataclass(frozen=True, slots=True)
class TritonPorts:
    http: int
    grpc: int
    metrics: int


def valkey_part(server: Path, run: RunDir, port: int) -> Part:
    """Valkey without persistence: the fleet documents it holds can be rebuilt from the file."""
    return Part(
        name="valkey",
        command=(
            *(str(server), "--bind", LOOPBACK, "--port", str(port), "--dir", str(run.path)),
            *("--save", "", "--appendonly", "no"),
        ),
        env=os.environ,
        log=run.logs / "valkey.log",
        ready=redis_probe(port),
        address=f"redis://{LOOPBACK}:{port}",
    )


def llama_part(wheels: Wheels, run: RunDir, port: int) -> Part:
    """llama.cpp's OpenAI server in a process of its own."""
    return Part(
        name="llama-a",
        command=(
            *(sys.executable, "-m", "headrace.local.llama_server"),
            *("--weights", str(wheels.weights), "--host", LOOPBACK, "--port", str(port)),
        ),
        env=_python_env(),
        log=run.logs / "llama-a.log",
        ready=http_probe(port, "/health"),
        address=f"http://{LOOPBACK}:{port}",
    )


def gateway_part(run: RunDir, fleet_file: Path, *, http_port: int, admin_port: int) -> Part:
    """The gateway; without it nothing here has a purpose, so its end ends the run."""
    return Part(
        name="gateway",
        command=(sys.executable, "-m", "headrace", "gateway", "--config", str(fleet_file)),
        env=_python_env(),
        log=run.logs / "gateway.log",
        ready=http_probe(admin_port, "/readyz"),
        address=f"http://{LOOPBACK}:{http_port}",
        vital=True,
        stop_s=GATEWAY_STOP_S,
    )


def triton_part(wheels: Wheels, run: RunDir, name: str, ports: TritonPorts) -> Part:
    """A Triton server with the `ensemble` model; writes its model repository into the run folder."""
    folder = run.path / name
    pid_file = folder / "stub.pid"
    model = folder / "models" / MODEL
    (model / VERSION).mkdir(parents=True)
    (model / "config.pbtxt").write_text(render_config(weights=wheels.weights, pid_file=pid_file))
    (model / VERSION / "model.py").write_text(
        f"import sys\n\nsys.path.append({str(PACKAGE_ROOT)!r})\n"
        "from headrace.local.ensemble_model import TritonPythonModel as TritonPythonModel\n"
    )
    return Part(
        name=name,
        command=triton_command(wheels, model.parent, ports, run.shared_memory_prefix(name)),
        env=triton_env(wheels),
        log=run.logs / f"{name}.log",
        ready=http_probe(ports.http, f"/v2/models/{MODEL}/ready"),
        address=f"grpc://{LOOPBACK}:{ports.grpc}",
        helper_pid=pid_file,
    )


def triton_command(wheels: Wheels, repository: Path, ports: TritonPorts, shared_memory_prefix: str) -> tuple[str, ...]:
    """A Triton server for the models in `repository`; lays out the Python backend beside it."""
    backend = repository.parent / "backends" / "python"
    shutil.copytree(wheels.triton_backend, backend)
    stub = backend / wheels.triton_stub.name  # Triton looks for the stub beside the backend's library only
    shutil.copyfile(wheels.triton_stub, stub)
    stub.chmod(0o755)
    return (
        str(wheels.triton),
        f"--model-repository={repository}",
        f"--backend-directory={backend.parent}",
        *(f"--{api}-address={LOOPBACK}" for api in ("http", "grpc", "metrics")),
        *(f"--http-port={ports.http}", f"--grpc-port={ports.grpc}", f"--metrics-port={ports.metrics}"),
        "--allow-gpu-metrics=false",
        "--disable-auto-complete-config",
        "--exit-timeout-secs=3",
        f"--backend-config=python,shm-region-prefix-name={shared_memory_prefix}",
        "--backend-config=python,shm-default-byte-size=1048576",
    )


def _python_env() -> dict[str, str]:
    """Children import the same `headrace` as this process, also when it runs from a source tree elsewhere."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if str(PACKAGE_ROOT) != sysconfig.get_path("purelib"):
        env["PYTHONPATH"] = os.pathsep.join([str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return env


def triton_env(wheels: Wheels) -> dict[str, str]:
    """The stub runs the `python3` it finds first: it must be the one that has the wheels."""
    libraries = [str(wheels.triton_libraries), python_libraries(), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "LD_LIBRARY_PATH": os.pathsep.join(libraries),
        "PYTHONUNBUFFERED": "1",
    }
