"""How much each logger of a process says, changed while it runs.

A change lasts until it is taken back or the process ends. Loggers are known by their names: a module's, a package's
over all in it, a library's, or `root` over all. Other names are refused, or any typing mistake would be a logger for
ever. The logger of the admin API, which tells who changed what, always tells: nobody can silence it first.
"""

import functools
import importlib.util
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, get_args

from msgspec import Struct

from router.errors import ApiError
from router.spec.wording import did_you_mean

LogLevel = Literal["debug", "info", "warning", "error"]

ROOT = "root"
AUDIT = "gateway.admin.app"
"""Says who asked for what change; see above."""
_PACKAGES = ("gateway", "headrace", "k8s", "router")


class Logger(Struct, frozen=True):
    """A logger that has a level of its own; the others have that of the nearest package that has one."""

    name: str
    level: LogLevel
    changed: bool
    """It is what somebody has set while the gateway ran."""


class LogLevels:
    """The levels of this process's loggers."""

    def __init__(self) -> None:
        self.changed: dict[str, LogLevel] = {}
        """What was set, by name."""
        self._before: dict[str, int] = {}

    def rows(self) -> list[Logger]:
        """The loggers with levels of their own, by name, the root first."""
        own = [(ROOT, logging.getLogger())]
        for name, one in sorted(logging.root.manager.loggerDict.items()):
            if isinstance(one, logging.Logger) and one.level != logging.NOTSET:
                own.append((name, one))
        return [Logger(name, _nearest(one.level), name in self.changed) for name, one in own]

    def set_or_reset(self, name: str, level: LogLevel | None) -> None:
        """Have a logger that was checked say what is of `level` and above, or what it said at the start."""
        if level is None:
            self._reset(name)
        else:
            self._set(name, level)

    def _set(self, name: str, level: LogLevel) -> None:
        logger = logging.getLogger(None if name == ROOT else name)
        self._before.setdefault(name, logger.level)
        logger.setLevel(level.upper())
        self.changed[name] = level

    def _reset(self, name: str) -> None:
        before = self._before.pop(name, None)
        if before is not None:
            logging.getLogger(None if name == ROOT else name).setLevel(before)
        self.changed.pop(name, None)


def check_logger(name: str) -> None:
    """Raises ApiError for a logger that there is not, or whose level is not to be changed."""
    if name == AUDIT:
        raise ApiError(409, f"{AUDIT} tells who changed what, and always does.", code="conflict")
    known = {ROOT, *_modules(), *logging.root.manager.loggerDict}
    if name not in known:
        hint = did_you_mean(name[:200], known)
        how = "" if hint else " It has the name of a module, a package or a library, or is root."
        raise ApiError(404, f"There is no logger {name[:200]!r}{hint or '.'}{how}", code="logger_not_found")


def _nearest(level: int) -> LogLevel:
    """The most that is said at a level, in our words."""
    known: Iterable[LogLevel] = get_args(LogLevel)
    return next((name for name in known if level <= logging.getLevelNamesMapping()[name.upper()]), "error")


@functools.cache
def _modules() -> frozenset[str]:
    """The names of the modules and packages of this project, loaded or not."""
    found: set[str] = set()
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in map(Path, (spec.submodule_search_locations if spec is not None else None) or ()):
            for file in folder.rglob("*.py"):
                parts = (package, *file.relative_to(folder).with_suffix("").parts)
                found.add(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return frozenset(found)
