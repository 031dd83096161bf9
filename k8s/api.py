"""The Kubernetes API as discovery uses it: raw bytes in and out, over the official package's asyncio client.

The package brings what is hard about it, kubeconfigs, tokens that change, certificates; its models are left alone, as
making one costs milliseconds. The only module that imports it, and only when a client is made: it takes two seconds and
50 MB, which nothing but `headrace discovery` should pay for.

Every request has a deadline; a watch has one for each read, a little later than the server was asked to end it.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlencode

import aiohttp
import msgspec

from k8s.objects import Status

REQUEST_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 5.0
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_LONGEST_WHY = 300

Query = Mapping[str, str]


class ApiError(Exception):
    """A request that was not answered as it should be; the message is for people."""

    def __init__(self, status: int | None, why: str) -> None:
        super().__init__(why)
        self.status = status
        """The answer's HTTP status; None if there was no answer."""


class NoClusterError(Exception):
    """There is no cluster to be found, or no way to log in; says what to do."""


class Api(Protocol):
    """What discovery needs of the API server. Both raise `ApiError`."""

    async def request(self, method: str, path: str, query: Query, body: object = None) -> bytes: ...

    def watch(self, path: str, query: Query, silence_s: float) -> "AsyncWatch": ...


class AsyncWatch(Protocol):
    """A watch on entering it: its lines, whole ones only, until the server ends it."""

    async def __aenter__(self) -> AsyncIterator[bytes]: ...

    async def __aexit__(self, *_: Any) -> bool | None: ...


class KubernetesApi:
    """Over `kubernetes.aio`. Use it on one event loop and `close` it."""

    def __init__(self, client: Any, namespace: str) -> None:
        self._client = client
        self.namespace = namespace
        """Where this process runs, or where its kubeconfig points."""

    @classmethod
    async def connect(cls, kubeconfig: Path | None, context: str | None) -> "KubernetesApi":
        """A client for the cluster this pod is in, or for that of a kubeconfig. Raises `NoClusterError`."""
        from kubernetes.aio import client
        from kubernetes.aio import config as untyped

        config: Any = untyped
        configuration = client.Configuration()
        configuration.retries = None  # the mirror has its own ideas of when to try again
        try:
            namespace = _own_namespace() if kubeconfig is None and context is None else None
            if namespace is not None:
                config.load_incluster_config(client_configuration=configuration)
            else:
                file = str(kubeconfig) if kubeconfig is not None else None
                await config.load_kube_config(file, context, configuration)
                contexts, current = config.list_kube_config_contexts(file)
                namespace = _namespace_of(contexts, current, context)
        except (config.ConfigException, OSError, ValueError) as error:
            raise NoClusterError(
                f"Cannot log in to a Kubernetes cluster: {error} Run it in a pod with a service account, or name a "
                "kubeconfig with --kubeconfig."
            ) from None
        return cls(client.ApiClient(configuration), namespace)

    async def close(self) -> None:
        await self._client.close()

    async def request(self, method: str, path: str, query: Query, body: object = None) -> bytes:
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S, sock_connect=_CONNECT_TIMEOUT_S)
        try:
            response = await self._send(method, path, query, timeout, body)
            data: bytes = await response.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ApiError(None, _no_answer(error)) from error
        if not 200 <= response.status < 300:
            raise ApiError(response.status, _why(response.status, data))
        return data

    @asynccontextmanager
    async def watch(self, path: str, query: Query, silence_s: float) -> AsyncIterator[AsyncIterator[bytes]]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S, sock_read=silence_s)
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                response = await self._send("GET", path, query, timeout)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ApiError(None, _no_answer(error)) from error
        try:
            if response.status != 200:
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    data = await response.read()
                raise ApiError(response.status, _why(response.status, data))
            yield _lines(response.content)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ApiError(None, _no_answer(error)) from error
        finally:
            response.close()  # a watch has no end to wait for

    async def _send(
        self, method: str, path: str, query: Query, timeout: aiohttp.ClientTimeout, body: object = None
    ) -> aiohttp.ClientResponse:
        method, url, headers, sent, _ = await self._client.param_serialize(
            method, f"{path}?{urlencode(query)}" if query else path, header_params={"Accept": "application/json"},
            body=body, auth_settings=["BearerToken"],
        )  # fmt: skip
        answer = await self._client.rest_client.request(
            method, url, headers=headers, body=sent, _request_timeout=timeout
        )
        response: aiohttp.ClientResponse = answer.response
        return response


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The lines that came whole; what a broken connection left of the last one is dropped."""
    while True:
        try:
            line = await content.readline()
        except ValueError as error:  # longer than the client's buffer, which is larger than any object may be
            raise ApiError(None, f"the API server sent too long a line: {error}") from error
        if not line.endswith(b"\n"):
            return
        if line != b"\n":
            yield line


def _own_namespace() -> str | None:
    """That of the pod this is; None if it is none."""
    return NAMESPACE_FILE.read_text().strip() if NAMESPACE_FILE.exists() else None


def _namespace_of(contexts: list[dict[str, Any]], current: dict[str, Any], wanted: str | None) -> str:
    chosen = next((one for one in contexts if one["name"] == wanted), current)
    return str(chosen.get("context", {}).get("namespace") or "default")


def _why(status: int, body: bytes) -> str:
    """The API server's own words, if they can be read."""
    try:
        told = msgspec.json.decode(body, type=Status).message
    except (msgspec.DecodeError, UnicodeDecodeError):
        told = ""
    return told[:_LONGEST_WHY] or f"the API server answered with status {status}"


def _no_answer(error: BaseException) -> str:
    if isinstance(error, asyncio.TimeoutError):
        return "the API server does not answer in time"
    return f"the API server cannot be reached: {error or type(error).__name__}"
