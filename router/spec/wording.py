"""What is wrong with one value that a person wrote, in a sentence that says what to write instead.

The patterns that decide are those of the types (`router.spec.units`); this module only puts their refusals into words,
and adds what a pattern cannot say: a port has an upper end, `[1:2]` is no IPv6 address, a deadline of zero fails every
request. Files (`router.spec.strict`), environment variables and the admin API share it, so all are held to the same
rules.

A value is repeated in a sentence only where it cannot hold a secret: never the Redis URL, no URL with a user name, no
hash of a key, in whose place the key itself may stand.
"""

import difflib
import ipaddress
import re
from collections.abc import Iterable

from msgspec import inspect

from router.spec import units


def pattern_of(annotation: object) -> str | None:
    """The pattern a string type, or one that may also be None, demands; None if it demands none."""
    type_ = only_type(inspect.type_info(annotation))
    return type_.pattern if isinstance(type_, inspect.StrType) else None


def only_type(type_: inspect.Type, *, mapping: bool = False, number: bool = False) -> inspect.Type:
    """The type itself, without its description and without the None that may stand in its place. Of a choice between
    words and something else, it is the other if that is a `mapping` or a `number`, as what was written is."""
    if isinstance(type_, inspect.UnionType):
        types = [one for one in type_.types if not isinstance(one, inspect.NoneType)]
        if len(types) > 1:
            other = inspect.StructType if mapping else inspect.IntType if number else inspect.LiteralType
            types = [one for one in types if isinstance(one, other)] or types[:1]
        (type_,) = types
    return type_.type if isinstance(type_, inspect.Metadata) else type_


_DURATIONS = (pattern_of(units.Duration), pattern_of(units.DurationOrOff), pattern_of(units.DurationOrZero))
_PERCENTS = (pattern_of(units.Percent), pattern_of(units.PercentOrOff))
_SIZE = pattern_of(units.Size)
_LISTEN = pattern_of(units.ListenAddress)
_HOST_PORT = pattern_of(units.HostPort)
_HTTP_URLS = (pattern_of(units.HttpUrl), pattern_of(units.BaseUrl))
_COLLECTOR_URL = pattern_of(units.CollectorUrl)
_WEB_URL = pattern_of(units.WebUrl)
_NAME = pattern_of(units.Name)
_SHA256 = pattern_of(units.Sha256)
_DATE = pattern_of(units.Date)
_LOG = pattern_of(units.LogDestination)
_FLEET_NAME = pattern_of(units.FleetName)
_REDIS_URL = pattern_of(units.RedisUrl)


def did_you_mean(word: str, choices: Iterable[str], prefix: str = "") -> str:
    """A clause to put behind "unknown": the nearest choice, or nothing when none is near.

    A `prefix` that all share would make all of them near, so it is not compared. Among very many choices none is
    looked for: each comparison takes some 10 µs.
    """

    def plain(text: str) -> str:
        return re.sub(r"[-_\s]", "", text.removeprefix(prefix)).lower()

    by_plain = {plain(choice): choice for choice in choices}
    if len(by_plain) > 1000 or len(word) > 200:
        return ""
    near = difflib.get_close_matches(plain(word), by_plain, n=1, cutoff=0.6)
    return f"; did you mean {by_plain[near[0]]}?" if near else ""


def choice_fault(value: object, choices: Iterable[object]) -> str | None:
    """What is wrong with a value that must be one of `choices`, or None."""
    names = [str(choice) for choice in choices]
    if value in names:
        return None
    return f"{shown(value)} is not one of {', '.join(names)}{did_you_mean(str(value), names)}"


def text_fault(value: str, pattern: str | None) -> str | None:
    """What is wrong with a string whose type demands `pattern`, or None."""
    if pattern is not None and not re.search(pattern, value):
        return _shape_fault(value, pattern)
    if pattern in _DURATIONS[:2] and units.seconds(value) == 0:
        return "must be longer than zero" + ("; write off for no limit" if pattern == _DURATIONS[1] else "")
    if pattern == _DATE:
        return _date_fault(value)
    if pattern == _SIZE and units.size_bytes(value) == 0:
        return "must be larger than zero"
    if pattern in (_LISTEN, _HOST_PORT):
        # Port 0 asks the system for a free port: good to listen on, impossible to connect to.
        return _server_fault(value, lowest_port=0 if pattern == _LISTEN else 1)
    if pattern in (*_HTTP_URLS, _WEB_URL):
        return _server_fault(_authority(value))
    if pattern == _REDIS_URL and not value.startswith("unix:"):
        fault = _server_fault(_authority(value).rpartition("@")[2])
        if fault is not None:  # it may quote the host, where a misplaced password would stand
            fault = fault if fault.startswith("port ") else "its host is not a host name or IP address"
            return f"in the Redis URL, {fault}"
    return None


