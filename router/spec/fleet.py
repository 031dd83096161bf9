"""Everything a `fleet.yaml` can hold, as types; with `router.spec.gateway`, the only description of it there is.

The file's JSON Schema is generated from these types, the strict reader walks them, and the documents kept in Redis are
instances of them.
"""

from typing import Annotated, Literal

from msgspec import Meta, field

from router.spec.base import Count, PositiveInt, Spec
from router.spec.gateway import GatewaySpec
from router.spec.units import (
    BaseUrl,
    Date,
    Duration,
    DurationOrOff,
    FleetName,
    HostPort,
    HttpUrl,
    KubernetesName,
    Name,
    NamespaceOrAll,
    Percent,
    PortNumber,
    RedisUrl,
    Sha256,
    Size,
)

Protocol = Literal["openai", "triton"]
Role = Literal["prefill", "decode", "both"]
CapacityType = Literal["on-demand", "spot"]
Priority = Literal["interactive", "standard", "batch"]

Transport = Literal["grpc", "http"]
KvPriority = Annotated[int, Meta(ge=0, le=100)]
Weight = Annotated[float, Meta(ge=0.001, le=1_000_000)]


class EndpointSpec(Spec, frozen=True, kw_only=True):
    """One serving replica that takes traffic. A multi-node TP×PP group is one endpoint: its leader."""

    id: Name
    http: BaseUrl | None = None
    """Base URL of the engine's HTTP API (protocol `openai` needs it, and so does transport `http`)."""
    grpc: HostPort | None = None
    """HOST:PORT of the engine's gRPC API (protocol `triton` needs it, unless the pool's transport is `http`)."""
    metrics: HttpUrl | None = None
    """URL of the engine's Prometheus metrics."""
    role: Role = "both"
    tp: PositiveInt = 1
    """Tensor-parallel size."""
    pp: PositiveInt = 1
    """Pipeline-parallel size."""
    nodes: PositiveInt = 1
    capacity: CapacityType = "on-demand"
    zone: str | None = None
    node: str | None = None


class ChatTemplateSpec(Spec, frozen=True, kw_only=True):
    """How chat messages become a prompt, for engines that take raw text. Exactly one of `file` and `text`."""

    file: str | None = None
    """Path of a Jinja template, relative to the fleet file. Published documents carry `text` instead."""
    text: str | None = None
    bos: str = ""
    """The tokenizer's beginning-of-sequence token, as the template's `bos_token`."""
    eos: str = ""
    """The tokenizer's end-of-sequence token, as the template's `eos_token`."""
    stop: list[str] = field(default_factory=list)
    """Strings that end a turn; added to each request's own stop strings."""
    engine_adds_bos: bool = True
    """The engine's tokenizer adds `bos` itself (the default of TensorRT-LLM's): a leading one is taken off the text."""


class TokenizerSpec(Spec, frozen=True, kw_only=True):
    """The model's tokenizer, for engines that take token ids (TensorRT-LLM's raw `tensorrt_llm` model)."""

    file: Annotated[str, Meta(min_length=1)]
    """Path of a `tokenizer.json`, relative to the fleet file. Every gateway reads its own copy at the same path."""
    eos: str = ""
    """The token that ends an answer; without it the chat template's `eos`, else the first of its `stop` strings that is
    one token."""


class SecretSpec(Spec, frozen=True, kw_only=True):
    """Where each gateway finds a secret of its own. Exactly one of `env` and `file`."""

    env: Annotated[str, Meta(min_length=1)] | None = None
    """Name of an environment variable, read once."""
    file: Annotated[str, Meta(min_length=1)] | None = None
    """Path of a file, relative to the fleet file; read again when it changes."""


class ReplaceSpec(Spec, frozen=True, kw_only=True):
    """Credentials that the gateway itself has for a pool's engines."""

    replace: SecretSpec
    """A token, sent as `Authorization: Bearer TOKEN`."""


class PriceSpec(Spec, frozen=True, kw_only=True):
    """What a pool costs: by the GPU-hour, or by the million tokens."""

    usd_per_gpu_hour: Annotated[float, Meta(ge=0)] | None = None
    gpus: PositiveInt = 1
    """GPUs per endpoint."""
    usd_per_million_prompt_tokens: Annotated[float, Meta(ge=0)] | None = None
    usd_per_million_completion_tokens: Annotated[float, Meta(ge=0)] | None = None


