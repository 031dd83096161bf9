"""The tokenizer that an engine's pool names: loaded off the event loop, and again when the pool names another.

Loading may take longer than a probe is given. It goes on in its thread all the same, and the next probe finds the
tokenizer loaded (`tokens.load_tokenizer` keeps it).
"""

import asyncio

from gateway.upstream.triton.token_form import end_id
from gateway.upstream.triton.tokens import TokenCodec, TokenizerError, load_tokenizer
from router.fleet import Pool


class PoolTokenizer:
    """The `codec` for one engine, None as long as there is none that fits its pool."""

    __slots__ = ("_path", "codec")

    def __init__(self) -> None:
        self.codec: TokenCodec | None = None
        self._path: str | None = None

    async def follow(self, pool: Pool) -> None:
        """Load what the pool names now, if it is not loaded. Raises TokenizerError, a clause that says what is missing;
        a file that appears later is found then."""
        spec = pool.spec.tokenizer
        if spec is None:
            self.codec = self._path = None
            raise TokenizerError(f"it takes token ids, and pool {pool.name} names no `tokenizer`")
        if self.codec is None or spec.file != self._path:
            self.codec, self._path = None, spec.file
            try:
                self.codec = await asyncio.to_thread(load_tokenizer, spec.file)
            except TokenizerError as error:
                raise TokenizerError(f"tokenizer {spec.file} {error}") from None
        end_id(self.codec, pool.spec)
