"""The client is gone: what stops, and when, for every API, TensorRT-LLM contract and phase, on a real Triton.

`MATRIX` is the table and `docs/triton.md` says the same. In each cell a client leaves, the gateway has forgotten it at
once, and the model itself counts that it was told: within 2 s, or, where Triton does not let it know, no sooner and no
later than the cell says. Requests carry a UUID as their id, as clients should that want to be stopped.

Cells are run one by one: a Triton of this version can crash over cancels that come at the same time.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest
import pytest_asyncio

from router.spec.fleet import ChatTemplateSpec, EndpointSpec, FleetSpec, PoolSpec, RouteSpec, TokenizerSpec
from router.spec.gateway import GatewaySpec
from tests.contract.grpc_front import channel, stub
from tests.contract.leaving_client import OPENAI, PHASES, STREAMED, Api, Asking, Contract, Phase, Script
from tests.contract.triton_adapter import SCRIPT_TEMPLATE
from tests.contract.triton_models_server import TritonModels, triton_models
from tests.harness import FAST_PROBES, RunningGateway, running_gateway
from tests.tokenizer import byte_level

PROMISE_S = 2.0
SETUP_S = 20.0
WHILE_S = 0.3
"""How long is looked on where nothing happens."""


class Outcome(Enum):
    CANCELS = "the model sees the cancel within 2 s"
    STOPS = "the model is stopped by the request's id within 2 s"
    BOTH = "both"
    FIRST_TOKEN = "the model sees the cancel when it sends its first token"
    DROPPED = "when its turn comes, Triton drops the request and counts that itself"
    NEVER = "the model works to the end"


CONTRACTS = {
    "ensemble": Contract("steps", "steps", "raw_step"),
    "ensemble-whole": Contract("ensemble_whole", "text", decoupled=False),
    "bls": Contract("tensorrt_llm_bls", "text"),
    "raw": Contract("raw", "ids"),
    "raw-whole": Contract("raw_whole", "ids", decoupled=False),
    "raw-http": Contract("raw", "ids", transport="http"),
    "llmapi": Contract("llmapi", "llmapi"),
    "llmapi-http": Contract("llmapi", "llmapi", transport="http"),
}
"""By route. The `whole` ones answer once; only their requests may be unary. `ensemble-whole` is one model with
an ensemble's tensors that takes one request after another, so what comes meanwhile waits in Triton's queue; the rest
queue for themselves, as TensorRT-LLM does. A transport concerns OpenAI requests alone."""

C, S, B, F, D, N = (
    Outcome.CANCELS, Outcome.STOPS, Outcome.BOTH, Outcome.FIRST_TOKEN, Outcome.DROPPED, Outcome.NEVER,
)  # fmt: skip
MATRIX: dict[str, dict[tuple[Api, ...], tuple[Outcome, Outcome, Outcome]]] = {
    # route, APIs:                                        queued, prefill, decode
    "ensemble": {(*OPENAI, "grpc stream", "generate_stream", "generate"): (S, S, S)},
    "ensemble-whole": {
        (*OPENAI, "grpc stream", "grpc unary"): (D, C, C),
        ("generate_stream", "infer"): (N, N, N),
    },
    "bls": {
        (*OPENAI, "grpc stream"): (C, C, C),
        ("generate_stream",): (F, F, C),
        ("generate",): (N, N, N),
    },
    "raw": {
        (*OPENAI, "grpc stream"): (B, B, B),
        ("generate_stream", "generate"): (S, S, S),
    },
    "raw-whole": {
        (*OPENAI, "grpc stream", "grpc unary"): (B, B, B),
        ("generate_stream", "infer"): (S, S, S),
    },
    "raw-http": {OPENAI: (S, S, S)},
    "llmapi": {
        (*OPENAI, "grpc stream"): (C, C, C),
        ("generate_stream",): (F, F, C),
        ("generate",): (N, N, N),
    },
    "llmapi-http": {OPENAI: (F, F, C)},
}
REFUSED: tuple[tuple[str, Api], ...] = tuple(
    (route, api) for route in ("ensemble", "bls", "raw", "llmapi") for api in ("infer", "grpc unary")
)
"""What Triton does not take of decoupled models."""


def cells() -> Iterator[Any]:
    for route, rows in MATRIX.items():
        for apis, outcomes in rows.items():
            for api in apis:
                for phase, outcome in zip(PHASES, outcomes, strict=True):
                    yield pytest.param(route, api, phase, outcome, id=f"{route} {api} {phase}: {outcome.name.lower()}")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def triton() -> AsyncIterator[TritonModels]:
    models = {contract.model for contract in CONTRACTS.values()} | {"steps_tokenize", "raw_step", "steps_detokenize"}
    async with triton_models(*sorted(models)) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gateway(triton: TritonModels, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    byte_level(file)
    pools = {
        route: PoolSpec(
            protocol="triton",
            model=contract.model,
            transport=contract.transport,
            chat_template=ChatTemplateSpec(text=SCRIPT_TEMPLATE, bos="<s>"),
            tokenizer=TokenizerSpec(file=str(file), eos="</s>") if contract.kind == "ids" else None,
            endpoints=[EndpointSpec(id=f"triton-{route}", grpc=triton.grpc, http=triton.http)],
            probe=FAST_PROBES,
        )
        for route, contract in CONTRACTS.items()
    }
    routes = {route: RouteSpec(pool=route) for route in pools}
    spec = FleetSpec(fleet="test", pools=pools, routes=routes, gateway=GatewaySpec(grpc=":8001"))
    async with running_gateway(spec) as running:
        yield running


async def until(condition: Callable[[], Awaitable[bool]], what: str, seconds: float = SETUP_S) -> None:
    over = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < over, f"{what}: not within {seconds} s"
        await asyncio.sleep(0.02)


@dataclass(frozen=True)
class Model:
    """The model that works for a contract, as its own metrics show it."""

    triton: TritonModels
    contract: Contract

    async def has(self, phase: Phase, requests: int = 1) -> bool:
        name = self.contract.worker
        if phase == "queued" and self.contract.kind == "text" and not self.contract.decoupled:
            return await self.triton.metric("nv_inference_pending_request_count", name) == requests
        return await self.triton.in_phase(name, phase) == requests

    async def idle(self) -> bool:
        return all([await self.has(phase, 0) for phase in PHASES])

    async def told(self) -> tuple[int, int, int]:
        """Requests that it knows to be cancelled, that were stopped by their id, and that Triton dropped."""
        name = self.contract.worker
        dropped = await self.triton.metric("nv_inference_request_failure", name, reason="CANCELED")
        return await self.triton.cancelled(name), await self.triton.stopped(name), dropped

    @contextlib.asynccontextmanager
    async def busy(self) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """Another client's request, which the model serves until the given function is called."""
        async with channel(self.triton.grpc) as opened:
            kind = "ids" if self.contract.kind == "steps" else self.contract.kind
            message = Script("queued", short=False).message(self.contract.worker, kind, True, "another")
            if self.contract.decoupled:
                call = stub(opened).ModelStreamInfer()
                await call.write(message)
            else:
                call = stub(opened).ModelInfer(message)
            await until(lambda: self.has("prefill"), "another request is served")

            async def leave() -> None:
                cancelled, _, _ = await self.told()
                call.cancel()

                async def counted() -> bool:
                    return (await self.told())[0] > cancelled

                await until(counted, "the other request has ended")

            try:
                yield leave
            finally:
                call.cancel()


