"""The gateway's own tokenizer, for the contract that takes and gives token ids.

A `tokenizer.json` is megabytes, so a fleet's documents carry its path and not its content: every gateway reads its own
copy, and one that has none says so and serves no OpenAI request of that pool.

**Text -> ids.** The special tokens of a chat are in the template, so its rendered text is encoded without the ones the
tokenizer would add; a raw prompt gets them, once: a client that wrote the beginning-of-sequence token itself does not
get a second one. Encoding takes about a microsecond per character and, done by the batch, holds no lock of the
interpreter; whatever is longer than `INLINE_CHARACTERS` is encoded in a thread.

**Ids -> text.** The decoders of today's models put no context into a token: it stands for the same bytes wherever it
comes. So detokenising is a table, filled as ids are met, and the UTF-8 decoder behind it (`answer`) holds back the
beginning of a character until its end has come; nothing is ever decoded twice. Two families are known, told by the
file's `decoder`: byte-level (GPT-2 and what followed: each letter of a token is a byte) and metaspace (SentencePiece:
`▁` is a space, `<0xE2>` a byte). Special tokens are no text. What metaspace decoders do to the first space of a text is
left out on purpose: it undoes what was put in front of a prompt, and an answer goes on after one.
"""

import asyncio
import threading
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

INLINE_CHARACTERS = 2048
"""Characters that are encoded without a thread: some two milliseconds' worth."""
FILE_LIMIT = 256 * 1024 * 1024
"""Bytes of a tokenizer file."""

_KEPT = 8
"""Tokenizers kept in memory, for pools that share one; each is some ten times its file."""
_METASPACE = "▁"
_loading = threading.Lock()


class TokenizerError(ValueError):
    """The tokenizer cannot be used on this gateway; the text says why, as a sentence's end."""


class _Decoder(msgspec.Struct):
    """A `decoder` of a tokenizer.json, as far as it tells how tokens are written."""

    type: str
    decoders: list["_Decoder"] = []
    pattern: dict[str, str] = {}
    content: str = ""


class _File(msgspec.Struct):
    decoder: _Decoder | None = None


class TokenCodec:
    """A tokenizer: text to ids and ids to bytes."""

    __slots__ = ("_byte_level", "_bytes", "_special", "_tokenizer", "bos")

    def __init__(self, content: bytes) -> None:
        """From the content of a tokenizer.json. Raises TokenizerError."""
        try:
            self._byte_level = _is_byte_level(msgspec.json.decode(content, type=_File).decoder)
            self._tokenizer = Tokenizer.from_buffer(content)
        except msgspec.DecodeError as error:
            raise TokenizerError(f"is no tokenizer.json: {error}") from None
        except TokenizerError:
            raise
        except Exception as error:  # the library's own are bare Exceptions
            raise TokenizerError(f"is no tokenizer.json that can be read: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(id_ for id_, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}
        leading = self._tokenizer.encode("").ids
        self.bos: int | None = leading[0] if leading else None
        """What the tokenizer itself puts in front of a text."""

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """The ids of `text`; with `add_special`, with the tokens that the tokenizer puts around a text, once."""
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
        if add_special and self.bos is not None and ids[:2] == [self.bos, self.bos]:
            return ids[1:]
        return ids

    async def encode_prompt(self, text: str, *, add_special: bool) -> list[int]:
        """As `encode`, without keeping the event loop from its work."""
        if len(text) <= INLINE_CHARACTERS:
            return self.encode(text, add_special=add_special)
        return await asyncio.to_thread(self.encode, text, add_special=add_special)

    def id_of(self, token: str) -> int | None:
        """The id of the token that is written `token`, if there is one."""
        found: int | None = self._tokenizer.token_to_id(token) if token else None
        return found

    def is_special(self, id_: int) -> bool:
        return id_ in self._special

    def bytes_of(self, id_: int) -> bytes:
        """What the token stands for in a text; nothing for special tokens and for ids that are none."""
        found = self._bytes.get(id_)
        if found is None:
            token: str | None = None if id_ < 0 or id_ in self._special else self._tokenizer.id_to_token(id_)
            found = b"" if token is None else _from_byte_level(token) if self._byte_level else _from_metaspace(token)
            if token is not None:  # ids beyond the vocabulary are without number
                self._bytes[id_] = found
        return found

    def text_of(self, ids: Iterable[int]) -> bytes:
        """The bytes of several tokens in a row."""
        return b"".join(map(self.bytes_of, ids))


def load_tokenizer(path: str) -> TokenCodec:
    """The tokenizer in the file at `path`. Blocks, for seconds if the file is large. Raises TokenizerError."""
    try:
        stat = Path(path).stat()
    except FileNotFoundError:
        raise TokenizerError("is not on this gateway") from None
    except (OSError, ValueError) as error:
        raise TokenizerError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if stat.st_size > FILE_LIMIT:
        raise TokenizerError(f"is larger than {FILE_LIMIT} bytes")
    with _loading:  # endpoints of one pool ask at the same time
        return _load(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=_KEPT)
def _load(path: str, _modified: int, _size: int) -> TokenCodec:
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise TokenizerError(f"cannot be read: {error.strerror}") from None
    return TokenCodec(content)


def _is_byte_level(decoder: _Decoder | None) -> bool:
    kinds = list(_flat(decoder)) if decoder is not None else []
    if any(kind.type == "ByteLevel" for kind in kinds):
        return True
    if any(kind.type == "Metaspace" or _METASPACE in kind.pattern.values() for kind in kinds):
        return False
    found = ", ".join(kind.type for kind in kinds) or "none"
    raise TokenizerError(f"has a decoder that is neither byte-level nor metaspace ({found}), so answers cannot be read")


def _flat(decoder: _Decoder) -> Iterable[_Decoder]:
    yield decoder
    for inner in decoder.decoders:
        yield from _flat(inner)


def _byte_letters() -> dict[str, int]:
    """Byte-level vocabularies write a byte as a letter: itself where it is printable, else the next letter from 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if chr(byte) not in letters)
    return letters | {chr(256 + index): byte for index, byte in enumerate(list(others))}


_LETTERS = _byte_letters()


def _from_byte_level(token: str) -> bytes:
    try:
        return bytes([_LETTERS[letter] for letter in token])
    except KeyError:  # an added token, written as what it is
        return token.encode()


def _from_metaspace(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            pass
    return token.replace(_METASPACE, " ").encode()
