"""Getting a Triton to answer a request of its HTTP API: what is sent, and where else it may be tried.

A request is tried at the next endpoint as long as nothing of it but what was read ahead has been sent. Besides the
failures of any engine, Triton's own refusals count that another replica need not share: it is full (503).
"""

from dataclasses import dataclass

from gateway.dispatch import MAX_ATTEMPTS, Engines, first_willing
from gateway.exchange import Exchange
from gateway.http.errors import as_api_error
from gateway.http.kserve_paths import ModelPath
from gateway.http.request_body import RequestBody
from gateway.relay.http1 import ResponseHead
from gateway.upstream.base import Engine, Failure, UpstreamError
from gateway.upstream.http_upload import HttpUpload
from gateway.upstream.triton.engine import TritonEngine
from router.plan import Attempt, Plan

_KEPT_LIMIT = 4 * 1024 * 1024


@dataclass(slots=True, frozen=True)
class Sending:
    """A request as it goes to an engine."""

    path: ModelPath
    method: str
    request_id: str
    headers: list[str]
    """Header lines of the client's that go along."""
    start: bytes
    """The body, as far as it has been read ahead."""
    body: RequestBody | None
    """Where the rest comes from; None without a body."""

    @property
    def whole(self) -> bool:
        """Whether `start` is the whole body."""
        return self.body is None or (self.body.size == len(self.start) and self.body.ended)

    @property
    def repeatable(self) -> bool:
        """Whether it can be sent again: nothing has been read but `start`."""
        return self.body is None or self.body.size == len(self.start)


@dataclass(slots=True, frozen=True)
class Answer:
    """An answer that a Triton has committed to."""

    attempt: Attempt
    head: ResponseHead
    call: HttpUpload


class Kept:
    """A sink that keeps a small body whole."""

    verbatim = False

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self._size = 0

    def write(self, payload: bytes) -> None:
        self._size += len(payload)
        if self._size > _KEPT_LIMIT:
            raise UpstreamError(Failure.PROTOCOL, f"An engine answered with more than {_KEPT_LIMIT} bytes.")
        self.pieces.append(payload)

    def write_chunks(self, framed: bytes) -> None:
        raise NotImplementedError


async def open_answer(exchange: Exchange, plan: Plan, sending: Sending, engines: Engines) -> Answer:
    """The answer of the first endpoint of `plan` that gives one; every endpoint of it has an HTTP address.

    Raises the last UpstreamError, or ApiError for one that cannot be tried elsewhere or for a body that ends early.
    """
    last = plan.attempts[:MAX_ATTEMPTS][-1]

    async def send(attempt: Attempt, engine: Engine) -> Answer:
        assert isinstance(engine, TritonEngine)
        call = _call(exchange, attempt, engine, sending)
        exchange.call = call
        try:
            head = await call.send()
        except UpstreamError as error:
            if sending.repeatable:
                raise
            engines.failed(attempt.endpoint, error)
            raise as_api_error(error) from None
        if head.status == 503 and attempt is not last and sending.repeatable:
            raise UpstreamError(Failure.BUSY, f"Engine {attempt.endpoint.id} cannot take more now.", 503)
        return Answer(attempt, head, call)

    return await first_willing(exchange, plan, engines, sending.request_id, send)


def _call(exchange: Exchange, attempt: Attempt, engine: TritonEngine, sending: Sending) -> HttpUpload:
    pool = engine.http
    assert pool is not None
    start, rest = sending.start, None if sending.whole else sending.body
    chunked = rest is not None and rest.length is None
    lines = [
        f"{sending.method} {sending.path.at(pool.path, attempt.pool.spec.model)} HTTP/1.1",
        f"host: {pool.host_header}",
        f"x-request-id: {sending.request_id}",
        *sending.headers,
    ]
    if chunked:
        lines.append("transfer-encoding: chunked")
        start = b"%x\r\n%b\r\n" % (len(start), start) if start else b""
    elif sending.method != "GET":
        lines.append(f"content-length: {len(start) if rest is None else rest.length}")
    head = "\r\n".join([*lines, "", ""]).encode("latin-1")
    return HttpUpload(
        pool, (head, start), rest, attempt.pool.timeouts.connect, chunked=chunked, sent=exchange.still_sending
    )
