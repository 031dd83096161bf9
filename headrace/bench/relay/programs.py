"""The bench's two programs in C, compiled for the run: only so are engine and load cheaper than what they measure."""

import asyncio
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace.bench.figures import BenchError
from headrace.bench.processes import output_of
from headrace.local.run_dir import RunDir

_COMPILE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Programs:
    """Where the compiled programs are."""

    engine: Path
    load: Path


def find_compiler() -> str | None:
    """The C compiler: `CC` of the environment, else `cc`."""
    return shutil.which(os.environ.get("CC", "cc"))


async def compile_programs(run: RunDir) -> Programs:
    """Compile both into the run's folder.

    Raises:
        BenchError: there is no C compiler, or it refuses.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BenchError(
            "this bench compiles its engine and its load: install a C compiler (apt install gcc libc6-dev)"
        )
    engine, load = await asyncio.gather(*(_compile(compiler, name, run.path) for name in ("engine", "load")))
    return Programs(engine, load)


async def _compile(compiler: str, name: str, folder: Path) -> Path:
    program, source = folder / name, Path(__file__).with_name(f"{name}.c")
    command = (compiler, "-O2", "-o", str(program), str(source))
    await output_of(f"compiling {source.name} with {compiler}", command, _COMPILE_S)
    return program
