"""One Triton server as an endpoint: its probes, and what they have found out about its model.

**Probe.** `ServerReady` and `ModelReady`, every time. The model's contract and the size of a KV block are read when
they are not known, and again when the server has been away, because another model repository may have come back.
Triton keeps calling a model ready whose Python process has died; how much the probe believes it, and when it takes a
generated token to do so, is `vitals`' matter.
"""

import asyncio
import itertools
import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import aiohttp
import msgspec

from gateway.chat_template import compile_template
from gateway.upstream.base import EngineCall, EngineRequest, Failure, Headers, ProbeReport, UpstreamError
from gateway.upstream.http_connection import ConnectionPool
from gateway.upstream.triton.call import TritonCall
from gateway.upstream.triton.cancels import Canceller
from gateway.upstream.triton.contract import Contract, ContractError, detect
from gateway.upstream.triton.control import Control, GrpcControl
from gateway.upstream.triton.generate import GenerateCall
from gateway.upstream.triton.generate_form import EventDecoder
from gateway.upstream.triton.http_control import HttpControl
from gateway.upstream.triton.infer import InferMethods
from gateway.upstream.triton.parameters import Parameters
from gateway.upstream.triton.pool_tokenizer import PoolTokenizer
from gateway.upstream.triton.raw import RawTriton
from gateway.upstream.triton.stops import StopTarget, engine_models, is_unique, stop_request, stop_target
from gateway.upstream.triton.tensors import build_request
from gateway.upstream.triton.tokens import TokenizerError
from gateway.upstream.triton.unreadable import CHOICES_IGNORED
from gateway.upstream.triton.vitals import TOKEN_DEADLINE_S, Sign, Vitals
from router.fleet import Endpoint, Pool
from router.spec.units import seconds

_METRICS_TIMEOUT = 1.0
_METRICS_LIMIT = 4 * 1024 * 1024
_TOKENS_PER_BLOCK = re.compile(
    rb'^nv_trt_llm_kv_cache_block_metrics\{[^}\n]*kv_cache_block_type="tokens_per"[^}\n]*\}[ \t]+([0-9.eE+]+)',
    re.MULTILINE,
)
_MOST_REQUESTS = re.compile(
    rb'^nv_trt_llm_request_metrics\{[^}\n]*request_type="max"[^}\n]*\}[ \t]+([0-9.eE+]+)', re.MULTILINE
)


