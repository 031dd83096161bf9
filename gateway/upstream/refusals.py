"""Whose fault an error is that an engine answers with, by what it says.

Statuses do not tell. vLLM answers 500 to a prompt that is too long on some paths and in some versions, llama.cpp did
so as well; a Triton reports everything inside a stream without a status. Taken at its word such an answer is retried by
clients, at the price of another prefill each time, and speaks against an engine that is well. So an error counts as the
client's if the body says so: by a type or code of its own, or in the words in which the engines say that a request does
not fit into the model. Those are deterministic: every replica would say the same.

An engine that will not have the credentials it is sent (401, 403) blames who sent them: the client, if its own were
forwarded, else the gateway. Passed on as it is, that would have clients change keys which are good.

The words are looked for in the engine's message. They may be in there because the client put them there, which costs
nobody anything: an engine's failure then is not counted.
"""

import re
from dataclasses import replace
from typing import Any

import msgspec

from gateway.upstream.base import Failure, UpstreamError
from router.fleet import Endpoint, Pool

LOOKED_AT_BYTES = 8 * 1024
"""How much of an error is looked at."""

_TYPES = frozenset({"BadRequestError", "invalid_request_error", "exceed_context_size_error"})
_CODES = frozenset({"context_length_exceeded", *(str(code) for code in range(400, 500) if code not in (408, 429))})
_DOES_NOT_FIT = re.compile(
    # vLLM
    r"maximum context length|longer than the maximum model length|too long to fit into the model|prompt is too long"
    r"|input prompt \(\d+ tokens\) is too long|max_tokens must be at least 1"
    # SGLang
    r"|longer than the model's context length|exceeds the maximum allowed length \(\d+ tokens\)"
    # TensorRT-LLM
    r"|prompt length .{0,60}exceeds max|should not exceed max_num_tokens|default_max_tokens` \(-?\d+\) should be"
    # llama.cpp
    r"|exceeds? the available context size|context size has been exceeded|input .{0,30}is too large to process",
    re.IGNORECASE,
)

_KEPT_OUT = (401, 403)

TOO_LONG = "context_length_exceeded"
"""OpenAI's code for a prompt that does not fit into the model."""


def is_clients_fault(body: bytes) -> bool:
    """Whether the body of an error, or its beginning, says that the request was at fault."""
    try:
        said = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return _DOES_NOT_FIT.search(body.decode("utf-8", "replace")) is not None
    error = said.get("error", said) if isinstance(said, dict) else said
    if not isinstance(error, dict):
        return isinstance(error, str) and _DOES_NOT_FIT.search(error) is not None
    return _blames_client(error)


def is_busy(body: bytes) -> bool:
    """Whether an error inside a stream says by its code that the engine cannot take more now."""
    try:
        code = msgspec.json.decode(body)["error"]["code"]
    except (msgspec.DecodeError, RecursionError, LookupError, TypeError):
        return False
    return str(code) in ("429", "503")


def blamed(error: UpstreamError) -> UpstreamError:
    """`error`, as the client's if it says that the request does not fit into the model."""
    if error.failure is Failure.ENGINE and error.status >= 500 and _DOES_NOT_FIT.search(error.message):
        return replace(error, status=400, code=TOO_LONG)
    return error


def kept_out(status: int, endpoint: Endpoint, pool: Pool) -> UpstreamError | None:
    """The failure, if by its status an engine refuses the gateway's credentials; not if they are the client's own."""
    credentials = pool.spec.credentials
    if status not in _KEPT_OUT or credentials == "forward":
        return None
    sent = "none" if isinstance(credentials, str) else "those of `replace`"
    message = (
        f"Engine {endpoint.id} answered {status}: it wants other credentials than pool {pool.name} sends ({sent}). "
        "Whoever runs this gateway has to mend its `credentials`."
    )
    return UpstreamError(Failure.ENGINE, message, 502, "engine_credentials")


def _blames_client(error: dict[str, Any]) -> bool:
    if error.get("type") in _TYPES or str(error.get("code")) in _CODES:
        return True
    message = error.get("message", error.get("detail"))
    return isinstance(message, str) and _DOES_NOT_FIT.search(message) is not None
