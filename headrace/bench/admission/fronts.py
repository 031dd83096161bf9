"""The gateways that are compared: one with nothing on, one for each part of admission, and those with everything.

They stand in front of the same engine and share a Valkey, where each has a fleet of its own. Limits are so high that no
request is ever refused: what is measured is the way of those that come in.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

import jwt
import msgspec
import yaml
from cryptography.hazmat.primitives.asymmetric import rsa

from headrace.bench.relay.sides import answers, make_part
from headrace.bench.relay.stretches import MODEL
from headrace.local.part import Part
from headrace.local.ports import LOOPBACK, free_ports
from headrace.local.run_dir import RunDir
from router.spec.fleet import EndpointSpec, FleetSpec, KeySpec, LimitSpec, PoolSpec, RedisSpec, RouteSpec, TenantSpec
from router.spec.gateway import AuthSpec, DrainSpec, GatewaySpec, JwtSpec

TENANT: Final = "bench"
KEY: Final = "hr-" + "k" * 43
_AUDIENCE: Final = "headrace-bench"
_ALGORITHM: Final = "RS256"
_PLENTY: Final = 10**9
_TOKEN_S: Final = 24 * 3600
_HEAD_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Front:
    """A gateway by what it has on. `credentials`: how its client says who it is."""

    credentials: str = ""
    limits: bool = False
    queue: bool = False


KEYS: Final = "keys"
"""A front that has nothing else on, and a kind of credentials."""
TOKENS: Final = "tokens"
OFF: Final = "off"
LIMITS: Final = "limits"
"""With keys: limits are a tenant's."""
QUEUE: Final = "queue"
ALL: Final = "admission"
OIDC: Final = "oidc"
FRONTS: Final = {
    OFF: Front(),
    KEYS: Front(KEYS),
    LIMITS: Front(KEYS, limits=True),
    QUEUE: Front(queue=True),
    ALL: Front(KEYS, limits=True, queue=True),
    OIDC: Front(TOKENS, limits=True, queue=True),
}


class Issuer:
    """An issuer of tokens with one key."""

    def __init__(self, port: int) -> None:
        self.spec = JwtSpec(
            issuer=f"http://{LOOPBACK}:{port}", audience=_AUDIENCE, jwks=f"http://{LOOPBACK}:{port}/keys"
        )
        self._key = rsa.generate_private_key(65537, 2048)

    @property
    def keys(self) -> bytes:
        """As a JWK set."""
        public = jwt.algorithms.RSAAlgorithm.to_jwk(self._key.public_key(), as_dict=True)
        return msgspec.json.encode({"keys": [{**public, "kid": "bench"}]})

    def token(self) -> str:
        now = int(time.time())
        said = {"iss": self.spec.issuer, "aud": _AUDIENCE, "sub": TENANT, "iat": now, "exp": now + _TOKEN_S}
        return jwt.encode(said, self._key, algorithm=_ALGORITHM, headers={"kid": "bench"})


@asynccontextmanager
async def running_issuer() -> AsyncIterator[Issuer]:
    """An issuer that publishes its key in this process."""
    (port,) = free_ports(1)
    issuer = Issuer(port)
    keys = issuer.keys

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_HEAD_S):
                await reader.readuntil(b"\r\n\r\n")
                head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(keys)}\r\n"
                writer.write(f"{head}connection: close\r\n\r\n".encode() + keys)
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the gateway asks again
        finally:
            writer.close()

    async with await asyncio.start_server(answer, LOOPBACK, port):
        yield issuer


def headers_of(name: str, issuer: Issuer) -> tuple[str, ...]:
    """What clients of a front send besides."""
    credentials = FRONTS[name].credentials
    secret = {KEYS: KEY, TOKENS: issuer.token()}.get(credentials)
    return () if secret is None else (f"authorization: Bearer {secret}",)


def front_part(run: RunDir, name: str, spec: FleetSpec, headers: tuple[str, ...]) -> Part:
    """The gateway of a fleet as an operator would start it."""
    fleet_file = run.path / f"{name}.yaml"
    fleet_file.write_text(yaml.safe_dump(msgspec.to_builtins(spec), sort_keys=False))
    command = (sys.executable, "-m", "headrace", "gateway", "--config", str(fleet_file))
    port = int(spec.gateway.http.rpartition(":")[2])
    return make_part(run, name, command, port, answers(port, *spec.routes, headers=headers))


def front_spec(name: str, engine: int, valkey: int, issuer: Issuer, port: int, admin: int) -> FleetSpec:
    """A fleet of one engine, with what the front `name` has on."""
    front = FRONTS[name]
    limits = LimitSpec()
    if front.limits:
        limits = LimitSpec(
            requests_per_minute=_PLENTY,
            prompt_tokens_per_minute=_PLENTY,
            completion_tokens_per_minute=_PLENTY,
            streams=_PLENTY,
        )
    keys = [KeySpec(sha256=sha256(KEY.encode()).hexdigest())] if front.credentials == KEYS else []
    endpoint = EndpointSpec(id="engine", http=f"http://{LOOPBACK}:{engine}")
    pool = PoolSpec(protocol="openai", model=MODEL, endpoints=[endpoint], max_in_flight=None if front.queue else "off")
    return FleetSpec(
        fleet=f"bench-{name}",
        redis=RedisSpec(url=f"redis://{LOOPBACK}:{valkey}") if front.limits else None,
        pools={MODEL: pool},
        routes={MODEL: RouteSpec(pool=MODEL)},
        tenants={TENANT: TenantSpec(keys=keys, limits=limits)} if front.credentials else {},
        gateway=gateway_spec(
            port,
            admin,
            AuthSpec(
                anonymous="deny" if front.credentials else "allow",
                jwt=[issuer.spec] if front.credentials == TOKENS else [],
            ),
        ),
    )


def gateway_spec(port: int, admin: int, auth: AuthSpec) -> GatewaySpec:
    """A gateway on loopback."""
    return GatewaySpec(http=f"{LOOPBACK}:{port}", admin=f"{LOOPBACK}:{admin}", auth=auth, drain=DrainSpec(settle="0s"))