@contextlib.asynccontextmanager
async def asked(asking: Asking, model: Model) -> AsyncIterator["asyncio.Task[None]"]:
    """A request that has come into the phase of its script."""
    task = asyncio.create_task(asking.run())
    try:
        phase = asking.script.phase

        async def there() -> bool:
            assert not task.done(), asking.refusal or task.result()
            return await model.has(phase)

        await until(there, f"the request is in {phase}")
        if phase == "decode" and asking.api in STREAMED and model.contract.decoupled:
            await asyncio.wait_for(asking.answering.wait(), SETUP_S)
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def stays(model: Model, phase: Phase, before: tuple[int, int, int]) -> None:
    """The model goes on as if nothing had happened."""
    await asyncio.sleep(WHILE_S)
    assert await model.has(phase)
    assert await model.told() == before


async def check(gateway: RunningGateway, model: Model, asking: Asking, outcome: Outcome) -> None:
    """Run one cell."""
    phase = asking.script.phase
    await until(model.idle, "the model is idle")
    async with contextlib.AsyncExitStack() as stack:
        release = await stack.enter_async_context(model.busy()) if phase == "queued" else None
        before = cancelled, stopped, dropped = await model.told()
        task = await stack.enter_async_context(asked(asking, model))
        task.cancel()
        await asyncio.wait([task])
        await gateway.until_idle(1)

        if outcome in (Outcome.CANCELS, Outcome.STOPS, Outcome.BOTH):
            expected = (cancelled + (outcome is not Outcome.STOPS), stopped + (outcome is not Outcome.CANCELS))

            async def counted() -> bool:
                now = await model.told()
                return now[0] >= expected[0] and now[1] >= expected[1]

            await until(counted, outcome.value, PROMISE_S)
            if release is not None:
                assert await model.has("prefill"), "nobody else is stopped"
                await release()
            await until(model.idle, "the model is idle", PROMISE_S)
            return

        await stays(model, phase, before)
        if release is not None:
            await release()
            cancelled += 1  # the other request
        if outcome is Outcome.DROPPED:

            async def counted_by_triton() -> bool:
                return (await model.told())[2] > dropped

            await until(counted_by_triton, outcome.value, PROMISE_S)
            assert await model.idle()
            assert (await model.told())[:2] == (cancelled, stopped)
            return
        if release is not None:
            await until(lambda: model.has("prefill"), "its turn has come")
        if outcome is Outcome.FIRST_TOKEN:
            await until(lambda: model.has("prefill", 0), "the first token is there")

            async def noticed() -> bool:
                return (await model.told())[0] > cancelled

            await until(noticed, outcome.value, PROMISE_S)
        else:
            await until(model.idle, "the model has worked to the end")
            assert await model.told() == (cancelled, stopped, dropped)


