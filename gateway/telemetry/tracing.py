"""Traces over OTLP: which requests are recorded, the spans they become, and how those leave.

**Sampling** is decided at the head and costs the requests that are not recorded one look: a request of a trace that its
client records is recorded, too, and none of a trace that it does not; of the others, a share. Clients can thereby have
recorded what they like, so not more than `MOST_FOLLOWED` a second are. Whatever is decided, `traceparent` goes on to
the engine.

**Spans** are made when the request has ended, from the times that were written down on its way
(`gateway.telemetry.trace`). That takes a fraction of what starting and ending them one by one does, and nothing happens
between two tokens. They follow OpenTelemetry's conventions for HTTP, RPC and generative AI; `server.address` is the
endpoint's id.

**Export** is the SDK's: its batch processor's thread encodes and sends. At most `MOST_WAITING` spans wait for it; while
the collector is away, what is more than that is dropped, whole traces at a time, and counted. The exporters read what
else there is to say (headers, certificates, timeouts, the service's name) from the `OTEL_` variables.

This module is imported only where traces are wanted: what it needs takes a fraction of a second.
"""

import asyncio
import contextlib
import logging
import random
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from gateway.telemetry.record import Record
from gateway.telemetry.trace import AttemptSpan, Trace, read_parent
from router.spec.gateway import TracingSpec
from router.spec.units import share

if TYPE_CHECKING:
    from gateway.exchange import Exchange

MOST_FOLLOWED = 100
"""Requests a second that are recorded because their clients record them."""
MOST_WAITING = 2048
"""Spans that may wait to be exported."""
_BATCH = 512
"""Spans that are exported together at most."""
_LAST_SPANS_S = 3.0
"""How long the last spans have when the gateway stops."""
_COMPLAINT_EVERY_S = 60.0
_TRACES_PATH = "/v1/traces"
_MEMBER = re.compile(r"[a-z][a-z0-9_*/-]{0,255}=[ -+\--<>-~]{0,255}[!-+\--<>-~]")
"""An entry of `tracestate` as the SDK takes it, without the form of its key that has two parts."""
_MOST_MEMBERS = 32

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSET, _ERROR = Status(StatusCode.UNSET), Status(StatusCode.ERROR)
_SCOPE = InstrumentationScope("headrace", version("headrace"))
_OPERATIONS = {"chat.completions": "chat", "completions": "text_completion", "embeddings": "embeddings"}
"""The names that the conventions have for them."""

Attributes = dict[str, str | int | float | bool | Sequence[str]]


