"""A fake: an API server made for tests of discovery, of which it has only what discovery asks for.

It keeps the promises of the Kubernetes API about lists, watches and resourceVersions over real HTTP, as far as they are
written down here, and it breaks when it is told to. That the real one keeps them the same way is for `tests/kube`
to show.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Self

from aiohttp import web

from headrace.local.ports import free_ports

Json = dict[str, Any]

LEASES = "coordination.k8s.io/v1/leases"
INFERENCE_POOLS = "inference.networking.k8s.io/v1/inferencepools"


class _Change(NamedTuple):
    version: int
    kind: str
    before: Json | None
    after: Json | None


class FakeApiServer:
    """One on a loopback port of its own; `kind` is `pods`, `nodes`, `LEASES` or `INFERENCE_POOLS`."""

    def __init__(self) -> None:
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self.requests: list[str] = []
        """Of lists and watches, `KIND list|watch`."""
        self.refused: set[str] = set()
        """Kinds that nobody may read."""
        self.page_items = 500
        self._objects: dict[str, dict[str, Json]] = {}
        self._changes: list[_Change] = []
        self._version = 100
        self._oldest = 0
        self._news = asyncio.Condition()
        self._watches: set[asyncio.Task[Any]] = set()
        self._runner: web.AppRunner | None = None
        self._tell_gone = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listens, again if it was stopped; it forgets nothing meanwhile."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def stop(self) -> None:
        """Breaks every connection and listens no more."""
        self.cut()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def cut(self) -> None:
        """Breaks off every watch in the middle of a line."""
        for task in self._watches:
            task.cancel()

    def forget(self) -> None:
        """Compacts its history: no version before now can be watched any more, and open watches are told so."""
        self._oldest = self._version
        self._tell_gone = True
        self._notify()

    @contextmanager
    def refusing(self, kind: str) -> Iterator[None]:
        """Answers 403 for a kind meanwhile."""
        self.refused.add(kind)
        try:
            yield
        finally:
            self.refused.discard(kind)

    def put(self, kind: str, object_: Json) -> None:
        """Creates or replaces an object."""
        key = _key(object_)
        self._version += 1
        object_["metadata"]["resourceVersion"] = str(self._version)
        before = self._objects.setdefault(kind, {}).get(key)
        self._objects[kind][key] = object_
        self._changes.append(_Change(self._version, kind, before, object_))
        self._notify()

    def delete(self, kind: str, name: str, namespace: str = "") -> None:
        """Deletes an object at once."""
        self._version += 1
        before = self._objects[kind].pop(f"{namespace}/{name}")
        self._changes.append(_Change(self._version, kind, before, None))
        self._notify()

    def object(self, kind: str, name: str, namespace: str) -> Json:
        """An object as it stands."""
        return self._objects[kind][f"{namespace}/{name}"]

    def _notify(self) -> None:
        async def notify() -> None:
            async with self._news:
                self._news.notify_all()

        task = asyncio.ensure_future(notify())
        self._pending = task

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        kind, namespace, name = _target(request.path)
        if kind in self.refused:
            return failure(403, f"{kind} is forbidden: User fake cannot list it")
        query = request.query
        if request.method in ("POST", "PUT"):
            return self._write(kind, namespace, await request.json(), create=request.method == "POST")
        if name:
            found = self._objects.get(kind, {}).get(f"{namespace}/{name}")
            return web.json_response(found) if found is not None else failure(404, f"{kind} {name} not found")
        self.requests.append(f"{kind} {'watch' if query.get('watch') else 'list'}")
        if query.get("watch"):
            return await self._watch(request, kind, namespace)
        return self._list(kind, namespace, query)

    def _write(self, kind: str, namespace: str, object_: Json, *, create: bool) -> web.Response:
        object_["metadata"]["namespace"] = namespace
        there = self._objects.get(kind, {}).get(_key(object_))
        if create and there is not None:
            return failure(409, "already exists")
        if not create:
            if there is None:
                return failure(404, "not found")
            if there["metadata"]["resourceVersion"] != object_["metadata"].get("resourceVersion"):
                return failure(409, "the object has been modified")
        self.put(kind, object_)
        return web.json_response(object_, status=201 if create else 200)

    def _list(self, kind: str, namespace: str, query: Mapping[str, str]) -> web.Response:
        if token := query.get("continue"):
            version, first = map(int, token.split("."))
            if version < self._oldest:
                return failure(410, "The provided continue parameter is too old")
        else:
            version, first = self._version, 0
        state = {
            key: one for key, one in sorted(self._objects.get(kind, {}).items()) if _selected(one, namespace, query)
        }
        for change in reversed(self._changes):  # back to the version of the first page
            if change.version <= version:
                break
            if change.kind == kind and (one := change.after or change.before) is not None:
                state.pop(_key(one), None)
                if change.before is not None and _selected(change.before, namespace, query):
                    state[_key(one)] = change.before
        items = [state[key] for key in sorted(state)]
        end = first + min(int(query.get("limit", "500")), self.page_items)
        metadata: Json = {"resourceVersion": str(version)}
        if end < len(items):
            metadata["continue"] = f"{version}.{end}"
        return web.json_response({"kind": "List", "metadata": metadata, "items": items[first:end] or None})

    async def _watch(self, request: web.Request, kind: str, namespace: str) -> web.StreamResponse:
        at = int(request.query["resourceVersion"])
        if at < self._oldest:
            return failure(410, f"too old resource version: {at} ({self._oldest})")
        self._tell_gone = False
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        task = asyncio.current_task()
        assert task is not None
        self._watches.add(task)
        try:
            with suppress(TimeoutError, ConnectionError):  # the last: the client has gone
                async with asyncio.timeout(float(request.query["timeoutSeconds"])):
                    while True:
                        if self._tell_gone and at <= self._oldest:
                            gone = json.loads(failure(410, "too old resource version").body or b"")  # type: ignore[arg-type]
                            await response.write(_line("ERROR", gone))
                            return response
                        for change in [one for one in self._changes if one.version > at]:
                            at = change.version
                            if change.kind == kind and (told := _told(change, namespace, request.query)) is not None:
                                await response.write(_line(*told))
                        async with self._news:
                            while self._version <= at and not self._tell_gone:
                                await self._news.wait()
            with suppress(ConnectionError):
                await response.write(_line("BOOKMARK", {"metadata": {"resourceVersion": str(at)}}))
                await response.write_eof()
        except asyncio.CancelledError:
            if request.transport is not None:
                await response.write(b'{"type": "MODIFIED", "object": {"metad')
                request.transport.abort()
            raise
        finally:
            self._watches.discard(task)
        return response


def _target(path: str) -> tuple[str, str, str]:
    """Kind, namespace and name of a path of the API."""
    parts = path.strip("/").split("/")
    group = "/".join(parts[1:3]) + "/" if parts[0] == "apis" else ""
    rest = parts[3:] if group else parts[2:]
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    return group + rest[0], namespace, rest[1] if len(rest) > 1 else ""


def _told(change: _Change, namespace: str, query: Mapping[str, str]) -> tuple[str, Json] | None:
    """What a watch with such selectors is told of a change."""
    before = change.before if change.before is not None and _selected(change.before, namespace, query) else None
    after = change.after if change.after is not None and _selected(change.after, namespace, query) else None
    if after is not None:
        return ("MODIFIED" if before is not None else "ADDED"), after
    if before is not None:
        last = change.after or before
        return "DELETED", {**last, "metadata": {**last["metadata"], "resourceVersion": str(change.version)}}
    return None


def _selected(object_: Json, namespace: str, query: Mapping[str, str]) -> bool:
    metadata = object_["metadata"]
    if namespace and metadata.get("namespace") != namespace:
        return False
    wanted = query.get("fieldSelector", "")
    if wanted and wanted != f"metadata.name={metadata['name']}":
        return False
    labels = metadata.get("labels", {})
    for term in filter(None, query.get("labelSelector", "").split(",")):
        key, _, value = term.partition("=")
        if labels.get(key) != value:
            return False
    return True


def _key(object_: Json) -> str:
    return f"{object_['metadata'].get('namespace', '')}/{object_['metadata']['name']}"


def _line(type_: str, object_: Json) -> bytes:
    return json.dumps({"type": type_, "object": object_}).encode() + b"\n"


def failure(code: int, message: str) -> web.Response:
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": code,
        "message": message,
        "reason": "Fake",
    }
    return web.json_response(body, status=code)