class TritonEngine:
    """A Triton server; see `gateway.upstream.base.Engine`. To be made inside the event loop that uses it."""

    def __init__(self, endpoint: Endpoint, pool: Pool, own: Callable[[], Headers] = tuple) -> None:
        """The view holds no endpoint without the address that its pool needs; `own` gives the headers or metadata of
        what the gateway asks for itself."""
        self._endpoint = endpoint
        self.http = ConnectionPool(endpoint.id, endpoint.spec.http) if endpoint.spec.http is not None else None
        """Connections for requests that come over HTTP."""
        # Request ids come from clients and may repeat; the engine's must not.
        self._instance = os.urandom(4).hex()
        self._attempts = itertools.count()
        self._contract: Contract | None = None
        self._contract_current = False
        self._kv_block_tokens: int | None = None
        self._slots: int | None = None
        self.vitals = Vitals(endpoint.id, asyncio.get_running_loop().time)
        """Whether the model is alive; whoever sends it requests has them listened to."""
        self._canceller = Canceller()
        self._tokenizer = PoolTokenizer()
        self._decoder: EventDecoder | None = None
        self._grpc: GrpcControl | None = None
        self._infer: InferMethods | None = None
        self.raw: RawTriton | None = None
        """The same server for requests that are Triton's own and come over gRPC."""
        self._control: Control
        connect = pool.timeouts.connect
        if endpoint.spec.grpc is not None:
            self._control = self._grpc = GrpcControl(endpoint.id, endpoint.spec.grpc, connect, self._canceller, own)
            self._infer = InferMethods(endpoint.id, endpoint.spec.grpc, connect)
            self.raw = RawTriton(endpoint.id, self._grpc.channel, self._canceller, self.vitals, self._on_failure, own)
        else:
            assert self.http is not None
            self._control = HttpControl(self.http, connect, own)

    def call(self, request: EngineRequest) -> EngineCall:
        attempt_id = f"{request.request_id}.{self._instance}.{next(self._attempts)}"
        contract, codec = self._contract, self._tokenizer.codec
        if request.pool.spec.transport == "http":
            if contract is None or self._decoder is None or self.http is None:
                message = f"Engine {self._endpoint.id} has not been probed yet."
                raise UpstreamError(Failure.BUSY, message, 503, "engine_not_ready")
            return GenerateCall(
                request, contract, codec, attempt_id, self.http, self._decoder,
                self._canceller, self.vitals, self._on_failure,
            )  # fmt: skip
        assert self._infer is not None
        method = self._infer.stream if contract is None or contract.decoupled else self._infer.once
        return TritonCall(request, contract, attempt_id, method, self._canceller, self.vitals, self._on_failure, codec)

    def stop(self, client_id: str) -> None:
        """Tell the engine that nobody waits for a request's answer any more, where its client's id allows it."""
        if is_unique(client_id):
            self._canceller.stop(client_id)

    async def probe(self, pool: Pool) -> ProbeReport:
        model = pool.spec.model
        try:
            if why := await self._control.unready(model):
                return self._not_ready(why)
            contract = self._contract
            if contract is None or not self._contract_current:
                contract = await self._learn(model)
            deadline = min(TOKEN_DEADLINE_S, seconds(pool.spec.probe.timeout) * 0.75)
            if not await self.vitals.alive(lambda: self._generate(contract, deadline)):
                return self._not_ready(_model_died(model))
        except ContractError as error:
            # No OpenAI request can be put to such a model, but KServe's can: they say themselves what it takes.
            if self.vitals.dead:
                self.vitals.loaded(await self._control.failed_ns(model))
            if self.vitals.dead:
                return self._not_ready(_model_died(model))
            return ProbeReport(ready=True, detail=str(error), capabilities=frozenset())
        except (UpstreamError, asyncio.CancelledError):
            self._contract_current = False
            raise
        if pool.spec.transport == "http" and contract.kind == "ensemble":
            detail = (
                f"{contract}; no OpenAI API: over HTTP its text may come cut inside a character, use transport grpc"
            )
            return ProbeReport(ready=True, detail=detail, capabilities=frozenset())
        if contract.kind == "raw" or (contract.kind == "llmapi" and pool.spec.tokenizer is not None):
            try:
                await self._tokenizer.follow(pool)
            except TokenizerError as error:
                if contract.kind == "llmapi":
                    report = self._report(contract, pool)
                    return replace(report, detail=f"{report.detail}; no usage: {error}")
                return ProbeReport(ready=True, detail=f"{contract}; no OpenAI API: {error}", capabilities=frozenset())
        return self._report(contract, pool)

    async def close(self) -> None:
        if self.http is not None:
            self.http.close()
        if self._infer is not None:
            self._infer.close()
        await self._canceller.close()
        await self._control.close()

    def _on_failure(self, error: UpstreamError, process_dead: bool) -> None:
        if error.endpoint_fault:
            self._contract_current = False
        if error.code == CHOICES_IGNORED and self._contract is not None:
            self._contract = self._contract.without_choices()
        self.vitals.failed(error, process_dead=process_dead)

    def _not_ready(self, detail: str) -> ProbeReport:
        self._contract_current = False
        return ProbeReport(False, detail)

    def _report(self, contract: Contract, pool: Pool) -> ProbeReport:
        capabilities = contract.capabilities | {"prompt"}
        detail = str(contract)
        template = pool.spec.chat_template
        if template is not None:
            try:
                compile_template(template.text or "")
            except ValueError as error:
                detail = f"{detail}; no chat: {error}"
            else:
                capabilities |= {"messages", "chat_template_kwargs", "add_generation_prompt"}
        entry = {"id": contract.model, "object": "model", "owned_by": "triton"}
        return ProbeReport(
            ready=True,
            detail=detail,
            capabilities=capabilities,
            kv_block_tokens=self._kv_block_tokens,
            slots=self._slots,
            models=(msgspec.Raw(msgspec.json.encode(entry)),),
        )

    async def _learn(self, model: str) -> Contract:
        """Read the model's contract, the size of a KV block and how many requests the engine takes."""
        described = await self._control.describe(model)
        self._canceller.learn_version(described.server_version)
        contract = detect(described.metadata, described.config)
        await self._learn_stop(contract, described.config)
        if self._endpoint.spec.metrics is not None:
            page = await _scrape(self._endpoint.spec.metrics)
            self._kv_block_tokens = _number(_TOKENS_PER_BLOCK, page)
            self._slots = _number(_MOST_REQUESTS, page)
        self._contract, self._contract_current = contract, True
        self._decoder = EventDecoder(contract)
        return contract

    async def _learn_stop(self, contract: Contract, config: Any) -> None:
        """Find the engine that takes stop requests for the contract's, if there is one."""
        target: StopTarget | None = None
        for name in engine_models(contract, config):
            try:
                described = await self._control.describe(name)
            except UpstreamError:  # a model that is not there is not the engine
                continue
            if (target := stop_target(described.metadata, described.config)) is not None:
                break
        if target is None or self._grpc is None:
            self._canceller.send_stop = None
            return
        send, own, found = self._grpc.send(target.decoupled), self._grpc.own, target

        def send_stop(request_id: str, timeout: float) -> Any:
            return send(stop_request(found, request_id), metadata=own(), timeout=timeout)

        self._canceller.send_stop = send_stop

    async def _generate(self, contract: Contract, deadline: float) -> Sign:
        """Ask the model for one token, for `deadline` seconds."""
        message = build_request(
            contract,
            (0,) if contract.kind == "raw" else "a",
            Parameters(max_tokens=1, stop=(), sampling={}),
            request_id=f"probe.{self._instance}.{next(self._attempts)}",
            stream=False,
            usage=False,
        )
        return await self._control.generate(message, contract.decoupled, deadline)


def _model_died(model: str) -> str:
    return f"the process of model {model!r} has died: unload and load the model"


async def _scrape(url: str) -> bytes:
    """An engine's metrics; empty if they cannot be had: less is then known of the engine."""
    try:
        timeout = aiohttp.ClientTimeout(total=_METRICS_TIMEOUT)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as response:
            page = bytearray()
            async for chunk in response.content.iter_chunked(65536):
                page += chunk
                if len(page) > _METRICS_LIMIT:
                    break
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return b""
    return bytes(page)


def _number(metric: re.Pattern[bytes], page: bytes) -> int | None:
    """The value of a metric, None if it is not there or nothing."""
    found = metric.search(page)
    try:
        return int(float(found[1])) or None if found else None
    except (ValueError, OverflowError):
        return None