def shown(value: object) -> str:
    """The value as a sentence quotes it: on one line, not endless."""
    text = str(value)
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _authority(url: str) -> str:
    return re.split("[/?]", url.partition("://")[2], maxsplit=1)[0]


def _server_fault(server: str, lowest_port: int = 1) -> str | None:
    """What is wrong with a HOST, a HOST:PORT or, to listen on, a :PORT whose shape is right."""
    host, port = re.fullmatch(r"(.*?)(?::([0-9]*))?", server, re.DOTALL).groups()  # type: ignore[union-attr]
    if host and (fault := _host_fault(host)):
        return fault
    if port is not None and not lowest_port <= int(port) <= 65535:
        return f"port {port} is not between {lowest_port} and 65535"
    return None


def _host_fault(host: str) -> str | None:
    kind: type[ipaddress.IPv4Address | ipaddress.IPv6Address] | None = None
    if host.startswith("["):
        if "]" not in host:
            return "the IPv6 address lacks its closing ]"
        kind = ipaddress.IPv6Address
    elif re.fullmatch(r"\.*[0-9][0-9.]*", host):
        kind = ipaddress.IPv4Address
    if kind is not None:
        try:
            kind(host.strip("[]"))
        except ValueError:
            return f"{shown(host)} is not an IPv{6 if host.startswith('[') else 4} address"
    if ":" in host and kind is None:
        return f"{shown(host)} is not a host name: an IPv6 address stands in brackets, like [::1]"
    if len(host) > 253:
        return "the host name is longer than 253 characters"
    if any(len(label) > 63 for label in host.split(".")):
        return "a part of the host name is longer than 63 characters"
    if not host.isascii():
        return f"{shown(host)} is not a host name: write what is not ASCII in its xn-- form"
    if kind is None and not re.search(rf"^{units.HOST_NAME}{units.END}", host):
        return f"{shown(host)} is not a host name: letters, digits and - between single dots"
    return None


def _shape_fault(value: str, pattern: str) -> str:
    if pattern in _DURATIONS:
        return _duration_fault(value, or_off=pattern == _DURATIONS[1])
    if pattern == _SIZE:
        return _size_fault(value)
    if pattern in _PERCENTS:
        alternative = ", or off" if pattern == _PERCENTS[1] else ""
        return f"{shown(value)} is not a share: write 0% to 100%, like 10%{alternative}"
    if pattern in (_LISTEN, _HOST_PORT):
        return _address_fault(value, listen=pattern == _LISTEN)
    if pattern in _HTTP_URLS:
        return _url_fault(value, base=pattern == _HTTP_URLS[1])
    if pattern == _WEB_URL:
        return "expected an https:// URL without user name and #, like https://login.example.com"
    if pattern == _REDIS_URL:
        return _redis_url_fault(value)
    if pattern in (_NAME, _FLEET_NAME):
        signs, most = (". _ / -", 128) if pattern == _NAME else (". _ -", 63)
        return f"{shown(value)} is not a name: letters, digits and {signs}, first a letter or digit, {most} at most"
    if pattern == _SHA256:
        return "expected the 64 hex digits, lower case, that `headrace keys hash` prints of a key; never the key itself"
    if pattern == _DATE:
        return f"{shown(value)} is not a day: write it like 2027-01-31"
    if pattern == _COLLECTOR_URL:
        return f"{shown(value)} is not a collector's URL: write http://HOST:PORT or https://HOST:PORT"
    if pattern == _LOG:
        return f"{shown(value)} is no place for a log: write off, stdout, or the absolute path of a file in ASCII"
    return f"does not match {pattern}"


