"""What a request takes, as long as its engine has not said so.

Admission decides before a token is counted, so it goes by bytes: about four make a token of English, whatever the
tokenizer (token ids, four bytes each, come out exactly), and a route can say otherwise (`bytes_per_token`). How long
the answer will be nobody knows; `max_tokens` is the most it can be. What comes of these estimates is put right when the
engine reports its usage, so they decide only how much a request holds while it is under way.

An answer that ends without usage, because its client left or its engine does not report any, is judged by its bytes:
clients must not be able to use tokens for nothing by leaving just before the end.
"""

import math

from router.admission.limits import Use
from router.prompt import PromptView

BYTES_PER_TOKEN = 4
STREAMED_BYTES_PER_TOKEN = 128
"""Bytes of an event stream that bring a token: an event says more than its text, 200 bytes with most engines."""
COMPLETION_TOKENS = 256
"""Tokens of an answer whose request does not say how many it may have."""
_MOST_TOKENS = 2**40
"""What is sent as `max_tokens` need not be a number of tokens, nor what a route says of them be true."""


def prompt_tokens(prompt: PromptView, bytes_per_token: float = BYTES_PER_TOKEN) -> int:
    """About how many tokens the prompt has. Images and the like, of which bytes tell nothing, are left out."""
    total, parts = 0, prompt.parts
    for need in prompt.needs:
        if need.startswith("messages:"):
            parts = tuple([part for part in parts if isinstance(part, str)])
            break
    for part in parts:
        total += len(part) if isinstance(part, bytes) or part.isascii() else len(part.encode())
    return tokens_in(total, bytes_per_token)


def tokens_in(size: int, bytes_per_token: float) -> int:
    """About how many tokens so many bytes make, of a route that may say that it is hardly any bytes each."""
    return math.ceil(min(size / bytes_per_token, _MOST_TOKENS))


def completion_tokens(prompt: PromptView) -> int:
    """The most tokens the answer will have if the request says so, else about how many."""
    most = prompt.completion_tokens
    return COMPLETION_TOKENS if most is None else min(max(most, 0), _MOST_TOKENS)


def used(reserved: Use, prompt: int, completion: int, body_bytes: int, *, streamed: bool) -> Use:
    """What a request took for which `reserved` was estimated, `prompt` and `completion` tokens were reported (0 where
    they were not), and `body_bytes` of its answer passed on."""
    if prompt or completion:
        return Use(prompt, completion)
    if not body_bytes and not streamed:  # it was given up while the engine was at work
        return reserved
    per_token = STREAMED_BYTES_PER_TOKEN if streamed else BYTES_PER_TOKEN
    return Use(reserved.prompt_tokens, -(-body_bytes // per_token))
