"""A fake: the API server of `kubernetes_server`, with what kubectl asks of one, Services and their proxy.

The proxy passes requests on as the real one does, without `Authorization`.
"""

import json
from typing import Any

import aiohttp
import yaml
from aiohttp import web

from tests.kubernetes_server import FakeApiServer, failure

NAMESPACE = "llm"
LABELS = {"app.kubernetes.io/name": "headrace", "app.kubernetes.io/instance": "demo"}
_DISCOVERY: dict[str, Any] = {
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
    "/api/v1": {
        "kind": "APIResourceList",
        "groupVersion": "v1",
        "resources": [
            {"name": name, "singularName": kind.lower(), "kind": kind, "namespaced": True, "verbs": ["get", "list"]}
            for name, kind in (("services", "Service"), ("pods", "Pod"))
        ],
    },
}


class FakeCluster(FakeApiServer):
    """One whose Services named `NAME:PORT` lead to the URLs in `behind`."""

    def __init__(self) -> None:
        super().__init__()
        self.behind: dict[str, str] = {}

    def kubeconfig(self) -> str:
        """One whose context has the namespace `NAMESPACE`, and another context without any server."""
        context = {"cluster": "here", "user": "me", "namespace": NAMESPACE}
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "here",
            "clusters": [
                {"name": "here", "cluster": {"server": self.url}},
                {"name": "away", "cluster": {"server": "http://127.0.0.1:1"}},
            ],
            "users": [{"name": "me", "user": {"token": "sesame"}}],
            "contexts": [
                {"name": "here", "context": context}, {"name": "away", "context": {**context, "cluster": "away"}},
            ],
        }  # fmt: skip
        return yaml.safe_dump(config)

    def put_service(self, name: str, url: str | None = None, *, tls: bool = False, namespace: str = NAMESPACE) -> None:
        """An admin Service as the chart makes it, which leads to `url`."""
        port = {"name": "admin", "port": 9090, "appProtocol": "https" if tls else "http"}
        selector = {**LABELS, "app.kubernetes.io/component": "gateway"}
        labels = {**LABELS, "app.kubernetes.io/component": "admin"}
        metadata = {"name": name, "namespace": namespace, "labels": labels}
        spec = {"selector": selector, "ports": [port]}
        self.put("services", {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec})
        if url is not None:
            self.behind[f"{'https:' if tls else ''}{name}:9090"] = url

    def put_gateway(self, name: str, *, ready: bool) -> None:
        """A gateway's pod."""
        labels = {**LABELS, "app.kubernetes.io/component": "gateway"}
        conditions = [{"type": "Ready", "status": str(ready)}]
        metadata = {"name": name, "namespace": NAMESPACE, "labels": labels}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": {"conditions": conditions}}
        self.put("pods", pod)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path in _DISCOVERY:
            return web.json_response(_DISCOVERY[request.path])
        before, proxy, path = request.path.partition("/proxy/")
        if proxy:
            return await self._pass_on(request, before.rsplit("/", 1)[1], path)
        if not request.path.startswith("/api/v1/namespaces/"):
            return web.Response(status=404)
        answer = await super()._answer(request)
        if isinstance(answer, web.Response) and answer.status == 200:  # kubectl wants all of it, discovery does not
            body = json.loads(answer.text or "")
            if body["kind"] == "List":
                body |= {"apiVersion": "v1", "items": body["items"] or []}
            return web.json_response(body)
        return answer

    async def _pass_on(self, request: web.Request, service: str, path: str) -> web.Response:
        verb = {"GET": "get", "POST": "create"}[request.method]
        if f"services/proxy {verb}" in self.refused:
            what = f'services "{service}" is forbidden: User "me" cannot {verb} resource "services/proxy"'
            return failure(403, f'{what} in API group "" in the namespace "{NAMESPACE}"')
        if service not in self.behind:
            return failure(503, f'no endpoints available for service "{service}"')
        headers = {key: value for key, value in request.headers.items() if key.lower().startswith("x-headrace")}
        body = await request.read()
        url = f"{self.behind[service]}/{path}"
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, url, data=body or None, headers=headers) as response,
        ):
            content = await response.read()
            return web.Response(body=content, status=response.status, content_type=response.content_type)
