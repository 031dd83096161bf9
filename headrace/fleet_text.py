"""The text of a fleet file, or of a folder of them, and where in it a problem is.

A folder is read as though its `*.yaml` stood one after the other, in the order of their names: each holds some of the
file's top-level keys. So what may not lie beside the rest (tenants' keys, in a Secret of Kubernetes) can come from
elsewhere, and both are still one fleet, with one reader and one set of mistakes, each told with its own file and line.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs

from router.spec.strict import Problem

STANDARD_INPUT = Path("-")
_START = "---"
"""May begin a YAML document; in the middle of a text it would begin another."""


class ReadError(Exception):
    """Why a file could not be read, as the end of a sentence."""


@dataclass(frozen=True, slots=True)
class FleetText:
    """What was read."""

    text: str
    folder: Path
    """What paths in the text are relative to."""
    parts: tuple[tuple[Path, int], ...] = ()
    """Of a folder: its files, and how many lines come before each."""

    def located(self, problem: Problem) -> Problem:
        """`problem` with the file that it is in, where there are several."""
        if problem.line is None:
            return problem
        for file, before in reversed(self.parts):
            if problem.line > before:
                return structs.replace(problem, file=str(file), line=problem.line - before)
        return problem


def read_fleet_text(path: Path, limit: int) -> FleetText:
    """What is at `path`, of at most `limit` bytes. Raises ReadError."""
    if path == STANDARD_INPUT or not path.is_dir():
        return FleetText(read_text(path, limit), path.parent)
    texts: list[str] = []
    parts: list[tuple[Path, int]] = []
    before = size = 0
    for file in sorted(path.glob("*.yaml")):
        try:
            text = read_text(file, limit - size).removeprefix(_START)
        except ReadError as error:
            raise ReadError(f"{file.name} {error}") from None
        if not text.endswith("\n"):
            text += "\n"
        texts.append(text)
        parts.append((file, before))
        before += text.count("\n")
        size += len(text.encode())
    if not parts:
        raise ReadError("is a folder without any *.yaml")
    return FleetText("".join(texts), path, tuple(parts))


def read_text(path: Path, limit: int) -> str:
    """The text of one file, or of standard input where `path` is `-`. Raises ReadError."""
    try:
        if path == STANDARD_INPUT:
            data = sys.stdin.buffer.read(limit + 1)
        else:
            with path.open("rb") as file:
                data = file.read(limit + 1)
    except FileNotFoundError:
        raise ReadError("no such file") from None
    except IsADirectoryError:
        raise ReadError("is a directory, not a file") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise ReadError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > limit:
        raise ReadError(f"is larger than {limit} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ReadError(f"is not UTF-8 text (byte {error.start + 1})") from None
