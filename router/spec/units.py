"""Durations, sizes and addresses as people write them in a fleet file.

A bare number never says what it counts, so durations and sizes are strings with a unit (`500ms`, `30s`, `32MiB`). The
patterns below are part of the types: they appear in the generated JSON Schema and are enforced by msgspec when a
document is decoded, so code that receives one of these strings can convert it without a second check.
"""

import re
from typing import Annotated

from msgspec import Meta

DURATION_PATTERN = r"^[0-9]+(\.[0-9]+)?(ms|s|m|h)$"
SIZE_PATTERN = r"^[0-9]+(B|KiB|MiB|GiB)$"
LISTEN_PATTERN = r"^(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]*):[0-9]{1,5}$"
HOST_PORT_PATTERN = r"^(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}$"
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$"

Duration = Annotated[str, Meta(pattern=DURATION_PATTERN, description="A duration with its unit: 500ms, 30s, 5m, 1h.")]
DurationOrOff = Annotated[
    str, Meta(pattern=rf"^off$|{DURATION_PATTERN}", description="A duration with its unit (30s), or off for no limit.")
]
Size = Annotated[str, Meta(pattern=SIZE_PATTERN, description="A size in bytes with its unit: 512KiB, 32MiB.")]
ListenAddress = Annotated[
    str, Meta(pattern=LISTEN_PATTERN, description="HOST:PORT to listen on; an empty host means every interface.")
]
HostPort = Annotated[str, Meta(pattern=HOST_PORT_PATTERN, description="HOST:PORT of a server.")]
HttpUrl = Annotated[str, Meta(pattern=r"^http://[^/?#\s]+(/[^?#\s]*)?$", description="An http:// URL.")]
Name = Annotated[str, Meta(pattern=NAME_PATTERN, description="Letters, digits and . _ / -, 128 at most.")]

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_BYTES = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
_NUMBER_AND_UNIT = re.compile(r"^([0-9.]+)([A-Za-z]+)$")


def _split(text: str) -> tuple[float, str]:
    match = _NUMBER_AND_UNIT.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a number with a unit")
    return float(match[1]), match[2]


def seconds(duration: str) -> float:
    """Seconds in a `Duration`; infinity for `off`."""
    if duration == "off":
        return float("inf")
    number, unit = _split(duration)
    return number * _SECONDS[unit]


def size_bytes(size: str) -> int:
    """Bytes in a `Size`."""
    number, unit = _split(size)
    return int(number) * _BYTES[unit]


def host_and_port(address: str) -> tuple[str | None, int]:
    """The host (None for every interface) and port of a `ListenAddress` or `HostPort`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]") or None, int(port)