@pytest.mark.parametrize(("route", "api", "phase", "outcome"), list(cells()))
async def test_what_stops_when_a_client_is_gone(
    triton: TritonModels, gateway: RunningGateway, route: str, api: Api, phase: Phase, outcome: Outcome
) -> None:
    short = outcome not in (Outcome.CANCELS, Outcome.STOPS, Outcome.BOTH)
    asking = Asking(gateway, route, CONTRACTS[route], api, Script(phase, short), str(uuid.uuid4()))
    await check(gateway, Model(triton, CONTRACTS[route]), asking, outcome)


@pytest.mark.parametrize(
    ("route", "api", "phase", "outcome"),
    [
        ("ensemble", "grpc stream", "prefill", Outcome.NEVER),
        ("ensemble", "generate_stream", "decode", Outcome.NEVER),
        ("raw", "generate", "decode", Outcome.NEVER),
        ("raw", "grpc stream", "decode", Outcome.CANCELS),
    ],
)
async def test_a_request_whose_id_may_be_anothers_is_not_stopped_by_it(
    triton: TritonModels, gateway: RunningGateway, route: str, api: Api, phase: Phase, outcome: Outcome
) -> None:
    model = Model(triton, CONTRACTS[route])
    stopped = (await model.told())[1]
    await check(gateway, model, Asking(gateway, route, CONTRACTS[route], api, Script(phase, short=True), "1"), outcome)
    assert (await model.told())[1] == stopped


@pytest.mark.parametrize(("route", "api"), REFUSED)
async def test_a_model_of_many_answers_takes_no_request_for_one(gateway: RunningGateway, route: str, api: Api) -> None:
    asking = Asking(gateway, route, CONTRACTS[route], api, Script("decode", short=True), "1")
    await asyncio.wait_for(asking.run(), SETUP_S)
    assert "support models with decoupled transaction policy" in asking.refusal