class TimeoutSpec(Spec, frozen=True, kw_only=True):
    """Deadlines of one request to an engine; each is a knob of its own."""

    connect: Duration = "2s"
    first_byte: DurationOrOff = "300s"
    """From sending the request to the first byte of the answer."""
    idle: DurationOrOff = "60s"
    """Between two reads of the answer, and between two writes to a client that does not read."""
    total: DurationOrOff = "off"


class TimeoutLimitSpec(Spec, frozen=True, kw_only=True):
    """How far requests may go that ask for other timeouts (header `x-headrace-timeouts`): what is not given here is
    limited by the pool's own timeout."""

    connect: Duration | None = None
    first_byte: DurationOrOff | None = None
    idle: DurationOrOff | None = None
    total: DurationOrOff | None = None


class ProbeSpec(Spec, frozen=True, kw_only=True):
    """Active health probes of a pool's endpoints."""

    interval: Duration = "1s"
    timeout: Duration = "2s"
    failures: PositiveInt = 3
    """Probes in a row without an answer in time that make an endpoint unhealthy. A refused connection needs one."""


class OutlierSpec(Spec, frozen=True, kw_only=True):
    """When an endpoint is kept from taking requests because requests keep failing there, whatever its probes say."""

    failures: PositiveInt = 5
    """Failed requests in a row that eject an endpoint. Clients' mistakes never count."""
    base_ejection: Duration = "30s"
    """For how long; doubled at each ejection in a row. Then one request at a time is tried there."""
    max_ejection: Duration = "300s"
    max_ejected: Percent = "50%"
    """How much of the pool may be ejected at once; never its last serving endpoint. `0%` ejects none."""


class DiscoverSpec(Spec, frozen=True, kw_only=True):
    """Which pods of a Kubernetes cluster are a pool's endpoints. Exactly one of `selector` and `inference_pool`.

    What a pod says by its own annotations or labels goes before the ports and sizes given here.
    """

    selector: Annotated[str, Meta(min_length=1)] | None = None
    """A label selector as kubectl takes it: `app=llama-70b,tier!=test`. It must find all pods of a LeaderWorkerSet's
    groups, not only the leaders."""
    inference_pool: KubernetesName | None = None
    """Name of an InferencePool (Gateway API Inference Extension), whose selector and first target port count."""
    namespace: NamespaceOrAll | None = None
    """Where the pods are; by default where discovery runs, `*` for every namespace."""
    http: PortNumber | None = None
    """Port of the engines' HTTP API; by default the container's port named `http`, else 8000."""
    grpc: PortNumber | None = None
    """Port of the engines' gRPC API; by default the container's port named `grpc`, else 8001 for protocol `triton`."""
    metrics: PortNumber | None = None
    """Port of the engines' metrics (`/metrics`); by default the container's port named `metrics`, else 8002 for
    protocol `triton`."""
    tp: PositiveInt = 1
    """Tensor-parallel size of each endpoint."""
    pp: PositiveInt = 1
    """Pipeline-parallel size of each endpoint."""


class PoolSpec(Spec, frozen=True, kw_only=True):
    """Interchangeable endpoints that serve one model."""

    protocol: Protocol
    model: Annotated[str, Meta(min_length=1)]
    """The model's name at the engine."""
    transport: Transport = "grpc"
    """How OpenAI requests get to engines of protocol `triton`: over gRPC, or over HTTP with `generate_stream`."""
    endpoints: list[EndpointSpec] = field(default_factory=list)
    discover: DiscoverSpec | None = None
    """Pods of a Kubernetes cluster that are endpoints besides, as `headrace discovery` finds them."""
    credentials: Literal["none", "forward"] | ReplaceSpec = "none"
    """What engines are sent as `Authorization`: nothing, the client's own, or a token of the gateway's
    (`{replace: {file: PATH}}`)."""
    chat_template: ChatTemplateSpec | None = None
    tokenizer: TokenizerSpec | None = None
    price: PriceSpec | None = None
    timeouts: TimeoutSpec = field(default_factory=TimeoutSpec)
    timeout_limits: TimeoutLimitSpec | None = None
    ping: DurationOrOff = "15s"
    """Silence after which a streaming client gets a comment (`: ping`), so that nothing between it and here takes the
    stream for dead. Before the first token, it also sends the head of the answer, and errors become events."""
    probe: ProbeSpec = field(default_factory=ProbeSpec)
    outlier: OutlierSpec = field(default_factory=OutlierSpec)
    max_in_flight: PositiveInt | Literal["off"] | None = None
    """Requests that a gateway has at an endpoint at most; more wait in their route's queue. By default what the engine
    says it works on at a time, and 64 where it does not say; `off` for no limit and no queue."""
    kv_block_tokens: PositiveInt | None = None
    """Tokens in one of the engine's KV blocks, where the engine's metrics do not say."""

    @property
    def needed_address(self) -> Literal["http", "grpc"]:
        """The address that an endpoint of this pool cannot do without."""
        return "http" if self.protocol == "openai" else self.transport


