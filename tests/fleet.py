"""The whole fleet for contract tests: the real engines and Valkey behind a gateway in the test's process."""

import random
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from headrace.local.ensemble_signature import MODEL
from headrace.local.fleet_file import CHAT_TEMPLATE, LLAMA_POOL, TRITON_POOL
from headrace.local.llm import MODEL_NAME
from router.spec.fleet import (
    ChatTemplateSpec,
    EndpointSpec,
    FleetSpec,
    PoolSpec,
    RedisSpec,
    RouteSpec,
    WeightedPool,
)
from tests.engines import Llama, Triton, Valkey
from tests.harness import RunningGateway


@dataclass(frozen=True)
class Fleet:
    """A running gateway and the real parts behind it."""

    running: RunningGateway
    triton_a: Triton
    triton_b: Triton
    llama: Llama
    valkey: Valkey

    @property
    def url(self) -> str:
        return self.running.url

    async def cancelled(self) -> int:
        """Requests that the embedded Triton models have counted as cancelled."""
        total = 0.0
        async with aiohttp.ClientSession() as http:
            for triton in (self.triton_a, self.triton_b):
                async with http.get(triton.metrics) as response:
                    for family in text_string_to_metric_families(await response.text()):
                        total += sum(
                            sample.value for sample in family.samples if sample.labels.get("outcome") == "cancelled"
                        )
        return int(total)

    async def llama_busy(self) -> bool:
        """Whether a slot of the llama.cpp server is at work."""
        async with aiohttp.ClientSession() as http, http.get(f"{self.llama.http}/slots") as response:
            return any(slot["is_processing"] for slot in await response.json())


def fleet_spec(triton_a: Triton, triton_b: Triton, llama: Llama, valkey: Valkey) -> FleetSpec:
    template = ChatTemplateSpec(text=CHAT_TEMPLATE.read_text(), stop=["<|im_end|>"])
    tritons = [
        EndpointSpec(id=triton.name, grpc=triton.grpc, http=triton.http, metrics=triton.metrics)
        for triton in (triton_a, triton_b)
    ]
    return FleetSpec(
        fleet="contract",
        redis=RedisSpec(url=valkey.url),
        pools={
            TRITON_POOL: PoolSpec(protocol="triton", model=MODEL, chat_template=template, endpoints=tritons),
            LLAMA_POOL: PoolSpec(
                protocol="openai", model=MODEL_NAME, endpoints=[EndpointSpec(id=llama.name, http=llama.http)]
            ),
        },
        routes={
            "smollm2": RouteSpec(
                pools=[WeightedPool(pool=TRITON_POOL, weight=2), WeightedPool(pool=LLAMA_POOL, weight=1)]
            ),
            "smollm2-triton": RouteSpec(pool=TRITON_POOL, fallback=[LLAMA_POOL]),
            "smollm2-triton-only": RouteSpec(pool=TRITON_POOL),
            "smollm2-llama": RouteSpec(pool=LLAMA_POOL),
        },
    )


def prompt_of(words: int, seed: str) -> str:
    """A prompt of about `words` tokens that nobody has asked before, the same for the same seed."""
    vocabulary = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school")
    dice = random.Random(seed)
    return f"{seed}: " + " ".join(dice.choice(vocabulary) for _ in range(words))


def metric(running: RunningGateway, name: str, labels: Mapping[str, str]) -> float:
    return running.gateway.registry.get_sample_value(name, dict(labels)) or 0.0
