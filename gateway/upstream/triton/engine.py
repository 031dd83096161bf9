"""One Triton server as an endpoint: its channel, its probes, and what they have found out about its model.

**Probe.** `ServerReady` and `ModelReady`, every time. The model's contract and the size of a KV block are read when
they are not known, and again when the server has been away, because another model repository may have come back.
Triton keeps calling a model ready whose Python process has died; how much the probe believes it, and when it takes a
generated token to do so, is `vitals`' matter.

**Channel.** One connection per endpoint, not shared with other channels. It pings nothing: Triton answers pings on an
idle connection with GOAWAY. Calls fail at once while the server is down, and reconnecting is tried at least once a
second, so that an endpoint is back soon after its server is. gRPC's own retries are off: whether a request may run
twice is decided by dispatch.

**RPC.** A model that may answer with many messages is called with `ModelStreamInfer`, any other with `ModelInfer`,
whose errors have a status without `triton_grpc_error`: with that, Triton 2.51 was seen to crash on errors of such
models.
"""

import asyncio
import itertools
import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import aiohttp
import grpc
import msgspec
from tritonclient.grpc import service_pb2, service_pb2_grpc

from gateway.chat_template import compile_template
from gateway.upstream.base import EngineRequest, Failure, ProbeReport, UpstreamError
from gateway.upstream.http_connection import ConnectionPool
from gateway.upstream.triton.call import TritonCall, seen
from gateway.upstream.triton.cancels import Canceller
from gateway.upstream.triton.contract import Contract, ContractError, detect
from gateway.upstream.triton.failures import from_status, is_stub_death
from gateway.upstream.triton.parameters import Parameters
from gateway.upstream.triton.pool_tokenizer import PoolTokenizer
from gateway.upstream.triton.raw import RawTriton
from gateway.upstream.triton.stops import StopTarget, engine_models, stop_request, stop_target
from gateway.upstream.triton.tensors import build_request
from gateway.upstream.triton.tokens import TokenizerError
from gateway.upstream.triton.vitals import TOKEN_DEADLINE_S, Sign, Vitals
from router.fleet import Endpoint, Pool
from router.spec.units import seconds

_INT32_MAX = 2**31 - 1
_RECONNECT_MS = 1000
_METRICS_TIMEOUT = 1.0
_METRICS_LIMIT = 4 * 1024 * 1024
_TOKENS_PER_BLOCK = re.compile(
    rb'^nv_trt_llm_kv_cache_block_metrics\{[^}\n]*kv_cache_block_type="tokens_per"[^}\n]*\}[ \t]+([0-9.eE+]+)',
    re.MULTILINE,
)


