"""Compiles the relay's steady state when headrace is built or installed.

`gateway/relay/_steady.c` becomes an extension module, inside the wheel, or beside its source for an editable install.
It is one file without dependencies, so the compiler is called directly, the way this Python's own extensions are built.
Where there is no compiler, or no headers of Python, nothing fails: the wheel then fits every platform, and the relay
runs on `PureSteadyStream`.
"""

import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("gateway", "relay", "_steady.c")
OPTIONS = ("-std=c11", "-O2", "-Wall", "-Wextra", "-Wno-missing-field-initializers")
DEADLINE_S = 120.0


class NotCompiledError(Exception):
    """Why there is no extension module, in a few words."""


class CompiledRelay(BuildHookInterface):
    """Adds the extension module to what is built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        module = SOURCE.with_suffix(sysconfig.get_config_var("EXT_SUFFIX"))
        built = root / module
        if version != "editable":
            self._folder = tempfile.TemporaryDirectory()  # until the wheel has been written
            built = Path(self._folder.name) / module.name
        try:
            compile_module(root / SOURCE, built)
        except NotCompiledError as error:
            built.unlink(missing_ok=True)  # compiled from another source
            self.app.display_warning(f"The relay is not compiled and will be slower: {error}.")
            return
        if version != "editable":
            build_data["force_include"][str(built)] = str(module)
            build_data["pure_python"] = False
            build_data["infer_tag"] = True


def compile_module(source: Path, module: Path) -> None:
    """Compile `source` into the extension module `module`, which is exchanged at once. Raises NotCompiledError."""
    usual, *options = shlex.split(sysconfig.get_config_var("LDSHARED") or "cc -shared")
    compiler = os.environ.get("CC") or (usual if shutil.which(usual) else "cc")
    headers = {f"-I{sysconfig.get_path(name)}" for name in ("include", "platinclude")}
    unfinished = module.with_name(f".{module.name}.{os.getpid()}")
    command = [
        *shlex.split(compiler),
        *options,
        *OPTIONS,
        "-fPIC",
        *sorted(headers),
        str(source),
        "-o",
        str(unfinished),
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE_S)
        unfinished.replace(module)
    except FileNotFoundError:
        raise NotCompiledError(f"there is no C compiler ({compiler})") from None
    except subprocess.TimeoutExpired:
        raise NotCompiledError(f"the C compiler ({compiler}) took more than {DEADLINE_S:g} s") from None
    except (OSError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip()
        if "Python.h" in said:
            said = "Python's headers are missing (Debian: python3-dev)"
        raise NotCompiledError(said.splitlines()[0]) from None
    finally:
        unfinished.unlink(missing_ok=True)
