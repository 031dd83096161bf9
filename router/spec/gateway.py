"""What a fleet file says of a gateway process itself: the types under `gateway`."""

from typing import Annotated, Literal

from msgspec import Meta, field

from router.spec.base import Count, PositiveInt, Spec
from router.spec.units import (
    Cidr,
    CollectorUrl,
    Duration,
    DurationOrOff,
    DurationOrZero,
    ListenAddress,
    LogDestination,
    Percent,
    PercentOrOff,
    Size,
    WebUrl,
)

OFF = "off"
STDOUT = "stdout"
Signature = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
"""How a token may be signed: with a private key. What is signed with a shared secret, or not at all, is never taken."""


class RetrySpec(Spec, frozen=True, kw_only=True):
    """How many requests may be tried at another endpoint after one has failed, before their first content."""

    budget: PercentOrOff = "10%"
    """Retries that may wait for an answer, as a share of the requests that the process has open; `off` for no limit."""
    min_per_second: Count = 3
    """Retries that are allowed whatever the share. With a budget of `0%` and none of these nothing is retried."""


class JwtSpec(Spec, frozen=True, kw_only=True):
    """An issuer whose signed tokens (JWT, as of OpenID Connect) are taken besides keys."""

    issuer: WebUrl
    """The `iss` of its tokens, to the letter. Without `jwks` its keys are found through what it publishes at
    `/.well-known/openid-configuration`."""
    audience: Annotated[str, Meta(min_length=1)]
    """What must be among a token's `aud`: a token that was made for others is not taken."""
    jwks: WebUrl | None = None
    """Where the issuer publishes its keys (a JWK set)."""
    tenant_claim: Annotated[str, Meta(min_length=1)] = "sub"
    """The claim that names the tenant. Dots lead into nested claims, unless there is a claim with the whole name."""
    algorithms: list[Signature] = field(default_factory=lambda: ["RS256", "ES256", "EdDSA"])
    """How its tokens may be signed."""
    leeway: Duration = "30s"
    """How far its clock and the gateway's may differ."""


class AuthSpec(Spec, frozen=True, kw_only=True):
    """Who may call besides the tenants."""

    anonymous: Literal["allow", "deny"] = "deny"
    """What becomes of requests without an API key. With `allow`, the tenant `anonymous`, if there is one, says what
    they may: its routes, limits, priority and weight. Where there is no other tenant, `allow` lets every key pass,
    too: clients' libraries insist on sending one."""
    jwt: list[JwtSpec] = field(default_factory=list)
    """Issuers whose tokens are taken, too. Each may name any tenant."""


class OverloadSpec(Spec, frozen=True, kw_only=True):
    """The use of its resources at which a gateway process refuses new requests. From 80 % of that, it refuses those of
    class `batch`, and, of memory and files, keeps no connection after its answer."""

    loop_lag: DurationOrOff = "500ms"
    """How late its event loop is."""
    memory: PercentOrOff = "90%"
    """Of the container's limit, or of the machine's memory where there is none."""
    files: PercentOrOff = "98%"
    """Of the files that the process may open."""
    cpu: PercentOrOff = "98%"
    """Of a core, which is all that the event loop can use. When it does, requests of class `batch` are refused, and no
    others."""


class TracingSpec(Spec, frozen=True, kw_only=True):
    """Traces of requests, sent to an OpenTelemetry collector. What is not here is said by the `OTEL_` variables."""

    endpoint: CollectorUrl | None = None
    """The collector's base URL; without it `OTEL_EXPORTER_OTLP_ENDPOINT` counts, else the collector of this machine."""
    protocol: Literal["grpc", "http"] = "grpc"
    """How OTLP gets there."""
    sample: Percent = "1%"
    """How many of the requests are traced whose clients do not say. Those of a trace that a client records are traced,
    and none of one that it does not."""