def _date_fault(value: str) -> str | None:
    try:
        units.end_of_day(value)
    except ValueError:
        return f"{value} is in no calendar"
    return None


def _duration_fault(value: str, *, or_off: bool) -> str:
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", value):
        return f"a duration needs its unit: write {value}s (or ms, m, h)"
    alternative = ", or off" if or_off else ""
    unit = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|[smh])[a-z]*", value.strip(), re.IGNORECASE)
    if unit is not None:
        return f"{shown(value)} is not a duration: write {unit[1]}{unit[2].lower()}{alternative}"
    return f"{shown(value)} is not a duration: write a number and ms, s, m or h, like 30s{alternative}"


def _size_fault(value: str) -> str:
    if re.fullmatch(r"[0-9]+", value):
        return f"a size needs its unit: write {value}B, or use KiB, MiB, GiB"
    unit = re.fullmatch(r"([0-9]+)\s*([kmg])i?b?", value.strip(), re.IGNORECASE)
    if unit is not None:
        return f"{shown(value)} is not a size: write {unit[1]}{unit[2].upper()}iB"
    return f"{shown(value)} is not a size: write a whole number and B, KiB, MiB or GiB, like 32MiB"


def _address_fault(value: str, *, listen: bool) -> str:
    kind = "an address to listen on" if listen else "a HOST:PORT address"
    if "@" in value:
        return f"not {kind}"
    if listen and re.fullmatch(r"[0-9]{1,5}", value):
        return f'{value} is not {kind}: write ":{value}" for every interface, or HOST:{value}'
    scheme, separator, rest = value.partition("://")
    if separator and re.search(units.HOST_PORT_PATTERN, rest.rstrip("/")):
        return f"{shown(value)} is not {kind}: write {rest.rstrip('/')}, without {scheme}://"
    if re.fullmatch(r"[A-Za-z0-9._-]+|\[[^\]]*\]", value):
        return f"{shown(value)} has no port: write {value}:PORT"
    host, colon, port = value.rpartition(":")
    if colon and host and re.fullmatch(r"[0-9]{1,5}", port) and (fault := _host_fault(host)):
        return fault
    return f"{shown(value)} is not {kind}: write HOST:PORT" + (", or :PORT for every interface" if listen else "")


def _redis_url_fault(value: str) -> str:
    """Never repeats the value: it may hold a password."""
    if not re.match("(redis|rediss|unix)://", value):
        return "expected a URL that starts with redis://, rediss:// or unix://"
    if value.startswith("unix:"):
        return "expected unix:///PATH of the socket, with ?db=NUMBER at most behind it"
    if "?" in value:
        return "the Redis URL takes no options but ssl_ca_certs, ssl_certfile and ssl_keyfile of rediss://"
    return (
        "expected redis://HOST:PORT or redis://HOST:PORT/NUMBER; in a user name or password before HOST, "
        "write / ? # [ ] as %2F %3F %23 %5B %5D"
    )


def _url_fault(value: str, *, base: bool) -> str:
    if "@" in _authority(value) or ("@" in value and "://" not in value):
        return "engine credentials do not belong in a URL: leave out what stands before the @"
    if value.startswith("https://"):
        return "engines are reached over plain http:// only"
    if not re.fullmatch(r"[!-~]*", value) and value.isascii():
        return "holds a space or a control character"
    if re.search(r"^[A-Za-z0-9._-]+(:[0-9]+)?(/\S*)?$", value):
        return f"{shown(value)} is not a URL: write http://{value}"
    if re.search(r"[?#]", value):
        return "expected an http:// URL without ? and #"
    if not value.startswith("http://"):
        return "expected an http:// URL, like http://127.0.0.1:8000"
    host, port = re.fullmatch(r"(\[[^\]]*(?:\]|$)|.*?)(?::([^\]:]*))?", _authority(value), re.DOTALL).groups()  # type: ignore[union-attr]
    if not host:
        return "the URL has no host: write http://HOST:PORT"
    if fault := _host_fault(host):
        return fault
    if port is not None and not re.fullmatch(r"[0-9]{1,5}", port):
        return "the URL's port is not a number up to 65535"
    if base and re.search(r"/v1/?$", value):
        return "leave out /v1: the gateway adds it"
    return "expected an http:// URL, like http://127.0.0.1:8000"
