"""Durations, sizes and addresses as people write them in a fleet file.

A bare number never says what it counts, so durations, sizes and shares are strings with a unit (`500ms`, `32MiB`,
`10%`). The patterns below are part of the types: they appear in the generated JSON Schema and are enforced by msgspec
when a document is decoded, so code that receives one of these strings can convert it without a second check.
"""

import ipaddress
import re
from datetime import UTC, datetime
from typing import Annotated

from msgspec import Meta

END = r"(?!\n)$"
"""The end of a value, in patterns. In JSON Schema `$` alone is that; in Python it also stands before a last newline."""

_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
HOST_NAME = rf"{_LABEL}(\.{_LABEL})*\.?"
_HOST = rf"(\[[0-9a-fA-F:.]+\]|{HOST_NAME})"
_PORT = r":[0-9]{1,5}"
_SERVER_URL = rf"http://{_HOST}({_PORT})?"
_PATH = r"[!\"$->@-~]*"  # visible ASCII without ? and #
_USER = r"(((?![/?#\[\]])[!-~])*@)?"
_REDIS_SERVER = rf"{_USER}{_HOST}({_PORT})?(/[0-9]*)?"
_TLS_FILE = r"ssl_(ca_certs|certfile|keyfile)=[^&#\s]+"

DURATION_PATTERN = rf"^[0-9]+(\.[0-9]+)?(ms|s|m|h){END}"
PERCENT_PATTERN = rf"^(100|[0-9]{{1,2}}(\.[0-9]+)?)%{END}"
SIZE_PATTERN = rf"^[0-9]+(B|KiB|MiB|GiB){END}"
LISTEN_PATTERN = rf"^{_HOST}?{_PORT}{END}"
HOST_PORT_PATTERN = rf"^{_HOST}{_PORT}{END}"
HTTP_URL_PATTERN = rf"^{_SERVER_URL}(/{_PATH})?{END}"
WEB_URL_PATTERN = rf"^https?://{_HOST}({_PORT})?([/?][!\"$-~]*)?{END}"
BASE_URL_PATTERN = rf"^{_SERVER_URL}(?!({_PATH})/v1/?$)(/{_PATH})?{END}"
COLLECTOR_URL_PATTERN = rf"^https?://{_HOST}({_PORT})?(/{_PATH})?{END}"
NAME_PATTERN = rf"^[A-Za-z0-9][A-Za-z0-9._/-]{{0,127}}{END}"
SHA256_PATTERN = rf"^[0-9a-f]{{64}}{END}"
LOG_PATTERN = rf"^(off|stdout|/[ -~]*[!-.0-~]){END}"
DATE_PATTERN = rf"^[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}{END}"
CIDR_PATTERN = rf"^[0-9a-fA-F:.]+(/[0-9]{{1,3}})?{END}"
KUBERNETES_NAME = r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"
FLEET_NAME_PATTERN = rf"^[A-Za-z0-9][A-Za-z0-9._-]{{0,62}}{END}"
# Of the options the Redis client would take from a URL only these are allowed: one it does not know ends the gateway,
# and others would undo its deadlines.
REDIS_URL_PATTERN = (
    rf"^(redis://{_REDIS_SERVER}|rediss://{_REDIS_SERVER}(\?{_TLS_FILE}(&{_TLS_FILE})*)?"
    rf"|unix://{_USER}/[^?#\s]+(\?db=[0-9]+)?){END}"
)