class Tracing:
    """Records requests of one process. Made in the event loop that it is used in."""

    def __init__(self, spec: TracingSpec, fleet: str, count: Callable[[str, int], None]) -> None:
        """`count` is told how many spans more were `exported`, `failed` or `dropped`."""
        self._share = share(spec.sample)
        self._count = count
        self._resource = Resource.create(
            {
                "service.name": "headrace",
                "service.namespace": fleet,
                "service.version": version("headrace"),
                "service.instance.id": str(uuid.uuid4()),
            }
        ).merge(OTELResourceDetector().detect())  # what the environment says comes first
        self._exporter = _Counted(_exporter(spec), asyncio.get_running_loop(), count)
        self._batches = BatchSpanProcessor(
            self._exporter, max_queue_size=MOST_WAITING, max_export_batch_size=min(_BATCH, MOST_WAITING)
        )
        self._given = 0
        self._second = 0.0
        self._followed = 0

    def begin(self, headers: Mapping[str, str], now: float) -> Trace | None:
        """The trace of a request that is recorded, None of one that is not; `now` is the loop's time."""
        given = headers.get("traceparent")
        parent = read_parent(given, headers.get("tracestate", "")) if given else None
        if parent is None:
            return Trace(None) if random.random() < self._share else None
        if not parent.sampled:
            return None
        if now - self._second >= 1:
            self._second, self._followed = now, 0
        self._followed += 1
        return Trace(parent) if self._followed <= MOST_FOLLOWED else None

    def end(
        self,
        trace: Trace,
        record: Record,
        exchange: "Exchange",
        api: str | None,
        status: int,
        ttft: float | None,
    ) -> None:
        """Have a request's spans exported, soon."""
        spans = self._spans(trace, record, exchange, api, status, ttft)
        if self._given - self._exporter.taken + len(spans) > MOST_WAITING:
            self._count("dropped", len(spans))
            return
        self._given += len(spans)
        for span in spans:
            self._batches.on_end(span)

    async def close(self) -> None:
        """Export what there is, if it can be in time."""
        done = asyncio.Event()
        loop = asyncio.get_running_loop()

        def shut_down() -> None:
            self._batches.shutdown()  # type: ignore[no-untyped-call]
            with contextlib.suppress(RuntimeError):  # nobody waits any more
                loop.call_soon_threadsafe(done.set)

        threading.Thread(target=shut_down, name="last spans", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_SPANS_S):
                await done.wait()

    def _spans(
        self,
        trace: Trace,
        record: Record,
        exchange: "Exchange",
        api: str | None,
        status: int,
        ttft: float | None,
    ) -> list[ReadableSpan]:
        """The request's own span, and under it those of what was done for it."""
        now = trace.end_attempt()
        state = _state(trace.parent.state) if trace.parent is not None else TraceState()

        def context(span_id: int, *, remote: bool = False) -> SpanContext:
            return SpanContext(trace.trace_id, span_id, remote, _SAMPLED, state)

        def span(
            name: str,
            began: float,
            ended: float,
            attributes: Attributes,
            *,
            span_id: int = 0,
            kind: SpanKind = SpanKind.INTERNAL,
            failed: bool = False,
            events: Sequence[Event] = (),
        ) -> ReadableSpan:
            return ReadableSpan(
                name,
                context(span_id or random.getrandbits(64) or 1),
                parent if kind is SpanKind.SERVER else own,
                self._resource,
                attributes,
                events,
                kind=kind,
                status=_ERROR if failed else _UNSET,
                start_time=trace.at(began),
                end_time=trace.at(ended),
                instrumentation_scope=_SCOPE,
            )

        parent = context(trace.parent.span_id, remote=True) if trace.parent is not None else None
        own = context(trace.span_id)
        operation = _OPERATIONS.get(api or "")
        answer = _answer(exchange)
        attributes = {**_request(record, status), **_model(operation, exchange.route), **answer}
        if exchange.tenant:
            attributes["headrace.tenant"] = exchange.tenant
        failed = bool(record.code) or status >= 500
        if failed:
            attributes["error.type"] = record.code or str(status)
        spans = [
            span(
                _name(record),
                exchange.started,
                now,
                attributes,
                span_id=trace.span_id,
                kind=SpanKind.SERVER,
                failed=failed and (status >= 500 or status < 400),
            )
        ]
        if trace.decided is not None:
            spans.append(span("decision", *trace.decided, {}))
        if trace.wait_began:
            place: Attributes = {"headrace.queue.position": exchange.position}
            spans.append(span("queue", trace.wait_began, trace.wait_ended or now, place))
        for number, one in enumerate(trace.attempts, 1):
            last = number == len(trace.attempts)
            attributes = _attempt(one, number, operation)
            error = one.failed or (str(status) if last and status >= 400 and not record.code else "")
            events = []
            if last:
                attributes |= answer
                if ttft is not None:
                    events.append(Event("first token", timestamp=trace.at(max(exchange.started + ttft, one.began))))
            if error:
                attributes["error.type"] = error
            name = f"{operation or 'infer'} {one.attempt.pool.spec.model}"
            spans.append(
                span(
                    name,
                    one.began,
                    one.ended,
                    attributes,
                    span_id=one.span_id,
                    kind=SpanKind.CLIENT,
                    failed=bool(error),
                    events=events,
                )
            )
        return spans


