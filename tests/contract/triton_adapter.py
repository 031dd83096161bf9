"""Asking a Triton adapter and reading what it writes, for the tests of the adapter."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.relay.accounting import Account
from gateway.upstream.base import EngineCall, EngineRequest, ProbeReport
from gateway.upstream.triton.engine import TritonEngine
from router.fleet import Endpoint, EndpointState, Pool
from router.prompt import Api
from router.spec.documents import EndpointFields
from router.spec.fleet import ChatTemplateSpec, PoolSpec, RetentionSpec
from tests.contract.triton_models_server import TritonModels

SCRIPT_TEMPLATE = "{{ bos_token }}{{ messages[-1]['content'] }}"
"""A chat template that hands the last message, the model's script, on as it is."""


@dataclass
class Collected:
    """A sink that keeps every write."""

    writes: list[bytes] = field(default_factory=list)
    chunks: None = None

    def write(self, payload: bytes) -> None:
        self.writes.append(payload)


@dataclass(frozen=True)
class Events:
    """A parsed stream. `text` and `finish` are those of its only choice."""

    chunks: list[dict[str, Any]]
    done: bool

    @classmethod
    def of(cls, stream: bytes) -> "Events":
        assert stream.endswith(b"\n\n")
        payloads = [event.removeprefix(b"data: ") for event in stream[:-2].split(b"\n\n")]
        done = payloads[-1] == b"[DONE]"
        return cls([json.loads(payload) for payload in (payloads[:-1] if done else payloads)], done)

    @property
    def pieces(self) -> list[str]:
        choices = [choice for chunk in self.chunks for choice in chunk["choices"]]
        texts = [choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices]
        return [text for text in texts if text]

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def finish(self) -> str | None:
        reasons: list[str | None] = [choice["finish_reason"] for chunk in self.chunks for choice in chunk["choices"]]
        assert all(reason is None for reason in reasons[:-1])
        return reasons[-1]

    @property
    def usage(self) -> dict[str, Any] | None:
        return next((chunk["usage"] for chunk in self.chunks if chunk.get("usage")), None)


@dataclass
class Adapter:
    """An engine with what its requests need."""

    engine: TritonEngine
    endpoint: Endpoint
    pool: Pool
    account: Account = field(default_factory=lambda: Account(shows_usage=True))
    """That of the last call."""

    async def probe(self) -> ProbeReport:
        return await self.engine.probe(self.pool)

    def call(
        self,
        script: dict[str, Any] | str,
        *,
        api: Api = "completions",
        stream: bool = True,
        include_usage: bool = True,
        retention: RetentionSpec | None = None,
        **body: Any,
    ) -> EngineCall:
        """A call with `script` as prompt or as the only message; `body` holds further parameters."""
        prompt = script if isinstance(script, str) else json.dumps(script)
        asked = {"messages": [{"role": "user", "content": prompt}]} if api == "chat.completions" else {"prompt": prompt}
        fields = {
            name: msgspec.Raw(msgspec.json.encode(value))
            for name, value in {"model": "route", "max_tokens": 10_000, **asked, **body}.items()
        }
        headers = (("x-request-id", "r-1"),)
        self.account = Account(shows_usage=include_usage)
        request = EngineRequest(
            *(api, fields, stream, include_usage, "r-1", headers, self.endpoint, self.pool),
            connect_timeout=self.pool.timeouts.connect,
            account=self.account,
            retention=retention,
        )
        return self.engine.call(request)

    async def events(self, script: dict[str, Any] | str, **options: Any) -> Events:
        """The whole stream of a call."""
        call = self.call(script, **options)
        sink = Collected()
        try:
            head = await call.open()
            assert head.status == 200
            assert head.events
            await call.relay(sink)
        finally:
            call.close()
        return Events.of(b"".join(sink.writes))

    async def whole(self, script: dict[str, Any] | str, **options: Any) -> dict[str, Any]:
        """The JSON of a call that is not streamed."""
        call = self.call(script, stream=False, **options)
        sink = Collected()
        try:
            head = await call.open()
            await call.relay(sink)
        finally:
            call.close()
        body = b"".join(sink.writes)
        assert head.content_length == len(body)
        answer: dict[str, Any] = json.loads(body)
        return answer

    async def inputs(self, **body: Any) -> dict[str, Any]:
        """The tensors that reach the model for these parameters."""
        answer: dict[str, Any] = json.loads((await self.events({"inputs": True}, **body)).text)
        return answer


Adapt = Callable[..., Awaitable[Adapter]]
"""The fixture `adapt`: `adapter` for one server, which closes what it made."""


async def adapter(
    server: TritonModels,
    model: str,
    *,
    metrics: str | None = None,
    stop: tuple[str, ...] = (),
    apis: tuple[str, ...] = ("grpc", "http"),
    **pool: Any,
) -> Adapter:
    """A probed adapter for one model of the server, whose `apis` it knows; `stop` and `pool` are for the
    pool's spec."""
    template = ChatTemplateSpec(text=SCRIPT_TEMPLATE, bos="<s>", stop=list(stop))
    spec = PoolSpec(protocol="triton", model=model, chat_template=template, **pool)
    addresses = {api: getattr(server, api) for api in apis}
    fields = EndpointFields(id="triton-a", pool="p", metrics=metrics or server.metrics, **addresses)
    endpoint = Endpoint("triton-a", "p", fields, EndpointState(), b"triton-a")
    made = Pool.of("p", spec, (endpoint,))
    engine = TritonEngine(endpoint, made)
    report = await engine.probe(made)
    endpoint.state.kv_block_tokens = report.kv_block_tokens
    return Adapter(engine, endpoint, made)
