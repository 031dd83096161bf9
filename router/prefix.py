"""Canonical prompt bytes and the prefix chain.

Engines reuse KV cache for equal *token* prefixes. A gateway without a tokenizer compares bytes instead, so the encoding
is made such that a prompt that extends another extends its bytes: it only ever appends, tools first, then the messages
in the order given, role and content. It is never the rendered prompt, because the same conversation must look the same
whichever engine, and whichever template, it is sent to. Equal bytes are a good guess at equal tokens, no proof (names
and template arguments are left out, contents could imitate the marks between messages): a wrong guess costs a cache
hit, nothing else, and what must never be shared is in the seed.

The chain cuts the bytes in blocks of `PREFIX_BLOCK_BYTES` and hashes each with the hash of the block before as its
seed, so that one hash stands for the whole prefix up to it: `h_i = xxh3_64(block_i, seed = h_{i-1})`. The first seed
covers what must never share a cache: the model and the `cache_salt`. Blocks of 1 KiB hash 400 kB in about 0.1 ms.
"""

from collections.abc import Iterable

from xxhash import xxh3_64, xxh3_64_intdigest

PREFIX_BLOCK_BYTES = 1024
RAW_PROMPT_KEY_BYTES = 4096
"""How much of a raw prompt, which has no first message, identifies its conversation."""

MESSAGE_MARK = b"\x1e"
CONTENT_MARK = b"\x1f"


def chain_seed(model: str, cache_salt: str) -> int:
    """The seed of a chain (64 bits): prompts with different seeds share no prefix."""
    return xxh3_64_intdigest(f"{model}\0{cache_salt}".encode())


def prefix_chain(canonical: bytes, seed: int) -> list[int]:
    """The hashes (64 bits each) of the whole blocks of `canonical`; a last, partial block has none."""
    chain = []
    for start in range(0, len(canonical) - PREFIX_BLOCK_BYTES + 1, PREFIX_BLOCK_BYTES):
        seed = xxh3_64_intdigest(canonical[start : start + PREFIX_BLOCK_BYTES], seed)
        chain.append(seed)
    return chain


def conversation_key(opening: Iterable[bytes | str], seed: int) -> int:
    """The key (64 bits) of a conversation: the hash of its bytes through the end of the first user message, given in
    parts; text stands for its UTF-8."""
    hashed = xxh3_64(seed=seed)
    for part in opening:
        hashed.update(part.encode() if isinstance(part, str) else part)
    return hashed.intdigest()


def session_key(session: str) -> int:
    """The key (64 bits) of a conversation that the client named itself."""
    return xxh3_64_intdigest(session.encode("utf-8", "surrogateescape"))
