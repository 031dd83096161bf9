"""Header fields to and from bytes: HPACK (RFC 7541), without its state.

Both sides may keep a table of fields they have seen and send numbers instead. We keep none: what we send are literals,
encoded once for each method but for a few that each request has of its own, and the server is told that our table has
no room (`SETTINGS_HEADER_TABLE_SIZE` of 0), which holds from its first answer on, because the settings came before the
first request. So a block of fields means the same wherever it stands: one that nobody wants to know of is dropped
unread, one that is too long concerns its own stream only, and one that was seen before need not be read again, which is
nearly every one, as all answers begin and end alike.

The Huffman code is canonical (appendix B): the lengths of its codes are all that has to be known.
"""

import functools
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

BLOCK_BYTES = 16384
"""The longest block that is read, as gRPC has it. Decoded it is less than twice that."""
_CACHED_BYTES = 512
_CACHED_BLOCKS = 256

_APPENDIX_A = """
:authority|:method=GET|:method=POST|:path=/|:path=/index.html|:scheme=http|:scheme=https|:status=200|:status=204|
:status=206|:status=304|:status=400|:status=404|:status=500|accept-charset|accept-encoding=gzip, deflate|
accept-language|accept-ranges|accept|access-control-allow-origin|age|allow|authorization|cache-control|
content-disposition|content-encoding|content-language|content-length|content-location|content-range|content-type|
cookie|date|etag|expect|expires|from|host|if-match|if-modified-since|if-none-match|if-range|if-unmodified-since|
last-modified|link|location|max-forwards|proxy-authenticate|proxy-authorization|range|referer|refresh|retry-after|
server|set-cookie|strict-transport-security|transfer-encoding|user-agent|vary|via|www-authenticate
"""
_STATIC = (
    (b"", b""),  # indices begin with 1
    *(
        (name.encode(), value.encode())
        for name, _, value in (field.partition("=") for field in _APPENDIX_A.replace("\n", "").split("|"))
    ),
)
_CODE_LENGTHS = (
    "mw|||||||x~||~||||||||~|||||||||fjjlmfhkjjhkhfffeeefffffffghofljmfgggggggggggggggggggggghghmsmnfoefe"
    "fefffeggfffefgfeefgggggoknm|tvttvvvwvwwwwwxwxxvwxwwwwuvwvwwxvutvvwwuwvvxuvwwuuvuwvwwtvvvwvvwzztsvwvy"
    "zzz{{zxysuz{{z{xuuzz|{{{txtuvuuwvvyyxxzwz{zz{{{{{|{{{{{z~"
)
"""Of each octet's code and, at last, of the end mark's: in bits, as the letter with that number."""
_END_MARK = 256
_METADATA = re.compile(r"[\x20-\x7e]*")


def _codes() -> dict[int, int]:
    """Octets by their codes, each with a 1 before it, so that codes of different lengths are different numbers."""
    octets, code, length = {}, 1, 0
    for bits, octet in sorted((ord(letter) - 96, octet) for octet, letter in enumerate(_CODE_LENGTHS)):
        code <<= bits - length
        length = bits
        octets[code] = octet
        code += 1
    return octets


_OCTETS = _codes()


class HeaderError(Exception):
    """A block that is no HPACK, or none that a table without room allows."""


def encode(fields: Iterable[tuple[str, str]]) -> bytes:
    """A block of literals that no table takes up (section 6.2.2). Names are in lower case. Fields with a value that
    gRPC does not allow (its PROTOCOL-HTTP2, "ASCII-Value") are left out."""
    block = bytearray()
    for name, value in fields:
        if _METADATA.fullmatch(value) is not None:
            block.append(0)
            for text in (name, value):
                block += _length(len(text))
                block += text.encode()
    return bytes(block)


def _length(number: int) -> bytes:
    """An integer with a prefix of seven bits (section 5.1), below a zero: no Huffman code."""
    if number < 127:
        return bytes((number,))
    number -= 127
    octets = bytearray((127,))
    while number >= 128:
        octets.append(number & 127 | 128)
        number >>= 7
    octets.append(number)
    return bytes(octets)


def decode(block: bytes) -> Mapping[bytes, bytes]:
    """The fields of a block, of several with one name the first. Raises HeaderError."""
    return _cached(block) if len(block) <= _CACHED_BYTES else _decode(block)


def _decode(block: bytes) -> Mapping[bytes, bytes]:
    fields: dict[bytes, bytes] = {}
    at = 0
    try:
        while at < len(block):
            first = block[at]
            if first & 0x80:
                index, at = _integer(block, at, 7)
                name, value = _static(index)
            elif first & 0xE0 == 0x20:
                room, at = _integer(block, at, 5)
                if room or fields:
                    raise HeaderError("it makes room in a table that has none")
                continue
            else:
                index, at = _integer(block, at, 6 if first & 0x40 else 4)
                name, at = (_static(index)[0], at) if index else _string(block, at)
                value, at = _string(block, at)
            fields.setdefault(name, value)
    except IndexError:
        raise HeaderError("it is cut short") from None
    return MappingProxyType(fields)


_cached = functools.lru_cache(_CACHED_BLOCKS)(_decode)


def _static(index: int) -> tuple[bytes, bytes]:
    if not 0 < index < len(_STATIC):
        raise HeaderError(f"it refers to entry {index} of a table without entries")
    return _STATIC[index]


def _integer(block: bytes, at: int, bits: int) -> tuple[int, int]:
    """An integer with a prefix of that many bits (section 5.1), and where it ends. Raises IndexError."""
    most = (1 << bits) - 1
    number = block[at] & most
    at += 1
    if number < most:
        return number, at
    for shift in (0, 7, 14, 21):
        octet = block[at]
        at += 1
        number += (octet & 127) << shift
        if octet < 128:
            return number, at
    raise HeaderError("it holds a number that is too large")


def _string(block: bytes, at: int) -> tuple[bytes, int]:
    """A string (section 5.2), and where it ends. Raises IndexError."""
    coded = block[at] & 0x80
    length, at = _integer(block, at, 7)
    end = at + length
    if end > len(block):
        raise IndexError
    return _huffman(block[at:end]) if coded else block[at:end], end


def _huffman(data: bytes) -> bytes:
    text, code = bytearray(), 1
    for octet in data:
        for shift in range(7, -1, -1):
            code = code << 1 | octet >> shift & 1
            found = _OCTETS.get(code)
            if found is not None:
                if found == _END_MARK:
                    raise HeaderError("it holds an end mark")
                text.append(found)
                code = 1
    # What is left are the first bits of the end mark, which are ones, and less than an octet.
    if code > 0xFF or code & (code + 1):
        raise HeaderError("its padding is wrong")
    return bytes(text)