class TlsSpec(Spec, frozen=True, kw_only=True):
    """The certificate of a listening address, in files of each gateway's own that are read again when they change."""

    cert: Annotated[str, Meta(min_length=1)]
    """Path of the certificate and the intermediate ones after it (PEM), relative to the fleet file."""
    key: Annotated[str, Meta(min_length=1)]
    """Path of its private key (PEM, not encrypted), relative to the fleet file."""


class AdminTlsSpec(TlsSpec, frozen=True, kw_only=True):
    """The certificate of the admin port, and whose clients may use it."""

    client_ca: Annotated[str, Meta(min_length=1)] | None = None
    """Path of the certificates (PEM) of the authorities whose clients may call the admin API: it then needs a client
    certificate besides its token. Health, readiness and metrics need none."""


class ClientsSpec(Spec, frozen=True, kw_only=True):
    """What clients at one address may take of a gateway process, and how that address is known. IPv6 addresses count by
    their /64."""

    connections_per_address: PositiveInt | None = None
    """Connections at a time; more are closed at once. Without it there is no limit."""
    requests_per_address: PositiveInt | None = None
    """Requests at a time; more get a 429. Without it there is no limit."""
    grpc_connections: PositiveInt | None = None
    """Connections to `grpc` at a time, whoever makes them; more are closed at once. By default half of the files that
    the process may open."""
    streams_per_connection: PositiveInt | None = None
    """gRPC calls at a time on one connection, each of which is a stream of HTTP/2; more get RESOURCE_EXHAUSTED. Without
    it the connection breaks off what is beyond 4096."""
    streams_per_peer: PositiveInt | None = None
    """gRPC calls at a time from one address; more get RESOURCE_EXHAUSTED. Without it there is no limit."""
    trusted_proxies: list[Cidr] = field(default_factory=list)
    """Addresses of proxies in front of the gateway, which are believed about who their client is. None of the limits
    counts for them."""
    address_header: Literal["x-forwarded-for", "forwarded"] = "x-forwarded-for"
    """The header in which the proxies say so, over gRPC the metadata. Name one that they all write: another could be
    their client's own."""
    proxy_protocol: Literal["off", "v1", "v2", "any"] = "off"
    """The version of the PROXY protocol in which their connections to `http` begin."""


class DrainSpec(Spec, frozen=True, kw_only=True):
    """How a gateway comes to its end when it is told to stop by SIGTERM."""

    settle: DurationOrZero = "5s"
    """How long it goes on serving while `/readyz` says no already, until whoever sends it requests has noticed."""
    grace: Duration = "300s"
    """How long streams may go on after that, before they are ended with an error."""


class GatewaySpec(Spec, frozen=True, kw_only=True):
    """Listening addresses and limits of a gateway process."""

    http: ListenAddress = ":8000"
    grpc: ListenAddress | None = None
    """Where the gRPC API listens (KServe v2, as Triton's clients speak it); without it there is none."""
    admin: ListenAddress = "127.0.0.1:9090"
    tls: TlsSpec | None = None
    """The certificate of `http` and `grpc`; without it they speak plain text."""
    admin_tls: AdminTlsSpec | None = None
    """The certificate of `admin`; without it that speaks plain text."""
    clients: ClientsSpec = field(default_factory=ClientsSpec)
    body_limit: Size = "32MiB"
    """Largest request body taken on `/v1`."""
    message_limit: Size = "128MiB"
    """Largest message taken over gRPC; a larger one gets RESOURCE_EXHAUSTED. It is read whole before anything else."""
    retry: RetrySpec = field(default_factory=RetrySpec)
    overload: OverloadSpec = field(default_factory=OverloadSpec)
    auth: AuthSpec = field(default_factory=AuthSpec)
    drain: DrainSpec = field(default_factory=DrainSpec)
    expose_routing: bool = True
    """Tell clients in `x-headrace-*` headers where their requests went and why."""
    access_log: LogDestination = OFF
    """Where one line of JSON goes for each request that has ended: `off`, `stdout`, or the absolute path of a file."""
    tracing: TracingSpec | None = None
    """Without it no request is traced."""