def _state(header: str) -> TraceState:
    """A `tracestate`; empty if it is not one: the SDK would log what is wrong with it, however often a client asks."""
    members = [member.strip(" \t") for member in header.split(",")] if header else []
    if len(members) > _MOST_MEMBERS or not all(_MEMBER.fullmatch(member) for member in members):
        return TraceState()
    return TraceState(list(dict(member.split("=", 1) for member in members).items()))


def _name(record: Record) -> str:
    """Of a request's own span: of few values, whatever paths clients ask for."""
    if record.rpc:
        return record.path[1:]
    return f"{record.method} {record.path}" if record.path.startswith("/v1/") else f"{record.method} /v2"


def _request(record: Record, status: int) -> Attributes:
    if record.rpc:
        return {
            "rpc.system": "grpc",
            "rpc.service": record.path[1:].partition("/")[0],
            "rpc.method": record.path[1:].partition("/")[2],
            "headrace.request_id": record.request_id,
        }
    return {
        "http.request.method": record.method,
        "http.response.status_code": status,
        "url.path": record.path,
        "headrace.request_id": record.request_id,
    }


def _model(operation: str | None, model: str) -> Attributes:
    attributes: Attributes = {}
    if operation is not None:
        attributes["gen_ai.operation.name"] = operation
    if model:
        attributes["gen_ai.request.model"] = model
    return attributes


def _attempt(one: AttemptSpan, number: int, operation: str | None) -> Attributes:
    attempt = one.attempt
    return {
        **_model(operation, attempt.pool.spec.model),
        "gen_ai.provider.name": attempt.pool.spec.protocol,
        "server.address": attempt.endpoint.id,
        "headrace.pool": attempt.endpoint.pool,
        "headrace.reason": attempt.reason,
        "headrace.attempt": number,
    }


def _answer(exchange: "Exchange") -> Attributes:
    """What an answer says about itself."""
    account = exchange.account
    attributes: Attributes = {}
    if account is None:
        return attributes
    if account.prompt_tokens:
        attributes["gen_ai.usage.input_tokens"] = account.prompt_tokens
        attributes["gen_ai.usage.cache_read.input_tokens"] = account.cached_tokens
        attributes["gen_ai.usage.output_tokens"] = account.completion_tokens
    if account.finish_reason:
        attributes["gen_ai.response.finish_reasons"] = (account.finish_reason,)
    return attributes


class _Counted(SpanExporter):
    """An exporter, and what became of the spans it was given. Called in the batch processor's thread."""

    def __init__(
        self, exporter: SpanExporter, loop: asyncio.AbstractEventLoop, count: Callable[[str, int], None]
    ) -> None:
        self._exporter = exporter
        self._loop = loop
        self._count = count
        self.taken = 0
        """Spans that do not wait any more."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._exporter.export(spans)
        finally:
            self.taken += len(spans)
        outcome = "exported" if result is SpanExportResult.SUCCESS else "failed"
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._count, outcome, len(spans))
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class _Seldom(logging.Filter):
    """Lets a line through once a minute: a collector that is away is worth no more."""

    def __init__(self) -> None:
        super().__init__()
        self._last = float("-inf")

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now - self._last < _COMPLAINT_EVERY_S:
            return False
        self._last = now
        return True


def _exporter(spec: TracingSpec) -> SpanExporter:
    """One for the protocol; without an endpoint, it goes where the environment says."""
    endpoint = spec.endpoint.rstrip("/") if spec.endpoint is not None else None
    if spec.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import exporter as module
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        logging.getLogger(module.__name__).addFilter(_Seldom())
        return GrpcExporter(endpoint)
    from opentelemetry.exporter.otlp.proto.http import trace_exporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    logging.getLogger(trace_exporter.__name__).addFilter(_Seldom())
    if endpoint is not None and not endpoint.endswith(_TRACES_PATH):
        endpoint += _TRACES_PATH
    return HttpExporter(endpoint)
