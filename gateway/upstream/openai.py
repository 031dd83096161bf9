"""Engines that speak the OpenAI API themselves: trtllm-serve, vLLM, SGLang, llama.cpp.

Their answers already have the client's wire form, so they are relayed, not read. The request is the client's own with
two values exchanged: `model` becomes the name the engine knows, and a stream is asked for its usage. Nothing of the
client's headers goes along but what the gateway puts there on purpose; credentials never do.

llama.cpp is the one engine that needs help to notice a client that leaves: its server looks at the connection only when
it has something to send, so a long prefill runs to its end for nobody. Asked for `return_progress` it sends an event
for each batch of the prompt; these are dropped here, and leave when the client does.

Errors are answers too, and pass through byte for byte. But what they say decides whether the request is tried elsewhere
and whether it speaks against the engine, so their beginning is looked at: of a 500, and of a stream whose first event
is an error. A 500 that is the client's fault is passed on as a 400, because clients send a 500 again.
"""

import asyncio
import re
from collections.abc import Callable
from typing import Annotated

import msgspec

from gateway.relay.events import event_end
from gateway.relay.http1 import ResponseHead
from gateway.upstream.base import AnswerHead, EngineRequest, Failure, Headers, ProbeReport, UpstreamError
from gateway.upstream.http_call import HttpCall
from gateway.upstream.http_connection import ConnectionPool
from gateway.upstream.http_get import get
from gateway.upstream.opening import Opening
from gateway.upstream.refusals import LOOKED_AT_BYTES, is_busy, is_clients_fault
from router.fleet import Endpoint, Pool
from router.prompt import Api

PATHS: dict[Api, str] = {
    "chat.completions": "/v1/chat/completions",
    "completions": "/v1/completions",
    "embeddings": "/v1/embeddings",
}
PASSED_HEADERS = frozenset({"retry-after", "content-encoding"})
"""What of an engine's response headers the client gets, besides the content type. No coding is asked for, but some
engines send one all the same."""

MODELS_EVERY_S = 60.0
"""How often a healthy engine is asked for its model list again."""
_PROMPTS = ("messages", "prompt", "input")
_LARGE = 16 * 1024
"""Bytes of a prompt from which on copying it costs more than one more piece to write."""
_TRUE = msgspec.Raw(b"true")
_NULL = msgspec.Raw(b"null")
_USAGE_ONLY = msgspec.Raw(b'{"include_usage":true}')
_LLAMA_CPP = "llamacpp"
"""`owned_by` in llama.cpp's model list."""
_PROGRESS_FIELD = b'"prompt_progress":'
"""In the bytes of an event this can only be a field: inside a JSON string its quotes are escaped."""


_ERROR_EVENT = re.compile(rb"""(?:event: ?error\r?\n)?data: ?\{"(?:error"|object": ?"error")""")
"""How a stream begins that is an error."""


class OpenAIEngine:
    """One endpoint with the OpenAI API."""

    def __init__(self, endpoint: Endpoint, pool: Pool, own: Callable[[], Headers] = tuple) -> None:
        """The view holds no endpoint of this protocol without `http`; `own` gives the headers of probes."""
        assert endpoint.spec.http is not None
        self._pool = ConnectionPool(endpoint.id, endpoint.spec.http)
        self._starts = {api: self._start(path) for api, path in PATHS.items()}
        self._model = msgspec.Raw(msgspec.json.encode(pool.spec.model))
        self._models: tuple[msgspec.Raw, ...] = ()
        self._models_read = float("-inf")
        self._own = own
        self._llama_cpp = False
        self._slots: int | None = None

    def _start(self, path: str) -> bytes:
        """What the head of every request to `path` begins with."""
        lines = (
            f"POST {self._pool.path}{path} HTTP/1.1",
            f"host: {self._pool.host_header}",
            "content-type: application/json",
            "accept-encoding: identity",
            "",
        )
        return "\r\n".join(lines).encode("latin-1")

    def call(self, request: EngineRequest) -> "OpenAICall":
        fields = {**request.body, "model": self._model}
        if request.stream and not request.include_usage:
            fields["stream_options"] = _with_usage(fields.get("stream_options"))
        asks_progress = self._llama_cpp and request.stream and "return_progress" not in fields
        if asks_progress:
            fields["return_progress"] = _TRUE
        body = _body(fields)
        given = "".join([f"{name}: {value}\r\n" for name, value in request.headers]).encode("latin-1")
        head = b"%b%bcontent-length: %d\r\n\r\n" % (self._starts[request.api], given, sum(map(len, body)))
        opening = Opening(_is_progress if asks_progress else None, holds_head=request.stream)
        return OpenAICall(self._pool, (head, *body), request.connect_timeout, opening, request.account)

    async def probe(self, pool: Pool) -> ProbeReport:
        """Ask `/health`, which every one of these engines has, and now and then for the models."""
        connect = pool.timeouts.connect
        try:
            status, _ = await get(self._pool, "/health", connect, self._own())
            if status in (404, 405, 501):
                status, _ = await get(self._pool, "/v1/models", connect, self._own())
            if status != 200:
                self._models_read = float("-inf")
                return ProbeReport(ready=False, detail=f"its health check answers {status}")
            now = asyncio.get_running_loop().time()
            if now - self._models_read > MODELS_EVERY_S:
                self._models = await self._list_models(connect)
                self._slots = await self._count_slots(connect) if self._llama_cpp else None
                self._models_read = now
        except UpstreamError:
            self._models_read = float("-inf")
            raise
        return ProbeReport(ready=True, detail="ready", slots=self._slots, models=self._models)

    async def _list_models(self, connect: float) -> tuple[msgspec.Raw, ...]:
        status, body = await get(self._pool, "/v1/models", connect, self._own())
        if status != 200:
            return ()
        try:
            entries = msgspec.json.decode(body, type=_ModelList).data
        except (msgspec.DecodeError, RecursionError):
            return ()
        models = tuple(raw for raw in entries if _is_sound(raw))
        self._llama_cpp = any(msgspec.json.decode(raw, type=_Model).owned_by == _LLAMA_CPP for raw in models)
        return models

    async def _count_slots(self, connect: float) -> int | None:
        """How many requests llama.cpp works on at a time."""
        status, body = await get(self._pool, "/props", connect, self._own())
        if status != 200:
            return None
        try:
            return msgspec.json.decode(body, type=_Props).total_slots or None
        except (msgspec.MsgspecError, RecursionError):
            return None

    async def close(self) -> None:
        self._pool.close()


