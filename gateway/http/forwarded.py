"""Addresses of clients as people and proxies write them (`X-Forwarded-For`, and `Forwarded` of RFC 7239).

Every proxy adds the address that it was called from at the right, behind whatever its client sent. So these headers are
read from the right, and only as far as the addresses are those of trusted proxies: what is left of there, whoever
called may have made up.
"""

import functools
import ipaddress
import re
from collections.abc import Callable, Iterator

MOST_HOPS = 32
"""Proxies that are looked past; a client that could name more of them would keep us busy."""
_PAIR = re.compile(r"[\t ]*([^=;,\"\t ]+)=(\"(?:[^\"\\]|\\.)*\"|[^;,\"\t ]*)[\t ]*(?:;|$)")
_ESCAPED = re.compile(r"\\.")
_IPV4_WITH_PORT = re.compile(r"([0-9.]+):[0-9]{1,5}")
_IPV6_WITH_PORT = re.compile(r"\[([^\]]*)\](?::[0-9]{1,5})?")


@functools.lru_cache(maxsize=4096)
def normal_address(text: str) -> str | None:
    """The IP address in `text`, which may have a port or brackets, in its usual form; None if it is none."""
    if found := _IPV4_WITH_PORT.fullmatch(text) or _IPV6_WITH_PORT.fullmatch(text):
        text = found[1]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    if "%" in text:  # an interface of another machine
        return None
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    return str(address)


def client_of(peer: str, header: str, value: str, trusts: Callable[[str], bool]) -> str:
    """The address of the client of a request that came from `peer`, a trusted proxy, with `value` in the header
    `header`: the right-most that is not a trusted proxy's. Where a proxy does not say who its client is, its own."""
    client = peer
    for text, _ in zip(_from_the_right(header, value), range(MOST_HOPS), strict=False):
        address = normal_address(text)
        if address is None:
            break
        client = address
        if not trusts(address):
            break
    return client


def _from_the_right(header: str, value: str) -> Iterator[str]:
    """What each proxy wrote, the last one first."""
    while value:
        value, _, element = value.rpartition(",")
        if header == "forwarded":
            while _ESCAPED.sub("", element).count('"') % 2 and value:  # a comma in quotes
                value, _, more = value.rpartition(",")
                element = f"{more},{element}"
            yield _for(element)
        else:
            yield element.strip("\t ")


def _for(element: str) -> str:
    """Who an element of `Forwarded` is for, empty if it does not say."""
    at = 0
    while pair := _PAIR.match(element, at):
        if pair[1].lower() == "for":
            return pair[2].strip('"')
        at = pair.end()
    return ""
