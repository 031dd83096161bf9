"""The whole fleet for contract tests: the real engines and Valkey behind a gateway in the test's process."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from headrace.local import fleet_file
from headrace.local.fleet_file import TRITON_POOL, FleetPorts
from headrace.local.llm import CHAT_TEMPLATE
from headrace.local.parts import TritonPorts
from router.spec.fleet import FleetSpec, RouteSpec
from router.spec.gateway import RetrySpec
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
        return await self._sum_over_tritons("outcome", "cancelled")

    async def busy(self) -> bool:
        """Whether any engine is at work."""
        async with aiohttp.ClientSession() as http, http.get(f"{self.llama.http}/slots") as response:
            if any(slot["is_processing"] for slot in await response.json()):
                return True
        return await self._sum_over_tritons("request_type", "active") > 0

    async def _sum_over_tritons(self, label: str, value: str) -> int:
        """The metrics with this label's value, over both Tritons; names are not looked at: the labels are unique."""
        total = 0.0
        async with aiohttp.ClientSession() as http:
            for triton in (self.triton_a, self.triton_b):
                async with http.get(triton.metrics) as response:
                    families = text_string_to_metric_families(await response.text())
                samples = [sample for family in families for sample in family.samples]
                total += sum(sample.value for sample in samples if sample.labels.get(label) == value)
        return int(total)


def fleet_spec(triton_a: Triton, triton_b: Triton, llama: Llama, valkey: Valkey) -> FleetSpec:
    """The embedded fleet, and a route without a fallback. Every request may be retried."""
    ports = FleetPorts(
        http=0,
        admin=0,
        grpc=0,
        valkey=_port(valkey.url),
        triton_a=_triton_ports(triton_a),
        triton_b=_triton_ports(triton_b),
        llama=_port(llama.http),
    )
    spec = fleet_file.fleet_spec(ports)
    triton = spec.pools[TRITON_POOL]
    assert triton.chat_template is not None
    template = structs.replace(triton.chat_template, file=None, text=CHAT_TEMPLATE.read_text())
    return structs.replace(
        spec,
        pools={**spec.pools, TRITON_POOL: structs.replace(triton, chat_template=template)},
        routes={**spec.routes, "smollm2-triton-only": RouteSpec(pool=TRITON_POOL)},
        gateway=structs.replace(spec.gateway, retry=RetrySpec(budget="off")),
    )


def _triton_ports(triton: Triton) -> TritonPorts:
    return TritonPorts(_port(triton.http), _port(f"grpc://{triton.grpc}"), _port(triton.metrics))


def _port(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port


def prompt_of(words: int, seed: str) -> str:
    """A prompt of about `words` tokens that nobody has asked before, the same for the same seed."""
    vocabulary = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school")
    dice = random.Random(seed)
    return f"{seed}: " + " ".join(dice.choice(vocabulary) for _ in range(words))


def metric(running: RunningGateway, name: str, labels: Mapping[str, str]) -> float:
    return running.gateway.registry.get_sample_value(name, dict(labels)) or 0.0