class TritonEngine:
    """A Triton server; see `gateway.upstream.base.Engine`. To be made inside the event loop that uses it."""

    def __init__(self, endpoint: Endpoint, pool: Pool) -> None:
        """The view holds no endpoint of this protocol without `grpc`."""
        assert endpoint.spec.grpc is not None
        self._endpoint = endpoint
        self.http = ConnectionPool(endpoint.id, endpoint.spec.http) if endpoint.spec.http is not None else None
        """Connections for requests that come over HTTP."""
        self._channel = grpc.aio.insecure_channel(
            endpoint.spec.grpc,
            options=[
                ("grpc.max_send_message_length", _INT32_MAX),
                ("grpc.max_receive_message_length", _INT32_MAX),
                ("grpc.enable_retries", 0),
                ("grpc.enable_http_proxy", 0),
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.max_reconnect_backoff_ms", _RECONNECT_MS),
                # The smallest time a connection attempt is given, which with these back-offs is the time it is given.
                ("grpc.min_reconnect_backoff_ms", max(_RECONNECT_MS, int(pool.timeouts.connect * 1000))),
            ],
        )
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        serialize = service_pb2.ModelInferRequest.SerializeToString
        service = "/inference.GRPCInferenceService/"
        self._infer_stream = self._channel.unary_stream(
            service + "ModelStreamInfer", serialize, service_pb2.ModelStreamInferResponse.FromString
        )
        self._infer_once = self._channel.unary_stream(service + "ModelInfer", serialize, _only_response)
        # Request ids come from clients and may repeat; the engine's must not.
        self._instance = os.urandom(4).hex()
        self._attempts = itertools.count()
        self._contract: Contract | None = None
        self._contract_current = False
        self._kv_block_tokens: int | None = None
        self.vitals = Vitals(endpoint.id, asyncio.get_running_loop().time)
        """Whether the model is alive; whoever sends it requests has them listened to."""
        self._canceller = Canceller()
        self._tokenizer = PoolTokenizer()
        self.raw = RawTriton(endpoint.id, self._channel, self._canceller, self._on_failure)
        """The same server for requests that are Triton's own."""

    def call(self, request: EngineRequest) -> TritonCall:
        attempt_id = f"{request.request_id}.{self._instance}.{next(self._attempts)}"
        send = self._send(self._contract)
        return TritonCall(
            request, self._contract, attempt_id, send,
            self._canceller, self.vitals, self._on_failure, self._tokenizer.codec,
        )  # fmt: skip

    async def probe(self, pool: Pool) -> ProbeReport:
        model = pool.spec.model
        try:
            if not (await self._stub.ServerReady(service_pb2.ServerReadyRequest())).ready:
                return self._not_ready("the server is not ready")
            if not (await self._stub.ModelReady(service_pb2.ModelReadyRequest(name=model))).ready:
                return self._not_ready(f"model {model!r} is not ready")
            contract = self._contract
            if contract is None or not self._contract_current:
                contract = await self._learn(model)
            deadline = min(TOKEN_DEADLINE_S, seconds(pool.spec.probe.timeout) * 0.75)
            if not await self.vitals.alive(lambda: self._generate(contract, deadline)):
                return self._not_ready(f"the process of model {model!r} has died: unload and load the model")
        except ContractError as error:
            # No OpenAI request can be put to such a model, but KServe's can: they say themselves what it takes.
            return ProbeReport(ready=True, detail=str(error), capabilities=frozenset())
        except grpc.aio.AioRpcError as error:
            self._contract_current = False
            raise from_status(error.code(), error.details(), endpoint=self._endpoint.id, received=False) from None
        except (asyncio.CancelledError, grpc.aio.UsageError):
            # A closed channel cancels its calls and refuses new ones; only a cancelled task may end as one.
            self._contract_current = False
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise UpstreamError(Failure.CONNECT, f"Engine {self._endpoint.id} has left the fleet.") from None
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
        await self._canceller.close()
        await self._channel.close()

    def _send(self, contract: Contract | None) -> Callable[..., Any]:
        once = contract is not None and not contract.decoupled
        send: Callable[..., Any] = self._infer_once if once else self._infer_stream
        return send

    def _on_failure(self, error: UpstreamError, process_dead: bool) -> None:
        if error.endpoint_fault:
            self._contract_current = False
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
            models=(msgspec.Raw(msgspec.json.encode(entry)),),
        )

    async def _learn(self, model: str) -> Contract:
        """Read the model's contract and the size of a KV block."""
        server = await self._stub.ServerMetadata(service_pb2.ServerMetadataRequest())
        self._canceller.learn_version(server.version)
        metadata = await self._stub.ModelMetadata(service_pb2.ModelMetadataRequest(name=model))
        config = await self._stub.ModelConfig(service_pb2.ModelConfigRequest(name=model))
        contract = detect(metadata, config.config)
        await self._learn_stop(contract, config.config)
        if self._endpoint.spec.metrics is not None:
            self._kv_block_tokens = await _scrape_block_tokens(self._endpoint.spec.metrics)
        self._contract, self._contract_current = contract, True
        return contract

    async def _learn_stop(self, contract: Contract, config: Any) -> None:
        """Find the engine that takes stop requests for the contract's, if there is one."""
        target: StopTarget | None = None
        for name in engine_models(contract, config):
            try:
                metadata = await self._stub.ModelMetadata(service_pb2.ModelMetadataRequest(name=name))
                engine = await self._stub.ModelConfig(service_pb2.ModelConfigRequest(name=name))
            except grpc.aio.AioRpcError:  # a model that is not there is not the engine
                continue
            if (target := stop_target(metadata, engine.config)) is not None:
                break
        if target is None:
            self._canceller.send_stop = None
            return
        send, found = self._infer_stream if target.decoupled else self._infer_once, target

        def send_stop(request_id: str, timeout: float) -> Any:
            return send(stop_request(found, request_id), timeout=timeout)

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
        rpc = self._send(contract)(message, metadata=(("triton_grpc_error", "true"),))
        # A task of its own: gRPC cancels the RPC of a read that is cancelled, before it is the cancel's turn.
        reading = asyncio.ensure_future(self._read_token(rpc))
        reading.add_done_callback(seen)
        try:
            await asyncio.wait((reading,), timeout=deadline)
            return reading.result() if reading.done() else Sign.NOTHING
        finally:
            self._canceller.cancel(rpc)

    async def _read_token(self, rpc: Any) -> Sign:
        try:
            while (response := await rpc.read()) is not grpc.aio.EOF:
                if is_stub_death(response.error_message):
                    return Sign.DEAD
        except grpc.aio.AioRpcError as error:
            if is_stub_death(error.details()):
                return Sign.DEAD
            judged = from_status(error.code(), error.details(), endpoint=self._endpoint.id, received=False)
            if judged.endpoint_fault:
                raise judged from None
        return Sign.TOKEN


def _only_response(message: bytes) -> Any:
    """ModelInfer's response, as the last message of a stream."""
    response = service_pb2.ModelStreamInferResponse()
    response.infer_response.MergeFromString(message)
    response.infer_response.parameters["triton_final_response"].bool_param = True
    return response


async def _scrape_block_tokens(url: str) -> int | None:
    """`tokens_per` of TensorRT-LLM's KV block metrics, None if they cannot be had: usage then has less to tell."""
    try:
        timeout = aiohttp.ClientTimeout(total=_METRICS_TIMEOUT)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as response:
            page = bytearray()
            async for chunk in response.content.iter_chunked(65536):
                page += chunk
                if len(page) > _METRICS_LIMIT:
                    break
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return None
    found = _TOKENS_PER_BLOCK.search(page)
    try:
        return int(float(found[1])) or None if found else None
    except (ValueError, OverflowError):
        return None