Duration = Annotated[str, Meta(pattern=DURATION_PATTERN, description="A duration with its unit: 500ms, 30s, 5m, 1h.")]
DurationOrOff = Annotated[
    str,
    Meta(pattern=rf"^off{END}|{DURATION_PATTERN}", description="A duration with its unit (30s), or off for no limit."),
]
CollectorUrl = Annotated[
    str, Meta(pattern=COLLECTOR_URL_PATTERN, description="http://HOST:PORT or https://HOST:PORT of a collector.")
]
DurationOrZero = Annotated[
    str, Meta(pattern=rf"^0s{END}|{DURATION_PATTERN}", description="A duration with its unit (30s), or 0s for none.")
]
Size = Annotated[str, Meta(pattern=SIZE_PATTERN, description="A size in bytes with its unit: 512KiB, 32MiB.")]
Percent = Annotated[str, Meta(pattern=PERCENT_PATTERN, description="A share in percent: 10%.")]
PercentOrOff = Annotated[
    str,
    Meta(pattern=rf"^off{END}|{PERCENT_PATTERN}", description="A share in percent (10%), or off for no limit."),
]
ListenAddress = Annotated[
    str, Meta(pattern=LISTEN_PATTERN, description="HOST:PORT to listen on; an empty host means every interface.")
]
HostPort = Annotated[str, Meta(pattern=HOST_PORT_PATTERN, description="HOST:PORT of a server.")]
HttpUrl = Annotated[str, Meta(pattern=HTTP_URL_PATTERN, description="An http:// URL.")]
BaseUrl = Annotated[
    str, Meta(pattern=BASE_URL_PATTERN, description="http://HOST:PORT, without the /v1 that the gateway adds.")
]
WebUrl = Annotated[str, Meta(pattern=WEB_URL_PATTERN, description="An https:// URL; http:// where the way is safe.")]
Name = Annotated[str, Meta(pattern=NAME_PATTERN, description="Letters, digits and . _ / -, 128 at most.")]
Sha256 = Annotated[str, Meta(pattern=SHA256_PATTERN, description="64 hex digits, lower case.")]
Cidr = Annotated[str, Meta(pattern=CIDR_PATTERN, description="An address or a network: 10.0.0.0/8, fd00::/8.")]
Date = Annotated[str, Meta(pattern=DATE_PATTERN, description="A day: 2027-01-31.")]
LogDestination = Annotated[
    str, Meta(pattern=LOG_PATTERN, description="off, stdout, or the absolute path of a file in ASCII.")
]
KubernetesName = Annotated[
    str, Meta(pattern=rf"^{KUBERNETES_NAME}{END}", description="The name of an object: a-z, digits, - and .")
]
NamespaceOrAll = Annotated[
    str, Meta(pattern=rf"^(\*|[a-z0-9]([a-z0-9-]{{0,61}}[a-z0-9])?){END}", description="A namespace, or * for all.")
]
PortNumber = Annotated[int, Meta(ge=1, le=65535, description="A port.")]
FleetName = Annotated[str, Meta(pattern=FLEET_NAME_PATTERN, description="Letters, digits and . _ -, 63 at most.")]
RedisUrl = Annotated[
    str,
    Meta(
        pattern=REDIS_URL_PATTERN,
        description="redis://HOST:PORT, rediss://HOST:PORT (TLS) or unix:///PATH; USER:PASSWORD@ may come before HOST.",
    ),
]

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_BYTES = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
_NUMBER_AND_UNIT = re.compile(r"([0-9.]+)([A-Za-z]+)")


def _split(text: str) -> tuple[float, str]:
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a number with a unit")
    return float(match[1]), match[2]


def seconds(duration: str) -> float:
    """Seconds in a `Duration`; infinity for `off`."""
    if duration == "off":
        return float("inf")
    number, unit = _split(duration)
    return number * _SECONDS[unit]


def share(percent: str) -> float:
    """The share that a `Percent` is, 0 to 1; infinity for `off`."""
    return float("inf") if percent == "off" else float(percent.removesuffix("%")) / 100


def size_bytes(size: str) -> int:
    """Bytes in a `Size`."""
    number, unit = _split(size)
    return int(number) * _BYTES[unit]


def end_of_day(date: str) -> float:
    """The Unix time at which a `Date` ends, in UTC. Raises ValueError for a day that no calendar has."""
    return datetime.fromisoformat(date).replace(tzinfo=UTC).timestamp() + 86_400


def has_expired(last_day: str, now: float) -> bool:
    """Whether at the Unix time `now` a `Date` is over; a day that no calendar has always is."""
    try:
        return now >= end_of_day(last_day)
    except ValueError:
        return True


def host_and_port(address: str) -> tuple[str | None, int]:
    """The host (None for every interface) and port of a `ListenAddress` or `HostPort`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]") or None, int(port)


def is_loopback(address: str) -> bool:
    """Whether only the machine itself can connect to a `ListenAddress`."""
    host, _ = host_and_port(address)
    if host is None or host == "localhost":
        return host is not None
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
