"""How `kubectl headrace` reaches gateways: through the API server's service proxy, by kubectl itself.

kubectl knows every way to sign in (client certificates, exec plugins, OIDC) and is there wherever a plugin of it
runs, so this needs neither a Kubernetes client nor its 51 MB. `kubectl get --raw` cannot send a header, and the admin
token is one of its own, since the API server keeps `Authorization`; so `kubectl proxy` runs for as long as a command
does. Whoever reaches that proxy acts with the caller's rights. Hence it listens on a socket in a folder that only the
caller can open, not on a port that everybody on the machine can, and passes on requests to the one Service only.

kubectl's standard error is the caller's: what a sign-in asks and why something failed is shown as kubectl says it.
"""

import contextlib
import json
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from headrace.cli.admin_client import UNIX_SCHEME, AdminError

LABELS = "app.kubernetes.io/name=headrace,app.kubernetes.io/component=admin"
"""Of the chart's Service for the admin port."""
PORT = "admin"
START_S = 10.0
END_S = 2.0
REQUEST_TIMEOUT = "--request-timeout=20s"


@dataclass(slots=True, frozen=True)
class AdminService:
    """The Service in front of the admin ports of a fleet's gateways."""

    name: str
    namespace: str
    selector: dict[str, str]
    address: str
    """`[https:]NAME:PORT`, as in the path of the service proxy."""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/services/{self.address}/proxy"


@dataclass(slots=True, frozen=True)
class Cluster:
    """A cluster, by what kubectl is told about it; what is empty is as kubectl has it."""

    kubeconfig: str = ""
    context: str = ""
    namespace: str = ""

    def service(self, name: str) -> AdminService:
        """The Service of that name, else the only one that is labelled as the chart's. Raises `AdminError`."""
        where = f"namespace {self.namespace}" if self.namespace else "the namespace of the context"
        if name:
            return _admin_service(self._get(f"the Service {name} in {where}", "service", name))
        items = self._get(f"Services in {where}", "services", f"--selector={LABELS}")["items"]
        if not items:
            raise AdminError(
                f"There is no Service of headrace's chart in {where}: give another with -n, or a --service."
            )
        if len(items) > 1:
            names = ", ".join(sorted(item["metadata"]["name"] for item in items))
            raise AdminError(f"There are several fleets in {where}: say --service with one of {names}.")
        return _admin_service(items[0])

    def gateways(self, service: AdminService) -> dict[str, bool]:
        """The gateways' pods, and whether each is ready. Raises `AdminError`."""
        labels = ",".join(f"{key}={value}" for key, value in service.selector.items())
        items = self._get("the gateways' pods", "pods", f"--namespace={service.namespace}", f"--selector={labels}")[
            "items"
        ]
        return {
            item["metadata"]["name"]: any(
                condition["type"] == "Ready" and condition["status"] == "True"
                for condition in item.get("status", {}).get("conditions", ())
            )
            for item in items
        }

    @contextlib.contextmanager
    def reached(self, service: AdminService) -> Iterator[str]:
        """The URL of its admin API, meanwhile. Raises `AdminError`."""
        with tempfile.TemporaryDirectory(prefix="headrace-") as folder:  # which nobody else may enter
            socket = Path(folder, "proxy")
            only = f"--accept-paths=^{re.escape(service.path)}/"
            command = [*self._kubectl(), "proxy", f"--unix-socket={socket}", only]
            with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
                try:
                    _wait_until_it_serves(process)
                    yield f"{UNIX_SCHEME}://{quote(str(socket), safe='')}{service.path}"
                finally:
                    process.terminate()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(END_S)
                    process.kill()

    def _get(self, what: str, *arguments: str) -> dict[str, Any]:
        command = [*self._kubectl(), "get", *arguments, "--output=json", REQUEST_TIMEOUT]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
        if done.returncode:
            raise AdminError(f"kubectl cannot get {what}, and says above why: check --kubeconfig, --context and -n.")
        got: dict[str, Any] = json.loads(done.stdout)
        return got

    def _kubectl(self) -> list[str]:
        kubectl = shutil.which("kubectl")
        if kubectl is None:
            raise AdminError(
                "kubectl is not on the PATH: install it, or give a gateway's admin address with --address."
            )
        given = {"kubeconfig": self.kubeconfig, "context": self.context, "namespace": self.namespace}
        return [kubectl, *(f"--{option}={value}" for option, value in given.items() if value)]


def _admin_service(object_: dict[str, Any]) -> AdminService:
    metadata, spec = object_["metadata"], object_["spec"]
    ports = spec.get("ports", [])
    port = ports[0] if len(ports) == 1 else next((one for one in ports if one.get("name") == PORT), None)
    if port is None:
        raise AdminError(f"The Service {metadata['name']} has no port named {PORT}: name another with --service.")
    scheme = "https:" if port.get("appProtocol") == "https" else ""
    address = f"{scheme}{metadata['name']}:{port['port']}"
    return AdminService(metadata["name"], metadata["namespace"], spec.get("selector") or {}, address)


def _wait_until_it_serves(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdout is not None
    late = threading.Timer(START_S, process.kill)
    late.start()
    try:
        if not process.stdout.readline():  # `Starting to serve on ...`
            raise AdminError(f"kubectl proxy has not started within {START_S:g} s, or says above why it cannot.")
    finally:
        late.cancel()