class OpenAICall(HttpCall):
    """One request to an engine with the OpenAI API."""

    __slots__ = ()

    async def open(self) -> AnswerHead:
        """The head of the engine's answer; an engine's own error is an answer like any other."""
        head = await self.send()
        status, fault = head.status, None
        if status >= 429:
            fault = await self._fault(head)
            if status == 500 and fault is None:
                status = 400
        elif head.events:
            fault = self._fault_in_stream()
        headers = tuple((name, value) for name, value in head.headers if name in PASSED_HEADERS)
        content_type = head.header("content-type") or "application/octet-stream"
        length = None if head.events else head.content_length  # events may be left out, and an error be added
        return AnswerHead(status, content_type, headers, length, events=head.events, fault=fault)

    async def _fault(self, head: ResponseHead) -> UpstreamError | None:
        """The failure that an answer with an error's status tells of; None for one that is the client's."""
        engine = self._pool.endpoint
        if head.status in (429, 503):
            message = f"Engine {engine} cannot take more now."
            return UpstreamError(Failure.BUSY, message, head.status, "engine_busy")
        if head.status in (502, 504):
            message = f"What stands in front of engine {engine} answered {head.status}."
            return UpstreamError(Failure.LOST_BEFORE_ANSWER, message, head.status, "engine_lost")
        if head.status != 500 or is_clients_fault(await self.read_ahead(LOOKED_AT_BYTES)):
            return None
        return UpstreamError(Failure.INTERNAL, f"Engine {engine} answered 500.", 500, "engine_error")

    def _fault_in_stream(self) -> UpstreamError | None:
        """The failure that a stream tells of in its first event, as far as that has been read."""
        read = self._opening.content
        if _ERROR_EVENT.match(read) is None:
            return None
        end = event_end(read)
        if not end:
            return None  # half an error does not tell whose fault it is
        error = read[read.find(b"{") : end].rstrip()
        if is_clients_fault(error):
            return None
        engine = self._pool.endpoint
        if is_busy(error):
            return UpstreamError(Failure.BUSY, f"Engine {engine} cannot take more now.", 503, "engine_busy")
        message = f"Engine {engine} ended its stream with an error before any content."
        return UpstreamError(Failure.LOST_BEFORE_ANSWER, message, 502, "engine_lost")


class _ModelList(msgspec.Struct):
    data: list[msgspec.Raw]


class _Props(msgspec.Struct):
    total_slots: Annotated[int, msgspec.Meta(ge=0)] | None = None


class _Model(msgspec.Struct):
    owned_by: str | None = None


def _is_sound(entry: msgspec.Raw) -> bool:
    """Whether an entry can be shown to clients among others."""
    try:
        msgspec.json.decode(entry, type=_Model)
        msgspec.json.encode(msgspec.json.decode(entry, type=dict[str, object]))
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError):
        return False
    return True


def _body(fields: dict[str, msgspec.Raw]) -> tuple[bytes | memoryview, ...]:
    """The JSON object of `fields` in pieces: a large prompt is sent from where it was received, not copied."""
    large: dict[str, msgspec.Raw] = {}
    for name in _PROMPTS:
        raw = fields.get(name)
        if raw is not None and memoryview(raw).nbytes > _LARGE:
            large[name] = raw
    if not large:
        return (msgspec.json.encode(fields),)
    small = msgspec.json.encode({name: raw for name, raw in fields.items() if name not in large})
    pieces: list[bytes | memoryview] = [small[:-1]]
    for name, raw in large.items():
        pieces += (b',"%b":' % name.encode(), memoryview(raw))
    return (*pieces, b"}")


def _with_usage(options: msgspec.Raw | None) -> msgspec.Raw:
    """Stream options that ask for usage besides what the client asked for."""
    if options is None or options == _NULL:
        return _USAGE_ONLY
    asked = msgspec.json.decode(options, type=dict[str, msgspec.Raw])
    return msgspec.Raw(msgspec.json.encode({**asked, "include_usage": True}))


def _is_progress(event: bytes) -> bool:
    return _PROGRESS_FIELD in event