class WeightedPool(Spec, frozen=True, kw_only=True):
    """One pool of a weighted split."""

    pool: Name
    weight: Weight = 1.0


class RetentionSpec(Spec, frozen=True, kw_only=True):
    """How long a route's KV cache is worth keeping, for engines that take such hints (TensorRT-LLM's raw contract)."""

    prompt: KvPriority | None = None
    """Priority of the prompt's blocks: the higher, the later they are evicted. TensorRT-LLM's own is 35."""
    decode: KvPriority | None = None
    """Priority of the blocks of the answer."""
    duration: Duration | None = None
    """After this time the priorities are forgotten; without it, never."""


class QueueSpec(Spec, frozen=True, kw_only=True):
    """How much of a route may wait in a gateway process while every endpoint is full."""

    size: Count = 1024
    """Requests; with 0 none waits."""
    bytes: Size = "256MiB"
    """Of their bodies, as far as they are in memory."""
    timeout: DurationOrOff = "off"
    """How long one waits at most; its `first_byte` and `total` timeouts count from its arrival in any case."""
    tenant_share: Percent = "50%"
    """The part of `size` and `bytes` that one tenant may have, in each class."""


class RouteSpec(Spec, frozen=True, kw_only=True):
    """A public model name. Exactly one of `pool` and `pools`; `fallback` is tried in order when they cannot serve."""

    pool: Name | None = None
    pools: list[WeightedPool] = field(default_factory=list)
    fallback: list[Name] = field(default_factory=list)
    retention: RetentionSpec | None = None
    queue: QueueSpec = field(default_factory=QueueSpec)
    bytes_per_token: Annotated[float, Meta(gt=0, le=64)] = 4.0
    """About how many bytes of a prompt make a token of the model: what a request will cost is guessed by it until the
    engine says."""


class KeySpec(Spec, frozen=True, kw_only=True):
    """An API key, known by its hash only."""

    sha256: Sha256
    """SHA-256 of the key, as `headrace keys new` and `headrace keys hash` print it."""
    name: Name | None = None
    """Tells the tenant's keys apart in listings."""
    expires: Date | None = None
    """The last day, in UTC, on which the key is taken."""


class LimitSpec(Spec, frozen=True, kw_only=True):
    """How much may be asked for. What is not given has no limit."""

    requests_per_minute: Count | None = None
    prompt_tokens_per_minute: Count | None = None
    completion_tokens_per_minute: Count | None = None
    streams: Count | None = None
    """Requests that may be under way at a time, streamed or not."""


class TenantSpec(Spec, frozen=True, kw_only=True):
    """Somebody who may call the gateway, and what for."""

    keys: list[KeySpec] = field(default_factory=list)
    """Any number of them counts at a time: a key is changed by having the old and the new one for a while."""
    routes: list[Name] = field(default_factory=list)
    """The routes that the tenant may see and call; empty for all of them."""
    isolated: bool = True
    """Prompts of the tenant share no cached prefix with those of others, who could find out by the time to the first
    token what had been asked before. The gateway sends `cache_salt` to engines of protocol `openai`."""
    limits: LimitSpec = field(default_factory=LimitSpec)
    """Limits of all its requests together. Gateways that share a Redis share them."""
    route_limits: dict[Name, LimitSpec] = field(default_factory=dict)
    """Limits of its requests to single routes, which hold besides."""
    priority: Priority = "standard"
    """The class of the tenant's requests where they have to wait: `interactive` goes before `standard`, `batch` last. A
    request may ask for a lower one (header `x-headrace-priority`)."""
    weight: Weight = 1.0
    """The tenant's share of tokens beside others of its class, where they have to wait."""


class RedisSpec(Spec, frozen=True, kw_only=True):
    """Where the shared state lives."""

    url: RedisUrl = "redis://127.0.0.1:6379"


class FleetSpec(Spec, frozen=True, kw_only=True):
    """A whole fleet file."""

    fleet: FleetName
    """Name of the fleet; gateways of one fleet share their state."""
    redis: RedisSpec | None = None
    pools: dict[Name, PoolSpec] = field(default_factory=dict)
    routes: dict[Name, RouteSpec] = field(default_factory=dict)
    tenants: dict[Name, TenantSpec] = field(default_factory=dict)
    gateway: GatewaySpec = field(default_factory=GatewaySpec)
